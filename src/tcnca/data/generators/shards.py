"""Making a generated set with any number of workers, in shards that a killed run continues.

Shard `i` is a pure function of the generator, the seed and `i`. A set takes the shards in their order, drops examples
that it has met before, and hands each to the split that it belongs to until all are full; so it does not depend on the
number of workers, on interruptions, or on how many shards were made in the end.
"""

from __future__ import annotations

import concurrent.futures.process
import contextlib
import dataclasses
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Columns, Ragged, join, take
from tcnca.data.generators.generator import Generator, fingerprints, split_of
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS
from tcnca.data.store import explained
from tcnca.errors import DataError

SETTINGS = "settings.json"
WORTH_WORKERS = 5.0
"""Seconds of work that must be left for workers to be started: that alone takes some."""
_OFFSETS = ".offsets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A generated set to be made."""

    generator: Generator
    """What makes the examples."""
    seed: int
    """Seed of the set."""
    sizes: Mapping[str, int]
    """Number of examples wanted in each split."""
    share: Mapping[str, float]
    """Share of all examples that belongs to each split."""
    shard: int
    """Examples in a shard."""


def make(plan: Plan, folder: Path, workers: int, progress: Callable[[int, int], None]) -> Iterator[tuple[str, Columns]]:
    """Make the shards of a set in `folder`, where those of an earlier run are used, and hand out its examples.

    Yields parts of splits in a fixed order. `progress` is told how many shards of how many are there.
    """
    with explained(folder):
        _claim(plan, folder)
    wanted, prints = 0, list[NDArray[np.uint64]]()
    while (more := _missing(plan, prints)) > 0:
        wanted += more
        _make_shards(plan, folder, wanted, workers, progress)
        prints += [_prints(folder, number) for number in range(len(prints), wanted)]
    for number, splits in enumerate(_choose(plan, prints)):
        columns = _read(folder, number)
        for split, places in splits.items():
            yield split, take(columns, places)


def make_in_memory(plan: Plan) -> dict[str, Columns]:
    """The splits that `make` would hand out, for sets small enough."""
    # One at least, since the columns are those of a shard even if nothing is wanted of it.
    made: list[Columns] = [_shard(plan, 0)]
    prints = [fingerprints(made[0])]
    while (more := _missing(plan, prints)) > 0:
        made += [_shard(plan, number) for number in range(len(made), len(made) + more)]
        prints += [fingerprints(columns) for columns in made[len(prints) :]]
    chosen = _choose(plan, prints)
    return {
        split: join([take(columns, splits[split]) for columns, splits in zip(made, chosen, strict=True)])
        for split in SPLITS
    }


def remove(folder: Path) -> None:
    """Remove the shards."""
    shutil.rmtree(folder, ignore_errors=True)


def _claim(plan: Plan, folder: Path) -> None:
    """Keep the shards of an earlier run only if it was the same set."""
    settings = json.dumps(
        {"generator": repr(plan.generator), "version": plan.generator.version, "seed": plan.seed, "shard": plan.shard}
    )
    path = folder / SETTINGS
    if not (path.is_file() and path.read_bytes() == settings.encode()):
        remove(folder)
        folder.mkdir(parents=True)
        path.write_text(settings, encoding="utf-8")
    _sweep(folder)


def _missing(plan: Plan, prints: list[NDArray[np.uint64]]) -> int:
    """How many more shards the set needs, as far as can be told; a DataError if more would not help."""
    chosen = _choose(plan, prints)
    missing = {split: plan.sizes[split] - sum(len(splits[split]) for splits in chosen) for split in SPLITS}
    if not any(missing.values()):
        return 0
    made, wanted = len(prints) * plan.shard, sum(plan.sizes.values())
    if made > 20 * (wanted + plan.shard):
        raise DataError(
            f"{plan.generator!r}: {made:,} examples were drawn, and {sum(missing.values()):,} of the {wanted:,} wanted "
            f"are still missing: there are too few different ones; ask for fewer with --size"
        )
    return max(math.ceil(missing[split] / (plan.share[split] * plan.shard)) for split in SPLITS if missing[split])


