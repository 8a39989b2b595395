"""When the CPU's fast path runs a call of the TCN, and how."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.checks import autocasts
from tcnca.ops.kernels import transformed, wanted
from tcnca.ops.tcn.cpu.operator import tcn_cpu
from tcnca.ops.tcn.plain import TCNState, Transform, next_state

LEAST = 1 << 15  # numbers in x from which on the fast path gains
# oneDNN's convolutions are what all this rests on; on other processors than these nobody has measured them.
FAST_HERE = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")
DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def why_not_on_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    state: TCNState | None = None,
    normalize: Transform | None = None,
    dropout: float = 0.0,
) -> str | None:
    """Why the CPU's fast path cannot run such a call of `tcn`; None if it can."""
    parameters = [weight] if bias is None else [weight, bias]
    others = parameters if lengths is None else [*parameters, lengths]
    if any(tensor.device.type != "cpu" for tensor in [x, *others]):
        return f"tensors: got some on another device, allowed is the CPU; x is on {x.device}"
    if normalize is not None:
        return "normalize: got one, allowed is None"
    if dropout > 0.0:
        return f"dropout: got {dropout}, allowed is 0"
    if state is not None:
        return "state: got one, allowed is None; few tokens after a state would gain nothing"
    if x.dtype not in DTYPES or any(parameter.dtype != x.dtype for parameter in parameters):
        return f"dtype: got {x.dtype} and {weight.dtype}, allowed are {' or '.join(DTYPES.values())}, all the same"
    if autocasts(x.device):
        return "autocast: got it on, allowed is off"
    return transformed()


def runs_on_cpu(
    backend: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    state: TCNState | None,
    normalize: Transform | None,
    dropout: float,
) -> bool:
    """Whether the fast path takes a call; an error if it is asked for by name and cannot."""
    if backend == "auto" and not (x.device.type == "cpu" and wanted()):
        return False
    reason = why_not_on_cpu(x, weight, bias, lengths, state, normalize, dropout)
    if backend == "cpu":
        if reason is not None:
            raise KernelError(f"backend: got 'cpu', which cannot run this; {reason}. Take 'auto' or 'plain'")
        return True
    if reason is not None or x.dtype != torch.float32 or not FAST_HERE:
        return False
    # A graph should not depend on the length.
    return torch.compiler.is_compiling() or x.numel() >= LEAST


def run_on_cpu(
    x: Tensor,
    weight: Tensor,
    dilation_factor: int,
    bias: Tensor | None,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    lengths: Tensor | None,
    return_state: bool,
    inplace: bool,
) -> tuple[Tensor, TCNState | None]:
    """`tcnca.ops.tcn` where `why_not_on_cpu` finds nothing against it."""
    y, inner = tcn_cpu(
        x,
        weight,
        bias,
        lengths,
        factor=dilation_factor,
        nonlinearity=nonlinearity,
        residual=residual,
        causal=causal,
        keep=return_state,
    )
    if not return_state:
        return y, None
    return y, next_state(None, [x, *inner.unbind()], weight, dilation_factor, lengths, inplace)
