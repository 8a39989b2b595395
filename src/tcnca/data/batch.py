"""Batches: model inputs, targets, and the number of valid time steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.data.schema import Column, Ragged

IGNORE = -100
"""A class or token that is not counted, as in `torch.nn.functional.cross_entropy`. Ignored real values are NaN."""

_MIN_BUCKET = 64
"""Shorter rows cost almost nothing, so they are all padded to this length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Examples padded on the right to the longest of them."""

    inputs: Tensor
    """Tokens, int64 `[rows, time]`, or raw values, float32 `[rows, time, features]`, which the model normalizes."""
    targets: Tensor
    """Classes, int64 `[rows]`; next tokens, int64 `[rows, time]`; or raw values, float32 `[rows, outputs]` or
    `[rows, time, outputs]`. Positions that are not counted are `IGNORE` or NaN."""
    lengths: Tensor | None = None
    """Valid time steps of each row, int64 `[rows]`; None if all are valid."""
    second: Tensor | None = None
    """The second sequence of each pair."""
    second_lengths: Tensor | None = None
    """Valid time steps of the second sequences."""
    continues: bool = False
    """Whether the rows continue those of the previous batch, so that its state must be passed on."""
    part: tuple[int, int] = (0, 1)
    """Number of this part of the time axis, and number of equal parts, if rows are divided over processes. `lengths`
    are those of whole rows."""
    weight: float | Tensor = 1.0
    """Factor for the loss of this process so that the mean over all processes is the mean of the whole batch. Processes
    can have different shares of a batch."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def tokens(self) -> int:
        """Number of valid time steps in all rows."""
        second = 0 if self.second is None else _valid_steps(self.second, self.second_lengths, self.part[0])
        return _valid_steps(self.inputs, self.lengths, self.part[0]) + second

    def model_inputs(self) -> dict[str, Any]:
        """Return the arguments of the model: `model(**batch.model_inputs())`."""
        inputs = {"x": self.inputs, "lengths": self.lengths}
        return inputs if self.second is None else {**inputs, "second": self.second, "lengths2": self.second_lengths}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copy the batch to a device."""
        # Only CUDA keeps the order of copies and of what follows them.
        non_blocking = non_blocking and torch.device(device).type == "cuda"
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy the batch to pinned memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def rows(self, begin: int, end: int) -> Batch:
        """Return some of the rows."""
        return self._map(lambda tensor: tensor[begin:end])

    def window(self, begin: int, end: int) -> Batch:
        """Return some of the time steps, which continue those before. Requires a target at every time step."""
        inputs, targets = self.inputs[:, begin:end], self.targets[:, begin:end]
        lengths = None if self.lengths is None else (self.lengths - begin).clamp(0, inputs.shape[1])
        continues = self.continues or begin > 0
        return dataclasses.replace(self, inputs=inputs, targets=targets, lengths=lengths, continues=continues)

    def divide(self, rank: int, count: int) -> Batch:
        """Return part `rank` of `count` equal parts of the time axis, of which the last may have padding.

        Targets at every time step are divided as well, and weighted so that the mean of the losses of all parts is that
        of the whole. Others belong to all parts.
        """
        time = self.inputs.shape[1]
        inputs, lengths = _divide(self.inputs, rank, count), self.lengths
        if time % count and lengths is None:
            lengths = torch.full((len(self),), time)
        second, second_lengths = self.second, self.second_lengths
        if second is not None:
            if second.shape[1] % count and second_lengths is None:
                second_lengths = torch.full((len(self),), second.shape[1])
            second = _divide(second, rank, count)
        targets, weight, real = self.targets, self.weight, self.targets.is_floating_point()
        if targets.dim() == (3 if real else 2):
            targets = _divide(targets, rank, count, torch.nan if real else IGNORE)
            counted = [((~torch.isnan(each)) if real else (each != IGNORE)).sum() for each in (targets, self.targets)]
            weight = weight * float(counted[0] * count / counted[1].clamp(min=1))
        divided = dataclasses.replace(self, inputs=inputs, lengths=lengths, targets=targets, weight=weight)
        return dataclasses.replace(divided, second=second, second_lengths=second_lengths, part=(rank, count))

    @staticmethod
    def join(windows: Sequence[Batch]) -> Batch:
        """Return the batch that windows are cut from: each continues the one before it."""
        if len(windows) == 1:
            return windows[0]
        inputs = torch.cat([each.inputs for each in windows], 1)
        targets = torch.cat([each.targets for each in windows], 1)
        lengths = None
        if any(each.lengths is not None for each in windows):
            full = [each.inputs.new_full((len(each),), each.inputs.shape[1], dtype=torch.long) for each in windows]
            valid = [width if each.lengths is None else each.lengths for each, width in zip(windows, full, strict=True)]
            lengths = torch.stack(valid).sum(0)
        return dataclasses.replace(windows[0], inputs=inputs, targets=targets, lengths=lengths)

    def copy_(self, other: Batch) -> None:
        """Copy inputs, targets and lengths of a batch of equal `signature` into those of this one, without waiting."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name != "weight":
                value.copy_(getattr(other, name), non_blocking=True)

    def signature(self) -> Hashable:
        """Return all but weight and values of the tensors: batches of equal signatures run the same code."""
        return tuple(
            (value.shape, value.dtype) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
            if name != "weight"
        )

    def pad_to_bucket(self, longest: int = 0) -> Batch:
        """Pad rows to the next of a few lengths: powers of two and the midpoints between them.

        Code that is compiled for each length is then compiled only a few times. Requires one target per row.
        `longest` is the greatest length of all rows; 0 if all are equally long.
        """
        inputs, lengths = _pad_to_bucket(self.inputs, self.lengths, longest)
        if self.second is None:
            return dataclasses.replace(self, inputs=inputs, lengths=lengths)
        second, second_lengths = _pad_to_bucket(self.second, self.second_lengths, longest)
        return dataclasses.replace(self, inputs=inputs, lengths=lengths, second=second, second_lengths=second_lengths)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **changed)


