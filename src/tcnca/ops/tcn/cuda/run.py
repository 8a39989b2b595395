"""A call of the TCN by kernels: all blocks at once, or one convolution after the other where a state needs inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.ops.checks import autocasts
from tcnca.ops.tcn.cuda.operator import tcn_block_from_state, tcn_blocks
from tcnca.ops.tcn.plain import TCNState, next_state


def run_kernels(
    x: Tensor,
    weight: Tensor,
    dilation_factor: int,
    bias: Tensor | None,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    lengths: Tensor | None,
    state: TCNState | None,
    return_state: bool,
    inplace: bool,
) -> tuple[Tensor, TCNState | None]:
    """`tcnca.ops.tcn` where `why_not` finds nothing against it."""
    given = x
    if autocasts(x.device):
        # In plain PyTorch autocast would round the convolutions alone, and keep x's own type for the skip
        # connections. Here these are rounded too: all blocks then read and write half the memory, which is what
        # their time goes into, and what follows a mixer is a linear map that rounds its input anyway.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if weight.shape[1] == 1 and state is None and not return_state:
        bias = None if bias is None else bias[:, 0]
        y = tcn_blocks(
            x,
            weight[:, 0],
            bias,
            lengths,
            factor=dilation_factor,
            nonlinearity=nonlinearity,
            residual=residual,
            causal=causal,
        )
        return y, None
    y, inputs = _one_by_one(x, weight, dilation_factor, bias, nonlinearity, residual, causal, lengths, state)
    if not return_state:
        return y, None
    return y, next_state(state, [given, *inputs[1:]], weight, dilation_factor, lengths, inplace)


def _one_by_one(
    x: Tensor,
    weight: Tensor,
    dilation_factor: int,
    bias: Tensor | None,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    lengths: Tensor | None,
    state: TCNState | None,
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the input of each convolution, with the gradients that flow through a state."""
    depth, convolutions = weight.shape[:2]
    inside = residual and convolutions == 1  # whether a kernel's own skip connection is the block's
    inputs: list[Tensor] = []
    for block in range(depth):
        h, dilation = x, dilation_factor**block
        for inner in range(convolutions):
            inputs.append(h)
            offset = None if bias is None else bias[block, inner]
            if state is None:
                h = tcn_blocks(
                    h,
                    weight[block, inner].unsqueeze(0),
                    None if offset is None else offset.unsqueeze(0),
                    lengths,
                    dilation=dilation,
                    nonlinearity=nonlinearity,
                    residual=inside,
                    causal=causal,
                )
            else:
                h = tcn_block_from_state(
                    h,
                    weight[block, inner],
                    offset,
                    lengths,
                    state.buffers[block * convolutions + inner],
                    state.position,
                    dilation=dilation,
                    nonlinearity=nonlinearity,
                    residual=inside,
                )
        x = x + h if residual and not inside else h
    return x, inputs
