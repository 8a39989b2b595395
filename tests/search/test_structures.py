"""Structures: the lags that they reach, the enumeration, and the Pareto front."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcnca.errors import ConfigError
from tcnca.layers import TCN, TCNConfig
from tcnca.ops import lag_counts
from tcnca.search import Structure, enumerate_structures, pareto_front
from tcnca.search.structures import overrides
from tcnca.training import load_recipe

STRUCTURES = st.builds(Structure, st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))


def lags(structure: Structure, causal: bool) -> set[int]:
    """All sums of one tap of each convolution."""
    future = 0 if causal else (structure.kernel_size - 1) // 2
    found = {0}
    for block in range(structure.depth):
        for _ in range(structure.convolutions):
            taps = [(tap - future) * structure.dilation_factor**block for tap in range(structure.kernel_size)]
            found = {lag + tap for lag, tap in itertools.product(found, taps)}
    return found


@given(STRUCTURES, st.integers(1, 3000))
def test_lags_are_counted_as_by_brute_force(structure: Structure, length: int) -> None:
    assert structure.count_lags(length) == len(lags(structure, True) & set(range(length)))
    start = -((length - 1) // 2)
    assert structure.count_lags(length, causal=False) == len(lags(structure, False) & set(range(start, start + length)))
    counts = lag_counts(**dataclasses.asdict(structure))
    assert structure.count_lags(structure.receptive_field) == (counts > 0).sum()
    whole = set(range(structure.receptive_field))
    assert structure.gapless == (lags(structure, True) == whole)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("block", ["linear", "residual"])
def test_counted_lags_are_those_of_the_module(block: str, causal: bool) -> None:
    """The skip connections of residual blocks change no lag: every kernel has a tap of lag 0."""
    structure, length, place = Structure(3, 5, 3, 2), 200, 100
    fields: dict[str, Any] = {"output": "none", "init": "normal", "block": block}
    tcn = TCN(1, structure.config(TCNConfig(**fields)), causal).double()
    x = torch.randn(1, length, 1, dtype=torch.float64, requires_grad=True)
    last = length - 1 if causal else place
    (gradient,) = torch.autograd.grad(tcn(x)[0, last, 0], x)
    reached = {last - int(time) for time in gradient[0, :, 0].nonzero()}
    expected = {lag for lag in lags(structure, causal) if 0 <= last - lag < length}
    assert reached == expected
    window = length if causal else 2 * min(place, length - 1 - place) + 1
    half = 0 if causal else window // 2
    assert structure.count_lags(window, causal) == len({lag for lag in reached if -half <= lag < window - half})


def test_a_million_lags_take_no_time() -> None:
    start = time.thread_time()
    structures = enumerate_structures(2**20)
    counts = [structure.count_lags(2**20) for structure in structures]
    assert time.thread_time() - start < 2.0
    assert max(counts) == 2**20
    assert Structure(17, 8, 7).count_lags(2**20) == 2**20
    # Digits 0 to 2 to the base of 16: three of sixteen in each of the five places.
    assert Structure(3, 16, 5).count_lags(2**20) == 3**5


@pytest.mark.parametrize("length", [2, 65, 1000, 16_384])
def test_structures_cover_with_the_smallest_factor(length: int) -> None:
    found = enumerate_structures(length)
    assert len(set(found)) == len(found)
    for structure in found:
        assert structure.receptive_field >= length
        kernel_size, factor, depth, convolutions = (
            structure.kernel_size,
            structure.dilation_factor,
            structure.depth,
            structure.convolutions,
        )
        if factor > 2:
            assert Structure(kernel_size, factor - 1, depth, convolutions).receptive_field < length
        if depth > 1:
            assert factor >= 2
            # The last block is needed.
            assert Structure(kernel_size, factor, depth - 1, convolutions).receptive_field < length


def test_the_enumeration_is_complete() -> None:
    """Every covering structure is in the list, or has a smaller factor or a smaller depth in it."""
    length, sizes = 100, (3, 4, 7)
    found = set(enumerate_structures(length, kernel_sizes=sizes, convolutions=(1, 2), max_depth=7))
    for size, factor, depth, convolutions in itertools.product(sizes, range(2, 120), range(2, 8), (1, 2)):
        structure = Structure(size, factor, depth, convolutions)
        if structure.receptive_field < length:
            assert structure not in found
        else:
            smaller = (Structure(size, f, d, convolutions) for f in range(1, factor + 1) for d in range(1, depth + 1))
            assert any(each in found for each in smaller)


def test_partial_structures_have_no_gaps_and_cover_less() -> None:
    covering, found = set(enumerate_structures(500)), enumerate_structures(500, partial=True)
    others = [each for each in found if each not in covering]
    assert len(found) == len(set(found))
    assert others
    assert all(each.gapless and each.receptive_field < 500 for each in others)


def test_a_length_that_nothing_covers_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--length: expected a length that a TCN of at most 3 taps and 1 blocks cov"):
        enumerate_structures(100, kernel_sizes=(3,), max_depth=1)
    with pytest.raises(ConfigError, match="--length"):
        enumerate_structures(2**40)


def test_costs_are_those_of_the_module() -> None:
    structure, base = Structure(5, 3, 4, 2), TCNConfig(norm="weight", bias=True, block="residual", output="none")
    tcn = TCN(6, structure.config(base))
    assert structure.parameters(base, 6) == sum(parameter.numel() for parameter in tcn.parameters())
    assert structure.state_values(6) == sum(buffer.numel() for buffer in tcn.initial_state(1).buffers)
    assert structure.receptive_field == tcn.receptive_field


def test_overrides_change_a_recipe() -> None:
    recipe = load_recipe("enwik8-short").override(overrides(Structure(9, 5, 3, 2)))
    mixer = recipe.model_config().mixer
    assert isinstance(mixer, TCNConfig)
    assert (mixer.kernel_size, mixer.dilation_factor, mixer.depth, mixer.convolutions) == (9, 5, 3, 2)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=25))
def test_pareto_front_is_that_of_brute_force(rows: list[tuple[int, ...]]) -> None:
    def dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    expected = [not any(dominates(other, row) for other in rows) for row in rows]
    assert pareto_front(np.array(rows, dtype=float)).tolist() == expected
