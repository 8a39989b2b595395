"""Convolution of every channel with an explicit long kernel in the frequency domain, with state in and out."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.checks import check_lengths, check_sequence, check_state, without_autocast
from tcnca.ops.padding import advance, zero_padding
from tcnca.ops.ring import extend_ring, push_ring
from tcnca.ops.state import State

_FEW_TOKENS = 8
"""Up to so many tokens after a state are summed directly, which is faster than a transform of all taps."""


@dataclasses.dataclass(frozen=True)
class LongConvState(State):
    """The inputs that a causal convolution still needs.

    Attributes:
        window: `[batch, taps - 1, channels]`, a ring buffer of the last inputs.
        position: `[batch]`, tokens seen so far.
    """

    _rings: ClassVar[frozenset[str]] = frozenset({"window"})

    window: Tensor
    position: Tensor


def initial_long_conv_state(
    batch: int,
    channels: int,
    taps: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> LongConvState:
    """Return the state before the first token. It holds `taps - 1` values per channel."""
    window = torch.zeros(batch, taps - 1, channels, device=device, dtype=dtype)
    return LongConvState(window, torch.zeros(batch, dtype=torch.long, device=device))


def long_conv(
    x: Tensor,
    kernel: Tensor,
    *,
    lengths: Tensor | None = None,
    state: LongConvState | None = None,
    return_state: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, LongConvState | None]:
    """Convolve every channel of `x` with its own kernel, `y[t] = Σ_l kernel[l] · x[t - l]`.

    The cost of a whole sequence is that of Fourier transforms, `time · log(time)` for each channel. An explicit kernel
    has no short state: the state holds `taps - 1` inputs. A token reads all of them, `taps` products for each channel,
    and a call with many tokens transforms `taps + time` of them: pass as many tokens at once as possible.

    Computed in float32 or better, with an error relative to the largest input of a row: in float32, an input of 1e6
    changes all outputs of its channel, earlier ones too, by about 0.1 times the sum of the kernel, and one NaN makes
    them all NaN. A few tokens with a state are summed directly, without this error.

    Args:
        x: `[batch, time, channels]`.
        kernel: `[directions, channels, taps]`. One direction is causal; with two, the second looks into the future and
            both see the present.
        lengths: `[batch]`, valid tokens in each row; the rest is padding, taken as zeros.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: reuse the memory of the given state, which must not be used again.

    Returns:
        `y` of `x`'s shape and dtype, and the new state or None.
    """
    _check(x, kernel, lengths, state, return_state)
    x = zero_padding(x, lengths)
    # Autocast would sum in half precision.
    with without_autocast(x.device):
        if state is None:
            y = fft_convolve(x, kernel[..., : x.shape[1]])
        else:
            inputs = extend_ring(state.window, state.position, x)
            y = _next_outputs(inputs, kernel, x.shape[1]).to(x.dtype)
    if not return_state:
        return y, None
    if state is None:
        state = initial_long_conv_state(x.shape[0], x.shape[2], kernel.shape[2], x.device, x.dtype)
    window = push_ring(state.window, state.position, x, lengths, inplace)
    return y, LongConvState(window, advance(state.position, x.shape[1], lengths, inplace))


def fft_convolve(x: Tensor, kernel: Tensor, *, wraps: bool = False) -> Tensor:
    """Convolve `x` (`[batch, time, channels]`) with `kernel` (`[directions, channels, taps]`) in the frequency domain.

    Both directions see the present: they overlap at lag 0. With `wraps`, the first `taps - 1` outputs see the end of
    `x` and are of no use, and the transform is half as long.
    """
    time, taps = x.shape[1], kernel.shape[-1]
    size = time if wraps else max(2 * time, time + taps)
    if not torch.compiler.is_compiling():  # one graph serves all lengths
        if not x.numel():
            return x
        size = _fast_size(size)
    # Half precision loses too much in a transform of this length.
    precise = torch.promote_types(x.dtype, torch.float32)
    two_sided = F.pad(kernel[0].to(precise), (0, size - taps))
    if kernel.shape[0] == 2:
        # Lag -l has index size - l in a circular kernel.
        future = F.pad(kernel[1].to(precise), (0, size - taps))
        two_sided = two_sided + future.flip(-1).roll(1, -1)
    # Time last and contiguous: some versions of the compiler misjudge the layout of other transforms.
    rows = x.to(precise).transpose(1, 2).contiguous()
    spectrum = torch.fft.rfft(rows, n=size) * torch.fft.rfft(two_sided, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., :time].transpose(1, 2).to(x.dtype)


def _fast_size(size: int) -> int:
    """Return the next size that has no prime factor above 5: transforms of others take up to three times as long."""
    while True:
        rest = size
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def _next_outputs(inputs: Tensor, kernel: Tensor, time: int) -> Tensor:
    """Return the outputs at the last `time` of the inputs, before which there are `taps - 1` others."""
    if time > _FEW_TOKENS:
        return fft_convolve(inputs, kernel, wraps=True)[:, inputs.shape[1] - time :]
    precise = torch.promote_types(inputs.dtype, torch.float32)
    inputs, taps = inputs.to(precise), kernel[0].flip(-1).to(precise)
    count = taps.shape[1]
    return torch.stack([torch.einsum("btc,ct->bc", inputs[:, at : at + count], taps) for at in range(time)], 1)


def _check(x: Tensor, kernel: Tensor, lengths: Tensor | None, state: LongConvState | None, return_state: bool) -> None:
    """Raise an error that names what is wrong with the arguments of `long_conv`."""
    check_sequence("x", x)
    directions, channels, taps = kernel.shape if kernel.dim() == 3 else (0, 0, 0)
    if directions not in (1, 2) or channels != x.shape[2] or taps < 1:
        raise InputError(
            f"kernel: expected shape [directions, channels, taps] with 1 or 2 directions, {x.shape[2]} channels as in "
            f"x and 1 or more taps, got {list(kernel.shape)}"
        )
    check_lengths(lengths, x.shape[0], x.shape[1])
    if directions == 2 and (state is not None or return_state):
        raise StateError("state: expected None for a bidirectional convolution, only a causal one has a state")
    if state is not None:
        check_state("window", state.window, [x.shape[0], taps - 1, x.shape[2]])
