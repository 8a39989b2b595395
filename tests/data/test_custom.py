"""Your own files: the format is found from the files, what does not fit is refused, and bytes are read in parts."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnca.data.custom import CustomOptions, read_custom, streams
from tcnca.data.schema import Content, Kind
from tcnca.errors import DataError
from tests.data.helpers import write, zipped

TABLE = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(8))


def _make(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix in (".npy", ".npz"):
        arrays = {"values": np.arange(40.0).reshape(20, 2), "labels": np.arange(20) % 2}
        np.savez(path, **arrays) if path.suffix == ".npz" else np.save(path, arrays["values"])  # type: ignore[arg-type]
    else:
        path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv", "classification"),
        ("a.npz", "classification"),
        ("a.npy", "forecast"),
        ("a.txt", "language"),
        ("a", "language"),
        ("a.py", "language"),
    ],
)
def test_kind_of_a_file(tmp_path: Path, name: str, kind: Kind) -> None:
    assert read_custom(_make(tmp_path, name)).kind == kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["train.csv", "test.csv"], "classification"),
        (["train.npz", "test.npz"], "classification"),
        (["train.txt", "test.csv"], "language"),
        (["a.csv", "b.txt"], "language"),
        (["package.json", "main.js"], "language"),
    ],
)
def test_kind_of_a_folder(tmp_path: Path, names: list[str], kind: Kind) -> None:
    for name in names:
        _make(tmp_path, name)
    assert read_custom(tmp_path).kind == kind


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "a.npz",
            "pairs",
            r"needs tables \(.csv.*\), got other files; for these, use classification, regression, forecast",
        ),
        ("a.txt", "forecast", r"needs tables \(.*\) or arrays \(.*\), got other files; for these, use language"),
        ("a.txt", "classification", r"needs tables \(.*\) or arrays \(.*\), got other files; for these, use language"),
    ],
)
def test_kinds_that_the_files_do_not_support(tmp_path: Path, name: str, kind: Kind, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_custom(_make(tmp_path, name), CustomOptions(kind=kind))


def test_tables_and_arrays_together(tmp_path: Path) -> None:
    for name in ("train.csv", "train.npz"):
        _make(tmp_path, name)
    with pytest.raises(DataError, match="expected either tables or arrays, got both"):
        read_custom(tmp_path, CustomOptions(kind="classification"))
    (columns,) = read_custom(tmp_path, CustomOptions(kind="regression", targets="labels")).splits["train"]
    assert columns["values"].shape == (18, 2, 1)  # type: ignore[union-attr]


PACKED = "is compressed; unpack it, or give --kind language to model the compressed bytes$"


@pytest.mark.parametrize("kind", [None, "classification"])
@pytest.mark.parametrize("name", ["a.csv.gz", "app.log.GZ", "a.zst"])
def test_compressed_files_are_detected_by_suffix(tmp_path: Path, name: str, kind: Kind | None) -> None:
    path = _make(tmp_path, name)
    with pytest.raises(DataError, match=f"{name}: {PACKED}"):
        read_custom(path, CustomOptions(kind=kind))
    assert read_custom(path, CustomOptions(kind="language")).kind == "language"


@pytest.mark.parametrize("name", ["app.log", "app.csv"])
@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(TABLE.encode()),
        lzma.compress(TABLE.encode()),
        bz2.compress(TABLE.encode()),
        bz2.compress(b"", 1),
        zipped({"a.txt": TABLE.encode()}),
    ],
    ids=["gzip", "xz", "bzip2", "empty bzip2", "zip"],
)
def test_compressed_files_are_detected_by_content(tmp_path: Path, name: str, packed: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(packed)
    with pytest.raises(DataError, match=f"{name}: {PACKED}"):
        read_custom(path)
    content = read_custom(path, CustomOptions(kind="language"))
    assert b"".join(np.asarray(p["bytes"]).tobytes() for parts in content.splits.values() for p in parts) == packed


@pytest.mark.parametrize("text", ["BZh9 is how it begins.", "PK for short"])
def test_texts_that_start_like_archives(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert read_custom(tmp_path / "a.txt").kind == "language"


@pytest.mark.parametrize("kind", [None, "classification"])
@pytest.mark.parametrize("names", [["a.json"], ["A.JSON"], ["train.json", "test.json"]])
def test_json_is_refused(tmp_path: Path, names: list[str], kind: Kind | None) -> None:
    for name in names:
        (tmp_path / name).write_text('[{"text": "a", "label": 1}, {"text": "b", "label": 2}]')
    path = tmp_path / names[0] if len(names) == 1 else tmp_path
    message = r"(?i)\.json: expected one JSON object per line in a \.jsonl file, got \.json; .* model its bytes"
    with pytest.raises(DataError, match=message):
        read_custom(path, CustomOptions(kind=kind))
    assert read_custom(path, CustomOptions(kind="language")).kind == "language"


@pytest.mark.parametrize("option", ["text", "split", "values", "lengths"])
def test_options_that_do_not_apply_to_bytes(tmp_path: Path, option: str) -> None:
    chosen: dict[str, Any] = {option: "name"}
    with pytest.raises(DataError, match=f"--{option} 'name' does not apply to bytes .*; remove it"):
        read_custom(_make(tmp_path, "a.txt"), CustomOptions(**chosen))


def _bytes(content: Content) -> dict[str, bytes]:
    found = {}
    for split, parts in content.splits.items():
        arrays = [np.asarray(part["bytes"]) for part in parts]
        assert all(array.dtype == np.uint8 and array.ndim == 1 for array in arrays)
        found[split] = b"".join(array.tobytes() for array in arrays)
    return found


def _noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def test_splits_of_a_file(tmp_path: Path) -> None:
    whole = _noise(1000)
    content = read_custom(write(tmp_path, {"war.txt": whole}) / "war.txt")
    assert (content.kind, content.origin, content.verified, dict(content.metadata)) == (
        "language",
        "war.txt",
        False,
        {},
    )
    assert _bytes(content) == {"train": whole[:900], "validation": whole[900:950], "test": whole[950:]}


def test_parts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART", 64)
    files = {f"{number}.bin": _noise(100, number) for number in range(3)}
    train = read_custom(write(tmp_path, files)).splits["train"]
    assert [len(part["bytes"]) for part in train] == [64, 36, 64, 36, 64, 6]
    assert b"".join(np.asarray(part["bytes"]).tobytes() for part in train) == b"".join(files.values())[:270]


def test_large_file_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(16 * streams.PART)  # a hole, which takes no room on most disks
    tracemalloc.start()
    try:
        content = read_custom(path)
        sizes = {split: [len(part["bytes"]) for part in parts] for split, parts in content.splits.items()}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(sum, sizes.values())) == 16 * streams.PART
    assert max(map(max, sizes.values())) == streams.PART
    assert peak < 4 * streams.PART


def test_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": _noise(100)}) / "a"
    content = read_custom(path)
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="a: became shorter while it was read"):
        _bytes(content)


def test_few_files_are_concatenated_by_name(tmp_path: Path) -> None:
    files = {"b/z.txt": b"2" * 30, "b/a.bin": b"1" * 30, "a.txt": b"0" * 20, "c": b"3" * 20, "empty": b""}
    whole = b"0" * 20 + b"1" * 30 + b"2" * 30 + b"3" * 20
    found = _bytes(read_custom(write(tmp_path, files)))
    assert found == {"train": whole[:90], "validation": whole[90:95], "test": whole[95:]}


def test_hidden_files_are_skipped(tmp_path: Path) -> None:
    files = {"a": b"a" * 50, ".hidden": b"x" * 50, ".git/config": b"x" * 50, "b/.DS_Store": b"x", "b/c": b"c" * 50}
    assert b"".join(_bytes(read_custom(write(tmp_path, files))).values()) == b"a" * 50 + b"c" * 50


def test_validation_is_cut_from_the_end_of_training(tmp_path: Path) -> None:
    train = _noise(200)
    found = _bytes(read_custom(write(tmp_path, {"train.txt": train, "test.txt": b"test"})))
    assert found == {"train": train[:190], "validation": train[190:], "test": b"test"}
    assert list(found) == ["train", "validation", "test"]


def test_file_outside_the_splits_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"train": b"train", "test": b"test", "README": b"readme"})
    message = r"README: expected a name that starts with train, valid or test; .* or give --kind .*"
    with pytest.raises(DataError, match=message):
        read_custom(tmp_path)


def _many(folder: Path, count: int = 40) -> dict[str, bytes]:
    """Files whose content tells them apart."""
    files = {f"{number % 3}/{number}.txt": bytes([number]) * (100 + 7 * number) for number in range(count)}
    write(folder, files)
    return files


def test_whole_files_are_drawn_from_many(tmp_path: Path) -> None:
    files = _many(tmp_path)
    found = _bytes(read_custom(tmp_path))
    owner = {}
    for split, stream in found.items():
        for number in set(stream):
            assert number not in owner
            owner[number] = split
            assert stream.count(number) == 100 + 7 * number
        order = [name for name in sorted(files) if owner.get(files[name][0]) == split]
        assert stream == b"".join(files[name] for name in order)
    assert set(owner) == set(range(40))
    total, largest = sum(map(len, files.values())), max(map(len, files.values()))
    for split in ("validation", "test"):
        assert 0.05 * total - largest < len(found[split]) <= 0.05 * total + 1


def test_drawn_files_depend_on_seed_and_names_only(tmp_path: Path) -> None:
    _many(tmp_path / "one")
    _many(tmp_path / "two")
    first, again = (_bytes(read_custom(tmp_path / folder)) for folder in ("one", "two"))
    assert first == again
    assert _bytes(read_custom(tmp_path / "one", CustomOptions(seed=1))) != first


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b""}, r"expected files that are not empty; add text"),
        ({}, "expected visible files, got none"),
        ({".a": b"hidden"}, "expected visible files, got none"),
        ({"a": b"", "b": b""}, "expected files that are not empty"),
        ({"train": b"train", "valid": b"", "test": b"test"}, "expected files that are not empty for validation"),
        ({"valid": b"valid", "test": b"test"}, "expected a training split, got only validation and test"),
        ({"a": b"12345"}, "expected at least 6 bytes for train and validation and test, got 5"),
    ],
)
def test_too_little_data(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_custom(write(tmp_path, files))
