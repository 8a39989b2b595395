"""Tasks of separate examples: a class of a sequence or of a pair, real-valued targets, or associative recall."""

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

from tcnca.config import check_at_least
from tcnca.data.batch import IGNORE, Batch, optional_tensor, pad_sequences
from tcnca.data.generate import ExampleStream
from tcnca.data.manifest import PREPARE_AGAIN
from tcnca.data.rng import CounterRNG
from tcnca.data.sampler import batch_starts, bucketed_indices, rank_range, shuffled_indices, training_rank_range
from tcnca.data.schema import Columns, Kind, Ragged, num_examples
from tcnca.data.store import Dataset
from tcnca.data.tasks.base import SquaredErrorMixin, Task, class_loss, class_metric_sums
from tcnca.errors import ConfigError, DataError
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig, PairHeadConfig, RegressionHeadConfig
from tcnca.models.inputs import InputConfig, TokenInputConfig, ValueInputConfig
from tcnca.models.preprocessing import Preprocessing


class ExampleTask(Task):
    """A task whose training batches are drawn from examples without replacement, or from an endless stream."""

    def __init__(
        self,
        data: Dataset,
        *,
        max_length: int | None = None,
        by_length: bool = False,
        stream: ExampleStream | None = None,
    ) -> None:
        super().__init__(data)
        if max_length is not None:
            check_at_least("max_length", max_length, 1)
        if by_length and stream is not None:
            raise ConfigError(
                "by_length: expected False for a stream, whose lengths are not known in advance, got True"
            )
        self.max_length, self.by_length = max_length, by_length
        self._stream = stream
        self._column = next(iter(data.columns("train")))
        if self._column == "pixels" and max_length is not None:
            raise ConfigError(f"max_length: expected None, since images are not truncated, got {max_length}")

    @property
    def input(self) -> InputConfig:
        """Tokens, or real values for pixels and signals."""
        if self._column == "pixels":
            return ValueInputConfig(features=1)
        if self._column == "values":
            column = self.data.columns("train")["values"]
            return ValueInputConfig(features=(column.values if isinstance(column, Ragged) else column).shape[-1])
        return TokenInputConfig(vocab_size=len(self.data.manifest.get("symbols", range(256))))

    def preprocessing(self) -> Preprocessing:
        """Return the normalization of real-valued inputs, or the meaning of the tokens, and the class names."""
        metadata = self.data.manifest
        found: dict[str, Any] = {"task": self.kind, "class_names": self.class_names or None}
        found |= {**self.column_names(), "max_length": self.max_length}
        if self._column == "pixels":
            found["image_size"] = self.data.columns("train")["pixels"].shape[1:]  # type: ignore[union-attr]
        if isinstance(self.input, ValueInputConfig):
            features = self.input.features
            for name in ("mean", "std") if "mean" in metadata else ():
                found[f"input_{name}"] = np.broadcast_to(np.asarray(metadata[name], np.float64), (features,))
        elif "symbols" in metadata:
            found["symbols"] = tuple(metadata["symbols"])
        else:
            found["byte_map"] = tuple(range(256))
        return Preprocessing(**found)

    def notes(self) -> list[str]:
        """Return what a user should know about the data before training."""
        columns, limit = self.data.columns("train"), self.max_length
        total = num_examples(columns)
        inputs = [column for name, column in columns.items() if name not in ("labels", "targets")]
        places = ((column, place) for column in inputs for place in range(1, total))
        # Ends at the first input that differs.
        if total < 2 or any(not np.array_equal(column[place][:limit], column[0][:limit]) for column, place in places):
            return super().notes()
        empty = "" if any(len(column[0]) for column in inputs) else " (empty)"
        cut = "" if empty or limit is None else f" up to max_length={limit}"
        return [
            *super().notes(),
            f"train: expected different inputs, got {total:,} equal ones{empty}{cut}, which teach nothing; "
            "add other examples, or choose the splits yourself, as equal inputs stay in one",
        ]

    def batch(self, step: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """Return `batch_size` examples, of similar lengths with `by_length`. A batch may span two epochs."""
        first, last = training_rank_range(batch_size, rank, world_size)
        begin, end = step * batch_size + first, step * batch_size + last
        columns = self.data.columns("train")
        if self._stream is not None:
            batch = self._collate(self._stream.take(seed, begin, end), np.arange(end - begin))
        elif self.by_length:
            batch = self._collate(columns, bucketed_indices(seed, self._lengths(columns), step, batch_size)[first:last])
        else:
            batch = self._collate(columns, shuffled_indices(seed, num_examples(columns), begin, end))
        return dataclasses.replace(batch, weight=(end - begin) * world_size / batch_size)

    @functools.cached_property
    def longest(self) -> int:
        """Length of the longest training sequence; 0 if all are equally long."""
        return int(self._lengths(self.data.columns("train")).max(initial=0))

    def _lengths(self, columns: Columns) -> NDArray[np.int64]:
        """Return the length of each example, that of the longer sequence for a pair; 0 if all are equally long."""
        found = [column.lengths for column in columns.values() if isinstance(column, Ragged)]
        lengths = functools.reduce(np.maximum, found, np.zeros(num_examples(columns), np.int64))
        return lengths if self.max_length is None else np.minimum(lengths, self.max_length)

    def eval_batches(self, split: str, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Iterate over a split once in batches of `batch_size` examples of similar lengths."""
        columns = self.data.columns(self.eval_split(split))
        column, total = columns[self._column], num_examples(columns)
        order, begins = np.arange(total), np.array(batch_starts(total, batch_size))
        if isinstance(column, Ragged):
            order = np.argsort(column.lengths, kind="stable")
            # Shuffle the batches, so that the first few of them are not all of short sequences.
            begins = begins[CounterRNG(0, "evaluation").permutation(len(begins))]
        for begin in begins:
            indices = order[begin : begin + batch_size]
            first, last = rank_range(len(indices), rank, world_size)
            batch = self._collate(columns, indices[first:last] if last > first else indices[:1])
            if last == first:
                batch.targets.fill_(torch.nan if batch.targets.is_floating_point() else IGNORE)
            yield batch

    def _sequences(self, columns: Columns, name: str, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        """Return padded sequences and their lengths: tokens, pixels from 0 to 1, or values in their own units."""
        if name == "pixels":
            pixels = np.asarray(columns[name][indices], np.float32)  # type: ignore[index]
            return torch.from_numpy(pixels.reshape(len(indices), -1, 1) / 255), None
        dtype = np.float32 if name == "values" else np.int64
        sequences, lengths = pad_sequences(columns[name], indices, self.max_length, dtype)
        return torch.from_numpy(sequences), optional_tensor(lengths)

    @abc.abstractmethod
    def _collate(self, columns: Columns, indices: NDArray[np.int64]) -> Batch:
        """Return the batch of the examples at `indices`."""


class ClassificationTask(ExampleTask):
    """Classify a sequence."""

    kind: ClassVar[Kind] = "classification"
    metric = "accuracy"

    @property
    def head(self) -> ClassifierHeadConfig | PairHeadConfig:
        """Logits of the classes."""
        return ClassifierHeadConfig(num_classes=len(self.class_names))

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        return class_loss(logits, batch.targets)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the number of correct answers and of all answers."""
        return class_metric_sums(logits, batch.targets)

    def _collate(self, columns: Columns, indices: NDArray[np.int64]) -> Batch:
        inputs, lengths = self._sequences(columns, self._column, indices)
        return Batch(inputs=inputs, lengths=lengths, targets=_labels(columns, indices))


class PairTask(ClassificationTask):
    """Classify a pair of documents."""

    kind: ClassVar[Kind] = "pairs"

    @property
    def head(self) -> PairHeadConfig:
        """Logits of the classes of a pair."""
        return PairHeadConfig(num_classes=len(self.class_names))

    def _collate(self, columns: Columns, indices: NDArray[np.int64]) -> Batch:
        inputs, lengths = self._sequences(columns, "first", indices)
        second, second_lengths = self._sequences(columns, "second", indices)
        return Batch(
            inputs=inputs,
            lengths=lengths,
            second=second,
            second_lengths=second_lengths,
            targets=_labels(columns, indices),
        )


class RecallTask(ExampleTask):
    """Associative recall: a language model of which only the last answer counts."""

    kind = "classification"
    metric = "accuracy"
    causal = True

    def __init__(self, data: Dataset, *, stream: ExampleStream | None = None) -> None:
        super().__init__(data, stream=stream)
        if self._column != "tokens":
            raise DataError(f"{data.name}: expected tokens, got {self._column}; {PREPARE_AGAIN}")

    @property
    def head(self) -> LanguageModelHeadConfig:
        """Logits of the next token; those at the last time step are the answer."""
        return LanguageModelHeadConfig(tie_embeddings=False)

    def preprocessing(self) -> Preprocessing:
        """Return the symbols of the tokens, which are also the names of the answers."""
        return dataclasses.replace(super().preprocessing(), task="recall")

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the answers, which are at the last time step."""
        if batch.part[1] > 1:
            return class_loss(logits, batch.targets)  # of which only the answers count, in one of the parts
        return class_loss(logits[:, -1], batch.targets[:, -1])

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the number of correct answers and of all answers."""
        return class_metric_sums(logits[:, -1], batch.targets[:, -1])

    def _collate(self, columns: Columns, indices: NDArray[np.int64]) -> Batch:
        inputs, _ = self._sequences(columns, "tokens", indices)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1] = _labels(columns, indices)
        return Batch(inputs=inputs, targets=targets)


def _labels(columns: Columns, indices: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.asarray(columns["labels"][indices], np.int64))  # type: ignore[index]


class RegressionTask(SquaredErrorMixin, ExampleTask):
    """Predict real values from a sequence. The loss is in standardized units, the metric in the units of the data."""

    kind = "regression"

    def __init__(self, data: Dataset, *, max_length: int | None = None, by_length: bool = False) -> None:
        super().__init__(data, max_length=max_length, by_length=by_length)
        targets = np.asarray(data.columns("train")["targets"], np.float64)
        std = targets.std(axis=0)
        self.target_mean = tuple(targets.mean(axis=0).tolist())
        self.target_std = tuple(np.where(std > 0, std, 1).tolist())

    @property
    def head(self) -> RegressionHeadConfig:
        """The predicted values."""
        return RegressionHeadConfig(outputs=len(self.target_mean))

    def preprocessing(self) -> Preprocessing:
        """Return the normalization of inputs and targets."""
        return dataclasses.replace(super().preprocessing(), target_mean=self.target_mean, target_std=self.target_std)

    def _collate(self, columns: Columns, indices: NDArray[np.int64]) -> Batch:
        inputs, lengths = self._sequences(columns, "values", indices)
        targets = torch.from_numpy(np.asarray(columns["targets"][indices], np.float32))  # type: ignore[index]
        return Batch(inputs=inputs, lengths=lengths, targets=targets)
