"""A run gives the same however it is interrupted, and on any number of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import CheckpointError, TrainingError
from tcnca.training import Checkpoints, Processes, Recipe, Run, Watch, evaluate, load_recipe

SMALL = [
    "data=recall-16",
    "updates=12",
    "warmup=4",
    "batch.size=12",
    "log_every=3",
    "evaluation.every=6",
    "checkpoint.every=4",
]
MODEL = ["layers=1", "width=8", "feed_forward=8", "key_width=4", "value_width=8", "model.chunk=8", "model.dropout=0.1"]


def recipe(*changes: str) -> Recipe:
    return load_recipe("recall-small").override([*SMALL, *MODEL, *changes])


def run(folder: Path, wanted: Recipe, **more: Any) -> Run:
    return Run(wanted, folder, Processes(), Watch(folder, None), **more)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, msg=name)


class Stopped(Run):
    """A run that a signal reaches after some updates."""

    after = 0

    def _update(self, *arguments: Any) -> Any:
        if self.progress.step + 1 == self.after:
            os.kill(os.getpid(), signal.SIGTERM)
        return super()._update(*arguments)


@pytest.mark.parametrize("after", [1, 5, 8])
@pytest.mark.parametrize("changes", [[], ["accumulate=3"], ["model=mega-recall-64"]], ids=str)
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path, after: int, changes: list[str]) -> None:
    whole = run(tmp_path / "whole", recipe(*changes))
    assert whole.train().stopped == ""
    first = Stopped(recipe(*changes), tmp_path / "parts", Processes(), Watch(tmp_path / "parts", None))
    first.after = after
    result = first.train()
    assert (result.stopped, result.step) == ("SIGTERM", after)
    second = run(tmp_path / "parts", recipe(*changes))
    second.resume()
    assert second.progress.step == after
    assert second.train().step == 12
    assert_same(weights(second.model), weights(whole.model))
    # The saved model is the one that was trained.
    latest = second.checkpoints.latest()
    assert latest is not None
    assert_same(weights(tcnca.load(latest)), weights(whole.model))


def test_accumulation_is_the_update_of_the_whole_batch(tmp_path: Path) -> None:
    found = [
        run(tmp_path / n, recipe("model.dropout=0", f"accumulate={n}", "updates=4", "evaluation.every=0"))
        for n in "134"
    ]
    for each in found:
        each.train()
    for other in found[1:]:
        for name, tensor in weights(found[0].model).items():
            torch.testing.assert_close(weights(other.model)[name], tensor, rtol=1e-4, atol=1e-6)


def test_recomputing_changes_nothing(tmp_path: Path) -> None:
    plain, again = (run(tmp_path / flag, recipe(f"recompute={flag}", "updates=4")) for flag in ("false", "true"))
    plain.train()
    again.train()
    assert_same(weights(plain.model), weights(again.model))


def test_what_is_kept(tmp_path: Path) -> None:
    one = run(tmp_path, recipe("checkpoint.every=2", "checkpoint.keep=2"))
    one.train()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    best = one.checkpoints.best()
    assert best is not None
    assert {"step-000000010", "step-000000012", best.name} == set(kept)
    assert not list((tmp_path / "checkpoints").glob(".step*"))


def test_the_best_checkpoint_has_the_weights_that_were_validated(tmp_path: Path) -> None:
    one = run(tmp_path, recipe())
    one.train()
    best = one.checkpoints.best()
    assert best is not None
    score = evaluate(tcnca.load(best), one.task, "validation", 50)
    assert score.value == pytest.approx(one.checkpoints.best_score())


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite(tmp_path: Path, nonfinite: str) -> None:
    # Looked at so rarely that the validation after the update comes first.
    one = run(tmp_path, recipe(f"nonfinite={nonfinite}", "log_every=50"))
    loss, update = one.task.loss, one._update

    def poisoned(step: int, rate: float, batches: Any) -> Any:
        one.task.loss = (lambda logits, batch: logits.sum() * torch.nan) if step == 5 else loss  # type: ignore[method-assign]
        return update(step, rate, batches)

    one._update = poisoned  # type: ignore[method-assign]
    if nonfinite == "skip":
        one.train()
        assert all(torch.isfinite(tensor).all() for tensor in weights(one.model).values())
        return
    with pytest.raises(
        TrainingError, match=r"update 5: .*seed 0, step 5\); the last good checkpoint is .*step-000000004"
    ):
        one.train()
    latest = one.checkpoints.latest()
    assert latest is not None
    assert one.checkpoints.best() is None
    assert all(torch.isfinite(tensor).all() for tensor in weights(tcnca.load(latest)).values())


def test_a_budget_ends_in_time_at_the_final_rate(tmp_path: Path) -> None:
    one = run(tmp_path, recipe("updates=1000000", "warmup=100000", "evaluation.every=0", "log_every=1"), budget=3.0)
    rates: list[float] = []
    update = one._update

    def noted(step: int, rate: float, batches: Any) -> Any:
        rates.append(rate)
        return update(step, rate, batches)

    one._update = noted  # type: ignore[method-assign]
    result = one.train()
    assert result.seconds == pytest.approx(3.0, rel=0.03)
    assert max(rates) > 0.9 * 0.003
    assert rates[-1] < 0.05 * 0.003


def test_other_recipes_and_data_are_not_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path, recipe()).train()
    with pytest.raises(CheckpointError, match="was begun with another recipe, which differs in optimiser"):
        run(tmp_path, recipe("learning_rate=0.5")).resume()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    one = run(tmp_path, recipe())
    one.train()
    latest = one.checkpoints.latest()
    assert latest is not None
    path = latest / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{latest.name}: cannot be read"):
        run(tmp_path, recipe()).resume()
    (latest / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"{latest.name}.state\.json: cannot be read"):
        run(tmp_path, recipe()).resume()


def command(folder: Path, *more: str, processes: int = 1) -> list[str]:
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [*start, "tcnca", "train", "recall-small", "--device", "cpu", "--out", str(folder), *SMALL, *MODEL, *more]


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(tmp_path: Path, parallel: str) -> None:
    """A checkpoint of two processes goes on with one, and the reverse."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    changes = ["model.dropout=0", f"parallel={parallel}"]

    def started(folder: str, processes: int, *more: str) -> None:
        subprocess.run(
            command(tmp_path / folder, *changes, *more, processes=processes),
            check=True,
            env=environment,
            timeout=200,
            capture_output=True,
        )

    started("one", 1)
    started("two", 2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    # The first half with two and the rest with one.
    for step in (8, 12):
        for path in (tmp_path / "two" / "checkpoints").glob(f"step-{step:09}*"):
            subprocess.run(["rm", "-r", str(path)], check=True)
    (tmp_path / "two" / "log.jsonl").unlink()
    started("two", 1, "--resume")
    expected = {step: loss for step, loss in losses(tmp_path / "one").items() if step > 9}
    found = losses(tmp_path / "two")
    assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_killed_at_any_instant_it_goes_on(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    changes = ["updates=60", "checkpoint.every=1", "evaluation.every=0"]
    subprocess.run(command(tmp_path / "whole", *changes), check=True, env=environment, capture_output=True)
    for delay in (0.15, 0.4, 0.7):
        process = subprocess.Popen(
            command(tmp_path / "killed", *changes, "--resume"),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        while not list((tmp_path / "killed").glob("checkpoints/step-*")) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(delay)
        process.kill()
        process.communicate()
    subprocess.run(command(tmp_path / "killed", *changes, "--resume"), check=True, env=environment, capture_output=True)
    models = [
        weights(tcnca.load(place))
        for name in ("whole", "killed")
        if (place := Checkpoints(tmp_path / name / "checkpoints", 2, Processes()).latest()) is not None
    ]
    assert_same(*models)


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["train", "recall-small", "--device", "cpu", "--out", str(tmp_path / "run"), *SMALL, *MODEL]
    printed = runner.invoke(app, [*arguments, "--print-config"])
    assert "updates: 12" in printed.output
    assert not (tmp_path / "run").exists()
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "test: accuracy 0." in done.output
    again = runner.invoke(app, arguments)
    assert again.exit_code == 1
    assert "holds a run already; --resume goes on with it" in again.output
    measured = runner.invoke(app, ["eval", str(tmp_path / "run"), "--device", "cpu"])
    score = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]["test"]["value"]
    assert f"test: accuracy {score:.4f} (of 500)" in measured.output
    wrong = runner.invoke(app, ["eval", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "is no run; `tcnca train` makes one" in wrong.output
    budget = runner.invoke(app, [*arguments, "--budget", "soon"])
    assert budget.exit_code == 1
