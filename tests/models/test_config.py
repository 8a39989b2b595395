"""Configurations: what goes into a dictionary comes out of it, and what cannot be built says why."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    ConfigError,
    EMAConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    TCNConfig,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.layers import NORM_KINDS
from tcnca.layers.attention import Position
from tcnca.layers.tcn import TCNInit, TCNNorm
from tcnca.models.heads import Combination, Pooling
from tcnca.ops import ACTIVATIONS, ATTENTION_ACTIVATIONS, EMA_BACKENDS
from tests.examples import small_config

sizes = st.integers(1, 9)
flags = st.booleans()
probabilities = st.floats(0.0, 1.0, exclude_max=True)
activations = st.sampled_from(ACTIVATIONS)
tcns = st.builds(
    TCNConfig,
    kernel_size=sizes,
    dilation_factor=sizes,
    depth=sizes,
    convolutions=sizes,
    activation=activations,
    norm=st.sampled_from(get_args(TCNNorm)),
    bias=flags,
    dropout=probabilities,
    block=st.sampled_from(["linear", "chain"]),
    output=st.just("activation"),
    init=st.sampled_from(get_args(TCNInit)),
)
emas = st.builds(EMAConfig, d_state=sizes, backend=st.sampled_from(EMA_BACKENDS)) | st.builds(
    EMAConfig,
    hidden=sizes,
    truncation=sizes,
    backend=st.sampled_from([name for name in EMA_BACKENDS if name != "triton"]),
)
attentions = st.builds(
    AttentionConfig,
    d_key=sizes.map(lambda half: 2 * half),
    d_value=sizes,
    chunk_size=st.none() | sizes,
    activation=st.sampled_from(ATTENTION_ACTIVATIONS),
    position=st.sampled_from(get_args(Position)),
    max_length=st.integers(9, 20),
    dropout=probabilities,
)
token_inputs = st.builds(
    TokenInputConfig,
    vocab_size=st.integers(4, 9),
    scale_embeddings=flags,
    norm=flags,
    pad_token_id=st.none() | st.integers(0, 3),
)
inputs = token_inputs | st.builds(ValueInputConfig, features=sizes, norm=flags)
pooled = {
    "hidden": sizes,
    "hidden_layers": sizes,
    "activation": activations,
    "dropout": probabilities,
}
poolings = st.sampled_from(get_args(Pooling))
pooled_heads = (
    st.builds(ClassifierHeadConfig, num_classes=sizes, pooling=poolings, **pooled)
    | st.builds(RegressionHeadConfig, outputs=sizes, pooling=poolings, **pooled)
    | st.builds(
        PairHeadConfig,
        num_classes=sizes,
        pooling=st.sampled_from(("mean", "last", "first")),
        combination=st.sampled_from(get_args(Combination)),
        **pooled,
    )
)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any configuration that can be built, every field drawn."""
    language_model = draw(flags)
    attention = draw(st.none() | attentions)
    return ModelConfig(
        num_layers=draw(sizes),
        d_model=draw(sizes),
        d_ff=draw(st.integers(0, 9)),
        mixer=draw(st.none() | tcns | emas),
        attention=attention,
        gated=attention is not None and draw(flags),
        causal=language_model or draw(flags),
        input=draw(token_inputs if language_model else inputs),
        head=LanguageModelHeadConfig(tie_embeddings=draw(flags)) if language_model else draw(pooled_heads),
        activation=draw(activations),  # type: ignore[arg-type]
        norm=draw(st.sampled_from(NORM_KINDS)),
        prenorm=draw(flags),
        final_norm_affine=draw(flags),
        dropout=draw(probabilities),
        value_dropout=draw(probabilities),
        ff_dropout=draw(probabilities),
        feature_dropout=draw(flags),
    )


@given(config=configs())
def test_dictionary_and_back(config: ModelConfig) -> None:
    written = json.dumps(config.to_dict())
    assert ModelConfig.from_dict(json.loads(written)) == config


@given(config=configs())
def test_dictionary_names_every_field(config: ModelConfig) -> None:
    values = config.to_dict()
    assert set(values) == {field.name for field in dataclasses.fields(config)}
    for part in ("mixer", "attention", "input", "head"):
        value = getattr(config, part)
        if value is not None:
            assert set(values[part]) == {"kind"} | {field.name for field in dataclasses.fields(value)}


