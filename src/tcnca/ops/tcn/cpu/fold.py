"""A sequence folded by a dilation, and the pieces of it that fit into a processor's caches.

The times `phase, phase + dilation, phase + 2 · dilation, …` are one row: a convolution of that dilation mixes no two
rows, and along a row it has no dilation at all. Rows of tokens with all their channels side by side are what the
processor's fast convolutions read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = SLAB = 1 << 20  # numbers; more of them leave the caches, fewer are not worth the calls
FEWEST_CHANNELS = 32  # of a slab that has not all of them; with 16 the weights' gradients take half as long again


class Piece(NamedTuple):
    """Tokens `start` to `stop` of some rows: `phases` of them from `phase` on in each of some sequences."""

    sequence: int
    sequences: int
    phase: int
    phases: int
    start: int
    stop: int

    def shape(self, channels: int, more: int = 0) -> tuple[int, int, int, int]:
        """`[sequences, phases, tokens, channels]`, with some tokens `more`."""
        return self.sequences, self.phases, self.stop - self.start + more, channels


class Folded:
    """`[batch, time, channels]` seen as rows; some may lack the last token that others have."""

    def __init__(self, x: Tensor, dilation: int) -> None:
        self.x, self.dilation = x, dilation
        self.whole, self.rest = divmod(x.shape[1], dilation)  # tokens that every row has, rows that have one more
        self.tokens = self.whole + (self.rest > 0)
        self.offset, self.strides = x.storage_offset(), x.stride()

    def _view(self, piece: Piece, phases: int, start: int, stop: int) -> Tensor:
        sequence, token, channel = self.strides
        step = token * self.dilation
        return self.x.as_strided(
            (piece.sequences, phases, stop - start, self.x.shape[2]),
            (sequence, token, step, channel),
            self.offset + piece.sequence * sequence + piece.phase * token + start * step,
        )

    def parts(self, piece: Piece, rows: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
        """The tokens from `first` on that `rows` (`[sequences, phases, tokens, channels]`) has room for, with it."""
        last = first + rows.shape[2]
        start, stop = max(first, 0), min(last, self.whole)
        found = []
        if start < stop:
            place = rows if stop - start == rows.shape[2] else rows[:, :, start - first : stop - first]
            found.append((self._view(piece, piece.phases, start, stop), place))
        phases = min(self.rest - piece.phase, piece.phases)
        if first <= self.whole < last and phases > 0:
            place = rows[:, :phases, self.whole - first : self.whole + 1 - first]
            found.append((self._view(piece, phases, self.whole, self.whole + 1), place))
        return found

    def load(self, piece: Piece, rows: Tensor, first: int) -> None:
        """Copy the tokens from `first` on into `rows`, with zeros for those that are not there."""
        if first < 0:
            rows[:, :, :-first].zero_()
        if first + rows.shape[2] > self.tokens:
            rows[:, :, self.tokens - first :].zero_()
        self.clear_missing(piece, rows, first)
        for source, place in self.parts(piece, rows, first):
            place.copy_(source)

    def store(self, piece: Piece, rows: Tensor, skip: Folded | None) -> None:
        """Copy a piece's rows to where they belong, added to those of `skip`."""
        places = self.parts(piece, rows, piece.start)
        if skip is None:
            for target, part in places:
                target.copy_(part)
        else:
            for (target, part), (other, _) in zip(places, skip.parts(piece, rows, piece.start), strict=True):
                torch.add(other, part, out=target)

    def clear_missing(self, piece: Piece, rows: Tensor, first: int) -> None:
        """Zeros where rows lack the last token that others have."""
        if self.rest and first <= self.whole < first + rows.shape[2]:
            rows[:, max(self.rest - piece.phase, 0) :, self.whole - first].zero_()


def pieces(shape: torch.Size, dilation: int) -> Iterator[Piece]:
    """All of a folded sequence: several whole rows a piece, or a part of one."""
    batch, time, channels = shape
    phases, tokens = min(dilation, time), -(-time // dilation)
    room = max(PIECE // channels, 1)
    step = min(tokens, room)
    width = min(phases, max(room // tokens, 1))
    height = max(room // (tokens * phases), 1)
    for top in range(0, batch, height):
        for left in range(0, phases, width):
            for start in range(0, tokens, step):
                yield Piece(
                    top,
                    min(height, batch - top),
                    left,
                    min(width, phases - left),
                    start,
                    min(start + step, tokens),
                )


def slabs(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Sequences and channels whose blocks are computed one after the other, before those of the next slab."""
    batch, time, channels = shape
    width = min(channels, max(SLAB // time // FEWEST_CHANNELS, 1) * FEWEST_CHANNELS)
    height = max(SLAB // (time * width), 1)
    for top in range(0, batch, height):
        for left in range(0, channels, width):
            yield slice(top, min(top + height, batch)), slice(left, min(left + width, channels))
