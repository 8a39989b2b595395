"""Recipes: every experiment of the paper, and any key of them can be changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from tcnca import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    preset,
)
from tcnca.cli import app
from tcnca.data import get_dataset
from tcnca.errors import ConfigError
from tcnca.training import Recipe, load_recipe, recipes

NAMES = list(recipes())
PAPER = [
    *(f"enwik8-{family}" for family in ("tcnca", "mega", "tcn-mlp", "ema-mlp")),
    *(
        f"{task}-{family}"
        for task in ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
        for family in ("tcnca", "mega", "tcn-mlp")
    ),
    *(
        f"recall-{length}-{vocabulary}-{family}"
        for length in (64, 1024, 4096, 8192)
        for vocabulary in (10, 20)
        for family in ("tcnca-simple", "mega")
    ),
]
FOLDER = Path(__file__).parents[2] / "src" / "tcnca" / "training" / "recipes"


def test_every_experiment_of_the_paper_has_one() -> None:
    assert set(PAPER) <= set(NAMES)
    assert {"lm", "classify", "retrieve", "regress", "forecast", "recall-small", "enwik8-small"} <= set(NAMES)


@pytest.mark.parametrize("name", PAPER)
def test_numbers_are_those_of_the_preset(name: str) -> None:
    recipe = load_recipe(name)
    found = preset(recipe.model["preset"])
    adam = found.optimization
    assert recipe.batch.size == adam.batch
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (adam.lr, adam.weight_decay)
    assert (recipe.optimizer.betas, recipe.optimizer.eps, recipe.optimizer.max_grad_norm) == (
        adam.betas,
        adam.eps,
        adam.max_grad_norm,
    )
    assert (recipe.schedule.max_steps, recipe.schedule.warmup_steps) == (adam.max_steps, adam.warmup_steps)
    assert (recipe.schedule.warmup_start, recipe.schedule.warmup_power) == (adam.warmup_start, adam.warmup_power)
    assert recipe.schedule.kind == "linear"
    changes = {key: value for key, value in recipe.model.items() if key != "preset"}
    expected = found.model.override(vocab_size=20) if "-20-" in name else found.model
    if name.startswith("recall-"):
        # The one number that is not the paper's: see the recipes.
        expected = expected.override(chunk_size=65 if name.startswith("recall-64-") else 129)
    assert found.model.override(**changes) == expected
    assert get_dataset(recipe.data.source).name == recipe.data.source
    assert recipe.data.source in name


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_a_comment_or_speaks_for_itself(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    sections = [line for line in lines if line and not line.startswith((" ", "#"))]
    written = ["about", "data", "model", "batch", "optimizer", "schedule", "eval", "checkpoint", "runtime"]
    assert [line.partition(":")[0] for line in sections] == written
    keys = [line for line in lines if line.startswith("  ") and not line.rstrip().endswith(":")]
    assert sum("#" in key for key in keys) > len(keys) / 2


@pytest.mark.parametrize("name", NAMES)
def test_written_and_read_again_it_is_the_same(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.yaml")) == recipe


@pytest.mark.parametrize(
    ("change", "part", "field", "value"),
    [
        ("lr=1e-5", "optimizer", "lr", 1e-5),
        ("optimizer.lr=0.1", "optimizer", "lr", 0.1),
        ("betas=[0.9, 0.999]", "optimizer", "betas", (0.9, 0.999)),
        ("max_steps=7", "schedule", "warmup_steps", None),
        ("schedule.kind=cosine", "schedule", "kind", "cosine"),
        ("compile=true", "runtime", "compile", True),
        ("eval.every=0", "eval", "every", 0),
        ("eval.chunk_size=null", "eval", "chunk_size", None),
        ("data=my.txt", "data", "source", "my.txt"),
        ("data.task.max_length=100", "data", "task", {"longest": 100}),
        ("data.custom.text=body", "data", "custom", {"text": "body"}),
    ],
)
def test_a_key_can_be_changed(change: str, part: str, field: str, value: Any) -> None:
    recipe = load_recipe("recall-small")
    if value is None and field == "warmup_steps":
        with pytest.raises(ConfigError, match=r"schedule\.warmup_steps: got 50, allowed is at most the updates, 7"):
            recipe.override([change])
        return
    changed = recipe.override([change])
    assert getattr(getattr(changed, part), field) == value
    # Nothing else is.
    same = dataclasses.replace(getattr(changed, part), **{field: getattr(getattr(recipe, part), field)})
    assert dataclasses.replace(changed, **{part: same}) == recipe


def test_the_model_can_be_changed() -> None:
    changed = load_recipe("listops-tcnca").override(
        ["num_layers=2", "vocab_size=20", "model.chunk_size=64", "model=mega-listops"]
    )
    assert changed.model == {"preset": "mega-listops", "chunk_size": 64, "num_layers": 2, "vocab_size": 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lerning_rate=1", r"lerning_rate: no such key of a recipe; did you mean optimizer\.lr\?"),
        ("optimizer.lerning_rate=1", r"did you mean optimizer\.lr\?"),
        ("every=1", r"every: is the name of several keys, allowed are evaluation\.every, checkpoint\.every"),
        ("chunk_size=1", r"chunk: is the name of several keys, allowed are model\.chunk_size, evaluation\.chunk_size"),
        ("num_layers", r"layers: got no value, allowed is key=value"),
        ("lr=fast", r"optimizer\.lr: got 'fast', allowed is a number"),
        ("lr=-1", r"optimizer\.lr: got -1"),
        ("lr=.inf", r"optimizer\.lr: got inf"),
        ("optimizer.betas=[1]", r"optimizer\.betas: got"),
        ("precision=fp8", r"engine\.precision: got 'fp8', allowed are float32, bf16"),
        ("max_steps=0", r"schedule\.max_steps: got 0"),
        ("val_fraction=2", r"data\.val_fraction: got 2"),
        ("batch=3", r"batch: no such key"),
        ("about.x=3", r"about\.x: no such key"),
    ],
)
def test_errors_of_changes(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("recall-small").override([change])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no keys and values"),
        ("- a", "holds no keys and values"),
        ("{", "is not YAML"),
        ("optimizer: {}", r"optimizer: no such key of a recipe"),
        ("optimizer: {lr: 1}", r"optimizer\.lr: no such key"),
        ("optimizer: 3", r"optimizer: got 3, allowed are keys and values"),
    ],
)
def test_errors_of_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith(str(path))


def test_recipes_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'enwik8-tcnac'.*did you mean enwik8-tcnca\?"):
        load_recipe("enwik8-tcnac")
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.yaml"):
        load_recipe(str(tmp_path / "nothing.yaml"))


def own_file(folder: Path, name: str) -> Path:
    """Something to train each recipe for data of one's own on."""
    path = folder / {"lm": "book.txt", "classify": "a.csv", "retrieve": "p.csv"}.get(name, f"{name}.npz")
    values = np.random.default_rng(0).normal(size=(40, 30, 2))
    if name == "lm":
        path.write_text("so many words " * 500)
    elif name == "classify":
        path.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(60)))
    elif name == "retrieve":
        path.write_text("text1,text2,label\n" + "".join(f"text {n},other {n},{n % 2}\n" for n in range(60)))
    elif name == "regress":
        np.savez(path, values=values, targets=values.mean((1, 2)))
    else:
        np.savez(path, values=values)
    return path


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("lm", LanguageModelHeadConfig),
        ("classify", ClassifierHeadConfig),
        ("retrieve", PairHeadConfig),
        ("regress", RegressionHeadConfig),
        ("forecast", RegressionHeadConfig),
    ],
)
def test_your_own_data_needs_no_new_recipe(tmp_path: Path, name: str, head: type) -> None:
    recipe = load_recipe(name)
    with pytest.raises(ConfigError, match=r"data\.source: got nothing, .*give data=NAME or data=FILE"):
        recipe.build_task()
    recipe = recipe.override([f"data={own_file(tmp_path, name)}", "num_layers=1", "d_model=16", "d_ff=16"])
    task = recipe.build_task()
    config = recipe.model_config(task)
    assert isinstance(config, ModelConfig)
    assert isinstance(config.head, head)
    assert config.causal == task.causal
    batch = task.batch(0, 16_384 if name == "lm" else 4)
    task.loss(SequenceModel(config)(**batch.model_inputs()).logits, batch).backward()


