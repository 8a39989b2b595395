"""Every sequence of a continuous batch gets the tokens that it would get alone."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import Batcher, InputError, PrefixCache, Preprocessing, TokenInputConfig, VocabularyError, generate
from tcnca.generation import Request, batching
from tcnca.generation.dispatch import ModelStep
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_config, small_model
from tests.test_generation import count_calls, lively_model, prompt

FAMILIES = pytest.mark.parametrize("family", [family for family in FAMILY if family != "mega-full"])
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 5},
    {},
    {"temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.5},
    {"min_p": 0.1, "temperature": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]


def _alone(model: Any, start: Tensor, count: int, seed: int, options: dict[str, Any]) -> list[int]:
    return generate(model, start.unsqueeze(0), count, seed=seed, **options)[0].tolist()


@FAMILIES
@settings(max_examples=4)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 21), st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=9),
    batch=st.integers(1, 5),
    prefill=st.integers(3, 9),
    cached=st.booleans(),
)
def test_sequences_are_those_that_run_alone(
    family: str, sizes: list[tuple[int, int, int]], batch: int, prefill: int, cached: bool
) -> None:
    """With prompts that end anywhere, options of their own, and some steps between one request and the next."""
    torch.manual_seed(len(sizes))
    model = lively_model(family)
    batcher = Batcher(
        model, batch, prefill_tokens=prefill, prefix_cache=PrefixCache(model, block_size=4) if cached else None
    )
    requests = []
    for number, (time, count, wait) in enumerate(sizes):
        start, options = prompt(1, time)[0], OPTIONS[number % len(OPTIONS)]
        requests.append((batcher.submit(start, count, seed=number, **options), start, options))
        for _ in range(wait):
            batcher.step()
    for _ in batcher:
        pass
    assert len(batcher) == 0
    for number, (request, start, options) in enumerate(requests):
        assert request.finish_reason == "length"
        assert request.tokens == _alone(model, start, request.max_new_tokens, number, options), number


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - set(FAMILY)))
def test_every_kind_of_model(name: str) -> None:
    config = VARIANTS[name]
    if config.attention is not None and config.attention.chunk_size is None:
        config = config.override(chunk_size=8)
    model = small_model(config)
    batcher = Batcher(model, 4, prefill_tokens=5)
    requests = [batcher.submit(prompt(1, time)[0], 4 + time, seed=time) for time in (3, 9, 1, 7, 5)]
    for _ in batcher:
        pass
    for request in requests:
        assert request.tokens == _alone(model, request.prompt, request.max_new_tokens, request.seed or 0, {})


def test_tokens_come_as_they_are_known() -> None:
    model, starts = lively_model(), prompt(3, 5)
    batcher = Batcher(model, temperature=0.0)
    requests = [batcher.submit(start, count) for start, count in zip(starts, (3, 1, 5), strict=True)]
    assert len(batcher) == 3
    assert [request for request, _ in batcher.step()] == requests
    assert [request.finished for request in requests] == [False, True, False]
    seen: dict[Request, list[int]] = {request: request.tokens[:] for request in requests}
    late = batcher.submit(starts[0], 2)
    for request, token in batcher:
        seen.setdefault(request, []).append(token)
    assert list(map(len, seen.values())) == [3, 1, 5, 2]
    assert all(request.tokens == tokens for request, tokens in seen.items())
    assert late.tokens == requests[0].tokens[:2]
    assert batcher.step() == []


def test_one_sequence_can_be_iterated_while_others_run() -> None:
    model, starts = lively_model(), prompt(3, 5)
    batcher = Batcher(model, 2, temperature=0.0)
    first, second, third = (batcher.submit(start, 6) for start in starts)
    tokens = iter(second)
    assert [next(tokens), next(tokens)] == second.tokens == _alone(model, starts[1], 2, 0, {"temperature": 0.0})
    assert len(first.tokens) == 2
    assert third.result() == _alone(model, starts[2], 6, 0, {"temperature": 0.0})
    assert list(tokens) == second.tokens[2:]
    assert list(second) == second.tokens
    assert first.finished


def test_long_prompts_do_not_hold_up_others() -> None:
    model = lively_model()
    batcher, calls = Batcher(model, prefill_tokens=8), count_calls(model)
    running = batcher.submit(prompt(1, 5)[0], 100)
    batcher.step()
    batcher.submit(prompt(1, 40)[0], 1)
    short = batcher.submit(prompt(1, 3)[0], 1)
    for _ in range(3):
        batcher.step()
    assert len(running.tokens) == 4
    assert short.finished  # its turn came after one piece of the long one
    assert max(calls) <= 8


def test_the_batch_is_as_large_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Spy(ModelStep):
        def __call__(self, token: Tensor) -> Tensor:
            sizes.append(len(token))
            return super().__call__(token)

    monkeypatch.setattr("tcnca.generation.batching.make_step", lambda model, state, **_: Spy(model, state))
    model = lively_model()
    batcher = Batcher(model, 6, temperature=0.0)
    long = batcher.submit(prompt(1, 4)[0], 60)
    batcher.step()
    batcher.step()
    assert sizes == [1]
    others = [batcher.submit(start, 4) for start in prompt(4, 4)]
    batcher.step()
    batcher.step()
    assert sizes[1:] == [1, 6]  # not 8
    list(long)
    assert sizes[-1] == 1
    assert sizes.count(6) <= 3 + batching.SHRINK_STEPS
    assert all(other.finished for other in others)
    assert long.tokens == _alone(model, long.prompt, 60, 0, {"temperature": 0.0})


@pytest.mark.parametrize("place", ["waiting", "reading", "running"])
def test_a_sequence_can_be_cancelled(place: str) -> None:
    model, starts = lively_model(), prompt(3, 9)
    batcher = Batcher(model, 2, prefill_tokens=4, temperature=0.0)
    kept, cancelled = batcher.submit(starts[0], 9), batcher.submit(starts[1], 9)
    third = batcher.submit(starts[2], 9)
    for _ in range({"waiting": 0, "reading": 2, "running": 7}[place]):
        batcher.step()
    assert bool(cancelled.tokens) == (place == "running")
    cancelled.cancel()
    cancelled.cancel()
    assert (cancelled.finish_reason, len(batcher)) == ("cancelled", 2)
    before = list(cancelled.tokens)
    for request, _ in batcher:
        assert request is not cancelled
    assert list(cancelled) == cancelled.tokens == before
    for request, start in ((kept, starts[0]), (third, starts[2])):
        assert request.tokens == _alone(model, start, 9, 0, {"temperature": 0.0})


def test_cancelling_inside_the_loop() -> None:
    batcher = Batcher(lively_model(), temperature=0.0)
    first, second = (batcher.submit(start, 5) for start in prompt(2, 3))
    seen = []
    for request, _ in batcher:
        seen.append(request)
        second.cancel()
    assert seen == [first] * 5


def test_an_error_in_one_prompt_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model()
    batcher = Batcher(model, temperature=0.0)
    good, bad = (batcher.submit(start, 5) for start in prompt(2, 6))
    read = PrefixCache._read

    def failing(cache: PrefixCache, tokens: Tensor, prefix: Any) -> Any:
        if torch.equal(tokens, bad.prompt):
            raise RuntimeError("out of memory")
        return read(cache, tokens, prefix)

    monkeypatch.setattr(PrefixCache, "_read", failing)
    assert good.result() == _alone(model, good.prompt, 5, 0, {"temperature": 0.0})
    assert (bad.finish_reason, bad.tokens) == ("error", [])
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.result()


def test_an_error_in_a_step_ends_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnca.generation.batching.make_step", lambda model, state, **_: ModelStep(model, state))
    model = lively_model()
    batcher = Batcher(model, 1, temperature=0.0)
    first, second = (batcher.submit(start, 5) for start in prompt(2, 6))
    batcher.step()
    with monkeypatch.context() as patch:
        patch.setattr(ModelStep, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.step()
    assert isinstance(first.error, ZeroDivisionError)
    assert second.result() == _alone(model, second.prompt, 5, 0, {"temperature": 0.0})


def test_an_error_when_sequences_join_ends_those_that_run_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model()
    batcher = Batcher(model, 2, prefill_tokens=6, temperature=0.0)
    running, joining, waiting = (batcher.submit(start, 5) for start in prompt(3, 6))
    batcher.step()
    with monkeypatch.context() as patch:
        patch.setattr(batching, "make_step", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.step()
    for request in (running, joining):
        assert isinstance(request.error, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            request.result()
    assert len(batcher) == 1
    assert waiting.result() == _alone(model, waiting.prompt, 5, 0, {"temperature": 0.0})


def test_an_interrupted_prompt_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could never be complete, and who waits for it would wait for ever."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = lively_model()
    batcher = Batcher(model, prefill_tokens=6, temperature=0.0)
    running, interrupted = (batcher.submit(start, 5) for start in prompt(2, 6))
    batcher.step()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batcher.step()
    assert len(batcher) == 0
    assert [request.finish_reason for request in (running, interrupted)] == ["error", "error"]


@pytest.mark.parametrize("place", ["prompt", "step"])
def test_an_error_holds_no_memory(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a lack of memory."""
    allocated: list[weakref.ref[Tensor]] = []

    def failing(*_: Any) -> None:
        activations = torch.zeros(9)
        allocated.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(batching, "make_step", lambda model, state, **_: ModelStep(model, state))
    batcher = Batcher(lively_model())
    request = batcher.submit(prompt(1, 6)[0], 5)
    if place == "prompt":
        monkeypatch.setattr(PrefixCache, "_read", failing)
        batcher.step()
    else:
        batcher.step()
        monkeypatch.setattr(ModelStep, "__call__", failing)
        with contextlib.suppress(RuntimeError):
            batcher.step()
    assert request.finish_reason == "error"
    assert [each() for each in allocated] == [None]


