"""The temporal convolutional network in plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.activations import ACTIVATIONS, activation
from tcnca.ops.checks import check_lengths
from tcnca.ops.dilated_conv import conv_with_buffer
from tcnca.ops.dropout import dropout as drop
from tcnca.ops.padding import advance
from tcnca.ops.ring import push_ring
from tcnca.ops.state import State

Transform = Callable[[Tensor, int], Tensor]


@dataclasses.dataclass(frozen=True)
class TCNState(State):
    """The inputs that the convolutions of a causal TCN still need.

    buffers: one ring for each convolution, `[batch, (kernel_size - 1) · dilation, channels]`.
    position: `[batch]`, tokens seen so far.
    """

    buffers: tuple[Tensor, ...]
    position: Tensor


def receptive_field(kernel_size: int, dilation_factor: int, depth: int, convolutions: int = 1) -> int:
    """How far the inputs of one output lie apart, both ends counted: `1 + B (K - 1) (f^D - 1) / (f - 1)`."""
    return 1 + convolutions * (kernel_size - 1) * sum(dilation_factor**block for block in range(depth))


def initial_tcn_state(
    batch: int,
    channels: int,
    kernel_size: int,
    dilation_factor: int,
    depth: int,
    convolutions: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> TCNState:
    """The state before the first token. It holds `receptive_field - 1` values a channel."""
    buffers = tuple(
        torch.zeros(batch, (kernel_size - 1) * dilation_factor**block, channels, device=device, dtype=dtype)
        for block in range(depth)
        for _ in range(convolutions)
    )
    return TCNState(buffers, torch.zeros(batch, dtype=torch.long, device=device))


def plain_tcn(
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
) -> tuple[Tensor, TCNState | None]:
    """`tcnca.ops.tcn`, whose arguments these are, on any device and in any floating type."""
    depth, convolutions = weight.shape[:2]
    function = activation(nonlinearity)
    inputs: list[Tensor] = []  # of each convolution: what its ring has to remember
    for block in range(depth):
        h = x
        for inner in range(convolutions):
            number = block * convolutions + inner
            h, seen = conv_with_buffer(
                h,
                weight[block, inner],
                dilation_factor**block,
                None if bias is None else bias[block, inner],
                causal,
                lengths,
                None if state is None else state.buffers[number],
                None if state is None else state.position,
            )
            inputs += [seen] if return_state else []
            h = h if normalize is None else normalize(h, number)
            h = function(h)
            h = drop(h, dropout) if dropout > 0.0 else h
        x = x + h if residual else h
    if not return_state:
        return x, None
    return x, next_state(state, inputs, weight, dilation_factor, lengths, inplace)


def next_state(
    state: TCNState | None,
    inputs: list[Tensor],
    weight: Tensor,
    dilation_factor: int,
    lengths: Tensor | None,
    inplace: bool,
) -> TCNState:
    """The state after a call, from the inputs of each of its convolutions."""
    first = inputs[0]
    if state is None:
        depth, convolutions, channels, kernel_size = weight.shape
        shape = (first.shape[0], channels, kernel_size, dilation_factor, depth, convolutions)
        state = initial_tcn_state(*shape, first.device, first.dtype)
    rings = zip(state.buffers, inputs, strict=True)
    buffers = tuple(push_ring(buffer, state.position, seen, lengths, inplace) for buffer, seen in rings)
    return TCNState(buffers, advance(state.position, first.shape[1], lengths, inplace))


def check_tcn(
    x: Tensor,
    weight: Tensor,
    dilation_factor: int,
    bias: Tensor | None,
    nonlinearity: str,
    causal: bool,
    lengths: Tensor | None,
    state: TCNState | None,
    return_state: bool,
    dropout: float = 0.0,
) -> None:
    """Raise an error that names what is wrong with the arguments of `tcn`."""
    if x.dim() != 3 or x.shape[1] < 1:
        raise InputError(f"x: got shape {list(x.shape)}, allowed is [batch, time, channels] with 1 or more tokens")
    if weight.dim() != 4 or weight.shape[2] != x.shape[2] or min(weight.shape) < 1:
        raise InputError(
            f"weight: got shape {list(weight.shape)}, allowed is [depth, convolutions, channels, kernel_size], "
            f"each 1 or more, with {x.shape[2]} channels as x has"
        )
    if dilation_factor < 1:
        raise InputError(f"dilation_factor: got {dilation_factor}, allowed is 1 or more")
    if nonlinearity not in ACTIVATIONS:
        raise InputError(f"nonlinearity: got {nonlinearity!r}, allowed are {', '.join(ACTIVATIONS)}")
    if bias is not None and bias.shape != weight.shape[:3]:
        raise InputError(
            f"bias: got shape {list(bias.shape)}, allowed is {list(weight.shape[:3])}, [depth, convolutions, channels]"
        )
    if not 0.0 <= dropout <= 1.0:
        raise InputError(f"dropout: got {dropout}, allowed is a probability, 0 to 1")
    check_lengths(lengths, x.shape[0], x.shape[1])
    if not causal and (state is not None or return_state):
        raise StateError("state: asked of a bidirectional TCN, allowed is None; only causal ones stream")
    if state is None:
        return
    depth, convolutions, channels, kernel_size = weight.shape
    expected = [
        (x.shape[0], (kernel_size - 1) * dilation_factor**block, channels)
        for block in range(depth)
        for _ in range(convolutions)
    ]
    if [tuple(buffer.shape) for buffer in state.buffers] != expected:
        got = [list(buffer.shape) for buffer in state.buffers]
        raise StateError(f"state.buffers: got shapes {got}, allowed are {[list(shape) for shape in expected]}")
