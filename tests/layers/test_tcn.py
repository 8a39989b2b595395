"""The TCN as a module: its initialization, its norms, and its agreement with loops."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tcnca import TCNConfig
from tcnca.layers import TCN
from tcnca.layers.tcn import TCNBlock, TCNInit, TCNNorm, TCNOutput
from tcnca.ops import tcn
from tests.comparison import TOLERANCE, assert_close
from tests.examples import pairwise
from tests.layers import formulas

WIDTH = 5
SMALL: dict[str, Any] = {
    "kernel_size": 3,
    "dilation_factor": 2,
    "depth": 3,
    "block": "residual",
    "output": "none",
    "norm": "none",
}
DIRECTIONS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def _tcn(causal: bool = True, **fields: Any) -> TCN:
    config = TCNConfig(**{**SMALL, **fields})
    module = TCN(WIDTH, config, causal).double().eval()
    formulas.scramble(module)
    return module


def _start(width: int, causal: bool = True, **fields: Any) -> Tensor:
    """Return initial kernels."""
    return TCN(width, TCNConfig(**fields), causal).weight.detach()


def _x(time: int = 17) -> Tensor:
    return torch.randn(2, time, WIDTH, dtype=torch.float64)


def _has_deviation(values: Tensor, deviation: float) -> bool:
    """Whether normal `values` may have this standard deviation: within five standard errors."""
    return abs(float(values.detach().std()) / deviation - 1) < 5 / math.sqrt(2 * values.numel())


@pytest.mark.parametrize(
    ("causal", "norm", "convolutions", "bias", "block", "output"),
    pairwise([True, False], get_args(TCNNorm), [1, 2], [False, True], get_args(TCNBlock), get_args(TCNOutput)),
)
def test_equals_the_blocks_written_as_loops(
    causal: bool, norm: str, convolutions: int, bias: bool, block: str, output: str
) -> None:
    module = _tcn(causal, norm=norm, convolutions=convolutions, bias=bias, block=block, output=output)
    x = _x()
    with torch.no_grad():
        assert_close(module(x), formulas.tcn(module, x))


@pytest.mark.parametrize(
    ("causal", "kernel_size", "activation"), pairwise([True, False], [1, 2, 4], ["gelu", "relu", "none"])
)
def test_other_kernels_and_functions(causal: bool, kernel_size: int, activation: str) -> None:
    module = _tcn(causal, kernel_size=kernel_size, activation=activation, dilation_factor=3, depth=2)
    x = _x()
    with torch.no_grad():
        assert_close(module(x), formulas.tcn(module, x))


@pytest.mark.parametrize(("norm", "mixes"), [(name, name in ("rms", "layer")) for name in get_args(TCNNorm)])
def test_only_norms_over_channels_mix_channels(norm: str, mixes: bool) -> None:
    module, x = _tcn(norm=norm), _x()
    changed = x.clone()
    changed[..., 0] += 1
    with torch.no_grad():
        moved = (module(changed) - module(x)).abs().amax((0, 1))
    assert moved[0] > 0
    assert bool((moved[1:] > 0).all() if mixes else (moved[1:] == 0).all())


@pytest.mark.parametrize("convolutions", [1, 2])
def test_output_depends_on_the_receptive_field_and_nothing_older(convolutions: int) -> None:
    module = _tcn(convolutions=convolutions)
    reach = module.config.receptive_field
    x = _x(reach + 6).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x)[:, -1].sum(), x)
    assert bool((gradient[:, -reach:] != 0).all())
    assert bool((gradient[:, :-reach] == 0).all())
    held = sum(buffer.shape[1] for buffer in module.initial_state(2).buffers)
    assert held == reach - 1


def test_decay_start_has_a_first_block_of_unit_mixtures_of_four_exponentials() -> None:
    convolutions = 2
    weight = _start(64, kernel_size=17, convolutions=convolutions, block="residual", init="decay")
    assert all(_has_deviation(block, 0.1 / 17**0.5) for block in weight[1:])
    kernels = weight[0]
    assert_close(kernels.norm(dim=-1), torch.ones(convolutions, 64))
    # A sum of four exponentials obeys a recurrence of order four, so this matrix has that rank.
    place = torch.arange(9)
    strengths = torch.linalg.svdvals(kernels[..., place.unsqueeze(1) + place].double())
    assert bool((strengths[..., 4] <= TOLERANCE[torch.float32] * strengths[..., 0]).all())
    energy = kernels.square().mean((0, 1))
    assert energy[0] > 4 * energy[-1], "near taps weigh more than far ones"


@DIRECTIONS
@pytest.mark.parametrize(("kernel_size", "convolutions"), [(9, 1), (9, 2), (5, 1)])
def test_series_start_is_one_decaying_exponential_a_channel(causal: bool, kernel_size: int, convolutions: int) -> None:
    """As far as the digits of a lag reach: all of them if the kernel has as many taps to a side as the factor says."""
    factor = 4 if causal or kernel_size > 7 else 3
    config = TCNConfig(
        kernel_size=kernel_size,
        dilation_factor=factor,
        depth=3,
        convolutions=convolutions,
        block="chain",
        init="series",
        norm="none",
    )
    module = TCN(WIDTH, config, causal).double()
    module.reset_parameters()
    reach = factor**3
    impulse = torch.zeros(1, 2 * reach + 1, WIDTH, dtype=torch.float64)
    impulse[:, reach] = 1.0
    with torch.no_grad():
        response, _ = tcn(impulse, module.weight, factor, activation="none", residual=False, causal=causal)
    for channel in range(WIDTH):
        forwards = causal or channel % 2 == 0
        tail = response[0, reach:, channel] if forwards else response[0, : reach + 1, channel].flip(0)
        other = response[0, :reach, channel] if forwards else response[0, reach + 1 :, channel]
        decay = float(tail[1] / tail[0])
        assert 0.5 <= decay < 1.0
        assert_close(tail[:reach], tail[0] * decay ** torch.arange(reach, dtype=torch.float64))
        assert not tail[reach:].any()
        assert not other.any()


@DIRECTIONS
@pytest.mark.parametrize("block", ["linear", "chain"])
def test_ema_start_is_that_of_an_ema_as_far_as_the_first_kernel_reaches(causal: bool, block: str) -> None:
    torch.manual_seed(3)
    kernels = _start(400, causal, kernel_size=9, depth=3, convolutions=2, block=block, init="ema", norm="none")
    center = 0 if causal else 4
    first, others = kernels[0, 0], kernels.flatten(0, 1)[1:]
    assert not others[..., torch.arange(9) != center].any()
    assert bool((others[..., center] == 1.0).all())
    # MEGA's: sixteen decays of about 1 - σ(0)², with weights σ(0) γ / 4 of random signs and γ ~ N(0, 1).
    energy = first.square().mean(0)
    expected = 0.25 * 0.75 ** (2 * torch.arange(9 - center))
    past, future = energy[center:], energy[: center + 1].flip(0)
    for side in [past] if causal else [past, future]:
        torch.testing.assert_close(side[1:], expected[1:], rtol=0.3, atol=0.0)
    torch.testing.assert_close(past[0], expected[0] * (1 if causal else 2), rtol=0.3, atol=0.0)


@pytest.mark.parametrize(
    ("causal", "block", "init"),
    pairwise([True, False], get_args(TCNBlock), ["ema", "decay", "near", "graded"]),
)
def test_later_blocks_initially_add_little(causal: bool, block: str, init: str) -> None:
    """White noise of far tokens must not drown what is near; at the start, little of it is added."""
    fields: dict[str, Any] = {"kernel_size": 9, "depth": 4, "block": block, "init": init, "norm": "none"}
    kernels = _start(200, causal, **fields)[2:, 0]
    kernels[..., 0 if causal else 4] -= 0.0 if block == "residual" else 1.0
    added = kernels.square().sum(-1).mean(-1).sqrt()
    assert bool((added < 0.15).all()), added


@pytest.mark.parametrize(
    ("norm", "convolutions", "block", "init"),
    [
        case
        for case in pairwise(["none", "weight"], [1, 2], get_args(TCNBlock), get_args(TCNInit))
        if case[2:] != ("residual", "series")
    ],
)
def test_every_block_has_a_gradient_at_the_first_step(norm: str, convolutions: int, block: str, init: str) -> None:
    module = TCN(
        WIDTH, TCNConfig(**{**SMALL, "norm": norm, "convolutions": convolutions, "block": block, "init": init})
    )
    module(torch.randn(2, 30, WIDTH)).square().sum().backward()
    gradients = module.weight.grad if module.scale is None or init not in ("near", "ema") else module.scale.grad
    assert gradients is not None
    last = gradients[:, -1]
    assert bool((last.flatten(1) != 0).any(1).all())
    assert bool(torch.isfinite(gradients).all())


@pytest.mark.parametrize(("causal", "init"), [(True, "decay"), (False, "normal")])
def test_bias_starts_at_zero_and_weight_norm_starts_with_the_kernels_as_drawn(causal: bool, init: str) -> None:
    module = TCN(WIDTH, TCNConfig(kernel_size=3, norm="weight", output="none", bias=True, init=init), causal).double()  # type: ignore[arg-type]
    plain = TCN(WIDTH, TCNConfig(kernel_size=3, norm="none", output="none", init=init), causal).double()  # type: ignore[arg-type]
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    x = _x()
    assert module.bias is not None
    assert not module.bias.any()
    # The kernels were drawn in float32, and so were their lengths.
    assert_close(module(x).detach(), plain(x).detach(), dtype=torch.float32)


def test_dropout_drops_what_a_block_adds_in_training_only() -> None:
    module, x = _tcn(depth=1, dropout=0.25), _x(200)
    with torch.no_grad():
        added = module.eval()(x) - x
        dropped = module.train()(x) - x
    kept = dropped != 0
    assert kept.any()
    assert not kept.all()
    assert_close(dropped, added / 0.75 * kept)
