"""What docs/training.md says is so: its keys and defaults, its commands, its code."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from typer.core import TyperGroup

from tcnca.cli import app
from tcnca.config import parse_value as parsed
from tcnca.data import Task
from tcnca.errors import ConfigError
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    TokenInputConfig,
    ValueInputConfig,
    preset,
)
from tcnca.training import Recipe, load_recipe
from tcnca.training.sweeps.plan import load_variants, parse_grid

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
PARTS = ("data", "batch", "optimizer", "schedule", "eval", "checkpoint", "runtime")
MODEL_PARTS = {
    "mixer": (TCNConfig(), EMAConfig()),
    "attention": (AttentionConfig(),),
    "input": (TokenInputConfig(), ValueInputConfig()),
    "head": (LanguageModelHeadConfig(), ClassifierHeadConfig(), RegressionHeadConfig(), PairHeadConfig()),
}
WORDS = {"TCN": TCNConfig(), "chunked": AttentionConfig()}
THE_TASKS = "the task's"
SIZES = {"input.vocab_size", "input.features", "head.num_classes", "head.outputs"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def tables() -> dict[str, dict[str, str]]:
    """For each part of a recipe, its keys and what the page says of their defaults."""
    found: dict[str, dict[str, str]] = {}
    for body in re.findall(r"^\| key \| default \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for line in body.splitlines():
            row = re.fullmatch(r"\| `(\w+)\.([\w.]+)` \| (.+?) \| (\S.*) \|", line)
            assert row, line
            keys = found.setdefault(row[1], {})
            assert row[2] not in keys, line
            keys[row[2]] = row[3]
    return found


def default(cell: str) -> Any:
    """The value that a cell shows."""
    if cell in WORDS:
        return WORDS[cell]
    code = re.fullmatch(r"`(.+)`", cell)
    assert code, cell
    return parsed(code[1])


def shown(value: Any) -> Any:
    """A value as YAML has it."""
    return list(value) if isinstance(value, tuple) else value


def fields(config: Any) -> dict[str, Any]:
    return {field.name: shown(getattr(config, field.name)) for field in dataclasses.fields(config)}


def same(one: Any, other: Any) -> bool:
    # To Python, true is 1.
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def test_there_is_a_table_for_each_part() -> None:
    recipe = {field.name for field in dataclasses.fields(Recipe)}
    assert set(tables()) == {*PARTS, "model"} == recipe - {"about"}


@pytest.mark.parametrize("part", PARTS)
def test_every_key_has_its_true_default(part: str) -> None:
    true, said = fields(getattr(Recipe(), part)), tables()[part]
    assert list(said) == list(true)
    for key, cell in said.items():
        assert same(default(cell), true[key]), f"{part}.{key}: the page says {cell}, it is {true[key]!r}"


def test_every_key_of_a_model_has_its_true_default() -> None:
    said = tables()["model"]
    true: dict[str, list[Any]] = {"preset": [Recipe().model.get("preset")]}
    true |= {key: [value] for key, value in fields(ModelConfig()).items()}
    for part, kinds in MODEL_PARTS.items():
        for kind in kinds:
            for key, value in fields(kind).items():
                true.setdefault(f"{part}.{key}", []).append(value)
    assert set(said) == set(true)
    tasks = {key for key, cell in said.items() if cell == THE_TASKS}
    assert tasks == {"causal", "input", "head"} | SIZES
    for key in set(said) - tasks:
        # Those of a TCN and of an EMA may differ.
        cells = said[key].split("; EMA ")
        for place, value in enumerate(true[key]):
            cell = cells[min(place, len(cells) - 1)]
            assert same(default(cell), value), f"model.{key}: the page says {cell}, it is {value!r}"


@pytest.mark.parametrize("causal", [True, False])
def test_what_the_task_decides_is_not_given(causal: bool) -> None:
    stand = SimpleNamespace(input=ValueInputConfig(features=3), head=ClassifierHeadConfig(num_classes=7), causal=causal)
    config = Recipe().model_config(cast(Task, stand))
    assert (config.input, config.head, config.causal) == (stand.input, stand.head, causal)
    # With a preset, they are the preset's.
    assert Recipe(model={"preset": "tcnca-enwik8"}).model_config(cast(Task, stand)) == preset("tcnca-enwik8").model


def commands() -> list[list[str]]:
    """The arguments of each `tcnca …` on the page, in blocks and in the text."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    lines += re.findall(r"`(tcnca [^`]+)`", text)
    found = [shlex.split(line, comments=True) for line in lines]
    assert all("tcnca" in words for words in found)
    return [words[words.index("tcnca") + 1 :] for words in found]


def given(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters, as the command line understands them, without running it."""
    command, name = typer.main.get_command(app), ""
    while isinstance(command, TyperGroup):
        name, arguments = arguments[0], arguments[1:]
        found = command.commands.get(name)
        assert found is not None, f"there is no command {name}"
        command = found
    return name, command.make_context(name, list(arguments)).params


def accepted(recipe: Recipe, changes: list[str]) -> Recipe:
    """The recipe with changes, which its model must know as well."""
    wanted = recipe.override(changes)
    model = dict(wanted.model)
    name = model.pop("preset", None)
    (preset(name).model if name else ModelConfig(head=ClassifierHeadConfig())).override(**model)
    return wanted


@pytest.fixture
def recipe_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in zip(("reviews.yaml", "shapes.yaml"), blocks("yaml"), strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("recipe_of_the_page")
@pytest.mark.parametrize("arguments", commands(), ids=shlex.join)
def test_commands_are_accepted(arguments: list[str]) -> None:
    name, found = given(arguments)
    changes = list(found.get("changes") or [])
    if name == "sweep":
        for key, values in parse_grid(changes).items():
            for value in values:
                accepted(load_recipe(found["recipe"]), [f"{key}={value}"])
        if found["variants"]:
            variants = load_variants(found["variants"], found["only"].split(",") if found["only"] else [])
            assert variants.recipe == found["recipe"]
            for each in variants.changes.values():
                accepted(load_recipe(found["recipe"]), each)
    elif name == "eval":
        # A run is called by the recipe that it was trained with.
        trained = load_recipe(Path(found["run"]).name)
        wanted = accepted(trained, changes)
        assert dataclasses.replace(trained, data=wanted.data, eval=wanted.eval) == wanted
    elif name in ("train", "recipes") and (found.get("recipe") or found.get("name")):
        accepted(load_recipe(found.get("recipe") or found["name"]), changes)


def test_each_command_is_shown() -> None:
    assert {"train", "eval", "sweep", "recipes"} <= {arguments[0] for arguments in commands()}


@pytest.mark.usefixtures("recipe_of_the_page")
def test_changes_do_what_the_page_says() -> None:
    recipe = load_recipe("reviews.yaml")
    assert (recipe.data.source, recipe.optimizer.lr) == ("reviews.csv", 1e-3)
    short, full, listed = (
        recipe.override(given(arguments)[1]["changes"])
        for arguments in commands()
        if arguments[:2] == ["train", "reviews.yaml"]
    )
    assert (short.optimizer.lr, short.batch.size) == (3e-4, 16)
    assert (full.optimizer.lr, full.model["attention.dropout"]) == (3e-4, 0.1)
    assert (listed.optimizer.betas, listed.schedule.max_steps) == ((0.9, 0.999), 10_000)
    assert (listed.data.task, listed.eval.batches) == ({"longest": 1000}, None)
    (other,) = (given(arguments)[1]["changes"] for arguments in commands() if arguments[1:2] == ["enwik8-mega"])
    changed = load_recipe("enwik8-mega").override(other)
    assert (changed.data.source, changed.model["preset"]) == ("my.txt", "tcnca-enwik8")


def test_names_of_several_keys_need_their_part() -> None:
    sentence = re.search(r"^(.+) are names of several keys", PAGE, re.MULTILINE)
    assert sentence
    last = [f"{part}.{key}".split(".") for part, keys in tables().items() for key in keys]
    several = set()
    for name in {path[-1] for path in last}:
        try:
            Recipe().override([f"{name}=1"])
        except ConfigError as error:
            several |= {name} if "several keys" in str(error) else set()
    assert set(re.findall(r"`(\w+)`", sentence[1])) == several


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/training.md", "exec"), names)
    assert names["result"].step == 20
    # The model that was loaded is the one that was trained.
    assert names["score"] == names["result"].scores["test"]
    assert f"accuracy {names['score'].value} 500" in capsys.readouterr().out
    assert (tmp_path / "runs" / "first" / "model.safetensors").is_file()
