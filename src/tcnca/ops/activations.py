"""Pointwise activation functions by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "none"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def _identity(x: Tensor) -> Tensor:
    """Return `x`: a function with a name, since models are pickled and a lambda cannot be."""
    return x


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "none": _identity,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function `name`, one of `ACTIVATIONS`."""
    return _FUNCTIONS[name]


def relu2(x: Tensor) -> Tensor:
    """Return `max(x, 0)²`, used for attention."""
    return torch.square(F.relu(x))


def laplace(x: Tensor) -> Tensor:
    """Return MEGA's smooth replacement of `relu2`: the normal CDF with mean √½ and standard deviation √(1/4π)."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))
