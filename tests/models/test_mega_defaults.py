"""Arguments missing in a checkpoint of MEGA have the documented default of its architecture."""

from __future__ import annotations

from typing import Any

import pytest

from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    EMAConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.models.mega import Arguments, classifier_config, language_model_config


@pytest.mark.parametrize(
    ("architecture", "num_layers", "d_model", "hidden", "keys", "dropouts"),
    [
        (None, 6, 512, 1664, 128, (0.1, 0.0, 0.0)),
        ("mega_lm_big", 16, 1024, 2048, 256, (0.1, 0.0, 0.0)),
        ("mega_lm_enwik8_base", 12, 512, 1024, 128, (0.1, 0.0, 0.0)),
        ("mega_lm_enwik8_large", 24, 1024, 1536, 128, (0.2, 0.1, 0.1)),
    ],
)
def test_language_models(
    architecture: str | None, num_layers: int, d_model: int, hidden: int, keys: int, dropouts: tuple[float, ...]
) -> None:
    given = {} if architecture is None else {"arch": architecture}
    dropout, attention_dropout, value_dropout = dropouts
    assert language_model_config(Arguments(given, "mega_lm"), 40) == ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        d_ff=hidden,
        mixer=EMAConfig(d_state=16, truncation=2048),
        attention=AttentionConfig(
            d_key=keys, d_value=hidden, chunk_size=None, max_length=1024, dropout=attention_dropout
        ),
        input=TokenInputConfig(vocab_size=40, scale_embeddings=True, pad_token_id=1),
        head=LanguageModelHeadConfig(tie_embeddings=False),
        prenorm=False,
        dropout=dropout,
        value_dropout=value_dropout,
    )


@pytest.mark.parametrize(
    ("architecture", "num_layers", "d_model", "keys", "num_classes", "norm", "length", "truncation"),
    [
        ("mega_lra_listop", 6, 80, 64, 10, "scale", 2002, 1024),
        ("mega_lra_imdb", 4, 128, 64, 2, "scale", 4002, 1024),
        # This architecture has no default norm: the weights tell.
        ("mega_lra_aan", 6, 128, 64, 2, "rms", 4002, 1024),
        ("mega_lra_cifar10", 8, 160, 96, 10, "batch", 1024, 1024),
        ("mega_lra_pf32", 6, 128, 64, 2, "batch", 1024, 1024),
        ("mega_lra_pf128", 4, 64, 32, 2, "batch", 16384, 4096),
    ],
)
def test_long_range_arena(
    architecture: str,
    num_layers: int,
    d_model: int,
    keys: int,
    num_classes: int,
    norm: Any,
    length: int,
    truncation: int,
) -> None:
    text, pair = architecture in ("mega_lra_listop", "mega_lra_imdb", "mega_lra_aan"), architecture == "mega_lra_aan"
    head: dict[str, Any] = {"num_classes": num_classes, "hidden": 2 * d_model, "dropout": 0.1}
    arguments = Arguments({"arch": architecture}, "lra", norm_type="rmsnorm")
    assert classifier_config(arguments, 30 if text else None) == ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        d_ff=2 * d_model,
        mixer=EMAConfig(d_state=16, truncation=truncation),
        attention=AttentionConfig(
            d_key=keys,
            d_value=2 * d_model,
            chunk_size=None if text else length,
            activation="relu2",
            max_length=length if text else None,
            dropout=0.1,
        ),
        causal=False,
        input=TokenInputConfig(vocab_size=30, pad_token_id=1) if text else ValueInputConfig(),
        head=PairHeadConfig(**head) if pair else ClassifierHeadConfig(**head),
        norm=norm,
        prenorm=False,
        dropout=0.1,
    )


@pytest.mark.parametrize(
    ("architecture", "d_model"), [("sc_raw", 60), ("mega_sc_raw_base", 60), ("mega_sc_raw_big", 72)]
)
def test_speech_commands(architecture: str, d_model: int) -> None:
    assert classifier_config(Arguments({"arch": architecture}, "lra"), None) == ModelConfig(
        num_layers=6,
        d_model=d_model,
        d_ff=2 * d_model,
        mixer=EMAConfig(d_state=16, truncation=1000),
        attention=AttentionConfig(d_key=d_model // 2, d_value=2 * d_model, chunk_size=1000, activation="laplace"),
        causal=False,
        input=ValueInputConfig(),
        head=ClassifierHeadConfig(num_classes=10, hidden=2 * d_model),
        norm="batch",
        prenorm=True,
    )
