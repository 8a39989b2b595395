"""Typed configurations for models and recipes: nested frozen dataclasses, one set of checks, one resolver of keys.

A field is declared in one line, and its type is its check:

    kernel_size: PositiveInt = 17
    block: Literal["linear", "residual"] = "linear"

`Config.override`, `Config.from_dict`, recipes and the command line (`KEY=VALUE`) all name fields through `resolve`: by
their full path (`optimizer.lr`), by a short name (`lr`), or by a name that another library uses (`learning_rate`).
This module does not import PyTorch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, dataclass_transform, get_args, get_origin

from tcnca.errors import ConfigError, shorten, shown
from tcnca.yaml_reader import parse_overrides

# Names from other libraries, by the key that they stand for. `tests/models/test_config.py` checks that none of them
# hides a key of ours, except `batch_size`, which would otherwise be read as `eval.batch_size`.
FOREIGN_NAMES: dict[str, tuple[str, ...]] = {
    "d_model": (
        *("hidden_size", "n_embd", "d_hidden", "width", "dim", "hidden_dim", "model_dim", "embed_dim"),
        *("embedding_dim", "embedding_size"),
    ),
    "num_layers": ("n_layers", "n_layer", "num_hidden_layers", "layers", "num_blocks", "n_blocks"),
    "d_ff": ("intermediate_size", "ffn_dim", "d_ffn", "n_inner", "ffn_hidden_size", "mlp_dim", "dim_feedforward"),
    "vocab_size": ("vocab", "n_vocab", "vocabulary_size", "num_embeddings"),
    "num_classes": ("n_classes", "num_labels", "n_labels", "nb_classes"),
    "pad_token_id": ("padding_idx", "pad_id"),
    "tie_embeddings": ("tie_word_embeddings", "tie_weights", "tied_embeddings", "weight_tying"),
    "model.dropout": ("dropout_rate", "drop_rate", "dropout_p", "resid_pdrop", "hidden_dropout_prob"),
    "num_heads": ("n_heads", "n_head", "num_attention_heads", "nhead"),
    "attention.dropout": ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "model.activation": ("hidden_act", "activation_function", "act_fn", "nonlinearity"),
    "kernel_size": ("filter_size", "conv_kernel", "d_conv"),
    "dilation_factor": ("dilation", "dilation_base", "dilation_growth"),
    "kernel_length": ("l_max",),
    "piece_size": ("kernel_dim",),
    "d_state": ("state_size", "ssm_state_size", "state_dim"),
    "model.preset": ("model_name", "arch", "architecture"),
    "init_from": ("pretrained", "pretrained_model", "model_name_or_path", "init_checkpoint", "load_from"),
    "data.source": ("dataset", "dataset_name", "data_path", "data_file", "train_file"),
    "data.folder": ("data_dir", "data_root"),
    "batch.size": ("batch_size", "bs", "train_batch_size", "global_batch_size"),
    "batch.grad_accum_steps": (
        *("gradient_accumulation_steps", "grad_accum", "grad_accumulation_steps", "accumulate_grad_batches"),
        "accumulation_steps",
    ),
    "batch.seed": ("random_seed", "manual_seed"),
    "optimizer.lr": ("learning_rate", "max_lr", "base_lr", "peak_lr"),
    "optimizer.weight_decay": ("wd",),
    "optimizer.betas": ("adam_betas",),
    "optimizer.eps": ("adam_epsilon", "adam_eps", "epsilon"),
    "optimizer.max_grad_norm": ("clip_grad", "gradient_clip_val", "grad_clip", "clip_grad_norm", "gradient_clip"),
    "schedule.max_steps": (
        *("steps", "max_iters", "num_steps", "total_steps", "n_steps", "iterations", "iters", "num_iterations"),
        *("train_steps", "max_train_steps", "num_train_steps", "num_training_steps"),
    ),
    "schedule.warmup_steps": ("warmup_iters", "num_warmup_steps", "lr_warmup_steps"),
    "schedule.kind": ("lr_scheduler_type", "lr_scheduler", "lr_schedule", "scheduler"),
    "eval.every": ("eval_steps", "eval_interval", "eval_every", "val_check_interval"),
    "eval.batches": ("eval_iters", "limit_val_batches"),
    "eval.batch_size": ("eval_batch_size", "val_batch_size"),
    "checkpoint.every": ("save_steps", "save_interval", "save_every", "checkpoint_every"),
    "checkpoint.keep": ("save_total_limit",),
    "runtime.precision": ("dtype", "torch_dtype", "mixed_precision"),
    "runtime.compile": ("torch_compile",),
    "runtime.threads": ("num_threads",),
    "runtime.activation_checkpointing": ("gradient_checkpointing", "grad_checkpointing", "use_checkpoint"),
    "runtime.log_every": ("log_interval", "logging_steps", "log_every_n_steps"),
}

_EPOCHS = (
    "use max_steps; one epoch is the number of training examples (of a language model, bytes) divided by batch.size"
)
_LENGTHS = (
    "use data.task.max_length to cut examples, data.task.chunk_size and data.task.chunks_per_row for the rows of a "
    "language model, model.chunk_size for the attention"
)
# Names from other libraries that stand for no key, and what to use instead.
FOREIGN_ANSWERS: dict[str, str] = {
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"), _EPOCHS),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "context_length", "block_size"), _LENGTHS),
    **dict.fromkeys(("max_seq_len", "max_position_embeddings", "n_positions"), _LENGTHS),
    **dict.fromkeys(("output_dir", "out_dir", "save_dir"), "use the option --out DIR"),
    "warmup_ratio": "use warmup_steps, a number of steps",
}
C = TypeVar("C", bound="Config")
T = TypeVar("T")

_FOREIGN = {name: key for key, names in FOREIGN_NAMES.items() for name in names}


@dataclasses.dataclass(frozen=True)
class Range:
    """Limits of a number: `low <= value <= high`, or `< high` if `high` itself is excluded."""

    low: float
    high: float = math.inf
    include_high: bool = True

    def __contains__(self, value: float) -> bool:
        return self.low <= value and (value <= self.high if self.include_high else value < self.high)

    def describe(self, value: Any) -> str:
        """Return the limits, for a message about `value`. General upper limits are named only if it exceeds them."""
        general = self.high in (math.inf, _LARGEST_INT, _LARGEST_FLOAT)
        if general and isinstance(value, int | float) and value > self.high:
            return f"<= {self.high}"
        if general:
            return f">= {self.low}"
        return f"in [{self.low}, {self.high}{']' if self.include_high else ')'}"


@dataclasses.dataclass(frozen=True)
class KeysOf:
    """Marks a dictionary of changes to a configuration that is built later, with some keys more.

    The first of `extra` is meant where a single value is given for the dictionary: `model: NAME` is `model.preset`.
    """

    config: type[Config]
    extra: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OpenKeys:
    """Marks a dictionary that takes any key; the `known` ones can be given by their short names."""

    known: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OwnKeys:
    """Marks a dictionary of changes to the configuration that it is a field of, to be made later."""


_LARGEST_INT, _LARGEST_FLOAT = 2**31 - 1, 1e38
"""Largest sizes, numbers of steps, rates, times. Beyond them, libraries overflow, and do not name what is too large."""
PositiveInt = Annotated[int, Range(1, _LARGEST_INT)]
NonNegativeInt = Annotated[int, Range(0, _LARGEST_INT)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Seconds = Annotated[float, Range(0, 1e10)]
# Sizes of models, which also come from files: with these limits the bytes of every tensor fit 64 bits.
LayerCount = Annotated[int, Range(1, 2**10)]
Width = Annotated[int, Range(1, 2**24)]
TokenCount = PositiveInt
NonNegativeFloat = Annotated[float, Range(0, _LARGEST_FLOAT)]
Fraction = Annotated[float, Range(0, 1)]
Probability = Annotated[float, Range(0, 1, include_high=False)]


class _LazyDoc:
    """A class docstring with the texts of the fields, for which the source is read when somebody asks for help."""

    def __init__(self, doc: str | None) -> None:
        self.doc = inspect.cleandoc(doc or "")

    def __get__(self, instance: Config | None, owner: type[Config]) -> str:
        lines = "".join(f"\n    {name}: {text}" for name, text in field_texts(owner).items())
        return f"{self.doc}\n\nFields:{lines}\n" if lines else self.doc


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the configurations. Its subclasses are frozen dataclasses, without a decorator.

    Values are checked and converted by the types of their fields when a configuration is built: NumPy scalars become
    Python's, lists become tuples, and 1e3 is 1000 in an integer field. Checks across fields go into `__post_init__`,
    after `super().__post_init__()`; their messages begin with the name of a field.

    Args (of the class statement):
        kind: name of this class in dictionaries and recipes, where a field can hold one of several. It registers the
            class: a field of type `MixerConfig` can hold every subclass of it that has a kind.
        shorthand: field that is meant where a single value is given for the whole: `data=FILE` is `data.source`.
    """

    _kind: ClassVar[str] = ""
    _shorthand: ClassVar[str] = ""
    _key_help: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "", shorthand: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._kind, cls._shorthand = kind, shorthand
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = _LazyDoc(cls.__doc__)  # type: ignore[assignment]
        # A new kind adds keys to the configurations that can hold it.
        _SCHEMAS.clear()

    def __new__(cls, **fields: Any) -> Self:
        """Answer an unknown field with the right name."""
        for name in fields:
            if name not in _hints(cls):
                path = resolve(cls, name)
                raise ConfigError(f"{name}: use {path}{' with override()' if '.' in path else ''}")
        return super().__new__(cls)

    @classmethod
    def of(cls, config: Self | None, fields: Mapping[str, Any]) -> Self:
        """Return `config`, or the default configuration for None, with some fields changed."""
        config = cls() if config is None else config
        check("config", config, cls)
        return config.override(fields)

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, check(name, getattr(self, name), hint))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for JSON and YAML; a part that can be of several kinds carries its `kind`."""
        kind = {"kind": self._kind} if self._kind else {}
        return kind | {name: _plain(getattr(self, name)) for name in _hints(type(self))}

    @classmethod
    def from_dict(cls, *layers: Mapping[str, Any]) -> Self:
        """Build a configuration from what `to_dict` returned, or from any part of it; later layers win.

        Fields that are left out have their defaults.
        """
        changes: dict[str, Any] = {}
        for layer in layers:
            changes = merge(changes, canonical(cls, layer))
        return apply(cls(), changes)

    def override(self, changes: Mapping[str, Any] | Iterable[str] = (), /, **fields: Any) -> Self:
        """Return a copy with some fields changed.

        A field of a part is named by itself if no other part has it (`vocab_size=256`, `chunk_size=64`), or else with
        its part in front: `override({"head.dropout": 0.1})`.

        Args:
            changes: keys and values, or texts `KEY=VALUE` as on the command line.
            fields: more keys and values.
        """
        if not isinstance(changes, Mapping):
            changes = parse_overrides(changes)
        return apply(self, canonical(type(self), {**changes, **fields}))


def field_texts(cls: type[Config]) -> dict[str, str]:
    """Return the string below each field in the source of a configuration; nothing if there is no source."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= _own_field_texts(base) if issubclass(base, Config) else {}
    return texts


