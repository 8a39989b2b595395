"""Recipes: every experiment of the paper, and any key of them can be changed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from tcnca import ClassifierHeadConfig, SequenceModel, TokenInputConfig, ValueInputConfig, presets
from tcnca.cli import app
from tcnca.errors import ConfigError
from tcnca.layers import Mixer
from tcnca.recipes import builtin, descriptions, read_recipe
from tcnca.training import Recipe, ScheduleConfig, load_recipe, scheduled_lr

# MEGA's table: batch size, learning rate, weight decay, steps, warm-up steps, gradient norm, power of the warm-up.
TABLE = {
    "listops": (64, 0.001, 0.01, 90_000, 3_000, 1, 1),
    "text": (50, 0.004, 0.01, 25_000, 10_000, 1, 1),
    "retrieval": (64, 0.003, 0.04, 91_960, 10_000, 1, 1),
    "image": (50, 0.01, 0.02, 180_000, 9_000, 1, 1),
    "pathfinder": (128, 0.01, 0.01, 250_000, 50_000, 1, 1),
    "pathx": (128, 0.01, 0.01, 125_000, 25_000, 1, 2),
    "enwik8": (65_536, 0.005, 0.1, 400_000, 24_000, 0.25, 1),
    # The paper names the grid that it searched; these are our choice from it.
    "recall": (64, 0.001, 0.1, 20_000, 1_000, 1, 1),
}
# The paper's own, for EnWik8 with TCNCA: 250 epochs of 90 million bytes, in steps of 65,536 tokens.
PAPERS_ENWIK8 = (65_536, 0.005, 0.2, 250 * 90_000_000 // 65_536, 24_000, 0.25, 1)
FAMILIES = ("tcnca", "tcnca-linear", "mega", "tcn-mlp")
EXPERIMENTS = {
    **{f"enwik8-{family}": f"{family}-enwik8" for family in (*FAMILIES, "ema-mlp")},
    **{
        f"{task}-{family}": f"{family}-{task}"
        for task in ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
        for family in FAMILIES
    },
    **{
        f"recall-{length}-{vocabulary}-{family}": f"{family}-recall-{length}"
        for length in (64, 1024, 4096, 8192)
        for vocabulary in (10, 20)
        for family in ("tcnca-simple", "mega")
    },
}
# Batch size, learning rate, that of the state-space parameters or kernels, weight decay, epochs. SGConv has S4's and
# the LRU has S5's: our choice.
S4 = {
    "listops": (32, 0.01, 0.001, 0.05, 40),
    "text": (16, 0.01, 0.001, 0.05, 32),
    "retrieval": (64, 0.01, 0.001, 0.05, 20),
    "image": (50, 0.01, 0.001, 0.05, 200),
    "pathfinder": (64, 0.004, 0.001, 0.05, 200),
    "pathx": (16, 0.001, 0.001, 0.05, 50),
}
S4_WARMUP = {
    "listops": 12_000,
    "text": 5_000,
    "retrieval": 5_000,
    "image": 18_000,
    "pathfinder": 50_000,
    "pathx": 50_000,
}
S5 = {
    "listops": (50, 0.003, 0.001, 0.04, 40),
    "text": (50, 0.004, 0.001, 0.07, 35),
    "retrieval": (32, 0.002, 0.001, 0.05, 20),
    "image": (50, 0.0045, 0.001, 0.07, 250),
    "pathfinder": (64, 0.0045, 0.0009, 0.03, 200),
    "pathx": (32, 0.0018, 0.0006, 0.06, 75),
}
LRU: dict[str, tuple[Any, ...]] = {task: (size, lr, 0.5 * lr, *more) for task, (size, lr, _, *more) in S5.items()}
CDIL = {task: (TABLE[task][0], 0.001, 0.001, 0.0, 100) for task in ("text", "retrieval", "image", "pathfinder")}
EXAMPLES = {
    "listops": 96_000,
    "text": 25_000,
    "retrieval": 147_086,
    "image": 45_000,
    "pathfinder": 160_000,
    "pathx": 160_000,
}
BASELINES: dict[str, tuple[Any, ...]] = {
    f"{task}-{family}": row
    for family, rows in (("s4d", S4), ("s5", S5), ("lru", LRU), ("sgconv", S4), ("cdil", CDIL))
    for task, row in rows.items()
}
TRANSFORMERS = [*(f"{task}-transformer" for task in (*EXAMPLES, "enwik8")), "enwik8-transformer-xl"]
OWN = ["lm", "finetune", "classify", "retrieve", "regress", "forecast"]


def test_every_preset_has_a_recipe() -> None:
    baselines = {
        f"{family}-{task}" for task, _, family in (name.partition("-") for name in (*BASELINES, *TRANSFORMERS))
    }
    assert {*EXPERIMENTS.values(), *baselines} == set(presets())
    assert set(builtin()) == {
        *EXPERIMENTS,
        *BASELINES,
        *TRANSFORMERS,
        *OWN,
        *("recall-small", "enwik8-small", "listops-small", "enwik8-short", "image-short"),
        "enwik8-pretrained",
        *("enwik8-fast-tcnca", "enwik8-fast-tcnca-linear", "enwik8-fast-mega"),
    }
    groups = descriptions()
    assert sorted(name for group in groups.values() for name in group) == sorted(builtin())
    assert all(about for group in groups.values() for about in group.values())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_numbers_are_the_published_ones(name: str) -> None:
    recipe, task = load_recipe(name), name.partition("-")[0]
    row = PAPERS_ENWIK8 if name in ("enwik8-tcnca", "enwik8-tcnca-linear") else TABLE[task]
    optimizer, schedule = recipe.optimizer, recipe.schedule
    found = (recipe.batch.size, optimizer.lr, optimizer.weight_decay, schedule.max_steps, schedule.warmup_steps)
    assert (*found, optimizer.max_grad_norm, schedule.warmup_power) == row
    assert (optimizer.betas, optimizer.eps, schedule.warmup_start) == ((0.9, 0.98), 1e-8, 1e-7)
    assert schedule.kind == "linear"
    assert recipe.model["preset"] == EXPERIMENTS[name]
    assert name.startswith(recipe.data.source)
    # The model is the preset's, with the one number that is not the paper's: see the recipes.
    changes: dict[str, Any] = {}
    if task == "recall":
        changes["attention"] = {"chunk_size": 65 if name.startswith("recall-64-") else 129}
        changes |= {"input": {"vocab_size": 20}} if "-20-" in name else {}
    assert {key: value for key, value in recipe.model.items() if key != "preset"} == changes


@pytest.mark.parametrize("name", BASELINES)
def test_numbers_of_baselines_are_the_published_ones(name: str) -> None:
    recipe, (task, _, family) = load_recipe(name), name.partition("-")
    size, lr, slow_lr, weight_decay, epochs = BASELINES[name]
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (recipe.batch.size, optimizer.lr, optimizer.weight_decay) == (size, lr, weight_decay)
    per_epoch = -(-EXAMPLES[task] // size)
    warmup = S4_WARMUP[task] if family in ("s4d", "sgconv") else per_epoch
    assert (schedule.max_steps, schedule.warmup_steps) == (epochs * per_epoch, warmup)
    assert (schedule.kind, schedule.warmup_power) == ("linear" if family == "cdil" else "cosine", 1)
    # Each mixer has a factor of its own, and the recipe another.
    with torch.device("meta"):
        model = SequenceModel(recipe.model_config().override(num_layers=1))
    (mixer,) = (module for module in model.modules() if isinstance(module, Mixer))
    own = {options.group: options.lr_mult for options in mixer.param_options().values()}
    mult = {"ssm": optimizer.ssm_lr_mult, "kernels": optimizer.kernel_lr_mult}
    found = [lr * own[group] * mult[group] for group in mult if group in own] or [lr]
    assert found == [pytest.approx(slow_lr, rel=1e-4)]
    assert recipe.model == {"preset": f"{family}-{task}"}
    assert recipe.data == load_recipe(f"{task}-mega").data


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_are_trained_on_the_same_data(name: str) -> None:
    recipe, (task, _, family) = load_recipe(name), name.partition("-")
    assert recipe.model == {"preset": f"{family}-{task}"}
    assert recipe.data.source == task
    if task == "enwik8":
        optimizer, schedule = recipe.optimizer, recipe.schedule
        assert (optimizer.lr, optimizer.weight_decay, optimizer.max_grad_norm) == (2.5e-4, 0.0, 0.25)
        assert (schedule.max_steps, schedule.warmup_steps, schedule.kind) == (400_000, 0, "cosine")
    else:
        same = load_recipe(f"{task}-tcnca").override([f"lr={recipe.optimizer.lr}", f"model={family}-{task}"])
        assert recipe == dataclasses.replace(same, about=recipe.about)


@pytest.mark.parametrize("name", builtin())
def test_recipe_is_valid_and_can_be_written_and_read(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    for each in (recipe, recipe.for_device("cpu"), recipe.for_device("cuda")):
        each.validate()
        assert each.schedule.warmup_steps <= each.schedule.max_steps
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.yaml")) == recipe


@pytest.mark.parametrize(
    ("change", "part", "field", "value"),
    [
        ("lr=1e-5", "optimizer", "lr", 1e-5),
        ("betas=[0.9, 0.999]", "optimizer", "betas", (0.9, 0.999)),
        ("steps=1e3", "schedule", "max_steps", 1000),
        ("batch_size=4", "batch", "size", 4),
        ("compile=true", "runtime", "compile", True),
        ("eval.chunk_size=null", "eval", "chunk_size", None),
        ("data=my.txt", "data", "source", "my.txt"),
        ("data.task.max_length=100", "data", "task", {"max_length": 100}),
        ("carry_state=false", "data", "task", {"carry_state": False}),
        ("data.custom.text=body", "data", "custom", {"text": "body"}),
        ("text=body", "data", "custom", {"text": "body"}),
    ],
)
def test_a_key_can_be_changed(change: str, part: str, field: str, value: Any) -> None:
    recipe = load_recipe("recall-small")
    changed = recipe.override([change])
    assert getattr(getattr(changed, part), field) == value
    same = dataclasses.replace(getattr(changed, part), **{field: getattr(getattr(recipe, part), field)})
    assert dataclasses.replace(changed, **{part: same}) == recipe


def test_the_model_can_be_changed() -> None:
    changes = ["n_layers=2", "vocab=20", "model.chunk_size=64", "model.attention.dropout=0.1", "model=mega-listops"]
    assert load_recipe("listops-tcnca").override(changes).model == {
        "preset": "mega-listops",
        "num_layers": 2,
        "input": {"vocab_size": 20},
        "attention": {"chunk_size": 64, "dropout": 0.1},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lerning_rate=1", r"^lerning_rate: did you mean optimizer\.lr\?$"),
        ("nonsense=1", "^nonsense: expected a key of Recipe; `tcnca recipes NAME` prints all keys$"),
        ("every=1", r"^every: did you mean eval\.every or checkpoint\.every\?"),
        ("chunk_size=1", r"^chunk_size: did you mean model\.attention\.chunk_size or .* or eval\.chunk_size\?"),
        ("epochs=3", r"^epochs: use max_steps; one epoch is"),
        ("num_layers", "^num_layers: expected KEY=VALUE, got no value"),
        ("lr=fast", r"^optimizer\.lr: expected a number >= 0, got 'fast'"),
        ("schedule=3", r"^schedule: expected keys and values such as schedule\.max_steps, got 3"),
        ("optimizer=sgd", r"^optimizer\.name: expected one of adamw, muon, got 'sgd'"),
        ("data=[1]", r"^data\.source: expected a text, got \[1\]"),
        ("data.task=3", r"^data\.task: expected keys and values, got 3"),
    ],
)
def test_errors_of_changes(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("recall-small").override([change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("num_layers=deep", r"^model\.num_layers: expected an integer in \[1, 1024\], got 'deep'"),
        ("model.chunk_size=0", r"^model\.attention\.chunk_size: expected an integer >= 1 or None, got 0"),
        ("model=tcnca-enwik", r"^model\.preset: did you mean tcnca-enwik8\?"),
        ("d_state=3", r"^model\.mixer\.d_state: expected mixer\.kind=ema or .*s4d.*, got a mixer of kind tcn"),
        ("data.task.sise=3", r"^data\.task\.sise: "),
        ("data.custom.txt=a", r"^data\.custom\.txt: did you mean text\?"),
    ],
)
def test_validate_finds_what_is_wrong_whatever_the_data(change: str, message: str) -> None:
    for name in ("recall-small", "classify"):
        with pytest.raises(ConfigError, match=message):
            load_recipe(name).override([change]).validate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": expected keys and values, got None"),
        ("{", ": expected YAML"),
        ("batch: {size: 1, size: 2}", r": expected YAML \(the key size is given twice, in line 1\)"),
        ("optimiser: {lr: 1}", r": optimiser: did you mean optimizer\?"),
        ("extends: enwik8-tcnac", r": extends: recipe: did you mean enwik8-tcnca\?"),
        ("extends: [lm]", ": extends: expected the name or file of a recipe"),
        ("extends: mine.yaml", ": expected recipes that extend others, got a cycle: mine extends mine"),
    ],
)
def test_errors_of_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith(str(path))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * ['*' + before])}]\n" for before, name in itertools.pairwise("abcdefghi")
)
NESTED = "about: " + "[" * 2000 + "]" * 2000
LONG = "x" * 1_000_000
DOTS = ".".join(["a"] * 5000)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases (*name) are not allowed, in line 2"),
        (f"about: [&a [x], {', '.join(['*a'] * 5_000)}]", "aliases (*name) are not allowed"),
        (NESTED, "it is nested too deeply"),
        (LONG, "expected YAML of at most 32,768 characters"),
        (f"{DOTS[:999]}: 1", "expected a key of at most 200 characters"),
        (f"? {LONG[:30_000]}\n: 1", "expected a key of at most 200 characters"),
        ("batch: {size: [" + "1, " * 10_000 + "]}", "batch.size: expected an integer >= 1, got [1, 1"),
        ("cpu: {cpu: {cpu: {lr: 1}}}", "cpu.cpu: expected a key of Recipe other than cpu"),
        ("extends: ../FOLDER/mine.yaml", "expected at most 8 recipes of which each extends the next"),
        (f"extends: {'y' * 300}.yaml", "which does not exist"),
        ("1: 2", "key 1: expected a text, got 1"),
        ("model: {null: x}", "model.None: expected a text as the name of a key"),
        ("data: {task: {true: 1}}", "data.task.True: expected a text as the name of a key"),
        ("cpu: {optimizer: {1.5: 1}}", "optimizer.1.5: expected a text as the name of a key"),
        ("lr: !!int 0x_", "'0x_' is not a value, in line 1"),
        ("data: [1]", "data.source: expected a text, got [1]"),
        ("data: {kind: []}", "data.kind: expected one of"),
    ],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("command", ["recipes", "train", "sweep"])
def test_files_that_would_hang_or_break_the_reader(tmp_path: Path, command: str, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("FOLDER", tmp_path.name), encoding="utf-8")
    more = {"recipes": [], "train": ["--print-config"], "sweep": ["seed=1,2", "--dry-run"]}[command]
    with time_limit(10):
        result = CliRunner().invoke(app, [command, str(path), *more])
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: "), result.output
    assert message in result.output
    assert len(result.output) < 2000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lr=[1", "lr: expected YAML (expected ',' or ']', but got '<stream end>'), got '[1'"),
        ("lr=&a [*a]", "lr: expected YAML (aliases (*name) are not allowed), got '&a [*a]'"),
        ("about=!!int x", "about: expected YAML ('x' is not a value), got '!!int x'"),
        ("lr=0x_", "optimizer.lr: expected a number >= 0, got '0x_'"),
        ("max_steps=010", "schedule.max_steps: expected an integer >= 1, got '010'"),
        ("lr=" + "[" * 30_000, "lr: expected YAML (it is nested too deeply)"),
        (f"{DOTS}=1", "expected a key of at most 200 characters, got 9,999"),
        (f"data.task.max_length.{DOTS}=1", "expected a key of at most 200 characters"),
        (f"{LONG}", "expected KEY=VALUE"),
        ("cpu.cpu.lr=1", "cpu.cpu: expected a key of Recipe other than cpu"),
        ("model.preset=[1]", "model.preset: expected one of"),
        (f"seed={2**64}", f"batch.seed: expected an integer in [0, {2**63 - 1}], got {2**64}"),
        (f"max_steps={10**400}", "schedule.max_steps: expected an integer <= 2147483647, got 1000"),
        ("num_layers=1e308", "model.num_layers: expected an integer in [1, 1024], got 1e+308"),
        ("lr=1e308", "optimizer.lr: expected a number <= 1e+38, got 1e+308"),
        ("lr=.nan", "optimizer.lr: expected a number >= 0, got nan"),
        ("max_steps=" + "9" * 5000, "max_steps: expected YAML ('9999"),
        (f"model.preset={LONG[:30_000]}", "model.preset: expected one of"),
        (f"lr={LONG}", "lr: expected YAML of at most 32,768 characters, got 1,000,000"),
    ],
    ids=lambda text: text[:30],
)
def test_changes_that_would_hang_or_break_the_reader(change: str, message: str) -> None:
    with time_limit(10):
        result = CliRunner().invoke(app, ["train", "recall-small", change, "--print-config"])
    assert result.exit_code == 1, result.output
    assert result.output.startswith("Error: "), result.output
    assert message in result.output
    assert len(result.output) < 2000


def test_dates_are_texts() -> None:
    assert load_recipe("recall-small").override(["about=2001-13-45"]).about == "2001-13-45"


def test_recipes_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^recipe: did you mean enwik8-tcnca\? Got 'enwik8-tcnac'"):
        load_recipe("enwik8-tcnac")
    with pytest.raises(ConfigError, match=r"^recipe: did you mean enwik8-tcnca-linear\?"):
        load_recipe("tcnca-linear-enwik8")
    with pytest.raises(ConfigError, match=r"^recipe: expected a file, got .*nothing\.yaml, which does not exist"):
        load_recipe(str(tmp_path / "nothing.yaml"))


def test_a_recipe_can_extend_another(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: recall-small\nlearning_rate: 1e-2\nmodel: {n_layers: 3, mixer: null}")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nabout: mine\noptimizer: {lr: 0.5}\nmodel: {depth: 2}\n")
    recipe, base = load_recipe(str(tmp_path / "child.yaml")), load_recipe("recall-small")
    assert recipe.model == {**base.model, "num_layers": 3, "mixer": {"depth": 2}}
    assert dataclasses.replace(recipe, model=base.model) == base.override({"lr": 0.5, "about": "mine"})
    assert len(read_recipe(str(tmp_path / "child.yaml"))) == len(read_recipe("recall-small")) + 2


def test_changes_for_a_cpu() -> None:
    recipe = load_recipe("lm")
    on_cpu, on_gpu = recipe.for_device("cpu"), recipe.for_device("cuda")
    assert on_gpu == dataclasses.replace(recipe, cpu={})
    assert on_cpu.batch.size < on_gpu.batch.size
    assert on_cpu.model["num_layers"] < on_gpu.model["num_layers"]
    # What a user sets is set on every device, except where it is set for a CPU.
    changed = recipe.override(["num_layers=7", "cpu.seed=3"])
    assert changed.for_device("cpu") == on_cpu.override(["num_layers=7", "seed=3"])
    assert changed.for_device("cuda") == on_gpu.override(["num_layers=7"])
    with pytest.raises(ConfigError, match=r"d_modle: did you mean model\.d_model\?"):
        recipe.override(["cpu.d_modle=3"])


def test_keys_for_tokens(tmp_path: Path) -> None:
    recipe, text = load_recipe("classify"), {"head": ClassifierHeadConfig(), "causal": False}
    values = text | {"input": ValueInputConfig()}

    def sizes(recipe: Recipe) -> tuple[int, ...]:
        found = recipe._model(text).input
        assert isinstance(found, TokenInputConfig)
        return found.ngram_sizes

    assert sizes(recipe) == (2, 3, 4, 5)
    assert recipe._model(values).input == ValueInputConfig()
    # What a user sets comes before them; a preset and the model of `init_from` are taken as they are.
    assert sizes(recipe.override(["ngram_sizes=[2]"])) == (2,)
    assert sizes(recipe.override(["ngram_sizes=[]"])) == ()
    assert sizes(recipe.override(["ngram_buckets=100"])) == (2, 3, 4, 5)
    assert sizes(recipe.override(["tokens.ngram_sizes=[3, 4]"])) == (3, 4)
    assert sizes(recipe.override(["init_from=pretrained"])) == ()
    assert sizes(recipe.override(["model=tcnca-text"])) == ()
    (tmp_path / "own.yaml").write_text("extends: classify\nmodel: {ngram_sizes: [4]}")
    assert sizes(load_recipe(str(tmp_path / "own.yaml"))) == (4,)
    with pytest.raises(ConfigError, match=r"tokens\.optimizer\.lr: expected a key of model"):
        recipe.override(["tokens.lr=1"])
    with pytest.raises(ConfigError, match="ngram_sizes"):
        recipe.override(["ngram_sizes=[2]"])._model(values)


def test_warmup_that_is_longer_than_the_run_is_cut() -> None:
    recipe = load_recipe("enwik8-tcnca").override(["steps=1000"])
    assert recipe.schedule.effective_warmup_steps == 100
    assert scheduled_lr(0.1, 1.0, recipe.schedule) == pytest.approx(1.0)
    assert scheduled_lr(1.0, 1.0, recipe.schedule) == 0.0
    assert ScheduleConfig(max_steps=10, warmup_steps=10).effective_warmup_steps == 10
    assert ScheduleConfig(max_steps=3, warmup_steps=10).effective_warmup_steps == 0


def own_file(folder: Path, name: str) -> Path:
    """Write custom data for one of the recipes in `OWN`."""
    name = {"finetune": "lm"}.get(name, name)
    path = folder / {"lm": "book.txt", "classify": "a.csv", "retrieve": "p.csv"}.get(name, f"{name}.npz")
    values = np.random.default_rng(0).normal(size=(40, 30, 2))
    texts = {
        "lm": "so many words " * 500,
        "classify": "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(60)),
        "retrieve": "text1,text2,label\n" + "".join(f"text {n},other {n},{n % 2}\n" for n in range(60)),
    }
    if name in texts:
        path.write_text(texts[name])
    else:
        np.savez(path, values=values, **({"targets": values.mean((1, 2))} if name == "regress" else {}))
    return path


def test_data_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"classification.*language|language.*classification"):
        load_recipe("lm").override([f"data={own_file(tmp_path, 'classify')}"]).build_task()


def test_command_lists_and_prints() -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["recipes"], env={"COLUMNS": "80"}).output
    assert all(name in listed for name in builtin())
    assert "TCNCA (paper): " in listed
    assert "TCNCA-linear (ours, recommended): " in listed
    printed = runner.invoke(app, ["recipes", "pathx-mega", "lr=1e-4", "num_layers=2"]).output
    assert Recipe.from_dict(yaml.safe_load(printed)) == load_recipe("pathx-mega").override(["lr=1e-4", "num_layers=2"])
    assert "  lr: 0.0001                      # Peak learning rate" in printed
    assert "#   num_layers: 2" in printed
    assert "#   d_model: 64" in printed
    for arguments, message in (
        (["pathx-mega", "lerning_rat=1"], "lerning_rat: did you mean optimizer.lr?"),
        (["pathx-mega", "num_layers=0"], "model.num_layers: expected an integer in [1, 1024], got 0"),
        (["pathx-maga"], "recipe: did you mean pathx-mega?"),
    ):
        wrong = runner.invoke(app, ["recipes", *arguments])
        assert wrong.exit_code == 1
        assert message in wrong.output
