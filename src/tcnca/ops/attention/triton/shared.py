"""What the kernels of chunked attention share: where a program works, what it loads, scores and weights.

Tokens are rows: row `sequence · time + token` of a matrix whose rows lie `stride` numbers apart. Places count within a
chunk. Scores of the softmax are in units of ln 2, so that their exponential is a power of two.
"""

# Compile-time constants are in capitals, and the compiler knows no conditional expressions on blocks.
# ruff: noqa: N803, SIM108
# mypy: disable-error-code="untyped-decorator, assignment"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tcnca.ops.kernels import INTERPRETED

IN_PYTHON = tl.constexpr(INTERPRETED)


@triton.jit
def chunk_of(
    group: tl.tensor, lengths: tl.tensor, time: tl.tensor, size: tl.tensor, chunks: tl.tensor, LENGTHS: tl.constexpr
) -> Any:
    """Of the chunk number `group`, counted through the batch: its first row, its tokens and the real ones of these."""
    sequence = group // chunks
    start = (group % chunks) * size
    end = time
    if LENGTHS:
        end = tl.minimum(time, tl.load(lengths + sequence).to(tl.int32))
    base = sequence.to(tl.int64) * time + start
    return base, tl.minimum(size, time - start), tl.maximum(tl.minimum(size, end - start), 0)


@triton.jit
def load_rows(
    x: tl.tensor,
    base: tl.tensor,
    place: tl.tensor,
    real: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    """`[places, columns]` of a chunk whose first row is `base`; zeros in the padding and beyond the width."""
    inside = (place < real)[:, None]
    if WIDTH % COLUMNS != 0:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(x + (base + place)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    x: tl.tensor,
    base: tl.tensor,
    place: tl.tensor,
    tokens: tl.tensor,
    column: tl.tensor,
    value: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write `value` to the rows of a chunk in a matrix without gaps."""
    inside = (place < tokens)[:, None]
    if WIDTH % COLUMNS != 0:
        inside = inside & (column < WIDTH)[None, :]
    tl.store(x + (base + place)[:, None] * WIDTH + column[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def may_see(query: tl.tensor, key: tl.tensor, real: tl.tensor, CAUSAL: tl.constexpr) -> Any:
    """Whether queries see keys, by their places."""
    if CAUSAL:
        seen = key <= query
    else:
        seen = (key < real) & (query >= 0)
    return seen


@triton.jit
def all_see(query: tl.tensor, keys: tl.tensor, real: tl.tensor, CAUSAL: tl.constexpr) -> Any:
    """Whether all queries from place `query` on see all keys before place `keys`."""
    if CAUSAL:
        keys = keys - 1
        seen = (keys <= query) & (keys < real)
    else:
        seen = keys <= real
    return seen


@triton.jit
def look_up(bias: tl.tensor, query: tl.tensor, key: tl.tensor, reach: tl.tensor) -> Any:
    """The bias of each pair; behind its end there must be as many numbers as a block has keys."""
    if IN_PYTHON:
        found = tl.load(bias + (key - query + reach - 1))
    else:
        # The compiler would have a block of loads run in another order of threads than its sum, with an exchange
        # through shared memory for each, which takes longer than the loads.
        address = (bias + (reach - 1 - query)).to(tl.int64) + key.to(tl.int64) * 4
        found = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def score(
    products: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    real: tl.tensor,
    whole: tl.tensor,
    bias: tl.tensor,
    reach: tl.tensor,
    scale: tl.tensor,
    FUNCTION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
) -> Any:
    """Scores of queries and keys, by place, in either order of axes; -∞ where a query may not look.

    No query is beyond the last real token: those of the padding count as there, and are thrown away. `whole` says that
    every one of the queries sees every one of the keys.
    """
    if FUNCTION == "softmax":
        scaled = products * scale
    elif CAUSAL:
        scaled = products * (1.0 / (query + 1).to(tl.float32))
    else:
        scaled = products * (1.0 / real.to(tl.float32))
    if BIAS:
        scaled += look_up(bias, query, key, reach)
    if not whole:
        scaled = tl.where(may_see(query, key, real, CAUSAL), scaled, float("-inf"))
    return scaled


@triton.jit
def weigh(scores: tl.tensor, FUNCTION: tl.constexpr) -> Any:
    """The weights of scores for the functions without a normalizer."""
    if FUNCTION == "relu2":
        positive = tl.maximum(scores, 0.0)
        weights = positive * positive
    else:
        weights = 0.5 + 0.5 * tl.erf((scores - 0.707107) * 2.506626424383798)
    return weights


@triton.jit
def slope(scores: tl.tensor, FUNCTION: tl.constexpr) -> Any:
    """The derivative of `weigh`."""
    if FUNCTION == "relu2":
        found = 2.0 * tl.maximum(scores, 0.0)
    else:
        from_mean = (scores - 0.707107) * 2.506626424383798
        found = 1.4142125184828964 * tl.exp(-from_mean * from_mean)
    return found


@triton.jit
def mix(x: tl.tensor) -> Any:
    """A number in which every bit of `x` moves every bit, for 32 bits."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep(seed: tl.tensor, query: tl.tensor, key: tl.tensor, dropout: tl.tensor) -> Any:
    """What dropout multiplies a weight by: 0, or what makes up for the dropped.

    `query` counts rows of the whole batch, `key` places. The number depends on nothing else, so it is the same
    in every kernel.
    """
    number = tl.load(seed)
    of_query = mix(query.to(tl.uint32) ^ number.to(tl.uint32)) ^ (number >> 32).to(tl.uint32)
    drawn = mix(mix(key.to(tl.uint32)) ^ of_query)
    # 24 bits are what float32 tells apart.
    uniform = (drawn >> 8).to(tl.float32) * 5.9604644775390625e-08
    return tl.where(uniform < dropout, 0.0, 1.0 / (1.0 - dropout))
