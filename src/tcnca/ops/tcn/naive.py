"""The TCN with PyTorch's own operators: the oracle of the tests, and the backend that runs anything anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.activations import ACTIVATIONS, activation
from tcnca.ops.checks import check_lengths, check_same_dtype, check_sequence
from tcnca.ops.dropout import dropout
from tcnca.ops.padding import advance, zero_padding
from tcnca.ops.ring import extend_ring, is_host_readable, push_ring, read_ring
from tcnca.ops.state import State

NormFn = Callable[[Tensor, int], Tensor]


@dataclasses.dataclass(frozen=True)
class TCNState(State):
    """The inputs that the convolutions of a causal TCN still need.

    Attributes:
        buffers: one ring per convolution, `[batch, (kernel_size - 1) · dilation, channels]`.
        position: `[batch]`, number of tokens seen so far.
    """

    _rings: ClassVar[frozenset[str]] = frozenset({"buffers"})

    buffers: tuple[Tensor, ...]
    position: Tensor


# Without `eq`, because a hash of the fields would be that of tensors, and `torch.compile` asks for it.
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TCNCall:
    """One call of `tcnca.ops.tcn`, whose arguments these are; every backend takes it as a whole.

    Block `i` has the dilation `dilation · dilation_factor^i`.
    """

    x: Tensor
    weight: Tensor
    dilation_factor: int
    dilation: int = 1
    bias: Tensor | None = None
    activation: str = "silu"
    residual: bool = True
    omega: Tensor | None = None
    norm_fn: NormFn | None = None
    dropout: float = 0.0
    causal: bool = True
    lengths: Tensor | None = None
    state: TCNState | None = None
    return_state: bool = False
    inplace: bool = False

    def parameters(self) -> list[Tensor]:
        """Return the weight and, as far as they are given, bias and omega."""
        return [each for each in (self.weight, self.bias, self.omega) if each is not None]

    def convolution(self, number: int) -> tuple[Tensor, Tensor | None, int]:
        """Return weight `[1, 1, channels, kernel_size]`, bias `[1, 1, channels]` and dilation of a convolution."""
        block, index = divmod(number, self.weight.shape[1])
        place = slice(block, block + 1), slice(index, index + 1)
        bias = None if self.bias is None else self.bias[place]
        return self.weight[place], bias, self.dilation * self.dilation_factor**block


def receptive_field(kernel_size: int, dilation_factor: int, depth: int, convolutions: int = 1) -> int:
    """Return the number of inputs from the first to the last one that an output depends on.

    `1 + B (K - 1) (f^D - 1) / (f - 1)` in the paper's symbols.
    """
    return 1 + convolutions * (kernel_size - 1) * sum(dilation_factor**block for block in range(depth))


def lag_counts(
    kernel_size: int,
    dilation_factor: int,
    depth: int,
    convolutions: int = 1,
    residual: bool = False,
    causal: bool = True,
) -> NDArray[np.float64]:
    """Return in how many ways each input reaches an output of a TCN: 0 for a gap.

    A way is a choice of one tap in each convolution or, with `residual`, of the skip connection around a block. There
    is one entry for each input of the receptive field. The first is that of lag 0 if causal. Otherwise it is that of
    the latest input, `lead` steps after the output, with `lead` the sum of `(kernel_size - 1) // 2 * dilation` over the
    convolutions. Counts are exact up to 2^53.
    """
    lead = 0 if causal else (kernel_size - 1) // 2
    counts = np.ones(1)
    for block in range(depth):
        dilation, before = dilation_factor**block, counts
        for _ in range(convolutions):
            wider = np.zeros(len(counts) + (kernel_size - 1) * dilation)
            for tap in range(kernel_size):
                wider[tap * dilation : tap * dilation + len(counts)] += counts
            counts = wider
        if residual:
            skipped = convolutions * lead * dilation
            counts[skipped : skipped + len(before)] += before
    return counts


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
    """Return the state before the first token. It holds `receptive_field - 1` values per channel."""
    shapes = _buffer_shapes(batch, channels, kernel_size, dilation_factor, depth, convolutions)
    buffers = tuple(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes)
    return TCNState(buffers, torch.zeros(batch, dtype=torch.long, device=device))


def _buffer_shapes(
    batch: int, channels: int, kernel_size: int, dilation_factor: int, depth: int, convolutions: int
) -> list[tuple[int, int, int]]:
    blocks = [block for block in range(depth) for _ in range(convolutions)]
    return [(batch, (kernel_size - 1) * dilation_factor**block, channels) for block in blocks]


def naive_tcn(call: TCNCall) -> tuple[Tensor, TCNState | None]:
    """Run a call on any device and in any floating dtype."""
    function = activation(call.activation)

    def convolve(h: Tensor, number: int) -> Tensor:
        h = _dilated_conv(call, h, number)
        h = function(h if call.norm_fn is None else call.norm_fn(h, number))
        return dropout(h, call.dropout) if call.dropout > 0.0 else h

    return run_convolutions(call, call.x, convolve)


def run_convolutions(
    call: TCNCall, x: Tensor, convolve: Callable[[Tensor, int], Tensor], adds_skip: bool = False
) -> tuple[Tensor, TCNState | None]:
    """Run one convolution after the other, from `x`.

    `convolve` takes the input of a convolution and its number, and returns what follows it up to the next convolution
    or skip connection, or with `adds_skip` including the skip connection.
    """
    depth, convolutions = call.weight.shape[:2]
    inputs: list[Tensor] = []  # of each convolution, for the state
    for block in range(depth):
        h = x
        for index in range(convolutions):
            if call.return_state:
                inputs.append(h if inputs else call.x)
            h = convolve(h, block * convolutions + index)
        x = x + h if call.residual and not adds_skip else h
    if call.omega is not None:
        # Both are rounded to the dtype that the blocks compute in.
        x = (x + call.omega * call.x.to(x.dtype)).to(x.dtype)
    return x, _next_state(call, inputs) if call.return_state else None


def _dilated_conv(call: TCNCall, x: Tensor, number: int) -> Tensor:
    """Convolve every channel of `x` with its own kernel, from the state's ring buffer if there is a state."""
    weight, bias, dilation = call.convolution(number)
    weight, bias = weight[0, 0], None if bias is None else bias[0, 0]
    x = zero_padding(x, call.lengths)
    time, kernel_size = x.shape[1], weight.shape[1]
    if call.state is None:
        future = 0 if call.causal else (kernel_size - 1) // 2
        past = kernel_size - 1 - future
        if not torch.compiler.is_compiling():
            # Leave out taps that reach beyond the sequence; a compiled graph should not depend on how many.
            within = (time - 1) // dilation
            weight = weight[:, max(future - within, 0) : future + within + 1]
            future, past = min(future, within), min(past, within)
        return _correlate(F.pad(x, (0, 0, past * dilation, future * dilation)), weight, dilation, bias)
    buffer, position = call.state.buffers[number], call.state.position
    if time <= dilation and kernel_size > 1:
        # No token is the input of another one of these: read only the taps from the buffer.
        steps = torch.arange(time, device=x.device)
        back = torch.arange(1, kernel_size, device=x.device) * dilation
        taps = read_ring(buffer, position, (back.unsqueeze(1) - steps).flatten())
        taps = taps.view(x.shape[0], kernel_size - 1, time, x.shape[2])
        y = x * weight[:, 0] + torch.einsum("bktd,dk->btd", taps, weight[:, 1:])
        return y if bias is None else y + bias
    return _correlate(extend_ring(buffer, position, x), weight, dilation, bias)


