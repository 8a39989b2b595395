"""Triton kernels of diagonal state-space models, forward and backward.

Time is cut into segments that run in parallel and are joined by `carry`, as in the EMA's kernels.

`ssm` is a sum of matrix products over blocks of `BLOCK` tokens. `to_rows` transposes the input to
`[directions, channels, batch, time]`, in reverse where a direction looks into the future, and fills time with zeros up
to whole segments. A program then has one channel, `ROWS` pairs of a sequence and a segment, and their hidden states;
for each block of time it adds a triangular Toeplitz product of the inputs to a product of the hidden states. `ends`
walks from zero, `carry` chains the ends into what every segment starts from, `outputs` walks again from there,
`from_rows` transposes back. The gradient of the input is the same with time reversed; `lags` and `weights` compute
those of the parameters.

Powers of the decays come as tables of float32, rounded from float64: `powers` and `slopes` are `λ^l` and `l λ^l`,
`readout` is `w λ^l`, `kernel` is the real part of its sum over states, `step` is the decay of a block as a sum of two
numbers. Real and imaginary parts are apart: `[directions · channels, 2, lags, states]`. Ends, starts and pulls are
`[directions · channels, batch, segments, 2, states]`.

`scan` is the recurrence itself, element by element, for `diagonal_scan`: memory limits it. Complex numbers of inputs
and outputs are interleaved there, as PyTorch stores them.
"""

# Compile-time constants are in capitals, and the compiler supports neither starred tuples nor short-circuits.
# ruff: noqa: N803, RUF005, SIM108
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tcnca.ops.ema.triton_kernels import load_group, locate, valid_tokens, walk


