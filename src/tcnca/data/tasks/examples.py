"""Tasks of separate examples: a class of a sequence, a class of a pair, or numbers."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.data.batch import IGNORE, Batch, padded, tensor
from tcnca.data.columns import Columns, Ragged, count
from tcnca.data.generators.generator import Stream
from tcnca.data.rng import CounterRNG
from tcnca.data.sampler import alike, groups, part, places, training_part
from tcnca.data.schema import Kind
from tcnca.data.store import Dataset
from tcnca.data.tasks.task import Task, class_loss, class_metric_sums, number_loss, precise
from tcnca.errors import ConfigError
from tcnca.models.heads import ClassifierHeadConfig, PairHeadConfig, RegressionHeadConfig
from tcnca.models.inputs import InputConfig, TokenInputConfig, ValueInputConfig


class ExampleTask(Task):
    """A task whose batches are made of examples: in training drawn without replacement, or from an endless stream."""

    def __init__(
        self, data: Dataset, *, max_length: int | None = None, by_length: bool = False, stream: Stream | None = None
    ) -> None:
        super().__init__(data)
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length: got {max_length}, allowed is at least 1")
        if by_length and stream is not None:
            raise ConfigError("by_length: got True, but the examples of a stream have no lengths until they are made")
        self.max_length, self.by_length = max_length, by_length
        self._stream = stream

    def batch(self, step: int, size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """`size` examples; an epoch's end may lie inside a batch. With `by_length` they are of like lengths."""
        first, last = training_part(size, rank, world_size)
        begin, end = step * size + first, step * size + last
        columns = self.data.columns("train")
        if self._stream is not None:
            batch = self._collate(self._stream.take(seed, begin, end), np.arange(end - begin))
        elif self.by_length:
            batch = self._collate(columns, alike(seed, self._lengths(columns), step, size)[first:last])
        else:
            batch = self._collate(columns, places(seed, count(columns), begin, end))
        return dataclasses.replace(batch, weight=(end - begin) * world_size / size)

    def _lengths(self, columns: Columns) -> NDArray[np.int64]:
        """The length of each example, for a pair that of the longer sequence; the same for all that have none."""
        found = [column.lengths for column in columns.values() if isinstance(column, Ragged)]
        max_length = functools.reduce(np.maximum, found, np.zeros(count(columns), np.int64))
        return max_length if self.max_length is None else np.minimum(max_length, self.max_length)

    def eval_batches(self, split: str, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """A split in batches of `size` examples, everything once; those of a batch are of like lengths."""
        columns = self.data.columns(self.eval_split(split))
        column = next(iter(columns.values()))
        order, begins = np.arange(count(columns)), np.array(groups(count(columns), size))
        if isinstance(column, Ragged):
            order = np.argsort(column.lengths, kind="stable")
            # Who looks at some batches only is not to see the shortest sequences alone.
            begins = begins[CounterRNG(0, "evaluation").permutation(len(begins))]
        for begin in begins:
            together = order[begin : begin + size]
            first, last = part(len(together), rank, world_size)
            batch = self._collate(columns, together[first:last] if last > first else together[:1])
            if last == first:
                batch.targets.fill_(torch.nan if batch.targets.is_floating_point() else IGNORE)
            yield batch

    @abc.abstractmethod
    def _collate(self, columns: Columns, chosen: NDArray[np.int64]) -> Batch:
        """The batch of the examples at `chosen`."""


class _Sequences:
    """Turns the sequences of a set into what a model takes in: tokens, pixels in a row, or numbers."""

    def __init__(self, data: Dataset, max_length: int | None) -> None:
        facts = data.manifest
        self.max_length = max_length
        column = next(iter(data.columns("train").values()))
        self.shape = column.values.shape[1:] if isinstance(column, Ragged) else column.shape[1:]
        self.column = next(iter(data.columns("train")))
        if self.column == "pixels" and max_length is not None:
            raise ConfigError(f"max_length: got {max_length}, but a picture is read whole; leave it out")
        self.vocab_size = len(facts["symbols"]) if "symbols" in facts else 256
        features = self.shape[-1] if self.column == "values" else 1
        self.mean = np.broadcast_to(np.asarray(facts.get("mean", 0.0), np.float32), (features,))
        self.deviation = np.broadcast_to(np.asarray(facts.get("deviation", 1.0), np.float32), (features,))

    @property
    def input(self) -> InputConfig:
        if self.column in ("pixels", "values"):
            return ValueInputConfig(features=len(self.mean))
        return TokenInputConfig(vocab_size=self.vocab_size)

    def __call__(
        self, columns: Columns, name: str, chosen: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        if name == "pixels":
            pixels = np.asarray(columns[name][chosen], np.float32).reshape(len(chosen), -1, 1)  # type: ignore[index]
            return (pixels / 255 - self.mean) / self.deviation, None
        if name == "values":
            values, lengths = padded(columns[name], chosen, self.max_length, np.float32)
            standard = (values - self.mean) / self.deviation
            if lengths is not None:
                standard[np.arange(standard.shape[1]) >= lengths[:, None]] = 0
            return standard, lengths
        return padded(columns[name], chosen, self.max_length, np.int64)


class ClassificationTask(ExampleTask):
    """Name the class of a sequence."""

    kind: ClassVar[Kind] = "classification"
    metric = "accuracy"

    def __init__(
        self, data: Dataset, *, max_length: int | None = None, by_length: bool = False, stream: Stream | None = None
    ) -> None:
        super().__init__(data, max_length=max_length, by_length=by_length, stream=stream)
        self._sequences = _Sequences(data, max_length)

    @property
    def input(self) -> InputConfig:
        """Tokens, or numbers for pixels and signals."""
        return self._sequences.input

    @property
    def head(self) -> ClassifierHeadConfig | PairHeadConfig:
        """Logits of the classes."""
        return ClassifierHeadConfig(num_classes=len(self.classes))

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        return class_loss(logits, batch.targets)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Right answers and all answers."""
        return class_metric_sums(logits, batch.targets)

    def _collate(self, columns: Columns, chosen: NDArray[np.int64]) -> Batch:
        inputs, lengths = self._sequences(columns, self._sequences.column, chosen)
        return Batch(
            inputs=torch.from_numpy(inputs), lengths=tensor(lengths), targets=torch.from_numpy(_labels(columns, chosen))
        )


class PairTask(ClassificationTask):
    """Name the class of two documents."""

    kind: ClassVar[Kind] = "pairs"

    @property
    def head(self) -> PairHeadConfig:
        """Logits of the classes of a pair."""
        return PairHeadConfig(num_classes=len(self.classes))

    def _collate(self, columns: Columns, chosen: NDArray[np.int64]) -> Batch:
        first, first_lengths = self._sequences(columns, "first", chosen)
        second, second_lengths = self._sequences(columns, "second", chosen)
        return Batch(
            inputs=torch.from_numpy(first),
            lengths=tensor(first_lengths),
            second=torch.from_numpy(second),
            second_lengths=tensor(second_lengths),
            targets=torch.from_numpy(_labels(columns, chosen)),
        )


def _labels(columns: Columns, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(columns["labels"][chosen], np.int64)  # type: ignore[index]


class RegressionTask(ExampleTask):
    """Predict numbers from a sequence. A model learns them standardized; the metric is in their own units."""

    kind = "regression"
    metric = "mean squared error"

    def __init__(self, data: Dataset, *, max_length: int | None = None, by_length: bool = False) -> None:
        super().__init__(data, max_length=max_length, by_length=by_length)
        self._sequences = _Sequences(data, max_length)
        targets = np.asarray(data.columns("train")["targets"], np.float64)
        deviation = targets.std(axis=0)
        self.target_mean = targets.mean(axis=0).astype(np.float32)
        self.target_deviation = np.where(deviation > 0, deviation, 1).astype(np.float32)

    @property
    def input(self) -> InputConfig:
        """Numbers."""
        return self._sequences.input

    @property
    def head(self) -> RegressionHeadConfig:
        """The predicted numbers, standardized."""
        return RegressionHeadConfig(outputs=len(self.target_mean))

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean squared error of the standardized numbers."""
        return number_loss(logits, batch.targets)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of squared errors in the numbers' own units, and how many there are."""
        return squares_metric_sums(logits, batch.targets, self.target_deviation)

    def _collate(self, columns: Columns, chosen: NDArray[np.int64]) -> Batch:
        inputs, lengths = self._sequences(columns, "values", chosen)
        targets = (np.asarray(columns["targets"][chosen]) - self.target_mean) / self.target_deviation  # type: ignore[index]
        return Batch(inputs=torch.from_numpy(inputs), lengths=tensor(lengths), targets=torch.from_numpy(targets))


def squares_metric_sums(outputs: Tensor, targets: Tensor, deviation: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Sum of squared errors in units of the data, and how many there are."""
    counted = ~torch.isnan(targets)
    errors = (outputs.float() - targets) * torch.as_tensor(deviation, device=targets.device)
    return precise(torch.where(counted, errors, 0)).square().sum(), counted.sum()
