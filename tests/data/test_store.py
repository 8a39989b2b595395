"""Data sets come back from disk unchanged; whatever goes wrong, there is a complete data set or none."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.manifest import MANIFEST, read_manifest
from tcnca.data.schema import Column, Columns, Kind, Ragged, concatenate, take
from tcnca.data.store import Dataset, DatasetWriter, check_space
from tcnca.errors import DataError
from tests.data.helpers import ragged, siblings, small_dataset, write_dataset

FULL = Path("/dev/full")


def assert_equal(found: Column, expected: Column) -> None:
    assert isinstance(found, Ragged) == isinstance(expected, Ragged)
    if isinstance(found, Ragged) and isinstance(expected, Ragged):
        assert_equal(found.values, expected.values)
        assert_equal(found.offsets, expected.offsets)
    elif isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def random(dtype: str, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


def mapped(array: NDArray[Any]) -> bool:
    """Whether an array is a view of a file."""
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    return base is not None


COLUMNS: dict[str, tuple[Kind, Columns]] = {
    "bytes": ("language", {"bytes": random("uint8", 11)}),
    "tokens": ("classification", {"tokens": random("uint8", 11, 5), "labels": random("int64", 11) % 3}),
    "pixels": ("classification", {"pixels": random("uint8", 11, 4, 3), "labels": random("int64", 11) % 3}),
    "values": ("classification", {"values": random("float32", 11, 4, 3), "labels": random("int64", 11) % 3}),
    "targets": ("regression", {"values": random("float32", 11, 4, 3), "targets": random("float32", 11, 2)}),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_round_trip_of_arrays(tmp_path: Path, name: str) -> None:
    kind, columns = COLUMNS[name]
    parts = [take(columns, np.arange(*ends)) for ends in ((0, 4), (4, 4), (4, 11))]
    data = write_dataset(tmp_path / "set", {"train": parts}, kind=kind, class_names=list("abc"))
    assert_equal(data.columns("train")[name], columns[name])


@pytest.mark.parametrize(("name", "dtype", "row"), [("tokens", "uint8", ()), ("values", "float32", (3,))])
def test_round_trip_of_sequences(tmp_path: Path, name: str, dtype: str, row: tuple[int, ...]) -> None:
    sequences = [random(dtype, length, *row) for length in (3, 0, 5, 1, 0)]
    parts: list[Columns] = [
        {name: ragged(some), "labels": np.zeros(len(some), np.int64)}
        for some in (sequences[:2], sequences[1:2], sequences[2:])
    ]
    data = write_dataset(tmp_path / "set", {"train": parts}, kind="classification", class_names=["a"])
    assert_equal(data.columns("train")[name], concatenate(parts)[name])


def test_round_trip_of_empty_splits_and_sequences(tmp_path: Path) -> None:
    empty: dict[str, Column] = {"tokens": ragged([], np.uint8), "labels": np.zeros(0, np.int64)}
    hollow: dict[str, Column] = {"tokens": Ragged.from_bytes([b"", b""]), "labels": np.zeros(2, np.int64)}
    splits = {"train": [hollow], "test": [empty]}
    data = write_dataset(tmp_path / "set", splits, kind="classification", class_names=["a"])
    for split, columns in (("train", hollow), ("test", empty)):
        assert list(data.columns(split)) == ["tokens", "labels"]
        for name, column in columns.items():
            assert_equal(data.columns(split)[name], column)
    assert data.example("train", 1)["tokens"].shape == (0,)


def test_values_are_memory_mapped_and_read_only(tmp_path: Path) -> None:
    columns = small_dataset(tmp_path / "set").columns("train")
    tokens, labels = columns["tokens"], columns["labels"]
    assert isinstance(tokens, Ragged)
    assert isinstance(labels, np.ndarray)
    for array in (tokens.values, tokens.offsets, labels, tokens[2]):
        assert mapped(array)
        assert not array.flags.writeable


def test_data_set_appears_on_commit(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "set"
    # A killed process leaves this.
    (folder.parent / ".set.partial").mkdir(parents=True)
    (folder.parent / ".set.partial" / "train.labels.npy").touch()
    with DatasetWriter(folder) as writer:
        writer.append("train", {"bytes": np.arange(3, dtype=np.uint8)})
        assert not folder.exists()
        with pytest.raises(DataError, match=r"set: no prepared data set here; create one with `tcnca data prepare`"):
            Dataset.open(folder)
        writer.commit({"kind": "language"})
    assert Dataset.open(folder).example("train", 2) == {"bytes": 2}
    assert siblings(folder) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [False, True], ids=["new", "replacing"])
def test_error_keeps_the_old_data_set(tmp_path: Path, error: type[BaseException], before: bool) -> None:
    def parts() -> Iterator[Columns]:
        yield {"labels": np.arange(3) + 100}
        raise error

    folder = tmp_path / "set"
    if before:
        small_dataset(folder)
    with pytest.raises(error):
        write_dataset(folder, {"train": parts()})
    assert siblings(folder) == []
    assert folder.exists() == before
    if before:
        assert Dataset.open(folder).example("train", 0)["labels"] == 1


def test_replacement(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    small_dataset(folder)
    with DatasetWriter(folder) as writer:
        writer.append("train", {"bytes": np.arange(3, dtype=np.uint8)})
        assert Dataset.open(folder).example("train", 0)["labels"] == 1
        writer.commit({"kind": "language"})
    assert list(Dataset.open(folder).columns("train")) == ["bytes"]
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "train.bytes.npy"]
    assert siblings(folder) == []


def test_pickle_holds_the_path_only(tmp_path: Path) -> None:
    stream = np.arange(100_000).astype(np.uint8)
    data = write_dataset(tmp_path / "set", {"train": [{"bytes": stream}]}, kind="language")
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert mapped(again.columns("train")["bytes"])
    np.testing.assert_array_equal(again.columns("train")["bytes"], stream)


@pytest.mark.parametrize("name", ["train.labels.npy", "train.tokens.offsets.npy"])
@pytest.mark.parametrize("change", [-1000, 1])
def test_column_file_of_another_size_is_refused(tmp_path: Path, name: str, change: int) -> None:
    small_dataset(tmp_path / "set")
    path = tmp_path / "set" / name
    size = path.stat().st_size
    os.truncate(path, max(size + change, 0))
    message = rf"{name}: expected {size} bytes, got {max(size + change, 0)} bytes; prepare .* with --force"
    with pytest.raises(DataError, match=message):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("place", [0, 6, 8, 12, 40])
def test_column_file_with_a_damaged_header_is_refused(tmp_path: Path, place: int) -> None:
    small_dataset(tmp_path / "set")
    path = tmp_path / "set" / "train.labels.npy"
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train.labels.npy: .*prepare the data set again with --force"):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("text", [b"", b'{"format": 1, "spl', b"\xff\xfe"])
def test_damaged_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    small_dataset(tmp_path / "set")
    (tmp_path / "set" / MANIFEST).write_bytes(text)
    with pytest.raises(DataError, match=r"manifest.json: expected JSON.*; prepare the data set again with --force"):
        Dataset.open(tmp_path / "set")


LABELS = "train.labels.npy"
OFFSETS = "train.tokens.offsets.npy"
CHANGES: dict[str, tuple[tuple[str, ...], Any]] = {
    "no splits": (("splits",), None),
    "list of splits": (("splits",), []),
    "empty splits": (("splits",), {}),
    "no columns": (("splits", "train"), []),
    "parent folder": (("splits",), {"../other/train": ["labels"]}),
    "parent folder in a column": (("splits", "train"), ["../../other/labels"]),
    "absolute path": (("splits", "train"), ["/etc/passwd"]),
    "other split": (("splits", "other"), ["labels"]),
    "no files": (("files",), {}),
    "size as text": (("files", LABELS, "bytes"), "1"),
    "negative size": (("files", LABELS, "bytes"), -1),
    "negative shape": (("files", LABELS, "shape"), [-3]),
    "overflowing shape": (("files", LABELS, "shape"), [2**62, 2**62]),
    "object dtype": (("files", LABELS, "dtype"), "object"),
    "no such kind": (("kind",), "odd"),
    "other kind": (("kind",), "language"),
    "list as kind": (("kind",), []),
    "classes as number": (("class_names",), 7),
    "too few classes": (("class_names",), ["a"]),
    "symbols as numbers": (("symbols",), [1, 2]),
    "mean without std": (("mean",), 1.0),
    "request": (("request",), [1]),
    "data set": (("dataset",), 7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_manifest_that_does_not_describe_the_data_is_refused(tmp_path: Path, name: str) -> None:
    small_dataset(tmp_path / "set")
    path = tmp_path / "set" / MANIFEST
    manifest = place = read_manifest(path.parent)
    (*outer, last), value = CHANGES[name]
    for key in outer:
        place = place[key]
    place[last] = value
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DataError, match=r"set/.*: .*expected .*prepare the data set again with --force"):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("name", [OFFSETS, LABELS])
@pytest.mark.parametrize(
    "values",
    [[0, 5, 2, 8], [0, 3, 3, 2**40], [0, -3, 3, 8], [1, 3, 3, 8], [0, 8], [[0, 3], [3, 8]], [], [0.0, 3.0, 3.0, 8.0]],
    ids=str,
)
def test_offsets_and_labels_that_do_not_fit_are_refused(tmp_path: Path, name: str, values: list[Any]) -> None:
    small_dataset(tmp_path / "set")
    path, array = tmp_path / "set" / MANIFEST, np.array(values)
    np.save(tmp_path / "set" / name, array)
    manifest = read_manifest(path.parent)
    size = (tmp_path / "set" / name).stat().st_size
    manifest["files"][name] |= {"bytes": size, "dtype": str(array.dtype), "shape": array.shape}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(DataError, match=r"expected .*; prepare the data set again with --force"):
        Dataset.open(tmp_path / "set")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipe_as_manifest_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(DataError, match="no prepared data set here"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("found", ["{}", '{"format": 1}', '{"format": "2"}'])
def test_manifest_of_another_format_is_refused(tmp_path: Path, found: str) -> None:
    (tmp_path / MANIFEST).write_text(found, encoding="utf-8")
    with pytest.raises(DataError, match=r"manifest.json: expected format 2, got .*; prepare"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("other", [np.arange(3.0), np.arange(3, dtype=np.int32), np.zeros((3, 1), np.int64)], ids=str)
def test_part_of_another_type_or_shape_is_refused(tmp_path: Path, other: NDArray[Any]) -> None:
    with pytest.raises(DataError, match=r"labels.npy: expected rows of int64 \(\), got "):
        write_dataset(tmp_path / "set", {"train": [{"labels": np.arange(3)}, {"labels": other}]})
    unequal: Columns = {"tokens": Ragged.from_bytes([b"a"]), "labels": np.arange(2)}
    with pytest.raises(DataError, match="expected equally many examples"):
        write_dataset(tmp_path / "set", {"train": [unequal]})
    with pytest.raises(DataError, match="expected equally many examples"):
        write_dataset(tmp_path / "set", {"train": [{"labels": np.arange(3)}, {"other": np.arange(3)}]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("rows", [10, 1_000_000], ids=["at the end", "at once"])
@pytest.mark.parametrize("name", ["train.labels.npy", MANIFEST])
def test_full_disk(tmp_path: Path, name: str, rows: int) -> None:
    folder = tmp_path / "set"

    def parts() -> Iterator[Columns]:
        (tmp_path / ".set.partial" / name).symlink_to(FULL)
        yield {"labels": np.zeros(rows, np.int64), "tokens": Ragged.from_bytes([b"a"] * rows)}

    small_dataset(folder)
    with pytest.raises(DataError, match=r"set: the disk is full; free some space or choose another place"):
        write_dataset(folder, {"train": parts()})
    assert siblings(folder) == []
    assert Dataset.open(folder).example("train", 0)["labels"] == 1


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file.set: cannot be written .*; choose another place"):
        DatasetWriter(tmp_path / "file" / "set").__enter__()


def test_check_space(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "there" / "yet", 1000)
    with pytest.raises(
        DataError, match=r"yet: expected about 1000000000.0 GB of free space, got \d+\.\d GB; free some"
    ):
        check_space(tmp_path / "not" / "there" / "yet", 10**18)
    assert list(tmp_path.iterdir()) == []


def test_unknown_splits_and_examples(tmp_path: Path) -> None:
    data = small_dataset(tmp_path / "set")
    with pytest.raises(DataError, match="split: expected one of train for set, got 'validation'"):
        data.columns("validation")
    for index in (-1, 3):
        with pytest.raises(DataError, match=f"index: expected 0 to 2 for train of set, got {index}"):
            data.example("train", index)