def test_an_idle_batch_takes_no_memory() -> None:
    batcher = Batcher(lively_model())
    first, second = (batcher.submit(start, 5) for start in prompt(2, 6))
    batcher.step()
    first.cancel()
    assert batcher._step is not None
    second.cancel()
    assert batcher._step is None
    assert len(batcher.submit(prompt(1, 3)[0], 4).result()) == 4


def test_stop_sequences_end_a_sequence() -> None:
    model, start = lively_model(), prompt(1, 5)[0]
    expected = _alone(model, start, 40, 0, {"temperature": 0.0})
    end = next(i for i in range(3, 40) if expected[i - 1 : i + 1] not in [expected[j - 1 : j + 1] for j in range(1, i)])
    batcher = Batcher(model, temperature=0.0)
    single = batcher.submit(start, 40, stop=[expected[2]])
    tensor = batcher.submit(start, 40, stop=torch.tensor([expected[2]]))
    pair = batcher.submit(start, 40, stop=[expected[end - 1 : end + 1], [VOCABULARY + 5]])
    for request in (single, tensor, pair):
        request.result()
        assert request.finish_reason == "stop"
    assert single.tokens == tensor.tokens == expected[: expected.index(expected[2]) + 1]
    assert pair.tokens == expected[: end + 1]