def test_command_lists_and_prints() -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["recipes"], env={"COLUMNS": "80"}).output
    assert all(name in listed for name in NAMES)
    printed = runner.invoke(app, ["recipes", "pathx-mega", "lr=1e-4", "num_layers=2"]).output
    values = yaml.safe_load(printed)
    assert values["optimizer"]["lr"] == 1e-4
    assert values["model"] == {"preset": "mega-pathx", "chunk_size": 4096, "num_layers": 2}
    wrong = runner.invoke(app, ["recipes", "pathx-mega", "learning_rat=1"])
    assert wrong.exit_code == 1
    assert "did you mean optimizer.lr?" in wrong.output


def test_a_file_may_be_short(tmp_path: Path) -> None:
    """Numbers and names as on the command line."""
    path = tmp_path / "mine.yaml"
    path.write_text("data: recall-64-10\nmodel: tcnca-simple-recall-64\noptimizer:\n  lr: 1e-2\n")
    recipe = load_recipe(str(path))
    assert (recipe.data.source, recipe.model["preset"]) == ("recall-64-10", "tcnca-simple-recall-64")
    assert recipe.optimizer.lr == 0.01
    assert recipe.override(["max_steps=1e3"]).schedule.max_steps == 1000


@pytest.mark.parametrize(("name", "kind"), [("lm", "language"), ("regress", "regression"), ("retrieve", "pairs")])
def test_data_of_another_kind_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"word {number},{number % 2}\n" for number in range(40)))
    with pytest.raises(ConfigError, match=rf"is data of kind classification, allowed here is {kind}"):
        load_recipe(name).override([f"data={path}"]).build_task()


def test_a_printed_recipe_shows_the_whole_model() -> None:
    printed = CliRunner().invoke(app, ["recipes", "recall-small", "num_layers=3"])
    assert "#   layers: 3" in printed.output
    assert "#   width: 32" in printed.output
