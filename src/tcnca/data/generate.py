"""Generated data sets: generators, the split of each example, endless streams, and sharded generation.

The split of an example is a function of a hash of its content. No example is therefore in two splits, whatever seeds
are used, and an endless training stream never shows an example of a test split.

Shard `i` is a pure function of the generator, the seed and `i`. A data set takes the shards in order, drops examples
that occurred before, and assigns the others to their splits until all splits are full. It therefore does not depend on
the number of workers, on interruptions, or on how many shards were generated in the end.
"""

from __future__ import annotations

import concurrent.futures.process
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tcnca.data.npy import array_errors, list_arrays, read_member
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS, Column, Columns, Ragged, check_offsets, concatenate, take
from tcnca.errors import DataError
from tcnca.files import atomic_path, disk_errors
from tcnca.signals import handle_signals

SETTINGS = "settings.json"
MIN_PARALLEL_SECONDS = 5.0
"""Workers are started only for more work than this, since starting them takes some seconds."""
_OFFSETS = ".offsets"


class Generator(Protocol):
    """Generates examples. A frozen dataclass, so that its repr identifies its parameters."""

    version: ClassVar[int]
    """Increase whenever the examples of a seed change. The repr, with the names of the parameters, is part of the
    seed."""

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate exactly `count` examples, a pure function of the key of `rng`."""
        ...


def fingerprints(columns: Columns) -> NDArray[np.uint64]:
    """Return a hash of the input of each example, which is its first column."""
    column = next(iter(columns.values()))
    digests = b"".join(
        hashlib.blake2b(np.ascontiguousarray(column[index]).data, digest_size=8).digest()
        for index in range(len(column))
    )
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def split_fractions(sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the fraction of all examples that belongs to each split, for splits of the given proportions.

    Validation and test get 10 % more than their proportion, so that they are rarely the last ones to be filled.
    """
    total = sum(sizes.values())
    small = {split: 1.1 * sizes[split] / total for split in SPLITS[1:]}
    return {SPLITS[0]: 1.0 - sum(small.values()), **small}


def assign_splits(hashes: NDArray[np.uint64], fractions: Mapping[str, float]) -> NDArray[np.int64]:
    """Return the split of each fingerprint as an index of `SPLITS`."""
    bounds = np.cumsum([fractions[split] for split in SPLITS[:-1]])
    return np.searchsorted(bounds, hashes / 2.0**64, side="right")


