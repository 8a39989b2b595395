"""What the plans of the kernels depend on: everything about a call but its addresses and values."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
MAX_KERNEL_SIZE = 64
DROPOUT_STEPS = 65536  # the resolution of the dropout probability: random numbers have 16 bits


class Layout(NamedTuple):
    """How a tensor `[batch, time, channels]` is laid out in memory; `offset` is its address modulo 16."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: int

    @property
    def steps(self) -> tuple[int, int]:
        """The strides of time and batch, as the kernels take them."""
        return self.strides[1], self.strides[0]

    def aligned(self, channels: int) -> bool:
        """Return whether this many neighboring channels can be moved as one."""
        time, batch = self.steps
        return time % channels == 0 and batch % channels == 0 and self.offset % (channels * self.dtype.itemsize) == 0

    def aligned16(self) -> bool:
        """Return whether the tensor can be moved in pieces of 16 bytes."""
        return self.aligned(16 // self.dtype.itemsize)


def layout(x: Tensor) -> Layout:
    """Return the layout of a tensor with memory on a GPU."""
    return Layout(x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device.index)


class Settings(NamedTuple):
    """The arguments of `tcnca::tcn_blocks` that are not tensors; block `i` has dilation `dilation · factor^i`."""

    dilation: int
    factor: int
    activation: str
    residual: bool
    causal: bool
    dropout: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What is fixed when the kernels of a block `x + dropout(activation(convolution(x)))` are compiled.

    Lengths, batches, dilations, strides and channels are arguments of the compiled kernels.
    """

    kernel_size: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    activation: str = "silu"
    residual: bool = True
    causal: bool = True
    lengths: bool = False
    dropout: bool = False
    omega: bool = False

    @property
    def ahead(self) -> int:
        """How many dilations the kernel looks into the future."""
        return 0 if self.causal else (self.kernel_size - 1) // 2

    def macros(self, **more: int) -> tuple[tuple[str, int], ...]:
        """Return the macros that all kernels of this block share, and some more."""
        shared = {
            "K": self.kernel_size,
            "DTYPE": DTYPES[self.dtype],
            "BIAS": int(self.bias),
            "ACTIVATION": ACTIVATIONS[self.activation],
            "RESIDUAL": int(self.residual),
            "AHEAD": self.ahead,
            "LENGTHS": int(self.lengths),
            "DROPOUT": int(self.dropout),
            "OMEGA": int(self.omega),
        }
        return tuple((shared | more).items())


class Call(NamedTuple):
    """All that the plan of a call of `tcnca::tcn_blocks` or its gradient depends on.

    x: the input's layout; all other tensors but the output's gradient are contiguous.
    weight: shape of the weight, `(depth, …, channels, kernel_size)`.
    bias, lengths: whether they are given.
    keep: whether every block's output is kept, or two buffers alternate.
    omega: whether the input times omega is added to the output of the last block.
    """

    x: Layout
    weight: tuple[int, ...]
    bias: bool
    lengths: bool
    settings: Settings
    keep: bool = True
    omega: bool = False

    @property
    def block(self) -> Block:
        """What is compiled."""
        settings = self.settings
        return Block(
            kernel_size=self.weight[-1],
            dtype=self.x.dtype,
            bias=self.bias,
            activation=settings.activation,
            residual=settings.residual,
            causal=settings.causal,
            lengths=self.lengths,
            dropout=settings.dropout > 0.0,
            omega=self.omega,
        )

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.weight[0]

    @property
    def device(self) -> int:
        """Index of the CUDA device."""
        return self.x.device

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.x.shape[0]

    @property
    def time(self) -> int:
        """Number of tokens in a sequence."""
        return self.x.shape[1]

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.x.shape[2]

    @property
    def dilations(self) -> tuple[int, ...]:
        """The dilation of each block, at most `time`, which has the same effect as any larger one."""
        dilation, factor = self.settings[:2]
        return tuple(min(dilation * factor**layer, self.time) for layer in range(self.depth))

    @property
    def first_dilation_and_factor(self) -> tuple[int, int]:
        """What a kernel that runs all blocks computes the dilations from."""
        return self.dilations[0], min(self.settings.factor, self.time)

    @property
    def packed(self) -> Layout:
        """The layout of contiguous tensors."""
        strides = (self.time * self.channels, self.channels, 1)
        return self.x._replace(strides=strides, offset=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of one tensor of the size of x."""
        return self.x.shape.numel() * self.x.dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch for one tensor, rounded up to the alignment of the next one; 0 for a single block."""
        return -(-self.num_bytes // 512) * 512 if self.depth > 1 else 0

    @property
    def dropout_arguments(self) -> tuple[int, float]:
        """How many of 65536 values are dropped, and the factor of the others that keeps the mean."""
        dropped = round(self.settings.dropout * DROPOUT_STEPS)
        return dropped, 0.0 if dropped == DROPOUT_STEPS else DROPOUT_STEPS / (DROPOUT_STEPS - dropped)


class ForwardPointers(NamedTuple):
    """Addresses of a forward pass, 0 for missing tensors. `inner` has every block's output but the last.

    If nothing is kept for gradients, `inner` is one tensor that alternates with `y`.
    """

    x: int
    weight: int
    bias: int
    lengths: int
    seed: int
    omega: int
    y: int
    inner: int


class BackwardPointers(NamedTuple):
    """Addresses of a backward pass, 0 for missing tensors."""

    dy: int
    inner: int
    x: int
    weight: int
    bias: int
    lengths: int
    seed: int
    omega: int
    dx: int
    dweight: int
    dbias: int
    domega: int
    scratch: int
