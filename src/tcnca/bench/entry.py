"""What is measured: a contestant at one size, with its oracle and the least work that it has to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, on what and for how long; None is the suite's own choice."""

    device: torch.device
    """Where."""
    dtype: torch.dtype
    """Type of tensors in `ops`; of the arithmetic under autocast elsewhere, where weights stay in float32."""
    lengths: tuple[int, ...] | None = None
    """Tokens of a sequence, one or several."""
    batches: tuple[int, ...] | None = None
    """Sequences side by side, one or several."""
    channels: int = 64
    """Channels of the operators."""
    kernel_size: int = 17
    """Taps of the TCN's kernels."""
    depth: int = 4
    """Blocks of the TCN."""
    num_layers: int | None = None
    """Layers of the models."""
    compile: bool = False
    """Whether to measure layers and models compiled as well."""
    only: tuple[str, ...] = ()
    """Contestants, by parts of their names; all if empty."""
    seconds: float = 0.2
    """Time to spend on timing each contestant at each size, eager and as a graph alike."""
    repeat: int = 10
    """Least number of runs, however long they take."""


class Work(NamedTuple):
    """The least that has to be done: every input read once, every output written once, each product computed once."""

    bytes: float
    flops: float


class Subject(NamedTuple):
    """A contestant made ready at some size.

    run: gives the output, or the loss of a training step.
    leaves: tensors whose gradients are wanted; none if there is no backward pass.
    update: what follows the backward pass of a training step. The gradients are then in the leaves' `grad`.
    infer: the forward pass without anything for a backward pass.
    """

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()
    update: Callable[[], None] | None = None
    infer: Callable[[], Tensor] | None = None


class Inputs(NamedTuple):
    """The tensors that a function takes, in this order; those that are learned get gradients."""

    learned: tuple[Tensor, ...]
    fixed: tuple[Tensor, ...] = ()


class Pair(NamedTuple):
    """A subject and the same in float64 by other means: equal leaves in equal order."""

    subject: Subject
    oracle: Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant at one size."""

    suite: str
    """Of which benchmark it is."""
    name: str
    """Of the contestant."""
    label: str
    """Its name for people."""
    about: str
    """What it computes."""
    sizes: Mapping[str, int | str]
    """The size, by which entries are grouped."""
    tokens: int
    """Tokens of one run."""
    build: Callable[[], Subject]
    """Makes it ready to be timed."""
    pair: Callable[[], Pair]
    """Makes it ready to be checked, at a size at which float64 is cheap."""
    work: Mapping[str, Work]
    """The least work of its parts, by their names."""
    tolerance: float
    """Greatest relative error, of output and gradients, at which it is right."""
    together: bool = False
    """Whether gradients are compared as one vector, as of models, or one by one."""
    isolated: bool = True
    """Whether each part is timed by itself, from cold caches, or as steps of training that follow one another."""
