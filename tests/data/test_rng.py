"""Random numbers are a function of their key: identical on every machine, different for different keys."""

from __future__ import annotations

import itertools
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tcnca.data.rng import CounterRNG

KEY = (7, "golden", 3)

# All generated data sets consist of these numbers: if one of them changes, every data set of every seed changes.
RAW = [13863595368361518849, 1862546299467710996, 6236428474787941563, 12481485928934042803]
UNIFORM = ["0x1.80cac511f1e0cp-1", "0x1.9d917fdbd7dc0p-4", "0x1.5a30fa9f8b772p-2", "0x1.5a6e4aa52e4cdp-1"]
INTEGERS = [750, 96, 334, 675, 648, 406, 819, 657, 115, 806, 580, 324]
PERMUTATION = [1, 8, 11, 2, 5, 10, 4, 7, 3, 0, 9, 6]


class Constant(CounterRNG):
    """Always returns the same bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def raw(self, count: int) -> NDArray[np.uint64]:
        return np.full(count, self.bits, np.uint64)


def test_numbers_of_a_key_never_change() -> None:
    assert CounterRNG(cast(int, np.int64(7)), "golden", 3).raw(4).tolist() == RAW
    assert CounterRNG(*KEY).raw(4).tolist() == RAW
    assert [number.hex() for number in CounterRNG(*KEY).uniform(4).tolist()] == UNIFORM
    assert CounterRNG(*KEY).integers(-5, 1000, 12).tolist() == INTEGERS
    assert CounterRNG(*KEY).permutation(12).tolist() == PERMUTATION


def test_distributions_follow_from_the_bits() -> None:
    bits = CounterRNG(*KEY).raw(12).tolist()
    assert CounterRNG(*KEY).uniform(12).tolist() == [(number >> 11) / 2**53 for number in bits]
    # In exact arithmetic, where the library uses floating point.
    assert CounterRNG(*KEY).integers(-5, 1000, 12).tolist() == [-5 + ((number >> 11) * 1005 >> 53) for number in bits]
    assert CounterRNG(*KEY).permutation(12).tolist() == sorted(range(12), key=lambda index: bits[index])


def test_numbers_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    rng = CounterRNG(*KEY)
    assert [int(rng.raw(1)[0]), *rng.raw(0).tolist(), *rng.raw(3).tolist()] == RAW
    assert CounterRNG(*KEY).uniform(2, 3).ravel().tolist() == CounterRNG(*KEY).uniform(6).tolist()
    assert CounterRNG(*KEY).integers(0, 9, 3, 1, 2).ravel().tolist() == CounterRNG(*KEY).integers(0, 9, 6).tolist()


def test_different_keys_give_different_streams() -> None:
    keys: list[tuple[int | str, ...]] = [(1, "2"), ("1", 2), (1, 2), ("1", "2"), ("1, 2",), (12,), ("12",), (), (1,)]
    keys += [(1, 2, 0), (2, 1), (-1, 2)]
    streams = {key: CounterRNG(*key).raw(8).tolist() for key in keys}
    for one, other in itertools.combinations(keys, 2):
        assert not set(streams[one]) & set(streams[other]), (one, other)


@pytest.mark.parametrize("width", [1, 3, 1000, 2**31 + 1, 2**53])
def test_extreme_bits_stay_in_range(width: int) -> None:
    assert Constant(0).integers(5, 5 + width, 1).item() == 5
    assert Constant(2**64 - 1).integers(5, 5 + width, 1).item() == 5 + width - 1
    assert Constant(2**64 - 1).uniform(1).item() == 1 - 2**-53


@given(count=st.integers(0, 300), seed=st.integers())
def test_permutations_are_complete(count: int, seed: int) -> None:
    assert sorted(CounterRNG(seed).permutation(count).tolist()) == list(range(count))
    assert Constant(1).permutation(count).tolist() == list(range(count))
