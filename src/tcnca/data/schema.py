"""The columns of a data set, and what a reader of files returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import DataError, plural

Kind = Literal["language", "classification", "pairs", "regression", "forecast"]
SPLITS = ("train", "validation", "test")
_MANY_FEATURES = 64
"""So many features, and four times as many as time steps, are unusual."""
BLOCK = 2**20
"""Offsets or labels that are checked at once: there may be more of them than fit into memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths in one array: sequence `i` is `values[offsets[i] : offsets[i + 1]]`."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def from_lengths(cls, values: NDArray[Any], lengths: NDArray[np.int64]) -> Ragged:
        """Build from the concatenated values and the length of each sequence."""
        return cls(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))

    @classmethod
    def from_bytes(cls, texts: Iterable[bytes]) -> Ragged:
        """Build from byte strings, as uint8."""
        texts = list(texts)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return cls.from_lengths(np.frombuffer(b"".join(texts), np.uint8), lengths)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        index = range(len(self))[index]
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each sequence."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.int64]) -> Ragged:
        """Return the sequences at `indices`, in that order."""
        pieces = [self.values[:0], *(self[index] for index in indices)]
        return Ragged.from_lengths(np.concatenate(pieces), self.lengths[indices])


def check_offsets(offsets: NDArray[Any], values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets of a Ragged if they begin at 0, never decrease, and end at the number of values."""
    fits = offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 0 and values.ndim > 0
    fits = fits and bool(offsets[0] == 0 and offsets[-1] == len(values))
    for begin in range(0, len(offsets) if fits else 0, BLOCK):
        block = offsets[begin : begin + BLOCK + 1]
        fits = fits and bool((block[:-1] <= block[1:]).all())
    if not fits:
        raise DataError("expected offsets that increase from 0 to the number of values, got others")
    return offsets


Column = NDArray[Any] | Ragged
Columns = Mapping[str, Column]


def take(columns: Columns, indices: NDArray[np.int64]) -> dict[str, Column]:
    """Return the examples at `indices`, in that order."""
    return {
        name: column.take(indices) if isinstance(column, Ragged) else column[indices]
        for name, column in columns.items()
    }


def head(columns: Columns, count: int) -> dict[str, Column]:
    """Return the first `count` examples without a copy."""
    return {
        name: Ragged(column.values[: column.offsets[count]], column.offsets[: count + 1])
        if isinstance(column, Ragged)
        else column[:count]
        for name, column in columns.items()
    }


def concatenate(parts: Sequence[Columns]) -> dict[str, Column]:
    """Concatenate the examples of several parts."""
    joined: dict[str, Column] = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
        if ragged:
            lengths = np.concatenate([piece.lengths for piece in ragged])
            joined[name] = Ragged.from_lengths(np.concatenate([piece.values for piece in ragged]), lengths)
        else:
            joined[name] = np.concatenate([np.asarray(piece) for piece in pieces])
    return joined


def num_examples(columns: Columns) -> int:
    """Return the number of examples."""
    return len(next(iter(columns.values())))


def value_shape(columns: Columns) -> tuple[int, int] | None:
    """Return the time steps of the longest real-valued sequence and its features; None if there are no such ones."""
    match columns.get("values"):
        case None:
            return None
        case Ragged() as ragged:
            return int(ragged.lengths.max(initial=0)), ragged.values.shape[-1]
        case values:
            return values.shape[1], values.shape[2]


def shape_warning(columns: Columns) -> str:
    """Return a warning if the time steps and the features of the sequences seem to be exchanged, else nothing."""
    steps, features = value_shape(columns) or (0, 0)
    if features < max(_MANY_FEATURES, 4 * steps):
        return ""
    return (
        f"values: {features:,} features in only {plural(steps, 'time step')}; arrays are [examples, time, features], "
        "transpose yours if they are [examples, features, time]"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """The examples of a data set, split by split, and its metadata.

    By kind, the columns of a split are

    - `language`: `bytes`, uint8 `[bytes]`, one long stream;
    - `classification`: `tokens` (Ragged uint8, or uint8 `[examples, time]`), or `pixels` (uint8 `[examples, height,
      width]`), or `values` (float32 `[examples, time, features]`, or Ragged `[time, features]`); and `labels`, int64
      `[examples]`;
    - `pairs`: `first` and `second` (Ragged uint8), and `labels`;
    - `regression`: `values`, and `targets`, float32 `[examples, outputs]`;
    - `forecast`: `values` alone.
    """

    kind: Kind
    """What a model does with the data."""
    splits: Mapping[str, Iterable[Columns]]
    """The examples of each split, in one or more parts that each fit in memory."""
    origin: str
    """A web address or a file name, for display."""
    verified: bool
    """Whether the data equals the published data set byte for byte."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More to store in the manifest, serializable as JSON, for example `class_names`."""
