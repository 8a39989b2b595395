"""Batches: what a model reads, what it should say, and how much of it is real."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.data.columns import Column, Ragged

IGNORE = -100
"""A class or token that does not count, as in `torch.nn.functional.cross_entropy`. Numbers that do not are NaN."""


_NARROWEST = 64
"""Below this, rows cost next to nothing, so one length serves all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Some examples, padded on the right to the max_length of them."""

    inputs: Tensor
    """Tokens, int64 `[rows, time]`, or numbers, float32 `[rows, time, features]`."""
    targets: Tensor
    """Classes, int64 `[rows]`; next tokens, int64 `[rows, time]`; or numbers, float32 `[rows, outputs]` or
    `[rows, time, outputs]`. Those that do not count are `IGNORE` or NaN."""
    lengths: Tensor | None = None
    """Real time steps of each row, int64 `[rows]`; None if all are real."""
    second: Tensor | None = None
    """The second sequence of each pair."""
    second_lengths: Tensor | None = None
    """Its real time steps."""
    continues: bool = False
    """Whether the rows go on where those of the batch before ended, so that its state is to be carry_state on."""
    weight: float = 1.0
    """What to multiply the loss of this process by, for the mean over all processes to be that of the whole batch:
    their parts of a training batch need not be equally large."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def tokens(self) -> int:
        """Real time steps in all rows."""
        return _real(self.inputs, self.lengths) + (
            0 if self.second is None else _real(self.second, self.second_lengths)
        )

    def model_inputs(self) -> dict[str, Any]:
        """What to call a model with: `model(**batch.model_inputs())`."""
        if self.second is None:
            return {"x": self.inputs, "lengths": self.lengths}
        second = {"second": self.second, "lengths2": self.second_lengths}
        return {"x": self.inputs, "lengths": self.lengths, **second}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in memory that a GPU copies from without waiting."""
        return self._map(lambda tensor: tensor.pin_memory())

    def widened(self) -> Batch:
        """The batch with rows padded to the next of few lengths, powers of two and those halfway between.

        Code that is compiled for each length anew then serves batches of almost any. Targets must be one a row.
        """
        inputs, lengths = _widened(self.inputs, self.lengths)
        if self.second is None:
            return dataclasses.replace(self, inputs=inputs, lengths=lengths)
        second, second_lengths = _widened(self.second, self.second_lengths)
        return dataclasses.replace(self, inputs=inputs, lengths=lengths, second=second, second_lengths=second_lengths)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **changed)


def _real(inputs: Tensor, lengths: Tensor | None) -> int:
    return inputs.shape[0] * inputs.shape[1] if lengths is None else int(lengths.sum())


def _widened(inputs: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if lengths is None:
        # All rows are full: so are those of other batches, most likely, and no padding is cheaper than any.
        return inputs, None
    rows, time = inputs.shape[:2]
    power = 1 << (time - 1).bit_length()
    wide = max(power // 4 * 3 if time <= power // 4 * 3 else power, _NARROWEST)
    out = inputs.new_zeros(rows, wide, *inputs.shape[2:])
    out[:, :time] = inputs
    return out, lengths


def padded(
    column: Column, places: NDArray[np.int64], max_length: int | None, dtype: Any
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Sequences of a column, cut at `max_length`, side by side; and their lengths, None if they are all the same."""
    if not isinstance(column, Ragged):
        return np.asarray(column[places][:, :max_length], dtype), None
    rows = [column[place][:max_length] for place in places]
    lengths = np.array([len(row) for row in rows], np.int64)
    # A model needs at least one time step; an empty sequence has one of padding.
    out = np.zeros((len(rows), max(int(lengths.max(initial=0)), 1), *column.values.shape[1:]), dtype)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return out, None if (lengths == out.shape[1]).all() else lengths


def tensor(array: NDArray[Any] | None) -> Tensor | None:
    """The array as a tensor, if there is one."""
    return None if array is None else torch.from_numpy(array)
