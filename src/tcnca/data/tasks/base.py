"""The interface of a task: batches, a loss, a metric, and the model's input and head."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.data.batch import IGNORE, Batch
from tcnca.data.custom.options import describe_columns
from tcnca.data.schema import Kind, num_examples, shape_warning, value_shape
from tcnca.data.store import Dataset
from tcnca.errors import DataError
from tcnca.models.heads import HeadConfig
from tcnca.models.inputs import InputConfig
from tcnca.models.preprocessing import Preprocessing

Metric = Literal["bits per byte", "accuracy", "mean squared error"]


class Task(abc.ABC):
    """A data set and what a model does with it.

    Training batches are a pure function of seed and step, so a resumed run sees the same batches as an uninterrupted
    one. With `world_size` processes each one gets its part of the same batch.

    Inputs are raw: tokens, pixels from 0 to 1, or values in the units of the data. The model normalizes them with the
    statistics of `preprocessing`, which are saved with it.
    """

    kind: ClassVar[Kind]
    metric: ClassVar[Metric]
    causal: ClassVar[bool] = False
    """Whether the model may see only the past."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {size:,}" for split, size in self.sizes.items())
        return f"{type(self).__name__}({self.name!r}: {self.kind}, {sizes}; metric {self.metric})"

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.data.name

    @property
    @abc.abstractmethod
    def input(self) -> InputConfig:
        """Configuration of the model's input."""

    @property
    @abc.abstractmethod
    def head(self) -> HeadConfig:
        """Configuration of the model's head."""

    @abc.abstractmethod
    def preprocessing(self) -> Preprocessing:
        """Return the normalization, class names and byte map that are saved with the model."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is better."""
        return self.metric == "accuracy"

    @property
    def sizes(self) -> dict[str, int]:
        """Number of examples in each split; bytes for a language model."""
        return {split: num_examples(columns) for split, columns in self.data.splits.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; empty if the task has no classes."""
        return tuple(self.data.manifest.get("class_names", ()))

    @property
    def value_shape(self) -> tuple[int, int] | None:
        """Time steps of the longest real-valued training sequence, and its features; None for tokens and pixels."""
        return value_shape(self.data.columns("train"))

    @property
    def used_columns(self) -> str:
        """Which columns of a table of numbers are used; empty for other data."""
        return describe_columns(self.data.manifest)

    def column_names(self) -> dict[str, Any]:
        """Return the names of columns and arrays that are saved with the model."""
        manifest = self.data.manifest
        names = {name: tuple(manifest.get(name, ())) or None for name in ("value_columns", "target_columns")}
        return {"columns": manifest.get("columns", {}), **names}

    @property
    def longest(self) -> int:
        """Length of the longest training sequence; 0 if all are equally long."""
        return 0

    def notes(self) -> list[str]:
        """Return what a user should know about the data before training."""
        warning = shape_warning(self.data.columns("train"))
        return [warning] if warning else []

    @abc.abstractmethod
    def batch(self, step: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the training batch of a step: `batch_size` sequences, or tokens for a language model."""

    @abc.abstractmethod
    def eval_batches(self, split: str, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Iterate over a split once. All processes get the same number of batches.

        A process without examples in a batch gets one that is not counted.
        """

    @abc.abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the counted targets in float32; 0 if there are none."""

    @abc.abstractmethod
    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a sum and a count; the quotient of their totals over all batches is the metric."""

    def eval_split(self, split: str) -> str:
        """Return the split that is evaluated for `split`.

        If a data set has no validation split, its test split is used instead, as is usual for Text of Long-Range Arena.
        Results that were selected this way should say so.
        """
        if split == "validation" and split not in self.data.splits and "test" in self.data.splits:
            return "test"
        if split not in self.data.splits:
            raise DataError(f"split: expected one of {', '.join(self.data.splits)} for {self.name}, got {split!r}")
        return split


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the counted targets; 0 if there are none."""
    return _cross_entropy_sum(logits, targets) / (targets != IGNORE).sum().clamp(min=1)


def class_metric_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of correct answers and of all answers."""
    counted = targets != IGNORE
    return ((logits.argmax(-1) == targets) & counted).sum(), counted.sum()


def bits_metric_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood in bits and the number of targets."""
    # Double precision: a sum over five million tokens loses digits in single precision.
    return _double(_cross_entropy_sum(logits, targets)) / math.log(2), (targets != IGNORE).sum()


def _cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def _double(total: Tensor) -> Tensor:
    """Convert to double precision if the device supports it."""
    return total if total.device.type == "mps" else total.double()


class SquaredErrorMixin:
    """Squared error of outputs in the units of the data: the loss is in standardized units, the metric is not."""

    metric: ClassVar[Metric] = "mean squared error"
    target_std: tuple[float, ...]

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean squared error in units of the standard deviation; 0 if no target is counted."""
        errors, counted = _errors(logits, batch.targets)
        return (errors / _on_device(self.target_std, errors.device)).square().sum() / counted.sum().clamp(min=1)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of squared errors in the units of the data, and the number of targets."""
        errors, counted = _errors(logits, batch.targets)
        return _double(errors).square().sum(), counted.sum()


@functools.lru_cache(maxsize=8)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values as a tensor; cached, since copying them to a GPU at every step would wait for it."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def _errors(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counted = ~torch.isnan(targets)
    return torch.where(counted, outputs.float() - targets, 0), counted
