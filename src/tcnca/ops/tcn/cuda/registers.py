"""Kernels that keep a ring of inputs in registers: one block per launch, for anything the other families cannot run."""

from __future__ import annotations

import dataclasses

import torch

from tcnca.ops import driver
from tcnca.ops.tcn.cuda import nvrtc
from tcnca.ops.tcn.cuda.call import DTYPES, BackwardPointers, Block, Call, ForwardPointers, Layout

THREADS = 128
# The largest kernel sizes for which a thread can own two channels; in the backward pass of 16-bit numbers only.
MAX_PAIRED_FORWARD, MAX_PAIRED_BACKWARD = 32, 17


def forward_source(block: Block, vector: int, past: torch.dtype | None = None) -> nvrtc.Source:
    """Return the source of `registers_forward`.

    Args:
        block: what is compiled.
        vector: neighboring channels per thread; the number of channels and all strides must be multiples of it.
        past: the dtype of a state's ring buffer; None starts the sequence with zeros.
    """
    state = {"STATE": int(past is not None), "PAST": DTYPES[past or torch.float32]}
    return nvrtc.Source(("common.cuh", "registers.cu"), block.macros(FORWARD=1, VECTOR=vector, **state))


def backward_source(block: Block, vector: int) -> nvrtc.Source:
    """Return the source of `registers_backward` and `sum_partials`."""
    size = block.kernel_size
    # Slots of the rings, and steps per iteration of the loop. The rings of long kernels leave no registers for the
    # kernels themselves.
    slots, unroll = (size, size) if size <= 20 else (size + 3, 4)
    macros = block.macros(FORWARD=0, VECTOR=vector, SLOTS=slots, UNROLL=unroll, SHARED_KERNELS=int(size > 32))
    return nvrtc.Source(("common.cuh", "registers.cu"), macros)


def forward_launch(call: Call, layer: int, past: torch.dtype | None = None) -> driver.Launch:
    """Prepare one block of a call; `past` is the dtype of a state's ring buffer."""
    block, x, y = call.block, call.x if layer == 0 else call.packed, call.packed
    block = dataclasses.replace(block, omega=call.omega and layer == call.depth - 1)
    layouts = (x, y, call.x) if block.omega else (x, y)
    vector = 2 if block.kernel_size <= MAX_PAIRED_FORWARD and _paired(call, *layouts) else 1
    kernel = nvrtc.load(forward_source(block, vector, past), "registers_forward", 0, call.device)
    grid, threads, cut = _cut_time(call, layer, vector, kernel, block.kernel_size)
    # The size of a state's ring follows from the dilation, even if that is longer than the sequence.
    dilation = call.dilations[layer] if past is None else call.settings.dilation
    strides = (*x.steps, *y.steps, *call.x.steps)
    numbers = (call.time, call.channels, dilation, *strides, *cut, layer, *call.dropout_arguments)
    return driver.Launch(kernel, grid, threads, 10, numbers, as_struct=True)


class Forward:
    """All blocks, one launch each."""

    def __init__(self, call: Call) -> None:
        self._launches = [forward_launch(call, layer) for layer in range(call.depth)]
        self._call = call
        self.needs_scratch = call.depth > 1

    def run(self, stream: int, p: ForwardPointers) -> None:
        """Launch the kernels."""
        call, x = self._call, p.x
        for layer, launch in enumerate(self._launches):
            later = call.depth - 1 - layer
            if call.keep:
                out = p.inner + layer * call.num_bytes if later > 0 else p.y
            else:
                out = p.inner if later % 2 == 1 else p.y
            weight, bias = p.weight + _weight_bytes(call, layer), p.bias + _bias_bytes(call, layer)
            launch(stream, x, weight, bias, out, p.lengths, p.seed, 0, 0, p.x, p.omega)
            x = out


