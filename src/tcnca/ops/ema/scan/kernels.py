"""The scan of a damped EMA, forward and backward, as Triton kernels.

Time is cut into segments that run side by side. A program owns one segment, a tile of channels and the hidden states
of these, which stay in registers while it walks over the segment. The segments meet in three launches: `ends` walks
each from nothing, `carry` chains the ends into what every segment starts from, `outputs` walks again from there. The
gradient of the input is the same three, with time and the roles of drive and readout the other way round. `weights`
walks a third time for the gradients of the coefficients, and `reduce` adds up what its programs found, in one order.

`x` and its gradient are `[batch, time, channels]`, coefficients `[directions, 3, hidden, channels]` (drive, decay,
readout), hidden states `[batch, hidden, channels]`, ends and carries `[directions, batch, segments, hidden, channels]`:
channels last, as a warp reads them.

Mostly the hidden states start from nothing. Then they are kept without the drive, which goes into the readout: two
multiplications for each hidden state and token in place of three. `SCALED` keeps the drive in.
"""

# Compile-time constants are in capitals, and the compiler knows neither starred tuples nor a short-circuit.
# ruff: noqa: N803, RUF005, SIM102
# mypy: disable-error-code="untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tcnca.ops.ema.scan.walk import at, course, entering, load_group, matrix, place, real_tokens


