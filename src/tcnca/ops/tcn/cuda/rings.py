"""Launches of the kernels with rings of registers, which run what the tensor-core kernels cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.ops.tcn.cuda import compiled
from tcnca.ops.tcn.cuda.source import DTYPE_NAMES, Block, RingBackward, RingForward

# The largest kernels for which a thread can own two channels; backwards of 16-bit numbers only.
WIDEST_FORWARD, WIDEST_BACKWARD = 32, 17


def ring_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    block: Block,
    dilation: int,
    y: Tensor,
    past: Tensor | None = None,
    position: Tensor | None = None,
) -> None:
    """One block. `past` and `position` are a state's ring buffer and the tokens it has seen."""
    _, time, channels = x.shape
    vector = 2 if block.kernel_size <= WIDEST_FORWARD and _even(x, y) else 1
    layout = RingForward(vector=vector, past=None if past is None else DTYPE_NAMES[past.dtype])
    kernel = compiled.load(layout, block, "ring_forward", 128, 0, x.device.index)
    grid, threads, steps, phases, segments = _ring_grid(x, dilation, vector, kernel, block.kernel_size)
    job = (
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        0 if past is None else past.data_ptr(),
        0 if position is None else position.data_ptr(),
        time,
        channels,
        dilation,
        x.stride(1),
        x.stride(0),
        y.stride(1),
        y.stride(0),
        phases,
        segments,
        steps,
    )
    kernel.launch(compiled.stream_of(x), grid, threads, job)


def ring_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    block: Block,
    dilation: int,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
) -> None:
    """Gradients of one block."""
    _, time, channels = x.shape
    wide = block.dtype != "float32" and block.kernel_size <= WIDEST_BACKWARD
    vector = 2 if wide and _even(x, dy, dx) else 1
    layout, device = RingBackward(vector=vector), x.device.index
    kernel = compiled.load(layout, block, "ring_backward", 128, 0, device)
    add_up = compiled.load(layout, block, "add_up", 1024, 0, device)
    grid, threads, steps, phases, segments = _ring_grid(x, dilation, vector, kernel, 2 * block.kernel_size)
    parts = grid[0] * grid[2]
    columns = channels * (block.kernel_size + 1)
    partial = torch.empty(parts * columns, dtype=torch.float32, device=x.device)
    job = (
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        dy.data_ptr(),
        dx.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        partial.data_ptr(),
        time,
        channels,
        dilation,
        x.stride(1),
        x.stride(0),
        dy.stride(1),
        dy.stride(0),
        dx.stride(1),
        dx.stride(0),
        phases,
        segments,
        steps,
    )
    stream = compiled.stream_of(x)
    kernel.launch(stream, grid, threads, job)
    sums = (partial.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), parts, channels)
    add_up.launch(stream, (-(-columns // 32), 1, 1), (32, 32, 1), sums)


def _ring_grid(
    x: Tensor, dilation: int, vector: int, kernel: compiled.Kernel, least: int
) -> tuple[compiled.Grid, compiled.Grid, int, int, int]:
    """Grid, block, steps of a segment, phases and segments."""
    batch, time, channels = x.shape
    groups = channels // vector
    lanes = min(32, 1 << (groups - 1).bit_length())
    chains = 128 // lanes
    phases, chain = min(dilation, time), -(-time // dilation)
    rows = batch * -(-groups // lanes)
    # Twice what the chip holds at once, so that late blocks can fill the gaps of early ones.
    wanted = max(2 * kernel.slots // rows, 1) * chains
    steps = max(-(-chain // max(wanted // phases, 1)), least)
    segments = -(-chain // steps)
    grid = (-(-phases * segments // chains), -(-groups // lanes), batch)
    return grid, (lanes, chains, 1), steps, phases, segments


def _even(*tensors: Tensor) -> bool:
    """Whether two neighbouring channels can be moved as one."""
    return all(
        tensor.shape[-1] % 2 == 0
        and tensor.stride(-2) % 2 == 0
        and tensor.stride(-3) % 2 == 0
        and tensor.data_ptr() % (2 * tensor.element_size()) == 0
        for tensor in tensors
    )