@triton.jit
def to_rows(
    x,
    rows,
    lengths,
    by_batch,
    by_time,
    count,
    time,
    channels,
    places,
    tiles,
    FLIP: tl.constexpr,
    EVEN: tl.constexpr,
    LENGTHS: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Transpose a tile of `[batch, time, channels]` for one direction, the first reversed if `FLIP`.

    There are `places` tiles of time, and zeros in the padding. `EVEN` means whole tiles of channels.
    """
    tile, place, row = locate(tiles, places)
    batch, direction = row % count, row // count
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    to = place * TIMES + tl.arange(0, TIMES)
    t = tl.where((direction == 0) == FLIP, places * TIMES - 1 - to, to)
    inside = (t < valid_tokens(lengths, batch, time, LENGTHS))[:, None]
    source = batch * by_batch.to(tl.int64) + t[:, None] * by_time.to(tl.int64) + channel[None, :]
    target = ((direction * channels + channel[None, :]).to(tl.int64) * count + batch) * places * TIMES + to[:, None]
    if EVEN:
        values = tl.load(x + source, mask=inside, other=0.0)
        tl.store(rows + target, values.to(rows.dtype.element_ty))
    else:
        exists = channel[None, :] < channels
        values = tl.load(x + source, mask=inside & exists, other=0.0)
        tl.store(rows + target, values.to(rows.dtype.element_ty), mask=exists)


@triton.jit
def from_rows(
    rows,
    y,
    lengths,
    by_batch,
    by_time,
    count,
    time,
    channels,
    places,
    tiles,
    DIRECTIONS: tl.constexpr,
    FLIP: tl.constexpr,
    EVEN: tl.constexpr,
    LENGTHS: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Add up the directions and transpose a tile back; with `LENGTHS`, zeros in the padding."""
    tile, place, batch = locate(tiles, places)
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    moment = tl.arange(0, TIMES)
    exists = channel[None, :] < channels
    row = (channel[None, :].to(tl.int64) * count + batch) * places * TIMES + moment[:, None]
    source = rows + row + place * TIMES
    if EVEN:
        total = tl.load(source).to(tl.float32)
    else:
        total = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    if DIRECTIONS == 2:
        # The second direction has the same times in reverse.
        source = rows + channels.to(tl.int64) * count * places * TIMES + row + (places - 1 - place) * TIMES
        total += tl.flip(tl.load(source, mask=exists, other=0.0).to(tl.float32), 0)
    t = place * TIMES + moment
    if FLIP:
        t = places * TIMES - 1 - t
    if LENGTHS:
        total = tl.where((t < valid_tokens(lengths, batch, time, LENGTHS))[:, None], total, 0.0)
    target = batch * by_batch.to(tl.int64) + t[:, None] * by_time.to(tl.int64) + channel[None, :]
    if EVEN:
        tl.store(y + target, total.to(y.dtype.element_ty), mask=(t < time)[:, None])
    else:
        tl.store(y + target, total.to(y.dtype.element_ty), mask=exists & (t < time)[:, None])


@triton.jit
def split(value, HALF: tl.constexpr):
    """Return two numbers in bfloat16 whose sum is `value` up to 2⁻¹⁷ of it; without `HALF`, `value` itself twice."""
    high = value
    low = value
    if HALF:
        high = value.to(tl.bfloat16)
        low = (value - high.to(tl.float32)).to(tl.bfloat16)
    return high, low


@triton.jit
def product(a, high, low, total, HALF: tl.constexpr, SPLIT: tl.constexpr):
    """Add `a` times a matrix to `total`; with `HALF`, `a` is in bfloat16, and the matrix too or, if `SPLIT`, split."""
    if HALF:
        total = tl.dot(a, high, total)
        if SPLIT:
            total = tl.dot(a, low, total)
    else:
        # Three products in TF32, which have the precision of float32.
        total = tl.dot(a, high, total, input_precision="tf32x3")
    return total


@triton.jit
def precise_product(a, high, low, total, HALF: tl.constexpr):
    """Add `a`, in float32, times a matrix that was split to `total`."""
    first, second = split(a, HALF)
    total = product(first, high, low, total, HALF, HALF)
    if HALF:
        total = tl.dot(second, high, total)
    return total


@triton.jit
def table(base, channel, lag, count, first, STATES: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Load real and imaginary parts of a table of `count` lags at those of `lag` (`[any, 1]`), each split into two."""
    state = first + tl.arange(0, WIDTH)[None, :]
    offset = (channel * 2 * count + lag) * STATES + state
    real = tl.load(base + offset, mask=state < STATES, other=0.0)
    imag = tl.load(base + offset + count * STATES, mask=state < STATES, other=0.0)
    return split(real, HALF), split(imag, HALF)


@triton.jit
def times(real, imag, by_real, by_imag):
    """Multiply complex numbers."""
    return real * by_real - imag * by_imag, real * by_imag + imag * by_real


@triton.jit
def load_step(step, channel, first, STATES: tl.constexpr, WIDTH: tl.constexpr):
    """Load the decay of a block: real and imaginary parts, and what rounding took from them."""
    state = first + tl.arange(0, WIDTH)[None, :]
    pointer = step + channel * 4 * STATES + state
    known = state < STATES
    parts = ()
    for part in tl.static_range(4):
        parts = parts + (tl.load(pointer + part * STATES, mask=known, other=0.0),)
    return parts


@triton.jit
def decayed(real, imag, step):
    """Multiply hidden states by a decay, exactly but for the rounding of the result."""
    less_real, less_imag = times(real, imag, step[2], step[3])
    return real * step[0] + (less_real - imag * step[1]), real * step[1] + (less_imag + imag * step[0])


@triton.jit
def state_pointers(base, channel, count, row, first, STATES: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to the real parts of rows of ends, starts or pulls, and which states exist."""
    state = first + tl.arange(0, WIDTH)[None, :]
    exists = (row[:, None] < count) & (state < STATES)
    return base + ((channel * count + row).to(tl.int64) * 2 * STATES)[:, None] + state, exists


@triton.jit
def load_states(base, channel, count, row, first, STATES: tl.constexpr, WIDTH: tl.constexpr):
    """Load hidden states of rows of a channel."""
    pointer, exists = state_pointers(base, channel, count, row, first, STATES, WIDTH)
    return tl.load(pointer, mask=exists, other=0.0), tl.load(pointer + STATES, mask=exists, other=0.0)


@triton.jit
def row_pointers(base, channel, count, row, length, BLOCK: tl.constexpr):
    """Return pointers to the first block of rows of a channel, `[rows, BLOCK]`."""
    return base + ((channel * count + row).to(tl.int64) * length * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def ends(
    rows,
    powers,
    step,
    found,
    count,
    length,
    tiles,
    STATES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the hidden states at the end of each of `count` segments of a channel, started from zero."""
    channel = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    lag = BLOCK - 1 - tl.arange(0, BLOCK)[:, None]
    enter_real, enter_imag = table(powers, channel, lag, BLOCK + 1, 0, STATES, WIDTH, HALF)
    decay = load_step(step, channel, 0, STATES, WIDTH)
    real = tl.zeros([ROWS, WIDTH], tl.float32)
    imag = tl.zeros([ROWS, WIDTH], tl.float32)
    pointer = row_pointers(rows, channel, count, row, length, BLOCK)
    inside = row[:, None] < count
    for _ in range(length):
        x = tl.load(pointer, mask=inside, other=0.0)
        pointer += BLOCK
        real, imag = decayed(real, imag, decay)
        real = product(x, enter_real[0], enter_real[1], real, HALF, HALF)
        imag = product(x, enter_imag[0], enter_imag[1], imag, HALF, HALF)
    target, exists = state_pointers(found, channel, count, row, 0, STATES, WIDTH)
    tl.store(target, real, mask=exists)
    tl.store(target + STATES, imag, mask=exists)


@triton.jit
def outputs(
    rows,
    kernel,
    powers,
    readout,
    step,
    starts,
    y,
    count,
    length,
    tiles,
    STATES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the outputs of every segment from what it starts from."""
    channel = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)
    enter_real, enter_imag = table(powers, channel, BLOCK - 1 - place[:, None], BLOCK + 1, 0, STATES, WIDTH, HALF)
    # As `[states, BLOCK]`; the real part of a product subtracts that of the imaginary parts.
    state = tl.arange(0, WIDTH)[:, None]
    leave = readout + (channel * 2 * (BLOCK + 1) + place[None, :] + 1) * STATES + state
    leave_real = split(tl.load(leave, mask=state < STATES, other=0.0), HALF)
    leave_imag = split(-tl.load(leave + (BLOCK + 1) * STATES, mask=state < STATES, other=0.0), HALF)
    lag = place[None, :] - place[:, None]
    toeplitz = split(tl.load(kernel + channel * BLOCK + lag, mask=lag >= 0, other=0.0), HALF)
    decay = load_step(step, channel, 0, STATES, WIDTH)
    real, imag = load_states(starts, channel, count, row, 0, STATES, WIDTH)
    pointer = row_pointers(rows, channel, count, row, length, BLOCK)
    target = row_pointers(y, channel, count, row, length, BLOCK)
    inside = row[:, None] < count
    for _ in range(length):
        x = tl.load(pointer, mask=inside, other=0.0)
        pointer += BLOCK
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        total = product(x, toeplitz[0], toeplitz[1], total, HALF, HALF)
        total = precise_product(real, leave_real[0], leave_real[1], total, HALF)
        total = precise_product(imag, leave_imag[0], leave_imag[1], total, HALF)
        tl.store(target, total.to(y.dtype.element_ty), mask=inside)
        target += BLOCK
        real, imag = decayed(real, imag, decay)
        real = product(x, enter_real[0], enter_real[1], real, HALF, HALF)
        imag = product(x, enter_imag[0], enter_imag[1], imag, HALF, HALF)


@triton.jit
def lags(
    rows,
    g,
    found,
    count,
    segments,
    length,
    tiles,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum up products of inputs and gradients of one block, `[programs, BLOCK, BLOCK]`: the kernel's gradients.

    `g` has the gradients in reversed time, in which the last block of a segment comes first.
    """
    channel = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    other = row // segments * segments + segments - 1 - row % segments
    pointer = row_pointers(rows, channel, count, row, length, BLOCK)
    g_pointer = row_pointers(g, channel, count, other, length, BLOCK) + (length - 1) * BLOCK
    inside = row[:, None] < count
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in range(length):
        x = tl.load(pointer, mask=inside, other=0.0)
        back = tl.load(g_pointer, mask=inside, other=0.0)
        pointer += BLOCK
        g_pointer -= BLOCK
        total = product(tl.trans(back), x, x, total, HALF, False)
    place = tl.arange(0, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    tl.store(found + (program * BLOCK + place)[:, None] * BLOCK + place[None, :], total)


@triton.jit
def weights(
    rows,
    g,
    powers,
    slopes,
    step,
    starts,
    pulls,
    found,
    count,
    segments,
    length,
    tiles,
    groups,
    STATES: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute each program's part of the gradients of the parameters, without those of lags inside a block.

    A program has `WIDTH` of the states. The walk carries the states and their derivatives by the logarithm of the
    decay, which start from zero: `found`, as `[channels, tiles, 2, 2, states]`, are sums over time of gradients times
    states, and times derivatives; a decay is missing. `g` is as in `lags`.
    """
    tile, group, channel = locate(tiles, groups)
    first = group * WIDTH
    row = tile * ROWS + tl.arange(0, ROWS)
    lag = BLOCK - 1 - tl.arange(0, BLOCK)[:, None]
    enter_real, enter_imag = table(powers, channel, lag, BLOCK + 1, first, STATES, WIDTH, HALF)
    slope_real, slope_imag = table(slopes, channel, lag, BLOCK + 1, first, STATES, WIDTH, HALF)
    decay = load_step(step, channel, first, STATES, WIDTH)
    real, imag = load_states(starts, channel, count, row, first, STATES, WIDTH)
    by_real = tl.zeros([ROWS, WIDTH], tl.float32)
    by_imag = tl.zeros([ROWS, WIDTH], tl.float32)
    weight_real = tl.zeros([ROWS, WIDTH], tl.float32)
    weight_imag = tl.zeros([ROWS, WIDTH], tl.float32)
    decay_real = tl.zeros([ROWS, WIDTH], tl.float32)
    decay_imag = tl.zeros([ROWS, WIDTH], tl.float32)
    other = row // segments * segments + segments - 1 - row % segments
    pointer = row_pointers(rows, channel, count, row, length, BLOCK)
    g_pointer = row_pointers(g, channel, count, other, length, BLOCK) + (length - 1) * BLOCK
    inside = row[:, None] < count
    for _ in range(length):
        x = tl.load(pointer, mask=inside, other=0.0)
        back = tl.load(g_pointer, mask=inside, other=0.0)
        pointer += BLOCK
        g_pointer -= BLOCK
        zero = tl.zeros([ROWS, WIDTH], tl.float32)
        pull_real = product(back, slope_real[0], slope_real[1], zero, HALF, HALF)
        pull_imag = product(back, slope_imag[0], slope_imag[1], zero, HALF, HALF)
        added_real, added_imag = times(pull_real, pull_imag, real, imag)
        decay_real += added_real
        decay_imag += added_imag
        pull_real = product(back, enter_real[0], enter_real[1], zero, HALF, HALF)
        pull_imag = product(back, enter_imag[0], enter_imag[1], zero, HALF, HALF)
        added_real, added_imag = times(pull_real, pull_imag, real, imag)
        weight_real += added_real
        weight_imag += added_imag
        # The decay that is missing adds one to the lag.
        decay_real += added_real
        decay_imag += added_imag
        added_real, added_imag = times(pull_real, pull_imag, by_real, by_imag)
        decay_real += added_real
        decay_imag += added_imag
        by_real, by_imag = decayed(by_real + BLOCK * real, by_imag + BLOCK * imag, decay)
        by_real = product(x, slope_real[0], slope_real[1], by_real, HALF, HALF)
        by_imag = product(x, slope_imag[0], slope_imag[1], by_imag, HALF, HALF)
        real, imag = decayed(real, imag, decay)
        real = product(x, enter_real[0], enter_real[1], real, HALF, HALF)
        imag = product(x, enter_imag[0], enter_imag[1], imag, HALF, HALF)
    pull_real, pull_imag = load_states(pulls, channel, count, other, first, STATES, WIDTH)
    added_real, added_imag = times(pull_real, pull_imag, by_real, by_imag)
    state = first + tl.arange(0, WIDTH)
    part = found + (channel * tiles + tile).to(tl.int64) * 4 * STATES + state
    exists = state < STATES
    tl.store(part, tl.sum(weight_real, 0), mask=exists)
    tl.store(part + STATES, tl.sum(weight_imag, 0), mask=exists)
    tl.store(part + 2 * STATES, tl.sum(decay_real + added_real, 0), mask=exists)
    tl.store(part + 3 * STATES, tl.sum(decay_imag + added_imag, 0), mask=exists)


@triton.jit
def _chain(decay_real, decay_imag, real, imag, next_real, next_imag, later_real, later_imag):
    both_real, both_imag = times(decay_real, decay_imag, next_real, next_imag)
    kept_real, kept_imag = times(real, imag, next_real, next_imag)
    return both_real, both_imag, kept_real + later_real, kept_imag + later_imag


@triton.jit
def carry(
    decay,
    found,
    starts,
    initial,
    total,
    rows,
    channels,
    segments,
    states,
    blocks,
    backwards,
    INITIAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Turn the ends of segments into what the segments start from, in float64.

    `decay` is that of a segment, `[channels, 2, states]` in float64; initial states and `total`, those after all
    segments, are `[batch, channels, states, 2]`; `rows` is the number of sequences.
    """
    lane = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    row = tl.program_id(0) // blocks
    channel, batch = row // rows, row % rows
    known = lane < states
    factor_real = tl.load(decay + channel * 2 * states + lane, mask=known, other=0.0)
    factor_imag = tl.load(decay + channel * 2 * states + states + lane, mask=known, other=0.0)
    outer = ((batch.to(tl.int64) * channels + channel) * states + lane) * 2
    real = tl.zeros([LANES], tl.float64)
    imag = tl.zeros([LANES], tl.float64)
    if INITIAL:
        real += tl.load(initial + outer, mask=known, other=0.0)
        imag += tl.load(initial + outer + 1, mask=known, other=0.0)
    base = row.to(tl.int64) * segments * 2 * states
    first = base + tl.where(backwards != 0, segments - 1, 0) * 2 * states + lane
    tl.store(starts + first, real.to(tl.float32), mask=known)
    tl.store(starts + first + states, imag.to(tl.float32), mask=known)
    place = tl.arange(0, SEGMENTS)[:, None]
    for done in range(0, segments, SEGMENTS):
        order = done + place
        segment = tl.where(backwards != 0, segments - 1 - order, order)
        offset = base + segment.to(tl.int64) * 2 * states + lane[None, :]
        exists = known[None, :] & (order < segments)
        end_real = tl.load(found + offset, mask=exists, other=0.0).to(tl.float64)
        end_imag = tl.load(found + offset + states, mask=exists, other=0.0).to(tl.float64)
        power_real = tl.broadcast_to(factor_real[None, :], [SEGMENTS, LANES])
        power_imag = tl.broadcast_to(factor_imag[None, :], [SEGMENTS, LANES])
        power_real, power_imag, end_real, end_imag = tl.associative_scan(
            (power_real, power_imag, end_real, end_imag), 0, _chain
        )
        kept_real, kept_imag = times(power_real, power_imag, real[None, :], imag[None, :])
        end_real += kept_real
        end_imag += kept_imag
        after = offset + tl.where(backwards != 0, -2, 2) * states
        follows = known[None, :] & (order + 1 < segments)
        tl.store(starts + after, end_real.to(tl.float32), mask=follows)
        tl.store(starts + after + states, end_imag.to(tl.float32), mask=follows)
        is_last = order == tl.minimum(segments, done + SEGMENTS) - 1
        real = tl.sum(tl.where(is_last, end_real, 0.0), 0)
        imag = tl.sum(tl.where(is_last, end_imag, 0.0), 0)
    tl.store(total + outer, real.to(tl.float32), mask=known)
    tl.store(total + outer + 1, imag.to(tl.float32), mask=known)


@triton.jit
def scan(
    v,
    h,
    past,
    decay,
    starts,
    found,
    lengths,
    time,
    states,
    segments,
    length,
    tiles,
    backwards,
    LENGTHS: tl.constexpr,
    OUTPUT: tl.constexpr,
    GRADIENT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Walk over segments of `[batch, time, states]`.

    Without `OUTPUT`, from zero to the ends of the segments, which go to `found`. With it, from `starts`, storing all
    hidden states in `h`. With `GRADIENT`, `v` has the gradients of `past`, the hidden states of the forward pass; `h`
    is then the gradient of its input, zero in the padding, and `found` sums its products with what came before in
    `past`.
    """
    tile, segment, batch = locate(tiles, segments)
    state = tile * TILE + tl.arange(0, TILE)
    known = state < states
    number = tile * 2 * TILE + tl.arange(0, 2 * TILE)
    inside = number < 2 * states
    factors = ()
    for part in tl.static_range(4):
        factors = factors + (tl.load(decay + part * states + state, mask=known, other=0.0),)
    valid = valid_tokens(lengths, batch, time, LENGTHS)
    # Padding is no input, but it has outputs; a gradient comes from all outputs and goes to the inputs.
    limit = time if GRADIENT else valid
    t, sign, count = walk(segment, length, time, backwards != 0, GROUP)
    step = sign * 2 * states.to(tl.int64)
    offset = (batch.to(tl.int64) * time + t) * 2 * states + number
    bound = (batch.to(tl.int64) * segments + segment) * 2 * states + state
    real = tl.zeros([TILE], tl.float32)
    imag = tl.zeros([TILE], tl.float32)
    sum_real = tl.zeros([TILE], tl.float32)
    sum_imag = tl.zeros([TILE], tl.float32)
    if OUTPUT:
        real = tl.load(starts + bound, mask=known, other=0.0)
        imag = tl.load(starts + bound + states, mask=known, other=0.0)
    ahead = load_group(v + offset, step, inside, t, sign, tl.where(count > 0, limit, 0), GROUP)
    for i in range(count):
        current = ahead
        # Another segment, or nothing, follows the last group: load the last again.
        further = tl.where(i + 1 < count, GROUP, 0)
        ahead = load_group(v + offset + further * step, step, inside, t + further * sign, sign, limit, GROUP)
        before = ()
        if GRADIENT:
            for j in tl.static_range(GROUP):
                earlier = t + sign * (j + 1)
                exists = inside & (earlier >= 0) & (earlier < time)
                before = before + (tl.load(past + offset + (j + 1) * step, mask=exists, other=0.0),)
        for j in tl.static_range(GROUP):
            add_real, add_imag = tl.split(tl.reshape(current[j], [TILE, 2]))
            real, imag = decayed(real, imag, factors)
            real += add_real
            imag += add_imag
            if GRADIENT:
                # Times the conjugate.
                last_real, last_imag = tl.split(tl.reshape(before[j], [TILE, 2]))
                sum_real += real * last_real + imag * last_imag
                sum_imag += imag * last_real - real * last_imag
            if OUTPUT:
                value = tl.reshape(tl.join(real, imag), [2 * TILE])
                if GRADIENT and LENGTHS:
                    value = tl.where(t < valid - sign * j, value, 0.0)
                tl.store(h + offset + j * step, value, mask=inside & (t < time - sign * j))
        offset += GROUP * step
        t += GROUP * sign
    if not OUTPUT:
        tl.store(found + bound, real, mask=known)
        tl.store(found + bound + states, imag, mask=known)
    if GRADIENT:
        tl.store(found + bound, sum_real, mask=known)
        tl.store(found + bound + states, sum_imag, mask=known)
