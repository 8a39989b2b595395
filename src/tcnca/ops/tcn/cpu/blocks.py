"""All blocks of the TCN for some sequences and channels, one convolution after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tcnca.ops.tcn.cpu import convolution
from tcnca.ops.tcn.cpu.convolution import POINTWISE, Pointwise, Taps, taps_of
from tcnca.ops.tcn.cpu.memory import Memory


class Blocks(NamedTuple):
    """What the blocks compute, the convolutions of all of them in one list; `lengths` are those of the sequences."""

    taps: list[Taps]
    pointwise: Pointwise
    convolutions: int
    residual: bool
    lengths: list[int] | None


def blocks_of(
    kernels: Tensor,
    bias: Tensor | None,
    lengths: list[int] | None,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    time: int,
) -> Blocks:
    """Blocks for sequences of `time` tokens; `kernels` is `tcn`'s `weight` with the oldest tap first."""
    depth, convolutions = kernels.shape[:2]
    count = depth * convolutions
    biases: Sequence[Tensor | None] = [None] * count if bias is None else bias.flatten(0, 1).unbind()
    taps = [
        taps_of(kernel, offset, factor ** (number // convolutions), time, causal)
        for number, (kernel, offset) in enumerate(zip(kernels.flatten(0, 1).unbind(), biases, strict=True))
    ]
    return Blocks(taps, POINTWISE[nonlinearity], convolutions, residual, lengths)


def between(blocks: Blocks, x: Tensor, memory: Memory, in_turns: bool) -> list[Tensor]:
    """Places for what lies between the convolutions; with `in_turns` a place is used again as soon as it can be."""
    needed = len(blocks.taps) - 1
    places = memory.inner.take(min(needed, blocks.convolutions + 1) if in_turns else needed, *x.shape)
    return [places[number % places.shape[0]] for number in range(needed)]


def forward(blocks: Blocks, x: Tensor, outputs: Sequence[Tensor], memory: Memory) -> None:
    """Write what each convolution's part of a block ends with to its place in `outputs`.

    A tensor may serve several of them, at least `convolutions + 1` apart.
    """
    h = skip = x
    for number, (taps, y) in enumerate(zip(blocks.taps, outputs, strict=False)):
        ends = (number + 1) % blocks.convolutions == 0
        source = h if blocks.lengths is None else _clean(memory.clean.take(*h.shape).copy_(h), blocks.lengths)
        through = skip if ends and blocks.residual else None
        convolution.forward(source, taps, blocks.pointwise, through, y, memory.rows)
        h = y
        skip = y if ends else skip


def backward(
    blocks: Blocks,
    dy: Tensor,
    inputs: Sequence[Tensor],
    dinputs: Sequence[Tensor | None],
    dx: Tensor,
    dkernels: Sequence[Tensor],
    dbiases: Sequence[Tensor | None],
    memory: Memory,
) -> None:
    """Write the gradient of `x` to `dx` and add to those of the parameters.

    `inputs` are those of the convolutions, and `dinputs` gradients that came to them from elsewhere.
    """
    count = len(inputs)
    turns = memory.gradients.take(min(count - 1, blocks.convolutions + 1), *dx.shape) if count > 1 else ()
    dh = dskip = dy
    for number in reversed(range(count)):
        begins = number % blocks.convolutions == 0
        target = turns[number % len(turns)] if number else dx
        through = dskip if begins and blocks.residual else None
        source = inputs[number]
        if blocks.lengths is not None:
            source = _clean(memory.clean.take(*source.shape).copy_(source), blocks.lengths)
        convolution.backward(
            dh,
            source,
            blocks.taps[number],
            blocks.pointwise,
            through if blocks.lengths is None else None,
            target,
            dkernels[number],
            dbiases[number],
            (memory.rows, memory.slopes),
        )
        if blocks.lengths is not None:
            # Padding reaches the skip connection, but no convolution.
            _clean(target, blocks.lengths)
            target = target if through is None else target.add_(through)
        extra = dinputs[number]
        dh = target if extra is None else target.add_(extra)
        dskip = dh if begins else dskip


def _clean(x: Tensor, lengths: list[int]) -> Tensor:
    """Put zeros into the padding."""
    for row, length in enumerate(lengths):
        x[row, length:].zero_()
    return x
