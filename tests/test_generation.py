"""Generated text is the continuation that the parallel forward pass gives, token by token."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import InputError, ModelOutput, ModelState, Preprocessing, SequenceModel, TokenInputConfig, generate, stream
from tcnca.generation.prompts import PREFILL_TOKENS, piece_length, prefill
from tests.examples import FAMILY, VOCABULARY, small_model

PROMPTS = st.integers(1, 9)


def prompt(batch: int = 2, time: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, time))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lively_model(family: str = "tcnca", **changes: Any) -> SequenceModel:
    """A model whose text does not repeat one token for ever."""
    model = small_model(family, tie_embeddings=False, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return model


@torch.no_grad()
def greedy_by_the_parallel_forward(model: SequenceModel, start: Tensor, tokens: int) -> Tensor:
    """Run the whole sequence anew for every token."""
    text = start
    for _ in range(tokens):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    return text[:, start.shape[1] :]


@pytest.mark.parametrize("family", FAMILY)
@settings(max_examples=3)
@given(batch=st.integers(1, 3), time=PROMPTS, seed=st.integers(0, 99))
def test_greedy_is_the_argmax_of_the_parallel_forward(family: str, batch: int, time: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, start = lively_model(family), prompt(batch, time)
    expected = greedy_by_the_parallel_forward(model, start, 11)
    assert torch.equal(generate(model, start, 11, temperature=0.0), expected)


@pytest.mark.parametrize("family", FAMILY)
@settings(max_examples=3)
@given(lengths=st.lists(PROMPTS, min_size=1, max_size=4))
def test_prompts_of_several_lengths_go_on_as_each_would_alone(family: str, lengths: list[int]) -> None:
    model, start = lively_model(family), prompt(len(lengths), max(lengths))
    together = generate(model, start, 9, temperature=0.0, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = generate(model, start[row : row + 1, :length], 9, temperature=0.0)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("padding", [slice(4, None), slice(0, 2)], ids=["right", "left"])
def test_padding_symbols_in_a_prompt_are_padding(padding: slice) -> None:
    """As in a call of the model: where a symbol means padding, nobody has to count."""
    model = lively_model(input=TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=0))
    start = prompt(time=6).clamp(min=1)
    start[1, padding] = 0
    together = generate(model, start, 6, temperature=0.0)
    for row in (0, 1):
        alone = generate(model, start[row : row + 1][start[row : row + 1] != 0].unsqueeze(0), 6, temperature=0.0)
        assert torch.equal(together[row : row + 1], alone)


def test_padding_symbol_is_never_generated() -> None:
    """The model would not read it, and nothing could follow."""
    model = small_model(input=TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=3))
    with torch.no_grad():
        # Makes the padding symbol by far the most likely one.
        last = model(torch.ones(1, 1, dtype=torch.long)).logits[0, -1]
        model.embedding.weight[3] = model.embedding.weight[int(last.argmax())] * 3.0
    drawn = generate(model, torch.ones(1, 1, dtype=torch.long), 20, temperature=0.0)
    assert not bool((drawn == 3).any())


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, None), (2.0, None), (1.0, 2), (1.0, 99)])
def test_tokens_follow_the_distribution(temperature: float, top_k: int | None) -> None:
    model, start, draws = small_model("tcn-mlp"), prompt(1), 5_000
    with torch.no_grad():
        logits = model(start).logits[0, -1] / temperature
    kept = logits.topk(min(top_k or VOCABULARY, VOCABULARY)).indices
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    expected[kept] = logits[kept].softmax(-1)
    drawn = generate(model, start.expand(draws, -1), 1, temperature=temperature, top_k=top_k, generator=seeded(3))
    got = torch.bincount(drawn.flatten(), minlength=VOCABULARY).double() / draws
    assert bool((got[expected == 0] == 0).all())
    # Five standard deviations; the seed is fixed.
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert bool(((got - expected).abs() <= 5 * deviation + 1 / draws).all())


def test_stream_yields_what_generate_returns() -> None:
    model, start = small_model(), prompt()
    streamed = torch.stack(list(stream(model, start, 9, generator=seeded(1), top_k=4)), 1)
    assert torch.equal(streamed, generate(model, start, 9, generator=seeded(1), top_k=4))


def count_calls(model: SequenceModel) -> list[int]:
    """The number of tokens of each call of the model, as they come."""
    calls: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: ModelOutput) -> None:
        calls.append(inputs[0].shape[1])

    model.register_forward_hook(note)
    return calls


def test_stream_is_lazy() -> None:
    # A model that takes every step itself.
    model = small_model(prenorm=False)
    calls = count_calls(model)
    tokens = stream(model, prompt(time=5), 1000)
    assert calls == []
    next(tokens)
    assert calls == [5]
    next(tokens)
    next(tokens)
    assert calls == [5, 1, 1]


def test_text_as_long_as_a_full_simple_bias_reaches() -> None:
    """The bias has to reach over what is read, and the last token is not."""
    model = small_model("mega-full", max_length=9)
    start = prompt(time=5)
    assert torch.equal(generate(model, start, 5, temperature=0.0), greedy_by_the_parallel_forward(model, start, 5))


def test_streams_of_one_model_do_not_disturb_each_other() -> None:
    model, first, second = small_model(), prompt(1), prompt(1)
    alone = [generate(model, start, 6, temperature=0.0)[0].tolist() for start in (first, second)]
    one, two = (stream(model, start, 6, temperature=0.0) for start in (first, second))
    together = [[int(a), int(b)] for a, b in zip(one, two, strict=True)]
    assert [list(column) for column in zip(*together, strict=True)] == alone


def test_gradients_stay_as_the_caller_has_them() -> None:
    tokens = stream(small_model(), prompt(), 4)
    for _ in tokens:
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        for _ in stream(small_model(), prompt(), 4):
            assert not torch.is_grad_enabled()


def test_generation_works_in_inference_mode() -> None:
    model, start = small_model("mega"), prompt()
    expected = generate(model, start, 6, temperature=0.0)
    with torch.inference_mode():
        assert torch.equal(generate(model, start, 6, temperature=0.0), expected)


def test_inference_mode_may_end_between_two_tokens() -> None:
    model, start = small_model(), prompt()
    expected = generate(model, start, 4, seed=1, repetition_penalty=1.1)
    with torch.inference_mode():
        tokens = stream(model, start, 4, seed=1, repetition_penalty=1.1)
        first = next(tokens)
    assert torch.equal(torch.stack([first, *tokens], 1), expected)


def test_the_state_of_the_prompt_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has a copy of it, and would need twice the memory."""
    states: list[weakref.ref[ModelState]] = []

    def watched(*args: Any) -> tuple[Tensor, ModelState]:
        last, state = prefill(*args)
        states.append(weakref.ref(state))
        return last, state

    monkeypatch.setattr("tcnca.generation.api.prefill", watched)
    tokens = stream(small_model(), prompt(), 4)
    next(tokens)
    gc.collect()
    assert [state() for state in states] == [None]


