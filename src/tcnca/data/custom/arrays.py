"""Real-valued sequences from .npy and .npz files."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.custom.options import (
    SPLIT_NAMES,
    TABLE_OPTIONS,
    CustomOptions,
    complete_splits,
    cut_stream,
    encode_labels,
    find_classes,
    in_order,
    list_names,
    missing_splits,
    refuse_options,
    unknown_name,
)
from tcnca.data.npy import SAVE_AGAIN, array_errors, list_arrays, read_array, read_member
from tcnca.data.schema import Column, Columns, Content, Kind, Ragged
from tcnca.errors import DataError, shown
from tcnca.models.preprocessing import Role

ARRAY_SUFFIXES = (".npy", ".npz")
"""Suffixes of the files that are read as arrays."""

VALUE_NAMES = ("values", "x", "X", "data", "sequences", "inputs")
"""Names of an array that is obviously the sequences."""
_REAL = "fiub"
# Values, their splits, and the deviations from their mean in double precision are in memory at the same time.
_COPIES = 4


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a file or of one of its splits: maps the name within the split to the name in the file."""

    path: Path
    names: Mapping[str, str]

    def read(self, name: str) -> NamedArray:
        """Read one of the arrays."""
        if name not in self.names:
            raise unknown_name(name, "array", list(self.names), self.path)
        stored = self.names[name]
        with array_errors(f"{self.path}, array {shown(stored)}", SAVE_AGAIN), self.path.open("rb") as file:
            if self.path.suffix.lower() == ".npy":
                array = read_array(file, self.path.stat().st_size, _COPIES)
            else:
                with zipfile.ZipFile(file) as archive:
                    array = read_member(archive, list_arrays(archive)[stored], _COPIES)
        return NamedArray(self.path, stored, array)


@dataclasses.dataclass(frozen=True)
class NamedArray:
    """An array with its name for messages."""

    path: Path
    name: str
    array: NDArray[Any]

    def __str__(self) -> str:
        return f"{self.path}: array {shown(self.name)}"

    @property
    def form(self) -> str:
        """Dtype and shape, for messages."""
        return f"{self.array.dtype} of shape {self.array.shape}"

    def place(self, *index: int) -> str:
        """Return the location of an element."""
        return f"{self.path}: {shown(self.name)[1:-1]}[{', '.join(str(i) for i in index)}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The arrays that are used."""

    kind: Kind
    values: NamedArray
    lengths: NamedArray | None
    target: NamedArray | None
    """Labels or targets."""
    is_series: bool
    """Whether the values are one long series, `[time]` or `[time, features]`."""


def read_arrays(origin: Path, files: Mapping[str, Sequence[Path]], options: CustomOptions) -> Content:
    """Read the arrays of each split; a single .npz may hold all of them, with names such as `train_values`.

    An .npy of one or two dimensions is one long series, `[time]` or `[time, features]`.
    """
    refuse_options(options, TABLE_OPTIONS, origin, "arrays")
    for split, paths in files.items():
        if len(paths) > 1:
            raise DataError(f"{origin}: expected one file for {split}, got {len(paths)}; join their arrays")
    groups = {split: _list_arrays(paths[0]) for split, paths in files.items()}
    sources = list(groups.values())
    if list(groups) == ["train"]:
        groups = _split_names(groups["train"], options)
    missing_splits(groups, options, origin)
    selected = {split: _select(arrays, options) for split, arrays in groups.items()}
    _check_unused(sources, selected, options)
    return build_content(origin, selected, options, {"columns": _roles(groups["train"], selected["train"])})


def build_content(
    origin: Path, selected: Mapping[str, Selection], options: CustomOptions, metadata: Mapping[str, Any]
) -> Content:
    """Return the content of the arrays of each split; the splits that are not given are taken from training."""
    parts: dict[str, dict[str, Column]] = {split: {"values": _inputs(one)} for split, one in selected.items()}
    _check_splits(origin, selected, parts)
    classes = _add_targets(origin, parts, selected)
    series = selected["train"].is_series
    splits = _cut_series(parts, options, origin) if series else complete_splits(parts, options, origin)
    return Content(
        kind=selected["train"].kind,
        splits={split: [columns] for split, columns in splits.items()},
        origin=origin.resolve().name,
        verified=False,
        metadata={**classes, **_statistics(splits["train"]["values"]), **metadata},
    )


