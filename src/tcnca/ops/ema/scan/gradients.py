"""The gradients of an EMA's coefficients as Triton kernels."""

# Compile-time constants are in capitals.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tcnca.ops.ema.scan.walk import at, course, entering, load_group, matrix, place, real_tokens


@triton.jit
def weights(
    x: tl.tensor,
    g: tl.tensor,
    coefficients: tl.tensor,
    carries: tl.tensor,
    pulls: tl.tensor,
    parts: tl.tensor,
    lengths: tl.tensor,
    final: tl.tensor,
    x_by_batch: tl.tensor,
    x_by_time: tl.tensor,
    x_by_channel: tl.tensor,
    g_by_batch: tl.tensor,
    g_by_time: tl.tensor,
    g_by_channel: tl.tensor,
    rows: tl.tensor,
    time: tl.tensor,
    channels: tl.tensor,
    segments: tl.tensor,
    length: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTHS: tl.constexpr,
    INJECT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """What each segment adds to the gradients of the coefficients, `[directions, 2 or 3, rows, hidden, channels]`.

    The walk carries, beside the states, their derivatives by the decay (and by the drive, if `SCALED`). So it needs
    the gradient of the states only where the segment ends, and no token's states are kept.
    """
    tile, segment, row = place(tiles * groups, segments)
    channel = tile % tiles * TILE + tl.arange(0, TILE)
    hidden = tile // tiles * STATES + tl.arange(0, STATES)
    keep = channel < channels
    batch, direction = row % rows, row // rows
    backwards = direction == 1
    size = channels * HIDDEN
    offset, inside = matrix(hidden, channel, channels, HIDDEN)
    own = coefficients + direction * 3 * size + offset
    decay = tl.load(own + size, mask=inside, other=0.0)
    drive, readout, last = decay, decay, decay
    if SCALED:
        drive = tl.load(own, mask=inside, other=0.0)
        readout = tl.load(own + 2 * size, mask=inside, other=0.0)
    if INJECT:
        last = tl.load(final + batch.to(tl.int64) * size + offset, mask=inside, other=0.0)
    real = real_tokens(lengths, batch, time, LENGTHS)
    t, sign, count = course(segment, length, time, backwards, GROUP)
    x_step = sign * x_by_time.to(tl.int64)
    g_step = sign * g_by_time.to(tl.int64)
    x_pointer = at(x, batch, t, channel, x_by_batch, x_by_time, x_by_channel)
    g_pointer = at(g, batch, t, channel, g_by_batch, g_by_time, g_by_channel)
    here = (row.to(tl.int64) * segments + segment) * size
    state = tl.load(carries + here + offset, mask=inside, other=0.0)
    by_decay = tl.zeros([STATES, TILE], tl.float32)
    by_drive = tl.zeros([STATES, TILE], tl.float32)
    to_readout = tl.zeros([STATES, TILE], tl.float32)
    to_decay = tl.zeros([STATES, TILE], tl.float32)
    to_drive = tl.zeros([STATES, TILE], tl.float32)
    x_ahead = load_group(x_pointer, x_step, keep, t, sign, tl.where(count > 0, real, 0), GROUP)
    g_ahead = load_group(g_pointer, g_step, keep, t, sign, tl.where(count > 0, time, 0), GROUP)
    for i in range(count):
        x_current, g_current = x_ahead, g_ahead
        further = tl.where(i + 1 < count, GROUP, 0)
        x_pointer += further * x_step
        g_pointer += further * g_step
        x_ahead = load_group(x_pointer, x_step, keep, t + further * sign, sign, real, GROUP)
        g_ahead = load_group(g_pointer, g_step, keep, t + further * sign, sign, time, GROUP)
        for j in tl.static_range(GROUP):
            is_last = t + sign * j == real - 1
            pull = entering(g_current[j], readout, last, is_last, SCALED, INJECT)
            by_decay = decay * by_decay + state
            state = decay * state + entering(x_current[j], drive, last, False, SCALED, False)
            to_readout += g_current[j][None, :] * state
            to_decay += pull * by_decay
            if SCALED:
                by_drive = decay * by_drive + x_current[j][None, :]
                to_drive += pull * by_drive
        t += GROUP * sign
    pull = decay * tl.load(pulls + here + offset, mask=inside, other=0.0)
    to_decay += pull * by_decay
    kinds = 3 if SCALED else 2
    all_rows = rows * segments
    part = parts + (direction * kinds * all_rows + batch * segments + segment).to(tl.int64) * size
    by_kind = all_rows.to(tl.int64) * size
    tl.store(part + offset, to_readout, mask=inside)
    tl.store(part + by_kind + offset, to_decay, mask=inside)
    if SCALED:
        tl.store(part + 2 * by_kind + offset, to_drive + pull * by_drive, mask=inside)


@triton.jit
def _column(
    base: tl.tensor, lane: tl.tensor, rows: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The sums of the columns `lane` of a `[rows, size]` matrix, always in the same order."""
    total = tl.zeros([WIDTH, BLOCK], tl.float64)
    row = tl.arange(0, WIDTH)
    for first in range(0, rows, WIDTH):
        inside = (first + row < rows)[:, None] & (lane < size)[None, :]
        total += tl.load(base + (first + row)[:, None].to(tl.int64) * size + lane[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0).to(tl.float32)


@triton.jit
def reduce(
    parts: tl.tensor,
    coefficients: tl.tensor,
    delta: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    to_delta: tl.tensor,
    to_alpha: tl.tensor,
    to_beta: tl.tensor,
    to_gamma: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    HIDDEN: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up what the segments found, and take it on to the parameters."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    direction = tl.program_id(1)
    size = channels * HIDDEN
    inside = lane < size
    kinds = 3 if SCALED else 2
    base = parts + (direction * kinds * rows).to(tl.int64) * size
    to_readout = _column(base, lane, rows, size, WIDTH, BLOCK)
    to_decay = _column(base + rows.to(tl.int64) * size, lane, rows, size, WIDTH, BLOCK)
    if SCALED:
        to_drive = _column(base + 2 * rows.to(tl.int64) * size, lane, rows, size, WIDTH, BLOCK)
    else:
        own = coefficients + direction * 3 * size + lane
        drive = tl.load(own, mask=inside, other=0.0)
        readout = tl.load(own + 2 * size, mask=inside, other=0.0)
        to_drive = readout * to_readout
        to_readout = drive * to_readout
        to_decay = drive * readout * to_decay
    out = direction * size + (lane % channels) * HIDDEN + lane // channels
    p = tl.sigmoid(tl.load(delta + out, mask=inside, other=0.0).to(tl.float32))
    damping = tl.sigmoid(tl.load(alpha + out, mask=inside, other=0.0).to(tl.float32))
    scaled = tl.load(beta + out, mask=inside, other=0.0).to(tl.float32) * to_drive
    by_delta = p * (1.0 - p) * (scaled - damping * to_decay)
    by_alpha = -p * damping * (1.0 - damping) * to_decay
    tl.store(to_delta + out, by_delta.to(to_delta.dtype.element_ty), mask=inside)
    tl.store(to_alpha + out, by_alpha.to(to_alpha.dtype.element_ty), mask=inside)
    tl.store(to_beta + out, (p * to_drive).to(to_beta.dtype.element_ty), mask=inside)
    tl.store(to_gamma + out, (SCALE * to_readout).to(to_gamma.dtype.element_ty), mask=inside)
