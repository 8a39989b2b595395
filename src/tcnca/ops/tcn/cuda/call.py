"""What the kernels' plans depend on: all of a call but its addresses and values."""

from __future__ import annotations

import dataclasses
import functools

from tcnca.ops.tcn.cuda.source import Block

DROPS = 65536  # the parts in which dropout counts its probability: draws have 16 bits


@dataclasses.dataclass(frozen=True)
class Strides:
    """How a tensor `[batch, time, channels]` lies in memory; `offset` is its address modulo 16."""

    time: int
    batch: int
    offset: int
    item: int

    @property
    def steps(self) -> tuple[int, int]:
        """The strides as kernels take them."""
        return self.time, self.batch

    def in_pieces(self, size: int) -> bool:
        """Whether so many neighboring channels can be moved as one."""
        return self.time % size == 0 and self.batch % size == 0 and self.offset % (size * self.item) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """`depth` blocks over `[batch, time, channels]`.

    x: how the input lies; all other tensors but the output's gradient are contiguous.
    keep: whether every block's output has its memory, or two take turns.
    """

    device: int
    block: Block
    batch: int
    time: int
    channels: int
    x: Strides
    depth: int
    dilation: int
    factor: int
    dropout: float
    keep: bool

    @functools.cached_property
    def dilations(self) -> tuple[int, ...]:
        """Of each block. One beyond the end of time does what one as long as time does, and fits a machine's word."""
        return tuple(min(self.dilation * self.factor**layer, self.time) for layer in range(self.depth))

    @property
    def packed(self) -> Strides:
        """How the tensors lie that are contiguous."""
        return Strides(self.channels, self.time * self.channels, 0, self.x.item)

    @property
    def tensor_bytes(self) -> int:
        """Memory of one tensor, up to the next start of one."""
        return -(-self.batch * self.time * self.channels * self.x.item // 512) * 512

    @property
    def dropping(self) -> tuple[int, float]:
        """Of 65536 values how many are dropped, and what the others are multiplied by, so that their mean stays."""
        dropped = round(self.dropout * DROPS)
        return dropped, 0.0 if dropped == DROPS else DROPS / (DROPS - dropped)
