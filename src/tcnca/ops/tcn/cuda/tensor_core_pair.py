"""Kernels on the tensor cores that run two blocks in one pass over memory, forward."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from tcnca.ops import driver
from tcnca.ops.tcn.cuda import nvrtc
from tcnca.ops.tcn.cuda.call import Block, Call, ForwardPointers

ENABLED = False  # whether `forward_plan` uses these kernels
WARPS = 4  # per block of threads, each with eight channels
ROW_BYTES = 16 * WARPS
ROW_STEP = 128  # rows are 16 segments of groups of eight steps
MAX_ROWS = 13 * ROW_STEP  # in shared memory, so that a multiprocessor has room for two blocks
FIXED_BYTES = WARPS * 2 * (8 * 3 + 6) * 32 + 128  # of kernels and zeros before the rows
MAX_MEMORY = FIXED_BYTES + MAX_ROWS * ROW_BYTES
MAX_KERNEL_SIZE = 17
ROWS_PER_BLOCK = 1536  # of small tiles, so that reading the kernels takes little of the time
MAX_BLOCKS = (1 << 31) - 1  # of a grid


class Tiles(NamedTuple):
    """How a pair of blocks is cut.

    rows: of a tile.
    before: rows on which only later ones depend.
    own: rows whose outputs the tile computes, after those before; the rest is behind them.
    segments: tiles of a chain.
    steps: of the chains of the second block that are computed in one go.
    items: as many times.
    """

    rows: int
    before: int
    own: int
    segments: int
    steps: int
    items: int


def source(block: Block) -> nvrtc.Source:
    """Return the source of `tensor_core_pair`."""
    # The others need more registers than four blocks on a multiprocessor leave.
    small = block.causal and block.activation == "none" and not block.bias and not block.dropout
    resident = 4 if small else 3
    macros = block.macros(WARPS=WARPS, PARTS=WARPS, RESIDENT=resident)
    return nvrtc.Source(("common.cuh", "tensor_core.cuh", "tensor_core_pair.cu"), macros)


def cut_time(call: Call, pair: int, resident: int) -> Tiles | None:
    """Return the tiles of a pair of blocks that are fastest if `resident` run at a time, or None if none fits."""
    block, factor = call.block, call.settings.factor
    chain = -(-call.time // call.dilations[2 * pair])
    before, after = (-(-taps * (1 + factor) // 8) * 8 for taps in (block.kernel_size - 1 - block.ahead, block.ahead))
    whole = -(-chain // ROW_STEP) * ROW_STEP
    sizes = [(whole, 0, whole)]
    sizes += [(rows, before, rows - before - after) for rows in range(ROW_STEP, MAX_ROWS + 1, ROW_STEP)]
    found = [
        Tiles(rows, first, own, -(-chain // own), *cut_chains(own, factor))
        for rows, first, own in sizes
        # Where most of a tile is halo, one block after the other is faster.
        if 2 * own >= rows and memory_rows(block, rows, own) <= MAX_ROWS
    ]

    def cost(tiles: Tiles) -> int:
        return -(-_grid(call, pair, tiles) // resident) * (tiles.rows + ROW_STEP // 2)

    return min(found, key=cost, default=None)


def memory_rows(block: Block, rows: int, own: int) -> int:
    """Return the rows of shared memory of a tile: blocks that look ahead cannot compute in place."""
    return rows if block.causal else rows + own


def cut_chains(rows: int, factor: int) -> tuple[int, int]:
    """Return the steps of a segment of the second block's chains, and the number of segments of all chains.

    16 segments are computed at a time, eight steps of each after the ones before.
    """
    factor = min(factor, rows)
    groups = -(-rows // (8 * factor))  # of eight steps in a chain

    def cost(length: int) -> int:
        return -(-factor * -(-groups // length) // 16) * (2 * length + 1)

    length = min(range(1, groups + 1), key=cost)
    return 8 * length, factor * -(-groups // length)


def forward_fits(call: Call) -> bool:
    """Return whether `Forward` can run a call."""
    block = call.block
    if block.dtype == torch.float32 or block.kernel_size > MAX_KERNEL_SIZE or call.depth % 2:
        return False
    if call.channels % 8 or not call.x.aligned(8) or driver.max_shared_memory(call.device) < MAX_MEMORY:
        return False
    cuts = [cut_time(call, pair, 1) for pair in range(call.depth // 2)]
    return all(cut is not None and _grid(call, pair, cut) <= MAX_BLOCKS for pair, cut in enumerate(cuts))


def _grid(call: Call, pair: int, tiles: Tiles) -> int:
    groups = -(-call.channels // (8 * WARPS))
    return call.batch * call.dilations[2 * pair] * tiles.segments * groups


class Forward:
    """All blocks, one launch for two of them."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._launches = [self._launch(pair) for pair in range(call.depth // 2)]
        self.needs_scratch = call.depth > 2

    def _launch(self, pair: int) -> driver.Launch:
        call = self._call
        x = call.x if pair == 0 else call.packed
        block = dataclasses.replace(call.block, omega=call.omega and 2 * pair + 2 == call.depth)
        kernel = nvrtc.load(source(block), "tensor_core_pair", MAX_MEMORY, call.device)
        resident = nvrtc.resident_blocks(kernel, 32 * WARPS, call.device)
        tiles = cut_time(call, pair, resident)
        assert tiles is not None
        total, groups = _grid(call, pair, tiles), -(-call.channels // (8 * WARPS))
        turns = max(min(ROWS_PER_BLOCK // tiles.rows, total // (4 * resident)), 1)
        # The tiles of a block have the same channels.
        grid = -(-total // turns // groups) * groups
        # A factor beyond the chain has the same effect as any larger one.
        factors = (call.dilations[2 * pair], min(call.settings.factor, tiles.rows))
        numbers = (call.time, call.channels, *x.steps, *call.x.steps, *factors, *tiles, total, 2 * pair)
        memory = FIXED_BYTES + memory_rows(block, tiles.rows, tiles.own) * ROW_BYTES
        return driver.Launch(
            kernel,
            (grid, 1, 1),
            (32 * WARPS, 1, 1),
            9,
            (*numbers, *call.dropout_arguments),
            as_struct=True,
            shared_memory=memory,
        )

    def run(self, stream: int, p: ForwardPointers) -> None:
        """Launch the kernels."""
        call, x = self._call, p.x
        size, channels, taps = call.num_bytes, call.channels, call.block.kernel_size
        for pair, launch in enumerate(self._launches):
            later = len(self._launches) - 1 - pair
            inner = p.inner + 2 * pair * size if call.keep else 0
            # If nothing is kept for the backward pass, one tensor alternates with the output.
            between = inner + size if call.keep else p.inner
            out = between if (later > 0 if call.keep else later % 2 == 1) else p.y
            weight, bias = p.weight + 8 * pair * channels * taps, p.bias + 8 * pair * channels
            launch(stream, x, weight, bias, out, inner, p.lengths, p.seed, p.x, p.omega)
            x = out
