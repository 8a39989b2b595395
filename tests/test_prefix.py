"""A prefix cache gives what reading the whole prompt gives, and reads less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import ClassifierHeadConfig, InputError, PrefixCache, TokenInputConfig, VocabularyError, generate
from tcnca.generation.prompts import prefill
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_model
from tests.ops.properties import assert_bit_equal
from tests.test_generation import count_calls, lively_model, prompt

FAMILIES = pytest.mark.parametrize("family", FAMILY)


def _shared(prefix: int, *rest: int) -> list[Tensor]:
    """Return prompts `[1, time]` with the same first tokens."""
    start = prompt(1, prefix)
    return [torch.cat([start, prompt(1, each)], 1) for each in rest]


@FAMILIES
@settings(max_examples=5)
@given(
    shared=st.integers(1, 30), rests=st.lists(st.integers(1, 20), min_size=2, max_size=4), block=st.sampled_from([4, 7])
)
@torch.no_grad()
def test_prompts_are_read_as_without_a_cache(family: str, shared: int, rests: list[int], block: int) -> None:
    model = small_model(family)
    cache = PrefixCache(model, block_size=block)
    for each in [*_shared(shared, *rests), *_shared(3, 1, 2)] * 2:
        logits, state = cache.prefill(each)
        expected, expected_state = prefill(model, each)
        assert_close(logits, expected)
        x = prompt(1, 5)
        assert_close(model(x, state=state, inplace=True).logits, model(x, state=expected_state).logits)
    # The whole prompt is known the second time.
    assert cache.hits >= len(rests) + 2


@FAMILIES
@torch.no_grad()
def test_same_pieces_give_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 8)
    model = small_model(family, torch.float32)
    cache = PrefixCache(model, block_size=8)
    first, second = _shared(17, 4, 9)
    cache.prefill(first)
    for each in (second, first):
        logits, state = cache.prefill(each)
        expected, expected_state = prefill(model, each)
        assert torch.equal(logits, expected)
        assert_bit_equal(state, expected_state)


@torch.no_grad()
def test_only_what_is_new_is_read() -> None:
    model = small_model()
    cache, calls = PrefixCache(model, block_size=8), count_calls(model)
    first, second, third = _shared(19, 2, 10, 0)
    cache.prefill(first)
    assert (calls, cache.hits, cache.misses, cache.reused_tokens, len(cache)) == ([8, 8, 5], 0, 1, 0, 3)
    cache.prefill(second)  # from the last block of what both share
    assert (calls[3:], cache.hits, cache.misses, cache.reused_tokens, len(cache)) == ([8, 5], 1, 1, 16, 5)
    cache.prefill(torch.cat([first, prompt(1, 2)], 1))  # from the end of a prompt
    assert (calls[5:], cache.reused_tokens) == ([2], 16 + 21)
    cache.prefill(first)
    assert (calls[6:], cache.hits, cache.reused_tokens) == ([], 3, 16 + 21 + 21)
    cache.prefill(third)
    assert calls[6:] == [3]
    assert repr(cache).startswith("PrefixCache(states=7, nbytes=")
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.prefill(third)
    assert calls[7:] == [8, 8, 3]


@torch.no_grad()
def test_least_recently_used_states_are_removed() -> None:
    model = small_model()
    prompts = [torch.full((1, 5), token) for token in range(4)]
    size = model.initial_state(1).nbytes + VOCABULARY * 8
    cache = PrefixCache(model, max_bytes=3 * size)
    for each in (0, 1, 2, 0, 3):  # 1 goes
        cache.prefill(prompts[each])
    assert (len(cache), cache.nbytes, cache.hits) == (3, 3 * size, 1)
    for each in (0, 2, 3):
        cache.prefill(prompts[each])
    assert cache.hits == 4
    cache.prefill(prompts[1])
    assert (cache.hits, cache.misses) == (4, 5)
    small = PrefixCache(model, max_bytes=size - 1)
    for _ in range(2):
        small.prefill(prompts[0])
    assert (len(small), small.nbytes, small.misses) == (0, 0, 2)


@torch.no_grad()
def test_states_are_not_shared_with_the_cache() -> None:
    model, start = small_model(), prompt(1, 9)
    cache = PrefixCache(model)
    logits, state = cache.prefill(start)
    kept = logits.clone()
    for _ in range(20):
        state = model(prompt(1, 1), state=state, inplace=True).state
    logits.zero_()
    again, state = cache.prefill(start)
    assert torch.equal(again, kept)
    assert_bit_equal(state, prefill(model, start)[1])


@FAMILIES
def test_generation_with_a_cache(family: str) -> None:
    model = lively_model(family)
    cache = PrefixCache(model, block_size=4)
    start = torch.cat(_shared(13, 5, 5, 5))
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, "num_samples": 2}
    for lengths in (None, [18, 14, 2]):
        expected = generate(model, start, 9, lengths=lengths, **options)
        assert torch.equal(generate(model, start, 9, lengths=lengths, prefix_cache=cache, **options), expected)
    assert (cache.hits, cache.misses) == (4, 2)  # two tokens are less than a block


def test_padding_tokens_are_left_out() -> None:
    model = lively_model(input=TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=0))
    start = prompt(2, 6).clamp(min=1)
    start[1, :2] = 0
    cache = PrefixCache(model, block_size=4)
    expected = generate(model, start, 6, temperature=0.0)
    for _ in range(2):
        assert torch.equal(generate(model, start, 6, temperature=0.0, prefix_cache=cache), expected)
    assert cache.reused_tokens == 6 + 4


def test_dropout_is_off_and_the_mode_is_kept() -> None:
    model, start = small_model(dropout=0.5), prompt(1, 9)
    expected = prefill(model, start)[0]
    model.train()
    assert_close(PrefixCache(model).prefill(start)[0], expected)
    assert model.training


def test_refusals() -> None:
    model = small_model()
    with pytest.raises(InputError, match="model: expected a language model, got a classifier; use tcnca predict"):
        PrefixCache(small_model(head=ClassifierHeadConfig()))
    with pytest.raises(InputError, match="max_bytes: expected at least 0"):
        PrefixCache(model, max_bytes=-1)
    with pytest.raises(InputError, match="block_size: expected at least 1"):
        PrefixCache(model, block_size=0)
    cache = PrefixCache(model)
    with pytest.raises(InputError, match=r"prompt: expected shape \[batch, time\]"):
        cache.prefill(torch.zeros(0, dtype=torch.long))
    with pytest.raises(InputError, match="at least 1 token in each row"):
        cache.prefill(prompt(2, 3), lengths=[3, 0])
    with pytest.raises(InputError, match="lengths: expected values from 0 to 3"):
        cache.prefill(prompt(2, 3), lengths=[3, 4])
    with pytest.raises(InputError, match=r"lengths: expected \[2\] integers"):
        cache.prefill(prompt(2, 3), lengths=[3])
    with pytest.raises(VocabularyError):
        cache.prefill(torch.full((1, 3), VOCABULARY))
    assert len(cache) == 0
    with pytest.raises(InputError, match="prefix_cache: expected one of this model"):
        generate(small_model(), prompt(), 1, prefix_cache=cache)