def test_texts() -> None:
    preprocessing = Preprocessing(byte_map=tuple(b"abcdefgh."))
    config = small_config(input=TokenInputConfig(vocab_size=9))
    model = small_model(config)
    model.preprocessing = preprocessing
    batcher = Batcher(model)
    request = batcher.submit("abc", 200, stop=".", seed=3)
    request.result()
    assert request.text.index(".") == len(request.text) - 1
    assert request.text == "".join("abcdefgh."[token] for token in request.tokens)


def test_padding_in_prompts_is_left_out() -> None:
    model = lively_model(input=TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=0))
    start = torch.tensor([0, 0, 3, 4, 0, 5])
    request = Batcher(model).submit(start, 9, seed=1)
    assert request.result() == _alone(model, start, 9, 1, {})
    assert 0 not in request.tokens


def test_modes_stay_as_the_caller_has_them() -> None:
    model = lively_model(dropout=0.5)
    start = prompt(1, 5)[0]
    expected = _alone(model, start, 6, 2, {})
    model.train()
    for token in Batcher(model).submit(start, 6, seed=2):
        assert model.training, token
        assert torch.is_grad_enabled()
    assert Batcher(model).submit(start, 6, seed=2).result() == expected


def test_a_batcher_that_was_built_in_inference_mode_works_outside_of_it() -> None:
    model, start = lively_model(), prompt(1, 5)[0]
    with torch.inference_mode():
        batcher = Batcher(model, temperature=0.0)
        request = batcher.submit(start, 6)
        batcher.step()
    assert request.result() == _alone(model, start, 6, 0, {"temperature": 0.0})


