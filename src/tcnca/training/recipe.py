"""Recipes: a run as a YAML file, of which anything can be changed on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml

from tcnca import pretrained
from tcnca.config import Config, KeysOf, OwnKeys, apply, canonical, check_choice, prefixed
from tcnca.data import CustomOptions, Task, get_dataset, load_task
from tcnca.data.custom.options import ARRAY_OPTIONS, TABLE_OPTIONS
from tcnca.data.load import find_source
from tcnca.errors import CheckpointError, ConfigError
from tcnca.models import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
    load,
    preset,
)
from tcnca.models.heads import PooledHeadConfig
from tcnca.models.serialization import copy_weights, load_config
from tcnca.recipes import read_recipe
from tcnca.training.config import (
    TASK_OPTIONS,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from tcnca.yaml_reader import parse_overrides

# Models for data of each kind, as a task would set them up, to check keys before there is data.
_STAND_INS: dict[str, list[dict[str, Any]]] = {
    "language": [{"head": LanguageModelHeadConfig()}],
    "classification": [
        {"head": ClassifierHeadConfig(), "causal": False},
        {"head": ClassifierHeadConfig(), "causal": False, "input": ValueInputConfig()},
    ],
    "pairs": [{"head": PairHeadConfig(), "causal": False}],
    "regression": [{"head": RegressionHeadConfig(), "causal": False, "input": ValueInputConfig()}],
    "forecast": [{"head": RegressionHeadConfig(pooling="none"), "input": ValueInputConfig()}],
}

_PRETRAINED = ("pretrained", pretrained.NAME)
"""Values of `init_from` that mean the model of the package."""
_SIZES = ("vocab_size", "features", "num_classes", "outputs")
"""What a task decides of a model's input and head."""


