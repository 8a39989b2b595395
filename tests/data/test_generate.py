"""A generated data set depends on its generator and seed only: not on workers, interruptions or earlier runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
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
from hypothesis import given, settings
from hypothesis import strategies as st

from tcnca.data import generate as module
from tcnca.data import get_dataset
from tcnca.data.datasets.listops import ListOps
from tcnca.data.datasets.recall import Recall
from tcnca.data.generate import (
    SETTINGS,
    ExampleStream,
    Generator,
    Plan,
    assign_splits,
    fingerprints,
    generate,
    generate_in_memory,
    split_fractions,
)
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS, Column, Columns, Ragged, num_examples
from tcnca.errors import DataError
from tcnca.files import atomic_path
from tests.data.helpers import ragged

SIZES = {"train": 60, "validation": 9, "test": 7}
SHORT = Recall(length=4, vocab_size=6)
LISTS = ListOps(shortest=20, longest=60, depth=4)
FULL = Path("/dev/full")
PAUSE = "TESTS_PAUSE"
BLOCK = 8

Example = tuple[bytes, int]
each_generator = pytest.mark.parametrize("generator", [LISTS, SHORT], ids=["sequences", "arrays"])


@dataclasses.dataclass(frozen=True)
class Slow:
    """Pauses if the environment says so, so that it can be killed."""

    version: ClassVar[int] = 1

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate the examples of `LISTS`."""
        time.sleep(float(os.environ.get(PAUSE, "0")))
        return LISTS.examples(rng, count)


