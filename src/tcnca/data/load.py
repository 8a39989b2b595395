"""Load a task from the name of a data set or from a file."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tcnca.config import check_choice
from tcnca.data.archives import check_source
from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.custom.options import draw_splits, input_digests, with_recipe_keys
from tcnca.data.custom.streams import list_files, read_errors
from tcnca.data.datasets import DatasetSpec, canonical_name, get_dataset, is_dataset
from tcnca.data.generate import Plan, generate_in_memory
from tcnca.data.manifest import MANIFEST, PREPARE_AGAIN
from tcnca.data.npy import array_errors, check_memory
from tcnca.data.prepare import data_folder
from tcnca.data.schema import SPLITS, Columns, Content, Kind, concatenate, take
from tcnca.data.store import Dataset, checksum
from tcnca.data.tasks import ClassificationTask, ForecastTask, LanguageTask, PairTask, RegressionTask, Task
from tcnca.errors import ConfigError, DataError, shown

STREAM_EVAL_SIZE = 500
"""Validation and test examples that are generated for a stream if the data set is not prepared."""

MAX_GENERATED_EXAMPLES = 100
"""Examples that `load_examples` generates at most if the data set is not prepared."""

_TASKS: dict[Kind, type[Task]] = {
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
    """Load the task of a data set.

    Args:
        source: the name of a data set that `prepare_dataset` has stored in `folder`, the folder of a prepared data set,
            or your own file or folder, which is read into memory.
        folder: folder of prepared data sets, by default `data_folder()`.
        stream: generate training examples as they are needed, without end. Only for generated data sets. If the data
            set is not prepared, `STREAM_EVAL_SIZE` examples each are generated for validation and test.
        val_fraction: fraction of the training split to use for validation if the data set has no validation split.
        seed: seed of the validation split, or of the examples generated for validation and test.
        custom: how to read your own files; refused for a data set that is already prepared.
        kind: the expected kind of task, for example `language`; other data sets are refused.
        options: options of the task, for example `max_length=1000` to truncate sequences, or `carry_state=False` for
            EnWik8.
    """
    folder = data_folder() if folder is None else Path(folder)
    defaults = CustomOptions().to_dict()
    given = ", ".join(
        f"{name}={value!r}" for name, value in (custom.to_dict() if custom else {}).items() if value != defaults[name]
    )
    if stream and val_fraction:
        raise ConfigError(f"val_fraction: expected 0 for a stream, got {val_fraction}; remove it")
    if stream:
        spec = get_dataset(str(source))
        data = _open_for_stream(spec, folder, seed)
        options["stream"] = spec.stream()
    else:
        if kind in ("regression", "forecast") and (custom is None or custom.kind is None):
            # Tables have texts or numbers, which can be used in several ways.
            custom = dataclasses.replace(custom or CustomOptions(), kind=kind)
        data = _open(source, folder, custom)
    if given and data.folder is not None:
        raise ConfigError(
            f"custom: expected no options, since {source} is already prepared, got {given}; remove them, or prepare it "
            "again with them"
        )
    if kind is not None and data.manifest["kind"] != kind:
        hint = "; a plain text is for `tcnca train lm`" if data.manifest["kind"] == "language" else ""
        raise ConfigError(f"{source}: expected data of kind {kind}, got {data.manifest['kind']}{hint}")
    if val_fraction:
        data = _split_validation(data, val_fraction, seed)
    return _build_task(data, options)


def _open_for_stream(spec: DatasetSpec, folder: Path, seed: int) -> Dataset:
    """Open the prepared data set, or else generate one for validation and test."""
    prepared, plan = folder / spec.name, spec.plan(None, seed)
    if not (prepared / MANIFEST).is_file():
        return Dataset(spec.name, _manifest(spec), _GeneratedSplits(plan))
    data = Dataset.open(prepared)
    version, expected = data.manifest.get("version"), plan.generator.version
    if version != expected:
        raise DataError(
            f"{prepared}: expected version {expected} of the generator, got {version}; a stream could show "
            "examples of its test split, prepare it again with --force, or choose another folder"
        )
    return data


class _GeneratedSplits(Mapping[str, Columns]):
    """Validation and test examples, generated on first use, and an empty training split."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._splits: dict[str, Columns] = {}

    def __getitem__(self, split: str) -> Columns:
        if split not in SPLITS:
            raise KeyError(split)
        if split not in self._splits:
            wanted = 0 if split == "train" else STREAM_EVAL_SIZE
            # A single example is enough to know the columns of an empty split.
            shard_size = self._plan.shard_size if wanted else 1
            sizes = {**dict.fromkeys(SPLITS, 0), split: wanted}
            plan = dataclasses.replace(self._plan, sizes=sizes, shard_size=shard_size)
            self._splits[split] = generate_in_memory(plan)[split]
        return self._splits[split]

    def __iter__(self) -> Iterator[str]:
        return iter(SPLITS)

    def __len__(self) -> int:
        return len(SPLITS)


