"""Arguments missing in a checkpoint of MEGA have the documented default of its architecture."""

from __future__ import annotations

import dataclasses

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

LANGUAGE_MODELS = {
    None: (6, 512, 1664, 128, (0.1, 0.0, 0.0)),
    "mega_lm_big": (16, 1024, 2048, 256, (0.1, 0.0, 0.0)),
    "mega_lm_enwik8_base": (12, 512, 1024, 128, (0.1, 0.0, 0.0)),
    "mega_lm_enwik8_large": (24, 1024, 1536, 128, (0.2, 0.1, 0.1)),
}
LONG_RANGE_ARENA = {
    "mega_lra_listop": (6, 80, 64, 10, "scale", 2002, 1024),
    "mega_lra_imdb": (4, 128, 64, 2, "scale", 4002, 1024),
    "mega_lra_aan": (6, 128, 64, 2, "rms", 4002, 1024),  # no default norm: the weights tell
    "mega_lra_cifar10": (8, 160, 96, 10, "batch", 1024, 1024),
    "mega_lra_pf32": (6, 128, 64, 2, "batch", 1024, 1024),
    "mega_lra_pf128": (4, 64, 32, 2, "batch", 16384, 4096),
}


@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_language_models(architecture: str | None) -> None:
    num_layers, d_model, hidden, d_key, (dropout, attention_dropout, value_dropout) = LANGUAGE_MODELS[architecture]
    attention = AttentionConfig(d_key=d_key, d_value=hidden, chunk_size=None, max_length=1024)
    assert language_model_config(Arguments({"arch": architecture}, "mega_lm"), 40) == ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        d_ff=hidden,
        mixer=EMAConfig(d_state=16, truncation=2048),
        attention=dataclasses.replace(attention, dropout=attention_dropout),
        input=TokenInputConfig(vocab_size=40, scale_embeddings=True, pad_token_id=1),
        head=LanguageModelHeadConfig(tie_embeddings=False),
        prenorm=False,
        dropout=dropout,
        value_dropout=value_dropout,
    )


@pytest.mark.parametrize("architecture", LONG_RANGE_ARENA)
def test_long_range_arena(architecture: str) -> None:
    num_layers, d_model, d_key, classes, norm, length, truncation = LONG_RANGE_ARENA[architecture]
    text, hidden = norm != "batch", 2 * d_model
    attention = AttentionConfig(d_key=d_key, d_value=hidden, chunk_size=length, activation="relu2", dropout=0.1)
    head = PairHeadConfig if architecture == "mega_lra_aan" else ClassifierHeadConfig
    found = classifier_config(Arguments({"arch": architecture}, "lra"), 30 if text else None, "rmsnorm")
    assert found == ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        d_ff=hidden,
        mixer=EMAConfig(d_state=16, truncation=truncation),
        attention=dataclasses.replace(attention, chunk_size=None, max_length=length) if text else attention,
        causal=False,
        input=TokenInputConfig(vocab_size=30, pad_token_id=1) if text else ValueInputConfig(),
        head=head(num_classes=classes, hidden=hidden, dropout=0.1),
        norm=norm,  # type: ignore[arg-type]
        prenorm=False,
        dropout=0.1,
    )
