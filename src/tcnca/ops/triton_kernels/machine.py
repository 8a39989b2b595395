"""Whether this machine can run kernels in Triton, and whether the user wants them.

`torch.compile` takes these answers as they were when it compiled. This module is imported where a GPU is in use and
not before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util

from tcnca.ops.kernels import INTERPRETED, constant, wanted, warn
from tcnca.ops.kernels import unable as _unable


@constant
def why_not_here(device: int | None) -> str | None:
    """Why the CUDA device of this number, or the interpreter on a CPU for None, cannot run kernels; None if it can."""
    if device is not None:
        return _unable(device) or _lacking()
    if not INTERPRETED:
        return "device: got a CPU, allowed is a CUDA device"
    return _without_triton()


@constant
def worth_it(device: int, what: str) -> bool:
    """Whether kernels are wanted and can run on a device; says once what has to be installed if that is all.

    `what` is what would otherwise run in plain PyTorch.
    """
    if not wanted() or _unable(device) is not None:
        return False
    lacking = _lacking()
    if lacking is not None:
        warn(lacking, what)
    return lacking is None


def _without_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton: is not installed; PyTorch for CUDA brings it along on Linux, `pip install triton` installs it"
    return None


@functools.cache
def _lacking() -> str | None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver: cannot be loaded ({error}); it comes with the GPU's driver, on Linux alone"
    return _without_triton()
