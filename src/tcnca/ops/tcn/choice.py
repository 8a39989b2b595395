"""The temporal convolutional network, by kernels where they can run it and in plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tcnca.errors import InputError, KernelError
from tcnca.ops.checks import autocasts
from tcnca.ops.kernels import transformed
from tcnca.ops.tcn.cpu.run import run_on_cpu, runs_on_cpu
from tcnca.ops.tcn.cuda.run import run_kernels
from tcnca.ops.tcn.cuda.source import DTYPE_NAMES, LARGEST_KERNEL
from tcnca.ops.tcn.plain import TCNState, Transform, check_tcn, plain_tcn

Backend = Literal["auto", "plain", "cuda", "cpu"]
BACKENDS: tuple[str, ...] = get_args(Backend)
MOST_ROWS = 65535  # of one launch


def tcn(
    x: Tensor,
    weight: Tensor,
    dilation_factor: int,
    *,
    bias: Tensor | None = None,
    nonlinearity: str = "silu",
    residual: bool = True,
    normalize: Transform | None = None,
    dropout: float = 0.0,
    causal: bool = True,
    lengths: Tensor | None = None,
    state: TCNState | None = None,
    return_state: bool = False,
    inplace: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, TCNState | None]:
    """`depth` residual blocks; block `i` has `convolutions` dilated convolutions of dilation `dilation_factor^i`.

    One block: `h = x`, then for each of its convolutions `h = dropout(nonlinearity(normalize(conv(h))))`, then `x + h`.

    Args:
        x: `[batch, time, channels]`.
        weight: `[depth, convolutions, channels, kernel_size]`, taps as in `dilated_conv`.
        dilation_factor: 1 or more.
        bias: `[depth, convolutions, channels]`.
        nonlinearity: one of `tcnca.ops.ACTIVATIONS`.
        residual: whether blocks have their skip connection.
        normalize: called with `[batch, time, channels]` and the number of the convolution, counted through all
            blocks; must not mix times if the TCN is to stay causal. Kernels then run one convolution after the other.
        dropout: the probability with which a value is set to zero, the others growing so that their mean stays; what
            is dropped follows from PyTorch's seed, but differs between backends.
        causal, lengths, state, return_state, inplace: as in `dilated_conv`.
        backend: "plain" is PyTorch's own operators, "cuda" kernels for NVIDIA GPUs, "cpu" a fast path for the CPU,
            or an error where they cannot run; "auto" takes them where they can and gain by it, unless the environment
            has TCNCA_KERNELS=plain. CUDA's kernels take the padding's skip connection for zeros too, and under
            autocast compute and return its type.

    Returns:
        `y` of `x`'s shape, and the new state or None.
    """
    check_tcn(x, weight, dilation_factor, bias, nonlinearity, causal, lengths, state, return_state, dropout)
    if backend in ("auto", "cpu") and runs_on_cpu(backend, x, weight, bias, lengths, state, normalize, dropout):
        return run_on_cpu(
            x, weight, dilation_factor, bias, nonlinearity, residual, causal, lengths, return_state, inplace
        )
    if _kernels_run(backend, x, weight, bias, lengths, state, dropout):
        return run_kernels(
            x,
            weight,
            dilation_factor,
            bias,
            nonlinearity,
            residual,
            causal,
            lengths,
            state,
            return_state,
            inplace,
            normalize,
            dropout,
        )
    return plain_tcn(
        x,
        weight,
        dilation_factor,
        bias=bias,
        nonlinearity=nonlinearity,
        residual=residual,
        normalize=normalize,
        dropout=dropout,
        causal=causal,
        lengths=lengths,
        state=state,
        return_state=return_state,
        inplace=inplace,
    )


def why_not(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    state: TCNState | None = None,
    dropout: float = 0.0,
) -> str | None:
    """Why the kernels cannot run such a call of `tcn`; None if they can."""
    return _why_not_such(x, weight, bias, lengths, state, dropout) or _why_not_here(x)


def _kernels_run(
    backend: Backend,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    state: TCNState | None,
    dropout: float,
) -> bool:
    if backend not in BACKENDS:
        raise InputError(f"backend: got {backend!r}, allowed are {', '.join(BACKENDS)}")
    if backend == "plain":
        return False
    if backend == "cuda":
        reason = why_not(x, weight, bias, lengths, state, dropout)
        if reason is not None:
            raise KernelError(f"backend: got 'cuda', which cannot run this; {reason}. Take 'auto' or 'plain'")
        return True
    if _why_not_such(x, weight, bias, lengths, state, dropout) is not None:
        return False
    from tcnca.ops.tcn.cuda import machine

    return machine.worth_it(_number(x))


def _why_not_here(x: Tensor) -> str | None:
    from tcnca.ops.tcn.cuda import machine

    return machine.why_not_here(_number(x))


def _number(x: Tensor) -> int:
    return x.device.index or 0


def _why_not_such(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    state: TCNState | None,
    dropout: float,
) -> str | None:
    """Why no machine's kernels could run the call."""
    if x.device.type != "cuda":
        return f"x: got one on {x.device}, allowed is a CUDA device"
    parameters = (weight,) if bias is None else (weight, bias)
    buffers = () if state is None else state.buffers
    for tensor in (*parameters, *buffers) if lengths is None else (*parameters, *buffers, lengths):
        if tensor.device != x.device:
            return f"tensors: got some on another device, allowed is {x.device}, where x is"
    for tensor in (x, *parameters, *buffers):
        if tensor.dtype not in DTYPE_NAMES:
            return "dtype: got another, allowed are " + ", ".join(DTYPE_NAMES.values())
    for tensor in parameters:
        if tensor.dtype != x.dtype and not autocasts(x.device):
            return f"weight, bias: got another dtype, allowed is {x.dtype}, that of x, except under autocast"
    if weight.shape[-1] > LARGEST_KERNEL:
        return f"kernel_size: got {weight.shape[-1]}, allowed is {LARGEST_KERNEL} or less"
    if x.shape[0] > MOST_ROWS:
        return f"batch: got {x.shape[0]}, allowed is {MOST_ROWS} or less"
    if state is not None:
        if dropout > 0.0:
            return "dropout: got one after a state, allowed is 0; its kernel has none"
        if x.shape[1] == 1:
            return "time: got one token after a state, allowed are more; a kernel would not be worth its start"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in [x, *parameters, *buffers]):
            return "state: got one where gradients are wanted, allowed is None; its kernel has no gradient"
    return transformed()
