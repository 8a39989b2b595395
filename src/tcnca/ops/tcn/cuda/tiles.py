"""Launches of the tensor-core kernels: how they cut the time axis, and with which arguments they start."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.tcn.cuda import compiled
from tcnca.ops.tcn.cuda.source import MOST_LAYERS, Block, TileBackward, TileForward

# The most blocks of eight steps that an output may need, for the kernels to keep them in registers.
MOST_FORWARD, MOST_BACKWARD = 5, 3
FORWARD, BACKWARD = TileForward(), TileBackward()
LONG_FORWARD = TileForward(resident=1)  # for outputs that need more than three blocks, and so more registers
COUNTERS = 4096
_counters: dict[int, Tensor] = {}
_streams: dict[tuple[int, int], int] = {}
_captured = itertools.count()


def forward_fits(block: Block, depth: int, x: Tensor, y: Tensor) -> bool:
    """Whether `tile_forward` can run."""
    fits = block.blocks <= MOST_FORWARD and depth <= MOST_LAYERS
    return fits and _tiled(block, x, y) and _forward_layout(block).memory(block) <= compiled.most_memory(x.device.index)


def backward_fits(block: Block, depth: int, x: Tensor, dy: Tensor) -> bool:
    """Whether `tile_backward` can run."""
    fits = block.blocks <= MOST_BACKWARD and depth <= MOST_LAYERS
    return fits and _tiled(block, x, dy) and BACKWARD.memory(block) <= compiled.most_memory(x.device.index)


def _forward_layout(block: Block) -> TileForward:
    return FORWARD if block.blocks <= 3 else LONG_FORWARD


def _tiled(block: Block, *tensors: Tensor) -> bool:
    """Whether the tensors are of 16-bit numbers, in pieces of 16 bytes."""
    return block.dtype != "float32" and all(
        tensor.shape[-1] % 8 == 0
        and tensor.stride(-1) == 1
        and tensor.stride(-2) % 8 == 0
        and tensor.stride(-3) % 8 == 0
        and tensor.data_ptr() % 16 == 0
        for tensor in tensors
    )


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


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a launch of the tensor-core kernels is cut: steps of a segment in each layer, tiles of a row, blocks."""

    steps: tuple[int, ...]
    tiles: tuple[int, ...]
    grid: int


@functools.lru_cache(maxsize=4096)
def cut_time(
    shape: tuple[int, int, int], dilation: int, factor: int, depth: int, warps: int, slots: int, halo: int
) -> Cut:
    """The cut of `depth` layers over `[batch, time, channels]` on a chip that holds `slots` blocks at once."""
    batch, time, channels = shape
    rows = batch * -(-channels // (8 * warps))
    dilations = [min(dilation * factor**layer, time) for layer in range(depth)]
    steps = [tile_steps(time, each, rows, slots, halo) for each in dilations]
    tiles = [tiles_in_row(time, each, length) for each, length in zip(dilations, steps, strict=True)]
    return Cut((*steps, *(0 for _ in range(MOST_LAYERS - depth))), tuple(tiles), min(slots, rows * max(tiles)))


def tile_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    block: Block,
    dilation: int,
    factor: int,
    y: Tensor,
    inner: Tensor,
) -> None:
    """All blocks in one launch, as `plan.run_forward` says."""
    layout, device, depth = _forward_layout(block), x.device.index, weight.shape[0]
    threads, memory = 32 * layout.warps, layout.memory(block)
    kernel = compiled.load(layout, block, "tile_forward", threads, memory, device)
    cut = cut_time(tuple(x.shape), dilation, factor, depth, layout.warps, kernel.slots, block.before + block.after)
    stream = compiled.stream_of(x)
    job = (
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        inner.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        _counter(x, stream),
        *x.shape,
        x.stride(1),
        x.stride(0),
        min(dilation, x.shape[1]),
        min(factor, x.shape[1]),
        depth,
        max(inner.shape[0], 1),
        *cut.steps,
    )
    kernel.launch(stream, (cut.grid, 1, 1), (threads, 1, 1), job, depth > 1)


def tile_backward(
    dy: Tensor,
    x: Tensor,
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    block: Block,
    dilation: int,
    factor: int,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    flow: Tensor,
) -> None:
    """Gradients of all blocks in one launch, as `plan.run_backward` says; `flow` holds those between two blocks."""
    layout, device, depth = BACKWARD, x.device.index, weight.shape[0]
    threads, memory = 32 * layout.warps, layout.memory(block)
    kernel = compiled.load(layout, block, "tile_backward", threads, memory, device)
    halo = 2 * (block.before + block.after)
    cut = cut_time(tuple(x.shape), dilation, factor, depth, layout.warps, kernel.slots, halo)
    stream = compiled.stream_of(x)
    batch, time, channels = x.shape
    partial = torch.empty(
        batch * sum(cut.tiles) * channels * (weight.shape[-1] + 1), dtype=torch.float32, device=x.device
    )
    job = (
        x.data_ptr(),
        inner.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        flow.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        partial.data_ptr(),
        dweight.data_ptr(),
        dbias.data_ptr(),
        _counter(x, stream),
        batch,
        time,
        channels,
        x.stride(1),
        x.stride(0),
        dy.stride(1),
        dy.stride(0),
        min(dilation, x.shape[1]),
        min(factor, x.shape[1]),
        depth,
        *cut.steps,
    )
    kernel.launch(stream, (cut.grid, 1, 1), (threads, 1, 1), job, True)


def _counter(x: Tensor, stream: int) -> int:
    """The address of two zeros where the blocks of a launch meet.

    Launches on one stream never overlap, so they share theirs. Graphs can be replayed side by side: every launch
    that is captured gets its own.
    """
    device, capturing = x.device.index, torch.cuda.is_current_stream_capturing()
    if device not in _counters:
        if capturing:
            raise KernelError("the first TCN of a process ran while capturing a graph; run it once before")
        _counters[device] = torch.zeros(COUNTERS, 32, dtype=torch.int32, device=x.device)
        torch.cuda.synchronize(x.device)  # other streams will use them too
    if capturing:
        slot = COUNTERS // 2 + next(_captured) % (COUNTERS // 2)
    else:
        slot = _streams.setdefault((device, stream), len(_streams) % (COUNTERS // 2))
    return _counters[device].data_ptr() + 128 * slot
