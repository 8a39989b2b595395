"""Triton kernels of one decoding step: the next token of each sequence of a batch.

A layer takes seven kernels: norm and mixer; values and gates; scores; values of the attention; output; and two for the
feed-forward net. Every kernel waits for the one before by `gdc_wait`, so that with programmatic launches its programs
start, and load weights, while that one still runs. Nothing but weights may be read before the wait.

Rows of the batch are at their own positions: `slots` is `[batch, 1 + blocks]`, the slot of the current token in the
chunk of the attention and in the ring buffer of each block of the TCN.
"""

# Triton's language is not typed.
# mypy: ignore-errors
# ruff: noqa: N803, RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from tcnca.ops.dispatch import INTERPRETED

if INTERPRETED:

    @triton.jit
    def gdc_wait():
        """Kernels run one after the other."""

    @triton.jit
    def gdc_launch_dependents():
        """Kernels run one after the other."""

else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG_ROTARY_BASE = tl.constexpr(9.210340371976184)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """Apply the activation function `NAME`."""
    if NAME == "silu":
        x = x * tl.sigmoid(x)
    elif NAME == "relu":
        x = tl.maximum(x, 0.0)
    elif NAME == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # tanh(y) = 2 σ(2y) - 1
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def normalize(x, valid, scale, shift, eps, WIDTH: tl.constexpr, NORM: tl.constexpr):
    """Normalize `x` (`[rows, columns]`), zero where not `valid`.

    The statistics of a batch norm are part of `scale` and `shift`.
    """
    if NORM == "layer":
        x = tl.where(valid, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    if NORM != "batch":
        x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    return x * scale + shift


@triton.jit
def embed(
    token,
    table,
    ngram_table,
    past,
    factors,
    first,
    x,
    factor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAST: tl.constexpr,
    PAST_COLUMNS: tl.constexpr,
    BUCKETS: tl.constexpr,
    PRIME: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the embedding of each row's token, plus those of the n-grams that end there, and keep the token.

    With `PAST` 0 there are no n-grams. `first` has the first row of the table for each length, or -1.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    last = tl.load(token + row)
    value = tl.load(table + last * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PAST > 0:
        total = (last + 1) * tl.load(factors) % PRIME
        for lag in range(1, PAST + 1):
            total = (total + tl.load(past + (row + 1) * PAST - lag) * tl.load(factors + lag)) % PRIME
            begin = tl.load(first + lag)
            place = (total % BUCKETS + begin) * WIDTH + column
            value += tl.load(ngram_table + place, mask=(column < WIDTH) & (begin >= 0), other=0.0).to(tl.float32)
        slot = tl.arange(0, PAST_COLUMNS)
        kept = tl.load(past + row * PAST + slot + 1, mask=slot + 1 < PAST, other=0)
        tl.debug_barrier()  # all threads have read what is overwritten
        tl.store(past + row * PAST + slot, tl.where(slot + 1 < PAST, kept, last + 1), mask=slot < PAST)
    tl.store(x + row * WIDTH + column, (value * factor).to(x.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def load_normalized(x, scale, shift, row, column, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr):
    """Return the channels `column` of the norm of row `row`, in the dtype of `x`."""
    every = tl.arange(0, COLUMNS)
    whole = tl.load(x + row * WIDTH + every, mask=every < WIDTH, other=0.0).to(tl.float32)
    some = tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if NORM == "layer":
        mean = tl.sum(whole) / WIDTH
        whole = tl.where(every < WIDTH, whole - mean, 0.0)
        some = some - mean
    if NORM != "batch":
        some = some * tl.rsqrt(tl.sum(whole * whole) / WIDTH + eps)
    some = some * tl.load(scale + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    some = some + tl.load(shift + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return some.to(x.dtype.element_ty)


@triton.jit
def mix_tcn(
    x,
    scale,
    shift,
    ring,
    taps,
    bias,
    gain,
    omega,
    slots,
    normed,
    mixed,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    KERNEL: tl.constexpr,
    PAST: tl.constexpr,
    FACTOR: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize a row, and take a step of a TCN.

    `ring` is `[batch, slots of all blocks, channels]`, `taps` `[depth, kernel_size, channels]`. With `ADD` the output
    is the sum with `x`, which must not be `mixed` itself: other programs still read it.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < WIDTH
    lag = 1 + tl.arange(0, PAST)
    known = (lag < KERNEL)[:, None] & inside[None, :]
    total: tl.constexpr = (KERNEL - 1) * ((FACTOR**DEPTH - 1) // (FACTOR - 1) if FACTOR > 1 else DEPTH)
    if PDL:
        gdc_wait()
    # All inputs of the past are loaded before the first is used.
    base = ring + row * total * WIDTH
    start = 0
    past = ()
    for block in tl.static_range(DEPTH):
        size = (KERNEL - 1) * FACTOR**block
        slot = tl.load(slots + row * (DEPTH + 1) + 1 + block) + size - lag * FACTOR**block
        slot = tl.where(slot >= size, slot - size, slot)
        past = past + (tl.load(base + (start + slot)[:, None] * WIDTH + column[None, :], mask=known, other=0.0),)
        start += size
    normal = load_normalized(x, scale, shift, row, column, eps, WIDTH, COLUMNS, NORM)
    tl.store(normed + row * WIDTH + column, normal, mask=inside)
    sums = ()
    for block in tl.static_range(DEPTH):
        weight = tl.load(taps + (block * KERNEL + lag)[:, None] * WIDTH + column[None, :], mask=known, other=0.0)
        sums = sums + (tl.sum(past[block].to(tl.float32) * weight.to(tl.float32), 0),)
    # The slot of the current token holds the oldest input, which all threads must have read.
    tl.debug_barrier()
    h = normal
    start = 0
    for block in tl.static_range(DEPTH):
        slot = tl.load(slots + row * (DEPTH + 1) + 1 + block)
        if KERNEL > 1:
            tl.store(base + (start + slot) * WIDTH + column, h, mask=inside)
        start += (KERNEL - 1) * FACTOR**block
        weight = tl.load(taps + block * KERNEL * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        y = h.to(tl.float32) * weight + sums[block]
        if BIAS:
            y += tl.load(bias + block * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if BLOCK == "residual":
            y = h.to(tl.float32) + activate(y, ACTIVATION)
        elif BLOCK == "chain":
            y += tl.load(gain + block * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * activate(y, ACTIVATION)
        h = y.to(normal.dtype)
    y = h.to(tl.float32)
    if OUTPUT != "none":
        y += normal.to(tl.float32) * tl.load(omega + column, mask=inside, other=0.0).to(tl.float32)
    if OUTPUT == "activation":
        y = activate(y, ACTIVATION)
    if ADD:
        y += tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(mixed + row * WIDTH + column, y.to(normal.dtype), mask=inside)


@triton.jit
def mix_ema(
    x,
    scale,
    shift,
    hidden,
    drive,
    decay,
    readout,
    omega,
    normed,
    mixed,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
    STATE_COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize a row, and take a step of an EMA, whose `hidden` is `[batch, channels, states]` in float32."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < WIDTH
    state = tl.arange(0, STATE_COLUMNS)
    place = column[:, None] * STATES + state[None, :]
    known = inside[:, None] & (state < STATES)[None, :]
    enters = tl.load(drive + place, mask=known, other=0.0)
    stays = tl.load(decay + place, mask=known, other=0.0)
    leaves = tl.load(readout + place, mask=known, other=0.0)
    if PDL:
        gdc_wait()
    before = tl.load(hidden + row * WIDTH * STATES + place, mask=known, other=0.0)
    normal = load_normalized(x, scale, shift, row, column, eps, WIDTH, COLUMNS, NORM)
    tl.store(normed + row * WIDTH + column, normal, mask=inside)
    after = enters * normal.to(tl.float32)[:, None] + stays * before
    tl.store(hidden + row * WIDTH * STATES + place, after, mask=known)
    y = tl.sum(after * leaves, 1).to(normal.dtype).to(tl.float32)
    y += normal.to(tl.float32) * tl.load(omega + column, mask=inside, other=0.0).to(tl.float32)
    y = activate(y, ACTIVATION)
    if ADD:
        y += tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(mixed + row * WIDTH + column, y.to(normal.dtype), mask=inside)


@triton.jit
def finish(
    y,
    row,
    known,
    column,
    valid,
    out,
    gates,
    cache,
    slots,
    OUT: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    OPEN: tl.constexpr,
    SMOOTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PANEL: tl.constexpr,
    GATES: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store the outputs `y` of a linear map, `[rows, columns]`; see `linear`."""
    if EPILOGUE == "gates":
        if tl.max(column) < PADDED:
            valid = valid & (column < VALUES)
            slot = tl.load(slots + row * (BLOCKS + 1), mask=known, other=0)
            panel = row * (VALUES // PANEL) + column // PANEL
            place = (panel * CHUNK + slot) * PANEL + column % PANEL
            tl.store(cache + place, activate(y, ACTIVATION).to(cache.dtype.element_ty), mask=valid)
        else:
            gate = column - PADDED
            opened = tl.sigmoid(y)
            y = tl.where(gate < OPEN, opened, tl.where(gate < SMOOTH, y * opened, y))
            tl.store(out + row * GATES + gate, y.to(out.dtype.element_ty), mask=valid)
    else:
        if EPILOGUE == "activation":
            y = activate(y, ACTIVATION)
        elif EPILOGUE == "add":
            y += tl.load(out + row * OUT + column, mask=valid, other=0.0).to(tl.float32)
        elif EPILOGUE == "blend":
            before = tl.load(out + row * OUT + column, mask=valid, other=0.0).to(tl.float32)
            candidate = tl.load(gates + row * GATES + (GATES - OUT) + column, mask=valid, other=0.0).to(tl.float32)
            update = tl.load(gates + row * GATES + column, mask=valid, other=0.0).to(tl.float32)
            y = before + update * (activate(candidate + y, ACTIVATION) - before)
        tl.store(out + row * OUT + column, y.to(out.dtype.element_ty), mask=valid)


@triton.jit
def linear(
    x,
    second,
    weight,
    weight_scale,
    bias,
    scale,
    shift,
    out,
    gates,
    cache,
    slots,
    rows,
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    OPEN: tl.constexpr,
    SMOOTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PANEL: tl.constexpr,
    GATES: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply `[rows, IN]` by a matrix `[OUT, IN]`, after a norm of the rows or without.

    With `DOT` a program computes `ROWS` rows on the tensor cores, otherwise all rows one after the other, with the
    weights in registers. `STEP` inputs are multiplied at a time; all of them at once without `DOT` or with a norm.

    What is done with the result is the `EPILOGUE`: `none`; `activation`; `add` to `out`; `blend`, MEGA's output gate
    between `out` and the result, with the gates of `gates`; or `gates`: the first `VALUES` outputs, computed from `x`,
    are values of the attention, which go to the `cache`; those from `PADDED` on, computed from `second`, are gates.
    """
    if PDL:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < OUT
    step = tl.arange(0, STEP)
    if EPILOGUE == "gates":
        if tl.program_id(0) * COLUMNS >= PADDED:
            x = second
    added = tl.zeros((COLUMNS,), tl.float32)
    if BIAS:
        added = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if QUANTIZED:
        factor = tl.load(weight_scale + column, mask=inside, other=0.0)
    if NORM != "none":
        scales = tl.load(scale + step, mask=step < IN, other=0.0).to(tl.float32)
        shifts = tl.load(shift + step, mask=step < IN, other=0.0).to(tl.float32)
    if DOT:
        row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        known = row < rows
        if PDL:
            gdc_wait()
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, IN, STEP):
            read = (first + step) < IN
            a = tl.load(x + row[:, None] * IN + (first + step)[None, :], mask=known[:, None] & read[None, :], other=0.0)
            w = tl.load(
                weight + column[:, None] * IN + (first + step)[None, :], mask=inside[:, None] & read[None, :], other=0
            )
            if NORM != "none":
                a = normalize(a.to(tl.float32), read[None, :], scales[None, :], shifts[None, :], eps, IN, NORM).to(
                    a.dtype
                )
            total = tl.dot(a, w.to(a.dtype).T, total, input_precision="ieee")
        if QUANTIZED:
            total *= factor[None, :]
        total += added[None, :]
        valid = known[:, None] & inside[None, :]
        finish(
            total,
            row[:, None],
            known[:, None],
            column[None, :],
            valid,
            out,
            gates,
            cache,
            slots,
            OUT,
            VALUES,
            PADDED,
            OPEN,
            SMOOTH,
            CHUNK,
            BLOCKS,
            PANEL,
            GATES,
            EPILOGUE,
            ACTIVATION,
        )
    else:
        read = step < IN
        w = tl.load(weight + column[:, None] * IN + step[None, :], mask=inside[:, None] & read[None, :], other=0)
        if PDL:
            gdc_wait()
        for number in range(rows):
            row = tl.full((1, 1), number, tl.int64)
            a = tl.load(x + row * IN + step[None, :], mask=read[None, :], other=0.0)
            a32 = a.to(tl.float32)
            if NORM != "none":
                a32 = (
                    normalize(a32, read[None, :], scales[None, :], shifts[None, :], eps, IN, NORM)
                    .to(a.dtype)
                    .to(tl.float32)
                )
            total = tl.sum(w.to(tl.float32) * a32, 1)
            if QUANTIZED:
                total *= factor
            total = (total + added)[None, :]
            finish(
                total,
                row,
                row < rows,
                column[None, :],
                inside[None, :],
                out,
                gates,
                cache,
                slots,
                OUT,
                VALUES,
                PADDED,
                OPEN,
                SMOOTH,
                CHUNK,
                BLOCKS,
                PANEL,
                GATES,
                EPILOGUE,
                ACTIVATION,
            )


@triton.jit
def project(x, gamma, beta, column, AFFINE: tl.constexpr, DTYPE: tl.constexpr):
    """Load the columns of a query or key, times `gamma` plus `beta` if they are `AFFINE`."""
    y = tl.load(x + column).to(tl.float32)
    if AFFINE:
        y = y * tl.load(gamma + column).to(tl.float32) + tl.load(beta + column).to(tl.float32)
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def rotated(
    x,
    gamma,
    beta,
    place,
    column,
    scale,
    KEY: tl.constexpr,
    ROTATED: tl.constexpr,
    AFFINE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return a query or key, `ROTATED` columns of it rotated by its place in the chunk.

    Columns of `column` from `KEY` on are not used.

    With `NORM_EPS` it is normalized to a mean square of `scale`² first.
    """
    inside = column < KEY
    column = tl.minimum(column, KEY - 1)
    y = project(x, gamma, beta, column, AFFINE, DTYPE)
    if NORM_EPS is not None:
        scale *= tl.rsqrt(tl.sum(tl.where(inside, y * y, 0.0)) / KEY + NORM_EPS)
        y = (y * scale).to(DTYPE).to(tl.float32)
    if ROTATED:
        half: tl.constexpr = ROTATED // 2
        other = tl.where(column < half, column + half, column - half)
        z = project(x, gamma, beta, other, AFFINE, DTYPE)
        if NORM_EPS is not None:
            z = (z * scale).to(DTYPE).to(tl.float32)
        angle = place.to(tl.float32) * tl.exp((column % half).to(tl.float32) * (-LOG_ROTARY_BASE / half))
        # Rounded as by PyTorch's own operators.
        cosine, sine = tl.cos(angle).to(DTYPE).to(tl.float32), tl.sin(angle).to(DTYPE).to(tl.float32)
        y = tl.where(column < ROTATED, y * cosine + tl.where(column < half, -z, z) * sine, y)
    return y.to(DTYPE)


@triton.jit
def score(
    query,
    key,
    gamma,
    beta,
    keys,
    last_key,
    position_bias,
    qk_scale,
    slots,
    scores,
    reach,
    by_row,
    factor,
    KEY: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
    ROTATED: tl.constexpr,
    BIAS: tl.constexpr,
    AFFINE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the current key to the cache `[batch, chunk_size, d_key]`, and the scores of all keys of the chunk.

    Rows of `query` and `key` are `by_row` apart; `gamma` and `beta` are `[2, d_key]`, for queries and for keys. With
    `SHIFT`, the current key is `last_key` (`[batch, d_key]`), which is replaced by that of the current token.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    column = tl.arange(0, KEY_COLUMNS)
    inside = column < KEY
    if PDL:
        gdc_wait()
    slot = tl.load(slots + row * (BLOCKS + 1))
    if tl.program_id(1) * PLACES <= slot:
        cached = keys + row * CHUNK * KEY
        earlier = (place < slot)[:, None] & inside[None, :]
        found = tl.load(cached + place[:, None] * KEY + column[None, :], mask=earlier, other=0.0)
        dtype: tl.constexpr = keys.dtype.element_ty
        scale = 1.0
        if NORM_EPS is not None:
            scale = tl.load(qk_scale).to(tl.float32)
        first = query + row * by_row
        q = rotated(first, gamma, beta, slot, column, scale, KEY, ROTATED, AFFINE, NORM_EPS, dtype)
        first = key + row * by_row
        if SHIFT:
            last = last_key + row * KEY
            k = rotated(last, gamma, beta, slot, column, 1.0, KEY, ROTATED, False, None, dtype)
            new = rotated(first, gamma + KEY, beta + KEY, slot, column, 1.0, KEY, 0, AFFINE, NORM_EPS, dtype)
        else:
            k = rotated(first, gamma + KEY, beta + KEY, slot, column, 1.0, KEY, ROTATED, AFFINE, NORM_EPS, dtype)
        found = tl.where((place == slot)[:, None], k[None, :], found)
        q = tl.where(inside, q.to(tl.float32), 0.0)
        y = tl.sum(found.to(tl.float32) * q[None, :], 1) * factor
        if BIAS:
            y += tl.load(position_bias + reach - 1 + place - slot, mask=place <= slot, other=0.0).to(tl.float32)
        tl.store(scores + row * CHUNK + place, y, mask=place <= slot)
        if slot // PLACES == tl.program_id(1):
            tl.store(cached + slot * KEY + column, k, mask=inside)
            if SHIFT:
                # Only this program needs the last key, and all of its threads have read it.
                tl.debug_barrier()
                tl.store(last_key + row * KEY + column, new, mask=inside)


@triton.jit
def attend(
    scores,
    cache,
    reset,
    slots,
    out,
    by_row,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PANEL: tl.constexpr,
    PLACES: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Average the values of the chunk by the softmax of the scores, times the reset gate.

    The cache is `[batch, panels, chunk_size, PANEL]`: a program reads one panel of the columns, all of it in a row.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    panel = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row * (BLOCKS + 1))
    place = tl.arange(0, PLACES)
    column = tl.arange(0, PANEL)
    values = cache + (row * (VALUES // PANEL) + panel) * CHUNK * PANEL
    # A maximum for each row of the tile, so that threads need not wait for each other.
    top = tl.full((PLACES,), -float("inf"), tl.float32)
    total = tl.zeros((PLACES,), tl.float32)
    sums = tl.zeros((PLACES, PANEL), tl.float32)
    for first in range(0, slot + 1, PLACES):
        seen = (first + place) <= slot
        value = tl.load(values + (first + place)[:, None] * PANEL + column[None, :], mask=seen[:, None], other=0.0)
        y = tl.load(scores + row * CHUNK + first + place, mask=seen, other=-float("inf"))
        higher = tl.maximum(tl.maximum(top, y), -1e38)
        kept, weight = tl.exp(top - higher), tl.exp(y - higher)
        total = total * kept + weight
        sums = sums * kept[:, None] + weight[:, None] * value.to(tl.float32)
        top = higher
    weight = tl.exp(top - tl.max(top))
    y = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight)
    place = panel * PANEL + column
    if GATED:
        y *= tl.load(reset + row * by_row + place).to(tl.float32)
    tl.store(out + row * VALUES + place, y.to(out.dtype.element_ty))


@triton.jit
def advance_slots(slots, sizes, COUNT: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Move all rows to their next token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.arange(0, COLUMNS)
    after = tl.load(slots + tl.program_id(0) * COUNT + place, mask=place < COUNT, other=0) + 1
    size = tl.load(sizes + place, mask=place < COUNT, other=1)
    tl.store(slots + tl.program_id(0) * COUNT + place, tl.where(after >= size, 0, after), mask=place < COUNT)


@triton.jit
def sample(
    logits,
    options,
    excluded,
    seen,
    uniforms,
    used,
    token,
    min_temperature,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the next token of each row; see `generation/sampling.py`.

    `options` is `[batch, 5]`: penalty, temperature, top_k, top_p, min_p. A row takes the next of its `BLOCK` uniform
    random numbers, of which it has `used` some.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    lowest = -float("inf")
    penalty, temperature = tl.load(options + row * 5), tl.load(options + row * 5 + 1)
    y = tl.load(logits + row * SIZE + column, mask=inside, other=lowest).to(tl.float32)
    if penalty != 1.0:
        occurred = tl.load(seen + row * SIZE + column, mask=inside, other=0) != 0
        y = tl.where(occurred, tl.where(y > 0.0, y / penalty, y * penalty), y)
    y = tl.where(tl.load(excluded + column, mask=inside, other=1) != 0, lowest, y)
    top = tl.max(y)
    chosen = tl.min(tl.where(y == top, column, COLUMNS))
    if temperature != 0.0:
        top_k, top_p = tl.load(options + row * 5 + 2), tl.load(options + row * 5 + 3)
        y = (y - top) / tl.maximum(temperature, min_temperature)
        if (top_k < SIZE) | (top_p < 1.0):
            ordered = tl.sort(y, descending=True)
            least = tl.max(tl.where(column >= top_k.to(tl.int32) - 1, ordered, lowest))
            ordered = tl.where(ordered < least, lowest, ordered)
            shares = tl.exp(ordered)
            shares = shares / tl.sum(shares)
            kept = tl.cumsum(shares) - shares < top_p
            least = tl.maximum(least, tl.min(tl.where(kept, ordered, 0.0)))
            y = tl.where(y < least, lowest, y)
        shares = tl.exp(y)
        shares = tl.where(shares < tl.load(options + row * 5 + 4), 0.0, shares)
        shares = shares / tl.sum(shares)
        place = tl.load(used + row)
        uniform = tl.load(uniforms + row * BLOCK + place)
        reached = (tl.cumsum(shares) - shares <= uniform) & (shares > 0.0)
        chosen = tl.max(tl.where(reached, column, 0))
        tl.store(used + row, place + 1)
    # Not a number is never equal to itself.
    chosen = tl.minimum(chosen, SIZE - 1)
    tl.store(token + row, chosen.to(tl.int64))
    if penalty != 1.0:
        tl.store(seen + row * SIZE + chosen, 1)
