"""Named models: every experiment of the paper, with the hyper-parameters that it took over from MEGA."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from tcnca.errors import ConfigError
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models.config import ModelConfig
from tcnca.models.heads import ClassifierHeadConfig, HeadConfig, LanguageModelHeadConfig, PairHeadConfig
from tcnca.models.inputs import InputConfig, TokenInputConfig, ValueInputConfig
from tcnca.models.model import SequenceModel
from tcnca.models.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How to train the model: Adam with decoupled weight decay, linear warm-up and decay.

    For EnWik8 and Long-Range Arena it is how the published models were trained; for recall, where the paper only names
    the grid it searched, it is our choice.
    """

    max_steps: int
    """Number of updates."""
    warmup_steps: int
    """Updates of warm-up."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    """Decoupled weight decay."""
    batch: int
    """Sequences of an update; for EnWik8, tokens."""
    warmup_power: int = 1
    """Power of the warm-up's growth."""
    warmup_start: float = 1e-7
    """Learning rate at the start."""
    max_grad_norm: float = 1.0
    """Greatest norm of the gradient."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: float = 1e-8
    """Adam's ε."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named model."""

    name: str
    """For example `tcnca-enwik8`."""
    task: str
    """What it is for."""
    length: int
    """Longest sequence of the task, in tokens."""
    model: ModelConfig
    """Its structure."""
    optimization: Optimization
    """How to train it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """A row of MEGA's table of hyper-parameters. Feed-forward nets are as wide as the values."""

    title: str
    length: int
    num_layers: int
    d_model: int
    values: int
    keys: int
    input: InputConfig
    head: HeadConfig
    optimization: Optimization
    activation: str = "softmax"
    norm: str = "layer"
    prenorm: bool = False
    dropout: float = 0.0
    chunk_size: int = 128
    truncation: int | None = 1024
    position: str = "simple"
    causal: bool = False


def _adam(updates: int, warmup: int, rate: float, decay: float, batch: int, **more: Any) -> Optimization:
    return Optimization(max_steps=updates, warmup_steps=warmup, lr=rate, weight_decay=decay, batch=batch, **more)


_BYTES = TokenInputConfig(vocab_size=256)

_TASKS: dict[str, _Task] = {
    "enwik8": _Task(
        title="EnWik8, language model on bytes",
        length=8192,  # runs of at most four chunks
        num_layers=12,
        d_model=512,
        values=1024,
        keys=128,
        # 205 byte values occur in EnWik8; MEGA's dictionary has 208 symbols.
        input=TokenInputConfig(vocab_size=208, scale_embeddings=True),
        head=LanguageModelHeadConfig(tie_embeddings=True),
        prenorm=True,
        dropout=0.1,
        chunk_size=2048,
        # MEGA's command says 8192. No training run is longer, and its evaluation carries the plain recurrence on
        # from call to call: without truncation both are exactly that, and the streaming state stays small. Only a
        # single call of more than 8192 tokens without a state would see less of the past with it.
        truncation=None,
        position="rotary",
        causal=True,
        optimization=_adam(400_000, 24_000, 0.005, 0.1, 65_536, max_grad_norm=0.25),
    ),
    "listops": _Task(
        title="ListOps (Long-Range Arena)",
        length=2002,
        num_layers=6,
        d_model=80,
        values=160,
        keys=64,
        # Ten digits, four operators with their opening bracket, the closing bracket, and one to spare.
        input=TokenInputConfig(vocab_size=16),
        head=ClassifierHeadConfig(num_classes=10, hidden=160, dropout=0.1),
        dropout=0.1,
        optimization=_adam(90_000, 3_000, 0.001, 0.01, 64),
    ),
    "text": _Task(
        title="Text: IMDB reviews as bytes (Long-Range Arena)",
        length=4002,
        num_layers=4,
        d_model=128,
        values=256,
        keys=64,
        input=_BYTES,
        head=ClassifierHeadConfig(num_classes=2, hidden=256, dropout=0.1),
        norm="scale",
        dropout=0.1,
        optimization=_adam(25_000, 10_000, 0.004, 0.01, 50),
    ),
    "retrieval": _Task(
        title="Retrieval: pairs of ACL Anthology papers as bytes (Long-Range Arena)",
        length=4002,
        num_layers=6,
        d_model=128,
        values=256,
        keys=64,
        input=_BYTES,
        head=PairHeadConfig(num_classes=2, hidden=256, dropout=0.1),
        norm="scale",
        dropout=0.1,
        optimization=_adam(91_960, 10_000, 0.003, 0.04, 64),
    ),
    "image": _Task(
        title="Image: gray CIFAR-10 as pixels in a row (Long-Range Arena)",
        length=1024,
        num_layers=8,
        d_model=160,
        values=320,
        keys=96,
        input=ValueInputConfig(),
        head=ClassifierHeadConfig(num_classes=10, hidden=320),
        activation="laplace",
        norm="batch",
        prenorm=True,
        optimization=_adam(180_000, 9_000, 0.01, 0.02, 50),
    ),
    "pathfinder": _Task(
        title="Pathfinder, 32×32 (Long-Range Arena)",
        length=1024,
        num_layers=6,
        d_model=128,
        values=256,
        keys=64,
        input=ValueInputConfig(),
        head=ClassifierHeadConfig(num_classes=2, hidden=256),
        activation="laplace",
        norm="batch",
        prenorm=True,
        optimization=_adam(250_000, 50_000, 0.01, 0.01, 128),
    ),
    "pathx": _Task(
        title="Path-X, 128×128 (Long-Range Arena)",
        length=16_384,
        num_layers=4,
        d_model=64,
        values=128,
        keys=32,
        input=ValueInputConfig(),
        head=ClassifierHeadConfig(num_classes=2, hidden=128),
        activation="laplace",
        norm="sync_batch",
        prenorm=True,
        chunk_size=4096,
        truncation=4096,
        optimization=_adam(125_000, 25_000, 0.01, 0.01, 128, warmup_power=2),
    ),
}

