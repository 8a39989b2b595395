"""Triton kernels of chunked attention, forward and backward. No matrix of scores is kept in memory.

Tokens are rows: row `sequence · time + token` of a matrix whose rows are `stride` numbers apart. Places count within a
chunk. Scores of the softmax are in units of ln 2, so that their exponential is a power of two.

In the backward pass the gradient of a score costs a product over all value columns, so each is computed once: weights
and gradients of scores of some chunks, or of some of a long chunk's keys, pass through a slab of memory of bounded
size, `[chunk, key, query]`, and the kernels that follow multiply them out. What a chunk's queries do not see is neither
written nor read. Each number has one writer, so results are the same in every run.
"""

# Compile-time constants are in capitals, and the compiler supports no conditional expressions on blocks.
# ruff: noqa: N803, SIM108
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tcnca.ops.dispatch import INTERPRETED

IN_INTERPRETER = tl.constexpr(INTERPRETED)


@triton.jit
def locate_chunk(group, lengths, time, size, chunks, LENGTHS: tl.constexpr):
    """Return the first row, the tokens and the valid tokens of chunk `group`, counted through the batch."""
    sequence = group // chunks
    start = (group % chunks) * size
    end = time
    if LENGTHS:
        end = tl.minimum(time, tl.load(lengths + sequence).to(tl.int32))
    base = sequence.to(tl.int64) * time + start
    return base, tl.minimum(size, time - start), tl.maximum(tl.minimum(size, end - start), 0)


