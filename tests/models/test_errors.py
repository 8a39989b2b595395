"""Calls that cannot be right are refused at once, with a message that names the argument."""

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
    ModelConfig,
    ModelState,
    PairHeadConfig,
    SequenceModel,
    StateError,
    TCNConfig,
    ValueInputConfig,
    VocabularyError,
    build,
    generate,
    stream,
)
from tests.comparison import assert_close
from tests.examples import VOCABULARY, small_config, small_model

BATCH, TIME = 2, 7


def tokens(batch: int = BATCH, time: int = TIME) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, time))


def value_model(features: int = 1, **options: Any) -> SequenceModel:
    config = small_config(head=ClassifierHeadConfig(), input=ValueInputConfig(features=features))
    return small_model(config, **options)


def pair_model() -> SequenceModel:
    return small_model(small_config(head=PairHeadConfig(), causal=False))


@pytest.mark.parametrize("shape", [(7,), (2, 7, 1), (2, 0), ()], ids=str)
def test_tokens_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"^x: expected shape \[batch, time\] .*, got {re.escape(str(list(shape)))}"):
        small_model()(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_tokens_of_the_wrong_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"^x: expected tokens, .*, got {dtype}"):
        small_model()(tokens().to(dtype))


@pytest.mark.parametrize(
    ("features", "shape", "expected"),
    [
        (1, (2, 7, 2), "[batch, time, 1], got [2, 7, 2]"),
        (1, (7,), "[batch, time, 1], got [7]"),
        (3, (2, 7), "[batch, time, 3], got [2, 7]"),
        (3, (2, 0, 3), "[batch, time, 3], got [2, 0, 3]"),
        (3, (2, 3, 7), "[batch, time, 3], got [2, 3, 7]; this looks like [batch, channels, time]"),
    ],
)
def test_real_values_of_the_wrong_shape(features: int, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape('x: expected shape ' + expected)}"):
        value_model(features)(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.int64),
    ],
    ids=str,
)
def test_real_values_of_another_dtype(model: torch.dtype, x: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"^x: expected .*, got {x}"):
        value_model(dtype=model)(torch.zeros(BATCH, TIME, dtype=x))


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**9])
@pytest.mark.parametrize("error", [VocabularyError, IndexError])
def test_token_outside_the_vocabulary(token: int, error: type[Exception]) -> None:
    x = tokens()
    x[1, 3] = token
    with pytest.raises(error, match=rf"^x: expected tokens of the vocabulary, 0 to {VOCABULARY - 1}.*got \[{token}\]$"):
        small_model()(x)


def test_tokens_at_padding_are_not_checked() -> None:
    x, model = tokens(), small_model()
    expected = model(x, lengths=[7, 3]).logits
    x[1, 3:] = -100
    assert torch.equal(model(x, lengths=[7, 3]).logits, expected)
    with pytest.raises(VocabularyError):
        model(x, lengths=[7, 4])


@pytest.mark.parametrize("vocab_size", [128, 50_000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16], ids=str)
def test_tokens_of_any_whole_dtype(dtype: torch.dtype, vocab_size: int) -> None:
    x = torch.tensor([[97, 98, 99]])
    model = small_model(vocab_size=vocab_size)
    assert torch.equal(model(x.to(dtype)).logits, model(x).logits)
    assert torch.equal(model(x.to(dtype), lengths=[2]).logits, model(x, lengths=[2]).logits)
    with pytest.raises(VocabularyError, match=r"0 to 98, got \[99\]"):
        small_model(vocab_size=99)(x.to(dtype))


def test_inputs_that_are_not_tensors() -> None:
    for wrong in (tokens().numpy(), [[1, 2]], "abc"):
        with pytest.raises(InputError, match=r"^x: .*torch\.Tensor"):
            small_model()(wrong)
    with pytest.raises(ConfigError, match=r"^what: "):
        build(None)  # type: ignore[arg-type]