class Backward:
    """Gradients of all blocks, two launches each."""

    def __init__(self, call: Call, dy: Layout) -> None:
        self._call, self._launches, partials = call, [], []
        for layer in range(call.depth):
            gradients, sums, num_bytes = _backward_launches(call, layer, dy)
            self._launches.append((gradients, sums))
            partials.append(num_bytes)
        self.scratch = call.scratch_bytes + max(partials)

    def run(self, stream: int, p: BackwardPointers) -> None:
        """Launch the kernels."""
        call, dy, partial = self._call, p.dy, p.scratch + self._call.scratch_bytes
        for layer, (gradients, sums) in reversed(list(enumerate(self._launches))):
            x = p.inner + (layer - 1) * call.num_bytes if layer else p.x
            dx = p.scratch if layer % 2 else p.dx
            weight, bias = _weight_bytes(call, layer), _bias_bytes(call, layer)
            tensors = (x, p.weight + weight, p.bias + bias, dy, dx, p.lengths, p.seed, partial)
            gradients(stream, *tensors, p.dy, p.omega)
            sums(stream, partial, p.dweight + weight, p.dbias + bias, p.domega)
            dy = dx


def _backward_launches(call: Call, layer: int, output_dy: Layout) -> tuple[driver.Launch, driver.Launch, int]:
    """Prepare the gradients of one block and their sums, which need some bytes for partial sums."""
    block, x, dx = call.block, call.x if layer == 0 else call.packed, call.packed
    dy = output_dy if layer == call.depth - 1 else call.packed
    block = dataclasses.replace(block, omega=call.omega and layer == 0)
    small = block.dtype != torch.float32 and block.kernel_size <= MAX_PAIRED_BACKWARD
    layouts = (x, dy, dx, output_dy) if block.omega else (x, dy, dx)
    vector = 2 if small and _paired(call, *layouts) else 1
    source = backward_source(block, vector)
    kernel = nvrtc.load(source, "registers_backward", 0, call.device)
    sum_kernel = nvrtc.load(source, "sum_partials", 0, call.device)
    grid, threads, cut = _cut_time(call, layer, vector, kernel, 2 * block.kernel_size)
    parts, columns = grid[0] * grid[2], call.channels * (block.kernel_size + 1 + block.omega)
    strides = (*x.steps, *dy.steps, *dx.steps, *output_dy.steps)
    numbers = (call.time, call.channels, call.dilations[layer], *strides, *cut, layer, *call.dropout_arguments)
    gradients = driver.Launch(kernel, grid, threads, 10, numbers, as_struct=True)
    sum_grid = (-(-columns // 32), 1, 1)
    sums = driver.Launch(sum_kernel, sum_grid, (32, 32, 1), 4, (parts, call.channels), as_struct=True)
    return gradients, sums, 4 * parts * columns


def _cut_time(
    call: Call, layer: int, vector: int, kernel: driver.Function, min_steps: int
) -> tuple[driver.Grid, driver.Grid, tuple[int, int, int]]:
    """Return grid, block, and how time is cut: phases, segments and steps of a segment."""
    groups = call.channels // vector
    lanes = min(32, 1 << (groups - 1).bit_length())
    chains = THREADS // lanes
    phases = call.dilations[layer]
    chain = -(-call.time // phases)
    rows = call.batch * -(-groups // lanes)
    # Twice what the device runs at a time, so that late blocks can fill the gaps of early ones.
    wanted = max(2 * nvrtc.resident_blocks(kernel, THREADS, call.device) // rows, 1) * chains
    steps = max(-(-chain // max(wanted // phases, 1)), min_steps)
    segments = -(-chain // steps)
    grid = (-(-phases * segments // chains), -(-groups // lanes), call.batch)
    return grid, (lanes, chains, 1), (phases, segments, steps)


def _paired(call: Call, *layouts: Layout) -> bool:
    """Return whether two neighboring channels can be moved as one."""
    return call.channels % 2 == 0 and all(each.aligned(2) for each in layouts)


def _weight_bytes(call: Call, layer: int) -> int:
    return 4 * layer * call.channels * call.block.kernel_size


def _bias_bytes(call: Call, layer: int) -> int:
    return 4 * layer * call.channels
