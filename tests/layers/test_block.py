"""Layers against the formulas of the paper."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.layers import AttentionConfig, GatedBlock, Layer, LayerConfig, ResidualBlock
from tests.comparison import assert_close
from tests.examples import ATTENTION, EMA, HEADS, TCN, pairwise
from tests.layers import formulas

WIDTH = 8
CONFIG = LayerConfig(d_model=WIDTH, mixer=TCN, attention=ATTENTION, d_ff=12)
MIXERS = [TCN, EMA, None]


class Zero(nn.Module):
    """A dropout that drops everything."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _config(**changes: Any) -> LayerConfig:
    return dataclasses.replace(CONFIG, **changes)


def _gated(**changes: Any) -> GatedBlock:
    module = GatedBlock(_config(**changes)).double().eval()
    formulas.scramble(module)
    return module


def _residual(**changes: Any) -> ResidualBlock:
    module = ResidualBlock(_config(**{"gated": False, **changes})).double().eval()
    formulas.scramble(module)
    return module


def _x(time: int = 11) -> Tensor:
    return torch.randn(2, time, WIDTH, dtype=torch.float64)


def _run(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, None, None, False, False)[0].detach()


def _affine(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.T + layer.bias


@torch.no_grad()
def gated_formula(module: GatedBlock, config: LayerConfig, x: Tensor) -> Tensor:
    """Section 3.3 of MEGA with any mixer, line by line."""
    assert config.attention is not None
    act = getattr(F, config.activation)
    d, z, v = config.d_model, config.attention.d_key, config.attention.d_value
    entered = formulas.normalized(module.norm, config.norm, x) if config.prenorm else x
    values = act(_affine(module.values, entered))
    projected = _affine(module.gates, formulas.mixed(module.mixer, entered))
    u = torch.sigmoid(projected[..., :d])
    zeta, r = F.silu(projected[..., d : d + z]), F.silu(projected[..., d + z : d + z + v])
    h = projected[..., d + z + v :]
    q, k = zeta * module.gamma[0] + module.beta[0], zeta * module.gamma[1] + module.beta[1]
    attended = formulas.attention(module.attention, q, k, values)
    candidate = act(h + _affine(module.output, attended * r))
    out = x + u * (candidate - x)
    return out if config.prenorm else formulas.normalized(module.norm, config.norm, out)


@torch.no_grad()
def residual_formula(module: ResidualBlock, config: LayerConfig, x: Tensor) -> Tensor:
    """`x + mixer`, `x + attention`."""
    if module.mixer is not None:
        assert module.mixer_norm is not None
        entered = formulas.normalized(module.mixer_norm, config.norm, x) if config.prenorm else x
        x = x + formulas.mixed(module.mixer, entered)
        x = x if config.prenorm else formulas.normalized(module.mixer_norm, config.norm, x)
    if module.attention is not None:
        assert config.attention is not None
        z = config.attention.d_key
        entered = formulas.normalized(module.attention_norm, config.norm, x) if config.prenorm else x
        projected = _affine(module.projection, entered)
        q, k, values = projected[..., :z], projected[..., z : 2 * z], projected[..., 2 * z :]
        x = x + _affine(module.output, formulas.attention(module.attention, q, k, values))
        x = x if config.prenorm else formulas.normalized(module.attention_norm, config.norm, x)
    return x


@pytest.mark.parametrize(
    ("mixer", "causal", "prenorm", "norm"),
    pairwise(MIXERS, [True, False], [True, False], ["layer", "scale", "batch"]),
)
def test_gated_block_equals_the_formula(mixer: Any, causal: bool, prenorm: bool, norm: str) -> None:
    changes = {"mixer": mixer, "causal": causal, "prenorm": prenorm, "norm": norm}
    module, x = _gated(**changes), _x()
    assert_close(_run(module, x), gated_formula(module, _config(**changes), x))


@pytest.mark.parametrize(
    ("mixer", "causal", "prenorm", "attention"),
    pairwise(MIXERS, [True, False], [True, False], [ATTENTION, HEADS, None]),
)
def test_residual_block_equals_the_formula(
    mixer: Any, causal: bool, prenorm: bool, attention: AttentionConfig | None
) -> None:
    changes = {"mixer": mixer, "causal": causal, "prenorm": prenorm, "attention": attention, "gated": False}
    module, x = _residual(**changes), _x()
    assert_close(_run(module, x), residual_formula(module, _config(**changes), x))


@pytest.mark.parametrize("causal", [True, False])
def test_gated_block_has_several_heads(causal: bool) -> None:
    changes: dict[str, Any] = {"attention": dataclasses.replace(HEADS, d_value=6, chunk_size=4), "causal": causal}
    module, x = _gated(**changes), _x()
    assert_close(_run(module, x), gated_formula(module, _config(**changes), x))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "residual"])
def test_layer_is_a_block_then_a_feed_forward_net(gated: bool) -> None:
    layer, x = Layer(_config(gated=gated)).double(), _x()
    assert layer.feed_forward is not None
    mixed = layer.block(x, None, None, False, False)[0]
    assert_close(layer(x)[0].detach(), layer.feed_forward(mixed).detach())
    assert Layer(_config(gated=gated, d_ff=0)).feed_forward is None


def test_gated_block_drops_the_mixers_output_and_the_candidate() -> None:
    module, x = _gated(), _x()
    module.dropout = Zero()  # type: ignore[assignment]
    # What is left of X' is the bias of the projection, and of H nothing.
    u = torch.sigmoid(module.gates.bias[:WIDTH])
    assert_close(_run(module, x), (x - u * x).detach())


def test_gated_block_drops_values() -> None:
    module, other, x = _gated(), _gated(), _x()
    other.load_state_dict(module.state_dict())
    module.value_dropout = Zero()  # type: ignore[assignment]
    with torch.no_grad():
        # Without biases SiLU leaves values of zero.
        other.values.weight.zero_()
        other.values.bias.zero_()
    assert_close(_run(module, x), _run(other, x))


def test_residual_block_drops_what_it_adds() -> None:
    module, x = _residual(), _x()
    module.dropout = Zero()  # type: ignore[assignment]
    assert torch.equal(_run(module, x), x)


def test_residual_block_drops_values() -> None:
    module, x = _residual(mixer=None), _x()
    module.value_dropout = Zero()  # type: ignore[assignment]
    assert_close(_run(module, x), (x + module.output.bias).detach())


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "residual"])
def test_probabilities_arrive_where_they_belong(gated: bool) -> None:
    changes = {"dropout": 0.1, "value_dropout": 0.2, "ff_dropout": 0.3, "feature_dropout": True}
    layer = Layer(_config(gated=gated, **changes))
    block, net = layer.block, layer.feed_forward
    assert net is not None
    drops = [block.dropout, net.dropout, block.value_dropout, net.hidden_dropout]
    assert [drop.probability for drop in drops] == [0.1, 0.1, 0.2, 0.3]
    assert all(drop.feature for drop in drops)
