"""Named models: every experiment of the paper, with the sizes that it took over from MEGA, and our own family.

Transformers have the sizes that they were published with: those of Transformer-XL's 12-layer model on EnWik8 (37.9 M
parameters; rotations have none, where Transformer-XL's own positions have 3 M), and those of the Long-Range Arena's
code (google-research/long-range-arena), of which those for pictures are small. Norms come first, positions are
rotations, and classifiers pool by the mean, as in our other models.

S4D, S5 and CDIL-CNN have the sizes of their papers and code. SGConv has S4's sizes, whose code base it shares, and the
LRU has S5's: our choice, as is where its decays start. All pool by the mean, without a hidden layer but for pairs.

Presets describe models only; recipes (`tcnca recipes`) say how to train them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tcnca.config import check_choice
from tcnca.errors import ConfigError
from tcnca.layers import (
    AttentionConfig,
    CDILConfig,
    EMAConfig,
    LRUConfig,
    MixerConfig,
    S4DConfig,
    S5Config,
    SGConvConfig,
    TCNConfig,
)
from tcnca.layers.norm import NormKind
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig, PairHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.model import ModelConfig, SequenceModel
from tcnca.models.preprocessing import Preprocessing

# The paper names the parts of its residual block and gives no formula: docs/tcn-block.md has the measurements behind
# this norm, non-linearity (SiLU) and initialization.
_RESIDUAL: dict[str, Any] = {"block": "residual", "output": "none", "init": "decay", "norm": "weight"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model."""

    name: str
    """For example `tcnca-enwik8`."""
    family: str
    """For example `tcnca`; `tcnca.recipes.FAMILIES` says what each is."""
    task: str
    """The task it is for."""
    length: int
    """Longest sequence of the task, in tokens."""
    model: ModelConfig
    """Its structure."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """A row of the table of sizes, for all families; `model` has the mixer and the attention of MEGA."""

    title: str
    length: int
    model: ModelConfig
    families: tuple[str, ...] = ("tcnca", "tcnca-linear", "mega", "tcn-mlp", "transformer")


def _arena(
    title: str,
    length: int,
    num_layers: int,
    d_model: int,
    d_key: int,
    norm: NormKind,
    num_classes: int = 2,
    *,
    vocab_size: int | None = None,
    pair: bool = False,
    chunk_size: int = 128,
    truncation: int = 1024,
) -> _Task:
    """Return a task of the Long-Range Arena; without a `vocab_size` it is on pixels."""
    text, hidden = vocab_size is not None, 2 * d_model
    dropout = 0.1 if text else 0.0
    head = PairHeadConfig if pair else ClassifierHeadConfig
    model = ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        d_ff=hidden,
        mixer=EMAConfig(d_state=16, truncation=truncation),
        attention=AttentionConfig(
            d_key=d_key, d_value=hidden, chunk_size=chunk_size, activation="softmax" if text else "laplace"
        ),
        causal=False,
        norm=norm,
        prenorm=not text,
        dropout=dropout,
        input=ValueInputConfig() if vocab_size is None else TokenInputConfig(vocab_size=vocab_size),
        head=head(num_classes=num_classes, hidden=hidden, dropout=dropout),
    )
    return _Task(f"{title} (Long-Range Arena)", length, model)


def _recall(length: int) -> _Task:
    """Return the task of one length. Layers, d_model, chunk and TCN depth are the paper's, other sizes our choice."""
    size = 32 if length == 64 else 128
    model = ModelConfig(
        num_layers=2,
        d_model=size,
        d_ff=2 * size,
        mixer=EMAConfig(d_state=16),
        attention=AttentionConfig(d_key=size, d_value=2 * size, chunk_size=size),
        input=TokenInputConfig(vocab_size=10),
        head=LanguageModelHeadConfig(tie_embeddings=False),
    )
    return _Task(f"Associative recall, length {length}", length, model, ("tcnca-simple", "mega"))


