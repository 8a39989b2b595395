"""Configurations: one set of checks, one resolver of names, and dictionaries that can be read back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tcnca
from tcnca import (
    AttentionConfig,
    CDILConfig,
    ClassifierHeadConfig,
    ConfigError,
    EMAConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SGConvConfig,
    TCNConfig,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.config import (
    FOREIGN_ANSWERS,
    FOREIGN_NAMES,
    Config,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    Probability,
    _kinds,
    keys,
    resolve,
)
from tcnca.training import Recipe
from tcnca.yaml_reader import parse_overrides
from tests.examples import small_config


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field, from its type."""
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*map(values, get_args(hint)))
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is Annotated:
        low = hint.__metadata__[0].low
        return st.integers(low, 9) if hint.__origin__ is int else st.floats(low, low + 0.9)
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=2, unique=True).map(sorted).map(tuple)
    if _kinds(hint):
        return st.one_of(*map(parts, _kinds(hint).values()))
    return {type(None): st.none(), bool: st.booleans()}.get(hint, st.floats(0.0, 0.9))


def parts(cls: type[Config]) -> st.SearchStrategy[Any]:
    """Return a strategy for the configurations of a class that can be built."""

    def build(fields: dict[str, Any]) -> Config | None:
        if not fields.get("ngram_sizes", True):
            fields = {name: value for name, value in fields.items() if not name.startswith("ngram_")}
        try:
            return cls(**fields)
        except ConfigError:
            return None

    return st.fixed_dictionaries(fields_of(cls)).map(build).filter(bool)