PACKINGS: dict[str, tuple[int, dict[str, Any], str]] = {
    "lengths-too-few": (2, {"lengths": [3]}, "lengths: "),
    "lengths-number": (2, {"lengths": 3}, "lengths: "),
    "lengths-float": (2, {"lengths": [3.0, 2.0]}, "lengths: "),
    "lengths-negative": (2, {"lengths": [3, -1]}, r"lengths: .*got \[-1\]"),
    "lengths-too-long": (2, {"lengths": [8, 7]}, r"lengths: .*got \[8\]"),
    "mask-short": (2, {"attention_mask": torch.ones(2, 6)}, r"attention_mask: expected shape \[2, 7\], .*\[2, 6\]"),
    "mask-float": (2, {"attention_mask": torch.ones(2, 7)}, r"attention_mask: expected booleans, .*torch\.float32"),
    "mask-two": (2, {"attention_mask": torch.full((2, 7), 2)}, "attention_mask: expected 1 for valid tokens and 0"),
    "cu-batch": (2, {"cu_seqlens": [0, 7]}, r"x: expected a batch of 1 with cu_seqlens, .*got 2"),
    "cu-single": (1, {"cu_seqlens": [0]}, r"cu_seqlens: expected whole numbers of shape \[documents \+ 1\], got \[1\]"),
    "cu-float": (1, {"cu_seqlens": [0.0, 7.0]}, r"cu_seqlens: expected whole numbers .*torch\.float32"),
    "cu-start": (1, {"cu_seqlens": [1, 7]}, r"cu_seqlens: expected values that rise from 0 to 7, .*got \[1, 7\]"),
    "cu-falls": (1, {"cu_seqlens": [0, 4, 3, 7]}, r"cu_seqlens: expected values that rise .*got \[0, 4, 3, 7\]"),
    "max-too-small": (
        1,
        {"cu_seqlens": [0, 3, 7], "max_seqlen": 3},
        r"max_seqlen: expected documents of at most 3 tokens, got \[4\]",
    ),
    "max-alone": (2, {"max_seqlen": 7}, "max_seqlen: expected None without cu_seqlens, got 7"),
    "several": (
        2,
        {"lengths": [7, 7], "attention_mask": torch.ones(2, 7)},
        "lengths, attention_mask: expected at most one",
    ),
}


@pytest.mark.parametrize("case", PACKINGS)
def test_wrong_lengths_and_masks(case: str) -> None:
    batch, described, message = PACKINGS[case]
    with pytest.raises(InputError, match=f"^{message}"):
        small_model()(tokens(batch), **described)


def test_second_document() -> None:
    cases: list[tuple[SequenceModel, tuple[Tensor, ...], dict[str, Any], str]] = [
        (pair_model(), (tokens(),), {}, "second: expected a second document"),
        (small_model(), (tokens(), tokens()), {}, "second: expected None"),
        (small_model(), (tokens(),), {"lengths2": [7, 7]}, "lengths2, attention_mask2: expected None"),
        (pair_model(), (tokens(), tokens() + VOCABULARY), {}, "second: expected tokens of the vocabulary"),
        (pair_model(), (tokens(), tokens()[0]), {}, r"second: expected shape \[batch, time\]"),
        (pair_model(), (tokens(2), tokens(1)), {}, "second: expected a batch of 2, like x, got 1"),
        (pair_model(), (tokens(), tokens()), {"lengths2": [3, 8]}, r"lengths2: .*got \[8\]"),
        (pair_model(), (tokens(), tokens()), {"attention_mask2": torch.ones(2, 6)}, "attention_mask2: expected shape"),
    ]
    for model, documents, described, message in cases:
        with pytest.raises(InputError, match=f"^{message}"):
            model(*documents, **described)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [("input_ids", "x"), ("inputs", "x"), ("mask", "attention_mask"), ("past_key_values", "state")],
)
def test_arguments_of_other_libraries_are_answered_with_ours(foreign: str, ours: str) -> None:
    with pytest.raises(InputError, match=rf"^{foreign}: no such argument; use {ours}$"):
        small_model()(**{foreign: tokens()})


def test_unknown_arguments_are_answered() -> None:
    for fields, message in (
        ({"labels": tokens()}, r"^labels: no such argument; use torch\.nn\.functional\.cross_entropy"),
        ({"length": [7, 7]}, r"^length: no such argument; use lengths$"),
        ({"zzz": 3}, r"^zzz: no such argument; use one of x, second, lengths, .*inplace$"),
    ):
        with pytest.raises(InputError, match=message):
            small_model()(tokens(), **fields)
    with pytest.raises(InputError, match=r"^typical_p: no such argument; use one of model, prompt"):
        generate(small_model(), tokens(), 3, typical_p=0.5)  # type: ignore[call-arg]


