"""Bytes of any file or folder, split and handed over part by part."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tcnca.data.custom import CustomOptions, read_custom, streams
from tcnca.data.schema import Content
from tcnca.errors import DataError


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _bytes(content: Content) -> dict[str, bytes]:
    found = {}
    for split, parts in content.splits.items():
        arrays = [np.asarray(part["bytes"]) for part in parts]
        assert all(array.dtype == np.uint8 and array.ndim == 1 for array in arrays)
        found[split] = b"".join(array.tobytes() for array in arrays)
    return found


def _noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def test_a_file_is_cut_in_three(tmp_path: Path) -> None:
    whole = _noise(1000)
    content = read_custom(_write(tmp_path, {"war.txt": whole}) / "war.txt")
    assert (content.kind, content.origin, content.verified, dict(content.metadata)) == (
        "language",
        "war.txt",
        False,
        {},
    )
    assert _bytes(content) == {"train": whole[:900], "validation": whole[900:950], "test": whole[950:]}


def test_parts_are_bounded_and_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PART", 64)
    files = {f"{number}.bin": _noise(50, number) for number in range(6)}
    train = read_custom(_write(tmp_path, files)).splits["train"]
    assert [len(part["bytes"]) for part in train] == [64, 64, 64, 64, 14]
    assert b"".join(np.asarray(part["bytes"]).tobytes() for part in train) == b"".join(files.values())[:270]


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
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


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = _write(tmp_path, {"a": _noise(100)}) / "a"
    content = read_custom(path)
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="a: has become shorter while it was read"):
        _bytes(content)


def test_few_files_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    files = {"b/z.txt": b"2" * 30, "b/a.bin": b"1" * 30, "a.txt": b"0" * 20, "c": b"3" * 20, "empty": b""}
    whole = b"0" * 20 + b"1" * 30 + b"2" * 30 + b"3" * 20
    found = _bytes(read_custom(_write(tmp_path, files)))
    assert found == {"train": whole[:90], "validation": whole[90:95], "test": whole[95:]}


def test_hidden_files_are_skipped(tmp_path: Path) -> None:
    files = {"a": b"a" * 50, ".hidden": b"x" * 50, ".git/config": b"x" * 50, "b/.DS_Store": b"x", "b/c": b"c" * 50}
    assert b"".join(_bytes(read_custom(_write(tmp_path, files))).values()) == b"a" * 50 + b"c" * 50


def test_named_files_and_folders_are_the_splits(tmp_path: Path) -> None:
    files = {"Training/b.txt": b"b1", "Training/a.txt": b"a1", "train-more": b"c1", "DEV.txt": b"d", "tests/x": b"x"}
    found = _bytes(read_custom(_write(tmp_path, files)))
    assert found == {"train": b"a1b1c1", "validation": b"d", "test": b"x"}


def test_missing_validation_is_the_end_of_training(tmp_path: Path) -> None:
    train = _noise(200)
    found = _bytes(read_custom(_write(tmp_path, {"train.txt": train, "test.txt": b"test"})))
    assert found == {"train": train[:190], "validation": train[190:], "test": b"test"}
    assert list(found) == ["train", "validation", "test"]


def test_a_stranger_among_splits_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, {"train": b"train", "test": b"test", "README": b"readme"})
    message = r"README: belongs to no split; begin its name with train, valid or test, .*, say which with --kind"
    with pytest.raises(DataError, match=message + r" \(in a recipe: data\.custom\.kind=…\)$"):
        read_custom(tmp_path)


def test_a_folder_that_merely_has_tests_is_not_split_by_name(tmp_path: Path) -> None:
    files = {"src/a.py": b"a" * 50, "tests/b.py": b"b" * 50}
    assert len(_bytes(read_custom(_write(tmp_path, files)))["train"]) == 90


def _many(folder: Path, count: int = 40) -> dict[str, bytes]:
    """Files whose content tells them apart."""
    files = {f"{number % 3}/{number}.txt": bytes([number]) * (100 + 7 * number) for number in range(count)}
    _write(folder, files)
    return files


def test_of_many_files_whole_ones_are_drawn(tmp_path: Path) -> None:
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


def test_files_are_drawn_by_seed_and_name_alone(tmp_path: Path) -> None:
    _many(tmp_path / "one")
    _many(tmp_path / "two")
    first, again = (_bytes(read_custom(tmp_path / folder)) for folder in ("one", "two"))
    assert first == again
    assert _bytes(read_custom(tmp_path / "one", CustomOptions(seed=1))) != first


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b""}, r"holds no bytes; a language model"),
        ({}, "holds no files that are not hidden"),
        ({".a": b"hidden"}, "holds no files that are not hidden"),
        ({"a": b"", "b": b""}, "holds no bytes"),
        ({"train": b"train", "valid": b"", "test": b"test"}, "holds no bytes for validation"),
        ({"valid": b"valid", "test": b"test"}, "has validation and test but nothing to train on"),
        ({"a": b"12345"}, "has 5 bytes, at least 6 are needed for train and validation and test"),
    ],
)
def test_nothing_to_learn_from(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_custom(_write(tmp_path, files))
