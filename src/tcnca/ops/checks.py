"""Checks and questions that several operators and the models share."""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.errors import InputError, TcncaError


def check_tensor(name: str, value: object) -> None:
    """Raise an error unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        kind = type(value)
        raise InputError(
            f"{name}: got a {kind.__module__}.{kind.__qualname__}, allowed is a torch.Tensor; torch.as_tensor makes one"
        )


def check_lengths(lengths: Tensor | None, batch: int, time: int, name: str = "lengths") -> None:
    """Raise an error unless `lengths` is None or `[batch]`, whole numbers from 0 to `time`.

    The numbers themselves are looked at on the CPU only: reading them off another device would make it wait.
    """
    if lengths is None:
        return
    if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise InputError(
            f"{name}: got shape {list(lengths.shape)} of {lengths.dtype}, allowed is [{batch}], whole numbers"
        )
    if lengths.device.type == "cpu":
        lengths = lengths.long()  # the bound may not fit a narrow type
        check_values(
            (lengths >= 0) & (lengths <= time),
            f"{name}: got values outside 0 to {time}, the number of tokens in a row",
            lengths,
        )


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; the `meta` device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_values(fine: Tensor, message: str, values: Tensor, error: type[TcncaError] = InputError) -> None:
    """Raise `error` unless all of `fine` is true.

    On a GPU the check runs along with everything else, so that it costs no wait, and stops the device.
    """
    if torch.compiler.is_compiling():
        return
    if fine.device.type == "cpu":
        if not fine.all():
            wrong = values[~fine] if fine.shape == values.shape else values
            raise error(f"{message}; got {_shown(wrong)}")
    elif fine.device.type == "cuda":
        torch._assert_async(fine.all(), message)


def _shown(values: Tensor) -> str:
    flat = values.flatten()
    few = ", ".join(str(value) for value in flat[:8].tolist())
    return f"[{few}{', …' if flat.numel() > 8 else ''}]"
