"""What training and evaluation need of a set: batches, a loss, a metric, and what a model must take in and give out."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.data.batch import IGNORE, Batch
from tcnca.data.columns import count
from tcnca.data.schema import Kind
from tcnca.data.store import Dataset
from tcnca.errors import DataError
from tcnca.models.heads import HeadConfig
from tcnca.models.inputs import InputConfig

Metric = Literal["bits per byte", "accuracy", "mean squared error"]


class Task(abc.ABC):
    """A set, and what is to be done with it.

    Batches of training are a pure function of seed and step, whatever was asked for before: a run that is resumed sees
    what it would have seen. With `world_size` processes each gets its share of the same batch.
    """

    kind: ClassVar[Kind]
    metric: ClassVar[Metric]
    causal: ClassVar[bool] = False
    """Whether the model may see only the past."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __repr__(self) -> str:
        counts = ", ".join(f"{split} {size:,}" for split, size in self.sizes.items())
        return f"{type(self).__name__}({self.name!r}: {self.kind}, {counts}; metric {self.metric})"

    @property
    def name(self) -> str:
        """Name of the set."""
        return self.data.name

    @property
    @abc.abstractmethod
    def input(self) -> InputConfig:
        """What the model takes in."""

    @property
    @abc.abstractmethod
    def head(self) -> HeadConfig:
        """What the model gives out."""

    @property
    def higher_is_better(self) -> bool:
        """Whether the metric grows as a model gets better."""
        return self.metric == "accuracy"

    @property
    def sizes(self) -> dict[str, int]:
        """Number of examples in each split; for a language model, of bytes."""
        return {split: count(columns) for split, columns in self.data.splits.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; none if the task has no classes."""
        return tuple(self.data.manifest.get("class_names", ()))

    def steps_per_epoch(self, size: int) -> int:
        """Steps in which training sees about as much as its split holds; 0 for an endless stream."""
        return -(-self.sizes["train"] // size)

    @abc.abstractmethod
    def batch(self, step: int, size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """The training batch of a step: `size` sequences, or tokens for a language model."""

    @abc.abstractmethod
    def eval_batches(self, split: str, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """A split in batches, everything once. All processes get equally many batches.

        Where a process has no example left it gets one that does not count.
        """

    @abc.abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean loss over what counts, in float32; 0 if nothing does."""

    @abc.abstractmethod
    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum and count whose quotient, over all batches, is the metric."""

    def eval_split(self, split: str) -> str:
        """The split that is looked at for `split`.

        Where a set has no validation split of its own its test split takes the place, as is usual for Text of
        Long-Range Arena: whoever chooses by it should say so.
        """
        if split == "validation" and split not in self.data.splits and "test" in self.data.splits:
            return "test"
        if split not in self.data.splits:
            raise DataError(f"{self.name}: has no split {split!r}, it has {', '.join(self.data.splits)}")
        return split


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over what counts; 0 if nothing does."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return flat / (targets != IGNORE).sum().clamp(min=1)


def class_metric_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How many answers are right, and how many there are."""
    counted = targets != IGNORE
    return ((logits.argmax(-1) == targets) & counted).sum(), counted.sum()


def bits_metric_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Bits that the answers cost, and how many there are."""
    flat = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    # Summed up over a test set in double precision: five million numbers lose digits in single.
    return precise(flat) / math.log(2), (targets != IGNORE).sum()


def precise(total: Tensor) -> Tensor:
    """In double precision, where the device has it."""
    return total if total.device.type == "mps" else total.double()


def number_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over what counts; 0 if nothing does."""
    counted = ~torch.isnan(targets)
    return torch.where(counted, outputs.float() - targets, 0).square().sum() / counted.sum().clamp(min=1)
