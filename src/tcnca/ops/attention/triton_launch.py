"""Launch the kernels of chunked attention: tiles, grids, buffers, and what is launched in which order.

The launches of a call are prepared once for every `Signature`, as that takes longer in Python than short sequences take
on a GPU. Tiles depend on the widths, the chunk size and the dtype, never on the length of a sequence.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.attention import triton_kernels as kernels
from tcnca.ops.driver import max_shared_memory
from tcnca.ops.launcher import ALIGNMENT, Launch, aligned


class Tile(NamedTuple):
    """What one program computes, and how it is run."""

    rows: int
    """Tokens of its result; for the gradient of the scores, both queries and keys."""
    others: int
    """Tokens that it reads in one step; unused for the gradient of the scores."""
    columns: int
    """Value columns of its result; for the gradient of the scores, of one step."""
    num_warps: int
    num_stages: int


# The one place to change after a measurement. Sizes are for the 227 KB of shared memory of data-center GPUs since 2022.
# The gradients of scores and of rows have the same blocks.
HALF = {
    "attended": Tile(64, 64, 256, num_warps=4, num_stages=2),
    "scores_gradient": Tile(128, 128, 64, num_warps=8, num_stages=4),
    "rows_gradient": Tile(128, 64, 256, num_warps=8, num_stages=3),
}
# Up to this many value columns the scores themselves cost more than the products, and small tiles hide that better.
NARROW = 256
HALF_NARROW = HALF | {
    "scores_gradient": Tile(64, 64, 64, num_warps=4, num_stages=3),
    "rows_gradient": Tile(64, 64, 128, num_warps=4, num_stages=3),
}
# For the 99 KB of other GPUs.
LEAN = {
    "attended": Tile(64, 32, 128, num_warps=4, num_stages=2),
    "scores_gradient": Tile(64, 64, 32, num_warps=4, num_stages=2),
    "rows_gradient": Tile(64, 32, 128, num_warps=4, num_stages=2),
}
LARGE_SHARED_MEMORY = 227 * 1024
# Products of float32 in full precision use no tensor core.
FULL = {
    "attended": Tile(32, 32, 64, num_warps=4, num_stages=1),
    "scores_gradient": Tile(32, 32, 32, num_warps=4, num_stages=1),
    "rows_gradient": Tile(32, 32, 64, num_warps=4, num_stages=1),
}
# Bytes of weights and gradients of scores that are in memory at once, unless a single block of keys has more.
SLAB_BYTES = 512 * 2**20
BIAS_TILE = 64  # tokens of a tile whose diagonals are summed, which is slow for larger ones
MAX_GROUPS = 65_535  # of the second dimension of a grid
# From this number of value slices on, the softmax's normalizer is computed first, not again in every slice.
NORMALIZE_FIRST = 2
MIN_SIDE = 16  # of a matrix product
MAX_TOKENS = 256  # in a tile
SUM_ROWS, SUM_STEP = 16, 256
# Plans have a few kilobytes each, but those of the gradients of long full attention, in many slabs, megabytes.
CACHED_PLANS, CACHED_BACKWARD_PLANS = 512, 64


def next_side(width: int) -> int:
    """Return the smallest side of a matrix product that holds a width: a power of two."""
    return max(MIN_SIDE, 1 << (width - 1).bit_length())


class Signature(NamedTuple):
    """What the launches of a call depend on: everything except addresses and values."""

    batch: int
    time: int
    width: int
    d_value: int
    strides: tuple[int, int, int]
    """Of rows of queries, keys and values."""
    dtype: torch.dtype
    max_length: int | None
    """Tokens that the bias covers, if there is one."""
    lengths: torch.dtype | None
    chunk_size: int
    """0 is full attention."""
    causal: bool
    activation: str
    dropout: float
    device: int | None

    @property
    def size(self) -> int:
        """Tokens of a full chunk."""
        return self.chunk_size or self.time

    @property
    def span(self) -> int:
        """Tokens of the longest chunk."""
        return min(self.size, self.time)

    @property
    def chunks(self) -> int:
        """Chunks of a sequence."""
        return -(-self.time // self.size)

    @property
    def groups(self) -> int:
        """Chunks of the whole batch."""
        return self.batch * self.chunks

    @property
    def optional_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of bias, lengths and seed, or of the queries, which are passed in place of those not given."""
        bias = self.dtype if self.max_length is None else torch.float32
        return bias, self.lengths or self.dtype, torch.int64 if self.dropout else self.dtype

    def blocks(self, rows: int) -> int:
        """Return the number of blocks of `rows` in a chunk."""
        return -(-self.span // rows)

    def tile(self, kernel: str, columns: int | None = None) -> Tile:
        """Return the tile of a kernel; its result has `columns` columns, by default those of the values."""
        tile = self._tiles()[kernel]
        if self.chunk_size:
            side = next_side(self.chunk_size)
            tile = tile._replace(rows=min(tile.rows, side), others=min(tile.others, side))
        if kernel == "scores_gradient":
            return tile._replace(columns=min(tile.columns, next_side(self.d_value)))
        # What every slice costs besides its columns: its scores, or reading those that were computed.
        depth = next_side(self.width) if kernel == "attended" else tile.others
        return tile._replace(columns=_slice(tile.columns, depth, self.d_value if columns is None else columns))

    def _tiles(self) -> dict[str, Tile]:
        if self.dtype == torch.float32:
            return FULL
        if max_shared_memory(self.device) < LARGE_SHARED_MEMORY:
            return LEAN
        return HALF if self.d_value > NARROW else HALF_NARROW


def _slice(widest: int, depth: int, columns: int) -> int:
    """Return the width of a slice for which all slices together cost least."""
    side = next_side(columns)
    widths = [width for width in (32, 64, 128, 256, 512) if width <= min(widest, side)] or [side]
    return min(widths, key=lambda width: -(-columns // width) * (width + depth))


class Slab(NamedTuple):
    """The chunks of a batch, and their keys, whose scores are in memory together."""

    group: int
    groups: int
    block: int
    """The first block of keys, in each of the chunks."""
    blocks: int


def slabs(groups: int, blocks: int, block: int, itemsize: int) -> list[Slab]:
    """Divide `groups` chunks of `blocks` blocks into slabs of at most `SLAB_BYTES`, or of a single block of keys."""
    if not groups * blocks:
        return []
    row = 2 * itemsize * block * block * blocks
    keys = max(1, min(blocks, SLAB_BYTES // row))
    together = max(1, min(groups, SLAB_BYTES // (row * blocks), MAX_GROUPS))
    return [
        Slab(group, min(together, groups - group), first, min(keys, blocks - first))
        for group in range(0, groups, together)
        for first in range(0, blocks, keys)
    ]


class Part(NamedTuple):
    """The launches of the gradients through one slab, in their order."""

    scores: Launch
    values: Launch
    keys: Launch
    queries: Launch
    bias: Launch | None


class Backward(NamedTuple):
    """The launches of a call's gradients in their order, and the sizes of the buffers between them."""

    sums: Launch | None
    parts: tuple[Part, ...]
    slab_size: int
    """Elements of a slab: weights, or gradients of scores."""
    bias_shape: tuple[int, ...]
    """Shape of what `bias_gradient` computes."""
    split: bool
    """Whether the keys of a chunk are in several slabs, which add to the same queries."""


def run_forward(stream: int, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output, and the softmax's normalizer, `[batch, time]`; empty for the other activations."""
    signature, inputs = _prepare(*arguments)
    v = inputs[2]
    out = v.new_empty(v.shape)
    softmax = signature.activation == "softmax"
    normalizer = out.new_empty((signature.batch, signature.time) if softmax else (0,), dtype=torch.float32)
    for launch in forward_plan(signature):
        launch(stream, *inputs, out, normalizer)
    return out, normalizer


def run_backward(
    stream: int, dy: Tensor, out: Tensor, normalizer: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and bias; the last is empty unless `arguments` end in True."""
    to_bias = arguments[-1]
    signature, (q, k, v, bias, lengths, seed) = _prepare(*arguments[:-1])
    dy, normalizer = regular_rows(dy.to(signature.dtype)), aligned(normalizer)
    plan = backward_plan(signature, dy.stride(1), to_bias)
    sums = normalizer
    if plan.sums is not None:
        sums = torch.empty_like(normalizer)
        plan.sums(stream, dy, aligned(out), sums)
    dq, dk, dv = q.new_empty(q.shape), q.new_empty(q.shape), v.new_empty(v.shape)
    so_far = q.new_empty(q.shape if plan.split else (0,), dtype=torch.float32)
    weights, slopes = q.new_empty((2, plan.slab_size))
    dbias = q.new_zeros(plan.bias_shape, dtype=torch.float32)
    for part in plan.parts:
        part.scores(stream, q, k, v, dy, bias, lengths, seed, normalizer, sums, weights, slopes)
        part.values(stream, weights, dy, lengths, so_far, dv)
        part.keys(stream, slopes, q, lengths, so_far, dk)
        part.queries(stream, slopes, k, lengths, so_far, dq)
        if part.bias is not None:
            part.bias(stream, slopes, lengths, dbias)
    return dq, dk, dv, _sum_of_bias(dbias, signature) if to_bias else dbias.flatten()


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    chunk_size: int,
    causal: bool,
    activation: str,
    dropout: float,
) -> tuple[Signature, list[Tensor]]:
    """Return the signature of a call, and its tensors: rows at a constant distance, a bias in units of the scores.

    The queries take the place of tensors that are not given.
    """
    max_length = None
    if bias is not None:
        max_length = (bias.shape[0] + 1) // 2
        # The kernels read at most one block of keys beyond the end.
        bias = F.pad(bias.float() * (math.log2(math.e) if activation == "softmax" else 1.0), (0, MAX_TOKENS))
    if lengths is not None:
        lengths = aligned(lengths if lengths.dtype in (torch.int32, torch.int64) else lengths.long())
    q, k, v = regular_rows(q), regular_rows(k), regular_rows(v)
    batch, time, width = q.shape
    signature = Signature(
        batch,
        time,
        width,
        v.shape[2],
        (q.stride(1), k.stride(1), v.stride(1)),
        q.dtype,
        max_length,
        None if lengths is None else lengths.dtype,
        chunk_size,
        causal,
        activation,
        dropout,
        q.device.index,
    )
    return signature, [q, k, v, *(q if part is None else part for part in (bias, lengths, seed))]


def regular_rows(x: Tensor) -> Tensor:
    """Return `x`, or a copy, with contiguous rows at a constant distance, the first of which is aligned."""
    regular = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if regular and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _sum_of_bias(found: Tensor, signature: Signature) -> Tensor:
    """Return the gradient of the whole bias from what `bias_gradient` computes."""
    assert signature.max_length is not None
    span = signature.span
    later, earlier = found.sum(0).flip(0).unbind(1)
    total = (F.pad(later, (0, 0, 1, 0)) + F.pad(earlier, (0, 0, 0, 1))).flatten()
    begin = signature.blocks(later.shape[1]) * later.shape[1] - span + 1
    seen = total[begin : begin + 2 * span - 1]
    beyond = signature.max_length - span
    return F.pad(seen, (beyond, beyond + 2 * span - 1 - seen.shape[0]))


@functools.lru_cache(CACHED_PLANS)
def forward_plan(signature: Signature) -> list[Launch]:
    """Prepare the launches of a call; the first computes the softmax's normalizer, if the last does not."""
    tile = signature.tile("attended")
    slices = -(-signature.d_value // tile.columns)
    softmax = signature.activation == "softmax"
    first = softmax and slices >= NORMALIZE_FIRST
    narrow = tile._replace(columns=MIN_SIDE)
    normalize = [_attended(signature, narrow, 1, NORMALIZE=True, ATTEND=False)] if first else []
    return [*normalize, _attended(signature, tile, slices, NORMALIZE=softmax and not first, ATTEND=True)]


@functools.lru_cache(CACHED_BACKWARD_PLANS)
def backward_plan(signature: Signature, stride: int, to_bias: bool) -> Backward:
    """Prepare the launches of a call's gradients; rows of the output's gradient are `stride` apart."""
    s = signature
    block = s.tile("scores_gradient").rows
    blocks = s.blocks(block)
    found = slabs(s.groups, blocks, block, s.dtype.itemsize)
    tile = min(block, BIAS_TILE)
    distances = (s.blocks(tile) if s.causal else max(0, 2 * s.blocks(tile) - 1)) if to_bias else 0
    parts = []
    for slab in found:
        part = Part(
            _scores_gradient(s, stride, slab),
            _rows_gradient(s, slab, s.d_value, stride, to_keys=True, scaled=False),
            _rows_gradient(s, slab, s.width, s.strides[0], to_keys=True, scaled=True),
            _rows_gradient(s, slab, s.width, s.strides[1], to_keys=False, scaled=True),
            _bias_gradient(s, slab, distances) if distances else None,
        )
        parts.append(part)
    return Backward(
        _row_sums(s, stride) if s.activation == "softmax" else None,
        tuple(parts),
        max((slab.groups * slab.blocks for slab in found), default=0) * blocks * block**2,
        (s.groups, distances, 2, tile),
        any(slab.blocks < blocks for slab in found),
    )


def _launch(
    signature: Signature,
    kernel: Any,
    grid: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    numbers: dict[str, int | float],
    constants: dict[str, object],
    tile: Tile | None = None,
) -> Launch:
    """Prepare a launch; numbers and constants may contain more than the kernel takes."""
    # Rows are read in steps of 16 bytes, if all of them start at one.
    grain = ALIGNMENT // signature.dtype.itemsize
    regular = not any(stride % grain for name, stride in numbers.items() if "by_" in name)
    return Launch(
        kernel,
        grid,
        dtypes,
        tuple(numbers[name] for name in kernel.arg_names if name in numbers),
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        device=signature.device,
        num_warps=4 if tile is None else tile.num_warps,
        num_stages=3 if tile is None else tile.num_stages,
        stride_divisor=grain if regular else 1,
    )


def _numbers(signature: Signature, slab: Slab | None = None, **more: int | float) -> dict[str, int | float]:
    s = signature
    numbers: dict[str, int | float] = {
        "scale": s.width**-0.5 * math.log2(math.e),
        "factor": s.width**-0.5,
        "dropout": s.dropout,
        "time": s.time,
        "size": s.span,
        "chunks": s.chunks,
        "max_length": 1 if s.max_length is None else s.max_length,
        "q_by_row": s.strides[0],
        "k_by_row": s.strides[1],
        "v_by_row": s.strides[2],
    }
    if slab is not None:
        numbers |= {"first_group": slab.group, "first_block": slab.block, "key_blocks": slab.blocks}
    return numbers | more


def _constants(signature: Signature, **more: object) -> dict[str, object]:
    return {
        "WIDTH": signature.width,
        "VALUES": signature.d_value,
        "Z": next_side(signature.width),
        "ACTIVATION": signature.activation,
        "CAUSAL": signature.causal,
        "BIAS": signature.max_length is not None,
        "LENGTHS": signature.lengths is not None,
        "DROPOUT": signature.dropout > 0.0,
        **more,
    }


def _attended(signature: Signature, tile: Tile, slices: int, **parts: bool) -> Launch:
    s = signature
    blocks = s.blocks(tile.rows)
    return _launch(
        s,
        kernels.attended,
        (blocks * s.groups, slices),
        (*[s.dtype] * 3, *s.optional_dtypes, s.dtype, torch.float32),
        _numbers(s, blocks=blocks),
        _constants(s, SLICE=tile.columns, QUERIES=tile.rows, KEYS=tile.others, **parts),
        tile,
    )


def _row_sums(signature: Signature, stride: int) -> Launch:
    s = signature
    rows = s.batch * s.time
    return _launch(
        s,
        kernels.row_sums,
        (-(-rows // SUM_ROWS), 1),
        (s.dtype, s.dtype, torch.float32),
        {"dy_by_row": stride, "rows": rows},
        {"VALUES": s.d_value, "ROWS": SUM_ROWS, "STEP": min(SUM_STEP, next_side(s.d_value))},
    )


def _scores_gradient(signature: Signature, stride: int, slab: Slab) -> Launch:
    s = signature
    tile = s.tile("scores_gradient")
    blocks = s.blocks(tile.rows)
    return _launch(
        s,
        kernels.scores_gradient,
        (blocks * slab.blocks, slab.groups),
        (*[s.dtype] * 4, *s.optional_dtypes, *[torch.float32] * 2, *[s.dtype] * 2),
        _numbers(s, slab, dy_by_row=stride, blocks=blocks),
        _constants(s, BLOCK=tile.rows, STEP=tile.columns),
        tile,
    )


def _rows_gradient(
    signature: Signature, slab: Slab, columns: int, stride: int, *, to_keys: bool, scaled: bool
) -> Launch:
    s = signature
    tile = s.tile("rows_gradient", columns)
    blocks, slices = s.blocks(tile.rows), -(-columns // tile.columns)
    options = {"BLOCK": tile.rows, "STEP": tile.others, "TO_KEYS": to_keys, "SCALED": scaled}
    return _launch(
        s,
        kernels.rows_gradient,
        (slices * (slab.blocks if to_keys else blocks), slab.groups),
        (s.dtype, s.dtype, s.optional_dtypes[1], torch.float32, s.dtype),
        _numbers(s, slab, x_by_row=stride, blocks=blocks, slices=slices),
        _constants(s, WIDTH=columns, SLICE=tile.columns, **options),
        tile,
    )


def _bias_gradient(signature: Signature, slab: Slab, distances: int) -> Launch:
    s = signature
    block = s.tile("scores_gradient").rows
    return _launch(
        s,
        kernels.bias_gradient,
        (distances, slab.groups),
        (s.dtype, s.optional_dtypes[1], torch.float32),
        _numbers(s, slab, blocks=s.blocks(block)),
        _constants(s, BLOCK=block, TILE=min(block, BIAS_TILE)),
    )
