"""Arguments missing in a checkpoint of MEGA have the documented default of its architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    EMAConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    TokenInputConfig,
    ValueInputConfig,
    load_mega_checkpoint,
)
from tests.models.mega_files import weight_shapes, write

# What the architectures of a kind have in common, whatever their sizes.
ANY_LANGUAGE_MODEL: dict[str, Any] = {
    "decoder_n_dim": 16,
    "decoder_chunk_size": -1,
    "max_target_positions": 1024,
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "normalization_type": "layernorm",
    "normalize_before": False,
    "normalize_embedding": False,
    "no_affine_final_norm": False,
    "no_scale_embedding": False,
    "rel_pos_bias": "simple",
    "truncation_length": 2048,
    "share_decoder_input_output_embed": False,
}
ANY_CLASSIFIER: dict[str, Any] = {
    "layer_type": "mega",
    "n_dim": 16,
    "activation_fn": "silu",
    "normalize_embedding": False,
    "rel_pos_bias": "simple",
    "sen_rep_type": "mp",
    "classifier_layers": 1,
    "classifier_activation_fn": "gelu",
}


def write_zeros(path: Path, given: dict[str, Any], full: dict[str, Any], vocab_size: int | None) -> Path:
    """Write a checkpoint with the arguments `given` and zero weights of a model with the arguments `full`.

    The zeros share memory, so that a large model makes a small file.
    """
    weights = {
        name: torch.zeros((), dtype=torch.long if name.endswith("tracked") else None).expand(tuple(shape))
        for name, shape in weight_shapes(full, vocab_size).items()
    }
    return write(path, given, weights)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "d_model", "hidden", "keys", "dropouts"),
    [
        ("mega_lm", 6, 512, 1664, 128, (0.1, 0.0, 0.0)),
        (None, 6, 512, 1664, 128, (0.1, 0.0, 0.0)),
        ("mega_lm_big", 16, 1024, 2048, 256, (0.1, 0.0, 0.0)),
        ("mega_lm_enwik8_base", 12, 512, 1024, 128, (0.1, 0.0, 0.0)),
        ("mega_lm_enwik8_large", 24, 1024, 1536, 128, (0.2, 0.1, 0.1)),
    ],
)
def test_language_models(
    tmp_path: Path,
    architecture: str | None,
    num_layers: int,
    d_model: int,
    hidden: int,
    keys: int,
    dropouts: tuple[float, float, float],
) -> None:
    sizes = {
        "layers": num_layers,
        "embed_dim": d_model,
        "hidden_dim": hidden,
        "ffn_embed_dim": hidden,
        "z_dim": keys,
    }
    full = {**ANY_LANGUAGE_MODEL, **{f"decoder_{name}": value for name, value in sizes.items()}}
    given = {} if architecture is None else {"arch": architecture}
    model = load_mega_checkpoint(write_zeros(tmp_path / "lm.pt", given, full, 40))
    dropout, attention_dropout, value_dropout = dropouts
    assert model.config == ModelConfig(
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
        ("mega_lra_listop", 6, 80, 64, 10, "scalenorm", 2002, 1024),
        ("mega_lra_imdb", 4, 128, 64, 2, "scalenorm", 4002, 1024),
        ("mega_lra_aan", 6, 128, 64, 2, "layernorm", 4002, 1024),
        # This architecture has no norm of its own: the weights tell.
        ("mega_lra_aan", 6, 128, 64, 2, "rmsnorm", 4002, 1024),
        ("mega_lra_aan", 6, 128, 64, 2, "batchnorm", 4002, 1024),
        ("mega_lra_cifar10", 8, 160, 96, 10, "batchnorm", 1024, 1024),
        ("mega_lra_pf32", 6, 128, 64, 2, "batchnorm", 1024, 1024),
        ("mega_lra_pf128", 4, 64, 32, 2, "batchnorm", 16384, 4096),
    ],
)
def test_long_range_arena(
    tmp_path: Path,
    architecture: str,
    num_layers: int,
    d_model: int,
    keys: int,
    num_classes: int,
    norm: str,
    length: int,
    truncation: int,
) -> None:
    text, pair = architecture in ("mega_lra_listop", "mega_lra_imdb", "mega_lra_aan"), architecture == "mega_lra_aan"
    chunk = None if text else length
    full = {
        **ANY_CLASSIFIER,
        "encoder_layers": num_layers,
        "encoder_embed_dim": d_model,
        "encoder_hidden_dim": 2 * d_model,
        "encoder_ffn_embed_dim": 2 * d_model,
        "z_dim": keys,
        "chunk_size": chunk or -1,
        "max_positions": length,
        "norm_type": norm,
        "encoder_normalize_before": False,
        "classifier_in_dim": 2 * d_model if pair else d_model,
        "classifier_out_dim": 2 * d_model,
        "sentence_class_num": num_classes,
    }
    given = {"arch": architecture, "input_type": "text" if text else "image"}
    model = load_mega_checkpoint(write_zeros(tmp_path / "lra.pt", given, full, 30 if text else None))
    head: dict[str, Any] = {"num_classes": num_classes, "hidden": 2 * d_model, "dropout": 0.1}
    ours = {"layernorm": "layer", "scalenorm": "scale", "rmsnorm": "rms", "batchnorm": "batch"}
    assert model.config == ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        d_ff=2 * d_model,
        mixer=EMAConfig(d_state=16, truncation=truncation),
        attention=AttentionConfig(
            d_key=keys,
            d_value=2 * d_model,
            chunk_size=chunk,
            activation="relu2",
            max_length=length if text else None,
            dropout=0.1,
        ),
        causal=False,
        input=TokenInputConfig(vocab_size=30, pad_token_id=1) if text else ValueInputConfig(),
        head=PairHeadConfig(**head) if pair else ClassifierHeadConfig(**head),
        norm=ours[norm],  # type: ignore[arg-type]
        prenorm=False,
        dropout=0.1,
    )


@pytest.mark.parametrize(
    ("architecture", "d_model", "keys"),
    [("sc_raw", 60, 30), ("mega_sc_raw_base", 60, 30), ("mega_sc_raw_big", 72, 36)],
)
def test_speech_commands(tmp_path: Path, architecture: str, d_model: int, keys: int) -> None:
    full = {
        **ANY_CLASSIFIER,
        "encoder_layers": 6,
        "encoder_embed_dim": d_model,
        "encoder_hidden_dim": 2 * d_model,
        "encoder_ffn_embed_dim": 2 * d_model,
        "z_dim": keys,
        "chunk_size": 1000,
        "norm_type": "batchnorm",
        "encoder_normalize_before": True,
        "classifier_in_dim": d_model,
        "classifier_out_dim": 2 * d_model,
        "sentence_class_num": 10,
    }
    model = load_mega_checkpoint(write_zeros(tmp_path / "sc.pt", {"arch": architecture}, full, None))
    assert model.config == ModelConfig(
        num_layers=6,
        d_model=d_model,
        d_ff=2 * d_model,
        mixer=EMAConfig(d_state=16, truncation=1000),
        attention=AttentionConfig(d_key=keys, d_value=2 * d_model, chunk_size=1000, activation="laplace"),
        causal=False,
        input=ValueInputConfig(),
        head=ClassifierHeadConfig(num_classes=10, hidden=2 * d_model),
        norm="batch",
        prenorm=True,
    )
