"""Checks shared by the operators and the models."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tcnca.errors import InputError, StateError, TcncaError


def check_tensor(name: str, value: object) -> None:
    """Raise an error unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        hint = "encode texts with model.encode" if isinstance(value, str | bytes) else "use torch.as_tensor"
        raise InputError(f"{name}: expected a torch.Tensor, got a {type(value).__qualname__}; {hint}")


def check_sequence(name: str, x: Tensor, last: str = "channels") -> None:
    """Raise an error unless `x` is `[batch, time, last]` with 1 or more tokens."""
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[1] < 1:
        raise InputError(f"{name}: expected shape [batch, time, {last}] with 1 or more tokens, got {list(x.shape)}")


def check_state(name: str, value: Tensor | None, expected: list[int] | None) -> None:
    """Raise an error unless a part of a state has the expected shape; None is a missing part."""
    got = None if value is None else list(value.shape)
    if got != expected:
        raise StateError(f"state.{name}: expected shape {expected}, got {got}")


def check_same_dtype(x: Tensor, **parameters: Tensor | None) -> None:
    """Raise an error unless all `parameters` have the dtype of `x`; under autocast they may differ."""
    for name, value in parameters.items():
        if value is not None and value.dtype != x.dtype and not autocasts(x.device):
            raise InputError(
                f"{name}: expected {x.dtype} like x, got {value.dtype}; convert one of them, or use autocast"
            )


def check_lengths(lengths: Tensor | None, batch: int, time: int, name: str = "lengths") -> None:
    """Raise an error unless `lengths` is None or `[batch]` integers from 0 to `time`.

    Values are checked on the CPU only: to read them from another device would wait for it.
    """
    if lengths is None:
        return
    check_tensor(name, lengths)
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise InputError(f"{name}: expected [{batch}] integers, got shape {list(lengths.shape)} of {lengths.dtype}")
    if lengths.device.type == "cpu":
        lengths = lengths.long()  # the bound may not fit a narrow dtype
        check_values(
            (lengths >= 0) & (lengths <= time),
            f"{name}: expected values from 0 to {time}, the number of tokens per row",
            lengths,
        )


WITHOUT_FLOAT64 = ("mps",)
"""Kinds of devices that compute in float32 at most: Apple's GPUs."""


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    return device.type not in WITHOUT_FLOAT64


def check_float64(name: str, device: torch.device) -> None:
    """Raise an error unless a device computes in float64."""
    if not has_float64(device):
        raise InputError(f"{name}: expected a CPU or a CUDA device, which compute in float64, got {device.type}")


def autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for a device; the `meta` device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast, where it is on, does not lower the precision of products."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext()


def is_traced(x: Tensor) -> bool:
    """Return whether a graph is compiled or traced, in which a tensor may have no values."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    # Subclasses stand for tensors without memory, or with memory elsewhere; a dispatch mode has to see operators.
    return type(x) not in (Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() > 0


def check_values(valid: Tensor, message: str, values: Tensor, error: type[TcncaError] = InputError) -> None:
    """Raise `error` unless all of `valid` is true.

    On a GPU the check is asynchronous: it does not wait for the device, and a failure is a device-side assertion.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing() or isinstance(valid, FakeTensor):
        return
    modes = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(key) is not None for key in (modes.FAKE, modes.PROXY)):
        return  # tensors have no values
    if valid.device.type == "cpu":
        if not valid.all():
            wrong = values[~valid] if valid.shape == values.shape else values
            raise error(f"{message}, got {_shown(wrong)}")
    elif valid.device.type == "cuda":
        torch._assert_async(valid.all(), message)


def _shown(values: Tensor) -> str:
    flat = values.flatten()
    few = ", ".join(str(value) for value in flat[:8].tolist())
    return f"[{few}{', …' if flat.numel() > 8 else ''}]"
