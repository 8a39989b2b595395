"""Named models: every experiment of the paper, with the sizes that it took over from MEGA, and our own family.

Presets describe models only; recipes (`tcnca recipes`) say how to train them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tcnca.config import check_choice
from tcnca.errors import ConfigError
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models.config import ModelConfig
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig, PairHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.model import SequenceModel
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """A row of MEGA's table of sizes; `model` holds the remaining fields."""

    title: str
    length: int
    chunk_size: int = 128
    truncation: int | None = 1024
    d_key: int
    d_value: int
    attention: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any]
    families: tuple[str, ...] = ("tcnca", "tcnca-linear", "mega", "tcn-mlp")


_BYTES = TokenInputConfig(vocab_size=256)
_LAPLACE: dict[str, Any] = {"activation": "laplace"}

_TASKS: dict[str, _Task] = {
    "enwik8": _Task(
        title="EnWik8, language model on bytes",
        length=8192,  # rows of at most four chunks
        d_key=128,
        d_value=1024,
        chunk_size=2048,
        # MEGA's command says 8192. No training row is longer, and its evaluation carries the plain recurrence from call
        # to call: without truncation both are exactly that, and the streaming state stays small. Only a single call
        # of more than 8192 tokens without a state would see less of the past with it.
        truncation=None,
        attention={"position": "rotary"},
        model={
            "num_layers": 12,
            "d_model": 512,
            "prenorm": True,
            "dropout": 0.1,
            "causal": True,
            # 205 byte values occur in EnWik8; MEGA's dictionary has 208 symbols.
            "input": TokenInputConfig(vocab_size=208, scale_embeddings=True),
            "head": LanguageModelHeadConfig(tie_embeddings=True),
            "final_norm_affine": False,
        },
        # The paper has an EMA-MLP for EnWik8 alone.
        families=("tcnca", "tcnca-linear", "mega", "tcn-mlp", "ema-mlp"),
    ),
    "listops": _Task(
        title="ListOps (Long-Range Arena)",
        length=2002,
        d_key=64,
        d_value=160,
        model={
            "num_layers": 6,
            "d_model": 80,
            "prenorm": False,
            "dropout": 0.1,
            # Ten digits, four operators with their opening bracket, the closing bracket, and one to spare.
            "input": TokenInputConfig(vocab_size=16),
            "head": ClassifierHeadConfig(num_classes=10, hidden=160, dropout=0.1),
        },
    ),
    "text": _Task(
        title="Text: IMDB reviews as bytes (Long-Range Arena)",
        length=4002,
        d_key=64,
        d_value=256,
        model={
            "num_layers": 4,
            "d_model": 128,
            "norm": "scale",
            "prenorm": False,
            "dropout": 0.1,
            "input": _BYTES,
            "head": ClassifierHeadConfig(num_classes=2, hidden=256, dropout=0.1),
        },
    ),
    "retrieval": _Task(
        title="Retrieval: pairs of ACL Anthology papers as bytes (Long-Range Arena)",
        length=4002,
        d_key=64,
        d_value=256,
        model={
            "num_layers": 6,
            "d_model": 128,
            "norm": "scale",
            "prenorm": False,
            "dropout": 0.1,
            "input": _BYTES,
            "head": PairHeadConfig(num_classes=2, hidden=256, dropout=0.1),
        },
    ),
    "image": _Task(
        title="Image: gray CIFAR-10 as pixels in a row (Long-Range Arena)",
        length=1024,
        d_key=96,
        d_value=320,
        attention=_LAPLACE,
        model={
            "num_layers": 8,
            "d_model": 160,
            "norm": "batch",
            "prenorm": True,
            "input": ValueInputConfig(),
            "head": ClassifierHeadConfig(num_classes=10, hidden=320),
        },
    ),
    "pathfinder": _Task(
        title="Pathfinder, 32×32 (Long-Range Arena)",
        length=1024,
        d_key=64,
        d_value=256,
        attention=_LAPLACE,
        model={
            "num_layers": 6,
            "d_model": 128,
            "norm": "batch",
            "prenorm": True,
            "input": ValueInputConfig(),
            "head": ClassifierHeadConfig(num_classes=2, hidden=256),
        },
    ),
    "pathx": _Task(
        title="Path-X, 128×128 (Long-Range Arena)",
        length=16_384,
        d_key=32,
        d_value=128,
        chunk_size=4096,
        truncation=4096,
        attention=_LAPLACE,
        model={
            "num_layers": 4,
            "d_model": 64,
            "norm": "sync_batch",
            "prenorm": True,
            "input": ValueInputConfig(),
            "head": ClassifierHeadConfig(num_classes=2, hidden=128),
        },
    ),
}


def _recall(length: int) -> _Task:
    """Return the task of one length. Layers, d_model, chunk and TCN depth are the paper's, other sizes our choice."""
    size = 32 if length == 64 else 128
    return _Task(
        title=f"Associative recall, length {length}",
        length=length,
        d_key=size,
        d_value=2 * size,
        chunk_size=size,
        truncation=None,
        model={
            "num_layers": 2,
            "d_model": size,
            "prenorm": True,
            "causal": True,
            "input": TokenInputConfig(vocab_size=10),
            "head": LanguageModelHeadConfig(tie_embeddings=False),
        },
        families=("tcnca-simple", "mega"),
    )


_TASKS |= {f"recall-{length}": _recall(length) for length in (64, 1024, 4096, 8192)}
_PRESETS = {f"{family}-{task}": (family, task) for task, row in _TASKS.items() for family in row.families}


def _model(family: str, task: _Task) -> ModelConfig:
    attention = AttentionConfig(d_key=task.d_key, d_value=task.d_value, chunk_size=task.chunk_size, **task.attention)
    block = {} if family == "tcnca-linear" else _RESIDUAL
    tcn = TCNConfig.covering(task.length, depth=3 if task.length == 64 else 4, **block)
    return ModelConfig(
        d_ff=task.d_value,
        mixer=tcn if family.startswith("tcn") else EMAConfig(d_state=16, truncation=task.truncation),
        attention=None if family.endswith("-mlp") else attention,
        gated=family in ("tcnca", "tcnca-linear", "mega"),
        **{"causal": False, **task.model},
    )


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
    model = _model(family, row).override(changes)
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