def _own_field_texts(cls: type[Config]) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    texts = {}
    for field, text in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = " ".join(words.split())
    return texts


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return _HINTS[cls]


def _plain(value: Any) -> Any:
    match value:
        case Config():
            return value.to_dict()
        case Mapping():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


_LONG_LIST = 12
"""Most choices that are listed after a suggestion."""


class _UnfitError(Exception):
    """A value that is not of a type, and where it is inside the value that is checked."""

    def __init__(self, value: Any, hint: Any, path: str = "") -> None:
        super().__init__(path)
        self.value, self.hint, self.path = value, hint, path


def check(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint` wants it, or raise a ConfigError that begins with `name`.

    The values of lists and dictionaries are checked too, and a dictionary is converted to a dataclass.
    """
    try:
        return _convert(value.tolist() if hasattr(value, "tolist") else value, hint)
    except _UnfitError as error:
        where, value, hint = f"{name}{error.path}".removeprefix("."), error.value, error.hint
        where = f"{shorten(where)}: " if where else ""
        known = [str(each) for it in _members(hint) if get_origin(it) is Literal for each in get_args(it)]
        close = closest(value, known)
        if close and len(known) > _LONG_LIST:
            raise ConfigError(f"{where}did you mean {close}? Got {shown(value)}") from None
        beginning = f"did you mean {close}? Expected" if close else "expected"
        raise ConfigError(f"{where}{beginning} {_describe(hint, value)}, got {shown(value)}") from None


def check_at_least(name: str, value: Any, least: int) -> None:
    """Raise a ConfigError unless `value` is an integer of at least `least`."""
    check(name, value, Annotated[int, Range(least)])


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a ConfigError, with a suggestion, unless `value` is one of `choices`."""
    check(name, value, Literal[tuple(choices)])


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if len(_members(hint)) > 1:
        errors = []
        for member in _members(hint):
            try:
                return _convert(value, member)
            except _UnfitError as error:
                errors.append(error)
        # The value may be of the right type with something wrong inside.
        raise next((error for error in errors if error.path), _UnfitError(value, hint))
    if origin is Annotated:
        if isinstance(hint.__metadata__[0], KeysOf) and isinstance(value, Mapping):
            return _nested(canonical(hint.__metadata__[0], value))
        try:
            found = _convert(value, hint.__origin__)
        except _UnfitError as error:
            raise error if error.path else _UnfitError(value, hint) from None
        if any(isinstance(limits, Range) and found not in limits for limits in hint.__metadata__):
            raise _UnfitError(value, hint)
        return found
    if origin is Literal:
        fits = any(type(value) is type(each) and value == each for each in arguments)
    elif origin is tuple and isinstance(value, list | tuple):
        members = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        fits = len(value) == len(members)
        if fits:
            try:
                value = tuple(_convert(each, member) for each, member in zip(value, members, strict=True))
            except _UnfitError:
                fits = False
    elif origin is list and isinstance(value, list | tuple):
        return [_inside(f"[{index}]", each, arguments[0]) for index, each in enumerate(value)]
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {
            _inside(f".key {shown(key)}", key, arguments[0]): _inside(f".{key}", each, arguments[1])
            for key, each in value.items()
        }
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping) and not issubclass(hint, Config):  # type: ignore[arg-type]
        return _convert_dataclass(value, hint)
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif hint in (int, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        fits = fits and not (hint is int and isinstance(value, float))
        value = float(value) if fits and hint is float else value
    else:
        fits = isinstance(hint, type) and isinstance(value, hint)
    if not fits:
        raise _UnfitError(value, hint)
    return value


def _inside(path: str, value: Any, hint: Any) -> Any:
    """Convert a value inside of another one; an error says where it is."""
    try:
        return _convert(value, hint)
    except _UnfitError as error:
        raise _UnfitError(error.value, error.hint, path + error.path) from None


def _convert_dataclass(value: Mapping[Any, Any], cls: Any) -> Any:
    """Build a dataclass from a dictionary, which must have all fields without a default and no others."""
    hints, empty = _hints(cls), dataclasses.MISSING
    needed = {it.name for it in dataclasses.fields(cls) if it.default is empty and it.default_factory is empty}
    if not needed <= value.keys() <= hints.keys():
        raise _UnfitError(value, cls)
    return cls(**{name: _inside(f".{name}", each, hints[name]) for name, each in value.items()})


def _describe(hint: Any, value: Any = None) -> str:
    """Return what a type allows, for a message about `value`."""
    if len(_members(hint)) > 1:
        return " or ".join(_describe(member, value) for member in _members(hint))
    if get_origin(hint) is Annotated:
        limits = [f" {limit.describe(value)}" for limit in hint.__metadata__ if isinstance(limit, Range)]
        return _describe(hint.__origin__) + "".join(limits)
    if get_origin(hint) is Literal:
        names = [str(each) for each in get_args(hint)]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    if get_origin(hint) is tuple:
        number = "" if get_args(hint)[-1] is Ellipsis else f"{len(get_args(hint))} "
        return f"{number}values, each {_describe(get_args(hint)[0])}"
    if get_origin(hint) is list:
        return "a list"
    if get_origin(hint) in (dict, Mapping):
        return "keys and values"
    if dataclasses.is_dataclass(hint) and not issubclass(hint, Config):  # type: ignore[arg-type]
        return f"the keys {', '.join(field.name for field in dataclasses.fields(hint))}"
    names_of = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "None"}
    return names_of.get(hint) or str(getattr(hint, "__name__", hint))


@dataclasses.dataclass
class _Schema:
    """The keys of a configuration and of all that is nested in it."""

    name: str
    keys: list[str] = dataclasses.field(default_factory=list)
    sections: dict[str, str] = dataclasses.field(default_factory=dict)
    """Keys that have keys below them, with the shorthand of each."""
    open: list[str] = dataclasses.field(default_factory=list)
    """Keys below which any name is allowed."""
    own: list[str] = dataclasses.field(default_factory=list)
    """Keys below which all keys of the schema are allowed again."""
    help: str = ""

    def add(self, name: str, below: _Schema, shorthand: str) -> None:
        self.keys += [key for key in (name, *(f"{name}.{key}" for key in below.keys)) if key not in self.keys]
        self.sections |= {name: shorthand} | {f"{name}.{key}": value for key, value in below.sections.items()}
        self.open += [f"{name}.{key}" for key in below.open]

    def is_open(self, key: str) -> bool:
        return any(key.startswith(f"{each}.") for each in self.open)


def _kinds(hint: Any) -> dict[str, type[Config]]:
    """Return the configurations that a field can hold, by their kinds."""
    found: dict[str, type[Config]] = {}
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, Config):
            found |= {cls._kind: cls for cls in _family(member) if cls._kind} or {"": member}
    return found


def _family(cls: type[Config]) -> list[type[Config]]:
    """Return a class and all its subclasses."""
    return [cls, *(each for below in cls.__subclasses__() for each in _family(below))]


_SCHEMAS: dict[type[Config] | KeysOf, _Schema] = {}


def _schema(owner: type[Config] | KeysOf) -> _Schema:
    return _SCHEMAS.get(owner) or _SCHEMAS.setdefault(owner, _build_schema(owner))


def _build_schema(owner: type[Config] | KeysOf) -> _Schema:
    if isinstance(owner, KeysOf):
        below = _schema(owner.config)
        return dataclasses.replace(below, keys=[*owner.extra, *below.keys])
    schema = _Schema(owner.__name__, help=owner._key_help)
    for name, hint in _hints(owner).items():
        mark = getattr(hint, "__metadata__", (None,))[0]
        for kind, cls in _kinds(hint).items():
            extra = ("kind",) if kind else ()
            schema.add(name, _schema(KeysOf(cls, extra)), cls._shorthand or "".join(extra))
        if isinstance(mark, KeysOf):
            schema.add(name, _schema(mark), next(iter(mark.extra), ""))
        elif name not in schema.sections:
            schema.keys.append(name)
            if isinstance(mark, OwnKeys):
                schema.own.append(name)
            elif dict in (get_origin(hint), get_origin(getattr(hint, "__origin__", None))):
                schema.open.append(name)
                schema.keys += [f"{name}.{key}" for key in (mark.known if isinstance(mark, OpenKeys) else ())]
    return schema


def keys(cls: type[Config]) -> list[str]:
    """Return the full paths of all fields of a configuration, such as `mixer.kernel_size`."""
    return list(_schema(cls).keys)


def resolve(owner: type[Config] | KeysOf, key: str) -> str:
    """Return the full path that a key stands for.

    A key is a full path (`model.attention.chunk_size`), the end of one path only (`kernel_size`), of which inner names
    can be left out (`model.chunk_size`), or the same with the name that another library uses (`learning_rate`). A field
    of a section goes before those of the parts below it: `dropout` is `model.dropout`.
    """
    if len(key) > _MAX_KEY:
        raise ConfigError(f"{shown(key)[1:-1]}: expected a key of at most {_MAX_KEY} characters, got {len(key):,}")
    schema = _schema(owner)
    if key in schema.keys or schema.is_open(key):
        return key
    own, _, below = key.partition(".")
    if own in schema.own:
        _check_not_own(schema, own, below.partition(".")[0])
        return f"{own}.{resolve(owner, below)}"
    section, _, name = key.rpartition(".")
    foreign = _foreign(schema, name) if name in _FOREIGN else []
    found = [path for path in foreign if not section or f".{section}." in f".{path}"] or _matches(schema, key)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{key}: did you mean {' or '.join(found)}? Several keys end in this name")
    if name in FOREIGN_ANSWERS:
        raise ConfigError(f"{key}: {FOREIGN_ANSWERS[name]}")
    raise _unknown(schema, key)


_MAX_KEY = 200
"""Characters of a key with all that is above it."""


def _check_not_own(schema: _Schema, own: str, below: str) -> None:
    """Raise a ConfigError for a section of changes inside of another, such as `cpu.cpu`."""
    if below in schema.own:
        raise ConfigError(f"{own}.{below}: expected a key of {schema.name} other than {below}, got {below} again")


def _matches(schema: _Schema, key: str) -> list[str]:
    """Return the paths that `key` is the end of; of each section, those that are least deep."""
    if key in schema.keys:
        return [key]
    *outer, name = key.split(".")
    by_section: dict[str, list[str]] = {}
    for path in schema.keys:
        *above, last = path.split(".")
        rest = iter(above)
        if last == name and all(part in rest for part in outer):
            by_section.setdefault(path.partition(".")[0], []).append(path)
    least = {section: min(path.count(".") for path in paths) for section, paths in by_section.items()}
    return [path for section, paths in by_section.items() for path in paths if path.count(".") == least[section]]


def _foreign(schema: _Schema, name: str) -> list[str]:
    """Return the paths that a name of another library stands for."""
    # A model by itself has no section called `model`.
    return _matches(schema, _FOREIGN[name]) or _matches(schema, _FOREIGN[name].removeprefix("model."))


def _unknown(schema: _Schema, key: str) -> ConfigError:
    names: dict[str, str] = {}
    for foreign in _FOREIGN:
        found = _foreign(schema, foreign)
        names |= {foreign: found[0]} if len(found) == 1 else {}
    for path in reversed(schema.keys):
        names[path.rpartition(".")[2]] = (_matches(schema, path.rpartition(".")[2]) or [path])[0]
    names |= {path: path for path in schema.keys}
    guesses = [(text, close) for text in (key, key.rpartition(".")[2]) if (close := closest(text, names))]
    if guesses:
        _, close = max(guesses, key=lambda guess: difflib.SequenceMatcher(None, *guess).ratio())
        return ConfigError(f"{key}: did you mean {names[close]}?")
    listed = schema.help or f"its keys are {', '.join(schema.keys)}"
    return ConfigError(f"{key}: expected a key of {schema.name}; {listed}")


def closest(text: Any, known: Iterable[str]) -> str:
    """Return the known name that a misspelled one, or one with its words in another order, can mean; or nothing."""
    # Comparing long texts takes long.
    if not isinstance(text, str) or len(text) > _MAX_KEY:
        return ""
    names = list(known)
    reordered = [name for name in names if sorted(name.split("-")) == sorted(text.split("-"))]
    return next(iter(reordered or difflib.get_close_matches(text, names, 1)), "")


def canonical(owner: type[Config] | KeysOf, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes, nested or flat, with any names, as one dictionary of full paths and values."""
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, path, value in _flat(owner, changes, ""):
        if path in found:
            raise ConfigError(f"{given[path]} and {key}: expected one of them, got both, which mean {path}")
        found[path], given[path] = value, key
    return found


def _flat(owner: type[Config] | KeysOf, changes: Mapping[str, Any], above: str) -> Iterator[tuple[str, str, Any]]:
    schema = _schema(owner)
    for name, value in changes.items():
        if not isinstance(name, str):
            raise ConfigError(f"{above}{shown(name)}: expected a text as the name of a key, got {shown(name)}")
        key = f"{above}{name}"
        path = resolve(owner, key)
        if path in schema.own and isinstance(value, Mapping):
            for below, each in canonical(owner, value).items():
                _check_not_own(schema, path, below.partition(".")[0])
                yield f"{path}.{below}", f"{path}.{below}", each
        elif (path in schema.sections or path in schema.open) and isinstance(value, Mapping):
            yield from _flat(owner, value, f"{path}.")
        elif value is None and schema.sections.get(path, "kind") != "kind":
            continue  # a section of a YAML file that is left empty
        elif path in schema.sections and value is not None and not isinstance(value, Config):
            if not schema.sections[path]:
                below = next(each for each in schema.keys if each.startswith(f"{path}."))
                raise ConfigError(f"{path}: expected keys and values such as {below}, got {shown(value)}")
            yield key, f"{path}.{schema.sections[path]}", value
        else:
            yield key, path, value


def merge(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return canonical changes with others made after them: a whole part replaces what was said of its fields."""
    kept = {
        path: value
        for path, value in before.items()
        if not any(path.startswith(f"{each}.") or (value is None and each.startswith(f"{path}.")) for each in changes)
    }
    return {**kept, **changes}


def apply(config: C, changes: Mapping[str, Any]) -> C:
    """Return a copy of a configuration with canonical changes made."""
    by_field: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, below = path.partition(".")
        by_field.setdefault(name, {})[below] = value
    hints = _hints(type(config))
    fields = {name: _changed(name, getattr(config, name), hints[name], group) for name, group in by_field.items()}
    return dataclasses.replace(config, **fields)


def _changed(name: str, value: Any, hint: Any, changes: dict[str, Any]) -> Any:
    """Return the value of a field after changes to it, and to what is below it."""
    kinds = _kinds(hint)
    if "" in changes:
        value = changes.pop("")
        if changes and value is None:
            raise ConfigError(f"{name}.{next(iter(changes))}: expected no key of {name}, which is set to None")
    elif value is None and kinds:
        fields = {path.partition(".")[0] for path in changes} - {"kind"}
        value = next((cls for cls in kinds.values() if fields <= set(_hints(cls))), next(iter(kinds.values())))()
    if not changes:
        return value
    if OwnKeys() in getattr(hint, "__metadata__", ()):
        return {**value, **changes}
    if not kinds:
        return _nested(changes, check(name, value, dict[str, Any]))
    if value._kind and "kind" in changes:
        kind = changes.pop("kind")
        check_choice(f"{name}.kind", kind, kinds)
        value = value if kind == value._kind else kinds[kind]()
    for path in changes:
        field = path.partition(".")[0]
        if field not in _hints(type(value)):
            others = [each for each, cls in kinds.items() if field in _hints(cls)]
            raise ConfigError(
                f"{name}.{field}: expected {name}.kind={' or '.join(others)}, got a {name} of kind {value._kind}, "
                f"whose fields are {', '.join(_hints(type(value)))}"
            )
    return prefixed(f"{name}.", lambda: apply(value, changes))


def prefixed(prefix: str, build: Callable[[], T]) -> T:
    """Return what `build` returns; a ConfigError of it names its field with a prefix."""
    try:
        return build()
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _nested(changes: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a nested dictionary, made from paths and values, that extends `start`."""
    found: dict[str, Any] = dict(start or {})
    for path, value in changes.items():
        *outer, name = path.split(".")
        place = found
        for part in outer:
            inner = place.get(part)
            place[part] = dict(inner) if isinstance(inner, Mapping) else {}
            place = place[part]
        place[name] = value
    return found
