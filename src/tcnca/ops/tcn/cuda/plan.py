"""Which kernels run a TCN's blocks: found once for all calls of a kind, and kept."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from tcnca.ops.tcn.cuda import rings, tiles, wholes
from tcnca.ops.tcn.cuda.call import Call, Strides
from tcnca.ops.tcn.cuda.source import DTYPE_NAMES, Block

KINDS = 1024  # of calls whose plans are kept
Lies = tuple[torch.Size, tuple[int, ...], torch.dtype, int, int]
Settings = tuple[int, int, str, bool, bool, float]  # dilation, factor, nonlinearity, residual, causal, dropout


class Forward(Protocol):
    """Kernels ready to start. `inner` has every block's output but the last.

    Without gradients to come it is a tensor of x's size that takes turns with the output, if `scratch` asks for one.
    """

    scratch: bool

    def run(self, stream: int, x: int, weight: int, bias: int, lengths: int, seed: int, y: int, inner: int) -> None:
        """Start them on a stream, given addresses, 0 for what is not there."""
        ...


class Backward(Protocol):
    """Kernels ready to start, which need so many bytes of scratch."""

    scratch: int

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
        """Start them on a stream, given addresses, 0 for what is not there."""
        ...


@functools.lru_cache(KINDS)
def forward_plan(
    x: Lies, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings, keep: bool
) -> Forward:
    """The kernels for `tcn_blocks`, given the shape of `weight`, and whether there are biases and lengths."""
    call = _call(x, weight, bias, lengths, settings, keep)
    if wholes.forward_fits(call):
        return wholes.WholesForward(call)
    return tiles.TilesForward(call) if tiles.forward_fits(call) else rings.RingsForward(call)


@functools.lru_cache(KINDS)
def backward_plan(
    x: Lies, dy: Lies, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings
) -> Backward:
    """The kernels for `tcn_blocks_backward`."""
    call, slopes = _call(x, weight, bias, lengths, settings, True), _strides(dy)
    if wholes.backward_fits(call) and in_pieces(dy):
        return wholes.WholesBackward(call, slopes)
    return tiles.TilesBackward(call, slopes) if tiles.backward_fits(call, slopes) else rings.RingsBackward(call, slopes)


@functools.lru_cache(KINDS)
def recomputes(x: Lies, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings) -> bool:
    """Whether the gradients need nothing of the blocks' outputs, as long as `dy` is in pieces of 16 bytes."""
    return wholes.backward_fits(_call(x, weight, bias, lengths, settings, True))


@functools.lru_cache(KINDS)
def in_pieces(x: Lies) -> bool:
    """Whether a tensor lies in pieces of 16 bytes."""
    return _strides(x).in_pieces(16 // x[2].itemsize)


@functools.lru_cache(KINDS)
def state_plan(
    x: Lies, past: torch.dtype, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings
) -> rings.RingForwardLaunch:
    """The kernel for `tcn_block_from_state`."""
    return rings.RingForwardLaunch(_call(x, weight, bias, lengths, settings, False), 0, DTYPE_NAMES[past])


def lies(x: Tensor) -> Lies:
    """How a tensor lies in memory."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device.index


def _call(x: Lies, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings, keep: bool) -> Call:
    (batch, time, channels), _, dtype, _, device = x
    dilation, factor, nonlinearity, residual, causal, dropout = settings
    block = Block(
        kernel_size=weight[-1],
        dtype=DTYPE_NAMES[dtype],
        bias=bias,
        nonlinearity=nonlinearity,
        residual=residual,
        causal=causal,
        lengths=lengths,
        dropout=dropout > 0.0,
    )
    return Call(
        device=device,
        block=block,
        batch=batch,
        time=time,
        channels=channels,
        x=_strides(x),
        depth=weight[0],
        dilation=dilation,
        factor=factor,
        dropout=dropout,
        keep=keep,
    )


def _strides(x: Lies) -> Strides:
    _, strides, dtype, offset, _ = x
    return Strides(strides[1], strides[0], offset, dtype.itemsize)
