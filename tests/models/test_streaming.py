"""One call or many: a sequence may be cut anywhere, and the state is all that has to be carried."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import (
    ClassifierHeadConfig,
    ModelConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
    generate,
)
from tcnca.layers import NORM_KINDS
from tests.comparison import assert_close
from tests.examples import FAMILY, TCN, VOCABULARY, small_config, small_model
from tests.models.gradients import assert_gradients_close, gradients

# Over three chunks of four tokens and the whole receptive field of two layers.
TIME = 33

CASES: dict[str, ModelConfig] = {family: small_config(family) for family in FAMILY}
for _position in ("none", "rotary", "rope"):
    for _family in ("tcnca", "mega-full"):
        CASES[f"{_family}-{_position}"] = small_config(_family, position=_position)
for _function in ("relu2", "laplace"):
    for _family in ("mega", "mega-full", "tcnca-simple"):
        CASES[f"{_family}-{_function}"] = small_config(_family, **{"attention.activation": _function})
for _norm in NORM_KINDS:
    for _prenorm in (True, False):
        _name = f"{_norm}-{'pre' if _prenorm else 'post'}"
        CASES[f"tcnca-{_name}"] = small_config("tcnca", norm=_norm, prenorm=_prenorm)
        CASES[f"tcnca-simple-{_name}"] = small_config("tcnca-simple", norm=_norm, prenorm=_prenorm)
for _truncation in (1, 6):
    CASES[f"mega-truncated-{_truncation}"] = small_config("mega", truncation=_truncation)
    CASES[f"ema-mlp-truncated-{_truncation}"] = small_config("ema-mlp", truncation=_truncation)
for _method in ("scan", "recurrent"):
    CASES[f"mega-{_method}"] = small_config("mega", backend=_method)
    CASES[f"ema-mlp-truncated-{_method}"] = small_config("ema-mlp", backend=_method, truncation=6)
for _tcn_norm in ("none", "weight", "rms", "layer", "batch"):
    _tcn = dataclasses.replace(TCN, convolutions=2, bias=True, norm=_tcn_norm)
    CASES[f"tcn-mlp-two-convolutions-{_tcn_norm}"] = small_config("tcn-mlp", mixer=_tcn)
CASES |= {
    "tcnca-chunk-1": small_config("tcnca", chunk_size=1),
    "tcnca-kernel-1": small_config("tcnca", kernel_size=1),
    "tcnca-factor-1": small_config("tcnca", dilation_factor=1),
    "attention-alone-gated": small_config("tcnca", mixer=None),
    "attention-alone-plain": small_config("tcnca-simple", mixer=None),
    "feed-forward-alone": small_config("tcn-mlp", mixer=None),
    "no-feed-forward": small_config("tcnca", d_ff=0),
    "embedding-scaled-normed": small_config(
        "tcnca", input=TokenInputConfig(vocab_size=VOCABULARY, scale_embeddings=True, norm=True)
    ),
}

POOLED = {
    f"{family}-{type(head).__name__}-{head.pooling}": small_config(family, input=input, head=head)
    for family in ("tcnca", "ema-mlp")
    for input in (ValueInputConfig(features=3),)
    for head in [
        *(
            ClassifierHeadConfig(num_classes=3, pooling=pooling, hidden=5)
            for pooling in ("mean", "last", "first", "none")
        ),
        *(RegressionHeadConfig(outputs=2, pooling=pooling) for pooling in ("mean", "last", "first", "none")),
    ]
}


def _tokens(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _run(model: SequenceModel, x: Tensor, cuts: list[int], **options: Any) -> list[Tensor]:
    """The logits of each piece of `x`, cut at the times `cuts`, each call going on from the one before."""
    state, pieces = None, []
    for start, end in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        logits, state = model(x[:, start:end], state=state, **options)
        pieces.append(logits)
    return pieces


cuttings = st.sets(st.integers(1, TIME - 1), max_size=6).map(sorted)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(cuts=cuttings, inplace=st.booleans())
@torch.no_grad()
def test_cut_anywhere(name: str, cuts: list[int], inplace: bool) -> None:
    torch.manual_seed(0)
    model, x = small_model(CASES[name]), _tokens()
    parallel = model(x, return_state=False).logits
    assert_close(torch.cat(_run(model, x, cuts, inplace=inplace), 1), parallel)


@pytest.mark.parametrize("name", POOLED)
@settings(max_examples=10)
@given(cuts=cuttings, inplace=st.booleans())
@torch.no_grad()
def test_cut_anywhere_with_real_values_and_a_pooled_head(name: str, cuts: list[int], inplace: bool) -> None:
    torch.manual_seed(0)
    model, x = small_model(POOLED[name]), torch.randn(2, TIME, 3, dtype=torch.float64)
    pieces = _run(model, x, cuts, inplace=inplace)
    if name.endswith("none"):
        assert_close(torch.cat(pieces, 1), model(x, return_state=False).logits)
        return
    for end, logits in zip([*cuts, TIME], pieces, strict=True):
        assert_close(logits, model(x[:, :end], return_state=False).logits, f"output after {end} tokens")


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("inplace", [False, True], ids=["new-state", "in-place"])
@pytest.mark.parametrize("prompt", [0, 1, 10])
@torch.no_grad()
def test_token_by_token_equals_the_parallel_forward(family: str, inplace: bool, prompt: int) -> None:
    model, x = small_model(family), _tokens()
    parallel = model(x).logits
    pieces, state = [], model.initial_state(2)
    if prompt:
        logits, state = model(x[:, :prompt], state=state, inplace=inplace)
        pieces.append(logits)
    for time in range(prompt, TIME):
        logits, state = model(x[:, time : time + 1], state=state, inplace=inplace)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), parallel)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_token_by_token_in_lower_precision(family: str, dtype: torch.dtype) -> None:
    model, x = small_model(family, dtype), _tokens()
    parallel = model(x).logits
    pieces = _run(model, x, list(range(1, TIME)), inplace=True)
    assert pieces[0].dtype == dtype
    assert_close(torch.cat(pieces, 1), parallel)


@pytest.mark.parametrize("family", FAMILY)
def test_greedy_continuation_agrees_with_the_parallel_forward(family: str) -> None:
    model, prompt = small_model(family), _tokens(2, 7)
    drawn = generate(model, prompt, 12, temperature=0)
    with torch.no_grad():
        logits = model(torch.cat([prompt, drawn], 1)).logits
    assert torch.equal(logits[:, 6:-1].argmax(-1), drawn)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("step", [1, 3, 9])
@torch.no_grad()
def test_a_call_leaves_the_given_state_as_it_was(family: str, step: int) -> None:
    model, x = small_model(family), _tokens()
    state = model(x[:, :6]).state
    assert state is not None
    before = state.clone().tensors()
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


@pytest.mark.parametrize("family", FAMILY)
def test_last_piece_alone_sends_gradients_to_the_first(family: str) -> None:
    # An input of real values shows at which times a gradient arrives.
    head = RegressionHeadConfig(pooling="none")
    model = small_model(family, input=ValueInputConfig(), head=head)
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    state = model(x[:, :6]).state
    loss = model(x[:, 6:], state=state).logits.sum()
    (expected,) = torch.autograd.grad(model(x).logits[:, 6].sum(), x)
    assert_close(torch.autograd.grad(loss, x)[0], expected, "gradient of x")


@pytest.mark.parametrize("family", ["tcnca", "mega", "mega-full", "tcnca-simple"])
@torch.no_grad()
def test_set_chunk_streams_with_the_new_chunk(family: str) -> None:
    model, x = small_model(family, position="rope"), _tokens()
    model.set_chunk_size(7)
    fresh = small_model(family, position="rope", chunk_size=7)
    fresh.load_state_dict(model.state_dict())
    assert_close(torch.cat(_run(model, x, [5, 6, 20]), 1), fresh(x).logits)