def _correlate(padded: Tensor, weight: Tensor, dilation: int, bias: Tensor | None) -> Tensor:
    # PyTorch's first tap is the oldest one, here it is the newest.
    kernels = weight.flip(1).unsqueeze(1)
    return F.conv1d(padded.transpose(1, 2), kernels, bias, dilation=dilation, groups=weight.shape[0]).transpose(1, 2)


def _next_state(call: TCNCall, inputs: list[Tensor]) -> TCNState:
    """Return the state after a call, given the inputs of each of its convolutions."""
    first, state, inplace = inputs[0], call.state, call.inplace
    if state is None:
        depth, convolutions, channels, kernel_size = call.weight.shape
        shape = (first.shape[0], channels, kernel_size, call.dilation_factor, depth, convolutions)
        state = initial_tcn_state(*shape, first.device, first.dtype)
        # The new buffers have no other user. Not measured on a GPU.
        inplace = is_host_readable(state.position)
    buffers = tuple(
        push_ring(buffer, state.position, conv_input, call.lengths, inplace)
        for buffer, conv_input in zip(state.buffers, inputs, strict=True)
    )
    return TCNState(buffers, advance(state.position, first.shape[1], call.lengths, inplace))


def check_tcn(call: TCNCall) -> None:
    """Raise an error that names the argument if a call is invalid."""
    x, weight, bias, state = call.x, call.weight, call.bias, call.state
    check_sequence("x", x)
    if weight.dim() != 4 or weight.shape[2] != x.shape[2] or min(weight.shape) < 1:
        raise InputError(
            f"weight: expected [depth, convolutions, channels, kernel_size], each 1 or more, with {x.shape[2]} "
            f"channels as in x, got shape {list(weight.shape)}"
        )
    if call.dilation_factor < 1:
        raise InputError(f"dilation_factor: expected 1 or more, got {call.dilation_factor}")
    if call.activation not in ACTIVATIONS:
        raise InputError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {call.activation!r}")
    if bias is not None and bias.shape != weight.shape[:3]:
        raise InputError(
            f"bias: expected [depth, convolutions, channels], {list(weight.shape[:3])}, got shape {list(bias.shape)}"
        )
    if call.omega is not None and call.omega.shape != x.shape[2:]:
        raise InputError(f"omega: expected [channels], {list(x.shape[2:])}, got shape {list(call.omega.shape)}")
    if not 0.0 <= call.dropout <= 1.0:
        raise InputError(f"dropout: expected a probability from 0 to 1, got {call.dropout}")
    check_same_dtype(x, weight=weight, bias=bias, omega=call.omega)
    check_lengths(call.lengths, x.shape[0], x.shape[1])
    if not call.causal and (state is not None or call.return_state):
        raise StateError("state: expected None for a bidirectional TCN, got one or return_state=True")
    if state is None:
        return
    depth, convolutions, channels, kernel_size = weight.shape
    expected = _buffer_shapes(x.shape[0], channels, kernel_size, call.dilation_factor, depth, convolutions)
    if [tuple(buffer.shape) for buffer in state.buffers] != expected:
        got = [list(buffer.shape) for buffer in state.buffers]
        raise StateError(f"state.buffers: expected shapes {[list(shape) for shape in expected]}, got {got}")
