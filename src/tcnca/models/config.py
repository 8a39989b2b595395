"""The configuration of a model: one family, whose members differ in their parts."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from tcnca.config import Config, check_at_least, check_choice, check_flag, check_probability
from tcnca.errors import ConfigError
from tcnca.layers import NORM_KINDS, AttentionConfig, BlockConfig, EMAConfig, NormKind, TCNConfig
from tcnca.models.heads import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    PairHeadConfig,
    RegressionHeadConfig,
)
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.ops import ACTIVATIONS, Activation

_KINDS: dict[str, dict[str, type]] = {
    "mixer": {"tcn": TCNConfig, "ema": EMAConfig},
    "attention": {"chunked": AttentionConfig},
    "input": {"tokens": TokenInputConfig, "values": ValueInputConfig},
    "head": {
        "language-model": LanguageModelHeadConfig,
        "classifier": ClassifierHeadConfig,
        "regression": RegressionHeadConfig,
        "pair": PairHeadConfig,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """A stack of layers between an input and a head.

    | model | mixer | attention | gated |
    |---|---|---|---|
    | TCNCA | TCNConfig | AttentionConfig | yes |
    | MEGA | EMAConfig | AttentionConfig | yes |
    | TCNCA-simple | TCNConfig | AttentionConfig | no |
    | TCN-MLP | TCNConfig | None | no |
    | EMA-MLP | EMAConfig | None | no |
    """

    num_layers: int = 4
    """Number of layers."""
    d_model: int = 128
    """Channels of the sequence between layers (the paper's d)."""
    d_ff: int = 256
    """Hidden width of the feed-forward nets; 0 for none."""
    mixer: TCNConfig | EMAConfig | None = dataclasses.field(default_factory=TCNConfig)
    """What mixes over time before the attention."""
    attention: AttentionConfig | None = dataclasses.field(default_factory=AttentionConfig)
    """Attention inside chunks."""
    gated: bool = True
    """Whether mixer and attention are joined by MEGA's gates, or by plain residual connections."""
    causal: bool = True
    """Whether a token sees only the past. Only causal models stream."""
    input: TokenInputConfig | ValueInputConfig = dataclasses.field(default_factory=TokenInputConfig)
    """What comes in."""
    head: LanguageModelHeadConfig | ClassifierHeadConfig | RegressionHeadConfig | PairHeadConfig = dataclasses.field(
        default_factory=LanguageModelHeadConfig
    )
    """What goes out."""
    activation: Activation = "silu"
    """Non-linearity of values, candidates and feed-forward nets."""
    norm: NormKind = "layer"
    """Normalization of every layer."""
    prenorm: bool = True
    """Whether to normalize what enters a part, or its sum with the residual."""
    final_norm_affine: bool = True
    """Whether the norm after the last layer, which pre-norm models have, has learned scales."""
    dropout: float = 0.0
    """Dropout of embeddings, of mixers' outputs and of everything added to the residual."""
    value_dropout: float = 0.0
    """Dropout of the attention's values."""
    ff_dropout: float = 0.0
    """Dropout inside the feed-forward nets."""
    feature_dropout: bool = False
    """Whether dropout inside the layers drops whole channels of a sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_layers", self.num_layers, 1)
        check_at_least("d_model", self.d_model, 1)
        check_at_least("d_ff", self.d_ff, 0)
        for name in ("gated", "causal", "prenorm", "final_norm_affine", "feature_dropout"):
            check_flag(name, getattr(self, name))
        for name in ("dropout", "value_dropout", "ff_dropout"):
            check_probability(name, getattr(self, name))
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("norm", self.norm, NORM_KINDS)
        for part, kinds in _KINDS.items():
            value, optional = getattr(self, part), part in ("mixer", "attention")
            if not (isinstance(value, tuple(kinds.values())) or (optional and value is None)):
                allowed = ", ".join(kind.__name__ for kind in kinds.values()) + (", None" if optional else "")
                raise ConfigError(f"{part}: got {value!r}, allowed are {allowed}")
        if self.gated and self.attention is None:
            raise ConfigError(
                "gated: got True without attention, allowed is False: MEGA's gates join mixer and attention"
            )
        if isinstance(self.head, LanguageModelHeadConfig):
            if not isinstance(self.input, TokenInputConfig):
                raise ConfigError("head: got LanguageModelHeadConfig on real-valued input, allowed is TokenInputConfig")
            if not self.causal:
                raise ConfigError(
                    "causal: got False with a LanguageModelHeadConfig, allowed is True: it would see its answers"
                )

    def block(self) -> BlockConfig:
        """What the layers need to know."""
        names = {field.name for field in dataclasses.fields(BlockConfig)}
        return BlockConfig(**{name: getattr(self, name) for name in names})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; each part carries its `kind`."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _KINDS and value is not None:
                kind = next(name for name, cls in _KINDS[field.name].items() if type(value) is cls)
                value = {"kind": kind, **dataclasses.asdict(value)}
            values[field.name] = value
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The configuration that `to_dict` wrote. Fields that are left out have their defaults."""
        built: dict[str, Any] = {}
        _check_names("", values, _names(cls))
        for name, value in values.items():
            if name in _KINDS and isinstance(value, dict):
                fields = dict(value)
                kind = fields.pop("kind", next(iter(_KINDS[name])))
                check_choice(f"{name}.kind", kind, tuple(_KINDS[name]))
                part = _KINDS[name][kind]
                _check_names(f"{name}.", fields, _names(part))
                value = part(**fields)
            built[name] = value
        return cls(**built)

    def override(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed.

        A field of a part is named by itself if only one part has it (`vocab_size=256`, `chunk_size=64`), or else with
        its part in front (`override(**{"head.hidden": 64})`).
        """
        own = _names(type(self))
        # Whole parts first: what is said of a part is said of the new one.
        changed = dataclasses.replace(self, **{name: value for name, value in changes.items() if name in own})
        inner: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in own:
                part, field = changed._locate(name)
                inner.setdefault(part, {})[field] = value
        parts = {part: dataclasses.replace(getattr(changed, part), **fields) for part, fields in inner.items()}
        return dataclasses.replace(changed, **parts)

    def _locate(self, name: str) -> tuple[str, str]:
        """The part and the field that a name without or with its part means."""
        parts = {part: _names(type(getattr(self, part))) for part in _KINDS if getattr(self, part) is not None}
        dotted = [f"{part}.{field}" for part, fields in parts.items() for field in fields]
        found = [entry for entry in dotted if entry == name or entry.split(".")[1] == name]
        if len(found) == 1:
            part, field = found[0].split(".")
            return part, field
        if found:
            raise ConfigError(f"{name}: is a field of several parts, allowed are {', '.join(found)}")
        raise _no_such_field("", name, _names(type(self)) | {entry.split(".")[1] for entry in dotted} | set(dotted))


def _names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _check_names(where: str, given: Any, allowed: set[str]) -> None:
    for name in given:
        if name not in allowed:
            raise _no_such_field(where, name, allowed)


def _no_such_field(where: str, name: str, allowed: set[str]) -> ConfigError:
    close = difflib.get_close_matches(name, allowed, 1)
    hint = f"; did you mean {where}{close[0]}?" if close else ""
    return ConfigError(f"{where}{name}: no such field, allowed are {', '.join(sorted(allowed))}{hint}")
