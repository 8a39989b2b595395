"""Sets come back from disk as they were; whatever goes wrong, there is a whole set or none."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, Ragged, join
from tcnca.data.store import MANIFEST, Dataset, SetWriter, read_manifest, replace_folder, restore_folder
from tcnca.errors import DataError
from tests.data.small_sets import beside, small, write

DTYPES = ["uint8", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "bool", ">i4", "complex64"]
ROWS: list[tuple[int, ...]] = [(), (1,), (3,), (2, 3), (4, 1, 2), (0,)]
# Is to be killed in the middle of writing.
KILLED = """
import sys, time
from pathlib import Path
import numpy as np
from tcnca.data.store import SetWriter
with SetWriter(Path(sys.argv[1])) as writer:
    for part in range(1000):
        writer.append("train", {"labels": np.full(5000, part)})
        if part == 3:
            print("written", flush=True)
            time.sleep(60)
"""


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


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_come_back_from_several_parts(tmp_path: Path, dtype: str, row: tuple[int, ...]) -> None:
    values = random(dtype, 11, *row)
    parts: list[Columns] = [{"values": values[:4]}, {"values": values[4:4]}, {"values": values[4:]}]
    found = write(tmp_path / "set", {"train": parts}).columns("train")["values"]
    assert_equal(found, values)


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_sequences_come_back_from_several_parts(tmp_path: Path, dtype: str, row: tuple[int, ...]) -> None:
    sequences = [random(dtype, length, *row) for length in (3, 0, 5, 1, 0)]
    parts: list[Columns] = [{"values": Ragged.of(some)} for some in (sequences[:2], sequences[1:2], sequences[2:])]
    found = write(tmp_path / "set", {"train": parts}).columns("train")["values"]
    assert_equal(found, join(parts)["values"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.lists(st.binary(max_size=4), max_size=4), min_size=1, max_size=3))
def test_any_texts_come_back(tmp_path: Path, parts: list[list[bytes]]) -> None:
    data = write(tmp_path / "set", {"test": [{"tokens": Ragged.of_bytes(part)} for part in parts]})
    texts = [text for part in parts for text in part]
    found = [data.example("test", index)["tokens"].tobytes() for index in range(len(texts))]
    assert found == texts


@pytest.mark.parametrize("view", ["turned", "stepped", "fortran"])
def test_views_come_back(tmp_path: Path, view: str) -> None:
    values = random("float32", 6, 4)
    column = {"turned": values.T[:, ::-1], "stepped": values[::2], "fortran": np.asfortranarray(values)}[view]
    found = write(tmp_path / "set", {"train": [{"values": column[:1]}, {"values": column[1:]}]}).columns("train")
    assert_equal(found["values"], column)


def test_empty_split_and_empty_sequences_come_back(tmp_path: Path) -> None:
    empty: dict[str, Column] = {"tokens": Ragged.of([], np.uint8), "values": np.zeros((0, 2, 3), np.float32)}
    hollow: dict[str, Column] = {"tokens": Ragged.of_bytes([b"", b""]), "values": np.zeros((2, 2, 3), np.float32)}
    data = write(tmp_path / "set", {"train": [hollow], "test": [empty]})
    for split, columns in (("train", hollow), ("test", empty)):
        assert list(data.columns(split)) == ["tokens", "values"]
        for name, column in columns.items():
            assert_equal(data.columns(split)[name], column)
    assert data.example("train", 1)["tokens"].shape == (0,)


def test_set_knows_its_name_facts_and_order_of_splits(tmp_path: Path) -> None:
    part: list[Columns] = [{"labels": np.arange(2)}]
    data = write(tmp_path / "some set", {"train": part, "test": part}, kind="language", num_classes=["ä", "b"])
    assert data.name == "some set"
    assert list(data.splits) == ["train", "test"]
    assert data.manifest["kind"] == "language"
    assert read_manifest(tmp_path / "some set")["class_names"] == ["ä", "b"]


def test_files_can_be_read_without_the_library(tmp_path: Path) -> None:
    small(tmp_path / "set")
    assert np.load(tmp_path / "set" / "train.labels.npy").tolist() == [1, 2, 3]
    assert np.load(tmp_path / "set" / "train.tokens.npy").tobytes() == b"abcdefgh"
    assert np.load(tmp_path / "set" / "train.tokens.offsets.npy").tolist() == [0, 3, 3, 8]


def test_values_are_mapped_and_cannot_be_changed(tmp_path: Path) -> None:
    columns = small(tmp_path / "set").columns("train")
    tokens, labels = columns["tokens"], columns["labels"]
    assert isinstance(tokens, Ragged)
    assert isinstance(labels, np.ndarray)
    for array in (tokens.values, tokens.offsets, labels, tokens[2]):
        assert mapped(array)
        assert not array.flags.writeable


def test_opening_reads_no_values(tmp_path: Path) -> None:
    """A file of 64 GiB, nearly all of it a hole, opens like any other."""
    folder = tmp_path / "set"
    small(folder)
    path, rows = folder / "train.labels.npy", 1 << 33
    with path.open("r+b") as file:
        header = file.read(128).replace(b"(3,)", f"({rows},)".encode())
        file.seek(0)
        file.write(header[:127].rstrip(b" ").ljust(127) + b"\n")
        file.truncate(128 + 8 * rows)
    manifest = read_manifest(folder)
    manifest["files"]["train.labels.npy"] |= {"bytes": path.stat().st_size, "shape": [rows]}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    labels = Dataset.open(folder).columns("train")["labels"]
    assert len(labels) == rows
    assert [int(labels[index]) for index in (0, 1, 2, rows - 1)] == [1, 2, 3, 0]


def test_nothing_is_there_before_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "set"
    with SetWriter(folder) as writer:
        writer.append("train", {"labels": np.arange(3)})
        assert not folder.exists()
        with pytest.raises(DataError, match=r"set: no prepared set is there; `tcnca data prepare` makes one"):
            Dataset.open(folder)
        writer.finish({})
    assert Dataset.open(folder).example("train", 2) == {"labels": 2}
    assert beside(folder) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [False, True], ids=["new", "replacing"])
def test_block_that_is_left_leaves_what_was_there(tmp_path: Path, error: type[BaseException], before: bool) -> None:
    def parts() -> Iterator[Columns]:
        yield {"labels": np.arange(3) + 100}
        raise error

    folder = tmp_path / "set"
    if before:
        small(folder)
    with pytest.raises(error):
        write(folder, {"train": parts()})
    assert beside(folder) == []
    assert folder.exists() == before
    if before:
        assert Dataset.open(folder).example("train", 0)["labels"] == 1


def test_block_that_ends_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with SetWriter(tmp_path / "set") as writer:
        writer.append("train", {"labels": np.arange(3)})
    assert list(tmp_path.iterdir()) == []


def test_facts_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write(tmp_path / "set", {"train": [{"labels": np.arange(3)}]}, function=print)
    assert list(tmp_path.iterdir()) == []


def test_old_set_is_replaced_by_a_whole_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    small(folder)
    with SetWriter(folder) as writer:
        writer.append("test", {"targets": np.arange(3) + 100})
        assert Dataset.open(folder).example("train", 0)["labels"] == 1
        writer.finish({})
    assert list(Dataset.open(folder).splits) == ["test"]
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "test.targets.npy"]
    assert beside(folder) == []


def test_set_that_is_open_stays_readable_when_it_is_replaced(tmp_path: Path) -> None:
    old = small(tmp_path / "set", label=1)
    new = small(tmp_path / "set", label=50)
    assert [int(data.example("train", 2)["labels"]) for data in (old, new)] == [3, 52]


def test_killed_writer_leaves_no_set_and_the_next_one_works(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer.stdout as output:
        assert output.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    assert beside(folder) == [".set.partial"]
    for place in (folder, tmp_path / ".set.partial"):
        with pytest.raises(DataError, match="no prepared set is there"):
            Dataset.open(place)
    assert small(folder).example("train", 2)["labels"] == 3
    assert beside(folder) == []


class Killed(BaseException):
    """Ends a function where a signal would have ended the process."""


def killed_at_second_rename(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
    rename, calls = Path.rename, list[Path]()

    def once(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", once)
        with pytest.raises(Killed):
            function()


def test_old_set_comes_back_after_a_kill_between_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, new = tmp_path / "set", tmp_path / "new"
    small(folder, label=1)
    small(new, label=50)
    killed_at_second_rename(monkeypatch, lambda: replace_folder(new, folder))
    assert not folder.exists()
    restore_folder(folder)
    assert Dataset.open(folder).example("train", 0)["labels"] == 1
    replace_folder(new, folder)
    assert Dataset.open(folder).example("train", 0)["labels"] == 50
    assert beside(folder) == []


def test_next_writer_that_fails_brings_the_old_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    small(folder)
    killed_at_second_rename(monkeypatch, lambda: small(folder, label=50))
    assert not folder.exists()
    with SetWriter(folder):
        pass
    assert Dataset.open(folder).example("train", 0)["labels"] == 1
    assert beside(folder) == []


def test_restoring_never_touches_a_set_that_is_there(tmp_path: Path) -> None:
    small(tmp_path / "set", label=1)
    small(tmp_path / ".set.old", label=50)
    restore_folder(tmp_path / "set")
    assert Dataset.open(tmp_path / "set").example("train", 0)["labels"] == 1
    restore_folder(tmp_path / "no set")
    assert not (tmp_path / "no set").exists()


def test_set_is_sent_to_another_process_as_its_place(tmp_path: Path) -> None:
    data = write(tmp_path / "set", {"train": [{"values": np.arange(100_000)}]})
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert mapped(again.columns("train")["values"])
    np.testing.assert_array_equal(again.columns("train")["values"], np.arange(100_000))


def test_set_in_memory_is_sent_whole() -> None:
    data = pickle.loads(pickle.dumps(Dataset("tiny", {"kind": "language"}, {"train": {"bytes": np.arange(3)}})))
    assert (data.name, data.manifest) == ("tiny", {"kind": "language"})
    assert data.columns("train")["bytes"].tolist() == [0, 1, 2]
