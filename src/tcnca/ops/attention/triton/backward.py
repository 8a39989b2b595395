"""Chunked attention's kernels for the gradients. Each number has one writer, so sums come out the same every time.

The gradient of a score costs a product over all value columns, so each is found once: weights and gradients of scores
of some chunks, or of some of a long chunk's keys, pass through a slab of memory of bounded size, `[chunk, key, query]`,
and the kernels that follow multiply them out. What a chunk's queries do not see is neither written nor read.
"""

# Compile-time constants are in capitals, and the compiler knows no conditional expressions on blocks.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator, assignment"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tcnca.ops.attention.triton.shared import all_see, chunk_of, keep, load_rows, score, slope, store_rows, weigh


@triton.jit
def row_sums(
    dy: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    dy_by_row: tl.tensor,
    rows: tl.tensor,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """The sum of `dy · out` over each row: what the softmax's normalizer takes off every gradient of a weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, VALUES, STEP):
        column = begin + tl.arange(0, STEP)
        slopes = load_rows(dy, 0, row.to(tl.int64), rows, dy_by_row, column, VALUES, STEP)
        outputs = load_rows(out, 0, row.to(tl.int64), rows, VALUES, column, VALUES, STEP)
        total += tl.sum(slopes.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(sums + row, total, mask=row < rows)


@triton.jit
def slab_rows(
    group: tl.tensor,
    key: tl.tensor,
    first_block: tl.tensor,
    key_blocks: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> Any:
    """Where rows of a slab begin, by its chunk and the place of its keys."""
    return (group.to(tl.int64) * key_blocks * BLOCK + (key - first_block * BLOCK)) * (blocks * BLOCK)


@triton.jit
def scores_gradient(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dy: tl.tensor,
    bias: tl.tensor,
    lengths: tl.tensor,
    seed: tl.tensor,
    normalizer: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    slopes: tl.tensor,
    q_by_row: tl.tensor,
    k_by_row: tl.tensor,
    v_by_row: tl.tensor,
    dy_by_row: tl.tensor,
    scale: tl.tensor,
    dropout: tl.tensor,
    time: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    reach: tl.tensor,
    first_group: tl.tensor,
    first_block: tl.tensor,
    key_blocks: tl.tensor,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    FUNCTION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    """One block of the weights and of the gradients of scores; zeros in the padding."""
    group = tl.program_id(1)
    base, _, real = chunk_of(first_group + group, lengths, time, size, chunks, LENGTHS)
    query_begin = tl.program_id(0) % blocks * BLOCK
    key_begin = (first_block + tl.program_id(0) // blocks) * BLOCK
    visible = (query_begin < real) & (key_begin < real)
    if CAUSAL:
        visible = visible & (key_begin <= query_begin)
    if visible:
        query, key = query_begin + tl.arange(0, BLOCK), key_begin + tl.arange(0, BLOCK)
        depth = tl.arange(0, Z)
        keys = load_rows(k, base, key, real, k_by_row, depth, WIDTH, Z)
        queries = load_rows(q, base, query, real, q_by_row, depth, WIDTH, Z)
        products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        nearest = tl.minimum(query, real - 1)
        whole = all_see(query_begin, key_begin + BLOCK, real, CAUSAL)
        scores = score(
            products, nearest[None, :], key[:, None], real, whole, bias, reach, scale, FUNCTION, CAUSAL, BIAS
        )
        taken = tl.zeros([BLOCK], tl.float32)
        if FUNCTION == "softmax":
            # Queries of the padding weigh nothing.
            known = tl.load(normalizer + base + query, mask=query < real, other=float("inf"))
            taken = tl.load(sums + base + query, mask=query < real, other=0.0)
            weight = tl.exp2(scores - known[None, :])
            steep = weight
        else:
            weight = tl.where((query < real)[None, :], weigh(scores, FUNCTION), 0.0)
            steep = tl.where((query < real)[None, :], slope(scores, FUNCTION), 0.0)
        if DROPOUT:
            weight = weight * keep(seed, (base + query)[None, :], key[:, None], dropout)
        place = slab_rows(group, key, first_block, key_blocks, blocks, BLOCK)[:, None] + query[None, :]
        tl.store(weights + place, weight.to(weights.dtype.element_ty))
        # Narrow, so that they take up half the registers while the long product is found.
        steep = steep.to(slopes.dtype.element_ty)
        found = tl.zeros([BLOCK, BLOCK], tl.float32)
        for begin in range(0, VALUES, STEP):
            column = begin + tl.arange(0, STEP)
            values = load_rows(v, base, key, real, v_by_row, column, VALUES, STEP)
            outer = load_rows(dy, base, query, real, dy_by_row, column, VALUES, STEP)
            found = tl.dot(values, tl.trans(outer), found, input_precision="ieee")
        if DROPOUT:
            found = found * keep(seed, (base + query)[None, :], key[:, None], dropout)
        found = steep.to(tl.float32) * (found - taken[None, :])
        tl.store(slopes + place, found.to(slopes.dtype.element_ty))


@triton.jit
def rows_gradient(
    matrix: tl.tensor,
    x: tl.tensor,
    lengths: tl.tensor,
    so_far: tl.tensor,
    out: tl.tensor,
    x_by_row: tl.tensor,
    factor: tl.tensor,
    time: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    slices: tl.tensor,
    first_group: tl.tensor,
    first_block: tl.tensor,
    key_blocks: tl.tensor,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TO_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
    FUNCTION: tl.constexpr,
    CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr,
) -> None:
    """The slab times rows of `x`, a slice of its columns: to a block of the slab's keys from all queries that see them.

    Or, not `TO_KEYS`, to a block of queries from the slab's keys that they see, added to what earlier keys gave, which
    waits in `so_far` for the last of them. `SCALED` is for gradients of scores, which are products of queries and keys
    times a number: it comes in here, as half precision may not hold what is left of a gradient after it.
    """
    group = tl.program_id(1)
    base, tokens, real = chunk_of(first_group + group, lengths, time, size, chunks, LENGTHS)
    column = tl.program_id(0) % slices * SLICE + tl.arange(0, SLICE)
    own = tl.program_id(0) // slices
    result = tl.zeros([BLOCK, SLICE], tl.float32)
    if TO_KEYS:
        row_begin = (first_block + own) * BLOCK
        row = row_begin + tl.arange(0, BLOCK)
        stop = tl.where(row_begin < real, real, 0)
        begin = 0
        if CAUSAL:
            begin = row_begin
        place = slab_rows(group, row, first_block, key_blocks, blocks, BLOCK)
        for first in range(begin, stop, STEP):
            other = first + tl.arange(0, STEP)
            left = tl.load(matrix + place[:, None] + other[None, :])
            right = load_rows(x, base, other, real, x_by_row, column, WIDTH, SLICE)
            if SCALED and CAUSAL and FUNCTION != "softmax":
                right = (right.to(tl.float32) / (other + 1).to(tl.float32)[:, None]).to(right.dtype)
            result = tl.dot(left, right, result, input_precision="ieee")
    else:
        # The last queries of a causal chunk have most to do, so they begin.
        row_begin = (blocks - 1 - own) * BLOCK
        row = row_begin + tl.arange(0, BLOCK)
        stop = tl.minimum((first_block + key_blocks) * BLOCK, tl.where(row_begin < real, real, 0))
        if CAUSAL:
            stop = tl.minimum(stop, row_begin + BLOCK)
        for first in range(first_block * BLOCK, stop, STEP):
            other = first + tl.arange(0, STEP)
            place = slab_rows(group, other, first_block, key_blocks, blocks, BLOCK)
            left = tl.load(matrix + place[:, None] + row[None, :])
            right = load_rows(x, base, other, real, x_by_row, column, WIDTH, SLICE)
            result = tl.dot(tl.trans(left), right, result, input_precision="ieee")
        if SCALED and CAUSAL and FUNCTION != "softmax":
            result = result / (row + 1).to(tl.float32)[:, None]
    if SCALED:
        if FUNCTION == "softmax":
            result = result * factor
        elif not CAUSAL:
            result = result / tl.maximum(real, 1).to(tl.float32)
    if not TO_KEYS:
        result += load_rows(so_far, base, row, tl.where(first_block > 0, real, 0), WIDTH, column, WIDTH, SLICE)
        last = first_block + key_blocks == blocks
        store_rows(so_far, base, row, tl.where(last, 0, real), column, result, WIDTH, SLICE)
        tokens = tl.where(last, tokens, 0)
    store_rows(out, base, row, tokens, column, result, WIDTH, SLICE)


@triton.jit
def bias_gradient(
    slopes: tl.tensor,
    lengths: tl.tensor,
    found: tl.tensor,
    time: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    first_group: tl.tensor,
    first_block: tl.tensor,
    key_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LENGTHS: tl.constexpr,
) -> None:
    """What the bias gets from all tiles of a chunk that are equally far from its diagonal; `BLOCK` is cut into these.

    Tiles are added up as they are and then along their diagonals, into `found`, `[chunk, distance, 2, TILE]`: by key
    minus query within a tile where that is not negative, and where it is, that plus `TILE`.
    """
    group, distances = tl.program_id(1), tl.num_programs(0)
    _, _, real = chunk_of(first_group + group, lengths, time, size, chunks, LENGTHS)
    # Tiles of queries less tiles of keys; only those behind the keys see them if causal.
    behind = tl.program_id(0)
    if not CAUSAL:
        behind = behind - (distances - 1) // 2
    row, column = tl.arange(0, TILE), tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], tl.float32)
    begin, stop = first_block * (BLOCK // TILE), (first_block + key_blocks) * (BLOCK // TILE)
    stop = tl.minimum(stop, tl.cdiv(tl.minimum(real, real - behind * TILE), TILE))
    for tile in range(tl.maximum(begin, -behind), stop):
        key, query = tile * TILE + row, (tile + behind) * TILE + column
        place = slab_rows(group, key, first_block, key_blocks, blocks, BLOCK)
        total += tl.load(slopes + place[:, None] + query[None, :]).to(tl.float32)
    place = row[:, None] + column[None, :]
    # Along each row of this one difference of key and query, or that difference less a tile.
    turned = tl.gather(total, place % TILE, 0)
    later = tl.sum(tl.where(place < TILE, turned, 0.0), 1)
    earlier = tl.sum(tl.where(place < TILE, 0.0, turned), 1)
    own = found + ((first_group + group).to(tl.int64) * distances + tl.program_id(0)) * 2 * TILE + row
    tl.store(own, tl.load(own) + later)
    tl.store(own + TILE, tl.load(own + TILE) + earlier)
