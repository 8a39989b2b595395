"""docs/training.md: its table of keys and its commands.

`python -m tests.training.test_docs` writes the table of keys again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tcnca
from tcnca.config import Config, field_texts, keys, resolve
from tcnca.errors import ConfigError
from tcnca.models import ModelConfig
from tcnca.training import Recipe, load_recipe
from tcnca.training.sweeps.plan import load_variants, parse_grid
from tests.documents import ROOT, blocks, commands, parse

NAME = "docs/training.md"
PATH = ROOT / NAME
PAGE = PATH.read_text(encoding="utf-8")
HEADER = "| key | default | |\n|---|---|---|\n"
TASK_KEYS = ("causal", "input", "head", "input.vocab_size", "input.features", "head.num_classes", "head.outputs")


@functools.cache
def key_table() -> str:
    """Return the table of all keys of a recipe, from the fields of the configurations and the texts below them."""
    rows = []
    for name, value in _defaults(Recipe).items():
        if name == "model":
            rows.append(_row("model.preset", "`null`", "A model that `tcnca models` lists; the other keys change it"))
            rows += [*_rows(ModelConfig, "model."), *_model_part_rows()]
        elif isinstance(value, Config):
            rows += _rows(type(value), f"{name}.")
        else:
            rows.append(_row(name, _format(value), field_texts(Recipe)[name]))
    return HEADER + "".join(rows)


def _rows(cls: type[Config], prefix: str) -> Iterator[str]:
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    for name, value in _defaults(cls).items():
        key = f"{prefix}{name}"
        if isinstance(value, Config) and not value._kind:
            yield from _rows(type(value), f"{key}.")
            continue
        default = "from the task" if key.removeprefix("model.") in TASK_KEYS else _format(value)
        text = texts[name].rstrip(".")
        choices = [choice for choice in _choices(hints[name]) if f"`{choice}`" not in text]
        yield _row(key, default, text + (f" (`{'`, `'.join(_choices(hints[name]))}`)" if choices else ""))


def _model_part_rows() -> Iterator[str]:
    """Yield the rows of mixer, attention, input and head. A row that not all kinds share is marked with its kinds."""
    for part, hint in typing.get_type_hints(ModelConfig).items():
        kinds = {cls._kind: list(_rows(cls, f"model.{part}.")) for cls in _classes(hint)}
        for row in dict.fromkeys(row for rows in kinds.values() for row in rows):
            names = [kind for kind, rows in kinds.items() if row in rows]
            key, default, text = row.split(" | ", 2)
            yield row if len(names) == len(kinds) else f"{key} | {default} | `{'`, `'.join(names)}`: {text}"


def _classes(hint: Any) -> Iterator[type[Config]]:
    """Yield the configurations that a field of this type can hold."""
    for member in typing.get_args(hint) or (hint,):
        if isinstance(member, type) and issubclass(member, Config):
            # Tests add kinds of their own.
            yield from [member] if member._kind and member.__module__.startswith("tcnca.") else ()
            for each in member.__subclasses__():
                yield from _classes(each)


def _choices(hint: Any) -> list[str]:
    """Return the names that a value of this type is chosen from: kinds of configurations, or literals."""
    kinds = [cls._kind for cls in _classes(hint)]
    members = [hint, *typing.get_args(hint)]
    literals = [typing.get_args(member) for member in members if typing.get_origin(member) is typing.Literal]
    return (kinds if len(kinds) > 1 else []) + [str(choice) for group in literals for choice in group]


def _defaults(cls: type[Config]) -> dict[str, Any]:
    config = cls()
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(cls)}


def _format(value: Any) -> str:
    if isinstance(value, Config):
        return f"`{value._kind}`"
    text = value if isinstance(value, str) and value else json.dumps(value)
    return "`" + re.sub(r"(e-)0|[.]0$", r"\1", text) + "`"


def _row(key: str, default: str, text: str) -> str:
    text = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", re.sub(r"\bNone\b", "null", text))
    return f"| `{key}` | {default} | {text.rstrip('.')} |\n"


@pytest.fixture
def _page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in zip(("reviews.yaml", "shapes.yaml"), (block.text for block in blocks(NAME, "yaml")), strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    tcnca.save(tcnca.build("tcnca-linear-enwik8", num_layers=1, d_model=8), tmp_path / "runs/lm")
    monkeypatch.chdir(tmp_path)


def test_key_table_is_up_to_date() -> None:
    assert PAGE.endswith(f"\n\n{key_table()}"), "run python -m tests.training.test_docs"


def test_key_table_has_every_key() -> None:
    listed = set(re.findall(r"^\| `([\w.]+)` \|", key_table(), re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in keys(Recipe)}
    unlisted = ("data.task.", "data.custom.", "model.mixer.")
    missing = {key for key in keys(Recipe) if not key.startswith(unlisted)} - sections - listed
    assert {key for key in missing if not key.endswith(".kind")} == set()


@pytest.mark.usefixtures("_page_files")
def test_commands_are_accepted() -> None:
    names = set()
    for arguments in commands(NAME):
        name, found = parse(arguments)
        names.add(name)
        changes = list(found.get("changes") or [])
        if name == "sweep":
            recipe = load_recipe(found["recipe"])
            for key, values in parse_grid(changes).items():
                for value in values:
                    recipe.override([f"{key}={value}"]).validate()
            if found["variants"]:
                variants = load_variants(found["variants"], found["only"].split(",") if found["only"] else [])
                assert variants.recipe == found["recipe"]
                for each in variants.changes.values():
                    recipe.override(each).validate()
        elif name == "eval":
            # A run directory has the name of its recipe; without one, it is that of the pretrained model.
            trained = load_recipe(Path(found.get("run") or "enwik8-pretrained").name)
            wanted = trained.override(changes)
            assert dataclasses.replace(trained, data=wanted.data, eval=wanted.eval) == wanted
        elif recipe_name := found.get("recipe") or found.get("name"):
            load_recipe(recipe_name).override(changes).validate()
    assert {"train", "eval", "sweep", "recipes"} <= names


@pytest.mark.usefixtures("_page_files")
def test_overrides_do_what_the_page_says() -> None:
    recipe = load_recipe("reviews.yaml")
    assert (recipe.data.source, recipe.optimizer.lr) == ("reviews.csv", 1e-3)
    short, full, listed = (
        recipe.override(parse(arguments)[1]["changes"])
        for arguments in commands(NAME)
        if arguments[:2] == ["train", "reviews.yaml"]
    )
    assert (short.optimizer.lr, short.batch.size) == (3e-4, 16)
    assert (full.optimizer.lr, full.model_config().attention.dropout) == (3e-4, 0.1)  # type: ignore[union-attr]
    assert (listed.optimizer.betas, listed.schedule.max_steps) == ((0.9, 0.999), 10_000)
    assert (listed.data.task, listed.eval.batches) == ({"max_length": 1000}, None)
    (other,) = (parse(arguments)[1]["changes"] for arguments in commands(NAME) if arguments[1:2] == ["enwik8-mega"])
    changed = load_recipe("enwik8-mega").override(other)
    assert (changed.data.source, changed.model["preset"]) == ("my.txt", "tcnca-enwik8")


def test_short_and_foreign_names_are_as_the_page_says() -> None:
    for name, key in re.findall(r"`(\w+)` is\s+`([\w.]+)`", PAGE):
        assert resolve(Recipe, name) == resolve(Recipe, key)
    sentence = re.search(r"^- (.+) are names of several keys", PAGE, re.MULTILINE)
    assert sentence
    ambiguous = set()
    for name in {key.rpartition(".")[2] for key in keys(Recipe)}:
        try:
            resolve(Recipe, name)
        except ConfigError:
            ambiguous.add(name)
    assert set(re.findall(r"`(\w+)`", sentence[1])) == ambiguous


def test_recorded_runs_can_be_repeated() -> None:
    experiments = ROOT / "benchmarks" / "experiments"
    blocks_of_runs = json.loads((experiments / "tcn-block" / "runs.json").read_text(encoding="utf-8"))
    for found in blocks_of_runs.values():
        for run in found["runs"] if isinstance(found, dict) and "runs" in found else []:
            if run.get("overrides") is not None:
                name, *common = found["recipe"].partition(",")[0].split()
                load_recipe(name).override([*common, *run["overrides"].split()]).validate()
    for run in json.loads((experiments / "recall" / "runs.json").read_text(encoding="utf-8"))["runs"]:
        _, found = parse(shlex.split(run["command"])[1:])
        load_recipe(found["recipe"]).override(found["changes"]).validate()


if __name__ == "__main__":
    PATH.write_text(PAGE.partition(HEADER)[0].rstrip("\n") + "\n\n" + key_table(), encoding="utf-8")
