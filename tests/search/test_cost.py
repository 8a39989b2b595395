"""The cost model: the fit, its data, what is kept on disk, and its predictions of real times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcnca.errors import ConfigError
from tcnca.layers import TCNConfig
from tcnca.search import CostModel, Size, Structure, enumerate_structures, run_search
from tcnca.search import cost as cost_module
from tcnca.search.cost import (
    FEATURES,
    Measurement,
    design,
    features,
    fit,
    load_or_fit,
    measure_bytes,
    measure_seconds,
    memory_features,
    nonnegative_least_squares,
)

SIZE = Size(length=2048, channels=32)
SECONDS = np.array([1e-3, 2e-3, 5e-4, 1e-3, 1e-4, 3e-3])
"""Seconds of a unit of each feature on a machine that does not exist."""


def synthetic(structures: Sequence[Structure]) -> list[Measurement]:
    bytes_ = [round(float(memory_features(SIZE, each) @ [1e6, 2e5, 3e6])) for each in structures]
    times = [float(features(SIZE, each) @ SECONDS) for each in structures]
    return [
        Measurement(structure=structure, seconds=seconds, bytes=peak)
        for structure, seconds, peak in zip(structures, times, bytes_, strict=True)
    ]


@given(st.integers(0, 10_000))
def test_least_squares_are_optimal(seed: int) -> None:
    """By the conditions of Karush, Kuhn and Tucker, which only the minimum satisfies."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = nonnegative_least_squares(matrix, target)
    slope = matrix.T @ (matrix @ x - target)
    assert (x >= 0.0).all()
    assert (slope >= -1e-8).all()
    assert np.abs(slope[x > 0.0]).max(initial=0.0) < 1e-8


def test_the_fit_recovers_a_cost_model() -> None:
    structures = enumerate_structures(SIZE.length)
    measured = synthetic(design(SIZE, structures))
    model = CostModel.fitted(SIZE, measured)
    np.testing.assert_allclose(model.time, SECONDS, rtol=1e-6)
    for each in synthetic(structures):
        assert model.seconds(each.structure) == pytest.approx(each.seconds, rel=1e-6)
        assert model.bytes(each.structure) == pytest.approx(each.bytes, rel=1e-5)


def test_a_few_delayed_measurements_change_little() -> None:
    structures = enumerate_structures(SIZE.length)
    measured = design(SIZE, structures)
    matrix = np.array([features(SIZE, each) for each in measured])
    times = matrix @ SECONDS
    times[::8] *= 3.0
    found = fit(matrix, times)
    errors = [abs(features(SIZE, each) @ (found - SECONDS)) / (features(SIZE, each) @ SECONDS) for each in structures]
    assert np.quantile(errors, 0.9) < 0.1


def test_features_count_what_is_used() -> None:
    # Dilations 1, 8 and 64 of a sequence of 50 tokens: 5, 5 and 1 taps, the last one without a dilation.
    found = dict(zip(FEATURES, features(Size(length=50), Structure(5, 8, 3)), strict=True))
    assert found["convolutions"] == 3
    assert found["taps"] == 11
    assert found["dilated"] == 1
    assert found["padding"] == pytest.approx((4 * 1 + 4 * 8) / 50)
    # Both sides reach 3 dilations of 16.
    both = dict(zip(FEATURES, features(Size(length=50, causal=False), Structure(9, 16, 2)), strict=True))
    assert both["taps"] == 9 + 7


def test_the_design_spans_the_features() -> None:
    structures = enumerate_structures(SIZE.length)
    chosen = design(SIZE, structures)
    assert len(set(chosen)) == 24
    values, part = (np.array([features(SIZE, each) for each in some]) for some in (structures, chosen))
    assert np.linalg.matrix_rank(part) == len(FEATURES)
    assert (part.max(0) >= 0.8 * values.max(0)).all()
    assert len(design(SIZE, structures[:3])) == 3


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("fields", [{}, {"block": "residual", "output": "none"}], ids=["linear", "residual"])
def test_every_kind_is_measured(fields: dict[str, Any], causal: bool) -> None:
    size = Size(length=300, channels=3, batch=2, causal=causal, base=TCNConfig(**fields))
    (seconds,) = measure_seconds(size, [Structure(3, 4, 5)], seconds=0.0)
    assert 0.0 < seconds < 10.0
    # At least the output, and the gradients of input and output.
    assert measure_bytes(size, Structure(3, 4, 5)) >= 2 * 4 * 300 * 3 * 2


def test_deeper_structures_need_more_memory() -> None:
    shallow, deep = (measure_bytes(SIZE, Structure(3, 2, depth)) for depth in (2, 10))
    # The backward pass holds the inputs of all convolutions.
    assert deep - shallow > 6 * 4 * SIZE.length * SIZE.channels


def test_too_little_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cost_module, "workload", fail)
    with pytest.raises(ConfigError, match="--batch: not enough memory for K=3 f=2 D=2 B=1; give a smaller --batch"):
        measure_seconds(SIZE, [Structure(3, 2, 2)], seconds=0.0)


def test_fits_are_kept_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Size] = []

    def measure(size: Size, structures: Sequence[Structure], **_: object) -> list[float]:
        calls.append(size)
        return [each.seconds for each in synthetic(structures)]

    monkeypatch.setattr(cost_module, "measure_seconds", measure)
    monkeypatch.setattr(cost_module, "measure_bytes", lambda *_: 1000)
    structures = enumerate_structures(SIZE.length)
    first, cached = load_or_fit(SIZE, structures, seconds=0.0)
    assert not cached
    again, cached = load_or_fit(SIZE, structures, seconds=0.0)
    assert cached
    assert (again.time == first.time).all()
    assert len(calls) == 1
    for other in (Size(length=2048, channels=33), Size(length=2048, channels=32, causal=False)):
        assert not load_or_fit(other, structures, seconds=0.0)[1]
    assert not load_or_fit(SIZE, structures, seconds=0.0, refit=True)[1]
    monkeypatch.setattr(cost_module, "versions", lambda: {"torch": "other"})
    assert not load_or_fit(SIZE, structures, seconds=0.0)[1]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_times_of_other_structures_are_predicted(causal: bool) -> None:
    size = Size(length=2048, channels=64, causal=causal)
    structures = enumerate_structures(size.length)
    fitted = design(size, structures)
    others = random.Random(0).sample([each for each in structures if each not in fitted], 20)
    times = measure_seconds(size, [*fitted, *others], seconds=60.0)
    pairs = zip(fitted, times, strict=False)
    model = CostModel.fitted(size, [Measurement(structure=it, seconds=spent, bytes=1) for it, spent in pairs])
    errors = [model.seconds(it) / spent - 1.0 for it, spent in zip(others, times[len(fitted) :], strict=True)]
    assert np.mean(np.abs(errors) <= 0.2) >= 0.9, np.round(errors, 2)


@pytest.mark.slow
def test_the_recommendation_is_nearly_the_best_of_all() -> None:
    size = Size(length=2048, channels=64)
    sizes = (3, 5, 7, 9, 13, 17, 25, 33, 49, 65)
    structures = enumerate_structures(size.length, kernel_sizes=sizes, convolutions=(1,))
    found = run_search(size, structures=structures, seconds=40.0, count=10).recommendation.structure
    complete = [each for each in structures if each.gapless]
    assert found in complete
    times = measure_seconds(size, complete, seconds=60.0)
    assert times[complete.index(found)] <= 1.1 * min(times)
