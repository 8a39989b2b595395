"""Every field of every configuration is checked, by a message that names it, what it got and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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

WHOLE = "allowed is a whole number of at least {}"
PROBABILITY = "allowed is a number from 0 up to, not including, 1"
FLAG = "allowed are True and False"


def wrong_values(allowed: str) -> list[Any]:
    """Values that a field of this kind must refuse: those at the edge, and those of another type."""
    if allowed == PROBABILITY:
        return [-0.1, 1.0, 1, float("nan"), "0.1", None, True]
    if allowed == FLAG:
        return [1, 0, None, "yes"]
    if allowed.startswith("allowed are"):
        return ["nonsense", None, 1, ["silu"]]
    least = int(allowed.rsplit(" ", 1)[1])
    return [least - 1, -5, 1.0, float(least), "3", True]


# Every field: how to make its configuration, the name in messages, what is allowed.
FIELDS: list[tuple[Callable[..., Any], str, str]] = [
    *[(ModelConfig, name, WHOLE.format(1)) for name in ("num_layers", "d_model")],
    (ModelConfig, "d_ff", WHOLE.format(0)),
    *[(ModelConfig, name, FLAG) for name in ("gated", "causal", "prenorm", "final_norm_affine", "feature_dropout")],
    *[(ModelConfig, name, PROBABILITY) for name in ("dropout", "value_dropout", "ff_dropout")],
    (ModelConfig, "activation", "allowed are silu, gelu, gelu_tanh, relu, none"),
    (ModelConfig, "norm", "allowed are layer, scale, rms, batch, sync_batch"),
    *[
        (TCNConfig, f"mixer.{name}", WHOLE.format(1))
        for name in ("kernel_size", "dilation_factor", "depth", "convolutions")
    ],
    (TCNConfig, "mixer.activation", "allowed are silu, gelu, gelu_tanh, relu, none"),
    (TCNConfig, "mixer.norm", "allowed are none, weight, rms, layer, batch, sync_batch"),
    (TCNConfig, "mixer.block", "allowed are linear, chain, residual"),
    (TCNConfig, "mixer.output", "allowed are none, skip, activation"),
    (TCNConfig, "mixer.init", "allowed are ema, series, decay, near, graded, normal"),
    (TCNConfig, "mixer.bias", FLAG),
    (TCNConfig, "mixer.dropout", PROBABILITY),
    (EMAConfig, "mixer.d_state", WHOLE.format(1)),
    (EMAConfig, "mixer.truncation", WHOLE.format(1)),
    (EMAConfig, "mixer.backend", "allowed are fft, steps, scan, fused, auto"),
    (EMAConfig, "mixer.spread", FLAG),
    (EMAConfig, "mixer.output", "allowed are skip, activation"),
    *[(AttentionConfig, f"attention.{name}", WHOLE.format(1)) for name in ("d_key", "d_value", "chunk_size")],
    (AttentionConfig, "attention.max_length", WHOLE.format(1)),
    (AttentionConfig, "attention.activation", "allowed are softmax, relu2, laplace"),
    (AttentionConfig, "attention.position", "allowed are none, simple, rotary, rope"),
    (AttentionConfig, "attention.dropout", PROBABILITY),
    (TokenInputConfig, "input.vocab_size", WHOLE.format(1)),
    (TokenInputConfig, "input.pad_token_id", WHOLE.format(0)),
    *[(TokenInputConfig, f"input.{name}", FLAG) for name in ("scale_embeddings", "norm")],
    (ValueInputConfig, "input.features", WHOLE.format(1)),
    (ValueInputConfig, "input.norm", FLAG),
    (LanguageModelHeadConfig, "head.tie_embeddings", FLAG),
    (RegressionHeadConfig, "head.outputs", WHOLE.format(1)),
    (PairHeadConfig, "head.combination", "allowed are concat, features"),
    *[(head, "head.num_classes", WHOLE.format(1)) for head in (ClassifierHeadConfig, PairHeadConfig)],
    *[
        (head, f"head.{name}", allowed)
        for head in (ClassifierHeadConfig, RegressionHeadConfig, PairHeadConfig)
        for name, allowed in {
            "pooling": "allowed are mean, last, first, none",
            "hidden": WHOLE.format(1),
            "hidden_layers": WHOLE.format(1),
            "activation": "allowed are silu, gelu, gelu_tanh, relu, none",
            "dropout": PROBABILITY,
        }.items()
    ],
]
CHECKS = [
    pytest.param(make, name, value, allowed, id=f"{make.__name__}-{name}-{value}")
    for make, name, allowed in FIELDS
    for value in wrong_values(allowed)
]


@pytest.mark.parametrize(("make", "name", "value", "allowed"), CHECKS)
def test_field_that_is_wrong(make: Callable[..., Any], name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{name}: got {value!r}, {allowed}')}$"):
        make(**{name.split(".")[-1]: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu"}, "mixer.activation: got 'gelu', but block 'linear' with output 'skip' has none"),
        (
            {"activation": "none", "output": "none"},
            "mixer.activation: got 'none', but block 'linear' with output 'none'",
        ),
        ({"block": "residual", "init": "series"}, "mixer.init: got 'series' with block 'residual', allowed is it with"),
    ],
)
def test_what_a_tcn_would_ignore(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TCNConfig(**fields)


@pytest.mark.parametrize("fields", [{"block": "chain"}, {"block": "residual"}, {"output": "activation"}])
def test_what_a_tcn_uses(fields: dict[str, Any]) -> None:
    assert TCNConfig(activation="gelu", **fields).activation == "gelu"


def test_table_has_every_field() -> None:
    parts = {"mixer", "attention", "input", "head"}
    kinds = {make for make, _, _ in FIELDS}
    stated = {(make, name.split(".")[-1]) for make, name, _ in FIELDS}
    existing = {(kind, field.name) for kind in kinds for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    assert existing - stated == {(ModelConfig, part) for part in parts}


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (ModelConfig, {"mixer": 3}, "mixer: got 3, allowed are TCNConfig, EMAConfig, None"),
        (ModelConfig, {"attention": "full"}, "attention: got 'full', allowed are AttentionConfig, None"),
        (ModelConfig, {"input": None}, "input: got None, allowed are TokenInputConfig, ValueInputConfig"),
        (ModelConfig, {"head": None}, "head: got None, allowed are LanguageModelHeadConfig, ClassifierHeadConfig"),
        (ModelConfig, {"attention": None}, "gated: got True without attention, allowed is False"),
        (
            ModelConfig,
            {"input": ValueInputConfig()},
            "head: got LanguageModelHeadConfig on real-valued .*, allowed is TokenInputConfig",
        ),
        (ModelConfig, {"causal": False}, "causal: got False with a LanguageModelHeadConfig, allowed is True"),
        (PairHeadConfig, {"pooling": "none"}, r"head\.pooling: got 'none', allowed are mean, last, first"),
        (AttentionConfig, {"d_key": 5, "position": "rope"}, r"attention\.d_key: got 5, allowed is an even"),
        (AttentionConfig, {"d_key": 5, "position": "rotary"}, r"attention\.d_key: got 5, allowed is an even"),
        (AttentionConfig, {"chunk_size": None}, r"attention\.max_length: got None, allowed is a whole number"),
        (AttentionConfig, {"chunk_size": 9, "max_length": 8}, r"attention\.chunk_size: got 9, allowed is at most 8"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else getattr(value, "__name__", str(value).split(",")[0]),
)
def test_fields_that_do_not_fit_together(make: Callable[..., Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**fields)


def test_hidden_layers_of_no_width() -> None:
    with pytest.raises(ConfigError, match=r"^head\.hidden_layers: got 2 without head\.hidden"):
        RegressionHeadConfig(hidden_layers=2)


def test_padding_index_outside_the_vocabulary() -> None:
    TokenInputConfig(vocab_size=8, pad_token_id=7)
    with pytest.raises(ConfigError, match=r"^input\.pad_token_id: got 8, allowed is below the vocabulary, 8"):
        TokenInputConfig(vocab_size=8, pad_token_id=8)


def test_numbers_of_numpy_become_plain_ones() -> None:
    head = RegressionHeadConfig(outputs=np.int64(5), dropout=np.float32(0.5))  # type: ignore[arg-type]
    assert type(head.outputs) is int
    assert type(head.dropout) is float
    assert head == RegressionHeadConfig(outputs=5, dropout=0.5)


@pytest.mark.parametrize(
    "config", [ModelConfig, TCNConfig, EMAConfig, AttentionConfig, TokenInputConfig, PairHeadConfig]
)
def test_help_explains_every_field(config: type) -> None:
    for field in dataclasses.fields(config):
        assert f"\n    {field.name}: " in (config.__doc__ or ""), field.name
