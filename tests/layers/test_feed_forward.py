"""The feed-forward net against its formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tcnca.layers import NORM_KINDS, FeedForward, Linear
from tests.comparison import assert_close
from tests.layers.formulas import normalized, scramble


@pytest.mark.parametrize("norm", NORM_KINDS)
@pytest.mark.parametrize("prenorm", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("function", ["silu", "gelu", "relu"])
def test_equals_the_formula(norm: str, prenorm: bool, function: str) -> None:
    net = FeedForward(6, 10, function=function, norm=norm, prenorm=prenorm).double().eval()
    scramble(net)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    act = getattr(F, function)
    inner = normalized(net.norm, norm, x) if prenorm else x
    hidden = act(inner @ net.up.weight.T + net.up.bias)
    summed = x + hidden @ net.down.weight.T + net.down.bias
    expected = summed if prenorm else normalized(net.norm, norm, summed)
    assert_close(net(x).detach(), expected.detach())


@pytest.mark.parametrize("prenorm", [True, False], ids=["pre-norm", "post-norm"])
def test_batch_norm_in_training_does_not_see_padding(prenorm: bool) -> None:
    net = FeedForward(6, 10, norm="batch", prenorm=prenorm).double()
    scramble(net)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    other = x.clone()
    other[1, 2:] = 1e3
    lengths = torch.tensor([5, 2])
    assert_close(net(other, lengths)[1, :2].detach(), net(x, lengths)[1, :2].detach())


@pytest.mark.parametrize("feature", [False, True], ids=["values", "features"])
def test_dropout_of_what_is_added(feature: bool) -> None:
    net = FeedForward(6, 10, dropout=0.4, feature_dropout=feature).double()
    scramble(net)
    x = torch.randn(4, 30, 6, dtype=torch.float64)
    with torch.no_grad():
        added, dropped = net.eval()(x) - x, net.train()(x) - x
    kept = dropped != 0
    assert kept.any()
    assert not kept.all()
    assert torch.equal(kept, kept[:, :1].expand_as(kept)) == feature
    assert_close(dropped, added / 0.6 * kept)


@pytest.mark.parametrize("feature", [False, True], ids=["values", "features"])
def test_hidden_dropout_drops_hidden_units(feature: bool) -> None:
    # A last map that only copies shows the hidden units.
    net = FeedForward(6, 6, hidden_dropout=0.4, feature_dropout=feature).double()
    scramble(net)
    x = torch.randn(4, 30, 6, dtype=torch.float64)
    with torch.no_grad():
        net.down.weight.copy_(torch.eye(6))
        net.down.bias.zero_()
        hidden = F.silu(net.up(net.norm(x)))
        dropped = net.train()(x) - x
    kept = dropped != 0
    assert torch.equal(kept, kept[:, :1].expand_as(kept)) == feature
    assert_close(dropped, hidden / 0.6 * kept)


def test_linear_maps_start_small_and_without_bias() -> None:
    layer = Linear(300, 200)
    assert abs(float(layer.weight.detach().std()) / 0.02 - 1) < 5 / math.sqrt(2 * layer.weight.numel())
    assert not layer.bias.any()
    assert Linear(3, 2, bias=False).bias is None


@pytest.mark.parametrize("bias", [True, False])
def test_parts_of_a_linear_map_are_the_same_with_gradients_and_without(bias: bool) -> None:
    layer = Linear(7, 9, bias=bias).double()
    scramble(layer)
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    parts = layer.parts(x, (2, 3, 4))
    with torch.no_grad():
        whole = layer(x)
        assert torch.equal(torch.cat(list(layer.parts(x, (2, 3, 4))), -1), whole)
    assert_close(torch.cat(list(parts), -1), whole)
    learned = [x, *layer.parameters()]
    slope = torch.randn_like(whole)
    ours = torch.autograd.grad(parts, learned, slope.split((2, 3, 4), -1))
    for actual, expected in zip(ours, torch.autograd.grad(layer(x), learned, slope), strict=True):
        assert_close(actual, expected)
