"""Linear maps, dropout and the feed-forward net."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tcnca.layers import NORM_KINDS, Dropout, FeedForward, LayerConfig, Linear
from tests.comparison import assert_close
from tests.examples import pairwise
from tests.layers.formulas import normalized, scramble

P = 0.3
FEATURE = pytest.mark.parametrize("feature", [False, True], ids=["values", "features"])


@FEATURE
def test_dropout_scales_what_it_keeps(feature: bool) -> None:
    drop, x = Dropout(P, feature), torch.randn(8, 50, 40, dtype=torch.float64, requires_grad=True)
    y = drop(x)
    kept = y != 0
    assert abs(float(kept.double().mean()) - (1 - P)) < 0.1
    assert_close(y, x / (1 - P) * kept)
    assert torch.equal(kept, kept[:, :1].expand_as(kept)) == feature
    assert len({tuple(row.tolist()) for row in kept[:, 0]}) == 8, "rows are independent"
    assert not torch.equal(drop(x), y), "calls are independent"
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_close(gradient * x.detach(), y.detach())


@FEATURE
def test_dropout_returns_the_input_in_evaluation_mode_and_with_probability_zero(feature: bool) -> None:
    x = torch.randn(2, 5, 3)
    assert Dropout(P, feature).eval()(x) is x
    assert Dropout(0.0, feature)(x) is x


@pytest.mark.parametrize(("norm", "prenorm", "function"), pairwise(NORM_KINDS, [True, False], ["silu", "gelu", "relu"]))
def test_feed_forward_equals_the_formula(norm: str, prenorm: bool, function: str) -> None:
    net = FeedForward(LayerConfig(d_model=6, d_ff=10, activation=function, norm=norm, prenorm=prenorm)).double().eval()  # type: ignore[arg-type]
    scramble(net)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    inner = normalized(net.norm, norm, x) if prenorm else x
    hidden = getattr(F, function)(inner @ net.up.weight.T + net.up.bias)
    summed = x + hidden @ net.down.weight.T + net.down.bias
    expected = summed if prenorm else normalized(net.norm, norm, summed)
    assert_close(net(x).detach(), expected.detach())


@FEATURE
def test_feed_forward_drops_its_output_and_its_hidden_units(feature: bool) -> None:
    # A last map that is the identity shows the hidden units.
    for probabilities in ({"dropout": 0.4}, {"ff_dropout": 0.4}):
        config = LayerConfig(d_model=6, d_ff=6, feature_dropout=feature, **probabilities)  # type: ignore[arg-type]
        net = FeedForward(config).double()
        scramble(net)
        x = torch.randn(4, 30, 6, dtype=torch.float64)
        with torch.no_grad():
            net.down.weight.copy_(torch.eye(6))
            net.down.bias.zero_()
            added, dropped = net.eval()(x) - x, net.train()(x) - x
        kept = dropped != 0
        assert torch.equal(kept, kept[:, :1].expand_as(kept)) == feature
        assert_close(dropped, added / 0.6 * kept)


def test_split_linear_map_is_the_same_with_gradients_and_without() -> None:
    layer = Linear(7, (2, 3, 4)).double()
    scramble(layer)
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    parts = layer.split(x)
    with torch.no_grad():
        whole = layer(x)
        assert torch.equal(torch.cat(list(layer.split(x)), -1), whole)
    assert_close(torch.cat(list(parts), -1), whole)
    learned, slope = [x, *layer.parameters()], torch.randn_like(whole)
    ours = torch.autograd.grad(parts, learned, slope.split(layer.parts, -1))
    for actual, expected in zip(ours, torch.autograd.grad(layer(x), learned, slope), strict=True):
        assert_close(actual, expected)