def _choose(plan: Plan, prints: list[NDArray[np.uint64]]) -> list[dict[str, NDArray[np.int64]]]:
    """Which examples of each shard the set takes for each split: the first different ones."""
    if not prints:
        return []
    together = np.concatenate(prints)
    first = np.zeros(len(together), bool)
    first[np.unique(together, return_index=True)[1]] = True
    belongs = split_of(together, plan.share)
    taken = np.full(len(together), -1)
    for index, split in enumerate(SPLITS):
        taken[np.flatnonzero(first & (belongs == index))[: plan.sizes[split]]] = index
    shards = taken.reshape(len(prints), plan.shard)
    return [{split: np.flatnonzero(shard == index) for index, split in enumerate(SPLITS)} for shard in shards]


def _make_shards(plan: Plan, folder: Path, wanted: int, workers: int, progress: Callable[[int, int], None]) -> None:
    todo = [number for number in range(wanted) if not _path(folder, number).is_file()]
    done = wanted - len(todo)
    progress(done, wanted)
    seconds = 0.0
    while todo and (workers == 1 or len(todo) * seconds <= WORTH_WORKERS):
        begun = time.perf_counter()
        _make_shard(plan, folder, todo.pop(0))
        seconds = time.perf_counter() - begun
        done += 1
        progress(done, wanted)
    if not todo:
        return
    with _interrupted_once():
        _make_with_workers(plan, folder, todo, min(workers, len(todo)), lambda more: progress(done + more, wanted))


def _make_with_workers(
    plan: Plan, folder: Path, todo: list[int], workers: int, progress: Callable[[int], None]
) -> None:
    # Spawned, not forked: a fork of a process that has used PyTorch's threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _begin_work)
    try:
        # Workers are not to be interrupted from their first moment on: that is for the process that waits for them.
        with _interrupts(signal.SIG_IGN):
            futures = [pool.submit(_make_shard, plan, folder, number) for number in todo]
        for more, future in enumerate(concurrent.futures.as_completed(futures), 1):
            future.result()
            progress(more)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            f"{folder}: a worker was killed, perhaps for want of memory; run the same command again with fewer workers"
        ) from error
    except BaseException:
        # Nobody wants to wait for what is half done: a shard is there when it is whole.
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        _sweep(folder)


@contextlib.contextmanager
def _interrupts(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C otherwise for a while. Only the main thread can, and only it is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted_once() -> contextlib.AbstractContextManager[None]:
    """After one Ctrl-C ignore the next ones: half-stopped workers would be waited for for ever."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    return _interrupts(interrupt)


def _begin_work() -> None:
    """Leave Ctrl-C to the process that waits, and end when that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _sweep(folder: Path) -> None:
    """Remove what was being written when its process ended."""
    for path in folder.glob(".*.npz.*"):
        path.unlink(missing_ok=True)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.npz"


def _shard(plan: Plan, number: int) -> Columns:
    draw = CounterRNG(repr(plan.generator), plan.generator.version, plan.seed, "set", number)
    return plan.generator.examples(draw, plan.shard)


def _make_shard(plan: Plan, folder: Path, number: int) -> None:
    columns = _shard(plan, number)
    arrays: dict[str, NDArray[Any]] = {"prints": fingerprints(columns)}
    for name, column in columns.items():
        arrays[name] = column.values if isinstance(column, Ragged) else column
        if isinstance(column, Ragged):
            arrays[name + _OFFSETS] = column.offsets
    path = _path(folder, number)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with explained(folder), beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(folder: Path, number: int) -> Iterator[Mapping[str, NDArray[Any]]]:
    path = _path(folder, number)
    try:
        # Opened here: NumPy would leave a damaged file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            yield file
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: is damaged ({error}); remove it and run the same command again") from error


def _read(folder: Path, number: int) -> Columns:
    with _opened(folder, number) as file:
        arrays = dict(file)
    del arrays["prints"]
    return {
        name: Ragged(values, arrays[name + _OFFSETS]) if name + _OFFSETS in arrays else values
        for name, values in arrays.items()
        if not name.endswith(_OFFSETS)
    }


def _prints(folder: Path, number: int) -> NDArray[np.uint64]:
    with _opened(folder, number) as file:
        return file["prints"]
