"""Triton kernels of the damped EMA as a scan, forward and backward.

Time is cut into segments that run in parallel. A program owns one segment, a tile of channels and the hidden states of
these, which stay in registers while it walks over the segment. The segments are joined in three launches: `ends` walks
each from zero, `carry` chains the ends into what every segment starts from, `outputs` walks again from there. The
gradient of the input is the same three, with time and the roles of drive and readout reversed. `weights` walks a third
time for the gradients of the coefficients, and `reduce` adds up the results of its programs, in a fixed order.

`x` and its gradient are `[batch, time, channels]`, coefficients `[directions, 3, hidden, channels]` (drive, decay,
readout), hidden states `[batch, hidden, channels]`, ends and carries `[directions, batch, segments, hidden, channels]`:
channels last, as a warp reads them.

The skip connection `ω x` and the SiLU of the sum are part of the last launch of `outputs`, where they need no pass over
memory of their own. Gradients are multiplied by the slopes of the SiLU in their first walk, which goes back in time and
so cannot recompute the forward pass. The forward pass therefore stores the slopes; `ends` reads them and writes the
products, which the later launches read in place of the gradients. To recompute the slopes would take as many passes and
one more walk; to store the inputs of the SiLU instead, an exponential in every program of `ends`.

If the hidden states start from zero, they are kept without the drive, which goes into the readout: two multiplications
for each hidden state and token instead of three. `SCALED` keeps the drive in.
"""

# Compile-time constants are in capitals, and the compiler supports neither starred tuples nor short-circuits.
# ruff: noqa: N803, RUF005, SIM102
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(tiles, segments):
    """Return tile, segment and row of this program."""
    program = tl.program_id(0)
    row = program // tiles
    return program % tiles, row % segments, row // segments


@triton.jit
def walk(segment, length, time, backwards, GROUP: tl.constexpr):
    """Return the first time of a walk over a segment, its direction, and the number of groups of steps.

    The last group of a forward walk and the first of a backward walk may extend past the end of time. The state after
    that last group is not used, and the state before that first group is zero.
    """
    start = segment * length
    groups = (tl.minimum(tl.maximum(time - start, 0), length) + GROUP - 1) // GROUP
    return tl.where(backwards, start + groups * GROUP - 1, start), tl.where(backwards, -1, 1), groups


@triton.jit
def token_pointers(base, batch, t, channel, by_batch, by_time, by_channel):
    """Return pointers to one token's tile of channels."""
    offset = batch * by_batch.to(tl.int64) + t * by_time.to(tl.int64)
    return base + offset + channel * by_channel.to(tl.int64)


