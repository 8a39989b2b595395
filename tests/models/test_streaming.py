"""One call or many: a sequence may be cut anywhere, and the state is all that has to be carried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import ClassifierHeadConfig, RegressionHeadConfig, SequenceModel, ValueInputConfig
from tests.comparison import assert_close
from tests.examples import FAMILY, VARIANTS, VOCABULARY, pairwise, small_config, small_model
from tests.models.gradients import assert_gradients_close, gradients

# More than three chunks of four tokens and the receptive field of two layers.
TIME = 33
CUTS = st.sets(st.integers(1, TIME - 1), max_size=6).map(sorted)


def _tokens(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _run(model: SequenceModel, x: Tensor, cuts: list[int], **options: Any) -> list[Tensor]:
    """Return the logits of each piece of `x`, cut at the times `cuts`."""
    state, pieces = None, []
    for start, end in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        logits, state = model(x[:, start:end], state=state, **options)
        pieces.append(logits)
    return pieces


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=8)
@given(cuts=CUTS, inplace=st.booleans())
@torch.no_grad()
def test_any_pieces_equal_one_call(name: str, cuts: list[int], inplace: bool) -> None:
    torch.manual_seed(0)
    model, x = small_model(VARIANTS[name]), _tokens()
    parallel = model(x, return_state=False).logits
    assert_close(torch.cat(_run(model, x, cuts, inplace=inplace), 1), parallel)


@pytest.mark.parametrize(
    ("family", "kind", "pooling"),
    pairwise(["tcnca", "ema-mlp"], [ClassifierHeadConfig, RegressionHeadConfig], ["mean", "last", "first", "none"]),
)
@settings(max_examples=5)
@given(cuts=CUTS, inplace=st.booleans())
@torch.no_grad()
def test_pooled_heads_stream_in_any_pieces(
    family: str, kind: Any, pooling: str, cuts: list[int], inplace: bool
) -> None:
    torch.manual_seed(0)
    head = kind(pooling=pooling, hidden=5)
    model = small_model(small_config(family, input=ValueInputConfig(features=3), head=head))
    x = torch.randn(2, TIME, 3, dtype=torch.float64)
    pieces = _run(model, x, cuts, inplace=inplace)
    if pooling == "none":
        assert_close(torch.cat(pieces, 1), model(x, return_state=False).logits)
        return
    for end, logits in zip([*cuts, TIME], pieces, strict=True):
        assert_close(logits, model(x[:, :end], return_state=False).logits, f"output after {end} tokens")


@pytest.mark.parametrize(
    ("family", "dtype", "inplace", "prompt"),
    pairwise(list(FAMILY), [torch.float64, torch.float32, torch.bfloat16], [False, True], [0, 1, 10]),
)
@torch.no_grad()
def test_token_by_token_equals_the_parallel_forward(
    family: str, dtype: torch.dtype, inplace: bool, prompt: int
) -> None:
    model, x = small_model(family, dtype), _tokens()
    parallel = model(x).logits
    cuts = list(range(max(prompt, 1), TIME))
    pieces = _run(model, x, cuts, inplace=inplace)
    assert pieces[0].dtype == dtype
    assert_close(torch.cat(pieces, 1), parallel)


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_a_call_does_not_change_the_given_state(family: str) -> None:
    model, x = small_model(family), _tokens()
    state = model(x[:, :6]).state
    assert state is not None
    before = state.clone().tensors()
    for step in (1, 9):
        model(x[:, 6 : 6 + step], state=state)
        model(x[:, 6 : 6 + step], state=state, return_state=False)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("family", FAMILY)
def test_gradients_flow_through_states(family: str) -> None:
    model, x = small_model(family), _tokens()
    weights = torch.randn(2, TIME, VOCABULARY, dtype=torch.float64)
    pieces = torch.cat(_run(model, x, [3, 4, 9, 20]), 1)
    expected = gradients((model(x, return_state=False).logits * weights).sum(), model)
    assert_gradients_close(gradients((pieces * weights).sum(), model), expected)
