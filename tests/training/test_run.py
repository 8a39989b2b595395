"""A run gives the same however it is interrupted, and keeps what it promises."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import CheckpointError, ConfigError, TrainingError
from tcnca.training import Processes, Recipe, Run, Watch, evaluate, load_recipe
from tcnca.training.files import alone_in
from tcnca.training.log import read_log
from tcnca.training.meter import Meter
from tcnca.training.parallel import parallelize
from tests.examples import small_model
from tests.training.tiny import MODEL, SMALL, arguments, assert_same, recipe, run, weights


class Stopped(Run):
    """A run that a signal reaches after some updates."""

    after = 0

    def _update(self, *arguments: Any) -> Any:
        if self.progress.step + 1 == self.after:
            os.kill(os.getpid(), signal.SIGTERM)
        return super()._update(*arguments)


@pytest.mark.parametrize("after", [1, 5, 8])
@pytest.mark.parametrize("changes", [[], ["grad_accum_steps=3"], ["model=mega-recall-64"]], ids=str)
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
        run(tmp_path / n, recipe("model.dropout=0", f"grad_accum_steps={n}", "max_steps=4", "eval.every=0"))
        for n in "134"
    ]
    for each in found:
        each.train()
    for other in found[1:]:
        for name, tensor in weights(found[0].model).items():
            torch.testing.assert_close(weights(other.model)[name], tensor, rtol=1e-4, atol=1e-6)


def test_recomputing_changes_nothing(tmp_path: Path) -> None:
    plain, again = (
        run(tmp_path / flag, recipe(f"activation_checkpointing={flag}", "max_steps=4")) for flag in ("false", "true")
    )
    plain.train()
    again.train()
    assert_same(weights(plain.model), weights(again.model))


def test_cheap_recomputing_is_of_one_run_and_needs_compiled_layers() -> None:
    group = Processes(device=torch.device("cpu"))
    kept = dataclasses.replace(recipe().runtime, compile=True)
    for runtime, share in (
        (kept, 1.0),
        (dataclasses.replace(kept, activation_checkpointing="cheap"), 0.9),
        (kept, 1.0),
    ):
        parallelize(small_model(), runtime, group)
        assert torch._functorch.config.activation_memory_budget == share
    with pytest.raises(ConfigError, match=r"runtime.activation_checkpointing: got 'cheap' without runtime.compile"):
        recipe("activation_checkpointing=cheap")


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
    score = evaluate(tcnca.load(best), one.task, "validation")
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
    # Three per cent of so short a time is less than one checkpoint takes on a busy machine.
    wanted = recipe("max_steps=1000000", "warmup_steps=100000", "eval.every=0", "checkpoint.every=0", "log_every=1")
    one = run(tmp_path, wanted, budget=4.0)
    rates: list[float] = []
    update = one._update

    def noted(step: int, rate: float, batches: Any) -> Any:
        rates.append(rate)
        return update(step, rate, batches)

    one._update = noted  # type: ignore[method-assign]
    result = one.train()
    assert result.seconds == pytest.approx(4.0, rel=0.03)
    assert max(rates) > 0.9 * wanted.optimizer.lr
    assert rates[-1] < 0.05 * wanted.optimizer.lr


def test_a_budget_is_validated_to_its_end(tmp_path: Path) -> None:
    """However many updates it has time for."""
    one = run(tmp_path, recipe("max_steps=8", "eval.every=4", "checkpoint.every=0"), budget=2.0)
    validated: list[int] = []
    validate = one._validate

    def noted(meter: Meter) -> None:
        validated.append(one.progress.step)
        validate(meter)

    one._validate = noted  # type: ignore[method-assign]
    result = one.train()
    assert result.step > 12
    assert validated == list(range(4, result.step + 1, 4))


def test_all_processes_leave_out_the_same_time_to_compile(tmp_path: Path) -> None:
    """Otherwise their learning rates, and with them their weights, would differ."""

    class Slower(Processes):
        """Stands for many, another of which needs ten seconds longer for everything."""

        def greatest(self, values: torch.Tensor) -> torch.Tensor:
            return values + 10 if values.dtype == torch.float64 and values.ndim == 0 and values > 0 else values

    one = Run(recipe("max_steps=4", "eval.every=0"), tmp_path, Slower(), Watch(tmp_path, None))
    one.compiled = True
    one.train()
    assert one.progress.compiling > 30


def test_stopped_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer, too, goes on as one that has done nothing."""
    whole = run(tmp_path / "whole", recipe())
    whole.train()
    first = run(tmp_path / "parts", recipe())
    with monkeypatch.context() as patch:
        patch.setattr("tcnca.training.run.signals", lambda: contextlib.nullcontext(["SIGTERM"]))
        assert first.train().step == 0
    second = run(tmp_path / "parts", recipe())
    second.resume()
    second.train()
    assert_same(weights(second.model), weights(whole.model))


