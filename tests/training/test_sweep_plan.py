"""The plan of a sweep: every combination once, and mistakes are named before anything runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tcnca import SequenceModel
from tcnca.cli import app
from tcnca.errors import ConfigError
from tcnca.layers import LRUConfig, S4DConfig, S5Config, SGConvConfig
from tcnca.recipes import builtin
from tcnca.training import load_recipe
from tcnca.training.sweeps.plan import Sweep, folder_name, load_variants, parse_grid, plan
from tests.training.tiny import write_every_set

PAPER = ["recall-64-10-tcnca-simple", "lr=1e-5,1e-4,1e-3,1e-2,1e-1", "dropout=0,0.1"]
MIXERS = {"s4d": S4DConfig, "s5": S5Config, "lru": LRUConfig, "sgconv": SGConvConfig}
FILE = """
about: One line.
recipe: recall-64-10-mega
variants:
  plain: []
  wide: [d_model=48, 'betas=[0.9, 0.99]']
  none: [model.mixer=null]
"""


def written(folder: Path, text: str = FILE) -> str:
    path = folder / "some.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def planned(folder: Path, *changes: str, text: str = FILE, only: Sequence[str] = (), **more: Any) -> Sweep:
    variants = load_variants(written(folder, text), only) if text else None
    return plan("recall-small", changes, folder / "sweep", variants=variants, **more)


def test_values_are_split_at_outer_commas() -> None:
    texts = {"a": "1e-5, 1e-4", "b": "1", "c": "[0.9,0.98],[0.9,0.999]", "d": "{e: 4, f: 6} ,7", "e": "x=1"}
    assert parse_grid(f"{key}={text}" for key, text in texts.items()) == {
        "a": ["1e-5", "1e-4"],
        "b": ["1"],
        "c": ["[0.9,0.98]", "[0.9,0.999]"],
        "d": ["{e: 4, f: 6}", "7"],
        "e": ["x=1"],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "expected keys to sweep over, key=value,value"),
        (["num_layers"], r"num_layers: expected key=value, for example num_layers=1,2"),
        (["num_layers=1,2", "num_layers=3"], "give all its values at once: num_layers=1,2,3"),
        (["betas=[0.9,0.98"], r"^betas: expected YAML \(.*\), got '\[0\.9,0\.98'"),
        (["num_layers=1,,2"], "num_layers=: num_layers: expected a value"),
        (["leraning_rate=1,2"], "leraning_rate"),
        (["lr=0.1,fast"], r"lr=fast: optimizer\.lr: .*fast"),
        (["lr=1e-3,0.001"], "lr=0.001: is the same as lr=0.001"),
        (["lr=0.1,0.2", "optimizer.lr=0.3"], r"lr and optimizer\.lr: expected one of them"),
        (["model.num_lyers=1,2"], r"did you mean .*num_layers\?"),
        (["data=recall-16,nothing-there"], "nothing-there"),
        ([f"{key}={','.join(map(str, range(1, 60)))}" for key in ("seed", "lr", "end")], r"10,000 runs, got 205,379"),
        ([f"seed={',' * 100_000}"], r"at most 10,000 runs, got 100,001"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_mistakes_are_named_before_anything_runs(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("recall-small", changes, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_names_are_readable_and_fit_any_file_system() -> None:
    assert folder_name({"lr": "1e-3", "dropout": "0.1"}) == "lr=0.001,dropout=0.1"
    assert folder_name({"lr": "1e-5"}) == "lr=1e-05"
    # A key of the command line that is not UTF-8.
    assert folder_name({"l\udcffr": "1"}).startswith("l-r=1-")
    assert folder_name({"betas": "[0.9, 0.98]", "compile": "true"}) == "betas=[0.9,0.98],compile=true"
    names = [folder_name({"data": text}) for text in ("a/b.txt", "a-b.txt", "a:b.txt", "ä.txt", "x" * 400, "x" * 401)]
    assert len(set(names)) == len(names)
    assert names[0].startswith("data=a-b.txt-")
    assert all(re.fullmatch(r"[A-Za-z0-9_.=,+\[\]-]{1,120}", name) for name in names)


def test_the_grid_of_the_paper_is_one_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["sweep", *PAPER, "--out", str(tmp_path / "sweep"), "--dry-run"])
    assert done.exit_code == 0, done.output
    commands = [shlex.split(line) for line in done.output.splitlines()]
    assert [line[0] for line in commands] == ["waiting"] * 10
    found = [load_recipe(line[3]).override(line[4:6]) for line in commands]
    expected = [(rate, dropout) for rate in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1) for dropout in (0, 0.1)]
    assert [(each.optimizer.lr, each.model["dropout"]) for each in found] == expected
    assert len({line[7] for line in commands}) == 10
    assert not (tmp_path / "sweep").exists()


def test_each_variant_is_combined_with_all_values(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "seed=0,1", "max_steps=200", jobs=2)
    names = [f"variant={name},seed={seed}" for name in ("plain", "wide", "none") for seed in (0, 1)]
    assert [point.folder.name for point in sweep.points] == names
    wide = ["d_model=48", "betas=[0.9, 0.99]", "seed=1", "max_steps=200"]
    assert sweep.points[3].changes == wide
    assert sweep.train_command(sweep.points[3]) == ["train", "recall-small", *wide]
    assert sweep.points[3].recipe == load_recipe("recall-small").override(wide).for_device("cpu")
    assert sweep.points[0].recipe == load_recipe("recall-small").override(["seed=0", "max_steps=200"]).for_device("cpu")
    assert (sweep.varied, sweep.compared, sweep.seed) == (["variant", "seed"], ["variant"], "seed")
    variants = f"--variants {tmp_path}/some.yaml --only plain,wide,none"
    end = f"seed=0,1 max_steps=200 {variants} --out {tmp_path}/sweep --jobs 2"
    assert sweep.command == f"tcnca sweep recall-small {end}"


def test_selected_variants_keep_their_names(tmp_path: Path) -> None:
    sweep = planned(tmp_path, only=["none", "plain"])
    assert [point.folder.name for point in sweep.points] == ["variant=plain", "variant=none"]
    assert f"--variants {tmp_path}/some.yaml --only plain,none" in sweep.command
    # Also if there is only one, so that others can be added.
    assert planned(tmp_path, only=["wide"]).points[0].folder.name == "variant=wide"


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("[a]", r"some\.yaml: variants: expected names with lists of changes, got \['a'\]"),
        ("{a: }", r"variant a: expected a list .*\[\] for no change, got None"),
        ("{a: [layers: 2]}", r"variant a: expected a list .*got \[{'layers': 2}\]"),
        ("{no: [], yes: []}", "expected a name .*quotes.*got False"),
        ("{'a,b': []}", "expected a name of letters, .*got 'a,b'"),
        ("{a: [], a: [num_layers=1]}", "the key a is given twice, in line 1"),
        ("{a: [], b: [num_lyers=1]}", r"variant b: num_lyers: .*num_layers\?"),
        ("{a: [lr=fast]}", r"variant=a: optimizer\.lr: .*fast"),
        ("{a: [d_model=1, model.d_model=2]}", r"variant a: d_model and model\.d_model: expected one of them"),
        ("{a: [num_layers=1], b: [model.num_layers=1]}", "variant=b: is the same as variant=a"),
        ("{a: [], b: [model.mixer.convolutions=1]}", "variant=b: is the same as variant=a"),
        ("{a: [], b: [batch.seed=1]}", r"variant b: changes batch\.seed, but seed is given too"),
    ],
)
def test_mistakes_name_the_variant_before_anything_runs(tmp_path: Path, variants: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, "seed=0", text=f"variants: {variants}\n")
    assert not (tmp_path / "sweep").exists()


def test_unknown_variants_and_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variants: .*did you mean mixers\?"):
        load_variants("mixer")
    with pytest.raises(ConfigError, match=r"variants: .*nothing\.yaml"):
        load_variants("nothing.yaml")
    with pytest.raises(ConfigError, match=r"some\.yaml: abuot: did you mean about\?"):
        load_variants(written(tmp_path, "abuot: x\nvariants: {a: []}"))
    with pytest.raises(ConfigError, match=r"--only: did you mean plain\?"):
        load_variants(written(tmp_path), ["plane"])
    with pytest.raises(ConfigError, match=r"^variant: expected a key of Recipe"):
        planned(tmp_path, "variant=plain")
    alone = CliRunner().invoke(app, ["sweep", "recall-small", "seed=1,2", "--only", "a"])
    assert alone.exit_code == 1
    assert "--only: expected --variants with it" in alone.output


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_every_set(folder)
    return folder


@pytest.mark.parametrize("name", builtin("variants"))
def test_variants_of_the_library_fit_their_recipe(name: str, sets: Path, tmp_path: Path) -> None:
    variants = load_variants(name)
    assert variants.about
    sweep = plan(variants.recipe, [f"data.folder={sets}", "seed=0,1"], tmp_path, variants=variants)
    assert len(sweep.points) == 2 * len(variants.changes)


@pytest.mark.parametrize("name", ["arena", "small-arena", "image-arena"])
def test_members_of_an_arena_build(name: str, sets: Path, tmp_path: Path) -> None:
    variants = load_variants(name)
    baselines = {"s4d", "s5", "lru", "sgconv", "transformer"}
    assert {"tcnca", "tcnca-linear", "mega", *baselines} < set(variants.changes)
    for point in plan(variants.recipe, [f"data.folder={sets}"], tmp_path, variants=variants).points:
        config, member = point.recipe.model_config(), point.values["variant"]
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in SequenceModel(config).parameters())
        if name != "image-arena":
            expected, num_layers = {"arena": (19_632_896, 6), "small-arena": (385_536, 3)}[name]
            assert parameters == pytest.approx(expected, rel=0.04), member
            assert config.num_layers == num_layers
        if member in baselines - {"transformer"} or member.endswith("-gated"):
            kind, _, gated = member.partition("-")
            assert type(config.mixer) is MIXERS[kind]
            assert (config.gated, config.attention is None) == (bool(gated), not gated)
        if member.startswith("transformer"):
            assert config.attention is not None
            assert config.attention.memory == (config.attention.chunk_size is not None) == member.endswith("xl")
            assert config.mixer is None
            if name != "image-arena" and config.attention.chunk_size is None:
                assert point.recipe.data.task["carry_state"] is False


def test_dry_run_prints_the_commands_of_variants(tmp_path: Path) -> None:
    arguments = ["sweep", "recall-small", "--variants", written(tmp_path), "--out", str(tmp_path / "sweep")]
    done = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert done.exit_code == 0, done.output
    note, *found = [shlex.split(line) for line in done.output.splitlines()]
    # They are for another recipe.
    assert (note[0], note[-1]) == ("note:", "recall-small")
    start = ["waiting", "tcnca", "train", "recall-small"]
    assert found == [
        [*start, *changes, "--out", f"{tmp_path}/sweep/variant={name}"]
        for name, changes in load_variants(written(tmp_path)).changes.items()
    ]
