"""A change at time t moves nothing before t in a causal model, and bidirectional ones do see the future."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcnca import ClassifierHeadConfig, ModelConfig, RegressionHeadConfig, SequenceModel, ValueInputConfig
from tests.comparison import TOLERANCE
from tests.examples import FAMILY, VOCABULARY, small_config, small_model

TIME = 22
EVERY = ClassifierHeadConfig(num_classes=3, pooling="none")

CAUSAL: dict[str, ModelConfig] = {family: small_config(family) for family in FAMILY}
for _position in ("none", "rotary", "rope"):
    CAUSAL[f"tcnca-{_position}"] = small_config("tcnca", position=_position)
    CAUSAL[f"mega-full-{_position}"] = small_config("mega-full", position=_position)
for _function in ("relu2", "laplace"):
    CAUSAL[f"tcnca-{_function}"] = small_config("tcnca", **{"attention.activation": _function})
    CAUSAL[f"mega-full-{_function}"] = small_config("mega-full", **{"attention.activation": _function})
CAUSAL |= {
    "mega-truncated": small_config("mega", truncation=5),
    "mega-scan": small_config("mega", backend="scan"),
    "mega-steps": small_config("mega", backend="recurrent"),
    "tcn-two-convolutions": small_config("tcn-mlp", convolutions=2),
    "tcnca-post-norm": small_config("tcnca", norm="scale", prenorm=False),
    "tcnca-batch-norm": small_config("tcnca", norm="batch"),
    "tcnca-classifier": small_config("tcnca", head=EVERY),
}


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, TIME))


def _moved(model: SequenceModel, x: Tensor, time: int) -> Tensor:
    """By how much a change of the token at `time` moves the output at each time, relative to the outputs' size."""
    other = x.clone()
    other[:, time] = (other[:, time] + 1) % VOCABULARY
    before, after = model(x).logits, model(other).logits
    return ((before - after).abs().amax((0, 2)) / before.abs().max()).detach()


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_a_change_moves_nothing_before_it(name: str) -> None:
    model, x = small_model(CAUSAL[name]), _tokens()
    for time in range(TIME):
        moved = _moved(model, x, time)
        # The FFT of an EMA spreads rounding errors over all times.
        assert bool((moved[:time] <= TOLERANCE[torch.float64]).all()), f"change at {time}"
        assert moved[time] > 1e-3, f"the token at {time} itself must matter"


@pytest.mark.parametrize("name", [name for name in CAUSAL if "mega" not in name and "ema" not in name])
@torch.no_grad()
def test_without_an_fft_nothing_before_moves_by_a_single_bit(name: str) -> None:
    model, x = small_model(CAUSAL[name]), _tokens()
    for time in range(1, TIME):
        assert not _moved(model, x, time)[:time].any(), f"change at {time}"


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("time", [0, 3, 4, 13, TIME - 2])
def test_gradients_by_later_inputs_are_zero(family: str, time: int) -> None:
    model = small_model(family, input=ValueInputConfig(features=3), head=RegressionHeadConfig(pooling="none"))
    x = torch.randn(2, TIME, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).logits[:, time].sum(), x)
    size = float(gradient.abs().max())
    assert bool(gradient[:, time].all())
    assert float(gradient[:, time + 1 :].abs().max()) <= TOLERANCE[torch.float64] * size


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_the_future_is_not_even_read(family: str) -> None:
    model, x = small_model(family), _tokens()
    whole = model(x).logits
    for time in (1, 4, 7, 15):
        difference = (model(x[:, :time]).logits - whole[:, :time]).abs().max() / whole.abs().max()
        assert float(difference) <= TOLERANCE[torch.float64], f"cut at {time}"


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_bidirectional_models_see_the_future(family: str) -> None:
    model, x = small_model(family, causal=False, head=EVERY), _tokens()
    for time in (1, 6, TIME - 1):
        assert _moved(model, x, time)[time - 1] > 1e-5, f"change at {time}"


@pytest.mark.parametrize("family", FAMILY)
def test_bidirectional_models_see_past_and_future_alike_far(family: str) -> None:
    model = small_model(
        family, causal=False, head=RegressionHeadConfig(pooling="none"), input=ValueInputConfig(), num_layers=1
    )
    x = torch.randn(1, TIME, dtype=torch.float64, requires_grad=True)
    place = 10
    (gradient,) = torch.autograd.grad(model(x).logits[:, place].sum(), x)
    seen = gradient[0] != 0
    past, future = int(seen[:place].sum()), int(seen[place + 1 :].sum())
    assert past > 0
    assert future > 0
    if family == "tcn-mlp":
        # Three blocks of dilations 1, 2 and 4 with a tap to either side.
        assert (past, future) == (7, 7)


@pytest.mark.parametrize("family", ["tcnca", "mega", "tcnca-simple"])
def test_attention_does_not_look_over_the_edge_of_its_chunk(family: str) -> None:
    # Without a mixer only attention moves things in time.
    model = small_model(
        family, mixer=None, causal=False, head=RegressionHeadConfig(pooling="none"), input=ValueInputConfig()
    )
    x = torch.randn(1, TIME, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).logits[:, 9].sum(), x)
    assert (gradient[0] != 0).nonzero().flatten().tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("name", ["tcnca", "tcnca-simple", "tcn-mlp"])
@torch.no_grad()
def test_batch_norm_of_training_looks_ahead_and_of_evaluation_does_not(name: str) -> None:
    model, x = small_model(name, norm="batch"), _tokens()
    assert not _moved(model.eval(), x, 12)[:12].any()
    assert bool((_moved(model.train(), x, 12)[:12] > 0).all()), "documented: statistics are of the whole batch"
