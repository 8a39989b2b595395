"""What the kernels of chunked attention are started with: tiles, grids, and all arguments but the addresses.

A plan is made once for every shape, as making it takes longer in Python than short sequences take on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from tcnca.ops.attention.triton import tiles
from tcnca.ops.attention.triton.backward import bias_gradient, row_sums, rows_gradient, scores_gradient
from tcnca.ops.attention.triton.forward import attended
from tcnca.ops.attention.triton.tiles import Slab, Tile, padded, slabs, tile_of
from tcnca.ops.triton_kernels.start import ALIGNMENT, Launch

SUM_ROWS, SUM_STEP = 16, 256
# Plans that are kept: of a few kilobytes each, but of the gradients of long full attention, in many slabs, megabytes.
KEPT, KEPT_BACKWARD = 512, 64


@functools.cache
def memory_of(device: int | None) -> int:
    """Bytes of shared memory that a program can have on the CUDA device of this number, or in the interpreter."""
    if device is None:
        return tiles.ROOM
    found: Any = torch.cuda.get_device_properties(device)
    return int(found.shared_memory_per_block_optin)


class Call(NamedTuple):
    """What a call is like: all but its addresses."""

    batch: int
    time: int
    width: int
    values: int
    strides: tuple[int, int, int]
    """Of rows of queries, keys and values."""
    dtype: torch.dtype
    reach: int | None
    """Of the bias, if there is one."""
    lengths: torch.dtype | None
    chunk: int
    """0 is full attention."""
    causal: bool
    function: str
    dropout: float
    device: int | None

    @property
    def size(self) -> int:
        """Tokens of a full chunk."""
        return self.chunk or self.time

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
    def optional(self) -> tuple[torch.dtype, ...]:
        """The types of bias, lengths and seed, where there is none that of the queries, which stand in."""
        bias = self.dtype if self.reach is None else torch.float32
        return bias, self.lengths or self.dtype, torch.int64 if self.dropout else self.dtype

    def tile(self, kernel: str, result: int | None = None) -> Tile:
        """The tile of a kernel for this call; see `tile_of`."""
        return tile_of(kernel, self.width, self.values, self.chunk, self.dtype, memory_of(self.device), result)

    def blocks(self, rows: int) -> int:
        """Blocks of `rows` in a chunk."""
        return -(-self.span // rows)


class Forward(NamedTuple):
    """The launches of a call in their order; the first finds the softmax's normalizer, where the second does not."""

    normalize: Launch | None
    attend: Launch


class Part(NamedTuple):
    """The launches of the gradients through one slab, in their order."""

    scores: Launch
    values: Launch
    keys: Launch
    queries: Launch
    bias: Launch | None


class Backward(NamedTuple):
    """The launches of a call's gradients in their order, and what the buffers between them are like."""

    sums: Launch | None
    parts: tuple[Part, ...]
    held: int
    """Numbers of a slab: weights, or gradients of scores."""
    distances: tuple[int, ...]
    """Shape of what `bias_gradient` finds."""
    cut: bool
    """Whether the keys of a chunk are in several slabs, which add to the same queries."""


