"""Names of classes, and labels as their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import DataError

# No longer than a 64-bit number, so that reading one is always cheap.
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MANY_CLASSES = 100


def classes_of(labels: Sequence[str], path: Path) -> list[str]:
    """The classes among the labels of training: in the order of numbers if all are whole, else of the alphabet."""
    distinct = set(labels)
    if len(distinct) > max(_MANY_CLASSES, len(labels) / 2) and all(_NUMBER.fullmatch(label) for label in distinct):
        raise DataError(
            f"{path}: has {len(distinct):,} different labels in {len(labels):,} examples, such as "
            f"{min(distinct)}; they look like numbers to regress, which needs arrays: save values and targets as .npz"
        )
    if len(distinct) < 2:
        raise DataError(
            f"{path}: every label is {min(distinct)!r}; classification needs at least two classes, "
            "add examples of another"
        )
    if all(_WHOLE.fullmatch(label) for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def numbered(labels: Sequence[str], classes: Sequence[str], place: Callable[[int], str]) -> NDArray[np.int64]:
    """The number of each label's class; `place` says where the label at an index was found."""
    numbers = {name: number for number, name in enumerate(classes)}
    for index, label in enumerate(labels):
        if label not in numbers:
            raise DataError(
                f"{place(index)}: label {label!r} does not occur in the training split; "
                "correct it, or add examples of it to training"
            )
    return np.fromiter((numbers[label] for label in labels), np.int64, len(labels))
