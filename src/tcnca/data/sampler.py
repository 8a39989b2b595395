"""Which examples a training step sees: a pure function of seed and step, on any number of processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

_TOGETHER = 32
"""Batches, at most, whose examples are sorted together: enough for like lengths, too few to show the same order in
every epoch."""


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, stream: str, epoch: int, count: int) -> NDArray[np.int64]:
    return CounterRNG(seed, "order", stream, epoch).permutation(count)


def places(seed: int, count: int, begin: int, end: int, stream: str = "") -> NDArray[np.int64]:
    """Numbers `begin` up to `end` of an endless walk over `count` examples, each epoch in a new random order.

    Walks of different `stream` are independent.
    """
    numbers = np.arange(begin, end)
    epochs = numbers // count
    found = np.empty(len(numbers), np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        found[inside] = _permutation(seed, stream, int(epoch), count)[numbers[inside] % count]
    return found


def alike(seed: int, lengths: NDArray[np.int64], step: int, size: int) -> NDArray[np.int64]:
    """The examples of one batch of the same walk in which sequences of like lengths are together.

    Of every `_TOGETHER` batches the examples are sorted by length and dealt out anew, and the batches shuffled: each
    epoch still meets every example once, up to those that such a group of batches shares with the next epoch. A small
    set makes smaller groups.
    """
    # Of several epochs, sorting would put the copies of an example side by side: a batch of few examples, many times.
    together = max(1, min(_TOGETHER, len(lengths) // size))
    group, inside = divmod(step, together)
    begin = group * together * size
    chosen = places(seed, len(lengths), begin, begin + together * size)
    batch = int(CounterRNG(seed, "alike", group).permutation(together)[inside])
    return chosen[np.argsort(lengths[chosen], kind="stable")][batch * size : (batch + 1) * size]


def groups(count: int, size: int) -> range:
    """Where each group of `size` of `count` examples begins."""
    if size < 1:
        raise ConfigError(f"size: got {size}, allowed is at least 1")
    return range(0, count, size)


def part(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows, from the first up to the second number, of one of `world_size` processes: shares as equal as can be."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: got {rank}, allowed is 0 to {world_size - 1}, one less than the number of processes")
    return rows * rank // world_size, rows * (rank + 1) // world_size


def training_part(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """`part` of a training batch, of which every process needs some."""
    if rows < world_size:
        raise ConfigError(
            f"size: the batch has {rows} rows, allowed is at least one for each of {world_size} processes"
        )
    return part(rows, rank, world_size)


def calls(lengths: NDArray[np.int64], longest: int, call: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Rows of the given lengths, read `call` time steps at a time.

    Yields where each call begins, how wide it is, and how many of its time steps each row still has. There are as many
    calls as a row of length `longest` needs.
    """
    for offset in range(0, longest, call):
        yield offset, min(call, longest - offset), np.clip(lengths - offset, 0, call)