@functools.lru_cache(KEPT)
def forward(call: Call) -> Forward:
    """The plan of a call."""
    tile = call.tile("attended")
    slices = -(-call.values // tile.columns)
    softmax = call.function == "softmax"
    first = softmax and slices >= tiles.NORMALISE_FIRST
    alone = _attended(call, tile._replace(columns=tiles.LEAST), 1, NORMALISE=True, ATTEND=False) if first else None
    return Forward(alone, _attended(call, tile, slices, NORMALISE=softmax and not first, ATTEND=True))


@functools.lru_cache(KEPT_BACKWARD)
def backward(call: Call, stride: int, to_bias: bool) -> Backward:
    """The plan of the gradients of a call; rows of the output's gradient are `stride` apart."""
    block = call.tile("scores_gradient").rows
    blocks = call.blocks(block)
    found = slabs(call.groups, blocks, block, call.dtype.itemsize, tiles.SLAB)
    tile = min(block, tiles.BIAS)
    apart = (call.blocks(tile) if call.causal else max(0, 2 * call.blocks(tile) - 1)) if to_bias else 0
    return Backward(
        _row_sums(call, stride) if call.function == "softmax" else None,
        tuple(_part(call, stride, slab, apart) for slab in found),
        max((slab.groups * slab.blocks for slab in found), default=0) * blocks * block**2,
        (call.groups, apart, 2, tile),
        any(slab.blocks < blocks for slab in found),
    )


def _launch(
    call: Call,
    kernel: Any,
    grid: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    numbers: dict[str, int | float],
    constants: dict[str, object],
    tile: Tile | None = None,
) -> Launch:
    """Numbers and constants may hold more than the kernel takes."""
    ordered = tuple(numbers[name] for name in kernel.arg_names if name in numbers)
    # Rows are read in steps of 16 bytes, if all of them start at one.
    grain = ALIGNMENT // call.dtype.itemsize
    aligned = not any(stride % grain for name, stride in numbers.items() if "by_" in name)
    warps, stages = (4, 3) if tile is None else (tile.warps, tile.stages)
    taken = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Launch(kernel, grid, dtypes, ordered, taken, warps, call.device, stages, grain if aligned else 1)


def _numbers(call: Call, **more: int | float) -> dict[str, int | float]:
    """What kernels are told of numbers: see `score`."""
    scale = call.width**-0.5 * math.log2(math.e)
    reach = 1 if call.reach is None else call.reach
    places = {"time": call.time, "size": call.span, "chunks": call.chunks, "reach": reach}
    by_row = dict(zip(("q_by_row", "k_by_row", "v_by_row"), call.strides, strict=True))
    return {"scale": scale, "factor": call.width**-0.5, "dropout": call.dropout, **places, **by_row, **more}


def _constants(call: Call, **more: object) -> dict[str, object]:
    """What is compiled into kernels."""
    return {
        "WIDTH": call.width,
        "VALUES": call.values,
        "Z": padded(call.width),
        "FUNCTION": call.function,
        "CAUSAL": call.causal,
        "BIAS": call.reach is not None,
        "LENGTHS": call.lengths is not None,
        "DROPOUT": call.dropout > 0.0,
        **more,
    }


def _attended(call: Call, tile: Tile, slices: int, **parts: bool) -> Launch:
    blocks = call.blocks(tile.rows)
    return _launch(
        call,
        attended,
        (blocks * call.groups, slices),
        (*[call.dtype] * 3, *call.optional, call.dtype, torch.float32),
        _numbers(call, blocks=blocks),
        _constants(call, SLICE=tile.columns, QUERIES=tile.rows, KEYS=tile.others, **parts),
        tile,
    )


def _row_sums(call: Call, stride: int) -> Launch:
    rows = call.batch * call.time
    return _launch(
        call,
        row_sums,
        (-(-rows // SUM_ROWS), 1),
        (call.dtype, call.dtype, torch.float32),
        {"dy_by_row": stride, "rows": rows},
        {"VALUES": call.values, "ROWS": SUM_ROWS, "STEP": min(SUM_STEP, padded(call.values))},
    )


def _part(call: Call, stride: int, slab: Slab, apart: int) -> Part:
    """The launches for a slab; `apart` is how many distances its tiles have, for the bias."""
    return Part(
        _scores_gradient(call, stride, slab),
        _rows_gradient(call, slab, call.values, stride, to_keys=True, scaled=False),
        _rows_gradient(call, slab, call.width, call.strides[0], to_keys=True, scaled=True),
        _rows_gradient(call, slab, call.width, call.strides[1], to_keys=False, scaled=True),
        _bias_gradient(call, slab, apart) if apart else None,
    )


def _place(slab: Slab) -> dict[str, int]:
    return {"first_group": slab.group, "first_block": slab.block, "key_blocks": slab.blocks}


def _scores_gradient(call: Call, stride: int, slab: Slab) -> Launch:
    tile = call.tile("scores_gradient")
    blocks = call.blocks(tile.rows)
    return _launch(
        call,
        scores_gradient,
        (blocks * slab.blocks, slab.groups),
        (*[call.dtype] * 4, *call.optional, *[torch.float32] * 2, *[call.dtype] * 2),
        _numbers(call, dy_by_row=stride, blocks=blocks, **_place(slab)),
        _constants(call, BLOCK=tile.rows, STEP=tile.columns),
        tile,
    )


def _rows_gradient(call: Call, slab: Slab, width: int, stride: int, *, to_keys: bool, scaled: bool) -> Launch:
    tile = call.tile("rows_gradient", width)
    blocks, slices = call.blocks(tile.rows), -(-width // tile.columns)
    return _launch(
        call,
        rows_gradient,
        (slices * (slab.blocks if to_keys else blocks), slab.groups),
        (call.dtype, call.dtype, call.optional[1], torch.float32, call.dtype),
        _numbers(call, x_by_row=stride, blocks=blocks, slices=slices, **_place(slab)),
        _constants(
            call,
            WIDTH=width,
            SLICE=tile.columns,
            BLOCK=tile.rows,
            STEP=tile.others,
            TO_KEYS=to_keys,
            SCALED=scaled,
        ),
        tile,
    )


def _bias_gradient(call: Call, slab: Slab, apart: int) -> Launch:
    block = call.tile("scores_gradient").rows
    return _launch(
        call,
        bias_gradient,
        (apart, slab.groups),
        (call.dtype, call.optional[1], torch.float32),
        _numbers(call, blocks=call.blocks(block), **_place(slab)),
        _constants(call, BLOCK=block, TILE=min(block, tiles.BIAS)),
    )