# 250 epochs of 90 million bytes.
_TCNCA_ENWIK8 = dataclasses.replace(
    _TASKS["enwik8"].optimization, max_steps=250 * 90_000_000 // 65_536, weight_decay=0.2
)


def _recall(length: int) -> _Task:
    """Of the paper are layers, width, chunk and the depth of the TCN; the other widths are our choice."""
    width = 32 if length == 64 else 128
    return _Task(
        title=f"Associative recall, length {length}",
        length=length,
        num_layers=2,
        d_model=width,
        values=2 * width,
        keys=width,
        input=TokenInputConfig(vocab_size=10),
        head=LanguageModelHeadConfig(tie_embeddings=False),
        prenorm=True,
        chunk_size=width,
        truncation=None,
        causal=True,
        # The paper sweeps the learning rate from 1e-5 to 1e-1 and dropout over 0 and 0.1.
        optimization=_adam(20_000, 1_000, 0.001, 0.1, 64),
    )


_RECALL_LENGTHS = (64, 1024, 4096, 8192)


def _model(task: _Task, family: str) -> ModelConfig:
    depth = 3 if task.length == 64 else 4
    tcn = TCNConfig.covering(task.length, depth=depth)
    ema = EMAConfig(d_state=16, truncation=task.truncation)
    attention = AttentionConfig(
        d_key=task.keys,
        d_value=task.values,
        chunk_size=task.chunk_size,
        activation=task.activation,  # type: ignore[arg-type]
        position=task.position,  # type: ignore[arg-type]
    )
    return ModelConfig(
        num_layers=task.num_layers,
        d_model=task.d_model,
        d_ff=task.values,
        mixer=tcn if family.startswith("tcn") else ema,
        attention=None if family.endswith("-mlp") else attention,
        gated=family in ("tcnca", "mega"),
        causal=task.causal,
        input=task.input,
        head=task.head,
        norm=task.norm,  # type: ignore[arg-type]
        prenorm=task.prenorm,
        final_norm_affine=not isinstance(task.head, LanguageModelHeadConfig) or not task.head.tie_embeddings,
        dropout=task.dropout,
    )


def _named() -> dict[str, tuple[str, _Task]]:
    """Family and task of each preset."""
    named = {}
    for key, task in _TASKS.items():
        # The paper has an EMA-MLP for EnWik8 alone.
        for family in ("tcnca", "mega", "tcn-mlp", *(["ema-mlp"] if key == "enwik8" else [])):
            named[f"{family}-{key}"] = (family, task)
    for length in _RECALL_LENGTHS:
        for family in ("tcnca-simple", "mega"):
            named[f"{family}-recall-{length}"] = (family, _recall(length))
    return named


_PRESETS = _named()


def presets() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(_PRESETS)


def preset(name: str, **changes: Any) -> Preset:
    """The preset called `name`, its model changed as by `ModelConfig.override`.

    `preset("mega-enwik8", chunk_size=512)`, or `preset("tcnca-simple-recall-64", vocab_size=20)` for the other half of the
    paper's recall table.
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(str(name), _PRESETS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"preset: got {name!r}, allowed are {', '.join(_PRESETS)}{hint}")
    family, task = _PRESETS[name]
    return Preset(
        name=name,
        task=task.title,
        length=task.length,
        model=_model(task, family).override(**changes),
        optimization=_TCNCA_ENWIK8 if name == "tcnca-enwik8" else task.optimization,
    )


def build(
    what: str | Preset | ModelConfig, *, preprocessing: Preprocessing | None = None, **changes: Any
) -> SequenceModel:
    """Build a model.

    `build("tcnca-enwik8", vocab_size=256)`, or `build(ModelConfig(d_model=64, num_layers=2))`.

    Args:
        what: the name of a preset (`presets()` or the command `tcnca models` list them), a preset, or a configuration.
        preprocessing: facts about the data, which the model applies and is saved with.
        changes: fields of the configuration to change, as by `ModelConfig.override`.

    Returns:
        The model in training mode, on the default device.
    """
    if isinstance(what, str):
        what = preset(what)
    config = what.model if isinstance(what, Preset) else what
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"what: got {config!r}, allowed are a preset, its name, or a ModelConfig")
    return SequenceModel(config.override(**changes), preprocessing)
