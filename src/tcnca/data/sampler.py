"""Which examples a training step sees: a pure function of seed and step, for any number of processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tcnca.config import check_at_least
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

_GROUP = 32
"""Maximum number of batches whose examples are sorted together: enough for similar lengths, few enough that the order
differs between epochs."""


@functools.lru_cache(maxsize=8)
def _permutation(seed: int, stream: str, epoch: int, count: int) -> NDArray[np.int64]:
    return CounterRNG(seed, "order", stream, epoch).permutation(count)


def shuffled_indices(seed: int, count: int, begin: int, end: int, stream: str = "") -> NDArray[np.int64]:
    """Return positions `begin` to `end` of an endless walk over `count` examples, each epoch in a new random order.

    Walks with different `stream` are independent.
    """
    positions = np.arange(begin, end)
    epochs = positions // count
    indices = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = _permutation(seed, stream, int(epoch), count)[positions[inside] % count]
    return indices


def bucketed_indices(seed: int, lengths: NDArray[np.int64], step: int, batch_size: int) -> NDArray[np.int64]:
    """Return one batch of the same walk, with sequences of similar lengths grouped together.

    The examples of every `_GROUP` batches are sorted by length and redistributed, and these batches are shuffled. Each
    epoch still visits every example once, except those in a group that spans two epochs. Small data sets use smaller
    groups.
    """
    # A group of several epochs would put copies of one example next to each other in a batch.
    group_size = max(1, min(_GROUP, len(lengths) // batch_size))
    group, position = divmod(step, group_size)
    begin = group * group_size * batch_size
    chosen = shuffled_indices(seed, len(lengths), begin, begin + group_size * batch_size)
    batch = int(CounterRNG(seed, "alike", group).permutation(group_size)[position])
    return chosen[np.argsort(lengths[chosen], kind="stable")][batch * batch_size : (batch + 1) * batch_size]


def batch_starts(count: int, batch_size: int) -> range:
    """Return the index of the first example of each batch."""
    check_at_least("batch_size", batch_size, 1)
    return range(0, count, batch_size)


def rank_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first row and the end of the rows of one of `world_size` processes, divided as evenly as possible."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 to {world_size - 1} with {world_size} processes, got {rank}")
    return rows * rank // world_size, rows * (rank + 1) // world_size


def training_rank_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the `rank_range` of a training batch, in which every process needs at least one row."""
    if rows < world_size:
        raise ConfigError(
            f"batch_size: expected at least one row for each of the {world_size} processes, got {rows} rows; "
            "each of the grad_accum_steps counts as one: use fewer, or a larger batch.size and batch.initial_size"
        )
    return rank_range(rows, rank, world_size)


def eval_windows(lengths: NDArray[np.int64], longest: int, width: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Read rows of the given lengths `width` time steps at a time.

    Yields the begin of each window, its width, and the number of valid time steps of each row in it. There are as many
    windows as a row of length `longest` needs.
    """
    for offset in range(0, longest, width):
        yield offset, min(width, longest - offset), np.clip(lengths - offset, 0, width)
