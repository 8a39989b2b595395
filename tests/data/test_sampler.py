"""The order of examples is a pure function of seed and place, and processes share it without gaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcnca.data.sampler import calls, part, places, training_part
from tcnca.errors import ConfigError

numbers = st.integers(0, 300)


@given(seed=st.integers(0, 5), count=st.integers(1, 60), epoch=st.integers(0, 9))
def test_every_epoch_has_every_example_once(seed: int, count: int, epoch: int) -> None:
    found = places(seed, count, epoch * count, (epoch + 1) * count)
    assert sorted(found) == list(range(count))


@given(count=st.integers(1, 60), bounds=st.tuples(numbers, numbers, numbers).map(sorted))
def test_a_walk_can_be_read_in_pieces(count: int, bounds: list[int]) -> None:
    a, b, c = bounds
    pieces = np.concatenate([places(3, count, a, b), places(3, count, b, c)])
    np.testing.assert_array_equal(places(3, count, a, c), pieces)


def test_a_walk_does_not_depend_on_what_was_asked_before() -> None:
    late = places(0, 50, 990, 1010)
    for begin in range(0, 2000, 50):
        places(0, 50, begin, begin + 50)
    np.testing.assert_array_equal(places(0, 50, 990, 1010), late)


def test_epochs_seeds_and_streams_differ() -> None:
    walks = [
        places(0, 100, 0, 100),
        places(0, 100, 100, 200),
        places(1, 100, 0, 100),
        places(0, 100, 0, 100, "another"),
    ]
    assert len({tuple(walk.tolist()) for walk in walks}) == len(walks)
    # Two independent orders agree in one place on average.
    for index, walk in enumerate(walks):
        for other in walks[:index]:
            assert (walk == other).sum() < 10


def test_an_order_has_no_trace_of_the_old_one() -> None:
    walk = places(0, 10_000, 0, 10_000)
    assert abs(np.corrcoef(walk, np.arange(10_000))[0, 1]) < 0.05


@given(rows=st.integers(0, 200), world_size=st.integers(1, 40))
def test_processes_share_all_rows(rows: int, world_size: int) -> None:
    shares = [part(rows, rank, world_size) for rank in range(world_size)]
    assert [row for begin, end in shares for row in range(begin, end)] == list(range(rows))
    sizes = [end - begin for begin, end in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_a_process_that_does_not_exist(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank: got {rank}, allowed is 0 to 2"):
        part(10, rank, 3)


def test_a_training_batch_has_a_row_for_each_process() -> None:
    assert [training_part(3, rank, 3) for rank in range(3)] == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ConfigError, match="size: the batch has 2 rows, allowed is at least one for each of 3 proc"):
        training_part(2, 0, 3)


def test_calls_count_what_is_left_of_each_row() -> None:
    found = [(begin, width, real.tolist()) for begin, width, real in calls(np.array([10, 3, 0, 4]), 10, 4)]
    assert found == [(0, 4, [4, 3, 0, 4]), (4, 4, [4, 0, 0, 0]), (8, 2, [2, 0, 0, 0])]


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=6), more=st.integers(0, 20), call=st.integers(1, 30))
def test_calls_hold_every_time_step_once(lengths: list[int], more: int, call: int) -> None:
    longest = max(lengths) + more
    found = list(calls(np.array(lengths), longest, call))
    assert sum(width for _, width, _ in found) == longest
    assert [sum(int(real[row]) for _, _, real in found) for row in range(len(lengths))] == lengths
    assert all(real.max() <= width for _, width, real in found)
