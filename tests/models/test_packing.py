"""Documents packed in one row: each is a sequence of its own, also in the state."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import ClassifierHeadConfig, ModelConfig, RegressionHeadConfig, ValueInputConfig
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_config, small_model
from tests.models.gradients import assert_gradients_close, gradients

PACKINGS = {
    "several": [5, 9, 4, 1, 13],
    "empty-ones": [0, 5, 0, 0, 7, 0],
    "one": [11],
    "one-token": [1],
    "single-tokens": [1] * 9,
    "whole-chunks": [4, 8, 4],
}
EVERY = RegressionHeadConfig(outputs=2, pooling="none")
CASES: dict[str, ModelConfig] = {family: small_config(family) for family in FAMILY}
CASES |= {f"{family}-bidirectional": small_config(family, causal=False, head=EVERY) for family in FAMILY}
CASES |= {f"tcnca-{position}": small_config("tcnca", position=position) for position in ("none", "rotary", "rope")}
CASES["mega-laplace-truncated"] = small_config("mega", activation="laplace", truncation=3)
CASES["tcnca-simple-batch"] = small_config("tcnca-simple", norm="batch")
POOLED = {
    f"{family}-{pooling}": small_config(
        family, causal=causal, head=ClassifierHeadConfig(num_classes=3, pooling=pooling)
    )
    for family, causal in (("tcnca", True), ("mega", False))
    for pooling in ("mean", "last", "first")
}


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _tokens(lengths: list[int]) -> Tensor:
    return torch.randint(VOCABULARY, (1, sum(lengths)))


def _documents(x: Tensor, lengths: list[int]) -> list[Tensor]:
    return list(x.split(lengths, 1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("given_longest", [False, True], ids=["measured", "max_seqlen"])
def test_each_document_as_if_alone(name: str, packing: str, given_longest: bool) -> None:
    model, lengths = small_model(CASES[name]), PACKINGS[packing]
    x = _tokens(lengths)
    longest = max(lengths) if given_longest else None
    logits = model(x, cu_seqlens=_starts(lengths), max_seqlen=longest).logits
    alone = [model(document).logits for document in _documents(x, lengths) if document.shape[1]]
    assert_close(logits, torch.cat(alone, 1))


@pytest.mark.parametrize("family", FAMILY)
def test_gradients_are_those_of_the_documents(family: str) -> None:
    model, lengths = small_model(family), PACKINGS["several"]
    x, weights = _tokens(lengths), torch.randn(1, sum(lengths), VOCABULARY, dtype=torch.float64)
    packed = (model(x, cu_seqlens=_starts(lengths)).logits * weights).sum()
    alone = torch.cat([model(document).logits for document in _documents(x, lengths)], 1)
    assert_gradients_close(gradients(packed, model), gradients((alone * weights).sum(), model))


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("packing", PACKINGS)
@torch.no_grad()
def test_a_pooled_head_gives_one_row_a_document(name: str, packing: str) -> None:
    model, lengths = small_model(POOLED[name]), PACKINGS[packing]
    x = _tokens(lengths)
    logits = model(x, cu_seqlens=_starts(lengths)).logits
    assert logits.shape == (len(lengths), 3)
    assert bool(torch.isfinite(logits).all())
    for index, document in enumerate(_documents(x, lengths)):
        if document.shape[1]:
            assert_close(logits[index], model(document).logits[0], f"document {index}")


@pytest.mark.parametrize("family", FAMILY)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), data=st.data())
@torch.no_grad()
def test_any_packing(family: str, lengths: list[int], data: st.DataObject) -> None:
    torch.manual_seed(0)
    model, x = small_model(family), _tokens(lengths)
    longest = data.draw(st.none() | st.integers(max(lengths), max(lengths) + 9))
    logits = model(x, cu_seqlens=torch.tensor(_starts(lengths), dtype=torch.int32), max_seqlen=longest).logits
    alone = [model(document).logits for document in _documents(x, lengths) if document.shape[1]]
    assert_close(logits, torch.cat(alone, 1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("changed", range(5))
@torch.no_grad()
def test_a_change_in_one_document_moves_nothing_in_the_others(name: str, changed: int) -> None:
    model, lengths = small_model(CASES[name]), PACKINGS["several"]
    x, starts = _tokens(lengths), _starts(lengths)
    other = x.clone()
    inside = slice(starts[changed], starts[changed + 1])
    other[:, inside] = (other[:, inside] + 1) % VOCABULARY
    moved = (model(x, cu_seqlens=starts).logits - model(other, cu_seqlens=starts).logits).abs().amax((0, 2))
    assert bool((moved[inside] > 0).all() if not model.config.causal else moved[inside].any())
    moved[inside] = 0
    assert not moved.any()


@pytest.mark.parametrize("name", ["tcnca", "mega", "tcn-mlp"])
def test_no_gradient_crosses_from_one_document_to_another(name: str) -> None:
    model = small_model(name, input=ValueInputConfig(), head=EVERY, causal=False)
    lengths = PACKINGS["several"]
    x, starts = torch.randn(1, sum(lengths), dtype=torch.float64, requires_grad=True), _starts(lengths)
    logits = model(x, cu_seqlens=starts).logits
    for first, last in itertools.pairwise(starts):
        (gradient,) = torch.autograd.grad(logits[:, first:last].sum(), x, retain_graph=True)
        assert bool(gradient[:, first:last].all())
        assert not gradient[:, :first].any()
        assert not gradient[:, last:].any()


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_state_has_a_row_a_document_and_goes_on(family: str) -> None:
    model = small_model(family)
    first, second = [3, 0, 9, 4, 1], [0, 5, 1, 6, 2]
    past, future, step = _tokens(first), _tokens(second), torch.randint(VOCABULARY, (5, 1))
    state = model(past, cu_seqlens=_starts(first)).state
    assert state is not None
    assert state.batch_size == 5
    packed, state = model(future, cu_seqlens=_starts(second), state=state)
    last = model(step, state=state).logits
    documents = zip(_documents(past, first), _documents(future, second), strict=True)
    for index, (before, after) in enumerate(documents):
        alone = model(torch.cat([before, after, step[index : index + 1]], 1)).logits
        start = _starts(second)[index]
        assert_close(packed[:, start : start + second[index]], alone[:, first[index] : -1], f"document {index}")
        assert_close(last[index], alone[0, -1:], f"step of document {index}")


@pytest.mark.parametrize("features", [1, 3])
@torch.no_grad()
def test_real_values_can_be_packed(features: int) -> None:
    model = small_model("mega", input=ValueInputConfig(features=features), head=EVERY)
    lengths = PACKINGS["empty-ones"]
    shape = (1, sum(lengths)) if features == 1 else (1, sum(lengths), features)
    x = torch.randn(shape, dtype=torch.float64)
    alone = [model(document).logits for document in _documents(x, lengths) if document.shape[1]]
    assert_close(model(x, cu_seqlens=_starts(lengths)).logits, torch.cat(alone, 1))


@torch.no_grad()
def test_packed_and_padded_are_the_same() -> None:
    model, lengths = small_model("tcnca"), PACKINGS["several"]
    x = _tokens(lengths)
    rows = torch.nn.utils.rnn.pad_sequence([d[0] for d in _documents(x, lengths)], batch_first=True)
    padded = model(rows, lengths=lengths).logits
    real = torch.arange(rows.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    assert_close(model(x, cu_seqlens=_starts(lengths)).logits[0], padded[real])
