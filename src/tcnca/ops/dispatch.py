"""Select the backend that runs a call, with one meaning of `backend=` for all operators.

`auto` takes the fastest backend that can run the call on this machine and is expected to be faster than PyTorch's own
operators. A backend that is requested by name runs the call, or raises an error that says why it cannot.
`TCNCA_KERNELS=off` in the environment restricts `auto` to PyTorch's own operators.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tcnca.errors import ConfigError, InputError, KernelError

SETTING = "TCNCA_KERNELS"
SETTINGS = ("auto", "off")
HINT = f"set {SETTING}=off in the environment to run without kernels"
# Triton's interpreter runs kernels on the CPU, for tests. Triton reads this once as well, when kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
MIN_CAPABILITY = (8, 0)  # asynchronous copies, and tensor cores for bfloat16

_AMD = "device: expected an NVIDIA GPU for the kernels, got one of AMD, which runs PyTorch's own operators"

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Compiler = Literal["triton", "nvrtc"]
Call = TypeVar("Call")
Function = TypeVar("Function", bound=Callable[..., object])


class Candidate(NamedTuple, Generic[Call]):
    """A fast backend of an operator; `Call` is the operator's call specification."""

    name: str
    compiler: Compiler | None
    """What compiles its kernels; None if it needs no GPU."""
    unsupported_reason: Callable[[Call], str | None]
    """Why no machine can run a call with this backend, as `FIELD: expected X, got Y`; None if one can."""
    should_use: Callable[[Call], bool] | None = None
    """Whether the backend is expected to be the fastest for a call; None if it always is. Only `auto` asks."""


def select_backend(
    op: str,
    requested: str,
    device: torch.device,
    call: Call,
    candidates: tuple[Candidate[Call], ...],
    pytorch: tuple[str, ...],
) -> str:
    """Return the name of the backend that runs a call.

    Args:
        op: the operator's name in messages.
        requested: `auto` or the name of a backend.
        device: where the call's tensors are.
        call: the operator's call specification, passed on to the candidates.
        candidates: the fast backends, fastest first.
        pytorch: the backends that run any call with PyTorch's own operators; `auto` falls back to the first.
    """
    if requested == "auto":
        for candidate in candidates if kernels_enabled() else ():
            if (
                (candidate.should_use is None or candidate.should_use(call))
                and candidate.unsupported_reason(call) is None
                and should_use(candidate.compiler, device, op)
            ):
                return candidate.name
        return pytorch[0]
    for candidate in candidates:
        if candidate.name == requested:
            reason = candidate.unsupported_reason(call) or unsupported_reason(candidate.compiler, device)
            if reason is not None:
                raise KernelError(
                    f"backend: {requested!r} cannot run this call of {op}; {reason}. Use 'auto' or {pytorch[0]!r}"
                )
            return requested
    if requested not in pytorch:
        names = ("auto", *pytorch, *(candidate.name for candidate in candidates))
        raise InputError(f"backend: expected one of {', '.join(names)}, got {requested!r}")
    return requested


def _constant(function: Function) -> Function:
    """Make `torch.compile` take the result as a constant.

    Sets what `torch.compiler.assume_constant_result` sets, which would import the whole compiler with this module.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_WITHOUT_KERNELS = contextvars.ContextVar("_WITHOUT_KERNELS", default=False)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let `auto` use PyTorch's own operators only, inside the block: other programs do not have the kernels."""
    token = _WITHOUT_KERNELS.set(True)
    try:
        yield
    finally:
        _WITHOUT_KERNELS.reset(token)


@_constant
def kernels_enabled() -> bool:
    """Return whether the environment, and a block of `without_kernels`, let `auto` use kernels."""
    if _WITHOUT_KERNELS.get():
        return False
    setting = os.environ.get(SETTING) or "auto"
    if setting not in SETTINGS:
        raise ConfigError(f"{SETTING}: expected {' or '.join(SETTINGS)} in the environment, got {setting!r}")
    return setting == "auto"


@_constant
def unsupported_reason(compiler: Compiler | None, device: torch.device) -> str | None:
    """Return why a device cannot run kernels of a compiler, or None if it can."""
    if compiler is None:
        return None
    if device.type == "cuda":
        return device_reason(device.index or 0) or missing(compiler)
    if not (INTERPRETED and compiler == "triton"):
        return f"device: expected a CUDA device, got {'the CPU' if device.type == 'cpu' else device.type}"
    return _triton_missing()


@_constant
def should_use(compiler: Compiler | None, device: torch.device, op: str) -> bool:
    """Return whether `auto` may use kernels of a compiler on a device.

    Warn once if only an installation is missing, or if the GPU is one of AMD, which PyTorch also calls `cuda`.
    """
    if compiler is None:
        return True
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        _warn_once(f"{_AMD}; set {SETTING}=off in the environment to silence this warning")
        return False
    if device_reason(device.index or 0) is not None:
        return False
    reason = missing(compiler)
    if reason is not None:
        _warn_once(
            f"{reason}. Until then {op} runs with PyTorch's own operators: same results, but slower; "
            f"{SETTING}=off in the environment silences this warning"
        )
    return reason is None


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def transform_reason() -> str | None:
    """Return why operators without `torch.func` rules cannot run here, or None if no transform is active.

    Under forward-mode differentiation PyTorch would silently take their derivative to be zero.
    """
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func: expected no transform and no forward-mode derivative, got one"
    return None


def tensors_reason(floating: Sequence[Tensor], *others: Tensor | None) -> str | None:
    """Return why kernels cannot take these tensors, which need one device and `floating` a dtype, or None."""
    device = floating[0].device
    for tensor in (*floating, *others):
        if tensor is not None and tensor.device != device:
            return f"device: expected {device} for all tensors, got {tensor.device}"
    for tensor in floating:
        if tensor.dtype not in KERNEL_DTYPES:
            return f"dtype: expected {', '.join(map(str, KERNEL_DTYPES))}, got {tensor.dtype}"
    return None


@functools.cache
def device_reason(index: int) -> str | None:
    """Return why the CUDA device of this index can run none of the kernels, or None if it can."""
    if torch.version.hip is not None:
        return _AMD
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "device: expected an NVIDIA GPU, PyTorch finds none"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        expected, got = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        name = torch.cuda.get_device_name(index)
        return f"device: expected compute capability {expected} or higher, got {name} with {got}"
    return None


@functools.cache
def missing(compiler: Compiler) -> str | None:
    """Return what has to be installed to compile and launch kernels, or None if nothing is missing."""
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        return f"CUDA driver: cannot be loaded ({error}); install the driver of the GPU"
    if compiler == "nvrtc":
        return _nvrtc_missing()
    return _triton_missing()


def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton: not installed; PyTorch for CUDA on Linux includes it, `pip install triton` installs it"
    return None


def _nvrtc_missing() -> str | None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the bindings look for the library when they first call it
    except ImportError as error:
        return (
            f"cuda.bindings: cannot be imported ({error}); PyTorch for CUDA includes it, "
            "`pip install cuda-bindings` installs it"
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        return f"NVRTC: cannot be loaded ({reason}); `pip install cuda-bindings[all]` installs it"
    return None