def test_chunk_size() -> None:
    model, x = small_model(), tokens()
    before, config = model(x).logits, model.config
    with pytest.raises(ConfigError, match=r"^attention\.chunk_size: expected at most 4, .*got 5"):
        small_config(chunk_size=5, max_length=4)
    for wrong in (5, 0, 2.5):
        with pytest.raises(ConfigError, match=r"^chunk_size: "):
            model.set_chunk_size(wrong)  # type: ignore[arg-type]
    assert model.config == config
    assert torch.equal(model(x).logits, before)
    with pytest.raises(InputError, match=r"^chunk_size: expected a model with attention"):
        small_model("tcn-mlp").set_chunk_size(4)


def test_sequence_longer_than_a_full_simple_bias() -> None:
    model = small_model("mega-full", max_length=8)
    with pytest.raises(InputError, match=r"^x: expected at most 8 tokens, .*got 9; .*max_length"):
        model(tokens(time=9))
    _, state = model(tokens(time=8))
    with pytest.raises(InputError, match=r"^x: expected at most 8 tokens, .*got 9; .*max_length"):
        model(tokens(time=1), state=state)


GENERATION: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": -1}, "max_new_tokens: expected a whole number of at least 0, got -1"),
    ({"temperature": -0.5}, "temperature: expected .*, got -0.5"),
    ({"temperature": float("nan")}, "temperature: expected .*, got nan"),
    ({"top_k": 0}, "top_k: expected a whole number of at least 1, got 0"),
    ({"top_p": 0.0}, "top_p: expected a number above 0 and at most 1, or None, got 0.0"),
    ({"top_p": 1.5}, "top_p: expected .*, got 1.5"),
    ({"min_p": -0.1}, "min_p: expected a number from 0 to 1, or None, got -0.1"),
    ({"min_p": float("nan")}, "min_p: expected .*, got nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number above 0, .*, got 0.0"),
    ({"num_samples": 0}, "num_samples: expected a whole number of at least 1, got 0"),
    ({"seed": 1, "generator": torch.Generator()}, "seed, generator: expected at most one"),
    ({"num_return_sequences": 2}, "num_return_sequences: no such argument; use num_samples"),
    ({"lengths": [3]}, "lengths: "),
    ({"lengths": [3, 0]}, "lengths: expected at least 1 token"),
    ({"prompt": torch.zeros(7, dtype=torch.long)}, r"prompt: expected shape \[batch, time\]"),
    ({"prompt": torch.zeros(2, 0, dtype=torch.long)}, r"prompt: expected shape \[batch, time\]"),
    ({"prompt": torch.full((2, 7), VOCABULARY)}, "x: expected tokens of the vocabulary"),
    ({"tokens": 5}, "tokens: no such argument; use max_new_tokens"),
    ({"input_ids": tokens()}, "input_ids: no such argument; use prompt"),
]


@pytest.mark.parametrize(("arguments", "message"), GENERATION)
def test_generation_with_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    arguments = {"prompt": tokens(), "max_new_tokens": 2, **arguments}
    with pytest.raises(InputError, match=f"^{message}"):
        generate(small_model(), **arguments)


def test_generation_is_checked_before_the_first_token() -> None:
    with pytest.raises(InputError, match=r"^temperature: expected"):
        stream(small_model(), tokens(), 2, temperature=-1.0)
    with pytest.raises(InputError, match=r"^model: expected a language model, got a classifier; use tcnca predict"):
        generate(small_model(small_config(head=ClassifierHeadConfig())), tokens(), 2)


def state_of(config: ModelConfig, batch: int = 2) -> ModelState:
    state = small_model(config)(tokens(batch)).state
    assert state is not None
    return state


OTHER_MODEL = r"^state: expected one of .*, got one of another model"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("tcnca", {"kernel_size": 2}),
        ("tcnca", {"dilation_factor": 3}),
        # Two blocks of one convolution have buffers like one block of two.
        ("tcnca", {"mixer": TCNConfig(kernel_size=3, dilation_factor=1, depth=1, convolutions=2)}),
        ("tcnca", {"chunk_size": 2}),
        ("tcnca", {"d_value": 4}),
        ("tcnca", {"d_model": 6}),
        ("tcnca", {"num_layers": 1}),
        ("tcnca", {"gated": False}),
        ("mega", {"mixer.d_state": 2}),
        ("mega", {"truncation": 5}),
        ("mega-full", {"chunk_size": 4}),
    ],
    ids=str,
)
def test_state_of_another_model(family: str, changes: dict[str, Any]) -> None:
    other = state_of(small_config(family).override(**changes))
    with pytest.raises(StateError, match=OTHER_MODEL):
        small_model(family)(tokens(), state=other)


