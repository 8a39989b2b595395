"""From a name or a file to a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcnca.data.columns import Columns, count, join, take
from tcnca.data.content import SPLITS, Content, Kind
from tcnca.data.draw import Draw
from tcnca.data.generators.shards import make_in_memory
from tcnca.data.kinds import ClassificationTask, ForecastTask, LanguageTask, PairTask, RegressionTask, Task
from tcnca.data.own import OwnOptions, read_own
from tcnca.data.preparing import data_folder
from tcnca.data.store import MANIFEST, DataSet
from tcnca.data.tasks import Entry, canonical, entry, known
from tcnca.errors import ConfigError, DataError

STREAMED = 500
"""Examples to validate and to test on that a stream makes where none are prepared."""

_KINDS: dict[Kind, type[Task]] = {
    "language": LanguageTask,
    "classification": ClassificationTask,
    "pairs": PairTask,
    "regression": RegressionTask,
    "forecast": ForecastTask,
}


def task(
    source: str | Path,
    folder: Path | str | None = None,
    *,
    stream: bool = False,
    holdout: float = 0.0,
    seed: int = 0,
    own: OwnOptions | None = None,
    **options: Any,
) -> Task:
    """The task of a set.

    Args:
        source: the name of a set that `prepare` has stored in `folder`, the folder of a prepared set, or a file or
            folder of your own data, which is read into memory.
        folder: where prepared sets are, by default `data_folder()`.
        stream: make training examples as they are needed, without end, instead of reading prepared ones. For sets that
            are made. If none is prepared, `STREAMED` examples each are made to validate and test.
        holdout: where a set has no validation split, the share of its training split to hold out as one.
        seed: of what is held out, or made to validate and test.
        own: how to read data of your own.
        options: of the task, for example `longest=1000` to cut sequences, or `carried=False` for EnWik8.
    """
    folder = data_folder() if folder is None else Path(folder)
    if stream:
        if holdout:
            raise ConfigError(f"holdout: got {holdout}, but a stream has nothing to hold out of; leave it out")
        known_set = entry(str(source))
        prepared = (folder / known_set.name / MANIFEST).is_file()
        sizes = {"validation": STREAMED, "test": STREAMED}
        data = DataSet.open(folder / known_set.name) if prepared else _made(known_set, sizes, seed, known_set.shard)
        return _build(data, {**options, "stream": known_set.stream()})
    data = _open(source, folder, own)
    if holdout:
        data = _hold_out(data, holdout, seed)
    return _build(data, options)


def _open(source: str | Path, folder: Path, own: OwnOptions | None) -> DataSet:
    path = Path(source)
    for place in (folder / canonical(path.name) if str(source) == path.name else path, path):
        if (place / MANIFEST).is_file():
            return DataSet.open(place)
    if known(str(source)):
        raise DataError(
            f"{source}: is not prepared in {folder}; `tcnca data prepare {source} --out {folder}` does that"
        )
    if not path.exists():
        raise DataError(f"{source}: neither a prepared set in {folder}, nor a file, nor a known set")
    return in_memory(path.name, read_own(path, own or OwnOptions()))


def example_set(name: str, folder: Path, split: str, wanted: int) -> DataSet:
    """The prepared set called `name`; if it is not prepared but can be made, `wanted` examples of a split."""
    if known(name) and entry(name).generator is not None and not (folder / canonical(name) / MANIFEST).is_file():
        return _made(entry(name), {split: wanted}, seed=0, shard=32)
    return _open(name, folder, None)


def in_memory(name: str, content: Content) -> DataSet:
    """A set that was read but not stored."""
    splits = {split: join(list(parts)) for split, parts in content.splits.items()}
    return DataSet(name, {"kind": content.kind, "verified": content.verified, **content.facts}, splits)


def _made(known_set: Entry, sizes: Mapping[str, int], seed: int, shard: int) -> DataSet:
    """A small set in memory; splits without a size are empty."""
    plan = dataclasses.replace(
        known_set.plan(None, seed), sizes={**dict.fromkeys(SPLITS, 0), **sizes}, shard=min(shard, known_set.shard)
    )
    facts = {"set": known_set.name, "kind": "classification", "title": known_set.title, **known_set.facts}
    return DataSet(known_set.name, facts, make_in_memory(plan))


def _build(data: DataSet, options: Mapping[str, Any]) -> Task:
    known_set = data.manifest.get("set")
    make = _KINDS[data.manifest["kind"]] if known_set is None else entry(known_set).task
    try:
        return make(data, **options)
    except TypeError as error:
        raise ConfigError(f"{data.name}: {error}; allowed are the options of its task") from error


def _hold_out(data: DataSet, share: float, seed: int) -> DataSet:
    if not 0 < share < 1:
        raise ConfigError(f"holdout: got {share}, allowed is a share between 0 and 1")
    if "validation" in data.splits:
        raise ConfigError(f"holdout: got {share}, but {data.name} has a validation split of its own; leave it out")
    train = data.columns("train")
    order = Draw(seed, "holdout").permutation(count(train))
    held = min(max(1, round(share * len(order))), len(order) - 1)
    splits: dict[str, Columns] = {
        **data.splits,
        "train": take(train, order[held:]),
        "validation": take(train, order[:held]),
    }
    return DataSet(data.name, data.manifest, splits)
