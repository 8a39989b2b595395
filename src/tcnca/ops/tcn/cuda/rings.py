"""Launches of the kernels with rings of registers, which run what the tensor-core kernels cannot."""

from __future__ import annotations

from tcnca.ops.tcn.cuda import compiled
from tcnca.ops.tcn.cuda.call import Call, Strides
from tcnca.ops.tcn.cuda.source import RingBackward, RingForward

# The largest kernels for which a thread can own two channels; backwards of 16-bit numbers only.
WIDEST_FORWARD, WIDEST_BACKWARD = 32, 17


class RingForwardLaunch:
    """One block of a call. `past` is the type of a state's ring buffer."""

    def __init__(self, call: Call, layer: int, past: str | None = None) -> None:
        block, x, y = call.block, call.x if layer == 0 else call.packed, call.packed
        vector = 2 if block.kernel_size <= WIDEST_FORWARD and _even(call, x, y) else 1
        layout = RingForward(vector=vector, past=past)
        kernel = compiled.load(layout, block, "ring_forward", 128, 0, call.device)
        grid, threads, cut = _ring_grid(call, layer, vector, kernel, block.kernel_size)
        # A state's ring is as long as the dilation asks, however short the sequence.
        dilation = call.dilations[layer] if past is None else call.dilation
        rest = (call.time, call.channels, dilation, *x.steps, *y.steps, *cut, layer, *call.dropping)
        self._launch = kernel.prepare(grid, threads, 8, compiled.packed(*rest))

    def run(
        self,
        stream: int,
        x: int,
        weight: int,
        bias: int,
        lengths: int,
        seed: int,
        y: int,
        past: int = 0,
        position: int = 0,
    ) -> None:
        """Start the kernel, given addresses."""
        self._launch.start(stream, x, weight, bias, y, lengths, seed, past, position)


class RingsForward:
    """All blocks, a launch each."""

    def __init__(self, call: Call) -> None:
        self._launches = [RingForwardLaunch(call, layer) for layer in range(call.depth)]
        self.scratch = call.depth > 1
        self._keep, self._tensor = call.keep, call.batch * call.time * call.channels * call.x.item
        self._weights, self._biases = 4 * call.channels * call.block.kernel_size, 4 * call.channels

    def run(self, stream: int, x: int, weight: int, bias: int, lengths: int, seed: int, y: int, inner: int) -> None:
        """Start the kernels, given addresses."""
        for layer, launch in enumerate(self._launches):
            later = len(self._launches) - 1 - layer
            elsewhere = later > 0 if self._keep else later % 2 == 1
            out = inner + (layer * self._tensor if self._keep else 0) if elsewhere else y
            launch.run(stream, x, weight + layer * self._weights, bias + layer * self._biases, lengths, seed, out)
            x = out


class RingBackwardLaunch:
    """Gradients of one block of a call."""

    def __init__(self, call: Call, layer: int, dy: Strides) -> None:
        block, x, dx = call.block, call.x if layer == 0 else call.packed, call.packed
        wide = block.dtype != "float32" and block.kernel_size <= WIDEST_BACKWARD
        vector = 2 if wide and _even(call, x, dy, dx) else 1
        layout = RingBackward(vector=vector)
        kernel = compiled.load(layout, block, "ring_backward", 128, 0, call.device)
        add_up = compiled.load(layout, block, "add_up", 1024, 0, call.device)
        grid, threads, cut = _ring_grid(call, layer, vector, kernel, 2 * block.kernel_size)
        parts, columns = grid[0] * grid[2], call.channels * (block.kernel_size + 1)
        rest = (call.time, call.channels, call.dilations[layer], *x.steps, *dy.steps, *dx.steps, *cut)
        self._launch = kernel.prepare(grid, threads, 8, compiled.packed(*rest, layer, *call.dropping))
        sums = compiled.packed(parts, call.channels)
        self._add_up = add_up.prepare((-(-columns // 32), 1, 1), (32, 32, 1), 3, sums)
        self.partial = 4 * parts * columns

    def run(
        self,
        stream: int,
        dy: int,
        x: int,
        weight: int,
        bias: int,
        lengths: int,
        seed: int,
        dx: int,
        dweight: int,
        dbias: int,
        partial: int,
    ) -> None:
        """Start the kernels, given addresses."""
        self._launch.start(stream, x, weight, bias, dy, dx, lengths, seed, partial)
        self._add_up.start(stream, partial, dweight, dbias)


class RingsBackward:
    """Gradients of all blocks, two launches each."""

    def __init__(self, call: Call, dy: Strides) -> None:
        top = call.depth - 1
        self._launches = [
            RingBackwardLaunch(call, layer, dy if layer == top else call.packed) for layer in range(call.depth)
        ]
        self._tensor = call.batch * call.time * call.channels * call.x.item
        self._flow = call.tensor_bytes if call.depth > 1 else 0
        self._weights, self._biases = 4 * call.channels * call.block.kernel_size, 4 * call.channels
        self.scratch = self._flow + max(launch.partial for launch in self._launches)

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
        """Start the kernels, given addresses."""
        for layer, launch in reversed(list(enumerate(self._launches))):
            below = inner + (layer - 1) * self._tensor if layer else x
            out = scratch if layer % 2 else dx
            weights, biases = layer * self._weights, layer * self._biases
            launch.run(
                stream,
                dy,
                below,
                weight + weights,
                bias + biases,
                lengths,
                seed,
                out,
                dweight + weights,
                dbias + biases,
                scratch + self._flow,
            )
            dy = out


def _ring_grid(
    call: Call, layer: int, vector: int, kernel: compiled.Kernel, least: int
) -> tuple[compiled.Grid, compiled.Grid, tuple[int, int, int]]:
    """Grid, block, and the cut of time: phases, segments and steps of a segment."""
    groups = call.channels // vector
    lanes = min(32, 1 << (groups - 1).bit_length())
    chains = 128 // lanes
    phases = call.dilations[layer]
    chain = -(-call.time // phases)
    rows = call.batch * -(-groups // lanes)
    # Twice what the chip holds at once, so that late blocks can fill the gaps of early ones.
    wanted = max(2 * kernel.slots // rows, 1) * chains
    steps = max(-(-chain // max(wanted // phases, 1)), least)
    segments = -(-chain // steps)
    grid = (-(-phases * segments // chains), -(-groups // lanes), call.batch)
    return grid, (lanes, chains, 1), (phases, segments, steps)


def _even(call: Call, *tensors: Strides) -> bool:
    """Whether two neighboring channels can be moved as one."""
    return call.channels % 2 == 0 and all(each.in_pieces(2) for each in tensors)
