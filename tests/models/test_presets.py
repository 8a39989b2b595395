"""The presets are the published table of hyper-parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    SequenceModel,
    TCNConfig,
    TokenInputConfig,
    ValueInputConfig,
    build,
    preset,
    presets,
)


class Row(NamedTuple):
    """A line of the published table, and what its caption says about all tasks or some."""

    num_layers: int
    d_model: int
    hidden: int
    keys: int
    function: str
    norm: str
    prenorm: bool
    length: int
    batch: int
    rate: float
    dropout: float
    decay: float
    max_steps: int
    warmup_steps: int
    chunk_size: int = 128
    truncation: int | None = 1024
    position: str = "simple"
    power: int = 1
    max_grad_norm: float = 1.0


TABLE = {
    "listops": Row(6, 80, 160, 64, "softmax", "layer", False, 2002, 64, 0.001, 0.1, 0.01, 90_000, 3_000),
    "text": Row(4, 128, 256, 64, "softmax", "scale", False, 4002, 50, 0.004, 0.1, 0.01, 25_000, 10_000),
    "retrieval": Row(6, 128, 256, 64, "softmax", "scale", False, 4002, 64, 0.003, 0.1, 0.04, 91_960, 10_000),
    "image": Row(8, 160, 320, 96, "laplace", "batch", True, 1024, 50, 0.01, 0.0, 0.02, 180_000, 9_000),
    "pathfinder": Row(6, 128, 256, 64, "laplace", "batch", True, 1024, 128, 0.01, 0.0, 0.01, 250_000, 50_000),
    "pathx": Row(
        *(4, 64, 128, 32, "laplace", "sync_batch", True, 16_384, 128, 0.01, 0.0, 0.01, 125_000, 25_000),
        chunk_size=4096,
        truncation=4096,
        power=2,
    ),
    "enwik8": Row(
        *(12, 512, 1024, 128, "softmax", "layer", True, 8192, 65_536, 0.005, 0.1, 0.1, 400_000, 24_000),
        chunk_size=2048,
        # 8192 in the published command: as long as the longest run, so it never cuts anything off.
        truncation=None,
        position="rotary",
        max_grad_norm=0.25,
    ),
}
RECALL_LENGTHS = (64, 1024, 4096, 8192)

each_task = pytest.mark.parametrize("task", TABLE)
each_model = pytest.mark.parametrize("family", ["tcnca", "mega"])


@each_task
@each_model
def test_structure_is_the_tables(family: str, task: str) -> None:
    row, model = TABLE[task], preset(f"{family}-{task}").model
    assert (model.num_layers, model.d_model, model.d_ff) == (row.num_layers, row.d_model, row.hidden)
    assert (model.norm, model.prenorm, model.dropout) == (row.norm, row.prenorm, row.dropout)
    assert model.attention == AttentionConfig(
        d_key=row.keys,
        d_value=row.hidden,
        chunk_size=row.chunk_size,
        activation=row.function,  # type: ignore[arg-type]
        position=row.position,  # type: ignore[arg-type]
    )
    assert model.gated
    assert model.activation == "silu"
    assert model.causal == (task == "enwik8")


@each_task
@each_model
def test_optimization_is_the_tables(family: str, task: str) -> None:
    row, got = TABLE[task], preset(f"{family}-{task}").optimization
    assert (got.batch, got.lr, got.warmup_steps, got.warmup_power) == (row.batch, row.rate, row.warmup_steps, row.power)
    if (family, task) != ("tcnca", "enwik8"):
        assert (got.max_steps, got.weight_decay) == (row.max_steps, row.decay)
    assert got.max_grad_norm == row.max_grad_norm
    assert (got.betas, got.eps, got.warmup_start) == ((0.9, 0.98), 1e-8, 1e-7)


def test_optimization_of_tcnca_on_enwik8_is_the_papers() -> None:
    got = preset("tcnca-enwik8").optimization
    assert (got.lr, got.weight_decay) == (0.005, 0.2)
    # 250 epochs of 90 million bytes, in updates of 65,536 tokens, to the nearest epoch.
    assert round(got.max_steps * 65_536 / 90_000_000) == 250


@each_task
def test_mega_has_sixteen_hidden_states_and_the_truncation_of_its_task(task: str) -> None:
    assert preset(f"mega-{task}").model.mixer == EMAConfig(d_state=16, truncation=TABLE[task].truncation)


@each_task
@each_model
def test_length_is_the_tables(family: str, task: str) -> None:
    assert preset(f"{family}-{task}").length == TABLE[task].length


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("tcn")])
def test_tcn_sees_the_whole_sequence(name: str) -> None:
    found = preset(name)
    assert isinstance(found.model.mixer, TCNConfig)
    assert found.model.mixer.receptive_field >= found.length


@pytest.mark.parametrize(
    ("task", "kind", "head", "num_classes"),
    [
        ("listops", TokenInputConfig, ClassifierHeadConfig, 10),
        ("text", TokenInputConfig, ClassifierHeadConfig, 2),
        ("retrieval", TokenInputConfig, PairHeadConfig, 2),
        ("image", ValueInputConfig, ClassifierHeadConfig, 10),
        ("pathfinder", ValueInputConfig, ClassifierHeadConfig, 2),
        ("pathx", ValueInputConfig, ClassifierHeadConfig, 2),
    ],
)
@each_model
def test_inputs_and_classes_are_the_tasks(family: str, task: str, kind: type, head: type, classes: int) -> None:
    model = preset(f"{family}-{task}").model
    assert type(model.input) is kind
    assert type(model.head) is head
    assert isinstance(model.head, ClassifierHeadConfig | PairHeadConfig)
    assert (model.head.num_classes, model.head.pooling) == (classes, "mean")
    if isinstance(model.head, PairHeadConfig):
        assert model.head.combination == "concat"
        assert model.head.hidden is not None
        assert model.head.activation == "gelu"


@each_model
def test_enwik8_is_a_tied_language_model(family: str) -> None:
    model = preset(f"{family}-enwik8").model
    assert model.input == TokenInputConfig(vocab_size=208, scale_embeddings=True)
    assert model.head == LanguageModelHeadConfig(tie_embeddings=True)
    assert not model.final_norm_affine


def parameters(name: str, **changes: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name, **changes).parameters())


def test_mega_on_enwik8_has_the_published_number_of_parameters() -> None:
    assert parameters("mega-enwik8") == 39_137_792


def test_tcnca_on_enwik8_is_as_large_as_mega() -> None:
    assert parameters("tcnca-enwik8") == pytest.approx(39_137_792, rel=0.01)


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
    assert found.optimization.lr in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    assert model.dropout in (0.0, 0.1)
    if isinstance(model.mixer, TCNConfig):
        assert model.mixer.depth in (3, 4)


def test_every_family_is_there_for_every_task() -> None:
    expected = {f"{family}-{task}" for family in ("tcnca", "mega", "tcn-mlp") for task in TABLE} | {"ema-mlp-enwik8"}
    expected |= {f"{family}-recall-{length}" for family in ("tcnca-simple", "mega") for length in RECALL_LENGTHS}
    assert set(presets()) == expected
    assert len(presets()) == len(expected)


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    assert isinstance(model, SequenceModel)
    assert model.config == preset(name).model
    assert preset(name).name == name
    assert ModelConfig.from_dict(model.config.to_dict()) == model.config


@pytest.mark.parametrize("name", [name for name in presets() if "-mlp-" in name])
def test_mlp_models_have_no_attention(name: str) -> None:
    model = preset(name).model
    assert model.attention is None
    assert not model.gated
    assert isinstance(model.mixer, TCNConfig if name.startswith("tcn") else EMAConfig)


def test_preset_can_be_changed() -> None:
    found = preset("mega-enwik8", chunk_size=512, vocab_size=256, num_layers=2)
    assert found.model.attention is not None
    assert (found.model.num_layers, found.model.attention.chunk_size, found.model.input) == (
        2,
        512,
        TokenInputConfig(vocab_size=256, scale_embeddings=True),
    )
    assert found.optimization == preset("mega-enwik8").optimization
    assert preset("mega-enwik8").model.num_layers == 12


def test_build_takes_a_name_or_a_configuration() -> None:
    config = preset("tcnca-listops").model
    with torch.device("meta"):
        assert (
            build(config, num_layers=1).config
            == build("tcnca-listops", num_layers=1).config
            == config.override(num_layers=1)
        )


def test_preset_of_no_such_name() -> None:
    with pytest.raises(ConfigError, match=r"preset: got 'tcnca-enwiki8', allowed are .*; did you mean tcnca-enwik8\?"):
        preset("tcnca-enwiki8")
    with pytest.raises(ConfigError, match=r"preset: got 'zzz', allowed are tcnca-enwik8, .*[0-9]$"):
        build("zzz")


def test_changed_preset_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"chunks: no such field, allowed are .*; did you mean chunk\?"):
        preset("tcnca-enwik8", chunks=512)