@dataclasses.dataclass(frozen=True)
class Dying:
    """Ends its worker process, as a system out of memory does."""

    version: ClassVar[int] = 1

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate examples in the main process only."""
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        return SHORT.examples(rng, count)


def plan(generator: Generator = LISTS, seed: int = 0, shard_size: int = 16, **sizes: int) -> Plan:
    wanted = {**SIZES, **sizes}
    fractions = split_fractions(SIZES)
    return Plan(generator=generator, seed=seed, sizes=wanted, fractions=fractions, shard_size=shard_size)


def listed(columns: Columns) -> list[Example]:
    tokens, labels = columns["tokens"], columns["labels"]
    return [(tokens[index].tobytes(), int(labels[index])) for index in range(num_examples(columns))]


def generated(
    wanted: Plan, folder: Path, workers: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, list[Example]]:
    """Return the examples of each split. Workers are started even for little work."""
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    with mock.patch.object(module, "MIN_PARALLEL_SECONDS", -1.0):
        for split, columns in generate(wanted, folder, workers, progress):
            splits[split] += listed(columns)
    return splits


def expected(wanted: Plan) -> dict[str, list[Example]]:
    """Return the same data set, computed one example at a time."""
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    seen = set[bytes]()
    for number in itertools.count():
        rng = CounterRNG(repr(wanted.generator), wanted.generator.version, wanted.seed, "set", number)
        for example in listed(wanted.generator.examples(rng, wanted.shard_size)):
            if example[0] in seen:
                continue
            seen.add(example[0])
            place = int.from_bytes(hashlib.blake2b(example[0], digest_size=8).digest(), "little") / 2**64
            bounds = wanted.fractions["train"], wanted.fractions["train"] + wanted.fractions["validation"]
            split = SPLITS[sum(place >= bound for bound in bounds)]
            if len(splits[split]) < wanted.sizes[split]:
                splits[split].append(example)
        if all(len(splits[split]) == wanted.sizes[split] for split in SPLITS):
            break
    return splits


def shards_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the shards that exist, with inode and time."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("0*.npz")}


# sha256 of the splits of 20 training examples of seed 3, and of examples 3 to 9 of the stream of seed 5. If these have
# to change, increase the version of the generator.
GOLDEN = {
    "listops": "d7aac43e7ace3559 d028c8ff5fff372e b0c829145a3bd0bb 42c69e1f80520b5d",
    "pathfinder": "18f01598cd0f1c18 3377cea580f71c3d c85f88d33ea24d7c ba9bf5f4f586575d",
    "pathx": "e4489bf93b2fa0ed df735144c18c8e34 1abe23c476fb600f",  # its stream would take seconds
    "recall-64-10": "4e75149761c6ac30 c8e3186b31d9a5c6 99a3b330e6ca1a09 1792f0997321fddf",
    "recall-1024-20": "c6edf04d8b1c6129 b82720a5bc688ec0 9f7eaa3f4d8ef159 fee5b40bb9f774d7",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_examples_of_a_seed_never_change(name: str) -> None:
    def digest(columns: Columns) -> str:
        found = hashlib.sha256()
        for column in columns.values():
            for array in (column.values, column.offsets) if isinstance(column, Ragged) else (column,):
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:16]

    spec = get_dataset(name)
    splits = generate_in_memory(dataclasses.replace(spec.plan(20, 3), shard_size=8))
    found = [digest(columns) for columns in splits.values()]
    if name != "pathx":
        found.append(digest(spec.stream().take(5, 3, 10)))
    assert found == GOLDEN[name].split()


@pytest.mark.parametrize("shard_size", [1, 16, 500])
@each_generator
def test_data_set_equals_the_naive_one(tmp_path: Path, generator: Generator, shard_size: int) -> None:
    """`SHORT` has only 117 different examples, of which two thirds are requested."""
    wanted = plan(generator, shard_size=shard_size)
    splits = expected(wanted)
    assert generated(wanted, tmp_path / "shards") == splits
    assert {split: listed(columns) for split, columns in generate_in_memory(wanted).items()} == splits


@pytest.mark.parametrize("sizes", [{"train": 0}, {"train": 1, "test": 1}, {"train": 0, "validation": 0, "test": 0}])
def test_sizes_are_exact_and_examples_distinct(tmp_path: Path, sizes: dict[str, int]) -> None:
    wanted = plan(SHORT, **sizes)
    splits = generated(wanted, tmp_path / "shards")
    assert {split: len(examples) for split, examples in splits.items()} == wanted.sizes
    inputs = [tokens for examples in splits.values() for tokens, _ in examples]
    assert len(set(inputs)) == len(inputs)


@pytest.mark.slow
def test_data_set_does_not_depend_on_workers(tmp_path: Path) -> None:
    # Small enough to start workers only once.
    wanted = plan(validation=5, test=4)
    calls = list[tuple[int, int]]()
    assert generated(wanted, tmp_path / "shards", 2, lambda *step: calls.append(step)) == expected(wanted)
    assert_progress(calls)


def assert_progress(calls: list[tuple[int, int]]) -> None:
    """Check that progress never decreases and ends at the total."""
    assert calls == sorted(calls)
    assert all(0 <= done <= total for done, total in calls)
    assert calls[-1][0] == calls[-1][1] > 1


# Started in its own process group, which can be killed as a whole.
RUN = """
import sys
from pathlib import Path
from tests.data.test_generate import Slow, generated, plan
generated(plan(Slow()), Path(sys.argv[1]), 2)
"""


@contextlib.contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that generates `plan(Slow())` with two workers and has finished a shard."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, PAUSE: "0.3"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not shards_in(folder):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def assert_workers_end(process: subprocess.Popen[bytes]) -> None:
    """Check that the output, which the workers share, is closed."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 4)[0], "workers are still running"
    assert process.stdout.read() == b""


@pytest.mark.slow
def test_a_killed_run_ends_its_workers_and_can_be_continued(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    with running(folder) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert_workers_end(process)
    # A kill while a shard is written leaves a partial file.
    (folder / ".000004.npz").write_bytes(b"PK")
    before = shards_in(folder)
    assert before
    assert generated(plan(Slow()), folder) == expected(plan(Slow()))
    assert before.items() <= shards_in(folder).items()
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_two_interrupts_end_the_run(tmp_path: Path) -> None:
    with running(tmp_path / "shards") as process:
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.2)
        assert process.wait(timeout=5) != 0
        assert_workers_end(process)


