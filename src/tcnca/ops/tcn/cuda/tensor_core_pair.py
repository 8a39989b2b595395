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
MAX_ROWS = 14 * ROW_STEP  # in shared memory, so that a multiprocessor has room for two blocks
ZERO_BYTES = 128  # of zeros behind the rows
MAX_MEMORY = MAX_ROWS * ROW_BYTES + ZERO_BYTES
MAX_KERNEL_SIZE = 17
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


def cut_time(call: Call, pair: int) -> Tiles | None:
    """Return the tiles of a pair of blocks, or None if they would be mostly halo."""
    block, dilation = call.block, call.dilations[2 * pair]
    chain = -(-call.time // dilation)
    rows = -(-chain // ROW_STEP) * ROW_STEP
    if memory_rows(block, rows, rows) <= MAX_ROWS:
        return Tiles(rows, 0, rows, 1, *cut_chains(rows, call.settings.factor))
    before, after = (
        -(-taps * (1 + call.settings.factor) // 8) * 8 for taps in (block.kernel_size - 1 - block.ahead, block.ahead)
    )
    rows = MAX_ROWS if block.causal else (MAX_ROWS + before + after) // 2 // ROW_STEP * ROW_STEP
    own = rows - before - after
    if 2 * own < rows:
        return None
    return Tiles(rows, before, own, -(-chain // own), *cut_chains(own, call.settings.factor))


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


def memory_rows(block: Block, rows: int, own: int) -> int:
    """Return the rows of shared memory of a tile: blocks that look ahead cannot compute in place."""
    return rows if block.causal else rows + own


def forward_fits(call: Call) -> bool:
    """Return whether `Forward` can run a call."""
    block = call.block
    if block.dtype == torch.float32 or block.kernel_size > MAX_KERNEL_SIZE or call.depth % 2:
        return False
    if call.channels % 8 or not call.x.aligned(8) or driver.max_shared_memory(call.device) < MAX_MEMORY:
        return False
    cuts = [cut_time(call, pair) for pair in range(call.depth // 2)]
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
        call, tiles = self._call, cut_time(self._call, pair)
        assert tiles is not None
        x = call.x if pair == 0 else call.packed
        block = dataclasses.replace(call.block, omega=call.omega and 2 * pair + 2 == call.depth)
        kernel = nvrtc.load(source(block), "tensor_core_pair", MAX_MEMORY, call.device)
        # A factor beyond the chain has the same effect as any larger one.
        factors = (call.dilations[2 * pair], min(call.settings.factor, tiles.rows))
        numbers = (call.time, call.channels, *x.steps, *call.x.steps, *factors, *tiles, 2 * pair)
        memory = memory_rows(block, tiles.rows, tiles.own) * ROW_BYTES + ZERO_BYTES
        return driver.Launch(
            kernel,
            (_grid(call, pair, tiles), 1, 1),
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
