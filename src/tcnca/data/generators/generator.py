"""What a generator is, and which of its examples belong to which split.

An example belongs to a split by a hash of its content. So no example is in two splits, whatever was drawn with whatever
seed, and what streams endlessly during training never meets an example of a test set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, join, take
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS


class Generator(Protocol):
    """Makes examples. A frozen dataclass, so that its parameters can be written down and compared."""

    version: ClassVar[int]
    """Raised whenever the examples of a seed change. They depend on the names of the parameters, too."""

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """Exactly `count` examples, a pure function of the key of `draw`."""
        ...


def fingerprints(columns: Columns) -> NDArray[np.uint64]:
    """A hash of the input of each example, that is, of its first column."""
    column = next(iter(columns.values()))
    digests = b"".join(
        hashlib.blake2b(np.ascontiguousarray(column[index]).data, digest_size=8).digest()
        for index in range(len(column))
    )
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def shares(sizes: Mapping[str, int]) -> dict[str, float]:
    """The share of all examples that belongs to each split, for sets of the given proportions.

    Validation and test get a tenth more than theirs, so that a set is rarely held up by its small splits.
    """
    total = sum(sizes.values())
    small = {split: 1.1 * sizes[split] / total for split in SPLITS[1:]}
    return {SPLITS[0]: 1.0 - sum(small.values()), **small}


def split_of(prints: NDArray[np.uint64], share: Mapping[str, float]) -> NDArray[np.int64]:
    """The split of each fingerprint, as its place in `SPLITS`."""
    bounds = np.cumsum([share[split] for split in SPLITS[:-1]])
    return np.searchsorted(bounds, prints / 2.0**64, side="right")


class Stream:
    """Training examples without end, made as they are needed.

    Example `i` is a pure function of the seed and `i`: examples are made in blocks, each with a key of its own.
    """

    def __init__(self, generator: Generator, share: Mapping[str, float], block: int = 64) -> None:
        self.generator, self.share, self.block = generator, share, block
        self._last: dict[tuple[int, int], Columns] = {}

    def take(self, seed: int, begin: int, end: int) -> dict[str, Column]:
        """Examples `begin` up to, not including, `end` of the stream of a seed."""
        parts = []
        for number in range(begin // self.block, max(-(-end // self.block), begin // self.block + 1)):
            first = number * self.block
            inside = np.arange(max(begin - first, 0), min(end - first, self.block))
            parts.append(take(self._block(seed, number), inside))
        return join(parts)

    def _block(self, seed: int, number: int) -> Columns:
        # A batch often ends inside a block, where the next one begins.
        last = self._last
        if (seed, number) not in last:
            # Exchanged in one go: threads that read ahead may be here as well.
            self._last = last = {(seed, number): self._make(seed, number)}
        return last[seed, number]

    def _make(self, seed: int, number: int) -> Columns:
        parts: list[Columns] = []
        missing = self.block
        while missing:
            draw = CounterRNG(repr(self.generator), self.generator.version, seed, "stream", number, len(parts))
            made = self.generator.examples(draw, int(missing / self.share["train"]) + 1)
            kept = np.flatnonzero(split_of(fingerprints(made), self.share) == 0)[:missing]
            parts.append(take(made, kept))
            missing -= len(kept)
        return join(parts)
