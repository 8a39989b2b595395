"""A change at time t moves nothing before t in a causal model, and bidirectional models see the future."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcnca import ClassifierHeadConfig, RegressionHeadConfig, SequenceModel, ValueInputConfig
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_model

TIME = 22
EVERY = RegressionHeadConfig(pooling="none")
TIMES = (0, 3, 4, 13, TIME - 2)
# A Fourier transform spreads its rounding over all times: tests/layers/test_sgconv.py has a tolerance.
EXACT = pytest.mark.parametrize("name", [name for name in VARIANTS if name != "sgconv"])


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, TIME))


def _moved(model: SequenceModel, x: Tensor, time: int) -> Tensor:
    """Return the change of the output at each time if the token at `time` changes, relative to the outputs."""
    other = x.clone()
    other[:, time] = (other[:, time] + 1) % VOCABULARY
    before, after = model(x).logits, model(other).logits
    return ((before - after).abs().amax((0, 2)) / before.abs().max()).detach()


@EXACT
@torch.no_grad()
def test_a_change_moves_nothing_before_it(name: str) -> None:
    model, x = small_model(VARIANTS[name]), _tokens()
    for time in range(TIME):
        moved = _moved(model, x, time)
        assert not bool(moved[:time].any()), f"change at {time}"
        assert moved[time] > 1e-3, f"the token at {time} itself must matter"


@pytest.mark.parametrize("outlier", [1e6, 1e30, 3e38, torch.inf, -torch.inf, torch.nan])
@EXACT
@torch.no_grad()
def test_outliers_infinity_and_nan_do_not_go_back_in_time(name: str, outlier: float) -> None:
    model = small_model(VARIANTS[name], torch.float32, input=ValueInputConfig(), head=EVERY)
    x = torch.randn(2, TIME)
    parallel, streamed = model(x).logits, _streamed(model, x)
    for time in (1, 3, 13, TIME - 2):
        changed = x.clone()
        changed[0, time:] = outlier
        y = model(changed).logits
        assert torch.equal(y[0, :time], parallel[0, :time]), f"from {time} on"
        assert torch.equal(y[1], parallel[1]), "another row"
        assert torch.equal(_streamed(model, changed)[0, :time], streamed[0, :time]), f"from {time} on, streamed"


def _streamed(model: SequenceModel, x: Tensor) -> Tensor:
    state, outputs = None, []
    for piece in x.split([7, 1, 8, 6], 1):
        y, state = model(piece, state=state)
        outputs.append(y)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("family", FAMILY)
def test_bidirectional_models_see_past_and_future(family: str) -> None:
    model = small_model(family, causal=False, head=EVERY, input=ValueInputConfig(), num_layers=1)
    x = torch.randn(1, TIME, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).logits[:, 10].sum(), x)
    past, future = (int((part != 0).sum()) for part in (gradient[0, :10], gradient[0, 11:]))
    assert past > 0
    assert future > 0
    if family == "tcn-mlp":
        # Three blocks of dilations 1, 2 and 4 with one tap on each side.
        assert (past, future) == (7, 7)


@pytest.mark.parametrize("family", ["tcnca", "tcnca-simple"])
def test_attention_sees_its_chunk_only(family: str) -> None:
    # Without a mixer only attention moves information in time.
    model = small_model(family, mixer=None, causal=False, head=EVERY, input=ValueInputConfig())
    x = torch.randn(1, TIME, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).logits[:, 9].sum(), x)
    assert (gradient[0] != 0).nonzero().flatten().tolist() == [8, 9, 10, 11]


@torch.no_grad()
def test_batch_norm_sees_the_future_in_training_mode_only() -> None:
    head = ClassifierHeadConfig(num_classes=3, pooling="none")
    model, x = small_model("tcnca-simple", norm="batch", head=head), _tokens()
    assert not _moved(model.eval(), x, 12)[:12].any()
    assert bool((_moved(model.train(), x, 12)[:12] > 0).all()), "documented: statistics are of the whole batch"
