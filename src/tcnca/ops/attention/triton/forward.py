"""Chunked attention's kernel for the output, and for the normalizer that the softmax's gradients need."""

# Compile-time constants are in capitals.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tcnca.ops.attention.triton.shared import all_see, chunk_of, keep, load_rows, score, store_rows, weigh


@triton.jit
def attended(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    bias: tl.tensor,
    lengths: tl.tensor,
    seed: tl.tensor,
    out: tl.tensor,
    normalizer: tl.tensor,
    q_by_row: tl.tensor,
    k_by_row: tl.tensor,
    v_by_row: tl.tensor,
    scale: tl.tensor,
    dropout: tl.tensor,
    time: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    reach: tl.tensor,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    Z: tl.constexpr,
    SLICE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FUNCTION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr,
    NORMALISE: tl.constexpr,
    ATTEND: tl.constexpr,
) -> None:
    """A block of queries over all keys of its chunk that it may see, for one slice of the values.

    `NORMALISE` finds the softmax's normalizer, the log₂ of its sum, along the way, as programs of the first slice
    store it; without it the normalizer is read. `ATTEND` off finds nothing else.
    """
    # The last blocks of a causal chunk have most to do, so they begin.
    block = blocks - 1 - tl.program_id(0) % blocks
    base, tokens, real = chunk_of(tl.program_id(0) // blocks, lengths, time, size, chunks, LENGTHS)
    query = block * QUERIES + tl.arange(0, QUERIES)
    nearest = tl.minimum(query, real - 1)
    depth = tl.arange(0, Z)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    stop = tl.where(block * QUERIES < real, real, 0)
    if CAUSAL:
        stop = tl.minimum(stop, (block + 1) * QUERIES)
    queries = load_rows(q, base, query, real, q_by_row, depth, WIDTH, Z)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, SLICE], tl.float32)
    known = total
    if FUNCTION == "softmax" and not NORMALISE:
        known = tl.load(normalizer + base + query, mask=query < real, other=float("inf"))
    for begin in range(0, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        keys = load_rows(k, base, key, real, k_by_row, depth, WIDTH, Z)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        whole = all_see(block * QUERIES, begin + KEYS, real, CAUSAL)
        scores = score(
            products, nearest[:, None], key[None, :], real, whole, bias, reach, scale, FUNCTION, CAUSAL, BIAS
        )
        if FUNCTION != "softmax":
            weights = weigh(scores, FUNCTION)
        elif NORMALISE:
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
                weights = weights * keep(seed, (base + query)[:, None], key[None, :], dropout)
            values = load_rows(v, base, key, real, v_by_row, column, VALUES, SLICE)
            result = tl.dot(weights.to(values.dtype), values, result, input_precision="ieee")
    if FUNCTION == "softmax" and NORMALISE:
        total = tl.where(query < real, total, 1.0)
        if tl.program_id(1) == 0:
            found = tl.where(query < real, highest + tl.log2(total), 0.0)
            tl.store(normalizer + base + query, found, mask=query < tokens)
        result = result / total[:, None]
    if ATTEND:
        # Queries of the padding were asked as well.
        result = tl.where((query < real)[:, None], result, 0.0)
        store_rows(out, base, query, tokens, column, result, VALUES, SLICE)
