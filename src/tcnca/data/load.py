"""From a name or a file to a task."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tcnca.data.columns import Columns, join, take
from tcnca.data.custom import CustomOptions, read_own
from tcnca.data.custom.splits import digests, draw
from tcnca.data.datasets import Entry, canonical, entry, known
from tcnca.data.generators.shards import make_in_memory
from tcnca.data.prepare import data_folder
from tcnca.data.schema import SPLITS, Content, Kind
from tcnca.data.store import MANIFEST, Dataset, checksum
from tcnca.data.tasks import ClassificationTask, ForecastTask, LanguageTask, PairTask, RegressionTask, Task
from tcnca.errors import ConfigError, DataError

STREAMED = 500
"""Examples to validate and to test on that a stream makes where none are prepared."""

MADE_TO_SHOW = 100
"""Examples of a set that are made to be looked at where it is not prepared."""

_KINDS: dict[Kind, type[Task]] = {
    "language": LanguageTask,
    "classification": ClassificationTask,
    "pairs": PairTask,
    "regression": RegressionTask,
    "forecast": ForecastTask,
}


def load_task(
    source: str | Path,
    folder: Path | str | None = None,
    *,
    stream: bool = False,
    val_fraction: float = 0.0,
    seed: int = 0,
    custom: CustomOptions | None = None,
    kind: Kind | None = None,
    **options: Any,
) -> Task:
    """The task of a set.

    Args:
        source: the name of a set that `prepare` has stored in `folder`, the folder of a prepared set, or a file or
            folder of your own data, which is read into memory.
        folder: where prepared sets are, by default `data_folder()`.
        stream: make training examples as they are needed, without end, instead of reading prepared ones. For sets that
            are made. If none is prepared, `STREAMED` examples each are made to validate and test.
        val_fraction: where a set has no validation split, the share of its training split to hold out as one.
        seed: of what is held out, or made to validate and test.
        custom: how to read data of your own.
        kind: what the task must be, for example `language`; a set of another kind is refused.
        options: of the task, for example `max_length=1000` to cut sequences, or `carry_state=False` for EnWik8.
    """
    folder = data_folder() if folder is None else Path(folder)
    if stream:
        if val_fraction:
            raise ConfigError(
                f"val_fraction: got {val_fraction}, but a stream has nothing to hold out of; leave it out"
            )
        return _streamed(entry(str(source)), folder, seed, options)
    data = _open(source, folder, custom)
    if kind is not None and data.manifest["kind"] != kind:
        raise ConfigError(f"{source}: is data of kind {data.manifest['kind']}, allowed here is {kind}")
    if val_fraction:
        data = _hold_out(data, val_fraction, seed)
    return _build(data, options)


def _streamed(known_set: Entry, folder: Path, seed: int, options: Mapping[str, Any]) -> Task:
    place = folder / known_set.name
    if (place / MANIFEST).is_file():
        data = Dataset.open(place)
        if data.manifest.get("version") != known_set.plan(None, seed).generator.version:
            raise DataError(
                f"{place}: was made by another version of the generator, and a stream might show what its splits hold; "
                "prepare it again with --force, or choose another folder"
            )
    else:
        data = Dataset(known_set.name, _facts(known_set), _MadeSplits(known_set, seed))
    return _build(data, {**options, "stream": known_set.stream()})


class _MadeSplits(Mapping[str, Columns]):
    """Something to validate and test on, made when it is first looked at, and nothing to train on."""

    def __init__(self, known_set: Entry, seed: int) -> None:
        self._plan = known_set.plan(None, seed)
        self._made: dict[str, Columns] = {}

    def __getitem__(self, split: str) -> Columns:
        if split not in SPLITS:
            raise KeyError(split)
        if split not in self._made:
            wanted = 0 if split == "train" else STREAMED
            plan = dataclasses.replace(self._plan, sizes={**dict.fromkeys(SPLITS, 0), split: wanted})
            # To know what the columns are, one example is enough.
            plan = dataclasses.replace(plan, shard=plan.shard if wanted else 1)
            self._made[split] = make_in_memory(plan)[split]
        return self._made[split]

    def __iter__(self) -> Iterator[str]:
        return iter(SPLITS)

    def __len__(self) -> int:
        return len(SPLITS)


def _open(source: str | Path, folder: Path, custom: CustomOptions | None) -> Dataset:
    path = Path(source)
    if not str(source):
        raise DataError("source: got nothing, allowed is the name of a set, or a file or folder")
    for place in (folder / canonical(path.name) if str(source) == path.name else path, path):
        if (place / MANIFEST).is_file():
            return Dataset.open(place)
    if known(str(source)):
        raise DataError(
            f"{source}: is not prepared in {folder}; `tcnca data prepare {source} --out {folder}` does that"
        )
    if not path.exists():
        raise DataError(
            f"{source}: neither a prepared set in {folder}, nor a file, nor a set that `tcnca data list` knows"
        )
    return in_memory(path.name, read_own(path, custom or CustomOptions()))


def example_set(name: str, folder: Path, split: str, wanted: int) -> Dataset:
    """The prepared set called `name`; if it is not prepared but can be made, `wanted` examples of a split."""
    if known(name) and entry(name).generator is not None and not (folder / canonical(name) / MANIFEST).is_file():
        if wanted > MADE_TO_SHOW:
            raise DataError(
                f"{name}: is not prepared in {folder}, and without that only its first {MADE_TO_SHOW} examples are "
                f"made; `tcnca data prepare {name} --out {folder}` makes all"
            )
        plan = entry(name).plan(None, seed=0)
        plan = dataclasses.replace(plan, sizes={**dict.fromkeys(SPLITS, 0), split: wanted}, shard=32)
        return Dataset(canonical(name), _facts(entry(name)), make_in_memory(plan))
    return _open(name, folder, None)


def in_memory(name: str, content: Content) -> Dataset:
    """A set that was read but not stored."""
    splits = {split: join(list(parts)) for split, parts in content.splits.items()}
    files = {f"{split}.{column}": checksum(values) for split in splits for column, values in splits[split].items()}
    facts = {"kind": content.kind, "verified": content.verified, **content.facts, "files": files}
    return Dataset(name, facts, splits)


def _facts(known_set: Entry) -> dict[str, Any]:
    return {"set": known_set.name, "kind": "classification", "title": known_set.title, **known_set.facts}


def _build(data: Dataset, options: Mapping[str, Any]) -> Task:
    known_set = data.manifest.get("set")
    make = _KINDS[data.manifest["kind"]] if known_set is None else entry(known_set).task
    allowed = [name for name in inspect.signature(make).parameters if name != "data"]
    for name in options:
        if name not in allowed:
            raise ConfigError(f"{name}: no such option of {data.name}, allowed are {', '.join(allowed)}")
    return make(data, **options)


def _hold_out(data: Dataset, share: float, seed: int) -> Dataset:
    if not 0 < share < 1:
        raise ConfigError(f"val_fraction: got {share}, allowed is a share between 0 and 1")
    if "validation" in data.splits:
        raise ConfigError(f"val_fraction: got {share}, but {data.name} has a validation split of its own; leave it out")
    train = data.columns("train")
    labels = np.asarray(train["labels"]) if "labels" in train else None
    chosen = draw(digests(train), {"validation": share}, seed, data.folder or Path(data.name), labels)
    splits: dict[str, Columns] = {**data.splits, **{split: take(train, places) for split, places in chosen.items()}}
    return Dataset(data.name, data.manifest, splits)