def _roles(arrays: Arrays, selection: Selection) -> dict[Role, str]:
    """Return the names of the arrays that are used; the array of an .npy has no name."""
    if arrays.path.suffix.lower() == ".npy":
        return {}
    target: Role = "labels" if selection.kind == "classification" else "targets"
    used: dict[Role, NamedArray | None] = {
        "values": selection.values,
        "lengths": selection.lengths,
        target: selection.target,
    }
    names = {stored: name for name, stored in arrays.names.items()}
    return {role: names[array.name] for role, array in used.items() if array is not None}


def _list_arrays(path: Path) -> Arrays:
    """List the arrays of an .npz; an .npy holds only values."""
    if path.suffix.lower() == ".npy":
        return Arrays(path, {"values": "values"})
    with array_errors(path, SAVE_AGAIN), zipfile.ZipFile(path) as archive:
        return Arrays(path, {name: name for name in list_arrays(archive)})


def _split_names(arrays: Arrays, options: CustomOptions) -> dict[str, Arrays]:
    """Group arrays by split if they have names such as `train_values` or `values_test`; else all are training.

    Beside `values_test`, `values` without a split are those of training.
    """
    groups: dict[str, dict[str, str]] = {}
    for stored in arrays.names:
        split, name = _parse_name(stored)
        group = groups.setdefault(split, {})
        if split and name in group:
            raise DataError(f"{arrays.path}: arrays {group[name]!r} and {stored!r} mean the same; remove one of them")
        group[name] = stored
    known = set(VALUE_NAMES if options.values is None else (options.values,))
    if "" in groups and "train" not in groups and all(known & group.keys() for group in groups.values()):
        groups["train"] = groups.pop("")
    if not known & groups.get("train", {}).keys():
        return {"train": arrays}
    return {split: Arrays(arrays.path, names) for split, names in groups.items() if split}


def _parse_name(name: str) -> tuple[str, str]:
    """Return the split in an array's name, or an empty text, and the rest of the name."""
    first, _, rest = name.partition("_")
    if rest and first.lower() in SPLIT_NAMES:
        return SPLIT_NAMES[first.lower()], rest
    rest, _, last = name.rpartition("_")
    if rest and last.lower() in SPLIT_NAMES:
        return SPLIT_NAMES[last.lower()], rest
    return "", name


def _select(arrays: Arrays, options: CustomOptions) -> Selection:
    """Select arrays by the options, or else by their names."""
    kind, target = _select_target(arrays, options)
    values = options.values
    if values is None:
        found = [name for name in VALUE_NAMES if name in arrays.names]
        if len(found) != 1:
            state = f"arrays {list_names(found)} could each be" if found else "no array is obviously"
            names = list_names(list(arrays.names))
            raise DataError(f"{arrays.path}: {state} the values; choose one of {names} with --values")
        values = found[0]
    lengths = options.lengths or ("lengths" if "lengths" in arrays.names else None)
    sequences = arrays.read(values)
    return Selection(
        kind=kind,
        values=sequences,
        lengths=None if lengths is None else arrays.read(lengths),
        target=target,
        is_series=arrays.path.suffix.lower() == ".npy" and sequences.array.ndim in (1, 2),
    )


