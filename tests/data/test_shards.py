"""A generated set depends on its generator and seed alone: not on workers, interruptions or earlier runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest

from tcnca.data.columns import Column, Columns, count
from tcnca.data.generators import shards
from tcnca.data.generators.generator import Generator, shares
from tcnca.data.generators.listops import ListOps
from tcnca.data.generators.recall import Recall
from tcnca.data.generators.shards import SETTINGS, Plan, make, make_in_memory
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS
from tcnca.errors import DataError

SIZES = {"train": 60, "validation": 9, "test": 7}
SHORT = Recall(length=4, vocab_size=6)
LISTS = ListOps(shortest=20, longest=60, depth=4)
FULL = Path("/dev/full")
PAUSE = "TESTS_PAUSE"

Example = tuple[bytes, int]


@dataclasses.dataclass(frozen=True)
class Slow:
    """Takes its time, if the environment says so, so that it can be killed."""

    version: ClassVar[int] = 1

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """Those of `LISTS`."""
        time.sleep(float(os.environ.get(PAUSE, "0")))
        return LISTS.examples(draw, count)


@dataclasses.dataclass(frozen=True)
class Dying:
    """Ends its process, as a system out of memory does."""

    version: ClassVar[int] = 1

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """Only in the process of the tests itself."""
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        return SHORT.examples(draw, count)


def plan(generator: Generator = LISTS, seed: int = 0, shard: int = 16, **sizes: int) -> Plan:
    wanted = {**SIZES, **sizes}
    return Plan(generator=generator, seed=seed, sizes=wanted, share=shares(SIZES), shard=shard)


def silent(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def listed(columns: Columns) -> list[Example]:
    tokens, labels = columns["tokens"], columns["labels"]
    return [(tokens[index].tobytes(), int(labels[index])) for index in range(count(columns))]


def made(
    wanted: Plan, folder: Path, workers: int = 1, progress: Callable[[int, int], None] = silent
) -> dict[str, list[Example]]:
    """The examples of a set, split by split. Workers are started however little there is to do."""
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    with mock.patch.object(shards, "WORTH_WORKERS", -1.0):
        for split, columns in make(wanted, folder, workers, progress):
            splits[split] += listed(columns)
    return splits


def drawn(wanted: Plan) -> Iterator[Example]:
    """All examples, shard after shard."""
    number = 0
    while True:
        draw = CounterRNG(repr(wanted.generator), wanted.generator.version, wanted.seed, "set", number)
        yield from listed(wanted.generator.examples(draw, wanted.shard))
        number += 1


def expected(wanted: Plan) -> dict[str, list[Example]]:
    """The same set, one example after the other."""
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    met = set[bytes]()
    for example in drawn(wanted):
        if all(len(splits[split]) == wanted.sizes[split] for split in SPLITS):
            return splits
        if example[0] in met:
            continue
        met.add(example[0])
        place = int.from_bytes(hashlib.blake2b(example[0], digest_size=8).digest(), "little") / 2**64
        kept = wanted.share["train"], wanted.share["train"] + wanted.share["validation"]
        split = SPLITS[sum(place >= bound for bound in kept)]
        if len(splits[split]) < wanted.sizes[split]:
            splits[split].append(example)
    raise AssertionError


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Which shards are there, and since when."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.npz")}


@pytest.mark.parametrize("shard", [1, 7, 16, 500])
@pytest.mark.parametrize("generator", [LISTS, SHORT], ids=["sequences", "arrays"])
def test_set_is_what_drawing_one_by_one_gives(tmp_path: Path, generator: Generator, shard: int) -> None:
    """`SHORT` has only 117 different examples, of which two thirds are asked for."""
    wanted = plan(generator, shard=shard)
    splits = expected(wanted)
    assert made(wanted, tmp_path / "shards") == splits
    assert {split: listed(columns) for split, columns in make_in_memory(wanted).items()} == splits


@pytest.mark.parametrize("sizes", [{"train": 0}, {"validation": 0, "test": 0}, {"train": 1, "test": 1}], ids=str)
def test_sizes_are_exact_and_examples_different(tmp_path: Path, sizes: dict[str, int]) -> None:
    wanted = plan(SHORT, **sizes)
    splits = made(wanted, tmp_path / "shards")
    assert {split: len(examples) for split, examples in splits.items()} == wanted.sizes
    inputs = [tokens for examples in splits.values() for tokens, _ in examples]
    assert len(set(inputs)) == len(inputs) == sum(wanted.sizes.values())


def test_no_examples_can_be_asked_for(tmp_path: Path) -> None:
    nothing = plan(train=0, validation=0, test=0)
    assert made(nothing, tmp_path / "shards") == {split: [] for split in SPLITS}
    assert {split: listed(columns) for split, columns in make_in_memory(nothing).items()} == {s: [] for s in SPLITS}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_set_is_the_same_for_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    # Small enough to start workers only once.
    wanted = plan(validation=5, test=4)
    told = list[tuple[int, int]]()
    assert made(wanted, tmp_path / "shards", workers, lambda *step: told.append(step)) == expected(wanted)
    assert_progress(told)


def assert_progress(told: list[tuple[int, int]]) -> None:
    """It never falls, and ends where all is done."""
    assert told == sorted(told)
    assert all(0 <= done <= total for done, total in told)
    assert [total for _, total in told] == sorted(total for _, total in told)
    assert told[-1][0] == told[-1][1] > 1


@pytest.mark.parametrize("generator", [LISTS, SHORT], ids=["sequences", "arrays"])
def test_progress_only_rises(tmp_path: Path, generator: Generator) -> None:
    told = list[tuple[int, int]]()
    made(plan(generator), tmp_path / "shards", progress=lambda *step: told.append(step))
    assert_progress(told)
    assert told[0][0] == 0
    assert told[-1][1] == len(stamps(tmp_path / "shards"))
    again = list[tuple[int, int]]()
    made(plan(generator), tmp_path / "shards", progress=lambda *step: again.append(step))
    assert all(done == total for done, total in again)


# Started in a group of processes of its own, which can be ended whatever becomes of it.
RUN = """
import sys
from pathlib import Path
from tests.data.test_shards import Slow, made, plan
made(plan(Slow()), Path(sys.argv[1]), int(sys.argv[2]))
"""


@contextlib.contextmanager
def running(folder: Path, workers: int, shards: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that makes `plan(Slow())` and has made so many shards."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(workers)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, PAUSE: "0.3"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        patience = time.monotonic() + 60
        while len(stamps(folder)) < shards:
            assert process.poll() is None
            assert time.monotonic() < patience
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
def test_killed_run_is_continued(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    with running(folder, workers=1, shards=2) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    # What a kill in the middle of writing a shard leaves.
    (folder / ".000004.npz.1").write_bytes(b"PK")
    before = stamps(folder)
    assert 2 <= len(before) < 6
    assert made(plan(Slow()), folder) == expected(plan(Slow()))
    assert before.items() <= stamps(folder).items()
    assert len(stamps(folder)) >= 6


@pytest.mark.slow
def test_workers_end_when_their_run_is_killed(tmp_path: Path) -> None:
    """Their output ends when the last of them does."""
    with running(tmp_path / "shards", workers=2, shards=1) as process:
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 4)[0], "workers are still there"
        assert process.stdout.read() == b""


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_interrupted_twice_it_ends_at_once(tmp_path: Path, pause: float) -> None:
    with running(tmp_path / "shards", workers=2, shards=1) as process:
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(pause)
        assert process.wait(timeout=5) != 0
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 4)[0], "workers are still there"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupted_run_is_continued(tmp_path: Path, workers: int) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    folder = tmp_path / "shards"
    with pytest.raises(KeyboardInterrupt):
        made(plan(Slow()), folder, workers, interrupt)
    before = stamps(folder)
    assert len(before) >= 2
    assert {path.name for path in folder.iterdir()} == {*before, SETTINGS}
    assert made(plan(Slow()), folder) == expected(plan(Slow()))
    assert before.items() <= stamps(folder).items()


def test_no_workers_are_started_for_little_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", refuse)
    wanted = plan(Recall(length=8), train=200)
    found = dict.fromkeys(SPLITS, 0)
    for split, columns in make(wanted, tmp_path / "shards", 4, silent):
        found[split] += count(columns)
    assert found == dict(wanted.sizes)
    with pytest.raises(AssertionError, match="a pool was started"):
        made(plan(Recall(length=8), train=300), tmp_path / "shards", 4)


@pytest.mark.slow
def test_worker_that_dies_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="workers"):
        made(plan(Dying()), tmp_path / "shards", workers=2)
    assert stamps(tmp_path / "shards") == {}


@pytest.mark.parametrize("other", ["seed", "parameters", "shard", "version"])
def test_shards_of_another_set_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    folder = tmp_path / "shards"
    made(plan(Recall(length=8), train=200), folder)
    before = stamps(folder)
    if other == "version":
        monkeypatch.setattr(Recall, "version", 2)
    wanted = {
        "seed": plan(Recall(length=8), seed=1),
        "parameters": plan(Recall(length=10)),
        "shard": plan(Recall(length=8), shard=17),
        "version": plan(Recall(length=8)),
    }[other]
    assert made(wanted, folder) == expected(wanted)
    assert len(stamps(folder)) < len(before)
    assert not before.items() & stamps(folder).items()


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe"], ids=["missing", "empty", "cut", "binary"])
def test_shards_of_an_unknown_set_are_discarded(tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "shards"
    made(plan(seed=1), folder)
    before = stamps(folder)
    (folder / SETTINGS).unlink()
    if content is not None:
        (folder / SETTINGS).write_bytes(content)
    assert made(plan(), folder) == expected(plan())
    assert not before.items() & stamps(folder).items()


def test_larger_set_continues_and_begins_with_the_smaller(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    small = made(plan(), folder)
    before = stamps(folder)
    larger = plan(train=150, validation=20, test=20)
    large = made(larger, folder)
    assert before.items() < stamps(folder).items()
    assert large == expected(larger)
    for split in SPLITS:
        assert large[split][: SIZES[split]] == small[split]
    assert made(plan(), folder) == small


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "value": lambda data: flipped(data, data.index(b"tokens.npy") + 200),
    "fingerprint": lambda data: flipped(data, data.index(b"prints.npy") + 200),
    "flags": lambda data: flipped(data, data.index(b"PK\x01\x02") + 8),
    "method": lambda data: flipped(data, data.index(b"PK\x01\x02") + 10),
}


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "shards"
    made(plan(), folder)
    path = folder / "000001.npz"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DataError, match=r"000001.npz: is damaged \(.*\); remove it and run the same command again"):
        made(plan(), folder)
    path.unlink()
    assert made(plan(), folder) == expected(plan())


def test_too_few_different_examples_are_refused(tmp_path: Path) -> None:
    wanted = plan(SHORT, shard=500, train=1000)
    message = (
        r"Recall\(length=4, vocab_size=6\): .* wanted are still missing: there are too few different ones; ask for"
    )
    with pytest.raises(DataError, match=message):
        made(wanted, tmp_path / "shards")
    with pytest.raises(DataError, match=message):
        make_in_memory(wanted)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("generator", [LISTS, ListOps()], ids=["at the end", "at once"])
def test_full_disk_is_named_and_leaves_no_part_of_a_shard(tmp_path: Path, generator: ListOps) -> None:
    folder = tmp_path / "shards"

    def fill(done: int, total: int) -> None:
        if done == 2:
            (folder / f".000002.npz.{os.getpid()}").symlink_to(FULL)

    with pytest.raises(DataError, match=r"shards: the disk is full; free some space .* --out"):
        made(plan(generator), folder, progress=fill)
    assert sorted(path.name for path in folder.iterdir()) == ["000000.npz", "000001.npz", SETTINGS]
    assert made(plan(generator), folder) == expected(plan(generator))


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file.shards: cannot be written .*; choose another place with --out"):
        made(plan(), tmp_path / "file" / "shards")


def test_shards_hold_no_objects_that_run_code(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    made(plan(), folder)
    np.savez(folder / "000000.npz", prints=np.array([print], object))
    with pytest.raises(DataError, match=r"000000.npz: is damaged"):
        made(plan(), folder)