def test_state_of_another_family_pooling_or_chunk_size() -> None:
    for family, name in (("tcnca", "mega"), ("tcn-mlp", "tcnca-simple"), ("ema-mlp", "mega")):
        with pytest.raises(StateError, match=OTHER_MODEL):
            small_model(family)(tokens(), state=state_of(small_config(name)))
    last, mean = (small_config(head=ClassifierHeadConfig(pooling=pooling)) for pooling in ("last", "mean"))
    with pytest.raises(StateError, match=r"^state: .*pooling mean, got .*pooling last"):
        small_model(mean)(tokens(), state=state_of(last))
    model, x = small_model(), tokens(time=9)
    with torch.no_grad():
        _, state = model(x[:, :5])
        with pytest.raises(StateError, match=OTHER_MODEL):
            model.set_chunk_size(2)(tokens(), state=state)
        assert_close(model.set_chunk_size(4)(x[:, 5:], state=state).logits, model(x).logits[:, 5:])


@pytest.mark.parametrize("family", ["tcnca", "mega", "mega-full", "tcn-mlp", "ema-mlp"])
def test_state_of_another_batch_device_or_dtype(family: str) -> None:
    model = small_model(family)
    _, state = model(tokens(3))
    with pytest.raises(StateError, match=r"^state: expected a batch of 2, like x, got 3"):
        model(tokens(2), state=state)
    with pytest.raises(StateError, match=r"^state: expected cpu, like x, got meta; .*state\.to"):
        model(tokens(3), state=state.to("meta"))
    if family != "ema-mlp":  # its state is a sum, which is kept in float32 at least
        with pytest.raises(StateError, match=r"^state: expected torch\.float64, .*got torch\.float32; .*state\.to"):
            model(tokens(3), state=state.to(torch.float32))
        model(tokens(3), state=state.to(torch.float32).to(torch.float64))
    _, state = model(tokens(1), cu_seqlens=[0, 3, 7])
    with pytest.raises(StateError, match=r"^state: expected a batch of 3, like x, got 2"):
        model(tokens(1), cu_seqlens=[0, 3, 5, 7], state=state)


@pytest.mark.parametrize("wrong", [(), "state", 3, {}, state_of(small_config()).layers[0]], ids=str)
def test_state_of_another_type(wrong: Any) -> None:
    with pytest.raises(StateError, match=f"^state: expected a ModelState .*, got a {type(wrong).__name__}"):
        small_model()(tokens(), state=wrong)


@pytest.mark.parametrize(
    ("head", "causal", "kind"),
    [(ClassifierHeadConfig(), False, "is bidirectional"), (PairHeadConfig(), True, "reads two documents")],
)
def test_model_without_a_state(head: Any, causal: bool, kind: str) -> None:
    model = small_model(small_config(head=head, causal=causal))
    assert not model.streams
    for asked in ({"state": state_of(small_config())}, {"return_state": True}):
        with pytest.raises(StateError, match=rf"^state: expected a causal model .*got a model that {kind}"):
            model(*(tokens() for _ in range(head.documents)), **asked)
    with pytest.raises(StateError, match=r"^state: expected a causal model"):
        model.initial_state(2)
    with pytest.raises(StateError, match=r"^batch: expected at least 1, got 0"):
        small_model().initial_state(0)


def test_refused_state_is_unchanged() -> None:
    model = small_model()
    _, state = model(tokens(2))
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with pytest.raises(StateError):
        model(tokens(3), state=state, inplace=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


@pytest.mark.parametrize("family", ["tcnca", "mega-full"])
def test_state_that_was_consumed(family: str) -> None:
    model = small_model(family)
    with torch.no_grad():
        _, state = model(tokens())
        kept = state.clone()
        _, following = model(tokens(time=1), state=state, inplace=True)
        for use in (lambda: model(tokens(time=1), state=state), state.clone, lambda: state.to("cpu"), state.detach):
            with pytest.raises(StateError, match="inplace=True"):
                use()
        # The following state and earlier copies can be used.
        model(tokens(time=1), state=following, inplace=True)
        model(tokens(time=1), state=kept)


def test_state_of_a_failed_call_is_consumed() -> None:
    model = small_model("mega-full", mixer=TCNConfig(kernel_size=3, dilation_factor=2, depth=2), max_length=6)
    _, state = model(tokens(time=4))
    with torch.no_grad(), pytest.raises(InputError, match="at most 6"):
        model(tokens(time=3), state=state, inplace=True)
    with pytest.raises(StateError, match="inplace=True"):
        model(tokens(time=2), state=state)