@triton.jit
def load_rows(x, base, place, valid, stride, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load `[places, columns]` of a chunk whose first row is `base`; zeros in the padding and beyond the width."""
    inside = (place < valid)[:, None]
    if WIDTH % COLUMNS != 0:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(x + (base + place)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(x, base, place, tokens, column, value, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Write `value` to the rows of a chunk in a matrix without gaps."""
    inside = (place < tokens)[:, None]
    if WIDTH % COLUMNS != 0:
        inside = inside & (column < WIDTH)[None, :]
    tl.store(x + (base + place)[:, None] * WIDTH + column[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def visible_pairs(query, key, valid, CAUSAL: tl.constexpr):
    """Return whether queries see keys, by their places."""
    if CAUSAL:
        seen = key <= query
    else:
        seen = (key < valid) & (query >= 0)
    return seen


@triton.jit
def all_visible(query, keys, valid, CAUSAL: tl.constexpr):
    """Return whether all queries from place `query` on see all keys before place `keys`."""
    if CAUSAL:
        keys = keys - 1
        seen = (keys <= query) & (keys < valid)
    else:
        seen = keys <= valid
    return seen


@triton.jit
def load_bias(bias, query, key, max_length):
    """Load the bias of each pair; it must be padded at its end by as many numbers as a block has keys."""
    if IN_INTERPRETER:
        found = tl.load(bias + (key - query + max_length - 1))
    else:
        # The compiler would assign the loads to other threads than the sum, and exchange each block of them through
        # shared memory, which takes longer than the loads.
        address = (bias + (max_length - 1 - query)).to(tl.int64) + key.to(tl.int64) * 4
        found = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def compute_scores(
    products,
    query,
    key,
    valid,
    complete,
    bias,
    max_length,
    scale,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Compute scores of queries and keys, by place, in either order of axes; -∞ where a query may not look.

    Queries of the padding are passed with the place of the last valid token, and their scores are discarded.
    `complete` says that every query of the block sees every key of the block.
    """
    if ACTIVATION == "softmax":
        scaled = products * scale
    elif CAUSAL:
        scaled = products * (1.0 / (query + 1).to(tl.float32))
    else:
        scaled = products * (1.0 / valid.to(tl.float32))
    if BIAS:
        scaled += load_bias(bias, query, key, max_length)
    if not complete:
        scaled = tl.where(visible_pairs(query, key, valid, CAUSAL), scaled, float("-inf"))
    return scaled


@triton.jit
def activate(scores, ACTIVATION: tl.constexpr):
    """Compute the weights of scores for the activations without a normalizer."""
    if ACTIVATION == "relu2":
        positive = tl.maximum(scores, 0.0)
        weights = positive * positive
    else:
        weights = 0.5 + 0.5 * tl.erf((scores - 0.707107) * 2.506626424383798)
    return weights


@triton.jit
def weight_slope(scores, ACTIVATION: tl.constexpr):
    """Compute the derivative of `activate`."""
    if ACTIVATION == "relu2":
        found = 2.0 * tl.maximum(scores, 0.0)
    else:
        from_mean = (scores - 0.707107) * 2.506626424383798
        found = 1.4142125184828964 * tl.exp(-from_mean * from_mean)
    return found


@triton.jit
def mix(x):
    """Hash 32 bits so that every bit of `x` affects every bit of the result."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_factor(seed, query, key, dropout):
    """Return what dropout multiplies a weight by: 0, or 1 / (1 - dropout).

    `query` counts rows of the whole batch, `key` places in a chunk. The result depends on nothing else, so it is the
    same in every kernel.
    """
    number = tl.load(seed)
    of_query = mix(query.to(tl.uint32) ^ number.to(tl.uint32)) ^ (number >> 32).to(tl.uint32)
    drawn = mix(mix(key.to(tl.uint32)) ^ of_query)
    # float32 distinguishes 24 bits.
    uniform = (drawn >> 8).to(tl.float32) * 5.9604644775390625e-08
    return tl.where(uniform < dropout, 0.0, 1.0 / (1.0 - dropout))


@triton.jit
def attended(
    q,
    k,
    v,
    bias,
    lengths,
    seed,
    out,
    normalizer,
    q_by_row,
    k_by_row,
    v_by_row,
    scale,
    dropout,
    time,
    size,
    chunks,
    blocks,
    max_length,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    Z: tl.constexpr,
    SLICE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ATTEND: tl.constexpr,
):
    """Compute the output of a block of queries over all keys that they see, for one slice of the values.

    `NORMALIZE` computes the softmax's normalizer, the log₂ of its sum, in the same pass, and programs of the first
    slice store it; otherwise the normalizer is read. Without `ATTEND` only the normalizer is computed.
    """
    # The last blocks of a causal chunk have most to do, so they start first.
    block = blocks - 1 - tl.program_id(0) % blocks
    base, tokens, valid = locate_chunk(tl.program_id(0) // blocks, lengths, time, size, chunks, LENGTHS)
    query = block * QUERIES + tl.arange(0, QUERIES)
    nearest = tl.minimum(query, valid - 1)
    depth = tl.arange(0, Z)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    stop = tl.where(block * QUERIES < valid, valid, 0)
    if CAUSAL:
        stop = tl.minimum(stop, (block + 1) * QUERIES)
    queries = load_rows(q, base, query, valid, q_by_row, depth, WIDTH, Z)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, SLICE], tl.float32)
    known = total
    if ACTIVATION == "softmax" and not NORMALIZE:
        known = tl.load(normalizer + base + query, mask=query < valid, other=float("inf"))
    for begin in range(0, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        keys = load_rows(k, base, key, valid, k_by_row, depth, WIDTH, Z)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        complete = all_visible(block * QUERIES, begin + KEYS, valid, CAUSAL)
        scores = compute_scores(
            products, nearest[:, None], key[None, :], valid, complete, bias, max_length, scale, ACTIVATION, CAUSAL, BIAS
        )
        if ACTIVATION != "softmax":
            weights = activate(scores, ACTIVATION)
        elif NORMALIZE:
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            highest = higher
            if ATTEND:
                result = result * shrink[:, None]
        else:
            weights = tl.exp2(scores - known[:, None])
        if ATTEND:
            if DROPOUT:
                weights = weights * dropout_factor(seed, (base + query)[:, None], key[None, :], dropout)
            values = load_rows(v, base, key, valid, v_by_row, column, VALUES, SLICE)
            result = tl.dot(weights.to(values.dtype), values, result, input_precision="ieee")
    if ACTIVATION == "softmax" and NORMALIZE:
        total = tl.where(query < valid, total, 1.0)
        if tl.program_id(1) == 0:
            found = tl.where(query < valid, highest + tl.log2(total), 0.0)
            tl.store(normalizer + base + query, found, mask=query < tokens)
        result = result / total[:, None]
    if ATTEND:
        # Queries of the padding have a result as well.
        result = tl.where((query < valid)[:, None], result, 0.0)
        store_rows(out, base, query, tokens, column, result, VALUES, SLICE)


@triton.jit
def row_sums(dy, out, sums, dy_by_row, rows, VALUES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Sum `dy · out` over each row: what the softmax's normalizer subtracts from every gradient of a weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, VALUES, STEP):
        column = begin + tl.arange(0, STEP)
        slopes = load_rows(dy, 0, row.to(tl.int64), rows, dy_by_row, column, VALUES, STEP)
        outputs = load_rows(out, 0, row.to(tl.int64), rows, VALUES, column, VALUES, STEP)
        total += tl.sum(slopes.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(sums + row, total, mask=row < rows)


@triton.jit
def slab_rows(group, key, first_block, key_blocks, blocks, BLOCK: tl.constexpr):
    """Return where rows of a slab begin, by its chunk and the place of its keys."""
    return (group.to(tl.int64) * key_blocks * BLOCK + (key - first_block * BLOCK)) * (blocks * BLOCK)


@triton.jit
def scores_gradient(
    q,
    k,
    v,
    dy,
    bias,
    lengths,
    seed,
    normalizer,
    sums,
    weights,
    slopes,
    q_by_row,
    k_by_row,
    v_by_row,
    dy_by_row,
    scale,
    dropout,
    time,
    size,
    chunks,
    blocks,
    max_length,
    first_group,
    first_block,
    key_blocks,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """Compute one block of the weights and of the gradients of scores; zeros in the padding."""
    group = tl.program_id(1)
    base, _, valid = locate_chunk(first_group + group, lengths, time, size, chunks, LENGTHS)
    query_begin = tl.program_id(0) % blocks * BLOCK
    key_begin = (first_block + tl.program_id(0) // blocks) * BLOCK
    visible = (query_begin < valid) & (key_begin < valid)
    if CAUSAL:
        visible = visible & (key_begin <= query_begin)
    if visible:
        query, key = query_begin + tl.arange(0, BLOCK), key_begin + tl.arange(0, BLOCK)
        depth = tl.arange(0, Z)
        keys = load_rows(k, base, key, valid, k_by_row, depth, WIDTH, Z)
        queries = load_rows(q, base, query, valid, q_by_row, depth, WIDTH, Z)
        products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        nearest = tl.minimum(query, valid - 1)
        complete = all_visible(query_begin, key_begin + BLOCK, valid, CAUSAL)
        scores = compute_scores(
            products, nearest[None, :], key[:, None], valid, complete, bias, max_length, scale, ACTIVATION, CAUSAL, BIAS
        )
        taken = tl.zeros([BLOCK], tl.float32)
        if ACTIVATION == "softmax":
            # Queries of the padding have no weights.
            known = tl.load(normalizer + base + query, mask=query < valid, other=float("inf"))
            taken = tl.load(sums + base + query, mask=query < valid, other=0.0)
            weight = tl.exp2(scores - known[None, :])
            steep = weight
        else:
            weight = tl.where((query < valid)[None, :], activate(scores, ACTIVATION), 0.0)
            steep = tl.where((query < valid)[None, :], weight_slope(scores, ACTIVATION), 0.0)
        if DROPOUT:
            weight = weight * dropout_factor(seed, (base + query)[None, :], key[:, None], dropout)
        place = slab_rows(group, key, first_block, key_blocks, blocks, BLOCK)[:, None] + query[None, :]
        tl.store(weights + place, weight.to(weights.dtype.element_ty))
        # In half precision they take half the registers during the long product.
        steep = steep.to(slopes.dtype.element_ty)
        found = tl.zeros([BLOCK, BLOCK], tl.float32)
        for begin in range(0, VALUES, STEP):
            column = begin + tl.arange(0, STEP)
            values = load_rows(v, base, key, valid, v_by_row, column, VALUES, STEP)
            outer = load_rows(dy, base, query, valid, dy_by_row, column, VALUES, STEP)
            found = tl.dot(values, tl.trans(outer), found, input_precision="ieee")
        if DROPOUT:
            found = found * dropout_factor(seed, (base + query)[None, :], key[:, None], dropout)
        found = steep.to(tl.float32) * (found - taken[None, :])
        tl.store(slopes + place, found.to(slopes.dtype.element_ty))


@triton.jit
def rows_gradient(
    matrix,
    x,
    lengths,
    so_far,
    out,
    x_by_row,
    factor,
    time,
    size,
    chunks,
    blocks,
    slices,
    first_group,
    first_block,
    key_blocks,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TO_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Multiply the slab by a slice of the columns of `x`.

    With `TO_KEYS`, compute the gradient of a block of the slab's keys from all queries that see them. Otherwise compute
    that of a block of queries from the slab's keys that they see, and add it to `so_far`, the result of earlier keys,
    until the last of them. `SCALED` is for gradients of scores, which are products of queries and keys times a number:
    that number is multiplied in here, as half precision may not represent a gradient that is already multiplied by it.
    """
    group = tl.program_id(1)
    base, tokens, valid = locate_chunk(first_group + group, lengths, time, size, chunks, LENGTHS)
    column = tl.program_id(0) % slices * SLICE + tl.arange(0, SLICE)
    block = tl.program_id(0) // slices
    result = tl.zeros([BLOCK, SLICE], tl.float32)
    if TO_KEYS:
        row_begin = (first_block + block) * BLOCK
        row = row_begin + tl.arange(0, BLOCK)
        stop = tl.where(row_begin < valid, valid, 0)
        begin = 0
        if CAUSAL:
            begin = row_begin
        place = slab_rows(group, row, first_block, key_blocks, blocks, BLOCK)
        for first in range(begin, stop, STEP):
            other = first + tl.arange(0, STEP)
            left = tl.load(matrix + place[:, None] + other[None, :])
            right = load_rows(x, base, other, valid, x_by_row, column, WIDTH, SLICE)
            if SCALED and CAUSAL and ACTIVATION != "softmax":
                right = (right.to(tl.float32) / (other + 1).to(tl.float32)[:, None]).to(right.dtype)
            result = tl.dot(left, right, result, input_precision="ieee")
    else:
        # The last queries of a causal chunk have most to do, so they start first.
        row_begin = (blocks - 1 - block) * BLOCK
        row = row_begin + tl.arange(0, BLOCK)
        stop = tl.minimum((first_block + key_blocks) * BLOCK, tl.where(row_begin < valid, valid, 0))
        if CAUSAL:
            stop = tl.minimum(stop, row_begin + BLOCK)
        for first in range(first_block * BLOCK, stop, STEP):
            other = first + tl.arange(0, STEP)
            place = slab_rows(group, other, first_block, key_blocks, blocks, BLOCK)
            left = tl.load(matrix + place[:, None] + row[None, :])
            right = load_rows(x, base, other, valid, x_by_row, column, WIDTH, SLICE)
            result = tl.dot(tl.trans(left), right, result, input_precision="ieee")
        if SCALED and CAUSAL and ACTIVATION != "softmax":
            result = result / (row + 1).to(tl.float32)[:, None]
    if SCALED:
        if ACTIVATION == "softmax":
            result = result * factor
        elif not CAUSAL:
            result = result / tl.maximum(valid, 1).to(tl.float32)
    if not TO_KEYS:
        result += load_rows(so_far, base, row, tl.where(first_block > 0, valid, 0), WIDTH, column, WIDTH, SLICE)
        last = first_block + key_blocks == blocks
        store_rows(so_far, base, row, tl.where(last, 0, valid), column, result, WIDTH, SLICE)
        tokens = tl.where(last, tokens, 0)
    store_rows(out, base, row, tokens, column, result, WIDTH, SLICE)


@triton.jit
def bias_gradient(
    slopes,
    lengths,
    found,
    time,
    size,
    chunks,
    blocks,
    first_group,
    first_block,
    key_blocks,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Compute the bias' gradient from all tiles of a chunk that are equally far from its diagonal.

    A block has one or more tiles. Tiles are summed and then added along their diagonals, into `found`,
    `[chunk, distance, 2, TILE]`: by key minus query within a tile where that is not negative, and plus `TILE` where it
    is negative.
    """
    group, distances = tl.program_id(1), tl.num_programs(0)
    _, _, valid = locate_chunk(first_group + group, lengths, time, size, chunks, LENGTHS)
    # Tiles of queries minus tiles of keys; if causal, only queries that follow the keys see them.
    behind = tl.program_id(0)
    if not CAUSAL:
        behind = behind - (distances - 1) // 2
    row, column = tl.arange(0, TILE), tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], tl.float32)
    begin, stop = first_block * (BLOCK // TILE), (first_block + key_blocks) * (BLOCK // TILE)
    stop = tl.minimum(stop, tl.cdiv(tl.minimum(valid, valid - behind * TILE), TILE))
    for tile in range(tl.maximum(begin, -behind), stop):
        key, query = tile * TILE + row, (tile + behind) * TILE + column
        place = slab_rows(group, key, first_block, key_blocks, blocks, BLOCK)
        total += tl.load(slopes + place[:, None] + query[None, :]).to(tl.float32)
    place = row[:, None] + column[None, :]
    # Each row has one difference of key and query, or that difference minus a tile.
    turned = tl.gather(total, place % TILE, 0)
    later = tl.sum(tl.where(place < TILE, turned, 0.0), 1)
    earlier = tl.sum(tl.where(place < TILE, 0.0, turned), 1)
    pointer = found + ((first_group + group).to(tl.int64) * distances + tl.program_id(0)) * 2 * TILE + row
    tl.store(pointer, tl.load(pointer) + later)
    tl.store(pointer + TILE, tl.load(pointer + TILE) + earlier)