def test_fields_left_out_of_a_dictionary_have_their_defaults() -> None:
    assert ModelConfig.from_dict({}) == ModelConfig()
    assert ModelConfig.from_dict({"mixer": {"kind": "ema", "d_state": 3}}) == ModelConfig(mixer=EMAConfig(d_state=3))
    assert ModelConfig.from_dict({"mixer": {"depth": 2}}) == ModelConfig(mixer=TCNConfig(depth=2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer": 2}, "layer: no such field, allowed are .*; did you mean layers"),
        ({"mixer": {"kind": "ema", "hiden": 2}}, r"mixer\.hiden: no such field, .* did you mean mixer\.hidden"),
        (
            {"mixer": {"kind": "ema", "depth": 2}},
            r"mixer\.depth: no such field, allowed are finish, hidden, backend, spread, truncation",
        ),
        ({"mixer": {"kind": "lstm"}}, r"mixer\.kind: got 'lstm', allowed are tcn, ema"),
        ({"head": {"kind": "tagger"}}, r"head\.kind: got 'tagger', allowed are language-model, classifier"),
        ({"mixer": "tcn"}, "mixer: got 'tcn', allowed are TCNConfig, EMAConfig, None"),
        ({"input": None}, "input: got None, allowed are TokenInputConfig, ValueInputConfig"),
        ({"num_layers": 0}, "layers: got 0, allowed is a whole number of at least 1"),
    ],
)
def test_dictionary_that_gives_no_model(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(values)


def test_override_of_bare_names_finds_the_part() -> None:
    config = small_config().override(num_layers=3, vocab_size=256, chunk_size=2, kernel_size=5, tie_embeddings=False)
    assert config.num_layers == 3
    assert config.input == TokenInputConfig(vocab_size=256)
    assert config.attention is not None
    assert config.attention.chunk_size == 2
    assert isinstance(config.mixer, TCNConfig)
    assert (config.mixer.kernel_size, config.mixer.depth) == (5, 3)
    assert config.head == LanguageModelHeadConfig(tie_embeddings=False)


def test_override_of_dotted_names() -> None:
    config = small_config("mega", head=ClassifierHeadConfig()).override(**{"mixer.d_state": 5, "head.hidden": 7})
    assert config.mixer == EMAConfig(d_state=5)
    assert config.head == ClassifierHeadConfig(hidden=7)


def test_override_leaves_the_original_and_all_else_alone() -> None:
    before = small_config()
    after = before.override(chunk_size=3)
    assert before == small_config()
    assert after.override(chunk_size=4) == before


def test_bare_name_of_the_model_itself_goes_before_its_parts() -> None:
    before = small_config()
    config = before.override(dropout=0.25, norm="rms")
    assert (config.dropout, config.norm) == (0.25, "rms")
    assert (config.mixer, config.attention, config.input) == (before.mixer, before.attention, before.input)


def test_override_of_a_name_that_several_parts_have() -> None:
    config = small_config("mega", head=ClassifierHeadConfig())
    with pytest.raises(
        ConfigError, match=r"hidden: is a field of several parts, allowed are mixer\.hidden, head\.hidden"
    ):
        config.override(hidden=3)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("chunks", "chunk_size"),
        ("vocab", "vocab_size"),
        ("kernelsize", "kernel_size"),
        ("layer", "num_layers"),
        ("attention.chnk", "attention.chunk_size"),
    ],
)
def test_override_suggests_what_a_typo_meant(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: no such field, allowed are .*; did you mean {suggestion}\?"):
        small_config().override(**{name: 1})


def test_override_of_what_this_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match="truncation: no such field"):
        small_config("tcnca").override(truncation=3)
    with pytest.raises(ConfigError, match="chunk: no such field"):
        small_config("tcn-mlp").override(chunk_size=3)


def test_override_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"attention\.chunk_size: got 0, allowed"):
        small_config().override(chunk_size=0)
    with pytest.raises(ConfigError, match="gated: got True without attention"):
        small_config().override(attention=None)


def test_override_of_a_part_and_of_its_fields_together() -> None:
    config = small_config("tcnca").override(mixer=EMAConfig(d_state=2), truncation=7)
    assert config.mixer == EMAConfig(d_state=2, truncation=7)
    config = small_config("tcn-mlp").override(attention=AttentionConfig(), chunk_size=7)
    assert config.attention == AttentionConfig(chunk_size=7)


def test_override_of_a_part_and_of_fields_that_the_new_part_does_not_have() -> None:
    with pytest.raises(ConfigError, match="kernel_size"):
        small_config("tcnca").override(mixer=EMAConfig(), kernel_size=3)
    with pytest.raises(ConfigError, match="kernel_size"):
        small_config("tcnca").override(mixer=None, kernel_size=3)


@given(length=st.integers(1, 5000), kernel_size=st.integers(2, 17), depth=st.integers(2, 4), blocks=st.integers(1, 2))
def test_covering_takes_the_smallest_dilation_factor(length: int, kernel_size: int, depth: int, blocks: int) -> None:
    config = TCNConfig.covering(length, kernel_size=kernel_size, depth=depth, convolutions=blocks)
    assert (config.kernel_size, config.depth, config.convolutions) == (kernel_size, depth, blocks)
    assert config.receptive_field >= length
    if config.dilation_factor > 1:
        smaller = dataclasses.replace(config, dilation_factor=config.dilation_factor - 1)
        assert smaller.receptive_field < length


@pytest.mark.parametrize("fields", [{"depth": 1, "kernel_size": 5}, {"depth": 3, "kernel_size": 1}])
def test_covering_what_no_dilation_factor_covers(fields: dict[str, Any]) -> None:
    reach = TCNConfig(dilation_factor=1, **fields).receptive_field
    assert TCNConfig.covering(reach, **fields).dilation_factor == 1
    with pytest.raises(ConfigError, match=rf"length: got {reach + 1}, allowed is at most {reach}"):
        TCNConfig.covering(reach + 1, **fields)


@pytest.mark.parametrize("length", [0, -1, 2.5])
def test_covering_of_no_length(length: Any) -> None:
    with pytest.raises(ConfigError, match=rf"length: got {length}, allowed is a whole number of at least 1"):
        TCNConfig.covering(length)