class Recipe(Config):
    """Everything that determines a run."""

    _key_help: ClassVar[str] = "`tcnca recipes NAME` prints all keys"

    about: str = ""
    """What it is, in one line."""
    model: Annotated[dict[str, Any], KeysOf(ModelConfig, ("preset",))] = dataclasses.field(default_factory=dict)
    """`preset`, and changes to it; or the fields of a ModelConfig. What the task decides can be left out."""
    init_from: str | None = None
    """Model to start from, with its structure and weights: `pretrained`, the one that comes with tcnca, a run directory
    (its last model) or a saved model; None for random weights. The keys of `model` are then changes to it, such as
    `model.dropout`."""
    data: DataConfig = DataConfig()
    """What to train on."""
    batch: BatchConfig = BatchConfig()
    """What a step reads."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are changed."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How long to train, and the learning rate over time."""
    eval: EvalConfig = EvalConfig()
    """How to evaluate the model."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What to keep of a run."""
    runtime: RuntimeConfig = RuntimeConfig()
    """How to compute."""
    cpu: Annotated[dict[str, Any], OwnKeys()] = dataclasses.field(default_factory=dict)
    """Changes to make where the run is on a CPU; see `for_device`."""
    tokens: Annotated[dict[str, Any], OwnKeys()] = dataclasses.field(default_factory=dict)
    """Keys of `model` for data of tokens, such as text, in recipes that take sequences of numbers as well. Those of
    `model` come before them, and a preset or `init_from` in their place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpu", "tokens"):
            object.__setattr__(self, name, canonical(Recipe, getattr(self, name)))
        if others := [path for path in self.tokens if not _overlap(path, "model")]:
            raise ConfigError(f"tokens.{others[0]}: expected a key of model, such as tokens.model.ngram_sizes")

    def override(self, changes: Mapping[str, Any] | Iterable[str] = (), /, **fields: Any) -> Self:
        """Return a copy with some keys changed, also where `cpu` changes them.

        A key is named in full (`optimizer.lr=1e-3`), or by its last name if no other has it (`lr=1e-3`,
        `num_layers=4`). `data=my.txt` and `model=mega-text` set `data.source` and `model.preset`. A model to start
        from, `init_from=runs/lm`, takes the place of the recipe's.

        Args:
            changes: keys and values, or texts `KEY=VALUE` as on the command line.
            fields: more keys and values.
        """
        if not isinstance(changes, Mapping):
            changes = parse_overrides(changes)
        paths = canonical(type(self), {**changes, **fields})
        before = self
        if self.init_from is None and paths.get("init_from") is not None:
            before = dataclasses.replace(self, model={}, cpu=_without_model(self.cpu))
        kept = {key: value for key, value in before.cpu.items() if not any(_overlap(key, path) for path in paths)}
        return apply(dataclasses.replace(before, cpu=kept), paths)

    def for_device(self, device: str) -> Recipe:
        """Return the recipe of a run on a kind of device: except on `cuda`, with the changes of its key `cpu` made."""
        plain = dataclasses.replace(self, cpu={})
        return plain if device == "cuda" else apply(plain, self.cpu)

    def to_yaml(self) -> str:
        """Return the recipe as the text of a file."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    def validate(self) -> None:
        """Raise a ConfigError for what is wrong whatever the data: keys and values of the model and of the task."""
        for key in self.data.task:
            check_choice(f"data.task.{key}", key, TASK_OPTIONS)
        self._custom_options()
        if "preset" in self.model or self.init_from is not None:
            self._model({})
            return
        stand_ins = (
            _STAND_INS[self.data.kind] if self.data.kind else [each for some in _STAND_INS.values() for each in some]
        )
        errors = []
        for stand_in in stand_ins:
            try:
                self._model(stand_in)
                return
            except ConfigError as error:
                errors.append(error)
        raise errors[0]

    def check_source(self) -> None:
        """Raise an error if the data set or file is missing or cannot be opened, without reading it."""
        if not self.data.source:
            raise ConfigError("data.source: expected a data set or a file, got nothing; give data=NAME or data=FILE")
        if self.data.stream:
            get_dataset(self.data.source)
        else:
            find_source(self.data.source, self.data.folder)

    def build_task(self) -> Task:
        """Return the task, from a prepared data set or a file."""
        self.check_source()
        return load_task(
            self.data.source,
            self.data.folder,
            stream=self.data.stream,
            val_fraction=self.data.val_fraction,
            custom=self._custom_options(),
            kind=self.data.kind,
            **self.data.task,
        )

    def _custom_options(self) -> CustomOptions | None:
        for key in self.data.custom:
            check_choice(f"data.custom.{key}", key, [field.name for field in dataclasses.fields(CustomOptions)])
        chosen: dict[str, Any] = {
            # The columns of a table without names have numbers.
            key: str(value) if key in (*TABLE_OPTIONS, *ARRAY_OPTIONS) and type(value) is int else value
            for key, value in self.data.custom.items()
        }
        return prefixed("data.custom.", lambda: CustomOptions(**chosen)) if chosen else None

    def model_config(self, task: Task | None = None) -> ModelConfig:
        """Return the model for a task, which decides what a recipe without a preset does not say of input and head."""
        return self._model({} if task is None else {"input": task.input, "head": task.head, "causal": task.causal})

    def load_source(self) -> SequenceModel:
        """Return the model of `init_from`."""
        try:
            return load(self.init_folder)
        except CheckpointError as error:
            raise ConfigError(f"init_from: {error}") from error

    def initialize(self, model: SequenceModel, source: SequenceModel) -> bool:
        """Copy the weights of `init_from`, loaded as `source`. Returns whether those of the head were copied."""
        try:
            return copy_weights(model, source, f"init_from: {self.init_from}")
        except CheckpointError as error:
            raise ConfigError(
                f"{error}; expected data of the kind that it was trained with, and no keys of model that change its "
                "structure"
            ) from error

    @property
    def init_folder(self) -> Path:
        """The folder of the model to start from."""
        assert self.init_from is not None
        return pretrained.FOLDER if self.init_from in _PRETRAINED else Path(self.init_from)

    def _model(self, from_task: Mapping[str, Any]) -> ModelConfig:
        changes = dict(self.model)
        name = changes.pop("preset", None)
        if self.init_from is None:
            if name is None:
                start = ModelConfig(**from_task)
                if isinstance(start.input, TokenInputConfig):
                    start = start.override({path.removeprefix("model."): value for path, value in self.tokens.items()})
            return prefixed("model.", lambda: (start if name is None else preset(name).model).override(changes))
        if name is not None:
            raise ConfigError(f"model.preset: expected none with init_from, whose structure the model has, got {name}")
        try:
            start = load_config(self.init_folder)
        except CheckpointError as error:
            raise ConfigError(f"init_from: {error}") from error
        if isinstance(from_task.get("head"), LanguageModelHeadConfig) and not start.causal:
            raise ConfigError("init_from: expected a causal model for a language model, got a bidirectional one")
        wanted: dict[str, Any] = {
            key: _resized(getattr(start, key), from_task[key]) for key in from_task if key != "causal"
        }
        return prefixed("model.", lambda: dataclasses.replace(start, **wanted).override(changes))


def _resized(start: Config, wanted: Config) -> Config:
    """Return the input or head of a model with the sizes that a task asks for; that of the task if the kinds differ."""
    # An output at every time step, as of a forecast, is another kind than one of a sequence.
    each_time = [isinstance(each, PooledHeadConfig) and each.pooling == "none" for each in (start, wanted)]
    if type(start) is not type(wanted) or each_time[0] != each_time[1]:
        return wanted
    return dataclasses.replace(start, **{name: getattr(wanted, name) for name in _SIZES if hasattr(wanted, name)})


def _without_model(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return canonical changes but those of the model, on a CPU as well."""
    return {path: value for path, value in changes.items() if not _overlap(path.removeprefix("cpu."), "model")}


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def load_recipe(name: str) -> Recipe:
    """Return a built-in recipe, by its name, or one of yours, by its path."""
    layers = read_recipe(name)
    return prefixed(f"{name}: ", lambda: Recipe.from_dict(*_replace_models(layers)))


def _replace_models(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the layers of a recipe; those below `init_from` without their model, whose place it takes."""
    first = next((index for index, layer in enumerate(layers) if layer.get("init_from") is not None), 0)
    return [*(_without_model(canonical(Recipe, layer)) for layer in layers[:first]), *layers[first:]]


def differences(before: Recipe, now: Recipe) -> str:
    """Return the keys that differ between two recipes, for messages, except `runtime.threads`, which may differ."""
    old, new = _flat(before.to_dict()), _flat(now.to_dict())
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and key != "runtime.threads"]
    return ", ".join(f"{key} (it has {old.get(key)}, now {new.get(key)})" for key in changed)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
