"""The configuration of a model: one family, whose members differ in their parts."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from tcnca.config import check_at_least, check_choice, check_flag
from tcnca.errors import ConfigError
from tcnca.layers import MIXERS, AttentionConfig, LayerConfig
from tcnca.models.heads import HEADS, HeadConfig, LanguageModelHeadConfig
from tcnca.models.inputs import INPUTS, InputConfig, TokenInputConfig

_KINDS: dict[str, Mapping[str, type]] = {
    "mixer": MIXERS,
    "attention": {"chunked": AttentionConfig},
    "input": INPUTS,
    "head": HEADS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerConfig):
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
    input: InputConfig = dataclasses.field(default_factory=TokenInputConfig)
    """What the model reads."""
    head: HeadConfig = dataclasses.field(default_factory=LanguageModelHeadConfig)
    """What the model returns."""
    final_norm_affine: bool = True
    """Whether the norm after the last layer, which pre-norm models have, has learned scales."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("num_layers", self.num_layers, 1)
        check_flag("final_norm_affine", self.final_norm_affine)
        for name, kind in (("input", InputConfig), ("head", HeadConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name}: expected a {kind.__name__}, got {getattr(self, name)!r}")
        self.head.check_model(self.input, self.causal)

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
