"""Kernels that keep short sequences in shared memory, in clusters of eight blocks, and so never wait for the device."""

from __future__ import annotations

import torch

from tcnca.ops import driver
from tcnca.ops.tcn.cuda import nvrtc
from tcnca.ops.tcn.cuda.call import BackwardPointers, Block, Call, ForwardPointers, Layout

THREADS = 512
CLUSTER = 8  # channels, and the blocks that share them
# The largest kernel sizes that leave a thread registers for its outputs.
MAX_FORWARD, MAX_BACKWARD = 32, 24
# Channels of all sequences: each needs a multiprocessor, and more than the device has would wait for each other.
MAX_CHANNELS = 128


def source(block: Block, forward: bool) -> nvrtc.Source:
    """Return the source of `smem_forward` or `smem_backward`."""
    return nvrtc.Source(("common.cuh", "smem.cu"), block.macros(FORWARD=int(forward), THREADS=THREADS))


def forward_memory(call: Call) -> int:
    """Return the bytes of shared memory of the forward kernel."""
    return 4 * (2 * call.time + call.depth * (call.block.kernel_size + 1))


def backward_memory(call: Call) -> int:
    """Return the bytes of shared memory of the backward kernel."""
    return 4 * ((call.depth + 2) * call.time + (call.depth + THREADS // 32) * (call.block.kernel_size + 1))


def has_clusters(device: int) -> bool:
    """Return whether a device runs blocks in clusters."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def forward_fits(call: Call) -> bool:
    """Return whether `Forward` can run a call and is the fastest."""
    if call.block.kernel_size > MAX_FORWARD or call.batch * call.channels > MAX_CHANNELS or not _fits(call):
        return False
    return forward_memory(call) <= driver.max_shared_memory(call.device)


def backward_fits(call: Call) -> bool:
    """Return whether `Backward` can run the gradients of a call and is the fastest, if `dy` is aligned to 16 bytes."""
    small = call.batch == 1 and call.block.kernel_size <= MAX_BACKWARD and call.channels <= MAX_CHANNELS
    return small and _fits(call) and backward_memory(call) <= driver.max_shared_memory(call.device)


def _fits(call: Call) -> bool:
    return call.channels % CLUSTER == 0 and call.x.aligned16() and has_clusters(call.device)


class Forward:
    """All blocks in one launch."""

    needs_scratch = False

    def __init__(self, call: Call) -> None:
        dilations = (*call.first_dilation_and_factor, call.depth)
        numbers = (call.time, call.channels, *call.x.steps, *dilations, call.keep, *call.dropout_arguments)
        self._launch = _launch(call, True, (call.channels, call.batch, 1), 8, numbers)

    def run(self, stream: int, p: ForwardPointers) -> None:
        """Launch the kernel."""
        self._launch(stream, p.x, p.weight, p.bias, p.y, p.inner, p.lengths, p.seed, p.omega)


class Backward:
    """Gradients of all blocks of one sequence in one launch; recomputes the blocks' outputs."""

    scratch = 0

    def __init__(self, call: Call, dy: Layout) -> None:
        dilations = (*call.first_dilation_and_factor, call.depth)
        numbers = (call.time, call.channels, call.x.steps[0], dy.steps[0], *dilations, *call.dropout_arguments)
        self._launch = _launch(call, False, (call.channels, 1, 1), 11, numbers)

    def run(self, stream: int, p: BackwardPointers) -> None:
        """Launch the kernel."""
        tensors = (p.x, p.weight, p.bias, p.dy, p.dx, p.lengths, p.seed, p.dweight, p.dbias, p.omega, p.domega)
        self._launch(stream, *tensors)


def _launch(
    call: Call, forward: bool, grid: driver.Grid, num_addresses: int, numbers: tuple[int | float, ...]
) -> driver.Launch:
    name = "smem_forward" if forward else "smem_backward"
    kernel = nvrtc.load(source(call.block, forward), name, driver.max_shared_memory(call.device), call.device)
    memory = forward_memory(call) if forward else backward_memory(call)
    return driver.Launch(kernel, grid, (THREADS, 1, 1), num_addresses, numbers, as_struct=True, shared_memory=memory)
