"""Random numbers are a function of their key alone: the same on every machine, and different for different keys."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tcnca.data.rng import CounterRNG

KEY = (7, "golden", 3)

# Prepared sets and streams are made of these numbers: if one of them changes, every set of every seed changes.
RAW = [13863595368361518849, 1862546299467710996, 6236428474787941563, 12481485928934042803]
UNIFORM = ["0x1.80cac511f1e0cp-1", "0x1.9d917fdbd7dc0p-4", "0x1.5a30fa9f8b772p-2", "0x1.5a6e4aa52e4cdp-1"]
INTEGERS = [750, 96, 334, 675, 648, 406, 819, 657, 115, 806, 580, 324]
PERMUTATION = [1, 8, 11, 2, 5, 10, 4, 7, 3, 0, 9, 6]

DIFFERENT: list[tuple[int | str, ...]] = [
    *((1, "2"), ("1", 2), (1, 2), ("1", "2"), ("1, 2",)),
    *((12,), ("12",), (), (1,), (1, 2, 0), (2, 1), (-1, 2)),
]


class Extreme(CounterRNG):
    """Always draws the same bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def raw(self, count: int) -> NDArray[np.uint64]:
        return np.full(count, self.bits, np.uint64)


def chi_square(counts: NDArray[np.int64]) -> float:
    """Of counts that are expected to be equal, per degree of freedom."""
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum() / (len(counts) - 1))


def test_bits_of_a_key_never_change() -> None:
    assert CounterRNG(*KEY).raw(4).tolist() == RAW


def test_uniform_numbers_of_a_key_never_change() -> None:
    assert [number.hex() for number in CounterRNG(*KEY).uniform(4).tolist()] == UNIFORM


def test_whole_numbers_of_a_key_never_change() -> None:
    assert CounterRNG(*KEY).integers(-5, 1000, 12).tolist() == INTEGERS


def test_permutation_of_a_key_never_changes() -> None:
    assert CounterRNG(*KEY).permutation(12).tolist() == PERMUTATION


def test_uniform_numbers_are_the_upper_53_bits() -> None:
    assert CounterRNG(*KEY).uniform(4).tolist() == [(bits >> 11) / 2**53 for bits in RAW]


def test_whole_numbers_and_permutations_follow_from_the_bits() -> None:
    bits = CounterRNG(*KEY).raw(12).tolist()
    # In exact arithmetic, where the library uses floating point.
    assert CounterRNG(*KEY).integers(-5, 1000, 12).tolist() == [-5 + ((number >> 11) * 1005 >> 53) for number in bits]
    assert CounterRNG(*KEY).permutation(12).tolist() == sorted(range(12), key=lambda place: bits[place])


def test_numbers_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    draw = CounterRNG(*KEY)
    assert [int(draw.raw(1)[0]), *draw.raw(0).tolist(), *draw.raw(3).tolist()] == RAW
    assert CounterRNG(*KEY).uniform(2, 3).ravel().tolist() == CounterRNG(*KEY).uniform(6).tolist()
    assert CounterRNG(*KEY).integers(0, 9, 3, 1, 2).ravel().tolist() == CounterRNG(*KEY).integers(0, 9, 6).tolist()


def test_different_keys_give_different_streams() -> None:
    streams = {key: CounterRNG(*key).raw(8).tolist() for key in DIFFERENT}
    for one, other in itertools.combinations(DIFFERENT, 2):
        assert not set(streams[one]) & set(streams[other]), (one, other)


def test_neighboring_keys_are_not_correlated() -> None:
    numbers = np.stack([CounterRNG("seed", seed).uniform(2000) for seed in range(40)])
    correlation = np.asarray(np.corrcoef(numbers))[np.triu_indices(40, 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(2000)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_a_number_of_numpy_is_the_same_key(kind: Any) -> None:
    """Its `repr` is not that of an `int`, and differs between versions of NumPy."""
    assert CounterRNG(cast(int, kind(7)), "golden", 3).raw(4).tolist() == RAW


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.sort(CounterRNG("uniform").uniform(100_000))
    assert numbers[0] >= 0
    assert numbers[-1] < 1
    # Kolmogorov and Smirnov's statistic, at a significance of 0.1 %.
    assert np.abs(numbers - np.arange(100_000) / 100_000).max() < 1.95 / np.sqrt(100_000)


@pytest.mark.parametrize(("low", "high"), [(0, 10), (2, 11), (-3, 4), (10, 14)])
def test_whole_numbers_fill_their_range_evenly(low: int, high: int) -> None:
    numbers = CounterRNG("integers", low).integers(low, high, 20_000)
    assert numbers.dtype == np.int64
    assert set(numbers.tolist()) == set(range(low, high))
    assert chi_square(np.bincount(numbers - low)) < 3


@pytest.mark.parametrize("d_model", [1, 3, 10, 1000, 2**31 + 1, 2**52 - 1, 2**53])
def test_whole_numbers_stay_below_their_bound_whatever_the_bits(width: int) -> None:
    assert Extreme(0).integers(5, 5 + width, 1).item() == 5
    assert Extreme(2**64 - 1).integers(5, 5 + width, 1).item() == 5 + width - 1


def test_largest_uniform_number_is_below_one() -> None:
    assert Extreme(2**64 - 1).uniform(1).item() == 1 - 2**-53
    assert Extreme(0).uniform(1).item() == 0


@given(count=st.integers(0, 300), seed=st.integers())
def test_permutation_is_one(count: int, seed: int) -> None:
    assert sorted(CounterRNG(seed).permutation(count).tolist()) == list(range(count))


def test_permutation_of_equal_bits_is_still_one() -> None:
    assert Extreme(1).permutation(50).tolist() == list(range(50))


def test_each_permutation_is_as_likely_as_the_others() -> None:
    draw = CounterRNG("permutations")
    orders = list(itertools.permutations(range(4)))
    found = [orders.index(tuple(draw.permutation(4).tolist())) for _ in range(4800)]
    assert chi_square(np.bincount(found, minlength=24)) < 2.2


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 0, 4)])
def test_nothing_can_be_drawn(shape: tuple[int, ...]) -> None:
    assert CounterRNG(1).uniform(*shape).shape == shape
    assert CounterRNG(1).integers(0, 5, *shape).shape == shape
