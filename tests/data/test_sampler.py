"""The order of examples is a pure function of seed and position, and processes divide it without gaps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcnca.data.sampler import bucketed_indices, eval_windows, rank_range, shuffled_indices
from tcnca.errors import ConfigError

positions = st.integers(0, 300)


@given(seed=st.integers(0, 5), count=st.integers(1, 60), epoch=st.integers(0, 9))
def test_every_epoch_has_every_example_once(seed: int, count: int, epoch: int) -> None:
    found = shuffled_indices(seed, count, epoch * count, (epoch + 1) * count)
    assert sorted(found) == list(range(count))


@given(count=st.integers(1, 60), bounds=st.tuples(positions, positions, positions).map(sorted))
def test_a_walk_can_be_read_in_pieces(count: int, bounds: list[int]) -> None:
    a, b, c = bounds
    pieces = np.concatenate([shuffled_indices(3, count, a, b), shuffled_indices(3, count, b, c)])
    np.testing.assert_array_equal(shuffled_indices(3, count, a, c), pieces)


def test_epochs_seeds_and_streams_differ() -> None:
    walks = [
        shuffled_indices(0, 100, 0, 100),
        shuffled_indices(0, 100, 100, 200),
        shuffled_indices(1, 100, 0, 100),
        shuffled_indices(0, 100, 0, 100, "another"),
    ]
    # Two independent orders agree in one position on average.
    for index, walk in enumerate(walks):
        assert all((walk == other).sum() < 10 for other in walks[:index])


@pytest.mark.parametrize(("count", "batch_size"), [(640, 10), (100, 32), (33, 32), (32, 32), (100, 99)])
def test_buckets_cover_an_epoch_evenly(count: int, batch_size: int) -> None:
    """Batches of small data sets hold different examples, too."""
    lengths = np.random.default_rng(0).integers(1, 900, count)
    seen = Counter[int]()
    for step in range(3 * count // batch_size):
        found = Counter(bucketed_indices(1, lengths, step, batch_size).tolist())
        # An example occurs twice where an epoch ends inside the batch.
        assert max(found.values()) <= 2
        seen += found
    assert max(seen.values()) - min(seen[index] for index in range(count)) <= 2


def test_buckets_have_similar_lengths_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 640)
    batches = [lengths[bucketed_indices(0, lengths, step, 10)] for step in range(128)]
    assert np.mean([batch.max() - batch.min() for batch in batches]) < 60
    longest = [int(batch.max()) for batch in batches]
    assert abs(np.corrcoef(longest[:64], np.arange(64))[0, 1]) < 0.5
    assert longest[:64] != longest[64:]


@given(rows=st.integers(0, 200), world_size=st.integers(1, 40))
def test_processes_divide_all_rows(rows: int, world_size: int) -> None:
    ranges = [rank_range(rows, rank, world_size) for rank in range(world_size)]
    assert [row for begin, end in ranges for row in range(begin, end)] == list(range(rows))
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_process_that_does_not_exist(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank: expected 0 to 2 with 3 processes, got {rank}"):
        rank_range(10, rank, 3)


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=6), more=st.integers(0, 20), width=st.integers(1, 30))
def test_windows_hold_every_time_step_once(lengths: list[int], more: int, width: int) -> None:
    longest = max(lengths) + more
    found = list(eval_windows(np.array(lengths), longest, width))
    assert sum(size for _, size, _ in found) == longest
    assert [sum(int(valid[row]) for _, _, valid in found) for row in range(len(lengths))] == lengths
    assert all(valid.max() <= size for _, size, valid in found)
