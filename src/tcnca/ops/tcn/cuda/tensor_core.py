"""Kernels on the tensor cores: all blocks of 16-bit numbers in one cooperative launch."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops import driver
from tcnca.ops.tcn.cuda import nvrtc
from tcnca.ops.tcn.cuda.call import BackwardPointers, Block, Call, ForwardPointers, Layout

WARPS = 8  # per block of threads, each with eight channels
THREADS = 32 * WARPS
STEP_BYTES = 16 * 8 * 16 * WARPS  # of eight steps in shared memory
STAGES = 3  # eight steps each in shared memory of the forward kernel: one in use, the others being loaded
DEPTH_AHEAD = 3  # groups of eight steps that the backward kernel loads ahead, if the shared memory has room for them
MAX_LAYERS = 12  # blocks per launch
LAYER_BYTES = 256  # of shared memory for what the backward kernel knows about a layer
# The most groups of eight steps that an output may depend on, for the kernels to keep them in registers. The backward
# kernel for longer ones keeps them in shared memory, and has half as many channels; it suits up to 9 groups.
MAX_FORWARD, MAX_SHORT_BACKWARD, MAX_BACKWARD = 5, 3, 3
LONG_PARTS = 4  # of eight channels
LONG_STEP_BYTES = 16 * 8 * 16 * LONG_PARTS
NUM_COUNTERS = 4096
_counters: dict[int, Tensor] = {}
_stream_slots: dict[tuple[int, int], int] = {}
_next_stream, _next_capture = itertools.count(), itertools.count()


def _groups(block: Block) -> tuple[int, int]:
    """Return the groups of eight steps that an output depends on, before and after its own."""
    return -(-(block.kernel_size - 1 - block.ahead) // 8), -(-block.ahead // 8)


def forward_source(block: Block) -> nvrtc.Source:
    """Return the source of `tensor_core_forward`."""
    # Outputs that depend on more than three groups need more registers.
    resident = 2 if sum(_groups(block)) + 1 <= 3 else 1
    macros = block.macros(LAYERS=MAX_LAYERS, WARPS=WARPS, PARTS=WARPS, STAGES=STAGES, RESIDENT=resident)
    return nvrtc.Source(("common.cuh", "tensor_core.cuh", "tensor_core_forward.cu"), macros)


def is_long(call: Call) -> bool:
    """Return whether gradients need the kernel for long kernels; with omega also where the other one does not fit."""
    groups = sum(_groups(call.block)) + 1
    # The long kernel has no form for a single tap, and without omega it has not been compared with `registers`.
    may_be_long = call.omega and groups > 1
    too_large = may_be_long and short_memory(call.block) > driver.max_shared_memory(call.device)
    return groups > MAX_SHORT_BACKWARD or too_large


def backward_source(block: Block, *, long: bool, depth: int = DEPTH_AHEAD) -> nvrtc.Source:
    """Return the source of `tensor_core_backward`, which loads `depth` groups of eight steps ahead."""
    shared = {"LAYERS": MAX_LAYERS, "WARPS": WARPS, "LAYER_BYTES": LAYER_BYTES, "DEEP": depth}
    name, parts = ("long", LONG_PARTS) if long else ("short", WARPS)
    own = {"PARTS": parts, "RELOAD": int(long and block.residual), "RELOAD_OUTPUT": int(long and block.omega)}
    files = ("common.cuh", "tensor_core.cuh", "tensor_core_backward.cuh", f"tensor_core_backward_{name}.cu")
    return nvrtc.Source(files, block.macros(**shared, **own))


def forward_memory(block: Block) -> int:
    """Return the bytes of shared memory of the forward kernel."""
    return (STAGES + (STAGES - 1) * block.omega) * STEP_BYTES + 32 * WARPS


def short_memory(block: Block) -> int:
    """Return the bytes of shared memory of the backward kernel for short kernels."""
    before, after = _groups(block)
    rings = (2 * DEPTH_AHEAD + before + 2) * STEP_BYTES
    tables = WARPS * 2 * (2 * (before + after + 1) + block.residual) * 32 * 16
    kernels = 32 * WARPS * (block.kernel_size + 1 + block.omega)
    return rings + tables + kernels + LAYER_BYTES


def long_memory(block: Block, depth: int) -> int:
    """Return the bytes of shared memory of the backward kernel for long kernels, with `depth` groups loaded ahead."""
    groups = sum(_groups(block)) + 1
    rings = ((2 + block.residual + block.omega) * (depth + 1) + 2 * (groups - 1)) * LONG_STEP_BYTES
    tables = WARPS * max(2 * (8 * groups + 6) * 16, (groups + block.bias + 1) // 2 * 512)
    return rings + tables + 16 * WARPS * (1 + block.omega) + LAYER_BYTES


def long_depth(block: Block, memory: int) -> int:
    """Return how many groups the backward kernel for long kernels loads ahead, with `memory` bytes for a block."""
    return DEPTH_AHEAD if long_memory(block, DEPTH_AHEAD) <= memory else DEPTH_AHEAD - 1


def forward_fits(call: Call) -> bool:
    """Return whether `Forward` can run a call."""
    fits = _fits(call, MAX_FORWARD, call.x)
    return fits and forward_memory(call.block) <= driver.max_shared_memory(call.device)


def backward_fits(call: Call, dy: Layout) -> bool:
    """Return whether `Backward` can run the gradients of a call."""
    fits = _fits(call, MAX_BACKWARD, call.x, dy)
    return fits and _backward_size(call)[1] <= driver.max_shared_memory(call.device)


def _backward_size(call: Call) -> tuple[int, int]:
    """Return how many groups the backward kernel of a call loads ahead, and its bytes of shared memory."""
    if not is_long(call):
        return DEPTH_AHEAD, short_memory(call.block)
    depth = long_depth(call.block, driver.max_shared_memory(call.device))
    return depth, long_memory(call.block, depth)


def _fits(call: Call, max_groups: int, *layouts: Layout) -> bool:
    if call.block.dtype == torch.float32 or call.channels % 8 or not all(each.aligned(8) for each in layouts):
        return False
    return sum(_groups(call.block)) + 1 <= max_groups and call.depth <= MAX_LAYERS


def segment_steps(time: int, dilation: int, rows: int, resident: int, halo: int) -> int:
    """Return how many steps a segment of a chain should have: enough for its halo, few enough to fill the device."""
    chain = -(-time // dilation)
    groups = -(-chain // 8)
    lengths = sorted({-(-groups // segments) for segments in range(1, min(groups, 4096) + 1)})

    def cost(length: int) -> int:
        tiles = rows * tiles_in_row(time, dilation, 8 * length)
        return -(-tiles // resident) * (length + halo + 2)

    return 8 * min(lengths, key=cost)


def tiles_in_row(time: int, dilation: int, steps: int) -> int:
    """Return the tiles of one sequence, each with 16 segments of chains."""
    chain = -(-time // dilation)
    return -(-dilation * -(-chain // steps) // 16)


def _cut_time(call: Call, kernel: driver.Function, halo: int, parts: int = WARPS) -> tuple[list[int], list[int], int]:
    """Return the steps of a segment and the tiles of all sequences in each layer, and the blocks of the grid."""
    resident = nvrtc.resident_blocks(kernel, THREADS, call.device)
    groups = -(-call.channels // (8 * parts))
    steps = [segment_steps(call.time, each, call.batch * groups, resident, halo) for each in call.dilations]
    cuts = zip(call.dilations, steps, strict=True)
    tiles = [call.batch * tiles_in_row(call.time, each, length) for each, length in cuts]
    return steps, tiles, min(resident, groups * max(tiles))


class Forward:
    """All blocks in one launch."""

    def __init__(self, call: Call) -> None:
        memory = forward_memory(call.block)
        kernel = nvrtc.load(forward_source(call.block), "tensor_core_forward", memory, call.device)
        steps, _, grid = _cut_time(call, kernel, sum(_groups(call.block)))
        numbers = _numbers(call, call.x.steps, (call.keep,), steps)
        self._launch = driver.Launch(
            kernel, (grid, 1, 1), (THREADS, 1, 1), 9, numbers, as_struct=True, cooperative=call.depth > 1
        )
        self._device = call.device
        self.needs_scratch = call.depth > 1

    def run(self, stream: int, p: ForwardPointers) -> None:
        """Launch the kernel."""
        counter = _counter(self._device, stream)
        self._launch(stream, p.x, p.weight, p.bias, p.y, p.inner, p.lengths, p.seed, p.omega, counter)


class Backward:
    """Gradients of all blocks in one launch."""

    def __init__(self, call: Call, dy: Layout) -> None:
        block, long = call.block, is_long(call)
        depth, memory = _backward_size(call)
        source = backward_source(block, long=long, depth=depth)
        kernel = nvrtc.load(source, "tensor_core_backward", memory, call.device)
        parts = LONG_PARTS if long else WARPS
        steps, tiles, grid = _cut_time(call, kernel, 2 * sum(_groups(block)), parts)
        numbers = _numbers(call, (*call.x.steps, *dy.steps), (), steps)
        self._launch = driver.Launch(
            kernel, (grid, 1, 1), (THREADS, 1, 1), 15, numbers, as_struct=True, cooperative=True
        )
        self._call = call
        # A block of the grid adds the gradients of its tiles, and writes one partial sum per layer.
        sums = sum(min(count, grid) for count in tiles)
        self.scratch = call.scratch_bytes + 4 * sums * call.channels * (block.kernel_size + 1 + block.omega)

    def run(self, stream: int, p: BackwardPointers) -> None:
        """Launch the kernel."""
        counter, partial = _counter(self._call.device, stream), p.scratch + self._call.scratch_bytes
        inputs = (p.x, p.inner, p.weight, p.bias, p.dy, p.dx, p.scratch, p.lengths, p.seed, p.omega)
        self._launch(stream, *inputs, partial, p.dweight, p.dbias, p.domega, counter)


def _numbers(call: Call, strides: tuple[int, ...], keep: tuple[int, ...], steps: list[int]) -> tuple[int | float, ...]:
    shape = (call.batch, call.time, call.channels)
    unused = [0] * (MAX_LAYERS - call.depth)
    dilations = (*call.first_dilation_and_factor, call.depth)
    return (*shape, *strides, *dilations, *keep, *call.dropout_arguments, *steps, *unused)


def _counter(device: int, stream: int) -> int:
    """Return the address of two zeros with which the blocks of a launch synchronize.

    Launches on one stream never overlap, so they share counters. Graphs can be replayed at the same time, so every
    captured launch gets its own.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if device not in _counters:
        if capturing:
            raise KernelError("CUDA graph: expected a TCN that has run once before it is captured, got the first call")
        zeros = torch.zeros(NUM_COUNTERS, 32, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.synchronize(device)  # other streams will use them too
        _counters.setdefault(device, zeros)  # another thread may have been first
    if capturing:
        slot = NUM_COUNTERS // 2 + next(_next_capture) % (NUM_COUNTERS // 2)
    else:
        slot = _stream_slots.get((device, stream), -1)
        if slot < 0:
            slot = _stream_slots.setdefault((device, stream), next(_next_stream) % (NUM_COUNTERS // 2))
    return _counters[device].data_ptr() + 128 * slot
