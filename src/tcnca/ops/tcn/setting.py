"""Whether the environment leaves the choice of kernels to the library."""

from __future__ import annotations

import os

import torch
from torch.autograd import forward_ad

from tcnca.errors import ConfigError

SETTING = "TCNCA_KERNELS"
CHOICES = ("auto", "plain")


def wanted() -> bool:
    """Whether `backend="auto"` may take more than plain PyTorch."""
    setting = os.environ.get(SETTING) or "auto"
    if setting not in CHOICES:
        raise ConfigError(f"{SETTING}: got {setting!r} in the environment, allowed are {', '.join(CHOICES)}")
    return setting == "auto"


def transformed() -> bool:
    """Whether derivatives are being taken by `torch.func` or forwards, of which an operator without them tells nothing.

    Forwards PyTorch would take its derivative to be zero.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
