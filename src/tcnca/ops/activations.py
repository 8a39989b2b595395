"""The pointwise functions that a configuration can name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "none"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def gelu_tanh(x: Tensor) -> Tensor:
    """The GELU's approximation by a hyperbolic tangent."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """`x` itself."""
    return x


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "none": identity,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The pointwise function called `name`, one of `ACTIVATIONS`."""
    return _FUNCTIONS[name]


def relu2(x: Tensor) -> Tensor:
    """`max(x, 0)²`, an attention function."""
    return torch.square(F.relu(x))


def laplace(x: Tensor) -> Tensor:
    """MEGA's smooth stand-in for `relu2`: a normal distribution function of mean √½ and deviation √(1/4π)."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))
