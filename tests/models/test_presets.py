"""The presets are the published table of sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    ConfigError,
    EMAConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    TCNConfig,
    TokenInputConfig,
    ValueInputConfig,
    build,
    preset,
    presets,
)

# MEGA's table: layers, d_model, d_ff (and d_value), d_key, norm, pre-norm, dropout, length, chunk, EMA's truncation.
# On EnWik8 the published truncation is 8192: as long as the longest row, so it never cuts anything off.
TABLE = {
    "listops": (6, 80, 160, 64, "layer", False, 0.1, 2002, 128, 1024),
    "text": (4, 128, 256, 64, "scale", False, 0.1, 4002, 128, 1024),
    "retrieval": (6, 128, 256, 64, "scale", False, 0.1, 4002, 128, 1024),
    "image": (8, 160, 320, 96, "batch", True, 0.0, 1024, 128, 1024),
    "pathfinder": (6, 128, 256, 64, "batch", True, 0.0, 1024, 128, 1024),
    "pathx": (4, 64, 128, 32, "sync_batch", True, 0.0, 16_384, 4096, 4096),
    "enwik8": (12, 512, 1024, 128, "layer", True, 0.1, 8192, 2048, None),
}
RECALL_LENGTHS = (64, 1024, 4096, 8192)
PAPERS_BLOCK = {"block": "residual", "output": "none", "init": "decay", "norm": "weight", "activation": "silu"}


@pytest.mark.parametrize("task", TABLE)
@pytest.mark.parametrize("family", ["tcnca", "tcnca-linear", "mega", "tcn-mlp"])
def test_structure_equals_the_table(family: str, task: str) -> None:
    *sizes, d_key, norm, prenorm, dropout, length, chunk_size, truncation = TABLE[task]
    found = preset(f"{family}-{task}")
    model = found.model
    assert (found.length, found.family) == (length, family)
    assert [model.num_layers, model.d_model, model.d_ff] == sizes
    assert (model.norm, model.prenorm, model.dropout) == (norm, prenorm, dropout)
    assert (model.activation, model.causal, model.gated) == ("silu", task == "enwik8", family != "tcn-mlp")
    attention: dict[str, Any] = {"d_key": d_key, "d_value": sizes[2], "chunk_size": chunk_size}
    attention |= {"activation": "laplace"} if task in ("image", "pathfinder", "pathx") else {}
    attention |= {"position": "rotary"} if task == "enwik8" else {}
    assert model.attention == (None if family == "tcn-mlp" else AttentionConfig(**attention))
    if family == "mega":
        assert model.mixer == EMAConfig(d_state=16, truncation=truncation)
    if task == "enwik8":
        assert model.input == TokenInputConfig(vocab_size=208, scale_embeddings=True)
        assert model.head == LanguageModelHeadConfig(tie_embeddings=True)
        assert not model.final_norm_affine
        return
    assert type(model.input) is (TokenInputConfig if task in ("listops", "text", "retrieval") else ValueInputConfig)
    assert type(model.head) is (PairHeadConfig if task == "retrieval" else ClassifierHeadConfig)
    assert model.head.num_classes == (10 if task in ("listops", "image") else 2)
    assert (model.head.pooling, model.head.activation) == ("mean", "gelu")


@pytest.mark.parametrize(
    ("name", "sizes"),
    {
        # Layers, d_model, heads, d_key and d_value, d_ff, dropout.
        "transformer-enwik8": (12, 512, 8, 512, 2048, 0.1),
        "transformer-xl-enwik8": (12, 512, 8, 512, 2048, 0.1),
        "transformer-listops": (6, 512, 8, 512, 2048, 0.1),
        "transformer-text": (4, 256, 4, 256, 1024, 0.1),
        "transformer-retrieval": (4, 128, 4, 128, 512, 0.1),
        "transformer-image": (1, 32, 1, 32, 64, 0.3),
        "transformer-pathfinder": (1, 128, 4, 64, 128, 0.2),
        "transformer-pathx": (1, 32, 2, 16, 32, 0.1),
    }.items(),
)
def test_transformers_have_the_published_sizes(name: str, sizes: tuple[Any, ...]) -> None:
    model = preset(name).model
    attention = model.attention
    assert attention is not None
    assert attention.d_value == attention.d_key
    assert sizes == (
        *(model.num_layers, model.d_model, attention.num_heads, attention.d_key, model.d_ff),
        model.dropout,
    )
    language, xl = name.endswith("enwik8"), "-xl-" in name
    assert (attention.position, attention.memory, attention.chunk_size) == ("rope", xl, 512 if xl else None)
    assert (model.mixer, model.gated, model.norm, model.prenorm, model.causal) == (None, False, "layer", True, language)
    other = preset(name.replace("transformer-xl", "mega").replace("transformer", "mega")).model
    assert model.input == other.input
    assert type(model.head) is type(other.head)
    if not language:
        assert (model.head.hidden, model.head.dropout) == (model.d_ff, model.dropout)  # type: ignore[attr-defined]


# Layers, d_model, d_state, dropout, and the blocks of S5 or the convolutions of CDIL-CNN.
ATTENTION_FREE = {
    "s4d-listops": (6, 256, 4, 0.0, None),
    "s4d-text": (6, 256, 4, 0.0, None),
    "s4d-retrieval": (6, 256, 4, 0.0, None),
    "s4d-image": (6, 512, 64, 0.1, None),
    "s4d-pathfinder": (6, 256, 64, 0.0, None),
    "s4d-pathx": (6, 256, 64, 0.0, None),
    "s5-listops": (8, 128, 16, 0.0, 8),
    "s5-text": (6, 256, 192, 0.1, 12),
    "s5-retrieval": (6, 128, 256, 0.0, 16),
    "s5-image": (6, 512, 384, 0.1, 3),
    "s5-pathfinder": (6, 192, 256, 0.05, 8),
    "s5-pathx": (6, 128, 256, 0.0, 16),
    "cdil-text": (1, 64, None, 0.0, 11),
    "cdil-retrieval": (1, 64, None, 0.0, 11),
    "cdil-image": (1, 64, None, 0.0, 9),
    "cdil-pathfinder": (1, 64, None, 0.0, 9),
}


@pytest.mark.parametrize(
    "name", [name for name in presets() if name.startswith(("s4d", "s5", "lru", "sgconv", "cdil"))]
)
def test_models_without_attention_have_the_published_sizes(name: str) -> None:
    family, task = name.split("-")
    # The sizes of SGConv and the LRU are our choice: those of S4 and S5.
    *sizes, blocks = ATTENTION_FREE[name.replace("sgconv", "s4d").replace("lru", "s5")]
    found = preset(name)
    model, mixer = found.model, found.model.mixer
    assert mixer is not None
    prenorm = not (family in ("s4d", "sgconv") and task in ("listops", "image"))
    d_state = None if family == "sgconv" else sizes[2]
    assert [model.num_layers, model.d_model, getattr(mixer, "d_state", None), model.dropout] == [
        *(sizes[0], sizes[1], d_state, sizes[3])
    ]
    assert (model.d_ff, model.attention, model.gated, model.causal, model.prenorm) == (0, None, False, False, prenorm)
    assert (found.family, model.norm) == (family, "none" if family == "cdil" else "batch")
    assert getattr(mixer, "output", None) == {"s5": "gate", "cdil": None}.get(family, "glu")
    assert getattr(mixer, "dropout", 0.0) == model.dropout
    assert getattr(mixer, "dt_min", None) == ({"pathx": 1e-4}.get(task, 1e-3) if family in ("s4d", "s5") else None)
    assert getattr(mixer, "depth" if family == "cdil" else "blocks", blocks) == blocks
    assert getattr(mixer, "kernel_length", found.length) == found.length
    other = preset(f"mega-{task}").model
    assert (model.input, type(model.head)) == (other.input, type(other.head))
    assert model.head.num_classes == other.head.num_classes  # type: ignore[attr-defined]
    assert model.head.hidden == (model.d_model if task == "retrieval" else None)  # type: ignore[attr-defined]


def test_models_without_attention_are_those_of_the_papers_table() -> None:
    tasks = {"listops", "text", "retrieval", "image", "pathfinder", "pathx"}
    for family in ("s4d", "s5", "lru", "sgconv", "cdil"):
        quoted = tasks - {"listops", "pathx"} if family == "cdil" else tasks
        assert {name for name in presets() if name.startswith(f"{family}-")} == {f"{family}-{task}" for task in quoted}


@pytest.mark.parametrize("length", RECALL_LENGTHS)
@pytest.mark.parametrize("family", ["tcnca-simple", "mega"])
def test_associative_recall(family: str, length: int) -> None:
    found = preset(f"{family}-recall-{length}")
    model, size = found.model, 32 if length == 64 else 128
    assert found.length == length
    assert (model.num_layers, model.d_model) == (2, size)
    assert model.attention is not None
    assert model.attention.chunk_size == size
    assert model.causal
    assert isinstance(model.head, LanguageModelHeadConfig)
    assert model.gated == (family == "mega")
    if isinstance(model.mixer, TCNConfig):
        assert model.mixer.depth in (3, 4)


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("tcn")])
def test_tcn_is_the_familys_and_sees_the_whole_sequence(name: str) -> None:
    found = preset(name)
    tcn = found.model.mixer
    assert isinstance(tcn, TCNConfig)
    assert tcn.receptive_field >= found.length
    if found.family == "tcnca-linear":
        assert (tcn.block, tcn.output, tcn.init, tcn.norm) == ("linear", "skip", "ema", "none")
    else:
        assert {key: getattr(tcn, key) for key in PAPERS_BLOCK} == PAPERS_BLOCK


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name).parameters())


def test_number_of_parameters_on_enwik8_is_the_published_one() -> None:
    assert parameters("mega-enwik8") == 39_137_792
    assert parameters("tcnca-enwik8") == pytest.approx(39_137_792, rel=0.01)
    assert parameters("tcnca-linear-enwik8") == pytest.approx(39_137_792, rel=0.01)
    # Four matrices of d², two of d · d_ff, their biases and two norms in each of twelve layers.
    layer = 4 * 512**2 + 2 * 512 * 2048 + 5 * 512 + 2048 + 4 * 512
    assert parameters("transformer-enwik8") == parameters("transformer-xl-enwik8") == 12 * layer + 208 * 512 + 2 * 512


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    assert model.config == preset(name).model
    assert preset(name).name == name
    assert ModelConfig.from_dict(model.config.to_dict()) == model.config


def test_preset_can_be_changed() -> None:
    found = preset("mega-enwik8", chunk_size=512, vocab_size=256, n_layers=2)
    assert found.model == preset("mega-enwik8").model.override(
        {"attention.chunk_size": 512, "input.vocab_size": 256, "num_layers": 2}
    )
    with torch.device("meta"):
        assert (
            build(found, num_layers=1).config
            == build("mega-enwik8", num_layers=1, chunk_size=512, vocab_size=256).config
            == build(found.model, num_layers=1).config
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tcnca-enwiki8", {}, r"^preset: did you mean tcnca-enwik8\? Got 'tcnca-enwiki8'"),
        ("enwik8-tcnca-linear", {}, r"^preset: did you mean tcnca-linear-enwik8\?"),
        ("zzz", {}, r"^preset: expected one of tcnca-enwik8, .*[0-9], got 'zzz'$"),
        (3, {}, "^what: expected a preset, its name, or a ModelConfig, got 3"),
        ("tcnca-enwik8", {"chunks": 512}, r"^chunks: did you mean attention\.chunk_size\?"),
    ],
)
def test_model_that_cannot_be_built(name: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **changes)
