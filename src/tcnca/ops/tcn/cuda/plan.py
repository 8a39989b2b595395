"""Which kernels run a TCN's blocks."""

from __future__ import annotations

from torch import Tensor

from tcnca.ops.tcn.cuda import rings, tiles
from tcnca.ops.tcn.cuda.source import DTYPE_NAMES, Block


def block_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    nonlinearity: str,
    residual: bool,
    causal: bool,
) -> Block:
    """What is fixed when compiling."""
    return Block(
        kernel_size=weight.shape[-1],
        dtype=DTYPE_NAMES[x.dtype],
        bias=bias is not None,
        nonlinearity=nonlinearity,
        residual=residual,
        causal=causal,
        lengths=lengths is not None,
    )


def run_forward(
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
    """All blocks: `y` is the last one's output, `inner` (`[slots, *x.shape]`) takes the others' in turn."""
    if tiles.forward_fits(block, weight.shape[0], x, y):
        tiles.tile_forward(x, weight, bias, lengths, block, dilation, factor, y, inner)
        return
    depth, time = weight.shape[0], x.shape[1]
    for layer in range(depth):
        out = y if layer + 1 == depth else inner[layer % inner.shape[0]]
        step = _step(dilation, factor, layer, time)
        rings.ring_forward(x, weight[layer], None if bias is None else bias[layer], lengths, block, step, out)
        x = out


def run_backward(
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
) -> None:
    """Gradients of all blocks; `inner` holds the inputs of all but the first."""
    depth = weight.shape[0]
    flow = x.new_empty(min(depth - 1, 2), *x.shape)
    if tiles.backward_fits(block, depth, x, dy):
        tiles.tile_backward(dy, x, inner, weight, bias, lengths, block, dilation, factor, dx, dweight, dbias, flow)
        return
    for layer in reversed(range(depth)):
        below = x if layer == 0 else inner[layer - 1]
        out = dx if layer == 0 else flow[(depth - 1 - layer) % 2]
        rings.ring_backward(
            dy,
            below,
            weight[layer],
            None if bias is None else bias[layer],
            lengths,
            block,
            _step(dilation, factor, layer, x.shape[1]),
            out,
            dweight[layer],
            dbias[layer] if bias is not None else dbias,
        )
        dy = out


def _step(dilation: int, factor: int, layer: int, time: int) -> int:
    """A layer's dilation. One beyond the end of time does what one as long as time does, and fits a machine's word."""
    return min(dilation * factor**layer, time)