def test_no_tokens_have_the_dtype_of_tokens() -> None:
    found = generate(small_model(), prompt().to(torch.uint8), 0, num_samples=3)
    assert (found.shape, found.dtype) == ((6, 0), torch.long)


@pytest.mark.parametrize("tokens", [[0, 5, 0, 0], [0, 0]])
def test_prompts_of_bytes_keep_their_zeros(tokens: list[int]) -> None:
    """256 is no byte, but would be 0 as one."""
    model = small_model(input=TokenInputConfig(vocab_size=257, pad_token_id=256))
    start = torch.tensor([tokens])
    expected = generate(model, start, 4, temperature=0.0)
    assert torch.equal(generate(model, start.to(torch.uint8), 4, temperature=0.0), expected)


def test_what_cannot_be_rounded_is_refused() -> None:
    model, start = small_model(), prompt()
    with pytest.raises(InputError, match="quantization: expected 'int8' or None, got 'int4'"):
        stream(model, start, 4, quantization="int4")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"quantization: expected None for this model; prenorm: expected True"):
        stream(small_model(dtype=torch.float32, prenorm=False), start, 4, quantization="int8")
    with pytest.raises(InputError, match=r"quantization: expected None for this model; dtype: .* got float64"):
        stream(model, start, 4, quantization="int8")
    with pytest.raises(InputError, match=r"cache_dtype: expected None for this model; device: .* got cpu"):
        stream(model, start, 4, cache_dtype="float8")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match=r"quantization: .* autocast: expected it off"),
    ):
        stream(model, start, 4, quantization="int8")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 2.5),
        ("seed", 1.5),
        ("seed", "a"),
        ("top_k", 2.5),
        ("num_samples", 1.5),
        ("num_samples", True),
    ],
)
def test_whole_numbers_are_expected(name: str, value: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, name: value}
    with pytest.raises(InputError, match=f"{name}: expected a whole number.*, got {value!r}"):
        stream(small_model(), prompt(), **options)


