"""Sets that are damaged or cannot be written: the error says what is wrong, and nothing incomplete is left."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.columns import Columns, Ragged
from tcnca.data.store import MANIFEST, Dataset, SetWriter, check_space, read_manifest
from tcnca.errors import DataError
from tests.data.small_sets import beside, small, write

FULL = Path("/dev/full")

needs_full_disk = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a disk that is always full")


@pytest.mark.parametrize("name", ["train.labels.npy", "train.tokens.npy", "train.tokens.offsets.npy"])
@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_column_file_of_another_size_is_refused(tmp_path: Path, name: str, change: int) -> None:
    small(tmp_path / "set")
    path = tmp_path / "set" / name
    size = path.stat().st_size
    os.truncate(path, max(size + change, 0))
    message = rf"{name}: has {max(size + change, 0)} bytes, the manifest says {size} bytes; prepare .* with --force"
    with pytest.raises(DataError, match=message):
        Dataset.open(tmp_path / "set")


def test_missing_column_file_is_named(tmp_path: Path) -> None:
    small(tmp_path / "set")
    (tmp_path / "set" / "train.tokens.npy").unlink()
    with pytest.raises(DataError, match=r"train.tokens.npy: is missing, the manifest says 136 bytes; prepare the set"):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("place", [0, 6, 8, 12, 40])
def test_column_file_with_a_damaged_header_is_refused(tmp_path: Path, place: int) -> None:
    small(tmp_path / "set")
    path = tmp_path / "set" / "train.labels.npy"
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train.labels.npy: .*prepare the set again with --force"):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("text", [b"", b"{", b'{"format": 1, "spl', b"\xff\xfe", b"\0" * 100])
def test_damaged_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    small(tmp_path / "set")
    (tmp_path / "set" / MANIFEST).write_bytes(text)
    with pytest.raises(DataError, match=r"manifest.json: cannot be read \(.*; prepare the set again with --force"):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("change", [{"splits": None}, {"splits": []}, {"files": None}, {"files": {}}], ids=str)
def test_manifest_that_lacks_what_it_should_hold_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    small(tmp_path / "set")
    path = tmp_path / "set" / MANIFEST
    path.write_text(json.dumps({**read_manifest(path.parent), **change}), encoding="utf-8")
    with pytest.raises(DataError, match=r"manifest.json: .*prepare the set again with --force"):
        Dataset.open(tmp_path / "set")


@pytest.mark.parametrize("found", ["{}", "[]", '"text"', '{"format": 2}', '{"format": "1"}'])
def test_manifest_of_another_format_is_refused(tmp_path: Path, found: str) -> None:
    (tmp_path / MANIFEST).write_text(found, encoding="utf-8")
    with pytest.raises(DataError, match=r"manifest.json: has format .*, this version of tcnca reads 1; prepare"):
        Dataset.open(tmp_path)


def test_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="set: has no split 'validation', it has train"):
        small(tmp_path / "set").columns("validation")


@pytest.mark.parametrize("index", [-1, 3, 1000])
def test_example_beyond_the_data_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(DataError, match=f"set: train has no example {index}, allowed is 0 to 2"):
        small(tmp_path / "set").example("train", index)


@pytest.mark.parametrize("other", [np.arange(3.0), np.arange(3, dtype=np.int32), np.zeros((3, 1), np.int64)], ids=str)
def test_part_of_another_type_or_shape_is_refused(tmp_path: Path, other: NDArray[Any]) -> None:
    with pytest.raises(DataError, match=r"labels.npy: got a part of .* after int64 \(\)"):
        write(tmp_path / "set", {"train": [{"labels": np.arange(3)}, {"labels": other}]})
    assert list(tmp_path.iterdir()) == []


OTHER_COLUMNS: dict[str, Columns] = {
    "missing": {"labels": np.arange(2)},
    "more": {"tokens": Ragged.of_bytes([b"a"]), "labels": np.arange(1), "more": np.arange(1)},
    "plain": {"tokens": np.zeros(1, np.uint8), "labels": np.arange(1)},
    "unequal": {"tokens": Ragged.of_bytes([b"a"]), "labels": np.arange(2)},
}


@pytest.mark.parametrize("other", OTHER_COLUMNS)
def test_part_of_other_columns_is_refused(tmp_path: Path, other: str) -> None:
    """The columns of the split would no longer be of equal length."""
    first: Columns = {"tokens": Ragged.of_bytes([b"a", b"b"]), "labels": np.arange(2)}
    with pytest.raises(DataError, match="train"):
        write(tmp_path / "set", {"train": [first, OTHER_COLUMNS[other]]})
    assert list(tmp_path.iterdir()) == []


@needs_full_disk
@pytest.mark.parametrize("rows", [10, 1_000_000], ids=["at the end", "at once"])
@pytest.mark.parametrize("name", ["train.labels.npy", "train.tokens.offsets.npy", MANIFEST])
def test_full_disk_is_named_and_nothing_is_left(tmp_path: Path, name: str, rows: int) -> None:
    folder = tmp_path / "set"

    def parts() -> Iterator[Columns]:
        (tmp_path / ".set.partial" / name).symlink_to(FULL)
        yield {"labels": np.zeros(rows, np.int64), "tokens": Ragged.of_bytes([b"a"] * rows)}

    small(folder)
    with pytest.raises(DataError, match=r"set: the disk is full; free some space .* --out"):
        write(folder, {"train": parts()})
    assert beside(folder) == []
    assert Dataset.open(folder).example("train", 0)["labels"] == 1


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file.set: cannot be written .*; choose another place with --out"):
        SetWriter(tmp_path / "file" / "set").__enter__()


def test_space_is_checked_where_the_set_will_be(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "there" / "yet", 1000)
    with pytest.raises(DataError, match=r"yet: needs about 1000000000.0 GB, the disk has \d+\.\d GB left; free some"):
        check_space(tmp_path / "not" / "there" / "yet", 10**18)
    assert list(tmp_path.iterdir()) == []