@triton.jit
def load_group(pointer, step, in_channels, t, sign, end, GROUP: tl.constexpr):
    """Load the values of a group of steps, all before the first is used; zeros from the time `end` on."""
    values = ()
    for j in tl.static_range(GROUP):
        # The right side does not change from group to group.
        inside = in_channels & (t < end - sign * j)
        values = values + (tl.load(pointer + j * step, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def state_offsets(hidden, channel, channels, HIDDEN: tl.constexpr):
    """Return offsets of a tile in `[hidden, channels]`, and which of them exist."""
    inside = (hidden[:, None] < HIDDEN) & (channel[None, :] < channels)
    return hidden[:, None] * channels + channel[None, :], inside


@triton.jit
def valid_tokens(lengths, batch, time, LENGTHS: tl.constexpr):
    """Return the number of valid tokens of a row."""
    valid = time
    if LENGTHS:
        valid = tl.minimum(tl.load(lengths + batch).to(tl.int32), time)
    return valid


@triton.jit
def added_by(value, weight, last, is_last, SCALED: tl.constexpr, INJECT: tl.constexpr):
    """Return what one token adds to the hidden states; a gradient of the final states enters with the last token."""
    added = value[None, :]
    if SCALED:
        added = weight * added
    if INJECT:
        added = added + tl.where(is_last, last, 0.0)
    return added


@triton.jit
def prepare(
    delta, alpha, beta, gamma, coefficients, channels, HIDDEN: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute drive, decay and readout with channels last, from MEGA's δ, α, β and γ."""
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
    x,
    coefficients,
    found,
    lengths,
    final,
    slopes,
    sloped,
    by_batch,
    by_time,
    by_channel,
    rows,
    time,
    channels,
    segments,
    length,
    tiles,
    groups,
    flip,
    ENTER: tl.constexpr,
    HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTHS: tl.constexpr,
    INJECT: tl.constexpr,
    SLOPES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the hidden states at the end of each segment, started from zero.

    One row for each direction and sequence. `flip` reverses time, `ENTER` is the coefficient that multiplies `x`. With
    `SLOPES`, `x` is a gradient that is first multiplied by `slopes`; the products are stored in `sloped`.
    """
    tile, segment, row = locate(tiles * groups, segments)
    channel = tile % tiles * TILE + tl.arange(0, TILE)
    hidden = tile // tiles * STATES + tl.arange(0, STATES)
    in_channels = channel < channels
    batch, direction = row % rows, row // rows
    backwards = (direction + flip) % 2 == 1
    size = channels * HIDDEN
    offset, inside = state_offsets(hidden, channel, channels, HIDDEN)
    coefficient = coefficients + direction * 3 * size + offset
    decay = tl.load(coefficient + size, mask=inside, other=0.0)
    weight, last = decay, decay
    if SCALED:
        weight = tl.load(coefficient + ENTER * size, mask=inside, other=0.0)
    valid = valid_tokens(lengths, batch, time, LENGTHS)
    limit = valid
    if INJECT:
        # Gradients enter at every time, padding or not.
        limit = time
        last = tl.load(final + batch.to(tl.int64) * size + offset, mask=inside, other=0.0)
    t, sign, count = walk(segment, length, time, backwards, GROUP)
    step = sign * by_time.to(tl.int64)
    pointer = token_pointers(x, batch, t, channel, by_batch, by_time, by_channel)
    state = tl.zeros([STATES, TILE], tl.float32)
    ahead = load_group(pointer, step, in_channels, t, sign, tl.where(count > 0, limit, 0), GROUP)
    dense_step = (sign * channels).to(tl.int64)
    dense = (batch.to(tl.int64) * time + t) * channels + channel
    # All directions and groups of hidden states have the same products.
    stores = in_channels & (row < rows) & (tile < tiles)
    if SLOPES:
        slopes_ahead = load_group(
            slopes + dense, dense_step, in_channels, t, sign, tl.where(count > 0, limit, 0), GROUP
        )
    for i in range(count):
        current = ahead
        # Another segment, or nothing, follows the last group: load the last again.
        further = tl.where(i + 1 < count, GROUP, 0)
        pointer += further * step
        ahead = load_group(pointer, step, in_channels, t + further * sign, sign, limit, GROUP)
        if SLOPES:
            slope = slopes_ahead
            following = slopes + dense + further * dense_step
            slopes_ahead = load_group(following, dense_step, in_channels, t + further * sign, sign, limit, GROUP)
        for j in tl.static_range(GROUP):
            value = current[j]
            if SLOPES:
                rounded = (value * slope[j]).to(sloped.dtype.element_ty)
                tl.store(sloped + dense + j * dense_step, rounded, mask=stores & (t < time - sign * j))
                value = rounded.to(tl.float32)
            is_last = t + sign * j == valid - 1
            state = decay * state + added_by(value, weight, last, is_last, SCALED, INJECT)
        dense += GROUP * dense_step
        t += GROUP * sign
    tl.store(found + (row * segments + segment).to(tl.int64) * size + offset, state, mask=inside)


@triton.jit
def _power(base, exponent):
    power = base * 0.0 + 1.0
    while exponent > 0:
        power = tl.where(exponent % 2 == 1, power * base, power)
        base = base * base
        exponent = exponent // 2
    return power


@triton.jit
def _chain(decay_one, state_one, decay_two, state_two):
    return decay_one * decay_two, state_one * decay_two + state_two


@triton.jit
def _load_segments(base, order, segments, size, backwards, exists, GROUP: tl.constexpr):
    """Return pointers to the segments from `order` on, and the states there; zeros where there is no segment."""
    pointers = ()
    values = ()
    for j in tl.static_range(GROUP):
        known = exists & (order + j >= 0) & (order + j < segments)
        segment = tl.where(backwards, segments - 1 - order - j, order + j)
        pointer = base + segment.to(tl.int64) * size
        pointers = pointers + (pointer,)
        values = values + (tl.load(pointer, mask=known, other=0.0),)
    return pointers, values


@triton.jit
def carry(
    coefficients,
    found,
    initial,
    total,
    rows,
    channels,
    segments,
    length,
    share,
    blocks,
    flip,
    HIDDEN: tl.constexpr,
    INITIAL: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Turn the ends of segments of `length` tokens into what the segments start from, in place.

    `WIDTH` chains of `share` segments, a multiple of `GROUP`, run in parallel, and end in `total`. In float64, as a
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
    exists = inside[None, :]
    state = tl.zeros([WIDTH, BLOCK], tl.float64)
    # A chain starts from all before it: each sums up its predecessor, then all are scanned together.
    for k in range(0, share, GROUP):
        pointers, values = _load_segments(base, (chain - 1) * share + k, segments, size, backwards, exists, GROUP)
        for j in tl.static_range(GROUP):
            state = decay[None, :] * state + values[j]
    if INITIAL:
        start = tl.load(initial + batch.to(tl.int64) * size + lane, mask=inside, other=0.0)
        state = tl.where(chain == 0, start[None, :], state)
    factor = tl.broadcast_to(_power(decay, share)[None, :], [WIDTH, BLOCK])
    _, state = tl.associative_scan((factor, state), 0, _chain)
    # All threads must have read before any writes.
    tl.debug_barrier()
    for k in range(0, share, GROUP):
        pointers, values = _load_segments(base, chain * share + k, segments, size, backwards, exists, GROUP)
        # The threads that load a number need not be those that store there.
        tl.debug_barrier()
        for j in tl.static_range(GROUP):
            order = chain * share + k + j
            tl.store(pointers[j], state.to(tl.float32), mask=exists & (order < segments))
            state = decay[None, :] * state + values[j]
            if TOTAL:
                out = total + row.to(tl.int64) * size + lane[None, :] + tl.zeros_like(order)
                tl.store(out, state.to(tl.float32), mask=exists & (order == segments - 1))


@triton.jit
def outputs(
    x,
    y,
    previous,
    coefficients,
    carries,
    lengths,
    final,
    omega,
    slopes,
    by_batch,
    by_time,
    by_channel,
    rows,
    time,
    channels,
    segments,
    length,
    tiles,
    direction,
    flip,
    ENTER: tl.constexpr,
    HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTHS: tl.constexpr,
    GRADIENT: tl.constexpr,
    INJECT: tl.constexpr,
    ADD: tl.constexpr,
    FINAL: tl.constexpr,
    SKIP: tl.constexpr,
    SILU: tl.constexpr,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the outputs of every segment from what it starts from; with `GRADIENT`, the gradient of the input.

    Without `SCALED` drive and readout enter as a product, so that the gradient has the same coefficients.
    `ADD` adds to `previous`, the other direction. `FINAL` also stores the hidden states after the last valid token.
    `SKIP` adds `omega` times `x`, padding included, `SILU` computes the SiLU of that, and `KEEP` stores its slopes.
    """
    tile, segment, batch = locate(tiles, segments)
    channel = tile * TILE + tl.arange(0, TILE)
    hidden = tl.arange(0, STATES)
    in_channels = channel < channels
    backwards = (direction + flip) % 2 == 1
    size = channels * HIDDEN
    offset, inside = state_offsets(hidden, channel, channels, HIDDEN)
    coefficient = coefficients + direction * 3 * size + offset
    decay = tl.load(coefficient + size, mask=inside, other=0.0)
    weight = tl.load(coefficient + ENTER * size, mask=inside, other=0.0)
    leave = tl.load(coefficient + (2 - ENTER) * size, mask=inside, other=0.0)
    if not SCALED:
        leave = leave * weight
    last = decay
    if INJECT:
        last = tl.load(final + batch.to(tl.int64) * size + offset, mask=inside, other=0.0)
    valid = valid_tokens(lengths, batch, time, LENGTHS)
    # Padding is no input, but it has outputs; a gradient comes from all outputs and goes to the inputs.
    limit = time if GRADIENT or SKIP else valid
    if SKIP:
        skip = tl.load(omega + channel, mask=in_channels, other=0.0).to(tl.float32)
    t, sign, count = walk(segment, length, time, backwards, GROUP)
    step = sign * by_time.to(tl.int64)
    pointer = token_pointers(x, batch, t, channel, by_batch, by_time, by_channel)
    step_out = (sign * channels).to(tl.int64)
    offset_out = (batch.to(tl.int64) * time + t) * channels + channel
    from_carry = direction.to(tl.int64) * rows + batch
    state = tl.load(carries + (from_carry * segments + segment) * size + offset, mask=inside, other=0.0)
    kept = state
    start = segment * length
    held = (valid - start) // GROUP
    ahead = load_group(pointer, step, in_channels, t, sign, tl.where(count > 0, limit, 0), GROUP)
    for i in range(count):
        current = ahead
        # Another segment, or nothing, follows the last group: load the last again.
        further = tl.where(i + 1 < count, GROUP, 0)
        pointer += further * step
        ahead = load_group(pointer, step, in_channels, t + further * sign, sign, limit, GROUP)
        if FINAL:
            kept = tl.where(i == held, state, kept)
        for j in tl.static_range(GROUP):
            is_last = t + sign * j == valid - 1
            entering = current[j]
            if SKIP and LENGTHS and not GRADIENT:
                entering = tl.where(t < valid - sign * j, entering, 0.0)
            state = decay * state + added_by(entering, weight, last, is_last, SCALED, INJECT)
            value = tl.sum(leave * state, 0)
            exists = in_channels & (t < time - sign * j)
            if ADD:
                value += tl.load(previous + offset_out + j * step_out, mask=exists, other=0.0)
            if GRADIENT and LENGTHS:
                value = tl.where(t < valid - sign * j, value, 0.0)
            if SKIP:
                value += skip * current[j]
            if SILU:
                share = tl.sigmoid(value)
                silu = value * share
                if KEEP:
                    slope = share + silu * (1.0 - share)
                    tl.store(slopes + offset_out + j * step_out, slope.to(slopes.dtype.element_ty), mask=exists)
                value = silu
            tl.store(y + offset_out + j * step_out, value.to(y.dtype.element_ty), mask=exists)
        offset_out += GROUP * step_out
        t += GROUP * sign
    if FINAL:
        if segment == valid // length:
            kept = tl.where(held >= count, state, kept)
            for i in range(start + held * GROUP, valid):
                pointer = token_pointers(x, batch, i, channel, by_batch, by_time, by_channel)
                value = tl.load(pointer, mask=in_channels, other=0.0).to(tl.float32)
                kept = decay * kept + added_by(value, weight, last, False, SCALED, False)
            if not SCALED:
                kept = kept * weight
            tl.store(final + batch.to(tl.int64) * size + offset, kept, mask=inside)


@triton.jit
def weights(
    x,
    g,
    coefficients,
    carries,
    pulls,
    parts,
    omega_parts,
    lengths,
    final,
    x_by_batch,
    x_by_time,
    x_by_channel,
    g_by_batch,
    g_by_time,
    g_by_channel,
    rows,
    time,
    channels,
    segments,
    length,
    tiles,
    groups,
    HIDDEN: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    LENGTHS: tl.constexpr,
    INJECT: tl.constexpr,
    OMEGA: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute each segment's part of the coefficients' gradients, `[directions, 2 or 3, rows, hidden, channels]`.

    `OMEGA` adds that of the skip connection's gradient, `[rows, channels]`, to which padding contributes.

    The walk carries the states and their derivatives by the decay (and by the drive, if `SCALED`). It needs the
    gradient of the states only at the end of the segment, and no token's states are stored.
    """
    tile, segment, row = locate(tiles * groups, segments)
    channel = tile % tiles * TILE + tl.arange(0, TILE)
    hidden = tile // tiles * STATES + tl.arange(0, STATES)
    in_channels = channel < channels
    batch, direction = row % rows, row // rows
    backwards = direction == 1
    size = channels * HIDDEN
    offset, inside = state_offsets(hidden, channel, channels, HIDDEN)
    coefficient = coefficients + direction * 3 * size + offset
    decay = tl.load(coefficient + size, mask=inside, other=0.0)
    drive, readout, last = decay, decay, decay
    if SCALED:
        drive = tl.load(coefficient, mask=inside, other=0.0)
        readout = tl.load(coefficient + 2 * size, mask=inside, other=0.0)
    if INJECT:
        last = tl.load(final + batch.to(tl.int64) * size + offset, mask=inside, other=0.0)
    valid = valid_tokens(lengths, batch, time, LENGTHS)
    t, sign, count = walk(segment, length, time, backwards, GROUP)
    x_step = sign * x_by_time.to(tl.int64)
    g_step = sign * g_by_time.to(tl.int64)
    x_pointer = token_pointers(x, batch, t, channel, x_by_batch, x_by_time, x_by_channel)
    g_pointer = token_pointers(g, batch, t, channel, g_by_batch, g_by_time, g_by_channel)
    here = (row.to(tl.int64) * segments + segment) * size
    state = tl.load(carries + here + offset, mask=inside, other=0.0)
    by_decay = tl.zeros([STATES, TILE], tl.float32)
    by_drive = tl.zeros([STATES, TILE], tl.float32)
    to_readout = tl.zeros([STATES, TILE], tl.float32)
    to_decay = tl.zeros([STATES, TILE], tl.float32)
    to_drive = tl.zeros([STATES, TILE], tl.float32)
    to_omega = tl.zeros([TILE], tl.float32)
    limit = time if OMEGA else valid
    x_ahead = load_group(x_pointer, x_step, in_channels, t, sign, tl.where(count > 0, limit, 0), GROUP)
    g_ahead = load_group(g_pointer, g_step, in_channels, t, sign, tl.where(count > 0, time, 0), GROUP)
    for i in range(count):
        x_current, g_current = x_ahead, g_ahead
        further = tl.where(i + 1 < count, GROUP, 0)
        x_pointer += further * x_step
        g_pointer += further * g_step
        x_ahead = load_group(x_pointer, x_step, in_channels, t + further * sign, sign, limit, GROUP)
        g_ahead = load_group(g_pointer, g_step, in_channels, t + further * sign, sign, time, GROUP)
        for j in tl.static_range(GROUP):
            is_last = t + sign * j == valid - 1
            entering = x_current[j]
            if OMEGA:
                to_omega += g_current[j] * entering
                if LENGTHS:
                    entering = tl.where(t < valid - sign * j, entering, 0.0)
            pull = added_by(g_current[j], readout, last, is_last, SCALED, INJECT)
            by_decay = decay * by_decay + state
            state = decay * state + added_by(entering, drive, last, False, SCALED, False)
            to_readout += g_current[j][None, :] * state
            to_decay += pull * by_decay
            if SCALED:
                by_drive = decay * by_drive + entering[None, :]
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
    if OMEGA:
        # The same in both directions and all groups of hidden states.
        first = in_channels & (direction == 0) & (tile < tiles)
        tl.store(omega_parts + (row * segments + segment).to(tl.int64) * channels + channel, to_omega, mask=first)


@triton.jit
def _column(base, lane, rows, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the columns `lane` of a `[rows, size]` matrix, always in the same order."""
    total = tl.zeros([WIDTH, BLOCK], tl.float64)
    row = tl.arange(0, WIDTH)
    for first in range(0, rows, WIDTH):
        inside = (first + row < rows)[:, None] & (lane < size)[None, :]
        total += tl.load(base + (first + row)[:, None].to(tl.int64) * size + lane[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0).to(tl.float32)


@triton.jit
def reduce(
    parts,
    omega_parts,
    coefficients,
    delta,
    alpha,
    beta,
    to_delta,
    to_alpha,
    to_beta,
    to_gamma,
    to_omega,
    rows,
    channels,
    HIDDEN: tl.constexpr,
    SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    OMEGA: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the gradients of the segments, and compute those of the parameters."""
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
        coefficient = coefficients + direction * 3 * size + lane
        drive = tl.load(coefficient, mask=inside, other=0.0)
        readout = tl.load(coefficient + 2 * size, mask=inside, other=0.0)
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
    if OMEGA:
        if (direction == 0) & (tl.program_id(0) * BLOCK < channels):
            by_omega = _column(omega_parts, lane, rows, channels, WIDTH, BLOCK)
            tl.store(to_omega + lane, by_omega.to(to_omega.dtype.element_ty), mask=lane < channels)
