"""Forecasting: predict the next values of real-valued sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tcnca.config import check_at_least
from tcnca.data.batch import Batch, optional_tensor
from tcnca.data.rng import CounterRNG
from tcnca.data.sampler import batch_starts, eval_windows, rank_range, shuffled_indices, training_rank_range
from tcnca.data.schema import Ragged
from tcnca.data.store import Dataset
from tcnca.data.tasks.base import SquaredErrorMixin, Task
from tcnca.errors import DataError
from tcnca.models.heads import RegressionHeadConfig
from tcnca.models.inputs import ValueInputConfig
from tcnca.models.preprocessing import Preprocessing


class ForecastTask(SquaredErrorMixin, Task):
    """Predict the values of the next time step at every time step.

    For training, sequences are divided into windows of `window` time steps; each time a window is drawn, it is shifted
    by up to half its width within the sequence. In evaluation each sequence is read from its beginning, `window` steps
    at a time, and the state is carried. The loss is in standardized units, the metric in the units of the data.
    """

    kind = "forecast"
    causal = True

    def __init__(self, data: Dataset, *, window: int = 1024) -> None:
        super().__init__(data)
        check_at_least("window", window, 1)
        self.window = window
        self._mean, self.target_std = tuple(data.manifest["mean"]), tuple(data.manifest["std"])
        steps = self._steps("train")
        if not (steps > 0).any():
            raise DataError(f"{data.name}: expected a training sequence of at least two time steps, got none")
        # The sequence of each window, and its position in that sequence.
        windows = -(-steps // window)
        self._sequence = np.repeat(np.arange(len(steps)), windows)
        self._position = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)

    @property
    def input(self) -> ValueInputConfig:
        """The values of a time step."""
        return ValueInputConfig(features=len(self._mean))

    @property
    def head(self) -> RegressionHeadConfig:
        """The values of the next time step."""
        return RegressionHeadConfig(outputs=len(self._mean), pooling="none")

    def preprocessing(self) -> Preprocessing:
        """Return the normalization, which is the same for inputs and targets."""
        mean, std = self._mean, self.target_std
        return Preprocessing(
            task=self.kind, input_mean=mean, input_std=std, target_mean=mean, target_std=std, **self.column_names()
        )

    def batch(self, step: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """Return `batch_size` windows."""
        rows = slice(*training_rank_range(batch_size, rank, world_size))
        # Place the whole batch: the weight of this part depends on the number of valid steps in the other parts.
        begin, end = step * batch_size, (step + 1) * batch_size
        chosen = shuffled_indices(seed, len(self._sequence), begin, end)
        sequence = self._sequence[chosen]
        half = self.window // 2
        shift = np.array(
            [CounterRNG(seed, "shift", index).integers(-half, self.window - half, 1)[0] for index in range(begin, end)],
            np.int64,
        )
        steps = self._steps("train")[sequence]
        begins = np.clip(self._position[chosen] * self.window + shift, 0, np.maximum(steps - self.window, 0))
        valid = np.minimum(steps - begins, self.window)
        batch = self._windows("train", sequence[rows], begins[rows], int(valid[rows].max()), valid[rows])
        return dataclasses.replace(batch, weight=float(valid[rows].sum() * world_size / valid.sum()))

    def eval_batches(self, split: str, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Read whole sequences, `batch_size` at once, window by window; every value but the first is predicted once."""
        split = self.eval_split(split)
        steps = self._steps(split)
        for begin in batch_starts(len(steps), batch_size):
            group = np.arange(begin, min(begin + batch_size, len(steps)))
            first, last = rank_range(len(group), rank, world_size)
            rows = group[first:last] if last > first else group[:1]
            lengths = steps[rows] if last > first else 0 * steps[rows]
            for offset, width, valid in eval_windows(lengths, int(steps[group].max()), self.window):
                yield self._windows(split, rows, np.full(len(rows), offset), width, valid, continues=offset > 0)

    def _steps(self, split: str) -> NDArray[np.int64]:
        """Return the number of predictions in each sequence, one less than its time steps."""
        values = self.data.columns(split)["values"]
        lengths = values.lengths if isinstance(values, Ragged) else np.full(len(values), values.shape[1])
        return np.maximum(lengths - 1, 0)

    def _windows(
        self,
        split: str,
        rows: NDArray[np.int64],
        begins: NDArray[np.int64],
        width: int,
        valid: NDArray[np.int64],
        continues: bool = False,
    ) -> Batch:
        """Return windows of the sequences `rows` from `begins`, and the values one step later as targets."""
        values = self.data.columns(split)["values"]
        inputs = np.zeros((len(rows), width, len(self._mean)), np.float32)
        targets = np.full_like(inputs, np.nan)
        for index, (row, begin, count) in enumerate(zip(rows, begins, valid, strict=True)):
            inputs[index, :count] = values[row][begin : begin + count]
            targets[index, :count] = values[row][begin + 1 : begin + 1 + count]
        lengths = np.maximum(valid, 1) if (valid < width).any() else None
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            lengths=optional_tensor(lengths),
            continues=continues,
        )
