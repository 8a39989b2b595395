"""Speculative decoding gives the tokens of greedy decoding, in fewer calls of the large model."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tcnca import InputError, TokenInputConfig, generate, speculative_generate
from tests.examples import FAMILY, VOCABULARY, small_model
from tests.test_generation import count_calls, lively_model, prompt


@pytest.mark.parametrize("family", FAMILY)
@settings(max_examples=3)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), draft=st.integers(1, 6), seed=st.integers(0, 99))
def test_tokens_are_those_of_greedy_decoding(family: str, lengths: list[int], draft: int, seed: int) -> None:
    """Over several chunks of four tokens, with rows that accept different numbers of tokens."""
    torch.manual_seed(seed)
    model, start = lively_model(family), prompt(len(lengths), max(lengths))
    other = lively_model("ema-mlp")
    expected = generate(model, start, 19, temperature=0.0, lengths=lengths)
    found = speculative_generate(model, other, start, 19, num_draft_tokens=draft, lengths=lengths)
    assert torch.equal(found, expected)


def test_a_perfect_draft_is_accepted() -> None:
    model, start = lively_model("tcnca"), prompt(2, 5)
    expected = generate(model, start, 21, temperature=0.0)
    draft, calls = copy.deepcopy(model), count_calls(model)
    assert torch.equal(speculative_generate(model, draft, start, 21), expected)
    # The prompt, and four rounds of five tokens, each read to check and to keep.
    assert calls == [5, *[5] * 8]


def test_padding_is_never_chosen() -> None:
    tokens = TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=0)
    model, draft = (lively_model(family, input=tokens) for family in ("mega", "ema-mlp"))
    start = prompt(2, 6).clamp(min=1)
    start[1, :3] = 0
    expected = generate(model, start, 9, temperature=0.0)
    assert torch.equal(speculative_generate(model, draft, start, 9), expected)


def test_refusals() -> None:
    model, start = small_model(), prompt()
    with pytest.raises(InputError, match="draft_model: expected the vocabulary of the model, 11 tokens, got 7"):
        speculative_generate(model, small_model(input=TokenInputConfig(vocab_size=7)), start, 3)
    with pytest.raises(InputError, match="num_draft_tokens: expected at least 1, got 0"):
        speculative_generate(model, model, start, 3, num_draft_tokens=0)
    with pytest.raises(InputError, match="max_new_tokens: expected at least 0"):
        speculative_generate(model, model, start, -1)
    assert speculative_generate(model, model, start, 0).shape == (2, 0)