@triton.jit
def prepare(
    delta: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    gamma: tl.tensor,
    coefficients: tl.tensor,
    channels: tl.tensor,
    HIDDEN: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Drive, decay and readout with channels last, from MEGA's δ, α, β and γ."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = channels * HIDDEN
    inside = lane < size
    source = tl.program_id(1) * size + (lane % channels) * HIDDEN + lane // channels
    p = tl.sigmoid(tl.load(delta + source, mask=inside, other=0.0).to(tl.float32))
    damping = tl.sigmoid(tl.load(alpha + source, mask=inside, other=0.0).to(tl.float32))
    drive = p * tl.load(beta + source, mask=inside, other=0.0).to(tl.float32)
    decay = 1.0 - p * damping
    readout = tl.load(gamma + source, mask=inside, other=0.0).to(tl.float32) * SCALE
    out = coefficients + tl.program_id(1) * 3 * size + lane
    tl.store(out, drive, mask=inside)
    tl.store(out + size, decay, mask=inside)
    tl.store(out + 2 * size, readout, mask=inside)


@triton.jit
def ends(
    x: tl.tensor,
    coefficients: tl.tensor,
    found: tl.tensor,
    lengths: tl.tensor,
    final: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_channel: tl.tensor,
    rows: tl.tensor,
    time: tl.tensor,
    channels: tl.tensor,
    segments: tl.tensor,
    length: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    flip: tl.tensor,
    ENTER: tl.constexpr,
    HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTHS: tl.constexpr,
    INJECT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """The hidden states in which each segment ends that starts from nothing.

    One row for each direction and sequence. `flip` turns time round, `ENTER` names the coefficient that weighs `x`.
    """
    tile, segment, row = place(tiles * groups, segments)
    channel = tile % tiles * TILE + tl.arange(0, TILE)
    hidden = tile // tiles * STATES + tl.arange(0, STATES)
    keep = channel < channels
    batch, direction = row % rows, row // rows
    backwards = (direction + flip) % 2 == 1
    size = channels * HIDDEN
    offset, inside = matrix(hidden, channel, channels, HIDDEN)
    own = coefficients + direction * 3 * size + offset
    decay = tl.load(own + size, mask=inside, other=0.0)
    weight, last = decay, decay
    if SCALED:
        weight = tl.load(own + ENTER * size, mask=inside, other=0.0)
    real = real_tokens(lengths, batch, time, LENGTHS)
    limit = real
    if INJECT:
        # Gradients enter at every time, padding or not.
        limit = time
        last = tl.load(final + batch.to(tl.int64) * size + offset, mask=inside, other=0.0)
    t, sign, count = course(segment, length, time, backwards, GROUP)
    step = sign * by_time.to(tl.int64)
    pointer = at(x, batch, t, channel, by_batch, by_time, by_channel)
    state = tl.zeros([STATES, TILE], tl.float32)
    ahead = load_group(pointer, step, keep, t, sign, tl.where(count > 0, limit, 0), GROUP)
    for i in range(count):
        current = ahead
        # Behind the last group stands another segment, or nothing: load the last again.
        further = tl.where(i + 1 < count, GROUP, 0)
        pointer += further * step
        ahead = load_group(pointer, step, keep, t + further * sign, sign, limit, GROUP)
        for j in tl.static_range(GROUP):
            is_last = t + sign * j == real - 1
            state = decay * state + entering(current[j], weight, last, is_last, SCALED, INJECT)
        t += GROUP * sign
    tl.store(found + (row * segments + segment).to(tl.int64) * size + offset, state, mask=inside)


@triton.jit
def _power(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    power = base * 0.0 + 1.0
    while exponent > 0:
        power = tl.where(exponent % 2 == 1, power * base, power)
        base = base * base
        exponent = exponent // 2
    return power


@triton.jit
def _chain(decay_one: tl.tensor, state_one: tl.tensor, decay_two: tl.tensor, state_two: tl.tensor) -> tl.tensor:
    return decay_one * decay_two, state_one * decay_two + state_two


@triton.jit
def _load_segments(
    base: tl.tensor,
    order: tl.tensor,
    segments: tl.tensor,
    size: tl.tensor,
    backwards: tl.tensor,
    keep: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Pointers to segments from the place `order` on, and the states there; zeros where there is no segment."""
    pointers = ()
    values = ()
    for j in tl.static_range(GROUP):
        known = keep & (order + j >= 0) & (order + j < segments)
        segment = tl.where(backwards, segments - 1 - order - j, order + j)
        pointer = base + segment.to(tl.int64) * size
        pointers = pointers + (pointer,)
        values = values + (tl.load(pointer, mask=known, other=0.0),)
    return pointers, values


@triton.jit
def carry(
    coefficients: tl.tensor,
    found: tl.tensor,
    initial: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    segments: tl.tensor,
    length: tl.tensor,
    share: tl.tensor,
    blocks: tl.tensor,
    flip: tl.tensor,
    HIDDEN: tl.constexpr,
    INITIAL: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Turn the ends of segments of `length` tokens into what the segments start from, in place.

    `WIDTH` chains of `share` segments, a multiple of `GROUP`, run side by side, and end in `total`. In float64, as a
    decay near 1 is raised to the power of a whole sequence.
    """
    program = tl.program_id(0)
    lane = program % blocks * BLOCK + tl.arange(0, BLOCK)
    row = program // blocks
    batch, direction = row % rows, row // rows
    backwards = (direction + flip) % 2 == 1
    size = channels * HIDDEN
    inside = lane < size
    decay = tl.load(coefficients + direction * 3 * size + size + lane, mask=inside, other=0.0).to(tl.float64)
    decay = _power(decay, length)
    base = found + row.to(tl.int64) * segments * size + lane[None, :]
    chain = tl.arange(0, WIDTH)[:, None]
    keep = inside[None, :]
    state = tl.zeros([WIDTH, BLOCK], tl.float64)
    # A chain starts from all before it: each sums up its predecessor, then all are scanned together.
    for k in range(0, share, GROUP):
        pointers, values = _load_segments(base, (chain - 1) * share + k, segments, size, backwards, keep, GROUP)
        for j in tl.static_range(GROUP):
            state = decay[None, :] * state + values[j]
    if INITIAL:
        start = tl.load(initial + batch.to(tl.int64) * size + lane, mask=inside, other=0.0)
        state = tl.where(chain == 0, start[None, :], state)
    factor = tl.broadcast_to(_power(decay, share)[None, :], [WIDTH, BLOCK])
    _, state = tl.associative_scan((factor, state), 0, _chain)
    # Nobody may write before all have read.
    tl.debug_barrier()
    for k in range(0, share, GROUP):
        pointers, values = _load_segments(base, chain * share + k, segments, size, backwards, keep, GROUP)
        # The threads that load a number need not be those that store there.
        tl.debug_barrier()
        for j in tl.static_range(GROUP):
            order = chain * share + k + j
            tl.store(pointers[j], state.to(tl.float32), mask=keep & (order < segments))
            state = decay[None, :] * state + values[j]
            if TOTAL:
                out = total + row.to(tl.int64) * size + lane[None, :] + tl.zeros_like(order)
                tl.store(out, state.to(tl.float32), mask=keep & (order == segments - 1))


@triton.jit
def outputs(
    x: tl.tensor,
    y: tl.tensor,
    previous: tl.tensor,
    coefficients: tl.tensor,
    carries: tl.tensor,
    lengths: tl.tensor,
    final: tl.tensor,
    by_batch: tl.tensor,
    by_time: tl.tensor,
    by_channel: tl.tensor,
    rows: tl.tensor,
    time: tl.tensor,
    channels: tl.tensor,
    segments: tl.tensor,
    length: tl.tensor,
    tiles: tl.tensor,
    direction: tl.tensor,
    flip: tl.tensor,
    ENTER: tl.constexpr,
    HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTHS: tl.constexpr,
    GRADIENT: tl.constexpr,
    INJECT: tl.constexpr,
    ADD: tl.constexpr,
    FINAL: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Outputs of every segment from what it starts from; of a `GRADIENT`, that of the input.

    Without `SCALED` the two coefficients stand side by side, and the gradient needs no kernel of its own.
    `ADD` adds to `previous`, the other direction. `FINAL` also stores the hidden states after the last real token.
    """
    tile, segment, batch = place(tiles, segments)
    channel = tile * TILE + tl.arange(0, TILE)
    hidden = tl.arange(0, STATES)
    keep = channel < channels
    backwards = (direction + flip) % 2 == 1
    size = channels * HIDDEN
    offset, inside = matrix(hidden, channel, channels, HIDDEN)
    own = coefficients + direction * 3 * size + offset
    decay = tl.load(own + size, mask=inside, other=0.0)
    weight = tl.load(own + ENTER * size, mask=inside, other=0.0)
    leave = tl.load(own + (2 - ENTER) * size, mask=inside, other=0.0)
    if not SCALED:
        leave = leave * weight
    last = decay
    if INJECT:
        last = tl.load(final + batch.to(tl.int64) * size + offset, mask=inside, other=0.0)
    real = real_tokens(lengths, batch, time, LENGTHS)
    # Padding is no input, yet it has outputs; a gradient comes from all outputs and ends at the inputs.
    limit = time if GRADIENT else real
    t, sign, count = course(segment, length, time, backwards, GROUP)
    step = sign * by_time.to(tl.int64)
    pointer = at(x, batch, t, channel, by_batch, by_time, by_channel)
    step_out = (sign * channels).to(tl.int64)
    place_out = (batch.to(tl.int64) * time + t) * channels + channel
    from_carry = direction.to(tl.int64) * rows + batch
    state = tl.load(carries + (from_carry * segments + segment) * size + offset, mask=inside, other=0.0)
    kept = state
    start = segment * length
    held = (real - start) // GROUP
    ahead = load_group(pointer, step, keep, t, sign, tl.where(count > 0, limit, 0), GROUP)
    for i in range(count):
        current = ahead
        # Behind the last group stands another segment, or nothing: load the last again.
        further = tl.where(i + 1 < count, GROUP, 0)
        pointer += further * step
        ahead = load_group(pointer, step, keep, t + further * sign, sign, limit, GROUP)
        if FINAL:
            kept = tl.where(i == held, state, kept)
        for j in tl.static_range(GROUP):
            is_last = t + sign * j == real - 1
            state = decay * state + entering(current[j], weight, last, is_last, SCALED, INJECT)
            value = tl.sum(leave * state, 0)
            exists = keep & (t < time - sign * j)
            if ADD:
                value += tl.load(previous + place_out + j * step_out, mask=exists, other=0.0)
            if GRADIENT and LENGTHS:
                value = tl.where(t < real - sign * j, value, 0.0)
            tl.store(y + place_out + j * step_out, value.to(y.dtype.element_ty), mask=exists)
        place_out += GROUP * step_out
        t += GROUP * sign
    if FINAL:
        if segment == real // length:
            kept = tl.where(held >= count, state, kept)
            for i in range(start + held * GROUP, real):
                pointer = at(x, batch, i, channel, by_batch, by_time, by_channel)
                value = tl.load(pointer, mask=keep, other=0.0).to(tl.float32)
                kept = decay * kept + entering(value, weight, last, False, SCALED, False)
            if not SCALED:
                kept = kept * weight
            tl.store(final + batch.to(tl.int64) * size + offset, kept, mask=inside)
