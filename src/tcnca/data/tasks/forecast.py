"""Forecasting: predict the next values of real-valued sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.data.batch import Batch, tensor
from tcnca.data.columns import Ragged
from tcnca.data.rng import CounterRNG
from tcnca.data.sampler import calls, groups, part, places, training_part
from tcnca.data.store import Dataset
from tcnca.data.tasks.examples import squares_metric_sums
from tcnca.data.tasks.task import Task, number_loss
from tcnca.errors import ConfigError, DataError
from tcnca.models.heads import RegressionHeadConfig
from tcnca.models.inputs import ValueInputConfig


class ForecastTask(Task):
    """Predict, at every time, the values of the next.

    Sequences are cut into windows of `window` time steps to train on; each time a window is drawn, it is moved by up to
    half its width, as far as the sequence reaches. In evaluation each sequence is read from its beginning, `window`
    steps a call, with the state carry_state on. Values are standardized; the metric is in their own units.
    """

    kind = "forecast"
    metric = "mean squared error"
    causal = True

    def __init__(self, data: Dataset, *, window: int = 1024) -> None:
        super().__init__(data)
        if window < 1:
            raise ConfigError(f"window: got {window}, allowed is at least 1")
        self.window = window
        self._mean = np.asarray(data.manifest["mean"], np.float32)
        self._deviation = np.asarray(data.manifest["deviation"], np.float32)
        steps = self._steps("train")
        if not (steps > 0).any():
            raise DataError(f"{data.name}: no training sequence has the two time steps that forecasting needs")
        # The sequence of each window, and its place among that sequence's windows.
        windows = -(-steps // window)
        self._sequence = np.repeat(np.arange(len(steps)), windows)
        self._place = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)

    @property
    def input(self) -> ValueInputConfig:
        """The values of a time."""
        return ValueInputConfig(features=len(self._mean))

    @property
    def head(self) -> RegressionHeadConfig:
        """The values of the next time, standardized."""
        return RegressionHeadConfig(outputs=len(self._mean), pooling="none")

    def batch(self, step: int, size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """`size` windows."""
        mine = slice(*training_part(size, rank, world_size))
        # All of the batch is placed: how much of it counts elsewhere decides what this part weighs.
        begin, end = step * size, (step + 1) * size
        chosen = places(seed, len(self._sequence), begin, end)
        sequence = self._sequence[chosen]
        half = self.window // 2
        shift = np.array(
            [
                CounterRNG(seed, "shift", number).integers(-half, self.window - half, 1)[0]
                for number in range(begin, end)
            ],
            np.int64,
        )
        steps = self._steps("train")[sequence]
        begins = np.clip(self._place[chosen] * self.window + shift, 0, np.maximum(steps - self.window, 0))
        real = np.minimum(steps - begins, self.window)
        batch = self._windows("train", sequence[mine], begins[mine], int(real[mine].max()), real[mine])
        return dataclasses.replace(batch, weight=float(real[mine].sum() * world_size / real.sum()))

    def eval_batches(self, split: str, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Whole sequences, `size` at once, call by call; every value but the first of a sequence is predicted once."""
        split = self.eval_split(split)
        steps = self._steps(split)
        for group in groups(len(steps), size):
            together = np.arange(group, min(group + size, len(steps)))
            first, last = part(len(together), rank, world_size)
            rows = together[first:last] if last > first else together[:1]
            length = steps[rows] if last > first else 0 * steps[rows]
            for offset, width, real in calls(length, int(steps[together].max()), self.window):
                yield self._windows(split, rows, np.full(len(rows), offset), width, real, continues=offset > 0)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean squared error of the standardized values."""
        return number_loss(logits, batch.targets)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of squared errors in the values' own units, and how many there are."""
        return squares_metric_sums(logits, batch.targets, self._deviation)

    def _steps(self, split: str) -> NDArray[np.int64]:
        """Number of predictions in each sequence: one less than its values."""
        values = self.data.columns(split)["values"]
        lengths = values.lengths if isinstance(values, Ragged) else np.full(len(values), values.shape[1])
        return np.maximum(lengths - 1, 0)

    def _windows(
        self,
        split: str,
        rows: NDArray[np.int64],
        begins: NDArray[np.int64],
        d_model: int,
        real: NDArray[np.int64],
        continues: bool = False,
    ) -> Batch:
        """From each of `rows` the values from `begins` and, as targets, those one later; of both `real` count."""
        values = self.data.columns(split)["values"]
        out = np.full((len(rows), d_model + 1, len(self._mean)), np.nan, np.float32)
        for place, (row, begin, count) in enumerate(zip(rows, begins, real, strict=True)):
            if count:
                out[place, : count + 1] = values[row][begin : begin + count + 1]
        out = (out - self._mean) / self._deviation
        inputs, targets = np.nan_to_num(out[:, :-1]), out[:, 1:].copy()
        # The last value of a row that ends here is an input of nothing.
        inputs[np.arange(d_model) >= real[:, None]] = 0
        lengths = np.maximum(real, 1) if (real < d_model).any() else None
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            lengths=tensor(lengths),
            continues=continues,
        )