def test_what_is_done_again_is_logged_as_before(tmp_path: Path) -> None:
    """Also where a line of the log would begin before the checkpoint and end after it."""
    changes = ["log_every=5", "checkpoint.every=4", "checkpoint.keep=9", "eval.every=0"]
    assert CliRunner().invoke(app, arguments(tmp_path, *changes)).exit_code == 0
    whole = [(line["step"], line["loss"], line["tokens"]) for line in read_log(tmp_path) if "loss" in line]
    result = json.loads((tmp_path / "result.json").read_text())
    for name in ("checkpoints/step-000000012", "checkpoints/best.json", "result.json"):
        shutil.rmtree(path) if (path := tmp_path / name).is_dir() else path.unlink()
    assert CliRunner().invoke(app, [*arguments(tmp_path, *changes), "--resume"]).exit_code == 0
    assert [(line["step"], line["loss"], line["tokens"]) for line in read_log(tmp_path) if "loss" in line] == whole
    assert json.loads((tmp_path / "result.json").read_text())["tokens"] == result["tokens"] == 12 * 12 * 17


def test_a_best_checkpoint_that_is_gone_is_replaced(tmp_path: Path) -> None:
    run(tmp_path, recipe()).train()
    for place in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(place)
    again = run(tmp_path, recipe())
    assert again.checkpoints.best_score() is None
    again.train()
    assert again.checkpoints.best() is not None


def test_other_recipes_and_data_are_not_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path, recipe()).train()
    with pytest.raises(CheckpointError, match="was begun with another recipe, which differs in optimizer"):
        run(tmp_path, recipe("lr=0.5")).resume()


