"""The temporal convolutional network, by the fastest backend that can run a call."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tcnca.ops.activations import activation as activation_function
from tcnca.ops.context import ContextParallel, current_context
from tcnca.ops.dispatch import Candidate, select_backend
from tcnca.ops.dropout import dropout as drop
from tcnca.ops.padding import zero_padding
from tcnca.ops.ring import extend_ring, push_ring
from tcnca.ops.tcn import cpu
from tcnca.ops.tcn.cuda import operator as cuda
from tcnca.ops.tcn.naive import NormFn, TCNCall, TCNState, check_tcn, naive_tcn, run_convolutions

TCNBackend = Literal["auto", "naive", "cpu", "cuda"]

_CANDIDATES: tuple[Candidate[TCNCall], ...] = (
    Candidate("cuda", "nvrtc", cuda.unsupported_reason),
    Candidate("cpu", None, cpu.unsupported_reason, cpu.should_use),
)
_RUN = {"naive": naive_tcn, "cpu": cpu.run, "cuda": cuda.run}


def tcn(
    x: Tensor,
    weight: Tensor,
    dilation_factor: int,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    residual: bool = True,
    omega: Tensor | None = None,
    norm_fn: NormFn | None = None,
    dropout: float = 0.0,
    causal: bool = True,
    lengths: Tensor | None = None,
    state: TCNState | None = None,
    return_state: bool = False,
    inplace: bool = False,
    backend: TCNBackend = "auto",
) -> tuple[Tensor, TCNState | None]:
    """Run `depth` residual blocks; block `i` has `convolutions` dilated convolutions of dilation `dilation_factor^i`.

    One block: `h = x`, then for each of its convolutions `h = dropout(activation(norm_fn(conv(h))))`, then `x + h`.
    A causal convolution is `conv(h)[t] = Σ_j weight[:, j] · h[t - j · dilation] + bias`, channel by channel. A
    bidirectional one is centered: tap `j` looks `(j - (kernel_size - 1) // 2) · dilation` steps back, so an even kernel
    reaches one dilation further into the past than into the future.

    Args:
        x: `[batch, time, channels]`.
        weight: `[depth, convolutions, channels, kernel_size]`.
        dilation_factor: 1 or more.
        bias: `[depth, convolutions, channels]`.
        activation: one of `tcnca.ops.ACTIVATIONS`.
        residual: whether blocks have a skip connection.
        omega: `[channels]`, for a skip connection around all blocks: the output is `h + omega · x`, with the `h` of the
            last block.
        norm_fn: called with `[batch, time, channels]` and the index of the convolution, counted through all blocks. A
            causal TCN needs one that does not mix times. Kernels then run one convolution after the other.
        dropout: probability with which a value is set to zero; the others are scaled up to keep the mean. The mask
            depends on PyTorch's seed, and differs between backends.
        causal: whether outputs depend on the past only.
        lengths: `[batch]`, number of valid tokens in each row; the others are padding and count as zeros.
        state: the state that an earlier call returned; None at the start of the sequence. Causal only.
        return_state: whether to return the state after these tokens.
        inplace: whether the memory of `state` may be reused; `state` is invalid afterwards.
        backend: `naive` uses PyTorch's own operators, `cuda` kernels for NVIDIA GPUs, `cpu` a fast path for the CPU;
            both raise an error if they cannot run the call. `auto` takes the fastest that can, see
            `tcnca.ops.dispatch`. The CUDA kernels also treat the padding of skip connections as zeros, that of
            `omega · x` included, and under autocast compute and return autocast's dtype.

    Returns:
        `y` of `x`'s shape, and the new state or None.
    """
    call = TCNCall(
        x=x,
        weight=weight,
        dilation_factor=dilation_factor,
        bias=bias,
        activation=activation,
        residual=residual,
        omega=omega,
        norm_fn=norm_fn,
        dropout=dropout,
        causal=causal,
        lengths=lengths,
        state=state,
        return_state=return_state,
        inplace=inplace,
    )
    check_tcn(call)
    context = current_context()
    return _run(call, backend) if context is None else _run_part(call, backend, context)


def _run(call: TCNCall, backend: TCNBackend) -> tuple[Tensor, TCNState | None]:
    return _RUN[select_backend("the TCN", backend, call.x.device, call, _CANDIDATES, ("naive",))](call)


def _run_part(call: TCNCall, backend: TCNBackend, context: ContextParallel) -> tuple[Tensor, TCNState | None]:
    """Run a call on a part of a sequence: every convolution reads the inputs that it needs from the neighbors."""
    state, time, kernel_size = call.state, call.x.shape[1], call.weight.shape[3]
    start, function = context.rank * time, activation_function(call.activation)
    buffers: list[Tensor] = []

    def convolve(h: Tensor, number: int) -> Tensor:
        weight, bias, dilation = call.convolution(number)
        future = 0 if call.causal else (kernel_size - 1) // 2 * dilation
        past = (kernel_size - 1) * dilation - future
        x, left = context.extend(zero_padding(h, call.lengths), past, future)
        if state is not None and start < past:
            x, left = extend_ring(state.buffers[number], state.position, x), left + past
        lengths = context.extended_lengths(call.lengths, time, left, x.shape[1])
        one = TCNCall(
            x=x,
            weight=weight,
            dilation_factor=1,
            dilation=dilation,
            bias=bias,
            activation="none",
            residual=False,
            causal=call.causal,
            lengths=lengths,
        )
        if call.return_state:
            position = _position(call) + start - left
            buffers.append(push_ring(x.new_zeros(x.shape[0], past, x.shape[2]), position, x, lengths))
        y = _run(one, backend)[0][:, left : left + time]
        y = function(y if call.norm_fn is None else call.norm_fn(y, number))
        return drop(y, call.dropout) if call.dropout > 0.0 else y

    y, _ = run_convolutions(dataclasses.replace(call, return_state=False), call.x, convolve)
    if not call.return_state:
        return y, None
    end = _position(call) + start + (time if call.lengths is None else call.lengths)
    return y, context.final_state(TCNState(tuple(buffers), end), call.lengths, time)


def _position(call: TCNCall) -> Tensor:
    if call.state is not None:
        return call.state.position
    return torch.zeros(call.x.shape[0], dtype=torch.long, device=call.x.device)
