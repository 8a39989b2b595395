"""A call of the TCN by kernels: all blocks at once, or one convolution after the other where a state needs inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tcnca.ops.activations import activation
from tcnca.ops.checks import autocasts
from tcnca.ops.dropout import dropout as dropped
from tcnca.ops.tcn.cuda.operator import tcn_block_from_state, tcn_blocks
from tcnca.ops.tcn.plain import TCNState, Transform, next_state


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
    normalize: Transform | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, TCNState | None]:
    """`tcnca.ops.tcn` where `why_not` finds nothing against it."""
    given = x
    if autocasts(x.device):
        # In plain PyTorch autocast would round the convolutions alone, and keep x's own type for the skip
        # connections. Here these are rounded too: all blocks then read and write half the memory, which is what
        # their time goes into, and what follows a mixer is a linear map that rounds its input anyway.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if weight.shape[1] == 1 and state is None and not return_state and normalize is None:
        y = tcn_blocks(
            x,
            weight,
            bias,
            lengths,
            factor=dilation_factor,
            nonlinearity=nonlinearity,
            residual=residual,
            causal=causal,
            dropout=dropout,
        )
        return y, None
    fused = normalize is None
    inside_kernels = (nonlinearity, dropout) if fused else ("none", 0.0)
    convolution = _Convolution(weight, dilation_factor, bias, causal, lengths, state, *inside_kernels)
    function = None if fused else activation(nonlinearity)
    depth, convolutions = weight.shape[:2]
    inside = residual and convolutions == 1 and fused  # whether a kernel's own skip connection is the block's
    inputs: list[Tensor] = []  # of each convolution: what its ring has to remember
    for block in range(depth):
        h = x
        for number in range(block * convolutions, (block + 1) * convolutions):
            inputs += [h] if return_state else []
            h = convolution.run(h, number, inside)
            if normalize is not None and function is not None:
                h = function(normalize(h, number).to(h.dtype))
                h = dropped(h, dropout) if dropout > 0.0 else h
        x = x + h if residual and not inside else h
    if not return_state:
        return x, None
    return x, next_state(state, [given, *inputs[1:]], weight, dilation_factor, lengths, inplace)


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """The convolutions of a call one by one, with the gradients that flow through a state."""

    weight: Tensor
    dilation_factor: int
    bias: Tensor | None
    causal: bool
    lengths: Tensor | None
    state: TCNState | None
    nonlinearity: str
    dropout: float

    def run(self, h: Tensor, number: int, residual: bool) -> Tensor:
        """The convolution of a number, counted through all blocks, and what its kernel does besides."""
        # Not `__call__`: PyTorch 2.11's compiler would hash what it calls before its fields are set.
        block, inner = divmod(number, self.weight.shape[1])
        weight, dilation = self.weight[block, inner], self.dilation_factor**block
        bias = None if self.bias is None else self.bias[block, inner]
        if self.state is None:
            return tcn_blocks(
                h,
                weight.unsqueeze(0),
                None if bias is None else bias.unsqueeze(0),
                self.lengths,
                dilation=dilation,
                nonlinearity=self.nonlinearity,
                residual=residual,
                causal=self.causal,
                dropout=self.dropout,
            )
        return tcn_block_from_state(
            h,
            weight,
            bias,
            self.lengths,
            self.state.buffers[number],
            self.state.position,
            dilation=dilation,
            nonlinearity=self.nonlinearity,
            residual=residual,
        )