def test_a_file_of_ones_own_that_was_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    rows = [f"{word * 5} {number},{word}" for number in range(20) for word in ("yes", "no")]
    table = tmp_path / "my.csv"
    table.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    wanted = load_recipe("classify").override([*SMALL, *MODEL, f"data={table}", "eval.every=0"])
    assert wanted.build_task().data.digest == wanted.build_task().data.digest != ""
    run(tmp_path / "run", wanted).train()
    run(tmp_path / "run", wanted).resume()
    table.write_text("\n".join(["text,label", *rows[:-2], "other,yes", "another,no"]), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"was begun with other data than is now in .*my.csv"):
        run(tmp_path / "run", wanted).resume()


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    wanted = arguments(tmp_path / "run")
    printed = runner.invoke(app, [*wanted, "--print-config"])
    assert "updates: 12" in printed.output
    assert not (tmp_path / "run").exists()
    done = runner.invoke(app, wanted)
    assert done.exit_code == 0, done.output
    assert re.search(r"test +accuracy +0\.", done.output)
    again = runner.invoke(app, wanted)
    assert again.exit_code == 1
    assert "holds a run already; --resume goes on with it" in again.output
    measured = runner.invoke(app, ["eval", str(tmp_path / "run"), "--device", "cpu"])
    score = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]["test"]["value"]
    assert f"test: accuracy {score:.4f} (of 500)" in measured.output
    wrong = runner.invoke(app, ["eval", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "is no run; `tcnca train` makes one" in wrong.output
    budget = runner.invoke(app, [*wanted, "--budget", "soon"])
    assert budget.exit_code == 1
    for command in ("train", "eval"):
        given = arguments(tmp_path / "other") if command == "train" else ["eval", str(tmp_path / "run")]
        device = runner.invoke(app, [*given, "--device", "tpu"])
        assert device.exit_code == 1
        assert "Error: --device: got tpu, allowed are cpu" in device.output
    same = runner.invoke(app, ["eval", str(tmp_path / "run"), "num_layers=4"])
    assert same.exit_code == 1
    assert "model: is as it was trained, allowed are keys of data, evaluation and engine" in same.output
    # A score that cannot be written is told none the less.
    (tmp_path / "run" / "eval-test.json").unlink()
    (tmp_path / "run" / "eval-test.json" / "in the way").mkdir(parents=True)
    unwritten = runner.invoke(app, ["eval", str(tmp_path / "run"), "--device", "cpu"])
    assert unwritten.exit_code == 1
    assert f"test: accuracy {score:.4f}" in unwritten.output


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path, "run"):
        refused = CliRunner().invoke(app, arguments(tmp_path))
    assert refused.exit_code == 1
    assert "another run is at work there; wait for it, or choose another --out" in refused.output
    assert CliRunner().invoke(app, arguments(tmp_path)).exit_code == 0


def test_a_run_that_began_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(wanted: Recipe, folder: Path, *more: Any) -> Run:
        folder.mkdir()
        (folder / "recipe.yaml").write_text("about: of another", encoding="utf-8")
        return Run(wanted, folder, *more)

    monkeypatch.setattr(sys.modules["tcnca.cli.train"], "Run", late)
    refused = CliRunner().invoke(app, arguments(tmp_path / "run"))
    assert refused.exit_code == 1
    assert "holds a run already" in refused.output
    assert (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8") == "about: of another"


def test_the_time_to_compile_is_not_the_time_to_warm_up(tmp_path: Path) -> None:
    """With a budget, the schedule begins when the code of the first updates is made."""
    one = run(tmp_path, recipe("max_steps=1000", "warmup_steps=500", "eval.every=0"), budget=4.0)
    one.compiled = True
    rates: list[float] = []
    update = one._update

    def slow(step: int, rate: float, batches: Any) -> Any:
        rates.append(rate)
        time.sleep(0.6 if step < 3 else 0.01)
        return update(step, rate, batches)

    one._update = slow  # type: ignore[method-assign]
    result = one.train()
    assert result.seconds == pytest.approx(4.0, rel=0.03)
    # Nearly half of the time is gone; the learning rate has not begun to rise.
    assert max(rates[:4]) < 0.05 * one.recipe.optimizer.lr
    assert max(rates) > 0.9 * one.recipe.optimizer.lr


@pytest.mark.parametrize("after", [4, 7])
def test_lines_of_the_log_do_not_depend_on_where_a_run_stopped(tmp_path: Path, after: int) -> None:
    changes = ("log_every=5", "checkpoint.every=0", "eval.every=0", "max_steps=13")
    logs: list[dict[int, tuple[float, float, float]]] = []
    for stops in (False, True):
        folder = tmp_path / str(stops)
        wanted = recipe(*changes)
        with Watch(folder, Console(quiet=True)) as watch:
            one = Stopped(wanted, folder, Processes(), watch)
            one.after = after if stops else 0
            assert one.train().stopped == ("SIGTERM" if stops else "")
        if stops:
            with Watch(folder, Console(quiet=True)) as watch:
                two = Run(wanted, folder, Processes(), watch)
                two.resume()
                two.train()
        lines = [line for line in read_log(folder) if "loss" in line]
        logs.append({line["step"]: (line["loss"], line["norm"], line["tokens"]) for line in lines})
    assert list(logs[0]) == [5, 10, 13]
    assert logs[0] == logs[1]


def test_a_trained_model_is_loaded_by_its_run(tmp_path: Path) -> None:
    one = run(tmp_path, recipe())
    one.train()
    assert_same(weights(tcnca.load(tmp_path)), weights(one.model))
