"""All blocks of the TCN from fold to fold: what a convolution's part ends with is written as the rows of the next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tcnca.ops.tcn.cpu import fold
from tcnca.ops.tcn.cpu.blocks import Blocks
from tcnca.ops.tcn.cpu.convolution import correlate
from tcnca.ops.tcn.cpu.memory import Memory

MOST_ADDED = 1 / 8  # of the tokens, to make rows equally long


def refolds(blocks: Blocks, x: Tensor) -> bool:
    """Whether `forward` can compute the blocks: causal ones without padding, in one piece."""
    future = any(taps.future for taps in blocks.taps)
    if future or blocks.lengths is not None or not 0 < x.numel() <= fold.PIECE:
        return False
    time = x.shape[1]
    return _tokens(time, _dilations(blocks)[-1]) - time <= MOST_ADDED * time


def forward(blocks: Blocks, x: Tensor, y: Tensor, memory: Memory) -> None:
    """Write the last block's output to `y`; both are `[batch, time, channels]`."""
    batch, time, channels = x.shape
    dilations, last = _dilations(blocks), len(blocks.taps) - 1
    tokens = _tokens(time, dilations[-1])
    rows_of = _places(blocks, dilations, (batch, tokens, channels), memory)
    bare = tokens == time and x.is_contiguous()  # of zeros before it, which the convolution can do without
    rows = x.unsqueeze(1) if bare else _load(x, rows_of(0), blocks.taps[0].past)
    skip = rows
    for number, (taps, dilation) in enumerate(zip(blocks.taps, dilations, strict=True)):
        past = 0 if bare else taps.past
        h = correlate(rows, taps.kernel, taps.bias, taps.past - past)
        blocks.pointwise.apply(h)
        source = rows[:, :, past:] if past else rows
        skip = source if number % blocks.convolutions == 0 else skip
        through = skip if blocks.residual and (number + 1) % blocks.convolutions == 0 else None
        if number == last:
            _unfold(h, through, y)
            return
        rows, bare = rows_of(number + 1), False
        ratio = dilations[number + 1] // dilation
        parts = (batch, dilation, tokens // dilation // ratio, ratio, channels)
        _add(_split(h, parts), None if through is None else _split(through, parts), _joined(rows, parts))
        del h  # so that the next one is where it was, in the caches


def _split(rows: Tensor, parts: tuple[int, ...]) -> Tensor:
    """The first tokens of rows as `[batch, dilation, tokens, ratio, channels]`."""
    sequence, phase, token, channel = rows.stride()
    return rows.as_strided(parts, (sequence, phase, token * parts[3], token, channel))


def _joined(rows: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Where what `_split` gives belongs: the last tokens of rows with a dilation that is `ratio` times as large."""
    sequence, phase, token, channel = rows.stride()
    offset = rows.storage_offset() + (rows.shape[2] - parts[2]) * token
    return rows.as_strided(parts, (sequence, phase, token, phase * parts[1], channel), offset)


def _dilations(blocks: Blocks) -> list[int]:
    """Those of the rows, each a multiple of the one before it: a single tap takes any."""
    found = [1]
    for taps in blocks.taps:
        found.append(taps.dilation if taps.past else found[-1])
    return found[1:]


def _tokens(time: int, dilation: int) -> int:
    """At least `time`, so that all rows of the largest dilation, and so of each, are equally long.

    Those at the end that are added are seen by none before them.
    """
    return -(-time // dilation) * dilation


def _places(
    blocks: Blocks, dilations: list[int], shape: tuple[int, int, int], memory: Memory
) -> Callable[[int], Tensor]:
    """Where a convolution's rows are, by its number; the zeros that come before them are written as it is asked."""
    batch, tokens, channels = shape
    shapes = [
        (batch, dilation, taps.past + tokens // dilation, channels)
        for taps, dilation in zip(blocks.taps, dilations, strict=True)
    ]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    turns = min(len(sizes), blocks.convolutions + 1)
    places = memory.inner.take(turns, max(sizes))

    def rows(number: int) -> Tensor:
        found = places[number % turns, : sizes[number]].view(shapes[number])
        found[:, :, : blocks.taps[number].past].zero_()
        return found

    return rows


def _load(x: Tensor, rows: Tensor, past: int) -> Tensor:
    end = past + x.shape[1]
    rows[:, 0, past:end].copy_(x)
    rows[:, 0, end:].zero_()
    return rows


def _unfold(h: Tensor, skip: Tensor | None, y: Tensor) -> None:
    """Write `skip + h`, in rows, to `y`, without the tokens that were added."""
    dilation = h.shape[1]
    whole, rest = divmod(y.shape[1], dilation)
    _add(
        h[:, :, :whole],
        None if skip is None else skip[:, :, :whole],
        y[:, : whole * dilation].unflatten(1, (whole, dilation)).transpose(1, 2),
    )
    if rest:
        _add(h[:, :rest, whole], None if skip is None else skip[:, :rest, whole], y[:, whole * dilation :])


def _add(h: Tensor, skip: Tensor | None, out: Tensor) -> None:
    if skip is None:
        out.copy_(h)
    else:
        torch.add(skip, h, out=out)