def find_source(source: str | Path, folder: Path | str | None = None) -> Path:
    """Return the folder of a prepared data set, or your own file or folder, without reading it.

    Raises a DataError if there is none, or if a file cannot be opened. The arguments are those of `load_task`.
    """
    path, folder = Path(source), data_folder() if folder is None else Path(folder)
    if not str(source):
        raise DataError("source: expected the name of a data set, or a file or folder, got an empty text")
    # The system refuses some paths, for example long ones.
    with read_errors(path):
        exists = path.exists()
        places = (folder / canonical_name(path.name) if str(source) == path.name else path, path)
        prepared = next((place for place in places if (place / MANIFEST).is_file()), None)
    if prepared is not None:
        return prepared
    if is_dataset(str(source)):
        raise DataError(f"{source}: is not prepared in {folder}; run `tcnca data prepare {source} --out {folder}`")
    if not exists and path.suffix:
        raise DataError(f"{source}: no such file; check the path")
    if not exists:
        raise DataError(
            f"{source}: expected a prepared data set in {folder}, a file, or a data set of `tcnca data list`; "
            "there is none of this name"
        )
    check_source(path)
    if path.is_file():
        with read_errors(path), path.open("rb"):
            pass
    return path


def _open(source: str | Path, folder: Path, custom: CustomOptions | None) -> Dataset:
    path = find_source(source, folder)
    if (path / MANIFEST).is_file():
        return Dataset.open(path)
    # Twice its size: the parts, and all of them joined.
    with array_errors(path, "prepare it with `tcnca data prepare`, and give its name instead of the file"):
        check_memory(2 * sum(file.stat().st_size for file in list_files(path)))
    try:
        return _in_memory(path.name, read_custom(path, custom))
    except DataError as error:
        raise with_recipe_keys(error) from error


def load_examples(name: str, folder: Path, split: str, count: int) -> Dataset:
    """Open the prepared data set `name`; if it is generated but not prepared, generate `count` examples of a split."""
    spec = get_dataset(name) if is_dataset(name) else None
    if spec is None or spec.generator is None or (folder / spec.name / MANIFEST).is_file():
        return _open(name, folder, None)
    if count > MAX_GENERATED_EXAMPLES:
        raise DataError(
            f"{name}: is not prepared in {folder}, so only the first {MAX_GENERATED_EXAMPLES} examples are available; "
            f"run `tcnca data prepare {name} --out {folder}` for all"
        )
    sizes = {**dict.fromkeys(SPLITS, 0), split: count}
    plan = dataclasses.replace(spec.plan(None, seed=0), sizes=sizes, shard_size=32)
    return Dataset(spec.name, _manifest(spec), generate_in_memory(plan))


def _in_memory(name: str, content: Content) -> Dataset:
    """Build a data set that is not stored."""
    splits = {split: concatenate(list(parts)) for split, parts in content.splits.items()}
    files = {f"{split}.{column}": checksum(values) for split in splits for column, values in splits[split].items()}
    manifest = {"kind": content.kind, "verified": content.verified, **content.metadata, "files": files}
    return Dataset(name, manifest, splits)


def _manifest(spec: DatasetSpec) -> dict[str, Any]:
    return {"dataset": spec.name, "kind": "classification", "title": spec.title, **spec.metadata}


def _build_task(data: Dataset, options: Mapping[str, Any]) -> Task:
    name, kind = data.manifest.get("dataset"), data.manifest["kind"]
    if name is not None and not is_dataset(name):
        raise DataError(f"{data.name}: expected a data set of `tcnca data list`, got {shown(name)}; {PREPARE_AGAIN}")
    build = _TASKS[kind] if name is None else get_dataset(name).task
    # A partial has no kind, but its function has.
    needed = getattr(getattr(build, "func", build), "kind", kind)
    if needed != kind:
        raise DataError(f"{data.name}: expected data of kind {needed}, as {name} is, got {kind}; {PREPARE_AGAIN}")
    expected = [parameter for parameter in inspect.signature(build).parameters if parameter != "data"]
    for option in options:
        check_choice(option, option, expected)
    return build(data, **options)


def _split_validation(data: Dataset, fraction: float, seed: int) -> Dataset:
    if not 0 < fraction < 1:
        raise ConfigError(f"val_fraction: expected a number between 0 and 1, got {fraction}")
    if "validation" in data.splits:
        raise ConfigError(
            f"val_fraction: expected 0, since {data.name} has a validation split, got {fraction}; remove it"
        )
    train = data.columns("train")
    labels = np.asarray(train["labels"]) if "labels" in train else None
    path = data.folder or Path(data.name)
    chosen = draw_splits(input_digests(train), {"validation": fraction}, seed, path, labels)
    splits: dict[str, Columns] = {**data.splits, **{split: take(train, indices) for split, indices in chosen.items()}}
    return Dataset(data.name, data.manifest, splits)
