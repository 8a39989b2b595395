"""Recipes: a run as a YAML file, of which anything can be changed on the command line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from tcnca.config import Config
from tcnca.data import CustomOptions, Task, load_task
from tcnca.errors import ConfigError
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models import ModelConfig, TokenInputConfig, ValueInputConfig, preset
from tcnca.training.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from tcnca.training.shipped import Loader, read_yaml, shipped

_PARTS: dict[str, type[Config]] = {
    "data": DataConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "runtime": RuntimeConfig,
}
_MODEL_PARTS = (TCNConfig, EMAConfig, AttentionConfig, TokenInputConfig, ValueInputConfig)
# What the name of a part stands for on the command line, where it is given a value itself: `data=my.txt`.
_ITSELF = {"data": "data.source", "model": "model.preset"}
# Parts of a part that may hold any key, checked by those who read them.
_OPEN = ("data.task", "data.custom")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that determines a run."""

    about: str = ""
    """What it is, for people."""
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """`preset`, and changes to it; or the fields of a ModelConfig. What the task decides may be left out."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What to train on."""
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    """What an update sees."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """How weights are changed."""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    """How long, and with which learning rate."""
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    """How to look at the model."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """What is kept."""
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    """How it is computed."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote, or a YAML file holds. What is left out has its default."""
        built: dict[str, Any] = {}
        for key, value in values.items():
            if key not in {field.name for field in dataclasses.fields(cls)}:
                raise _no_such_key(key)
            if key == "about":
                built[key] = str(value)
                continue
            if key in _ITSELF and isinstance(value, str):
                value = {_ITSELF[key].split(".")[-1]: value}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key}: got {value!r}, allowed are keys and values")
            if key in _PARTS:
                for name in value:
                    if name not in _names(_PARTS[key]):
                        raise _no_such_key(f"{key}.{name}")
                built[key] = _PARTS[key](**{name: _whole(_PARTS[key], name, each) for name, each in value.items()})
            else:
                built[key] = dict(value)
        return cls(**built)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for YAML and JSON."""
        values = dataclasses.asdict(self)
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    def to_yaml(self) -> str:
        """The recipe as a file."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    def override(self, changes: Iterable[str]) -> Recipe:
        """A copy with some keys changed, each given as `key=value`.

        A key is named in full (`optimizer.lr=1e-3`), or by its last name if no other has it
        (`lr=1e-3`, `num_layers=4`). `data=my.txt` and `model=mega-text` choose the set and the preset.
        """
        values = self.to_dict()
        for change in changes:
            key, equals, text = change.partition("=")
            if not equals:
                raise ConfigError(f"{change}: got no value, allowed is key=value, for example lr=0.001")
            path = located(key.strip())
            inner = values
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = parsed(text)
        return Recipe.from_dict(values)

    def build_task(self) -> Task:
        """The task, from its prepared set or file."""
        if not self.data.source:
            raise ConfigError("data.source: got nothing, allowed is a set or a file: give data=NAME or data=FILE")
        for key in self.data.custom:
            if key not in _names(CustomOptions):
                raise _no_such_key(f"data.custom.{key}")
        own = CustomOptions(**self.data.custom) if self.data.custom else None
        return load_task(
            self.data.source,
            self.data.folder,
            stream=self.data.stream,
            val_fraction=self.data.val_fraction,
            custom=own,
            kind=self.data.kind,
            **self.data.task,
        )

    def model_config(self, task: Task) -> ModelConfig:
        """The model for a task. What the recipe does not say of its input and head, the task does."""
        changes = dict(self.model)
        name = changes.pop("preset", None)
        config = ModelConfig(input=task.input, head=task.head, causal=task.causal) if name is None else None
        return (preset(name).model if config is None else config).override(**changes)


def recipes() -> dict[str, str]:
    """The recipes that come with the library, and what they are."""
    return {name: load_recipe(name).about for name in shipped("recipes")}


def load_recipe(name: str) -> Recipe:
    """A recipe that comes with the library, by its name, or one of yours, by its path."""
    values = read_yaml(name, "recipes", "recipe")
    try:
        return Recipe.from_dict(values)
    except TypeError as error:
        raise ConfigError(f"{name}: is not a recipe ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def parsed(text: str) -> Any:
    """A value of the command line."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text}: is no value ({error})") from error


def _whole(part: type, name: str, value: Any) -> Any:
    """`value`, as a whole number where one is wanted: 1e3 is 1000 updates."""
    wanted = {field.name: str(field.type) for field in dataclasses.fields(part)}[name]
    return int(value) if wanted.startswith("int") and isinstance(value, float) and value.is_integer() else value


def _names(part: type) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]


def _keys() -> list[str]:
    """Every key that a recipe can have, but those of open parts."""
    keys = [f"{part}.{name}" for part, cls in _PARTS.items() for name in _names(cls)]
    # Fields of the model's parts are named without their part, as `ModelConfig.override` takes them.
    inner = {name for part in _MODEL_PARTS for name in _names(part)} - set(_names(ModelConfig))
    return ["about", "model.preset", *(f"model.{name}" for name in [*_names(ModelConfig), *sorted(inner)]), *keys]


def located(key: str) -> list[str]:
    """The way to a key, which may be given by its last name alone."""
    if key in _ITSELF:
        return _ITSELF[key].split(".")
    if key in _keys() or key.startswith(tuple(f"{part}." for part in _OPEN)):
        return key.split(".", 2) if key.startswith(_OPEN) else key.split(".")
    if key.startswith("model."):
        # A field of a part of the model, such as model.chunk_size; the model knows them.
        return ["model", key.removeprefix("model.")]
    found = [full for full in _keys() if full.split(".")[-1] == key]
    if len(found) == 1:
        return found[0].split(".")
    if found:
        raise ConfigError(f"{key}: is the name of several keys, allowed are {', '.join(found)}")
    raise _no_such_key(key)


def same_key(one: str, other: str) -> bool:
    """Whether two names are of one key: `kernel_size` is `model.mixer.kernel_size`."""
    short, full = sorted((".".join(located(key)) for key in (one, other)), key=len)
    name = full.split(".")[-1]
    return short == full or (full.startswith("model.") and short == f"model.{name}" and name not in _names(ModelConfig))


def _no_such_key(key: str) -> ConfigError:
    keys = [*_keys(), *(f"data.custom.{name}" for name in _names(CustomOptions))]
    names = {full.split(".")[-1]: full for full in reversed(keys)} | {full: full for full in keys}
    parts = {part: part for part in [*_PARTS, "model", "about"]}
    names = names if "." in key else names | parts
    close = difflib.get_close_matches(key, names, 1) or difflib.get_close_matches(key.split(".")[-1], names, 1)
    hint = f"; did you mean {names[close[0]]}?" if close else ""
    return ConfigError(f"{key}: no such key of a recipe{hint or '; `tcnca recipes NAME` prints the keys of one'}")


def differences(before: Recipe, now: Recipe) -> str:
    """What was changed from one recipe to another, for people."""
    old, new = _flat(before.to_dict()), _flat(now.to_dict())
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} (it has {old.get(key)}, now {new.get(key)})" for key in changed)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
