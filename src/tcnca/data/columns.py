"""What a split is made of: named columns of equal length, plain arrays or sequences of different lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, one after the other: sequence `i` is `values[offsets[i] : offsets[i + 1]]`."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Sequence[NDArray[Any]], dtype: Any = None) -> Ragged:
        """From arrays that agree in all but their first dimension."""
        lengths = np.fromiter((len(sequence) for sequence in sequences), np.int64, len(sequences))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls(np.concatenate(sequences, dtype=dtype) if sequences else np.zeros(0, dtype), offsets)

    @classmethod
    def of_bytes(cls, texts: Iterable[bytes]) -> Ragged:
        """From byte strings, as uint8."""
        texts = list(texts)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(text) for text in texts], dtype=np.int64)])
        return cls(np.frombuffer(b"".join(texts), np.uint8), offsets)

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
        """The sequences at `indices`, in that order."""
        pieces = [self.values[:0], *(self[index] for index in indices)]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[indices])])
        return Ragged(np.concatenate(pieces), offsets)


Column = NDArray[Any] | Ragged
Columns = Mapping[str, Column]


def take(columns: Columns, indices: NDArray[np.int64]) -> dict[str, Column]:
    """The examples at `indices`, in that order."""
    return {
        name: column.take(indices) if isinstance(column, Ragged) else column[indices]
        for name, column in columns.items()
    }


def head(columns: Columns, wanted: int) -> dict[str, Column]:
    """The first `wanted` examples, without a copy."""
    return {
        name: Ragged(column.values[: column.offsets[wanted]], column.offsets[: wanted + 1])
        if isinstance(column, Ragged)
        else column[:wanted]
        for name, column in columns.items()
    }


def join(parts: Sequence[Columns]) -> dict[str, Column]:
    """The examples of several parts, one after the other."""
    joined: dict[str, Column] = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if isinstance(pieces[0], Ragged):
            ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
            lengths = np.concatenate([piece.lengths for piece in ragged])
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            joined[name] = Ragged(np.concatenate([piece.values for piece in ragged]), offsets)
        else:
            joined[name] = np.concatenate([np.asarray(piece) for piece in pieces])
    return joined


def count(columns: Columns) -> int:
    """Number of examples."""
    return len(next(iter(columns.values())))
