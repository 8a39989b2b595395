"""Launches of the kernels that hold short sequences in shared memory, where nothing waits for the rest of the chip."""

from __future__ import annotations

import torch

from tcnca.ops.tcn.cuda import compiled
from tcnca.ops.tcn.cuda.call import Call, Strides
from tcnca.ops.tcn.cuda.source import WholeBackward, WholeForward

CLUSTER = 8  # channels, and the blocks that share them
# The largest kernels that leave a thread registers for its outputs.
LARGEST_FORWARD, LARGEST_BACKWARD = 32, 24
# Channels of all rows: each takes a multiprocessor to itself, and more than there are make the others wait.
MOST_FORWARD, MOST_BACKWARD = 128, 128
FORWARD, BACKWARD = WholeForward(), WholeBackward()


def clusters(device: int) -> bool:
    """Whether a device runs blocks in clusters."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def forward_pays(call: Call) -> bool:
    """Whether `WholeForward` is the fastest, if it can run."""
    return call.batch * call.channels <= MOST_FORWARD


def backward_pays(call: Call) -> bool:
    """Whether `WholeBackward` is the fastest, if it can run."""
    return call.channels <= MOST_BACKWARD


def forward_fits(call: Call) -> bool:
    """Whether `WholesForward` can and should run a call."""
    if call.block.kernel_size > LARGEST_FORWARD or not (_fits(call, call.x) and forward_pays(call)):
        return False
    return FORWARD.memory(call.block, call.time, call.depth) <= compiled.most_memory(call.device)


def backward_fits(call: Call) -> bool:
    """Whether `WholesBackward` can and should run the gradients of a call, be `dy` in pieces of 16 bytes."""
    one = call.batch == 1 and call.block.kernel_size <= LARGEST_BACKWARD
    if not (one and _fits(call, call.x) and backward_pays(call)):
        return False
    return BACKWARD.memory(call.block, call.time, call.depth) <= compiled.most_memory(call.device)


def _fits(call: Call, x: Strides) -> bool:
    return call.channels % CLUSTER == 0 and x.in_pieces(16 // x.item) and clusters(call.device)


class WholesForward:
    """All blocks in one launch."""

    scratch = False

    def __init__(self, call: Call) -> None:
        layout, block = FORWARD, call.block
        kernel = compiled.load(
            layout, block, "whole_forward", layout.threads, compiled.most_memory(call.device), call.device
        )
        rest = compiled.packed(call.time, call.channels, *call.x.steps, *_factors(call), call.keep, *call.dropping)
        self._launch = kernel.prepare(
            (call.channels, call.batch, 1),
            (layout.threads, 1, 1),
            7,
            rest,
            memory=layout.memory(block, call.time, call.depth),
        )

    def run(self, stream: int, x: int, weight: int, bias: int, lengths: int, seed: int, y: int, inner: int) -> None:
        """Start the kernel, given addresses."""
        self._launch.start(stream, x, weight, bias, y, inner, lengths, seed)


class WholesBackward:
    """Gradients of all blocks of one row in one launch, from nothing but the input."""

    scratch = 0

    def __init__(self, call: Call, dy: Strides) -> None:
        layout, block = BACKWARD, call.block
        kernel = compiled.load(
            layout, block, "whole_backward", layout.threads, compiled.most_memory(call.device), call.device
        )
        rest = compiled.packed(call.time, call.channels, call.x.time, dy.time, *_factors(call), *call.dropping)
        self._launch = kernel.prepare(
            (call.channels, 1, 1),
            (layout.threads, 1, 1),
            9,
            rest,
            memory=layout.memory(block, call.time, call.depth),
        )

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
        self._launch.start(stream, x, weight, bias, dy, dx, lengths, seed, dweight, dbias)


def _factors(call: Call) -> tuple[int, int, int]:
    return call.dilations[0], min(call.factor, call.time), call.depth
