"""Launches of the tensor-core kernels: how they cut the time axis, and with which arguments they start."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.tcn.cuda import compiled
from tcnca.ops.tcn.cuda.call import Call, Strides
from tcnca.ops.tcn.cuda.source import MOST_LAYERS, Block, TileBackward, TileForward

# The most blocks of eight steps that an output may need, for the kernels to keep them in registers.
MOST_FORWARD, MOST_BACKWARD = 5, 3
FORWARD, BACKWARD = TileForward(), TileBackward()
LONG_FORWARD = TileForward(resident=1)  # for outputs that need more than three blocks, and so more registers
COUNTERS = 4096
_counters: dict[int, Tensor] = {}
_streams: dict[tuple[int, int], int] = {}
_seen, _captured = itertools.count(), itertools.count()


def forward_fits(call: Call) -> bool:
    """Whether `TilesForward` can run a call."""
    block = call.block
    fits = block.blocks <= MOST_FORWARD and call.depth <= MOST_LAYERS and _tiled(call, call.x)
    return fits and _forward_layout(block).memory(block) <= compiled.most_memory(call.device)


def backward_fits(call: Call, dy: Strides) -> bool:
    """Whether `TilesBackward` can run the gradients of a call."""
    block = call.block
    fits = block.blocks <= MOST_BACKWARD and call.depth <= MOST_LAYERS and _tiled(call, call.x, dy)
    return fits and BACKWARD.memory(block) <= compiled.most_memory(call.device)


def _forward_layout(block: Block) -> TileForward:
    return FORWARD if block.blocks <= 3 else LONG_FORWARD


def _tiled(call: Call, *tensors: Strides) -> bool:
    """Whether the tensors are of 16-bit numbers, in pieces of 16 bytes."""
    return call.block.dtype != "float32" and call.channels % 8 == 0 and all(each.in_pieces(8) for each in tensors)


def tile_steps(time: int, dilation: int, rows: int, slots: int, halo: int) -> int:
    """How long segments of a chain should be: long enough to be worth their halo, short enough to fill the chip."""
    chain = -(-time // dilation)
    blocks = -(-chain // 8)
    lengths = sorted({-(-blocks // segments) for segments in range(1, min(blocks, 4096) + 1)})

    def cost(length: int) -> int:
        tiles = rows * tiles_in_row(time, dilation, 8 * length)
        return -(-tiles // slots) * (length + halo + 2)

    return 8 * min(lengths, key=cost)


def tiles_in_row(time: int, dilation: int, steps: int) -> int:
    """Tiles of one row of the batch: 16 chains or segments of chains each."""
    chain = -(-time // dilation)
    return -(-dilation * -(-chain // steps) // 16)


def cut_time(call: Call, warps: int, slots: int, halo: int) -> tuple[list[int], list[int], int]:
    """Steps of a segment in each layer, tiles of all rows there, and blocks of the grid, of which `slots` fit."""
    groups = -(-call.channels // (8 * warps))
    steps = [tile_steps(call.time, each, call.batch * groups, slots, halo) for each in call.dilations]
    cuts = zip(call.dilations, steps, strict=True)
    tiles = [call.batch * tiles_in_row(call.time, each, length) for each, length in cuts]
    return steps, tiles, min(slots, groups * max(tiles))


class TilesForward:
    """All blocks in one launch."""

    def __init__(self, call: Call) -> None:
        block, layout = call.block, _forward_layout(call.block)
        threads, memory = 32 * layout.warps, layout.memory(block)
        kernel = compiled.load(layout, block, "tile_forward", threads, memory, call.device)
        steps, _, grid = cut_time(call, layout.warps, kernel.slots, block.before + block.after)
        rest = _rest(call, [*call.x.steps, *_factors(call), call.depth, call.keep, *call.dropping], steps)
        self._launch = kernel.prepare((grid, 1, 1), (threads, 1, 1), 8, rest, call.depth > 1)
        self._device = call.device
        self.scratch = call.depth > 1

    def run(self, stream: int, x: int, weight: int, bias: int, lengths: int, seed: int, y: int, inner: int) -> None:
        """Start the kernel, given addresses."""
        self._launch.start(stream, x, weight, bias, y, inner, lengths, seed, _counter(self._device, stream))


class TilesBackward:
    """Gradients of all blocks in one launch."""

    def __init__(self, call: Call, dy: Strides) -> None:
        block, layout = call.block, BACKWARD
        threads, memory = 32 * layout.warps, layout.memory(block)
        kernel = compiled.load(layout, block, "tile_backward", threads, memory, call.device)
        steps, tiles, grid = cut_time(call, layout.warps, kernel.slots, 2 * (block.before + block.after))
        rest = _rest(call, [*call.x.steps, *dy.steps, *_factors(call), call.depth, *call.dropping], steps)
        self._launch = kernel.prepare((grid, 1, 1), (threads, 1, 1), 13, rest, True)
        self._device = call.device
        # A block of the grid adds up the tiles that it walks, and writes one part of the sum for each layer.
        parts = sum(min(count, grid) for count in tiles)
        self._flow = call.tensor_bytes if call.depth > 1 else 0
        self.scratch = self._flow + 4 * parts * call.channels * (block.kernel_size + 1)

    def run(
        self,
        stream: int,
        dy: int,
        x: int,
        inner: int,
        weight: int,
        bias: int,
        lengths: int,
        seed: int,
        dx: int,
        dweight: int,
        dbias: int,
        scratch: int,
    ) -> None:
        """Start the kernel, given addresses."""
        counter = _counter(self._device, stream)
        partial = scratch + self._flow
        self._launch.start(
            stream, x, inner, weight, bias, dy, dx, scratch, lengths, seed, partial, dweight, dbias, counter
        )


def _factors(call: Call) -> tuple[int, int]:
    return call.dilations[0], min(call.factor, call.time)


def _rest(call: Call, middle: list[float], steps: list[int]) -> bytes:
    unused = [0] * (MOST_LAYERS - call.depth)
    return compiled.packed(call.batch, call.time, call.channels, *middle, *steps, *unused)


def _counter(device: int, stream: int) -> int:
    """The address of two zeros where the blocks of a launch meet.

    Launches on one stream never overlap, so they share theirs. Graphs can be replayed side by side: every launch
    that is captured gets its own.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if device not in _counters:
        if capturing:
            raise KernelError("the first TCN of a process ran while capturing a graph; run it once before")
        _counters[device] = torch.zeros(COUNTERS, 32, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.synchronize(device)  # other streams will use them too
    if capturing:
        slot = COUNTERS // 2 + next(_captured) % (COUNTERS // 2)
    else:
        slot = _streams.get((device, stream), -1)
        slot = _streams.setdefault((device, stream), next(_seen) % (COUNTERS // 2)) if slot < 0 else slot
    return _counters[device].data_ptr() + 128 * slot