def fields_of(cls: type[Config]) -> dict[str, st.SearchStrategy[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: values(hints[field.name]) for field in dataclasses.fields(cls)}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Draw any configuration that can be built."""
    fields = draw(st.fixed_dictionaries(fields_of(ModelConfig)))
    if fields["attention"] is None:
        fields["gated"] = False
    elif fields["attention"].memory:
        fields["causal"] = True
    if isinstance(fields["head"], LanguageModelHeadConfig):
        fields |= {"causal": True, "input": TokenInputConfig()}
    return ModelConfig(**fields)


@given(config=configs())
def test_dictionary_and_back(config: ModelConfig) -> None:
    values = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(values) == config
    assert set(values) == {field.name for field in dataclasses.fields(config)}
    for part in ("mixer", "attention", "input", "head"):
        value = getattr(config, part)
        if value is not None:
            assert set(values[part]) == {"kind"} | {field.name for field in dataclasses.fields(value)}


def test_dictionaries_can_be_partial_and_layered() -> None:
    assert ModelConfig.from_dict({}) == ModelConfig()
    assert ModelConfig.from_dict({"mixer": {"kind": "ema", "d_state": 3}}) == ModelConfig(mixer=EMAConfig(d_state=3))
    assert ModelConfig.from_dict({"mixer": {"depth": 2}}) == ModelConfig(mixer=TCNConfig(depth=2))
    assert ModelConfig.from_dict({"mixer": "ema"}) == ModelConfig(mixer=EMAConfig())
    layered = ModelConfig.from_dict({"hidden_size": 16, "mixer": None}, {"d_model": 8, "mixer": {"depth": 2}})
    assert layered == ModelConfig(d_model=8, mixer=TCNConfig(depth=2))
    assert ModelConfig.from_dict({"mixer": {"depth": 2}}, {"mixer": None}).mixer is None


class Example(Config):
    """A field of each type."""

    positive: PositiveInt = 1
    """A comment."""
    natural: NonNegativeInt | None = None
    probability: Probability = 0.0
    fraction: Fraction = 0.0
    flag: bool = False
    choice: Literal["left", "right"] = "left"
    both: bool | Literal["gpu"] = False
    pair: tuple[Probability, Probability] = (0.5, 0.5)
    text: str = ""


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("positive", [0, -5, 1.5, "3", True, None], "an integer >= 1"),
        ("natural", [-1, 2.5, False], "an integer >= 0 or None"),
        ("probability", [-0.1, 1.0, 1, float("nan"), "0.1", None, True], r"a number in \[0, 1\)"),
        ("fraction", [-0.1, 1.1, float("inf")], r"a number in \[0, 1\]"),
        ("flag", [1, 0, None, "yes"], "true or false"),
        ("choice", ["nonsense", None, 1, ["left"]], "one of left, right"),
        ("both", ["often", 1], "true or false or gpu"),
        ("pair", [0.5, [0.5], [0.5, 1.0], None], r"2 values, each a number in \[0, 1\)"),
        ("text", [3, None], "a text"),
    ],
)
def test_every_type_is_checked(field: str, values: list[Any], expected: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{field}: expected {expected}, got "):
            Example(**{field: value})


def test_values_are_converted() -> None:
    config = Example(positive=1e3, probability=np.float32(0.5), fraction=1, natural=np.int64(5), pair=[0, 0.25])  # type: ignore[arg-type]
    assert config == Example(positive=1000, probability=0.5, fraction=1.0, natural=5, pair=(0.0, 0.25))
    assert [type(value) for value in dataclasses.astuple(config)[:4]] == [int, int, float, float]


def test_choice_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"^choice: did you mean right\? Expected one of left, right, got 'rihgt'$"):
        Example(choice="rihgt")  # type: ignore[arg-type]


def test_unknown_field_is_answered_with_the_right_name() -> None:
    for fields, message in (
        ({"hidden_size": 8}, r"^hidden_size: use d_model$"),
        ({"kernel_size": 8}, r"^kernel_size: use mixer\.kernel_size with override\(\)$"),
        ({"d_modle": 8}, r"^d_modle: did you mean d_model\?$"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelConfig(**fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^config: expected TCNConfig, got 9"):
        tcnca.TCN(8, 9)  # type: ignore[arg-type]
    assert tcnca.TCN(8, dilation=3).config.dilation_factor == 3


def test_every_field_is_checked_and_explained() -> None:
    assert "\n    positive: A comment." in (Example.__doc__ or "")
    sections = [type(value) for value in vars(Recipe()).values() if isinstance(value, Config)]
    mixers = (TCNConfig, EMAConfig, SGConvConfig, CDILConfig)
    parts = (*mixers, AttentionConfig, TokenInputConfig, ValueInputConfig)
    heads = (LanguageModelHeadConfig, ClassifierHeadConfig, RegressionHeadConfig, PairHeadConfig)
    every: tuple[type[Config], ...] = (Recipe, *sections, ModelConfig, *parts, *heads)
    for config in every:
        explained = config.__doc__ or ""
        for field in dataclasses.fields(config):
            assert f"\n    {field.name}: " in explained, field.name
            with pytest.raises(ConfigError, match=f"^{field.name}: expected "):
                config(**{field.name: object()})


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (ModelConfig, {"mixer": AttentionConfig()}, "^mixer: expected .*Config or None, got AttentionConfig"),
        (ModelConfig, {"head": None}, "^head: expected .*Config.*, got None"),
        (ModelConfig, {"attention": None}, "^gated: expected False without attention"),
        (ModelConfig, {"causal": False}, "^causal: expected True"),
        (TCNConfig, {"activation": "gelu"}, "^activation: expected block 'chain' or 'residual'"),
        (TCNConfig, {"init": "series", "block": "residual"}, "^init: expected .*'series'"),
        (PairHeadConfig, {"pooling": "none"}, "^pooling: expected mean, last or first"),
        (RegressionHeadConfig, {"hidden_layers": 2}, "^hidden_layers: expected "),
        (TokenInputConfig, {"vocab_size": 8, "pad_token_id": 8}, "^pad_token_id: expected a token below .*8, got 8"),
        (AttentionConfig, {"d_key": 8, "position": "rope", "rope_fraction": 0.1}, "^rope_fraction: expected "),
        (AttentionConfig, {"d_key": 5, "position": "rope"}, "^d_key: expected an even number"),
        (AttentionConfig, {"chunk_size": None}, "^max_length: expected an integer"),
        (AttentionConfig, {"chunk_size": 9, "max_length": 8}, "^chunk_size: expected at most 8"),
    ],
)
def test_fields_that_do_not_fit_together(config: type[Config], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_override_finds_the_part() -> None:
    before = small_config()
    config = before.override(
        {"num_layers": 3, "vocab_size": 256, "attention.chunk_size": 2},
        kernel_size=5,
        tie_embeddings=False,
        dropout=0.25,
    )
    assert (config.num_layers, config.dropout) == (3, 0.25)
    assert config.input == TokenInputConfig(vocab_size=256)
    assert config.attention is not None
    assert before.attention is not None
    assert config.attention == dataclasses.replace(before.attention, chunk_size=2)
    assert isinstance(config.mixer, TCNConfig)
    assert (config.mixer.kernel_size, config.mixer.depth, config.mixer.dropout) == (5, 3, 0.0)
    assert config.head == LanguageModelHeadConfig(tie_embeddings=False)
    assert before == small_config()


def test_override_of_a_part_and_of_its_fields_together() -> None:
    config = small_config("tcnca").override(mixer=EMAConfig(d_state=2), truncation=7)
    assert config.mixer == EMAConfig(d_state=2, truncation=7)
    assert small_config("tcnca").override(mixer="ema", state_size=3).mixer == EMAConfig(d_state=3)
    assert small_config("ema-mlp", mixer=None).override(depth=7).mixer == TCNConfig(depth=7)
    assert small_config("tcn-mlp").override(chunk_size=7).attention == AttentionConfig(chunk_size=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_modle": 1}, r"^d_modle: did you mean d_model\?$"),
        ({"chunks": 1}, r"^chunks: did you mean attention\.chunk_size\?$"),
        ({"attention.chnk": 1}, r"^attention\.chnk: did you mean attention\.chunk_size\?$"),
        ({"mixer": {"kernl": 1}}, r"^mixer\.kernl: did you mean mixer\.kernel_size\?$"),
        ({"nonsense": 1}, "^nonsense: expected a key of ModelConfig; its keys are num_layers|d_model, "),
        ({"kind": "x"}, r"^kind: did you mean mixer\.kind or attention\.kind or "),
        ({"truncation": 3}, r"^mixer\.truncation: expected mixer\.kind=ema, got a mixer of kind tcn"),
        ({"mixer": None, "kernel_size": 3}, r"^mixer\.kernel_size: expected no key of mixer, which is set to None"),
        ({"mixer.kind": "lstm"}, r"^mixer\.kind: expected one of .*tcn.*, got 'lstm'"),
        ({"layers": 2, "num_layers": 3}, "^layers and num_layers: expected one of them"),
        ({"chunk_size": 0}, r"^attention\.chunk_size: expected an integer >= 1 or None, got 0"),
        ({"num_layers": 0}, r"^num_layers: expected an integer in \[1, 1024\], got 0"),
        ({"attention": None}, "^gated: expected False"),
    ],
)
def test_override_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config().override(changes)


@pytest.mark.parametrize("name", [name for names in FOREIGN_NAMES.values() for name in names])
def test_names_of_other_libraries(name: str) -> None:
    meant = next(key for key, names in FOREIGN_NAMES.items() if name in names)
    assert resolve(Recipe, name) == resolve(Recipe, meant)
    if resolve(Recipe, meant).startswith("model.") and meant != "model.preset":
        assert resolve(Recipe, f"model.{name}") == resolve(Recipe, meant)
        assert f"model.{resolve(ModelConfig, name)}" == resolve(Recipe, meant)
    # None of them hides a key of ours, except the one that would mean another.
    assert name not in {key.split(".")[-1] for key in keys(Recipe)} - {"batch_size"}


def test_names_of_other_libraries_that_mean_no_key() -> None:
    for name in FOREIGN_ANSWERS:
        with pytest.raises(ConfigError, match=rf"^{name}: (use|attention has)"):
            resolve(Recipe, name)
    with pytest.raises(ConfigError, match=r"^epochs: use max_steps; one epoch is .* divided by batch\.size"):
        Recipe().override(epochs=3)


def test_overrides_of_the_command_line() -> None:
    texts = ["lr=1e-3", "data=my.txt", "mixer=None", "betas=[0.9, 0.99]"]
    assert parse_overrides(texts) == {"lr": 0.001, "data": "my.txt", "mixer": None, "betas": [0.9, 0.99]}
    assert parse_overrides(["lr=1", "lr=2"]) == {"lr": 2}
    for wrong, message in (
        (["lr"], "^lr: expected KEY=VALUE, got no value"),
        (["lr=[1"], "expected YAML"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_overrides(wrong)


def test_recipes_are_listed_without_pytorch() -> None:
    """The command line answers before PyTorch is imported."""
    code = (
        "import sys, types; package = types.ModuleType('tcnca'); package.__path__ = [sys.argv[1]];"
        "sys.modules['tcnca'] = package; import tcnca.recipes; assert len(tcnca.recipes.descriptions()) == 5;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(tcnca.__file__).parent)], check=True)


@given(length=st.integers(1, 5000), kernel_size=st.integers(2, 17), depth=st.integers(2, 4), blocks=st.integers(1, 2))
def test_covering_takes_the_smallest_dilation_factor(length: int, kernel_size: int, depth: int, blocks: int) -> None:
    config = TCNConfig.covering(length, kernel_size=kernel_size, depth=depth, convolutions=blocks)
    assert (config.kernel_size, config.depth, config.convolutions) == (kernel_size, depth, blocks)
    assert config.receptive_field >= length
    if config.dilation_factor > 1:
        smaller = dataclasses.replace(config, dilation_factor=config.dilation_factor - 1)
        assert smaller.receptive_field < length


@pytest.mark.parametrize("fields", [{"depth": 1, "kernel_size": 5}, {"depth": 3, "kernel_size": 1}])
def test_covering_what_no_dilation_factor_covers(fields: dict[str, Any]) -> None:
    reach = TCNConfig(dilation_factor=1, **fields).receptive_field
    assert TCNConfig.covering(reach, **fields).dilation_factor == 1
    with pytest.raises(ConfigError, match=rf"^length: expected at most {reach} .*, got {reach + 1}"):
        TCNConfig.covering(reach + 1, **fields)
    with pytest.raises(ConfigError, match=r"^length: expected an integer >= 1, got 0"):
        TCNConfig.covering(0)