def _select_target(arrays: Arrays, options: CustomOptions) -> tuple[Kind, NamedArray | None]:
    """Return the kind of task and the array of labels or targets."""
    if options.labels is not None and options.targets is not None:
        raise DataError(f"{arrays.path}: expected --labels or --targets, got both; remove one of them")
    implied: dict[str, Kind] = {"labels": "classification", "targets": "regression"}
    names = [name for name in ("labels", "targets", "y") if name in arrays.names]
    for option, kind in implied.items():
        given = getattr(options, option)
        if given is not None and options.kind not in (None, kind):
            contradiction = f"means {kind} and contradicts --kind {options.kind}"
            raise DataError(f"{arrays.path}: --{option} {given!r} {contradiction}; remove one of them")
        if given is not None or options.kind == kind:
            name = given or next((name for name in names if name in (option, "y")), None)
            if name is None:
                raise DataError(
                    f"{arrays.path}: no array is obviously the {option}; choose one of "
                    f"{list_names(list(arrays.names))} with --{option}, or remove --kind"
                )
            return kind, arrays.read(name)
    if options.kind == "forecast" or not names:
        return "forecast", None
    if "labels" in names and "targets" in names:
        raise DataError(f"{arrays.path}: has labels and targets; give --kind classification or --kind regression")
    target = arrays.read(names[0])
    return implied.get(names[0]) or ("regression" if target.array.dtype.kind == "f" else "classification"), target


def _check_unused(files: Collection[Arrays], selected: Mapping[str, Selection], options: CustomOptions) -> None:
    """Refuse arrays that are not used, unless the options determine what to predict."""
    if any(option is not None for option in (options.kind, options.labels, options.targets)):
        return
    chosen = [array for one in selected.values() for array in (one.values, one.lengths, one.target)]
    used = {(array.path, array.name) for array in chosen if array is not None}
    for arrays in files:
        unused = [name for name in arrays.names.values() if (arrays.path, name) not in used]
        if unused:
            raise DataError(
                f"{arrays.path}: the role of {list_names(unused)} is unknown; name the class of each sequence with "
                "--labels, the values to predict from each with --targets, or the length of each with --lengths, or "
                f"give --kind {selected['train'].kind} to ignore them"
            )


def _check_splits(origin: Path, selected: Mapping[str, Selection], parts: Mapping[str, Columns]) -> None:
    """Refuse splits that hold different things."""
    properties: dict[str, dict[str, object]] = {
        "task": {split: one.kind for split, one in selected.items()},
        "presence of lengths": {split: one.lengths is not None for split, one in selected.items()},
        "form, one series or many": {split: one.is_series for split, one in selected.items()},
        "number of features": {split: _flat(columns["values"]).shape[-1] for split, columns in parts.items()},
    }
    for what, by_split in properties.items():
        if len(set(by_split.values())) > 1:
            found = ", ".join(f"{split}: {value}" for split, value in by_split.items())
            raise DataError(f"{origin}: expected the same {what} in all splits, got {found}; use the same arrays")


def _add_targets(
    origin: Path, parts: Mapping[str, dict[str, Column]], selected: Mapping[str, Selection]
) -> dict[str, list[str]]:
    """Add labels or targets to each split, and return the class names."""
    targets = {split: one.target for split, one in selected.items() if one.target is not None}
    for split, target in targets.items():
        _check_count(target, selected[split].values)
        if selected[split].kind == "regression":
            parts[split]["targets"] = _targets(target)
    if selected["train"].kind != "classification":
        return {}
    advice = "name real numbers with --targets"
    labels = {split: label_names(target, advice) for split, target in targets.items()}
    classes = find_classes(labels["train"], origin)
    for split, target in targets.items():
        parts[split]["labels"] = encode_labels(labels[split], classes, target.place)
    return {"class_names": classes}


def _inputs(one: Selection) -> Column:
    """Return the values as float32 `[examples, time, features]`, or without their padding."""
    values, shape = one.values, one.values.array.shape
    if values.array.dtype.kind not in _REAL:
        raise DataError(f"{values}: expected real numbers, got {values.array.dtype}")
    if not one.is_series and len(shape) not in (2, 3):
        raise DataError(
            f"{values}: expected shape [examples, time] or [examples, time, features], got {shape}; save one long "
            "series as .npy"
        )
    if not values.array.size:
        raise DataError(f"{values}: expected values, got an empty array of shape {shape}")
    if one.is_series:
        return _finite(values).reshape(1, shape[0], -1)
    if one.lengths is None:
        return _finite(values).reshape(*shape[:2], -1)
    lengths = _lengths(one.lengths, values)
    inside = np.arange(shape[1]) < lengths[:, None]
    return Ragged.from_lengths(_finite(values, inside).reshape(*shape[:2], -1)[inside], lengths)