def _valid_steps(inputs: Tensor, lengths: Tensor | None, part: int = 0) -> int:
    rows, time = inputs.shape[:2]
    return rows * time if lengths is None else int((lengths - part * time).clamp(0, time).sum())


def _divide(x: Tensor, rank: int, count: int, padding: float = 0) -> Tensor:
    """Return an equal part of the time steps of `x` (`[rows, time, …]`), with padding behind the last."""
    width = -(-x.shape[1] // count)
    own = x[:, rank * width : (rank + 1) * width]
    missing = x.new_full((len(x), width - own.shape[1], *x.shape[2:]), padding)
    return torch.cat([own, missing], 1) if missing.numel() else own


def _pad_to_bucket(inputs: Tensor, lengths: Tensor | None, longest: int) -> tuple[Tensor, Tensor | None]:
    rows, time = inputs.shape[:2]
    if lengths is None and time >= longest:
        # Rows of the greatest length are most likely full in other batches too; padding would only cost time.
        return inputs, None
    lengths = torch.full((rows,), time) if lengths is None else lengths
    power = 1 << (time - 1).bit_length()
    width = max(power // 4 * 3 if time <= power // 4 * 3 else power, _MIN_BUCKET)
    out = inputs.new_zeros(rows, width, *inputs.shape[2:])
    out[:, :time] = inputs
    return out, lengths


def pad_sequences(
    column: Column, indices: NDArray[np.int64], max_length: int | None, dtype: Any
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Stack sequences of a column, truncated to `max_length`; also return their lengths, None if all are equal."""
    if not isinstance(column, Ragged):
        return np.asarray(column[indices][:, :max_length], dtype), None
    rows = [column[index][:max_length] for index in indices]
    lengths = np.array([len(row) for row in rows], np.int64)
    # A model needs at least one time step, so an empty sequence becomes one step of padding.
    out = np.zeros((len(rows), max(int(lengths.max(initial=0)), 1), *column.values.shape[1:]), dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out, None if (lengths == out.shape[1]).all() else lengths


def optional_tensor(array: NDArray[Any] | None) -> Tensor | None:
    """Convert an array to a tensor if there is one."""
    return None if array is None else torch.from_numpy(array)