@pytest.mark.slow
def test_killed_worker(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a worker was killed, .* with fewer workers"):
        generated(plan(Dying()), tmp_path / "shards", workers=2)
    assert shards_in(tmp_path / "shards") == {}


@each_generator
def test_an_interrupted_run_is_continued(tmp_path: Path, generator: Generator) -> None:
    def interrupt(done: int, total: int) -> None:
        calls.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    folder, calls = tmp_path / "shards", list[tuple[int, int]]()
    with pytest.raises(KeyboardInterrupt):
        generated(plan(generator), folder, progress=interrupt)
    before = shards_in(folder)
    assert {path.name for path in folder.iterdir()} == {*before, SETTINGS}
    assert calls[0][0] == 0
    assert generated(plan(generator), folder, progress=lambda *step: calls.append(step)) == expected(plan(generator))
    assert before.items() <= shards_in(folder).items()
    assert_progress(calls)
    # A larger data set begins with the smaller one and reuses its shards.
    before = shards_in(folder)
    larger = plan(generator, train=70, validation=10, test=9)
    assert generated(larger, folder) == expected(larger)
    assert before.items() <= shards_in(folder).items()


def test_no_workers_are_started_for_little_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", refuse)
    list(generate(plan(Recall(length=8), train=200), tmp_path / "shards", 4, lambda done, total: None))
    with pytest.raises(AssertionError, match="a pool was started"):
        generated(plan(Recall(length=8), train=300), tmp_path / "shards", 4)


@pytest.mark.parametrize("other", ["seed", "parameters", "shard", "version", "damaged settings"])
def test_shards_of_another_data_set_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    folder = tmp_path / "shards"
    generated(plan(Recall(length=8), train=200), folder)
    before = shards_in(folder)
    if other == "version":
        monkeypatch.setattr(Recall, "version", 2)
    if other == "damaged settings":
        (folder / SETTINGS).write_bytes(b"\xff\xfe{")
    wanted = {
        "seed": plan(Recall(length=8), seed=1),
        "parameters": plan(Recall(length=10)),
        "shard": plan(Recall(length=8), shard_size=17),
    }.get(other, plan(Recall(length=8)))
    assert generated(wanted, folder) == expected(wanted)
    assert not before.items() & shards_in(folder).items()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "value": lambda data: flipped(data, data.index(b"tokens.npy") + 200),
    "method": lambda data: flipped(data, data.index(b"PK\x01\x02") + 10),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "pickle", "bomb", "none", "rows"])
