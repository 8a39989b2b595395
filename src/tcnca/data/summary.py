"""A prepared set in numbers: counts, lengths, symbols and the balance of its classes."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, Ragged, count
from tcnca.data.store import Dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """A split in numbers."""

    examples: int
    """Number of examples; of bytes for a language model."""
    shortest: int
    """Time steps of the shortest sequence."""
    mean: float
    """Mean number of time steps."""
    longest: int
    """Time steps of the longest sequence."""
    symbols: int | None
    """Different tokens that occur; None for real-valued sequences."""
    classes: dict[str, int]
    """Number of examples of each class."""


def summarize_data(data: Dataset) -> dict[str, SplitSummary]:
    """The splits of a set in numbers."""
    names = data.manifest.get("class_names", [])
    return {split: _summary(columns, names) for split, columns in data.splits.items()}


def _summary(columns: Columns, names: list[str]) -> SplitSummary:
    if "bytes" in columns:
        lengths = np.array([count(columns)])
    else:
        inputs = [column for name, column in columns.items() if name not in ("labels", "targets")]
        lengths = np.concatenate([_lengths(column) for column in inputs])
    labels = np.asarray(columns.get("labels", np.zeros(0, np.int64)))
    numbers = np.bincount(labels, minlength=len(names))
    return SplitSummary(
        examples=count(columns),
        shortest=int(lengths.min()) if len(lengths) else 0,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        longest=int(lengths.max()) if len(lengths) else 0,
        symbols=_symbols(columns),
        classes={name: int(number) for name, number in zip(names, numbers, strict=True) if number},
    )


def _lengths(column: Column) -> NDArray[np.int64]:
    if isinstance(column, Ragged):
        return column.lengths
    steps = int(np.prod(column.shape[1:])) if column.dtype == np.uint8 else column.shape[1]
    return np.full(len(column), steps)


def _symbols(columns: Columns) -> int | None:
    tokens = [columns[name] for name in ("bytes", "tokens", "first", "second") if name in columns]
    if not tokens:
        return None
    occurs = np.zeros(256, np.int64)
    for column in tokens:
        values = column.values if isinstance(column, Ragged) else column.reshape(-1)
        occurs += np.bincount(values, minlength=256)
    return int((occurs > 0).sum())
