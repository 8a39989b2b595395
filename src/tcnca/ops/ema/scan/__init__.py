"""The scan of a damped EMA as fused kernels, for GPUs.

They need Triton, which is imported with the first call and not before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.ops.kernels import INTERPRETED, transformed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_HIDDEN = 64


def why_not_such(
    x: Tensor,
    parameters: tuple[Tensor, ...],
    hidden: Tensor | None = None,
    lengths: Tensor | None = None,
    truncation: int | None = None,
) -> str | None:
    """Why no machine's fused scan could run such a call of `ema`; None if one could."""
    device = x.device
    if device.type != "cuda" and not INTERPRETED:
        return f"x: got one on {device}, allowed is a CUDA device"
    if truncation is not None:
        return f"truncation: got {truncation}, allowed is None; the scan never takes an input out again"
    numbers = parameters if hidden is None else (*parameters, hidden)
    for value in numbers:
        if value.dtype not in DTYPES:
            return _dtypes(value)
        if value.device != device:
            return _devices(device)
    if x.dtype not in DTYPES:
        return _dtypes(x)
    if lengths is not None and lengths.device != device:
        return _devices(device)
    if parameters[0].shape[2] > MOST_HIDDEN:
        return f"hidden: got {parameters[0].shape[2]} states a channel, allowed are {MOST_HIDDEN} or less"
    return transformed()


def why_not_here(x: Tensor) -> str | None:
    """Why this machine's fused scan cannot run on `x`; None if it can."""
    from tcnca.ops.triton_kernels import machine

    return machine.why_not_here(x.device.index or 0 if x.is_cuda else None)


def worth_it(x: Tensor) -> bool:
    """Whether the choice is the library's, and `x` is on a GPU that can run the fused scan."""
    if not x.is_cuda:
        return False
    from tcnca.ops.triton_kernels import machine

    return machine.worth_it(x.device.index or 0, "the EMA")


def _dtypes(value: Tensor) -> str:
    return f"dtype: got {value.dtype}, allowed are {', '.join(map(str, DTYPES))}"


def _devices(device: torch.device) -> str:
    return f"tensors: got some on another device, allowed is {device}, where x is"


def fused_scan(
    x: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    hidden: Tensor | None = None,
    lengths: Tensor | None = None,
    return_hidden: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The EMA of every channel in one scan, with first derivatives. The caller has asked `why_not_such` and the like.

    Args:
        x: `[batch, time, channels]`, with any strides.
        parameters: δ, α, β and γ, each `[directions, channels, hidden]`, as `tcnca.ops.ema` takes them.
        hidden: `[batch, channels, hidden]`, what the scan starts from; None is zeros. Causal only.
        lengths: `[batch]`, real tokens in each row; the rest is padding, taken as zeros whatever it holds.
        return_hidden: also return the hidden states after the last real token.

    Returns:
        `y` of `x`'s shape, and the hidden states or None. Arithmetic and hidden states are float32.
    """
    from tcnca.ops.ema.scan.operator import scan

    start = None if hidden is None else hidden.mT
    y, final = scan(x, *parameters, start, lengths, return_hidden)
    return y, None if final is None else final.mT
