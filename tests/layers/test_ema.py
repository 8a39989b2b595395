"""The EMA as a module: its initialization, and its agreement with the formula."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from tcnca import EMAConfig
from tcnca.layers import EMA
from tcnca.layers.ema import EMAOutput
from tcnca.ops import EMABackend
from tests.comparison import assert_close
from tests.examples import pairwise
from tests.layers import formulas

DIRECTIONS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def _is_normal(values: Tensor, mean: float, deviation: float) -> bool:
    """Whether `values` may be drawn from this distribution: both moments within five standard errors."""
    values, error = values.detach(), deviation / math.sqrt(values.numel())
    return abs(float(values.mean()) - mean) < 5 * error and abs(
        float(values.std()) - deviation
    ) < 5 * error / math.sqrt(2)


@DIRECTIONS
def test_initialization(causal: bool) -> None:
    module = EMA(256, EMAConfig(d_state=16), causal)
    assert _is_normal(module.delta, 0, 0.2)
    assert _is_normal(module.alpha, 0, 0.2)
    assert _is_normal(module.beta[..., 0::2], 1, 0.02)
    assert _is_normal(module.beta[..., 1::2], -1, 0.02)
    assert _is_normal(module.gamma, 0, 1)
    assert _is_normal(module.omega, 0, 1)


@DIRECTIONS
def test_spread_initialization(causal: bool) -> None:
    module = EMA(256, EMAConfig(d_state=16, spread=True), causal)
    decays = (1 - module.alpha.sigmoid() * module.delta.sigmoid()).detach().flatten()
    assert float(decays.min()) > 0.4
    assert float(decays.max()) < 1.0
    # Those beyond what the damping can make are few, and end at its edge.
    quartiles = decays.quantile(torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([0.625, 0.75, 0.875]), atol=0.02)


@pytest.mark.parametrize(
    ("causal", "backend", "truncation", "output"),
    pairwise([True, False], ["fft", "scan", "recurrent"], [None, 1, 4, 50], get_args(EMAOutput)),
)
def test_equals_the_formula(causal: bool, backend: EMABackend, truncation: int | None, output: EMAOutput) -> None:
    module = EMA(5, EMAConfig(d_state=3, truncation=truncation, backend=backend, output=output), causal).double()
    formulas.scramble(module)
    x = torch.randn(2, 13, 5, dtype=torch.float64)
    assert_close(module(x).detach(), formulas.ema(module, x).detach())


def test_channels_do_not_mix() -> None:
    module, x = EMA(5, EMAConfig(d_state=3)).double(), torch.randn(2, 13, 5, dtype=torch.float64)
    changed = x.clone()
    changed[..., 0] += 1
    moved = (module(changed) - module(x)).abs().amax((0, 1))
    assert moved[0] > 0
    assert not moved[1:].any()
