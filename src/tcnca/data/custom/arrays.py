"""Sequences of real values, from NumPy's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, Ragged
from tcnca.data.custom.labels import classes_of, numbered
from tcnca.data.custom.npz import Arrays, Named, Picked, check_left, pick, splits_of
from tcnca.data.custom.options import OF_TABLES, CustomOptions, refuse
from tcnca.data.custom.splits import complete, cut, in_order, missing
from tcnca.data.schema import Content
from tcnca.errors import DataError

ARRAYS = (".npy", ".npz")
"""Endings of the files that are read as arrays."""

_REAL = "fiub"


def read_arrays(origin: Path, files: Mapping[str, Sequence[Path]], options: CustomOptions) -> Content:
    """Read the arrays of each split; a single .npz may hold all of them, with names such as `train_values`.

    A .npy of one or two dimensions is one long series, `[time]` or `[time, features]`.
    """
    refuse(options, OF_TABLES, origin, "arrays")
    for split, paths in files.items():
        if len(paths) > 1:
            raise DataError(f"{origin}: has {len(paths)} files for {split}; join their arrays in one")
    groups = {split: Arrays.of(paths[0]) for split, paths in files.items()}
    sources = list(groups.values())
    if list(groups) == ["train"]:
        groups = splits_of(groups["train"], options)
    missing(groups, options, origin)
    picked = {split: pick(arrays, options) for split, arrays in groups.items()}
    _check_alike(origin, picked)
    check_left(sources, picked, options)
    parts: dict[str, dict[str, Column]] = {split: {"values": _inputs(one)} for split, one in picked.items()}
    _check_features(origin, parts)
    facts = _add_aims(origin, parts, picked)
    whole = _cut_in_time(parts, options, origin) if picked["train"].series else complete(parts, options, origin)
    return Content(
        kind=picked["train"].kind,
        splits={split: [columns] for split, columns in whole.items()},
        origin=origin.resolve().name,
        verified=False,
        facts={**facts, **_spread(whole["train"]["values"])},
    )


def _check_alike(origin: Path, picked: Mapping[str, Picked]) -> None:
    """Refuse splits that hold different things."""
    states: dict[str, Callable[[Picked], object]] = {
        "what is to be predicted": lambda one: one.kind,
        "whether there are lengths": lambda one: one.lengths is not None,
        "whether they are one long series": lambda one: one.series,
    }
    for what, state in states.items():
        if len({state(one) for one in picked.values()}) > 1:
            found = ", ".join(f"{split}: {state(one)}" for split, one in picked.items())
            raise DataError(f"{origin}: the splits differ in {what} ({found}); give all the same arrays")


def _check_features(origin: Path, parts: Mapping[str, Columns]) -> None:
    features = {split: _steps(columns["values"]).shape[-1] for split, columns in parts.items()}
    if len(set(features.values())) > 1:
        found = ", ".join(f"{split}: {number}" for split, number in features.items())
        raise DataError(f"{origin}: the splits differ in their number of features ({found}); give all the same")


def _add_aims(
    origin: Path, parts: Mapping[str, dict[str, Column]], picked: Mapping[str, Picked]
) -> dict[str, list[str]]:
    """Give each split its labels or targets; what there is to remember of them."""
    aims = {split: one.aim for split, one in picked.items() if one.aim is not None}
    for split, aim in aims.items():
        _check_count(aim, picked[split].values)
    if picked["train"].kind == "regression":
        for split, aim in aims.items():
            parts[split]["targets"] = _targets(aim)
    if picked["train"].kind != "classification":
        return {}
    labels = {split: _names(aim) for split, aim in aims.items()}
    classes = classes_of(labels["train"], origin)
    for split, aim in aims.items():
        parts[split]["labels"] = numbered(labels[split], classes, aim.place)
    return {"class_names": classes}


def _inputs(one: Picked) -> Column:
    """The values as float32 `[examples, time, features]`, or cut to their lengths."""
    values = one.values
    shape = values.array.shape
    if values.array.dtype.kind not in _REAL:
        raise DataError(f"{values} has dtype {values.array.dtype}; it must hold real numbers")
    if not one.series and len(shape) not in (2, 3):
        raise DataError(
            f"{values} has shape {shape}; it must be [examples, time] or [examples, time, features], "
            "and one long series goes into a .npy of its own"
        )
    if not values.array.size:
        raise DataError(f"{values} has shape {shape}, it is empty; put values there")
    if one.series:
        return _finite(values).reshape(1, shape[0], -1)
    if one.lengths is None:
        return _finite(values).reshape(*shape[:2], -1)
    lengths = _lengths(one.lengths, values)
    inside = np.arange(shape[1]) < lengths[:, None]
    kept = _finite(values, inside).reshape(*shape[:2], -1)[inside]
    return Ragged(kept, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def _lengths(lengths: Named, values: Named) -> NDArray[np.int64]:
    _check_count(lengths, values)
    array, time = lengths.array, values.array.shape[1]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(
            f"{lengths} has dtype {array.dtype} and shape {array.shape}; lengths are whole numbers [examples]"
        )
    wrong = np.flatnonzero((array < 1) | (array > time))
    if len(wrong):
        raise DataError(
            f"{lengths.place(wrong[0])} is {array[wrong[0]]}, allowed is 1 to {time}, the time of {values.name!r}; "
            "correct it"
        )
    return array.astype(np.int64)


def _finite(named: Named, inside: NDArray[np.bool_] | None = None) -> NDArray[np.float32]:
    """The array as float32; what is not `inside` is padding and may be anything."""
    with np.errstate(over="ignore"):
        real = named.array.astype(np.float32)
    wrong = ~np.isfinite(real)
    if inside is not None:
        wrong &= inside.reshape(*inside.shape, *(1,) * (wrong.ndim - 2))
    if wrong.any():
        index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise DataError(
            f"{named.place(*map(int, index))} is {named.array[index]}, not a number that float32 can hold; "
            "put one in its place, or leave the example out"
        )
    return real


def _check_count(named: Named, values: Named) -> None:
    found = len(named.array) if named.array.ndim else 0
    wanted = len(values.array) if values.array.ndim else 0
    if found != wanted:
        raise DataError(f"{named} is for {found:,} examples, {values.name!r} has {wanted:,}; give one for each example")


def _names(labels: Named) -> list[str]:
    """Labels as strings."""
    array = labels.array
    if array.ndim != 1 or array.dtype.kind not in "iubUS":
        raise DataError(
            f"{labels} has dtype {array.dtype} and shape {array.shape}; labels are whole numbers, truth values or "
            "strings [examples], name real numbers with --targets"
        )
    if array.dtype.kind == "S":
        return [label.decode("utf-8", "backslashreplace") for label in array.tolist()]
    return [str(label).lower() if array.dtype.kind == "b" else str(label) for label in array.tolist()]


def _targets(targets: Named) -> NDArray[np.float32]:
    array = targets.array
    if array.ndim not in (1, 2) or array.dtype.kind not in _REAL or not array.size:
        raise DataError(
            f"{targets} has dtype {array.dtype} and shape {array.shape}; targets are real numbers [examples] or "
            "[examples, outputs]"
        )
    return _finite(targets).reshape(len(array), -1)


def _cut_in_time(parts: Mapping[str, Columns], options: CustomOptions, origin: Path) -> dict[str, Columns]:
    whole = np.asarray(parts["train"]["values"])
    ranges = cut(whole.shape[1], missing(parts, options, origin), origin, "steps")
    return in_order({**parts, **{split: {"values": whole[:, begin:end]} for split, (begin, end) in ranges.items()}})


def _steps(column: Column) -> NDArray[Any]:
    """All steps of all sequences, `[steps, features]`."""
    return column.values if isinstance(column, Ragged) else column.reshape(-1, column.shape[-1])


def _spread(column: Column) -> dict[str, list[float]]:
    """Mean and standard deviation of each feature."""
    steps = _steps(column)
    deviation = steps.std(0, dtype=np.float64)
    deviation[deviation == 0] = 1.0
    return {"mean": steps.mean(0, dtype=np.float64).tolist(), "deviation": deviation.tolist()}