class ExampleStream:
    """An endless stream of training examples, generated as they are needed.

    Example `i` is a pure function of the seed and `i`: examples are generated in blocks, each with its own key.
    """

    def __init__(self, generator: Generator, fractions: Mapping[str, float], block: int = 64) -> None:
        self.generator, self.fractions, self.block = generator, fractions, block
        self._last: dict[tuple[int, int], Columns] = {}

    def take(self, seed: int, begin: int, end: int) -> dict[str, Column]:
        """Return the examples from `begin` (inclusive) to `end` (exclusive) of the stream of a seed."""
        parts = []
        for number in range(begin // self.block, max(-(-end // self.block), begin // self.block + 1)):
            first = number * self.block
            inside = np.arange(max(begin - first, 0), min(end - first, self.block))
            parts.append(take(self._block(seed, number), inside))
        return concatenate(parts)

    def _block(self, seed: int, number: int) -> Columns:
        # A batch often ends inside a block, where the next batch begins.
        last = self._last
        if (seed, number) not in last:
            # Replaced in one assignment, since prefetching threads may be here as well.
            self._last = last = {(seed, number): self._generate(seed, number)}
        return last[seed, number]

    def _generate(self, seed: int, number: int) -> Columns:
        parts: list[Columns] = []
        missing = self.block
        while missing:
            rng = CounterRNG(repr(self.generator), self.generator.version, seed, "stream", number, len(parts))
            drawn = self.generator.examples(rng, int(missing / self.fractions["train"]) + 1)
            kept = np.flatnonzero(assign_splits(fingerprints(drawn), self.fractions) == 0)[:missing]
            parts.append(take(drawn, kept))
            missing -= len(kept)
        return concatenate(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines a generated data set."""

    generator: Generator
    seed: int
    sizes: Mapping[str, int]
    """Number of examples in each split."""
    fractions: Mapping[str, float]
    """Fraction of all examples that belongs to each split."""
    shard_size: int


def generate(
    plan: Plan, folder: Path, workers: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Columns]]:
    """Generate a data set in shards and yield parts of splits in a fixed order.

    Shards that an earlier call left in `folder` are reused. `progress` is called with the number of finished shards and
    of all shards.
    """
    with disk_errors(folder):
        _prepare_folder(plan, folder)
    wanted, hashes = 0, list[NDArray[np.uint64]]()
    while (more := _missing_shards(plan, hashes)) > 0:
        wanted += more
        _generate_shards(plan, folder, wanted, workers, progress)
        hashes += [fingerprints(_read_shard(plan, folder, number)) for number in range(len(hashes), wanted)]
    for number, splits in enumerate(_select(plan, hashes)):
        columns = _read_shard(plan, folder, number)
        for split, indices in splits.items():
            yield split, take(columns, indices)


def generate_in_memory(plan: Plan) -> dict[str, Columns]:
    """Return the splits that `generate` would yield, for small data sets."""
    # At least one shard: it defines the columns even if no examples are wanted.
    shards: list[Columns] = [_shard(plan, 0)]
    hashes = [fingerprints(shards[0])]
    while (more := _missing_shards(plan, hashes)) > 0:
        shards += [_shard(plan, number) for number in range(len(shards), len(shards) + more)]
        hashes += [fingerprints(columns) for columns in shards[len(hashes) :]]
    selected = _select(plan, hashes)
    return {
        split: concatenate([take(columns, splits[split]) for columns, splits in zip(shards, selected, strict=True)])
        for split in SPLITS
    }


def _prepare_folder(plan: Plan, folder: Path) -> None:
    """Remove the shards of an earlier run unless it generated the same data set."""
    generator = {"generator": repr(plan.generator), "version": plan.generator.version}
    settings = json.dumps({**generator, "seed": plan.seed, "shard_size": plan.shard_size})
    path = folder / SETTINGS
    if not (path.is_file() and _read_start(path, len(settings) + 1) == settings.encode()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path.write_text(settings, encoding="utf-8")
    _remove_partial(folder)


def _read_start(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _missing_shards(plan: Plan, hashes: list[NDArray[np.uint64]]) -> int:
    """Estimate how many more shards are needed; raise a DataError if more would not help."""
    selected = _select(plan, hashes)
    missing = {split: plan.sizes[split] - sum(len(splits[split]) for splits in selected) for split in SPLITS}
    if not any(missing.values()):
        return 0
    drawn, wanted = len(hashes) * plan.shard_size, sum(plan.sizes.values())
    if drawn > 20 * (wanted + plan.shard_size):
        raise DataError(
            f"{plan.generator!r}: expected {wanted:,} different examples, got {wanted - sum(missing.values()):,} from "
            f"{drawn:,} draws; ask for fewer with --size"
        )
    return max(
        math.ceil(missing[split] / (plan.fractions[split] * plan.shard_size)) for split in SPLITS if missing[split]
    )


def _select(plan: Plan, hashes: list[NDArray[np.uint64]]) -> list[dict[str, NDArray[np.int64]]]:
    """Select the examples of each shard for each split: the first distinct ones."""
    if not hashes:
        return []
    joined = np.concatenate(hashes)
    first = np.zeros(len(joined), bool)
    first[np.unique(joined, return_index=True)[1]] = True
    splits = assign_splits(joined, plan.fractions)
    selected = np.full(len(joined), -1)
    for index, split in enumerate(SPLITS):
        selected[np.flatnonzero(first & (splits == index))[: plan.sizes[split]]] = index
    shards = selected.reshape(len(hashes), plan.shard_size)
    return [{split: np.flatnonzero(shard == index) for index, split in enumerate(SPLITS)} for shard in shards]


def _generate_shards(plan: Plan, folder: Path, wanted: int, workers: int, progress: Callable[[int, int], None]) -> None:
    todo = [number for number in range(wanted) if not _path(folder, number).is_file()]
    done = wanted - len(todo)
    progress(done, wanted)
    seconds = 0.0
    while todo and (workers == 1 or len(todo) * seconds <= MIN_PARALLEL_SECONDS):
        begin = time.perf_counter()
        _write_shard(plan, folder, todo.pop(0))
        seconds = time.perf_counter() - begin
        done += 1
        progress(done, wanted)
    if todo:
        _run_workers(plan, folder, todo, min(workers, len(todo)), lambda more: progress(done + more, wanted))


def _run_workers(plan: Plan, folder: Path, todo: list[int], workers: int, progress: Callable[[int], None]) -> None:
    # Spawn instead of fork: a fork of a process that has used PyTorch's threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker)
    try:
        # Workers inherit this, so that Ctrl-C reaches only the process that waits for them.
        with handle_signals([signal.SIGINT], signal.SIG_IGN):
            futures = [pool.submit(_write_shard, plan, folder, number) for number in todo]
        for more, future in enumerate(concurrent.futures.as_completed(futures), 1):
            future.result()
            progress(more)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            f"{folder}: a worker was killed, possibly for lack of memory; run the same command with fewer workers"
        ) from error
    except BaseException:
        # A second Ctrl-C during the shutdown would leave the pool waiting forever.
        with handle_signals([signal.SIGINT], signal.SIG_IGN):
            # Shards are written atomically, so there is no need to wait for unfinished ones.
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown(cancel_futures=True)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        _remove_partial(folder)


def _start_worker() -> None:
    """Ignore Ctrl-C, and exit when the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _remove_partial(folder: Path) -> None:
    """Remove incomplete files of processes that were killed."""
    for path in folder.glob(".*.npz"):
        path.unlink(missing_ok=True)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.npz"


def _shard(plan: Plan, number: int) -> Columns:
    rng = CounterRNG(repr(plan.generator), plan.generator.version, plan.seed, "set", number)
    return plan.generator.examples(rng, plan.shard_size)


def _write_shard(plan: Plan, folder: Path, number: int) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in _shard(plan, number).items():
        if isinstance(column, Ragged):
            arrays |= {name: column.values, name + _OFFSETS: column.offsets}
        else:
            arrays[name] = column
    with atomic_path(_path(folder, number)) as partial:
        np.savez(partial, allow_pickle=False, **arrays)


def _read_shard(plan: Plan, folder: Path, number: int) -> Columns:
    path = _path(folder, number)
    with array_errors(path, "remove it and run the same command again"):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                raise DataError("expected arrays that are not compressed")
            arrays = {name: read_member(archive, member) for name, member in list_arrays(archive).items()}
        columns: dict[str, Column] = {name: values for name, values in arrays.items() if not name.endswith(_OFFSETS)}
        for name, values in arrays.items():
            if name + _OFFSETS in arrays:
                columns[name] = Ragged(values, check_offsets(arrays[name + _OFFSETS], values))
        if not columns or any(len(column) != plan.shard_size for column in columns.values()):
            raise DataError(f"expected {plan.shard_size:,} examples")
    return columns
