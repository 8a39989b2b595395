"""A sweep runs every combination once, loses nothing, and tells what its runs have told."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.training import load_recipe
from tcnca.training.sweeps.plan import folder_name, parse_grid, plan
from tests.training.tiny import MODEL, SMALL, assert_same, environment, latest, recipe, run, weights

PAPER = ["recall-64-10-tcnca-simple", "lr=1e-5,1e-4,1e-3,1e-2,1e-1", "dropout=0,0.1"]
FAILING = "1e38"
"""A learning rate after which nothing is finite any more."""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,1e-4", ["1e-5", "1e-4"]),
        ("1", ["1"]),
        ("", [""]),
        ("[0.9,0.98],[0.9,0.999]", ["[0.9,0.98]", "[0.9,0.999]"]),
        ("[2,3]", ["[2,3]"]),
        ("[[1,2],[3]], {a: [4,5], b: 6} ,7", ["[[1,2],[3]]", "{a: [4,5], b: 6}", "7"]),
        ("'a,b.txt',c.txt", ["'a,b.txt'", "c.txt"]),
        ("it's,ours", ["it's", "ours"]),
    ],
)
def test_values_are_cut_at_outer_commas(text: str, values: list[str]) -> None:
    assert parse_grid([f"key={text}"]) == {"key": values}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "got no key to sweep over, allowed is key=value,value"),
        (["num_layers"], r"layers: got no value, .*num_layers=1,2"),
        (["num_layers=1,2", "num_layers=3"], "layers: is given twice; give all its values at once: num_layers=1,2,3"),
        (["betas=[0.9,0.98"], r"betas: got \[0\.9,0\.98, in which a bracket"),
        (["betas=0.9]"], "a bracket or a quote has no partner"),
        (["num_layers=1,,2"], "layers: got 1,,2, in which a value is empty"),
        (["num_layers=1,"], "a value is empty"),
        (["lerning_rate=1,2"], r"did you mean optimizer\.lr\?"),
        (["lr=0.1,fast"], r"optimizer\.lr: got 'fast'"),
        (["lr=1e-3,0.001"], "lr: got 1e-3 and 0.001, which are the same"),
        (["lr=0.1,0.2", "optimizer.lr=0.3"], "lr: is given again under another name"),
        (["lr=0.1", "optimizer.lr=0.3"], "lr: is given again under another name"),
        (["model.layers=1,two"], r"model\.layers=two: layers: got 'two'"),
        (["model.lyers=1,2"], r"did you mean layers\?"),
        (["data=recall-16,nothing-there"], "nothing-there"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan("recall-small", changes, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_names_are_readable_and_fit_for_any_file_system() -> None:
    assert folder_name({"lr": "1e-3", "dropout": "0.1"}) == "lr=0.001,dropout=0.1"
    assert folder_name({"lr": "1e-5"}) == "lr=1e-05"
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


def test_help_shows_an_example() -> None:
    shown = " ".join(CliRunner().invoke(app, ["sweep", "--help"]).output.split())
    assert f"tcnca sweep {' '.join(PAPER)}" in shown


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A real sweep of four runs, two at a time, of which one fails."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        done = CliRunner().invoke(app, arguments(folder, "--jobs", "2"))
    assert done.exit_code == 1, done.output
    return folder, done.output


def arguments(folder: Path, *more: str, grid: tuple[str, ...] = ()) -> list[str]:
    grid = grid or (f"lr=1e-2,{FAILING}", "nonfinite=stop,skip")
    return ["sweep", "recall-small", *grid, *SMALL, *MODEL, "--device", "cpu", "--out", str(folder), *more]


@pytest.mark.slow
def test_the_tables_say_what_the_runs_say(swept: tuple[Path, str]) -> None:
    folder, output = swept
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    points = [("1e-2", "stop"), ("1e-2", "skip"), (FAILING, "stop"), (FAILING, "skip")]
    assert [(row["lr"], row["nonfinite"]) for row in rows] == points
    assert [row["state"] for row in rows] == ["done", "done", "failed", "done"]
    for row in rows:
        if row["state"] == "done":
            result = json.loads((Path(row["folder"]) / "result.json").read_text())
            lines = [json.loads(line) for line in (Path(row["folder"]) / "log.jsonl").read_text().splitlines()]
            assert float(row["validation"]) == result["scores"]["validation"]["value"]
            assert float(row["test"]) == result["scores"]["test"]["value"]
            seen = [line["score"] for line in lines if line.get("split") == "validation"]
            assert float(row["best_validation"]) == max(*seen, float(row["validation"]))
            assert (int(row["max_steps"]), float(row["seconds"])) == (result["step"], result["seconds"])
            assert (row["metric"], row["recipe.updates"]) == ("accuracy", "12")
            assert float(row["tokens_per_second"]) > 0
            assert load_recipe(f"{row['folder']}/recipe.yaml") == recipe(
                f"lr={row['lr']}", f"nonfinite={row['nonfinite']}"
            )
    failed = rows[2]
    assert "the loss or the gradient is not finite" in failed["error"]
    assert (failed["validation"], failed["test"]) == ("", "")
    assert failed["error"] in output
    assert failed["error"] in (Path(failed["folder"]) / "sweep.log").read_text()

    page = (folder / "sweep.md").read_text()
    body = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    done = sorted((row for row in rows if row["state"] == "done"), key=lambda row: -float(row["validation"]))
    assert [line[3].strip("*") for line in body] == [*(f"{float(row['validation']):.4f}" for row in done), "–"]
    assert [line[0].startswith("**") for line in body] == [True, False, False, False]
    best = done[0]
    assert f"Its test accuracy is {float(best['test']):.4f}" in page
    assert f"tcnca train recall-small lr={best['lr']} nonfinite={best['nonfinite']}" in page
    assert f"--out {folder} --jobs 2 --device cpu" in page
    with Image.open(folder / "sweep.png") as picture:
        assert picture.width > 1000


@pytest.mark.slow
def test_what_is_done_is_not_done_again(swept: tuple[Path, str]) -> None:
    """Also where a smaller sweep would have named its runs otherwise."""
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    again = CliRunner().invoke(app, arguments(folder, grid=("lr=1e-2", "nonfinite=stop,skip")))
    assert again.exit_code == 0, again.output
    assert "2 of them done already" in again.output
    assert "2 runs there that are not of this sweep" in again.output
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*")} == before
    wider = CliRunner().invoke(app, arguments(folder, "--dry-run", grid=("lr=1e-2,0.5,1e38",)))
    assert [line.split()[0] for line in wider.output.splitlines()] == ["done", "waiting", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["max_steps=13"],
            r"nonfinite=stop: holds a run of another recipe, which differs in schedule\.updates \(it has",
        ),
        (["--budget", "5m"], r"nonfinite=stop: holds a run of another budget, none, now 5m"),
        (["--budget", "soon"], "budget: got 'soon'"),
        (["--device", "tpu"], "--device: got tpu, allowed are cpu"),
    ],
)
def test_other_runs_are_not_mixed_in(swept: tuple[Path, str], more: list[str], message: str) -> None:
    wanted = [argument for argument in arguments(swept[0]) if argument != "max_steps=12" or "max_steps=13" not in more]
    refused = CliRunner().invoke(app, [*wanted, *more])
    assert refused.exit_code == 1
    assert re.search(message, refused.output), refused.output


@pytest.mark.slow
def test_interrupted_it_goes_on(tmp_path: Path) -> None:
    grid = ("lr=1e-2,1e-3", "max_steps=250", "log_every=5", "eval.every=0", "checkpoint.every=0")
    small = [change for change in SMALL if change.partition("=")[0] not in {each.partition("=")[0] for each in grid}]
    start = [sys.executable, "-m", "tcnca", "sweep", "recall-small", *grid, *small, *MODEL]
    command = [*start, "--device", "cpu", "--out", str(tmp_path / "sweep")]
    first = tmp_path / "sweep" / "lr=0.01"
    # As a terminal does it: the signal reaches the sweep and its runs.
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not (first / "log.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopped by SIGINT; nothing is lost, go on with\ntcnca sweep recall-small" in said
    with (tmp_path / "sweep" / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["stopped", "waiting"]
    assert 0 < int(rows[0]["max_steps"]) < 250
    assert latest(first).name == f"step-{int(rows[0]['updates']):09}"

    command += ["--jobs", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    assert "lr=0.01: goes on" in done.stdout
    assert "lr=0.001: starts" in done.stdout
    whole = run(tmp_path / "whole", recipe(*grid[1:], "lr=1e-2"))
    whole.train()
    assert_same(weights(tcnca.load(latest(first))), weights(whole.model))