def test_damaged_shard(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "shards"
    generated(plan(), folder)
    path = folder / "000001.npz"
    if damage == "pickle":
        np.savez(path, fingerprints=np.array([print], object))
    elif damage == "bomb":
        np.savez_compressed(path, tokens=np.zeros((100, 10**5), np.uint8), labels=np.zeros(100, np.int64))
    elif damage == "none":
        np.savez(path)
    elif damage == "rows":
        with np.load(path) as shard:
            np.savez(path, **{**shard, "labels": shard["labels"][:-1]})
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(DataError, match=r"000001.npz: cannot be read \(.*\); remove it and run the same command again"):
        generated(plan(), folder)
    path.unlink()
    assert generated(plan(), folder) == expected(plan())


def test_too_few_different_examples(tmp_path: Path) -> None:
    wanted = plan(SHORT, shard_size=500, train=1000)
    message = r"Recall\(.*\): expected 1,016 different examples, got \d+ from [\d,]+ draws; ask for fewer with --size"
    with pytest.raises(DataError, match=message):
        generated(wanted, tmp_path / "shards")
    with pytest.raises(DataError, match=message):
        generate_in_memory(wanted)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("generator", [LISTS, ListOps()], ids=["at the end", "at once"])
def test_full_disk_leaves_no_partial_shard(tmp_path: Path, generator: ListOps, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shards"

    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Path]:
        with atomic_path(path) as temporary:
            if path.name == "000002.npz":
                temporary.symlink_to(FULL)
            yield temporary

    monkeypatch.setattr(module, "atomic_path", full)
    with pytest.raises(DataError, match=r"shards.000002.npz: the disk is full; free some space or choose"):
        generated(plan(generator), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["000000.npz", "000001.npz", SETTINGS]


def stream(generator: Generator, block: int = BLOCK) -> ExampleStream:
    return ExampleStream(generator, split_fractions(SIZES), block)


def every_input() -> set[tuple[int, ...]]:
    """Return all sequences that `SHORT` can generate."""
    pairs = [(key, value) for key in range(3) for value in range(3, 6)]
    return {
        (*one, *other, query[0])
        for one, other in itertools.product(pairs, pairs)
        for query in (one, other)
        if one[0] != other[0] or one[1] == other[1]
    }


@each_generator
@settings(max_examples=30)
@given(data=st.data())
def test_stream_does_not_depend_on_the_calls(generator: Generator, data: st.DataObject) -> None:
    whole = listed(stream(generator).take(5, 0, 50))
    used = stream(generator)
    for _ in range(6):
        begin = data.draw(st.integers(0, 49))
        end = data.draw(st.integers(begin, 50))
        assert listed(used.take(5, begin, end)) == whole[begin:end]
        if data.draw(st.booleans()):
            used.take(6, begin, end)


def test_distant_positions_seeds_and_blocks() -> None:
    far = 10**15
    assert listed(stream(SHORT).take(0, far, far + 3)) == listed(stream(SHORT).take(0, far - 9, far + 9))[9:12]
    streams = [set(listed(stream(LISTS).take(seed, 0, 80))) for seed in range(3)]
    streams.append(set(listed(generate_in_memory(plan())["train"])))
    assert [len(found) for found in streams[:3]] == [80] * 3
    for one, other in itertools.combinations(streams, 2):
        assert not one & other


def test_stream_yields_all_training_examples_only() -> None:
    data_sets = [generate_in_memory(plan(SHORT, seed, 50)) for seed in range(5)]

    def inputs(columns: Columns) -> set[tuple[int, ...]]:
        return {tuple(tokens) for tokens, _ in listed(columns)}

    held = set().union(*(inputs(splits[split]) for splits in data_sets for split in ("validation", "test")))
    trained = set().union(*(inputs(splits["train"]) for splits in data_sets))
    assert len(every_input()) == 117
    assert 10 < len(held) < 60
    shown = inputs(stream(SHORT).take(0, 0, 3000))
    assert not shown & held
    assert shown >= trained
    tokens = np.array(sorted(every_input()), np.uint8)
    allowed = tokens[assign_splits(fingerprints({"tokens": tokens}), split_fractions(SIZES)) == 0]
    assert shown == set(map(tuple, allowed.tolist()))


@pytest.mark.parametrize("shape", [(6,), (6, 3, 2), (0, 4), (3, 0)], ids=str)
def test_fingerprints_are_hashes_of_the_input(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    hashes = [int.from_bytes(hashlib.blake2b(value.tobytes(), digest_size=8).digest(), "little") for value in values]
    for column in (values, np.asfortranarray(values), ragged([row.ravel() for row in values], np.uint8)):
        found = fingerprints({"pixels": column, "labels": np.ones(len(values))})
        assert found.dtype == np.uint64
        assert found.tolist() == hashes


def test_splits_have_the_size_of_their_fractions() -> None:
    fractions = split_fractions({"train": 80, "validation": 15, "test": 5})
    # Small splits get a tenth more than their proportion.
    assert fractions == pytest.approx({"train": 0.78, "validation": 0.165, "test": 0.055})
    found = np.bincount(assign_splits(CounterRNG("prints").raw(100_000), fractions), minlength=3) / 100_000
    assert np.abs(found - list(fractions.values())).max() < 0.006
