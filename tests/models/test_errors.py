"""Calls that cannot be right are refused at once, by a message that says what was wrong with which argument."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import (
    ClassifierHeadConfig,
    ConfigError,
    InputError,
    PairHeadConfig,
    SequenceModel,
    StateError,
    TcncaError,
    ValueInputConfig,
    VocabularyError,
    build,
    generate,
    stream,
)
from tcnca.errors import CheckpointError
from tcnca.ops import chunked_attention
from tests.examples import VOCABULARY, small_config, small_model

BATCH, TIME = 2, 7


def tokens(batch: int = BATCH, time: int = TIME) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, time))


def value_model(features: int) -> SequenceModel:
    return small_model(small_config(head=ClassifierHeadConfig(), input=ValueInputConfig(features=features)))


def pair_model() -> SequenceModel:
    return small_model(small_config(head=PairHeadConfig(), causal=False))


@pytest.mark.parametrize("kind", [ConfigError, InputError, StateError, CheckpointError, VocabularyError])
def test_every_error_is_one_of_ours_and_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, TcncaError)
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize("shape", [(7,), (2, 7, 1), (2, 0), ()], ids=str)
def test_tokens_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"^x: got shape {re.escape(str(list(shape)))}, allowed is \[batch, time\]"):
        small_model()(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_tokens_of_the_wrong_type(kind: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"^x: got {kind}, allowed are whole numbers"):
        small_model()(tokens().to(kind))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_tokens_of_any_whole_numbers_will_do(kind: torch.dtype) -> None:
    model, x = small_model(), tokens()
    assert torch.equal(model(x.to(kind)).logits, model(x).logits)


@pytest.mark.parametrize(
    ("features", "shape", "allowed"),
    [
        (1, (2, 7, 2), "[batch, time] or [batch, time, 1]"),
        (1, (7,), "[batch, time] or [batch, time, 1]"),
        (1, (2, 0), "[batch, time] or [batch, time, 1]"),
        (3, (2, 7), "[batch, time, 3]"),
        (3, (2, 7, 2), "[batch, time, 3]"),
        (3, (2, 0, 3), "[batch, time, 3]"),
    ],
)
def test_real_values_of_the_wrong_shape(features: int, shape: tuple[int, ...], allowed: str) -> None:
    expected = f"x: got shape {list(shape)}, allowed is {allowed} with 1 or more times"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        value_model(features)(torch.zeros(shape))


def test_real_values_of_the_wrong_type() -> None:
    with pytest.raises(InputError, match=r"^x: got torch\.int64, allowed are floating-point numbers"):
        value_model(1)(torch.zeros(BATCH, TIME, dtype=torch.long))


@pytest.mark.parametrize("token", [-1, -VOCABULARY, VOCABULARY, 10**9])
@pytest.mark.parametrize("error", [VocabularyError, IndexError, ValueError])
def test_token_outside_the_vocabulary(token: int, error: type[Exception]) -> None:
    x = tokens()
    x[1, 3] = token
    with pytest.raises(
        error, match=rf"^x: got a token outside .*, allowed are 0 to {VOCABULARY - 1}; got \[{token}\]$"
    ):
        small_model()(x)


def test_tokens_in_the_padding_are_not_looked_at() -> None:
    x = tokens()
    model = small_model()
    expected = model(x, lengths=[7, 3]).logits
    x[1, 3:] = -100
    assert torch.equal(model(x, lengths=[7, 3]).logits, expected)
    with pytest.raises(VocabularyError):
        model(x, lengths=[7, 4])


LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "lengths-too-few": (2, {"lengths": [3]}, r"lengths: got shape \[1\] of torch\.int64, allowed is \[2\]"),
    "lengths-2d": (2, {"lengths": [[3, 2]]}, r"lengths: got shape \[1, 2\] of torch\.int64, allowed is \[2\]"),
    "lengths-number": (2, {"lengths": 3}, r"lengths: got shape \[\] of torch\.int64, allowed is \[2\]"),
    "lengths-float": (2, {"lengths": [3.0, 2.0]}, r"lengths: got shape \[2\] of torch\.float32, .* whole numbers"),
    "lengths-bool": (2, {"lengths": [True, False]}, r"lengths: got shape \[2\] of torch\.bool, .* whole numbers"),
    "lengths-negative": (2, {"lengths": [3, -1]}, r"lengths: got values outside .*0 to 7, .*; got \[-1\]"),
    "lengths-too-long": (2, {"lengths": [8, 7]}, r"lengths: got values outside .*0 to 7, .*; got \[8\]"),
    "mask-short": (2, {"mask": torch.ones(2, 6)}, r"mask: got shape \[2, 6\], allowed is \[2, 7\]"),
    "mask-1d": (2, {"mask": torch.ones(7)}, r"mask: got shape \[7\], allowed is \[2, 7\]"),
    "mask-3d": (2, {"mask": torch.ones(2, 7, 1)}, r"mask: got shape \[2, 7, 1\], allowed is \[2, 7\]"),
    "cu-batch": (2, {"cu_seqlens": [0, 7]}, r"x: got a batch of 2, allowed is 1 with cu_seqlens"),
    "cu-single": (
        1,
        {"cu_seqlens": [0]},
        r"cu_seqlens: got shape \[1\] of torch\.int64, allowed is \[documents \+ 1\]",
    ),
    "cu-2d": (1, {"cu_seqlens": [[0, 7]]}, r"cu_seqlens: got shape \[1, 2\] .*, allowed is \[documents \+ 1\]"),
    "cu-float": (1, {"cu_seqlens": [0.0, 7.0]}, r"cu_seqlens: got shape \[2\] of torch\.float32, .* whole numbers"),
    "cu-start": (1, {"cu_seqlens": [1, 7]}, r"cu_seqlens: got values that do not rise from 0 to 7, .*; got \[1, 7\]"),
    "cu-end": (1, {"cu_seqlens": [0, 6]}, r"cu_seqlens: got values that do not rise from 0 to 7, .*; got \[0, 6\]"),
    "cu-falls": (1, {"cu_seqlens": [0, 4, 3, 7]}, r"cu_seqlens: .* do not rise from 0 to 7, .*; got \[0, 4, 3, 7\]"),
    "max-too-small": (
        1,
        {"cu_seqlens": [0, 3, 7], "max_seqlen": 3},
        r"max_seqlen: got 3, allowed is at least the longest document; got \[4\]",
    ),
    "max-alone": (2, {"max_seqlen": 7}, r"max_seqlen: got one without cu_seqlens, allowed is None"),
    "lengths-and-mask": (
        2,
        {"lengths": [7, 7], "mask": torch.ones(2, 7)},
        r"lengths and mask: got several, allowed is one of lengths, mask and cu_seqlens",
    ),
    "all-three": (
        1,
        {"lengths": [7], "mask": torch.ones(1, 7), "cu_seqlens": [0, 7]},
        r"lengths and mask and cu_seqlens: got several, allowed is one of lengths, mask and cu_seqlens",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_padding_described_wrongly(case: str) -> None:
    batch, described, message = LAYOUTS[case]
    with pytest.raises(InputError, match=f"^{message}"):
        small_model()(tokens(batch), **described)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"lengths2": [3]}, r"lengths2: got shape \[1\] of torch\.int64, allowed is \[2\]"),
        ({"lengths2": [3, 8]}, r"lengths2: got values outside .*0 to 7, .*; got \[8\]"),
        ({"mask2": torch.ones(2, 6)}, r"mask2: got shape \[2, 6\], allowed is \[2, 7\]"),
        ({"lengths2": [3, 7], "mask2": torch.ones(2, 7)}, "lengths2 and mask2: got several"),
    ],
    ids=["lengths2-too-few", "lengths2-too-long", "mask2-short", "both"],
)
def test_padding_of_the_second_document_described_wrongly(described: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        pair_model()(tokens(), tokens(), **described)


def test_second_document_is_missing() -> None:
    with pytest.raises(InputError, match=r"^second: got None, allowed is a second document"):
        pair_model()(tokens())


def test_second_document_is_surplus() -> None:
    with pytest.raises(InputError, match=r"^second: got a tensor, allowed is None"):
        small_model()(tokens(), tokens())


@pytest.mark.parametrize("described", [{"lengths2": [7, 7]}, {"mask2": torch.ones(2, 7)}], ids=["lengths2", "mask2"])
def test_padding_of_a_second_document_that_is_not_there(described: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^lengths2, mask2: got one without a second document, allowed is None"):
        small_model()(tokens(), **described)


def test_second_document_is_checked_by_its_own_name() -> None:
    model = pair_model()
    with pytest.raises(VocabularyError, match=r"^second: got a token outside the vocabulary"):
        model(tokens(), tokens() + VOCABULARY)
    with pytest.raises(InputError, match=r"^second: got shape \[7\]"):
        model(tokens(), tokens()[0])


def test_second_documents_of_another_number() -> None:
    with pytest.raises(InputError, match=r"^second: got a batch of 1, allowed is 2"):
        pair_model()(tokens(2), tokens(1))


def test_chunk_longer_than_the_simple_bias_reaches() -> None:
    with pytest.raises(ConfigError, match=r"^attention\.chunk_size: got 5, allowed is at most 4, as far as the simple"):
        small_config(chunk_size=5, max_length=4)
    with pytest.raises(ConfigError, match=r"^chunk: got 5, allowed is at most 4, as far as the simple"):
        small_model().set_chunk_size(5)
    q = torch.randn(1, 5, 2)
    with pytest.raises(InputError, match=r"^bias: got shape \[7\], allowed is \[2 · reach - 1\] with a reach of .* 5"):
        chunked_attention(q, q, q, chunk_size=5, bias=torch.zeros(7))


def test_refused_chunk_changes_nothing() -> None:
    model, x = small_model(), tokens()
    before, config = model(x).logits, model.config
    with pytest.raises(ConfigError):
        model.set_chunk_size(5)
    assert model.config == config
    assert torch.equal(model(x).logits, before)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0])
def test_chunk_that_is_no_size(chunk: Any) -> None:
    with pytest.raises(ConfigError, match=f"^chunk: got {chunk}, allowed is a whole number of at least 1"):
        small_model().set_chunk_size(chunk)


def test_chunk_of_a_model_without_attention() -> None:
    with pytest.raises(InputError, match=r"^chunk: this model has no attention"):
        small_model("tcn-mlp").set_chunk_size(4)


def test_sequence_longer_than_a_full_simple_bias_reaches() -> None:
    model = small_model("mega-full", max_length=8)
    with pytest.raises(InputError, match=r"^x: got 9 tokens, .*, allowed are at most 8, .*max_length"):
        model(tokens(time=9))
    _, state = model(tokens(time=8))
    with pytest.raises(InputError, match=r"^x: got 9 tokens, .*, allowed are at most 8, .*max_length"):
        model(tokens(time=1), state=state)


GENERATION: list[tuple[dict[str, Any], str]] = [
    ({"tokens": -1}, "tokens: got -1, allowed is 0 or more"),
    ({"temperature": -0.5}, "temperature: got -0.5, allowed is 0 or more"),
    ({"temperature": float("nan")}, "temperature: got nan, allowed is 0 or more"),
    ({"top_k": 0}, "top_k: got 0, allowed is 1 or more, or None"),
    ({"lengths": [3]}, r"lengths: got shape \[1\] of torch\.int64, allowed is \[2\]"),
    ({"lengths": [3, 8]}, r"lengths: got values outside .*0 to 7, .*; got \[8\]"),
    # Nothing can be said about what follows nothing.
    ({"lengths": [3, 0]}, "lengths: got"),
    ({"prompt": torch.zeros(7, dtype=torch.long)}, r"(x|prompt): got shape \[7\], allowed is \[batch, time\]"),
    ({"prompt": torch.zeros(2, 0, dtype=torch.long)}, r"(x|prompt): got shape \[2, 0\], allowed is \[batch, time\]"),
    ({"prompt": torch.full((2, 7), VOCABULARY)}, "(x|prompt): got a token outside the vocabulary, allowed are 0 to 10"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    GENERATION,
    ids=[f"{next(iter(case))}-{number}" for number, (case, _) in enumerate(GENERATION)],
)
def test_generation_asked_wrongly(arguments: dict[str, Any], message: str) -> None:
    arguments = {"prompt": tokens(), "tokens": 2, **arguments}
    with pytest.raises(InputError, match=f"^{message}"):
        generate(small_model(), **arguments)


def test_generation_checks_its_arguments_before_the_first_token() -> None:
    with pytest.raises(InputError, match=r"^temperature: got -1.0"):
        stream(small_model(), tokens(), 2, temperature=-1.0)


def test_generation_of_what_is_no_language_model() -> None:
    with pytest.raises(InputError, match=r"^model: got a ClassifierHeadConfig, allowed is a language model"):
        generate(small_model(small_config(head=ClassifierHeadConfig())), tokens(), 2)


@pytest.mark.parametrize("vocab_size", [128, 256, 300, 50_000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16], ids=str)
def test_tokens_of_any_whole_type(dtype: torch.dtype, vocab_size: int) -> None:
    x = torch.tensor([[97, 98, 99]])
    model = small_model(vocab_size=vocab_size)
    assert torch.equal(model(x.to(dtype)).logits, model(x).logits)
    assert torch.equal(model(x.to(dtype), lengths=[2]).logits, model(x, lengths=[2]).logits)
    with pytest.raises(VocabularyError, match=r"allowed are 0 to 98; got \[99\]"):
        small_model(vocab_size=99)(x.to(dtype))


def test_inputs_that_are_no_tensors() -> None:
    model = small_model()
    for wrong in (tokens().numpy(), [[1, 2]], "abc"):
        with pytest.raises(InputError, match=r"^x: got a .*, allowed is a torch\.Tensor"):
            model(wrong)
    with pytest.raises(ConfigError, match=r"^what: got None, allowed are a preset, its name, or a ModelConfig"):
        build(None)  # type: ignore[arg-type]
