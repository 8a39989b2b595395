"""Parts that the kernels of the EMA share: where a program stands, how it walks over its segment, what enters."""

# Compile-time constants are in capitals, and the compiler knows no starred tuples.
# ruff: noqa: N803, RUF005
# mypy: disable-error-code="untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(tiles: tl.tensor, segments: tl.tensor) -> tl.tensor:
    """Tile, segment and row of this program."""
    program = tl.program_id(0)
    row = program // tiles
    return program % tiles, row % segments, row // segments


@triton.jit
def course(
    segment: tl.tensor, length: tl.tensor, time: tl.tensor, backwards: tl.tensor, GROUP: tl.constexpr
) -> tl.tensor:
    """The first time of a walk over a segment, its direction, and the number of groups of steps.

    The last group of a walk forwards and the first of one backwards may stand partly behind the end of time; there
    what a walk forwards ends in is not asked for, and one backwards still has nothing to lose.
    """
    start = segment * length
    groups = (tl.minimum(tl.maximum(time - start, 0), length) + GROUP - 1) // GROUP
    return tl.where(backwards, start + groups * GROUP - 1, start), tl.where(backwards, -1, 1), groups


@triton.jit
def at(
    base: tl.tensor,
    batch: tl.tensor,
    t: tl.tensor,
    channel: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_channel: tl.tensor,
) -> tl.tensor:
    """Pointers to one token's tile of channels."""
    offset = batch * by_batch.to(tl.int64) + t * by_time.to(tl.int64)
    return base + offset + channel * by_channel.to(tl.int64)


@triton.jit
def load_group(
    pointer: tl.tensor,
    step: tl.tensor,
    keep: tl.tensor,
    t: tl.tensor,
    sign: tl.tensor,
    end: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The values of a group of steps, all on their way before the first is used; zeros from the time `end` on."""
    values = ()
    for j in tl.static_range(GROUP):
        # The right side does not change from group to group.
        inside = keep & (t < end - sign * j)
        values = values + (tl.load(pointer + j * step, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def matrix(hidden: tl.tensor, channel: tl.tensor, channels: tl.tensor, HIDDEN: tl.constexpr) -> tl.tensor:
    """Offsets of a tile in `[hidden, channels]`, and which of them exist."""
    inside = (hidden[:, None] < HIDDEN) & (channel[None, :] < channels)
    return hidden[:, None] * channels + channel[None, :], inside


@triton.jit
def real_tokens(lengths: tl.tensor, batch: tl.tensor, time: tl.tensor, LENGTHS: tl.constexpr) -> tl.tensor:
    """The number of tokens of a row that are no padding."""
    real = time
    if LENGTHS:
        real = tl.minimum(tl.load(lengths + batch).to(tl.int32), time)
    return real


@triton.jit
def entering(
    value: tl.tensor, weight: tl.tensor, last: tl.tensor, is_last: tl.tensor, SCALED: tl.constexpr, INJECT: tl.constexpr
) -> tl.tensor:
    """What one token adds to the hidden states; a gradient of the final states enters with the last token."""
    added = value[None, :]
    if SCALED:
        added = weight * added
    if INJECT:
        added = added + tl.where(is_last, last, 0.0)
    return added