_ENWIK8 = ModelConfig(
    num_layers=12,
    d_model=512,
    d_ff=1024,
    # MEGA's command truncates at 8192. No training row is longer, and its evaluation carries the plain recurrence from
    # call to call: without truncation both are exactly that, and the streaming state stays small. Only a single call of
    # more than 8192 tokens without a state would see less of the past with it.
    mixer=EMAConfig(d_state=16),
    attention=AttentionConfig(d_key=128, d_value=1024, chunk_size=2048, position="rotary"),
    dropout=0.1,
    # 205 byte values occur in EnWik8; MEGA's dictionary has 208 symbols.
    input=TokenInputConfig(vocab_size=208, scale_embeddings=True),
    head=LanguageModelHeadConfig(tie_embeddings=True),
    final_norm_affine=False,
)
_TASKS: dict[str, _Task] = {
    "enwik8": _Task(
        "EnWik8, language model on bytes",
        8192,  # rows of at most four chunks
        _ENWIK8,
        # The paper has an EMA-MLP for EnWik8 alone.
        ("tcnca", "tcnca-linear", "mega", "tcn-mlp", "ema-mlp", "transformer", "transformer-xl"),
    ),
    # Ten digits, four operators with their opening bracket, the closing bracket, and one unused token.
    "listops": _arena("ListOps", 2002, 6, 80, 64, "layer", 10, vocab_size=16),
    "text": _arena("Text: IMDB reviews as bytes", 4002, 4, 128, 64, "scale", vocab_size=256),
    "retrieval": _arena(
        "Retrieval: pairs of ACL Anthology papers as bytes", 4002, 6, 128, 64, "scale", vocab_size=256, pair=True
    ),
    "image": _arena("Image: gray CIFAR-10 as pixels in a row", 1024, 8, 160, 96, "batch", 10),
    "pathfinder": _arena("Pathfinder, 32×32", 1024, 6, 128, 64, "batch"),
    "pathx": _arena("Path-X, 128×128", 16_384, 4, 64, 32, "sync_batch", chunk_size=4096, truncation=4096),
    **{f"recall-{length}": _recall(length) for length in (64, 1024, 4096, 8192)},
}
# Layers, d_model, heads, d_key and d_value, d_ff, dropout. Published models also drop weights of the attention; set
# `attention.dropout` for that.
_TRANSFORMERS = {
    "enwik8": (12, 512, 8, 512, 2048, 0.1),
    "listops": (6, 512, 8, 512, 2048, 0.1),
    "text": (4, 256, 4, 256, 1024, 0.1),
    "retrieval": (4, 128, 4, 128, 512, 0.1),
    "image": (1, 32, 1, 32, 64, 0.3),
    "pathfinder": (1, 128, 4, 64, 128, 0.2),
    "pathx": (1, 32, 2, 16, 32, 0.1),
}
_SEGMENT = 512
"""Tokens of a segment of Transformer-XL, and of its memory."""
# d_model, d_state, dropout and pre-norm of S4, whose models have six layers.
_S4 = {
    "listops": (256, 4, 0.0, False),
    "text": (256, 4, 0.0, True),
    "retrieval": (256, 4, 0.0, True),
    "image": (512, 64, 0.1, False),
    "pathfinder": (256, 64, 0.0, True),
    "pathx": (256, 64, 0.0, True),
}
# Layers, d_model, d_state, blocks and dropout of S5.
_S5 = {
    "listops": (8, 128, 16, 8, 0.0),
    "text": (6, 256, 192, 12, 0.1),
    "retrieval": (6, 128, 256, 16, 0.0),
    "image": (6, 512, 384, 3, 0.1),
    "pathfinder": (6, 192, 256, 8, 0.05),
    "pathx": (6, 128, 256, 16, 0.0),
}
# Convolutions of CDIL-CNN, of 64 channels. The paper has no results of it on the other tasks.
_CDIL = {"text": 11, "retrieval": 11, "image": 9, "pathfinder": 9}
_ATTENTION_FREE: dict[str, dict[str, Any]] = {"s4d": _S4, "s5": _S5, "lru": _S5, "sgconv": _S4, "cdil": _CDIL}
"""Families of mixers in residual blocks without a feed-forward net, and the sizes on each of their tasks."""
_PRESETS = {
    f"{family}-{task}": (family, task)
    for task, row in _TASKS.items()
    for family in (*row.families, *(family for family, sizes in _ATTENTION_FREE.items() if task in sizes))
}