def _lengths(lengths: NamedArray, values: NamedArray) -> NDArray[np.int64]:
    _check_count(lengths, values)
    array, time = lengths.array, values.array.shape[1]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{lengths}: expected integers of shape [examples], got {lengths.form}")
    wrong = np.flatnonzero((array < 1) | (array > time))
    if len(wrong):
        raise DataError(
            f"{lengths.place(wrong[0])}: expected 1 to {time}, the time steps of {values.name!r}, got {array[wrong[0]]}"
        )
    return array.astype(np.int64)


def _finite(named: NamedArray, inside: NDArray[np.bool_] | None = None) -> NDArray[np.float32]:
    """Return the array as float32; values that are not `inside` are padding and are not checked."""
    with np.errstate(over="ignore"):
        real = named.array.astype(np.float32, copy=False)
    wrong = ~np.isfinite(real)
    if inside is not None:
        wrong &= inside.reshape(*inside.shape, *(1,) * (wrong.ndim - 2))
    if wrong.any():
        index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise DataError(
            f"{named.place(*map(int, index))}: expected a finite float32 number, got {named.array[index]}; replace it, "
            "or remove the example"
        )
    return real


def _check_count(named: NamedArray, values: NamedArray) -> None:
    found = len(named.array) if named.array.ndim else 0
    if found != len(values.array):
        raise DataError(f"{named}: expected {len(values.array):,} examples, as in {values.name!r}, got {found:,}")


def label_names(labels: NamedArray, advice: str) -> list[str]:
    """Return labels `[examples]` or `[examples, 1]` as text; `advice` says what to do with other arrays.

    The labels of a table are objects, so that a long one does not make all others need as much memory.
    """
    array = labels.array
    if array.ndim == 0 or array.shape[1:] not in ((), (1,)) or array.dtype.kind not in "iubUSO":
        raise DataError(
            f"{labels}: expected integers, booleans or strings of shape [examples] as labels, got {labels.form}; "
            f"{advice}"
        )
    array = array.reshape(-1)
    if array.dtype.kind == "S":
        return [label.decode("utf-8", "backslashreplace") for label in array.tolist()]
    with array_errors(labels, "save it again"):  # strings may have impossible characters
        return [str(label).lower() if array.dtype.kind == "b" else str(label) for label in array.tolist()]


def _targets(targets: NamedArray) -> NDArray[np.float32]:
    array = targets.array
    if array.ndim not in (1, 2) or array.dtype.kind not in _REAL or not array.size:
        raise DataError(
            f"{targets}: expected targets of shape [examples] or [examples, outputs], real numbers, got {targets.form}"
        )
    return _finite(targets).reshape(len(array), -1)


def _cut_series(parts: Mapping[str, Columns], options: CustomOptions, origin: Path) -> dict[str, Columns]:
    train = np.asarray(parts["train"]["values"])
    ranges = cut_stream(train.shape[1], missing_splits(parts, options, origin), origin, "time steps")
    return in_order({**parts, **{split: {"values": train[:, begin:end]} for split, (begin, end) in ranges.items()}})


def _flat(column: Column) -> NDArray[Any]:
    """Return the time steps of all sequences, `[steps, features]`."""
    return column.values if isinstance(column, Ragged) else column.reshape(-1, column.shape[-1])


def _statistics(column: Column) -> dict[str, list[float]]:
    """Return mean and standard deviation of each feature."""
    steps = _flat(column)
    std = steps.std(0, dtype=np.float64)
    std[std == 0] = 1.0
    return {"mean": steps.mean(0, dtype=np.float64).tolist(), "std": std.tolist()}
