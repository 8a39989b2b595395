"""Whether this machine can run the kernels, and whether the user wants them.

`torch.compile` takes these answers as they were when it compiled. Marking functions so loads its whole front end,
which is why this module is imported where a GPU is in use and not before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from tcnca.ops.tcn.cuda import compiled
from tcnca.ops.tcn.setting import SETTING, wanted

OLDEST = (8, 0)  # asynchronous copies and tensor cores for bfloat16
Answer = TypeVar("Answer", bound=Callable[..., object])


def _constant(function: Answer) -> Answer:
    return torch.compiler.assume_constant_result(function)


@_constant
def why_not_here(device: int) -> str | None:
    """Why the CUDA device of this number cannot run the kernels; None if it can."""
    return _unable(device) or compiled.missing()


@_constant
def worth_it(device: int) -> bool:
    """Whether the kernels are wanted and can run on a device; says once what has to be installed if that is all."""
    if not wanted() or _unable(device) is not None:
        return False
    lacking = compiled.missing()
    if lacking is not None:
        _warn(lacking)
    return lacking is None


@functools.cache
def _unable(device: int) -> str | None:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "device: PyTorch finds no NVIDIA GPU here"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"device: got {name} of compute capability {major}.{minor}, allowed is {OLDEST[0]}.{OLDEST[1]} or more"
    return None


_warned: list[str] = []


def _warn(lacking: str) -> None:
    if _warned:
        return
    _warned.append(lacking)
    warnings.warn(
        f"{lacking}. Until then the TCN runs in plain PyTorch, with the same results but slower; "
        f"{SETTING}=plain in the environment silences this",
        RuntimeWarning,
        stacklevel=2,
    )
