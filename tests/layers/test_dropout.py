"""Dropout of single values and of whole channels."""

from __future__ import annotations

import math

import pytest
import torch

from tcnca.layers import Dropout
from tests.comparison import assert_close

P = 0.3
FORMS = pytest.mark.parametrize("feature", [False, True], ids=["values", "features"])


@FORMS
def test_evaluation_returns_the_input_itself(feature: bool) -> None:
    x = torch.randn(2, 5, 3)
    assert Dropout(P, feature).eval()(x) is x


@FORMS
def test_probability_zero_returns_the_input_itself(feature: bool) -> None:
    x = torch.randn(2, 5, 3)
    assert Dropout(0.0, feature).train()(x) is x


@FORMS
def test_what_stays_is_scaled_up_and_the_rest_is_zero(feature: bool) -> None:
    x = torch.randn(4, 50, 20, dtype=torch.float64)
    y = Dropout(P, feature)(x)
    kept = y != 0
    assert kept.any()
    assert not kept.all()
    assert_close(y, x / (1 - P) * kept)


@FORMS
def test_expectation_is_the_input(feature: bool) -> None:
    drop, draws = Dropout(P, feature), 4000
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    mean = torch.stack([drop(x) for _ in range(draws)]).mean(0)
    # Five standard errors of the mean of so many draws.
    bound = 5 * x.abs() * math.sqrt(P / (1 - P) / draws)
    assert bool(((mean - x).abs() <= bound).all())


def test_feature_dropout_takes_whole_channels_of_a_sequence() -> None:
    y = Dropout(P, feature=True)(torch.ones(8, 30, 40))
    kept = y != 0
    assert torch.equal(kept, kept[:, :1].expand_as(kept)), "a channel is kept or dropped for all times together"
    assert len({tuple(row.tolist()) for row in kept[:, 0]}) == 8, "each sequence draws its own channels"


def test_value_dropout_takes_single_times() -> None:
    kept = Dropout(P)(torch.ones(8, 30, 40)) != 0
    assert not torch.equal(kept, kept[:, :1].expand_as(kept))


@FORMS
def test_each_call_draws_anew(feature: bool) -> None:
    drop, x = Dropout(P, feature), torch.ones(4, 10, 30)
    assert not torch.equal(drop(x), drop(x))


@FORMS
def test_gradient_is_dropped_where_the_value_was(feature: bool) -> None:
    x = torch.randn(3, 7, 9, dtype=torch.float64, requires_grad=True)
    y = Dropout(P, feature)(x)
    y.sum().backward()
    assert x.grad is not None
    assert_close(x.grad * x.detach(), y.detach())
