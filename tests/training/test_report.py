"""What a run leaves when it ends, well or not: its numbers, a page, its curves, and how to go on."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import TrainingError
from tcnca.training import Run
from tcnca.training.curves import best_of, draw_curves, series, smoothed
from tcnca.training.log import read_log
from tcnca.training.report import duration, mean_speed, read_result
from tests.training.tiny import arguments, assert_same, environment, latest, recipe, weights


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_what_a_run_leaves(tmp_path: Path) -> None:
    done = invoked(*arguments(tmp_path))
    assert done.exit_code == 0, done.output
    result, page = json.loads((tmp_path / "result.json").read_text()), (tmp_path / "report.md").read_text()
    for split in ("validation", "test"):
        score = result["scores"][split]
        assert (score["metric"], score["count"]) == ("accuracy", 500)
        assert f"| {split} | accuracy | {score['value']:.4f} | 500 |" in page
        row = next(line.split() for line in done.output.splitlines() if line.strip().startswith(f"{split} "))
        assert row == [split, "accuracy", f"{score['value']:.4f}", "500"]
    validations = {line["step"]: line["score"] for line in read_log(tmp_path) if line.get("split") == "validation"}
    assert list(validations) == [6, 12]
    assert validations[12] == result["scores"]["validation"]["value"]
    assert result["best"]["score"] == max(validations.values()) == validations[result["best"]["step"]]
    parameters = sum(parameter.numel() for parameter in tcnca.load(latest(tmp_path)).parameters())
    assert result["parameters"] == parameters
    task = recipe().build_task()
    tokens = sum(task.batch(step, 12).inputs.numel() for step in range(12))
    assert result["tokens"] == tokens
    rows = {"parameters": f"{parameters:,}", "tokens": f"{tokens:,}", "max_steps": "12", "seed": "0"}
    for wanted in (*(f"| {name} | {value} |" for name, value in rows.items()), "![", "(curves.png)"):
        assert wanted in page
    assert f"{parameters:,}" in done.output
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1440, 960)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".") and path.name != ".lock"]


def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Run._update

    def interrupted(self: Run, *more: Any) -> Any:
        if self.progress.step == 4:
            # Twice, as by one who is in a hurry.
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_update", interrupted)
        stopped = invoked(*arguments(tmp_path / "a run"))
    assert stopped.exit_code == 130
    assert "stopped by SIGINT after update 5; go on with" in stopped.output
    assert (tmp_path / "a run" / "curves.png").is_file()
    assert read_result(tmp_path / "a run") is None
    name, *again = shlex.split(stopped.output.strip().splitlines()[-1])
    assert name == "tcnca"
    resumed = invoked(*again)
    assert resumed.exit_code == 0, resumed.output
    assert "going on from update 5" in resumed.output
    assert invoked(*arguments(tmp_path / "whole")).exit_code == 0
    assert_same(*(weights(tcnca.load(latest(tmp_path / each))) for each in ("a run", "whole")))


def test_a_run_that_is_interrupted_while_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "evaluate", interrupted)
        stopped = invoked(*arguments(tmp_path, "eval.every=0"))
    assert stopped.exit_code == 130
    assert "stopped; go on with\ntcnca train recall-small " in stopped.output
    resumed = invoked(*arguments(tmp_path, "eval.every=0", "--resume"))
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 12


def test_a_run_that_fails_shows_its_curves(tmp_path: Path) -> None:
    failed = invoked(*arguments(tmp_path, "lr=1e30", "max_grad_norm=0", "log_every=1"))
    assert failed.exit_code == 1
    assert "the loss or the gradient is not finite" in failed.output
    assert (tmp_path / "curves.png").is_file()
    assert not (tmp_path / "result.json").exists()


def test_a_run_that_is_finished_is_not_gone_on_with(tmp_path: Path) -> None:
    assert invoked(*arguments(tmp_path)).exit_code == 0
    before = (tmp_path / "result.json").stat().st_mtime_ns, (tmp_path / "record.json").read_text()
    again = invoked(*arguments(tmp_path, "--resume"))
    assert again.exit_code == 0
    assert "the run is finished, after 12 updates, and there is nothing left to do" in again.output
    assert ((tmp_path / "result.json").stat().st_mtime_ns, (tmp_path / "record.json").read_text()) == before
    other = invoked(*arguments(tmp_path, "--resume", "lr=0.5"))
    assert other.exit_code == 1
    assert "was begun with another recipe, which differs in optimizer" in other.output


def test_a_budget_is_not_changed_on_the_way(tmp_path: Path) -> None:
    """The learning rate would jump."""
    assert invoked(*arguments(tmp_path, "--budget", "0.2s")).exit_code == 0
    more = invoked(*arguments(tmp_path, "--resume", "--budget", "0.6s"))
    assert more.exit_code == 1
    assert "was begun with a budget of 0.2s, which the learning rate follows; give the same again" in more.output
    enough = invoked(*arguments(tmp_path, "--resume", "--budget", "0.2s"))
    assert "the run is finished" in enough.output


def test_a_resumption_of_nothing_starts_afresh(tmp_path: Path) -> None:
    begun = invoked(*arguments(tmp_path / "new", "--resume"))
    assert begun.exit_code == 0, begun.output
    assert "new: holds no checkpoint to go on from; starting afresh" in begun.output


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(TrainingError, match=r"result\.json: cannot be read .*; remove it, and --resume makes it again"):
        read_result(tmp_path)


def test_data_of_no_use_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("words,mood\na,1\nb,2\n")
    refused = invoked("train", "classify", f"data={tmp_path / 'odd.csv'}", "--out", str(tmp_path / "run"))
    assert refused.exit_code == 1
    assert "say which with --text" in refused.output
    assert "(in a recipe: data.custom.text=…, data.custom.kind=language)" in refused.output
    assert not (tmp_path / "run").exists()


def test_an_evaluation_is_kept(tmp_path: Path) -> None:
    assert invoked(*arguments(tmp_path)).exit_code == 0
    measured = invoked("eval", str(tmp_path), "--split", "validation", "--device", "cpu", "eval.batch_size=100")
    assert measured.exit_code == 0, measured.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads((tmp_path / "eval-validation-eval.batch_size=100.json").read_text()) == {
        "split": "validation",
        "checkpoint": "step-000000012",
        "device": "cpu",
        "changes": ["eval.batch_size=100"],
        **result["scores"]["validation"],
    }


@pytest.mark.slow
def test_two_processes_leave_one_of_each(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tcnca"]
    done = subprocess.run(
        [*start, *arguments(tmp_path)], env=environment(), timeout=200, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("The run is in") == 1
    (part,) = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert part["processes"] == 2
    assert part["command"].startswith("torchrun --nproc-per-node 2 -m tcnca train recall-small data=recall-16 ")
    assert "2 processes" in (tmp_path / "report.md").read_text()
    again = subprocess.run(
        [*start, *arguments(tmp_path, "--resume")], env=environment(), timeout=200, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("the run is finished") == 1


def test_what_is_slow_to_load_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, tcnca.cli; print([name for name in ('matplotlib', 'tensorboard') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_curves_leave_the_plots_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0, "rate": 0.1, "tokens_per_second": 5.0}\n')
    code = (
        "import sys, matplotlib; from pathlib import Path; from tcnca.training.curves import draw_curves\n"
        "before = matplotlib.rcParams.copy()\n"
        f"draw_curves(Path({str(tmp_path)!r}), 'one', higher_is_better=True)\n"
        "print('matplotlib.pyplot' in sys.modules, matplotlib.rcParams.copy() == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def train_line(step: int, loss: float | None = 1.0, speed: float = 100.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "rate": 0.1, "tokens_per_second": speed}


def score_line(step: int, score: float | None, split: str = "validation") -> dict[str, Any]:
    return {"step": step, "split": split, "metric": "bits per byte", "score": score}


@pytest.mark.parametrize(
    "lines",
    [
        [train_line(5)],
        [train_line(5, None)],
        [score_line(5, None), train_line(6, None, 0.0)],
        [score_line(5, 2.0)],
        [train_line(step, None if 40 < step < 60 else 9 / step) for step in range(1, 100)],
        [line for step in range(1, 40) for line in (train_line(step), score_line(step, abs(step - 20)))],
    ],
    ids=len,
)
def test_curves_of_whatever_was_logged(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_curves(tmp_path, "a $recipe", higher_is_better=False) == tmp_path / "curves.png"
    with Image.open(tmp_path / "curves.png") as picture:
        picture.load()
        assert np.asarray(picture.convert("L")).std() > 5


def test_no_curves_of_nothing(tmp_path: Path) -> None:
    assert draw_curves(tmp_path, "none", higher_is_better=True) is None
    assert list(tmp_path.iterdir()) == []


def test_series_tell_training_from_splits() -> None:
    lines = [train_line(3, 2.0), score_line(3, 5.0), train_line(6, None)]
    steps, losses = series(lines, "loss")
    assert steps.tolist() == [3, 6]
    assert losses[0] == 2.0
    assert math.isnan(losses[1])
    assert [part.tolist() for part in series(lines, "score")] == [[3], [5.0]]
    assert [part.tolist() for part in series([], "loss")] == [[], []]


@pytest.mark.parametrize("d_model", [1, 3, 50])
def test_smoothing_is_the_mean_of_neighbors(width: int) -> None:
    values = np.random.default_rng(0).normal(size=40)
    values[[4, 5, 30]] = np.nan
    found = smoothed(values, width)
    for place in range(40):
        near = values[max(place - width, 0) : place + min(width, place) + 1]
        assert found[place] == pytest.approx(np.nanmean(near), rel=1e-9)


def test_smoothing_where_nothing_is_known() -> None:
    assert np.isnan(smoothed(np.array([np.nan, np.nan]), 1)).all()


def test_the_best_validation() -> None:
    lines = [
        score_line(1, 3.0),
        score_line(2, 1.0),
        score_line(3, None),
        score_line(4, 1.0),
        score_line(4, 9.0, "test"),
    ]
    assert best_of(lines, higher_is_better=False) == (2, 1.0)
    assert best_of(lines, higher_is_better=True) == (1, 3.0)
    assert best_of([train_line(1)], higher_is_better=True) is None


def test_the_mean_speed_is_all_tokens_over_all_time() -> None:
    # 70 tokens at 70 a second take a second, 35 at 10 a second take 3.5.
    lines = [{**train_line(10, speed=70.0), "tokens": 70}, score_line(10, 1.0)]
    lines.append({**train_line(15, speed=10.0), "tokens": 35})
    assert mean_speed(lines) == pytest.approx(105 / 4.5)
    assert mean_speed([score_line(10, 1.0)]) is None


@pytest.mark.parametrize(("seconds", "text"), [(0.62, "0.6 s"), (61.4, "0:01:01"), (7322, "2:02:02")])
def test_times_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
