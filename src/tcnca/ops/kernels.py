"""What all kernels ask: whether the user wants them, and whether a device is able to run any."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd import forward_ad

from tcnca.errors import ConfigError

SETTING = "TCNCA_KERNELS"
CHOICES = ("auto", "plain")
ADVICE = f"{SETTING}=plain in the environment does without kernels"
# Triton's interpreter runs its kernels on the CPU, for tests. It too looks once, when the kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST = (8, 0)  # asynchronous copies and tensor cores for bfloat16
Answer = TypeVar("Answer", bound=Callable[..., object])


def constant(function: Answer) -> Answer:
    """Have `torch.compile` take the answer as it was when it compiled.

    This loads its whole front end: use it in modules that are imported where a GPU is in use and not before.
    """
    return torch.compiler.assume_constant_result(function)


def wanted() -> bool:
    """Whether the environment leaves the choice to the library."""
    setting = os.environ.get(SETTING) or "auto"
    if setting not in CHOICES:
        raise ConfigError(f"{SETTING}: got {setting!r} in the environment, allowed are {', '.join(CHOICES)}")
    return setting == "auto"


def transformed() -> str | None:
    """Why an operator without them is no use where `torch.func` or forward derivatives are at work; None if neither is.

    Forwards PyTorch would take its derivative to be zero.
    """
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func: got one of its transforms, or derivatives forwards, allowed is torch.autograd's backward"
    return None


@functools.cache
def unable(device: int) -> str | None:
    """Why the CUDA device of this number can run no kernel of ours; None if it can."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "device: PyTorch finds no NVIDIA GPU here"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"device: got {name} of compute capability {major}.{minor}, allowed is {OLDEST[0]}.{OLDEST[1]} or more"
    return None


@functools.cache
def warn(lacking: str, what: str) -> None:
    """Say once what has to be installed for the kernels of `what`."""
    warnings.warn(
        f"{lacking}. Until then {what} runs in plain PyTorch, with the same results but slower; "
        f"{SETTING}=plain in the environment silences this",
        RuntimeWarning,
        stacklevel=2,
    )