def test_sequences_without_seed_differ() -> None:
    batcher = Batcher(lively_model())
    start = prompt(1, 5)[0]
    first, second = batcher.submit(start, 30), batcher.submit(start, 30)
    assert first.result() != second.result()


def test_seeded_sequences_leave_the_random_numbers_of_the_caller_alone() -> None:
    batcher = Batcher(lively_model())
    for number, start in enumerate(prompt(3, 5)):
        batcher.submit(start, 4 + number, seed=number)
    before = torch.get_rng_state()
    for _ in batcher:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_refusals() -> None:
    model = small_model()
    for name in ("max_batch_size", "prefill_tokens"):
        with pytest.raises(InputError, match=f"{name}: expected a whole number of at least 1, got 0"):
            Batcher(model, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="temprature: no such argument; use temperature"):
        Batcher(model, temprature=1.0)
    with pytest.raises(InputError, match="model: expected attention in chunks, got full attention"):
        Batcher(small_model("mega-full"))
    with pytest.raises(InputError, match="prefix_cache: expected one of this model"):
        Batcher(model, prefix_cache=PrefixCache(small_model()))
    batcher = Batcher(model)
    start = prompt(1, 4)[0]
    with pytest.raises(InputError, match=r"prompt: expected shape .* at least 1 token"):
        batcher.submit([], 5)
    with pytest.raises(InputError, match=r"prompt: expected shape \[time\], got \[2, 4\]"):
        batcher.submit(prompt(2, 4), 5)
    with pytest.raises(InputError, match="prompt: expected tokens, a tensor of whole numbers"):
        batcher.submit(torch.rand(4), 5)
    with pytest.raises(VocabularyError, match=r"prompt: expected tokens of the vocabulary, 0 to 10"):
        batcher.submit([3, VOCABULARY], 5)
    with pytest.raises(InputError, match="max_new_tokens: expected a whole number of at least 0"):
        batcher.submit(start, -1)
    with pytest.raises(InputError, match="top_k: expected a whole number of at least 1"):
        batcher.submit(start, 1, top_k=0)
    with pytest.raises(InputError, match="topk: no such argument; use top_k"):
        batcher.submit(start, 1, topk=5)
    with pytest.raises(InputError, match=r"^prompt: expected valid Unicode, got the unpaired surrogate"):
        batcher.submit("\ud800", 1)
    with pytest.raises(InputError, match=r"^stop: expected valid Unicode, got the unpaired surrogate"):
        batcher.submit(start, 1, stop="\ud800")
    with pytest.raises(InputError, match="stop: expected at least 1 token"):
        batcher.submit(start, 1, stop=[[]])
    assert len(batcher) == 0
    assert batcher.submit(start, 0).result() == []
    with pytest.raises(InputError, match=r"max_new_tokens: expected a whole number of at least 0, got 2.5"):
        batcher.submit(start, 2.5)  # type: ignore[arg-type]


def test_a_single_token_ends_a_sequence() -> None:
    batcher, start = Batcher(small_model(), temperature=0.0), prompt(1, 4)[0]
    tokens = batcher.submit(start, 10).result()
    assert batcher.submit(start, 10, stop=tokens[0]).result() == tokens[:1]