def _transformer(name: str, memory: bool) -> ModelConfig:
    num_layers, d_model, num_heads, width, d_ff, dropout = _TRANSFORMERS[name]
    model, language = _TASKS[name].model, name == "enwik8"
    head = model.head if language else dataclasses.replace(model.head, hidden=d_ff, dropout=dropout)  # type: ignore[call-arg]
    return dataclasses.replace(
        model,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        mixer=None,
        attention=AttentionConfig(
            num_heads=num_heads,
            d_key=width,
            d_value=width,
            chunk_size=_SEGMENT if memory else None,
            memory=memory,
            position="rope",
        ),
        gated=False,
        activation="relu" if language else "gelu",
        norm="layer",
        prenorm=True,
        dropout=dropout,
        head=head,
        final_norm_affine=True,
    )


def _attention_free(family: str, name: str) -> ModelConfig:
    task = _TASKS[name]
    mixer: MixerConfig
    num_layers, d_model, dropout, prenorm = 1, 64, 0.0, True
    # Some states begin slower where sequences are long: published for S4 and S5.
    slow = name == "pathx"
    dt_min = 1e-4 if slow else 1e-3
    if family == "cdil":
        mixer = CDILConfig(depth=_CDIL[name])
    elif family in ("s5", "lru"):
        num_layers, d_model, d_state, blocks, dropout = _S5[name]
        mixer = S5Config(d_state=d_state, blocks=blocks, dropout=dropout, dt_min=dt_min)
        if family == "lru":
            r_min, r_max = (0.999, 0.9999) if slow else (0.9, 0.999)
            mixer = LRUConfig(d_state=d_state, dropout=dropout, r_min=r_min, r_max=r_max, max_phase=math.pi / 10)
    else:
        num_layers, (d_model, d_state, dropout, prenorm) = 6, _S4[name]
        mixer = S4DConfig(d_state=d_state, dropout=dropout, dt_min=dt_min)
        if family == "sgconv":
            mixer = SGConvConfig(kernel_length=task.length, dropout=dropout)
    head: dict[str, Any] = {"hidden": None, "dropout": 0.0}
    if isinstance(task.model.head, PairHeadConfig):
        head |= {"combination": "features", "hidden": d_model}
    return dataclasses.replace(
        task.model,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=0,
        mixer=mixer,
        attention=None,
        gated=False,
        norm="none" if family == "cdil" else "batch",
        prenorm=prenorm,
        dropout=dropout,
        head=dataclasses.replace(task.model.head, **head),
    )


def _model(family: str, name: str) -> ModelConfig:
    if family.startswith("transformer"):
        return _transformer(name, memory=family == "transformer-xl")
    if family in _ATTENTION_FREE:
        return _attention_free(family, name)
    task = _TASKS[name]
    model = task.model
    if family.startswith("tcn"):
        block = {} if family == "tcnca-linear" else _RESIDUAL
        tcn = TCNConfig.covering(task.length, depth=3 if task.length == 64 else 4, **block)
        model = dataclasses.replace(model, mixer=tcn)
    if family == "tcnca-simple":
        return dataclasses.replace(model, gated=False)
    return dataclasses.replace(model, gated=False, attention=None) if family.endswith("-mlp") else model


def presets() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_PRESETS)


def preset(name: str, **changes: Any) -> Preset:
    """Return the preset called `name`, with changes to its model as by `ModelConfig.override`.

    `preset("mega-enwik8", chunk_size=512)`, or `preset("tcnca-simple-recall-64", vocab_size=20)` for the other half of
    the paper's recall table.
    """
    check_choice("preset", name, _PRESETS)
    family, task = _PRESETS[name]
    row = _TASKS[task]
    model = _model(family, task).override(changes)
    return Preset(name=name, family=family, task=row.title, length=row.length, model=model)


def build(
    what: str | Preset | ModelConfig, *, preprocessing: Preprocessing | None = None, **changes: Any
) -> SequenceModel:
    """Build a model.

    `build("tcnca-linear-enwik8", vocab_size=256)`, or `build(ModelConfig(d_model=64, num_layers=2))`.

    Args:
        what: the name of a preset (`presets()` and the command `tcnca models` list them), a preset, or a configuration.
        preprocessing: facts about the data, which the model applies and is saved with.
        changes: fields of the configuration to change, as by `ModelConfig.override`.

    Returns:
        The model in training mode, on the default device.
    """
    if isinstance(what, str):
        what = preset(what)
    config = what.model if isinstance(what, Preset) else what
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"what: expected a preset, its name, or a ModelConfig, got {config!r}")
    return SequenceModel(config.override(changes), preprocessing)
