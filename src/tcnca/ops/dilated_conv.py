"""Dilated depthwise convolution with PyTorch's own operators."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.checks import check_lengths, check_same_dtype
from tcnca.ops.padding import advance, zero_padding
from tcnca.ops.ring import push_ring, read_ring, unroll_ring
from tcnca.ops.state import State


@dataclasses.dataclass(frozen=True)
class ConvState(State):
    """The inputs that a causal convolution still needs.

    buffer: `[batch, (kernel_size - 1) · dilation, channels]`, a ring (see `tcnca.ops.ring`).
    position: `[batch]`, number of tokens seen so far.
    """

    buffer: Tensor
    position: Tensor


def initial_conv_state(
    batch: int,
    channels: int,
    kernel_size: int,
    dilation: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ConvState:
    """Return the state before the first token."""
    buffer = torch.zeros(batch, (kernel_size - 1) * dilation, channels, device=device, dtype=dtype)
    return ConvState(buffer, torch.zeros(batch, dtype=torch.long, device=device))


def dilated_conv(
    x: Tensor,
    weight: Tensor,
    dilation: int,
    *,
    bias: Tensor | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    state: ConvState | None = None,
    return_state: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, ConvState | None]:
    """Convolve every channel over time with its own kernel.

    A causal convolution is `y[t] = Σ_j weight[:, j] · x[t - j · dilation]`. A bidirectional one is centered: tap `j`
    looks `(j - (kernel_size - 1) // 2) · dilation` steps back, so an even kernel reaches one dilation further into the
    past than into the future.

    Args:
        x: `[batch, time, channels]`.
        weight: `[channels, kernel_size]`.
        dilation: distance between taps, 1 or more.
        bias: `[channels]`.
        causal: whether outputs depend on the past only.
        lengths: `[batch]`, number of valid tokens in each row; the others are padding and count as zeros.
        state: the state that an earlier call returned; None at the start of the sequence. Causal only.
        return_state: whether to return the state after these tokens.
        inplace: whether the memory of `state` may be reused; `state` is invalid afterwards.

    Returns:
        `y` of `x`'s shape, and the new state or None.
    """
    _check(x, weight, dilation, bias, causal, lengths, state, return_state)
    buffer, position = (None, None) if state is None else (state.buffer, state.position)
    y, conv_input = conv_with_buffer(x, weight, dilation, bias, causal, lengths, buffer, position)
    if not return_state:
        return y, None
    if state is None:
        state = initial_conv_state(x.shape[0], x.shape[2], weight.shape[1], dilation, x.device, x.dtype)
    buffer = push_ring(state.buffer, state.position, conv_input, lengths, inplace)
    return y, ConvState(buffer, advance(state.position, x.shape[1], lengths, inplace))


def conv_with_buffer(
    x: Tensor,
    weight: Tensor,
    dilation: int,
    bias: Tensor | None,
    causal: bool,
    lengths: Tensor | None,
    buffer: Tensor | None,
    position: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `dilated_conv` with a bare ring buffer, for callers that keep one position for several convolutions.

    Without a buffer the sequence starts here. Returns the output, and the inputs with zeros in the padding, which the
    caller has to push into the buffer.
    """
    x = zero_padding(x, lengths)
    time, kernel_size = x.shape[1], weight.shape[1]
    if buffer is None or position is None:
        if causal and not torch.compiler.is_compiling():
            # Leave out taps that reach back before the first token; a compiled graph should not depend on how many.
            kernel_size = min(kernel_size, (time - 1) // dilation + 1)
            weight = weight[:, :kernel_size]
        future = 0 if causal else (kernel_size - 1) // 2 * dilation
        past = (kernel_size - 1) * dilation - future
        y = _correlate(F.pad(x, (0, 0, past, future)), weight, dilation, bias)
    elif time <= dilation and kernel_size > 1:
        # No token is the input of another one of these: read only the taps from the buffer.
        steps = torch.arange(time, device=x.device)
        back = torch.arange(1, kernel_size, device=x.device) * dilation
        taps = read_ring(buffer, position, (back.unsqueeze(1) - steps).flatten())
        taps = taps.view(x.shape[0], kernel_size - 1, time, x.shape[2])
        y = x * weight[:, 0] + torch.einsum("bktd,dk->btd", taps, weight[:, 1:])
        y = y if bias is None else y + bias
    else:
        y = _correlate(torch.cat([unroll_ring(buffer, position), x], 1), weight, dilation, bias)
    return y, x


def _correlate(padded: Tensor, weight: Tensor, dilation: int, bias: Tensor | None) -> Tensor:
    # PyTorch's first tap is the oldest one, here it is the newest.
    kernels = weight.flip(1).unsqueeze(1)
    return F.conv1d(padded.transpose(1, 2), kernels, bias, dilation=dilation, groups=weight.shape[0]).transpose(1, 2)


def _check(
    x: Tensor,
    weight: Tensor,
    dilation: int,
    bias: Tensor | None,
    causal: bool,
    lengths: Tensor | None,
    state: ConvState | None,
    return_state: bool,
) -> None:
    if x.dim() != 3 or x.shape[1] < 1:
        raise InputError(f"x: expected [batch, time, channels] with 1 or more tokens, got shape {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise InputError(
            f"weight: expected [channels, kernel_size] with {x.shape[2]} channels as in x and a kernel_size of 1 or "
            f"more, got shape {list(weight.shape)}"
        )
    if dilation < 1:
        raise InputError(f"dilation: expected 1 or more, got {dilation}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias: expected [channels], {list(weight.shape[:1])}, got shape {list(bias.shape)}")
    check_same_dtype(x, weight=weight, bias=bias)
    check_lengths(lengths, x.shape[0], x.shape[1])
    if not causal and (state is not None or return_state):
        raise StateError("state: expected None for a bidirectional convolution, got one or return_state=True")
    if state is None:
        return
    expected = (x.shape[0], (weight.shape[1] - 1) * dilation, x.shape[2])
    if state.buffer.shape != expected:
        raise StateError(f"state.buffer: expected shape {list(expected)}, got {list(state.buffer.shape)}")