def test_weights_that_are_not_numbers_are_named() -> None:
    model = small_model()
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="model: expected logits that are numbers, got NaN"):
        generate(model, prompt(), 3)


def test_a_part_of_the_model_in_training_mode_generates_without_dropout() -> None:
    model, start = small_model(dropout=0.5), prompt()
    expected = generate(model, start, 20, temperature=0.0)
    model.layers[0].train()
    assert torch.equal(generate(model, start, 20, temperature=0.0), expected)
    assert model.layers[0].training


def test_pieces_of_a_prompt_are_shorter_for_a_large_vocabulary() -> None:
    """Their logits would take gigabytes."""
    assert piece_length(small_model(), 1) == PREFILL_TOKENS
    assert piece_length(small_model(input=TokenInputConfig(vocab_size=50_000)), 1) * 50_000 <= PREFILL_TOKENS * 512


def test_model_in_training_mode_generates_without_dropout_and_keeps_its_mode() -> None:
    model, start = small_model(dropout=0.5, norm="batch"), prompt()
    expected = generate(model, start, 6, temperature=0.0)
    model.train()
    frozen = model.layers[0].eval()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert torch.equal(generate(model, start, 6, temperature=0.0), expected)
    for token in stream(model, start, 2):
        assert model.training, token
    assert model.layers[1].training
    assert not any(module.training for module in frozen.modules())
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("described", ["plain", "lengths", "padding"])
def test_long_prompts_are_read_in_pieces(family: str, described: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the result of one call."""
    padding = 0 if described == "padding" else None
    model = lively_model(family, input=TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=padding))
    start, lengths = prompt(3, 42).clamp(min=1), None
    if described == "lengths":
        lengths = [42, 3, 17]
    elif described == "padding":
        start[1, :20] = 0
        start[2, 9:] = 0
    options: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.2, "lengths": lengths}
    expected, (last, _) = generate(model, start, 9, **options), prefill(model, start, lengths)
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 26)  # of a batch of three
    calls = count_calls(model)
    assert torch.equal(generate(model, start, 9, **options), expected)
    assert calls[: -(-42 // 8)] == [8, 8, 8, 8, 8, 2]
    torch.testing.assert_close(prefill(model, start, lengths)[0], last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILY)
def test_samples_of_one_prompt_read_it_once(family: str) -> None:
    model, start = lively_model(family), prompt(2, 5)
    calls = count_calls(model)
    many = generate(model, start, 7, num_samples=3, seed=4)
    assert calls[0] == 5
    assert set(calls[1:]) <= {1}
    assert many.shape == (6, 7)
    assert torch.equal(generate(model, start, 7, seed=4), many[::3])
    assert torch.equal(generate(model, start[:1], 7, num_samples=2, seed=4), many[:2])
    assert not torch.equal(generate(model, start, 7, num_samples=3, seed=5), many)
    repeated = generate(model, start.repeat_interleave(3, 0), 7, temperature=0.0)
    assert torch.equal(generate(model, start, 7, num_samples=3, temperature=0.0), repeated)


def test_tokens_without_a_byte_are_not_generated() -> None:
    model = small_model()
    model.preprocessing = Preprocessing(byte_map=tuple(b"abcd"))
    assert int(generate(model, prompt(3), 20, seed=0, temperature=5.0).max()) <= 3
