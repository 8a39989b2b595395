"""One dilated convolution of the TCN with what follows it, and its gradients, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcnca.ops.tcn.cpu.fold import Folded, pieces
from tcnca.ops.tcn.cpu.memory import Scratch

_aten: Any = torch.ops.aten
_PLAIN = ((1, 1), (0, 0), (1, 1), False, (0, 0))  # stride, padding, dilation, not transposed, output padding


class Pointwise(NamedTuple):
    """A non-linearity in place; its gradient, from that of its result and its argument, in place of the argument."""

    apply: Callable[[Tensor], object]
    differentiate: Callable[[Tensor, Tensor], object]


def _gelu(approximate: str) -> Pointwise:
    return Pointwise(
        lambda h: _aten.gelu_.default(h, approximate=approximate),
        lambda dy, h: _aten.gelu_backward.grad_input(dy, h, approximate=approximate, grad_input=h),
    )


POINTWISE: dict[str, Pointwise] = {
    "silu": Pointwise(_aten.silu_.default, lambda dy, h: _aten.silu_backward.grad_input(dy, h, grad_input=h)),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": Pointwise(torch.relu_, lambda dy, h: _aten.threshold_backward.grad_input(dy, h, 0, grad_input=h)),
    "none": Pointwise(lambda h: h, lambda dy, h: h.copy_(dy)),
}


class Taps(NamedTuple):
    """The taps of a convolution through which one token of a sequence sees another, oldest first.

    kernel: `[channels, taps]`; they look from `past` dilations back to `future` dilations ahead.
    used: where they are in the whole kernel, oldest first.
    """

    kernel: Tensor
    bias: Tensor | None
    dilation: int
    used: slice
    past: int
    future: int


def taps_of(kernel: Tensor, bias: Tensor | None, dilation: int, time: int, causal: bool) -> Taps:
    """What matters to a sequence of `time` tokens of a kernel (`[channels, kernel_size]`, oldest tap first)."""
    size = kernel.shape[1]
    future = 0 if causal else (size - 1) // 2
    past, reach = size - 1 - future, (time - 1) // dilation
    if reach < max(past, future):
        used = slice(max(past - reach, 0), size - max(future - reach, 0))
        kernel, past, future = kernel[:, used], min(past, reach), min(future, reach)
    else:
        used = slice(0, size)
    # A single tap is the same with every dilation, and rows are longest with the smallest.
    return Taps(kernel, bias, dilation if past + future else 1, used, past, future)


def correlate(rows: Tensor, kernel: Tensor, bias: Tensor | None, zeros: int = 0) -> Tensor:
    """Rows `[…, tokens, channels]`, with `zeros` more at both ends, to `[…, tokens - taps + 1, channels]`."""
    several, phases, tokens, channels = rows.shape
    taps = kernel.shape[1]
    image = rows.view(several * phases, 1, tokens, channels).permute(0, 3, 1, 2)
    y = torch.conv2d(image, kernel.reshape(channels, 1, 1, taps), bias, padding=(0, zeros), groups=channels)
    return y.permute(0, 2, 3, 1).reshape(several, phases, tokens + 2 * zeros - taps + 1, channels)


def weight_gradient(dh: Tensor, rows: Tensor, kernel: Tensor) -> Tensor:
    """The gradient of `kernel` in `correlate(rows, kernel)`, from that of its result."""
    channels, taps = kernel.shape
    # As images one token wide: of those of one token's height PyTorch's kernel is many times slower.
    dh, rows = (part.reshape(-1, part.shape[2], 1, channels).permute(0, 3, 1, 2) for part in (dh, rows))
    image = kernel.reshape(channels, 1, taps, 1)
    found = _aten.convolution_backward.default(dh, rows, image, None, *_PLAIN, channels, (False, True, False))
    return found[1].reshape(channels, taps)


def forward(x: Tensor, taps: Taps, pointwise: Pointwise, skip: Tensor | None, y: Tensor, scratch: Scratch) -> None:
    """Write `skip + pointwise(convolution(x))` into `y`; all `[batch, time, channels]`, `y` not `x`."""
    source, target = Folded(x, taps.dilation), Folded(y, taps.dilation)
    through = None if skip is None else Folded(skip, taps.dilation)
    for piece in pieces(x.shape, taps.dilation):
        rows = scratch.take(*piece.shape(x.shape[2], taps.past + taps.future))
        source.load(piece, rows, piece.start - taps.past)
        h = correlate(rows, taps.kernel, taps.bias)
        pointwise.apply(h)
        target.store(piece, h, through)


def backward(
    dy: Tensor,
    x: Tensor,
    taps: Taps,
    pointwise: Pointwise,
    skip: Tensor | None,
    dx: Tensor,
    dkernel: Tensor,
    dbias: Tensor | None,
    scratch: tuple[Scratch, Scratch],
) -> None:
    """Write `skip + the gradient of x` into `dx`, and add the parameters' gradients to `dkernel` and `dbias`.

    Pieces overlap by what a kernel spans: they compute the gradient before the non-linearity for themselves, which
    is cheaper than to keep it.
    """
    kernel, bias, dilation, used, past, future = taps
    turned, channels = kernel.flip(1), x.shape[2]
    source, slope, target = (Folded(part, dilation) for part in (x, dy, dx))
    through = None if skip is None else Folded(skip, dilation)
    for piece in pieces(x.shape, dilation):
        first, last = max(piece.start - future, 0), min(piece.stop + past, source.tokens)
        own = slice(piece.start - first, piece.stop - first)
        more = last - first - (piece.stop - piece.start)
        rows = scratch[0].take(*piece.shape(channels, more + past + future))
        source.load(piece, rows, first - past)
        dh = correlate(rows, kernel, bias)
        slope.clear_missing(piece, dh, first)
        for part, place in slope.parts(piece, dh, first):
            pointwise.differentiate(part, place)
        seen = rows[:, :, own.start : own.stop + past + future]
        dkernel[:, used] += weight_gradient(dh[:, :, own], seen, kernel)
        if dbias is not None:
            dbias += dh[:, :, own].sum((0, 1, 2))
        padded = scratch[1].take(*piece.shape(channels, past + future))
        start = first - piece.start + future
        stop = start + last - first
        padded[:, :, :start].zero_()
        padded[:, :, start:stop].copy_(dh)
        padded[:, :, stop:].zero_()
        target.store(piece, correlate(padded, turned, None), through)
