"""What a run leaves when it ends, successfully or not: its result, a report, its curves, and how to continue."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import ConfigError, Stopped, TrainingError, format_interval, format_score
from tcnca.files import disk_errors
from tcnca.training import Score, Trainer, read_log
from tcnca.training.provenance import Launch, add_launch
from tcnca.training.report import (
    Best,
    Result,
    best_validation,
    cost_rows,
    draw_curves,
    mean_speed,
    read_result,
    score_rows,
    smooth,
    write_report,
    write_result,
)
from tests.training.tiny import arguments, assert_same, latest, recipe, weights


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("done") / "run"
    result = invoked(*arguments(folder))
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_a_run_writes_its_result_report_and_curves(done: tuple[Path, str]) -> None:
    folder, output = done
    result, page = json.loads((folder / "result.json").read_text()), (folder / "report.md").read_text()
    for split in ("validation", "test"):
        score = result["scores"][split]
        assert (score["metric"], score["count"]) == ("accuracy", 500)
        value = f"{score['value']:.4f}{format_interval('accuracy', score['value'], 500)}"
        assert f"| {split} | accuracy | {value} | 500 |" in page
        row = next(line.split() for line in output.splitlines() if line.strip().startswith(f"{split} "))
        assert row == [split, "accuracy", *value.split(), "500"]
    validations = {line["step"]: line["value"] for line in read_log(folder) if line.get("split") == "validation"}
    assert list(validations) == [6, 12]
    assert validations[12] == result["scores"]["validation"]["value"]
    assert result["best"]["value"] == max(validations.values()) == validations[result["best"]["step"]]
    parameters = sum(parameter.numel() for parameter in tcnca.load(latest(folder)).parameters())
    assert result["parameters"] == parameters
    task = recipe().build_task()
    tokens = sum(task.batch(step, 12).inputs.numel() for step in range(12))
    assert result["tokens"] == tokens
    rows = {"parameters": f"{parameters:,}", "tokens": f"{tokens:,}", "steps": "12", "seed": "0"}
    for wanted in (*(f"| {name} | {value} |" for name, value in rows.items()), "![", "(curves.png)"):
        assert wanted in page
    assert f"{parameters:,}" in output
    with Image.open(folder / "curves.png") as picture:
        assert picture.size == (1440, 960)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    found = read_result(folder)
    assert found is not None
    assert found.scores["test"].value == result["scores"]["test"]["value"]
    fields = {"step", "lr", "loss", "grad_norm", "tokens", "tokens_per_second", "seconds", "progress", "data_wait"}
    assert fields < read_log(folder)[0].keys()


def test_a_finished_run_is_not_continued(done: tuple[Path, str]) -> None:
    folder, _ = done
    before = (folder / "result.json").stat().st_mtime_ns, (folder / "provenance.json").read_text()
    again = invoked(*arguments(folder, "--resume"))
    assert again.exit_code == 0
    assert "the run is finished, after 12 steps" in again.output
    by_folder = invoked("train", str(folder), "--resume")
    assert by_folder.exit_code == 0
    assert "the run is finished, after 12 steps" in by_folder.output
    assert ((folder / "result.json").stat().st_mtime_ns, (folder / "provenance.json").read_text()) == before
    for change, refusal in (
        (("max_steps=24",), "was started with another recipe, which differs in schedule.max_steps (it has 12, now 24)"),
        (("--budget", "9s"), "--budget: expected the budget that"),
    ):
        longer = invoked(*arguments(folder, "--resume", *change))
        assert longer.exit_code == 1
        assert refusal in longer.output
        assert f"; to train its model further, start a new run with init_from={folder} and" in longer.output


def test_each_evaluation_has_its_own_file(done: tuple[Path, str]) -> None:
    folder, _ = done
    for more in ([], ["--best"], ["--split", "validation", "eval.batch_size=100"]):
        measured = invoked("eval", str(folder), "--device", "cpu", *more)
        assert measured.exit_code == 0, measured.output
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("eval-*.json")}
    assert found.keys() == {"eval-test.json", "eval-test-best.json", "eval-validation-eval.batch_size=100.json"}
    result = json.loads((folder / "result.json").read_text())
    best = f"step-{result['best']['step']:09}"
    assert [found[f"eval-test{name}.json"]["checkpoint"] for name in ("", "-best")] == ["step-000000012", best]
    facts = {"split": "validation", "checkpoint": "step-000000012", "device": "cpu", "changes": ["eval.batch_size=100"]}
    assert found["eval-validation-eval.batch_size=100.json"] == {**facts, **result["scores"]["validation"]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: tuple[Path, str], number: signal.Signals
) -> None:
    step = Trainer._step

    def interrupted(self: Trainer, *more: Any) -> Any:
        if self.state.step == 4:
            # Twice, as by someone in a hurry.
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return step(self, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", interrupted)
        stopped = invoked(*arguments(tmp_path / "a run"))
    assert stopped.exit_code == 128 + number
    assert f"stopped by {number.name} after step 5; continue with" in stopped.output
    assert (tmp_path / "a run" / "curves.png").is_file()
    assert read_result(tmp_path / "a run") is None
    name, *again = shlex.split(stopped.output.strip().splitlines()[-1])
    assert name == "tcnca"
    resumed = invoked(*again)
    assert resumed.exit_code == 0, resumed.output
    assert "resuming from step 5" in resumed.output
    assert_same(*(weights(tcnca.load(latest(folder))) for folder in (tmp_path / "a run", done[0])))


def test_a_failed_run_shows_its_curves(tmp_path: Path) -> None:
    failed = invoked(*arguments(tmp_path, "lr=1e30", "max_grad_norm=0", "log_every=1"))
    assert failed.exit_code == 1
    assert "the loss or the gradient is not finite" in failed.output
    assert (tmp_path / "curves.png").is_file()
    assert not (tmp_path / "result.json").exists()


def test_resuming_nothing_says_that_it_starts_a_new_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Trainer(recipe("max_steps=2", "warmup_steps=1"), tmp_path / "new", resume=True, device="cpu")
    assert one.fit().step == 2
    printed = capsys.readouterr().out
    assert f"nothing to resume in {tmp_path / 'new'}, which has no checkpoint; starting a new run" in printed


@pytest.mark.parametrize(
    "text",
    [
        *("{", "{}", "[]", "null", "[" * 100_000, '{"step": 1, "seconds": 1e300}', '{"step": [], "seconds": 1.0}'),
        *('{"step": 1, "seconds": 1.0, "scores": {"test": {}}}', '{"step": 1, "seconds": 1.0, "best": {"value": 1}}'),
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(TrainingError, match=r"result\.json: .*expected .*; remove it, and resuming the run writes it"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "Error: .*: the disk is full; .*; continue with"),
        (Stopped(signal.SIGTERM), 143, "stopped by SIGTERM; continue with"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT; continue with"),
    ],
)
def test_what_stops_a_run_outside_the_loop_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def stop(trainer: Trainer) -> None:
        with disk_errors(trainer.out):
            raise error

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_export_model", stop)
        result = invoked(*arguments(folder))
    assert result.exit_code == code
    *_, first, again = result.output.splitlines()
    assert re.fullmatch(message, first), result.output
    assert again.startswith("tcnca train recall-small ")
    assert again.endswith(f" --out {folder} --resume")
    assert invoked(*shlex.split(again)[1:]).exit_code == 0


@pytest.mark.parametrize("text", ["0", "9" * 400, "1" + "0" * 400 + "h", "inf", "nan", "-1", "0.0000001s", "1e3"])
def test_budgets_that_are_none(tmp_path: Path, text: str) -> None:
    result = invoked(*arguments(tmp_path / "run"), "--budget", text)
    assert result.exit_code == 1
    assert "Error: --budget: expected a time such as 90s, 20m or 2h" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, math.inf, 1e300])
def test_budgets_in_python_are_checked(tmp_path: Path, budget: float) -> None:
    with pytest.raises(ConfigError, match=r"^budget: expected a number in"):
        Trainer(recipe(), tmp_path / "run", budget=budget)


def test_a_misspelled_split_is_named(done: tuple[Path, str]) -> None:
    result = invoked("eval", str(done[0]), "--split", "valid")
    assert result.exit_code == 1
    assert "Error: split: did you mean validation? Expected one of train, validation, test" in result.output


def test_a_report_of_any_texts_is_written(tmp_path: Path) -> None:
    first = Launch(recipe="\ud800", command="tcnca", step=0, seed=0, budget=None, processes=1, hardware={})
    add_launch(tmp_path, first, resumed=False)
    write_report(tmp_path, Result(step=1, seconds=2.0))
    assert (tmp_path / "report.md").read_text().startswith("# \\ud800\n")


def test_nan_in_a_result_is_kept(tmp_path: Path) -> None:
    score = Score(metric="accuracy", value=math.nan, count=0, higher_is_better=True)
    write_result(tmp_path, Result(step=1, seconds=2.0, scores={"test": score}))
    found = read_result(tmp_path)
    assert found is not None
    assert math.isnan(found.scores["test"].value)


@pytest.mark.parametrize(
    "line",
    [
        *("[" * 100_000, "9" * 5000, "x" * 100_000, "[]", '{"step": "1"}', '{"step": -1}', '{"step": 1e400}'),
        *('{"step": 3, "loss": [1]}', '{"step": 3, "lr": 1e101}', '{"step": 3, "tokens": "many"}'),
        *('{"step": 3, "split": {}, "value": 1}', '{"step": 3, "split": "validation", "metric": 1, "value": 2}'),
    ],
    ids=lambda line: line[:30],
)
def test_odd_lines_of_a_log_are_left_out(tmp_path: Path, line: str) -> None:
    lines = [json.dumps(train_line(1)), json.dumps(score_line(1, 2.0)), line, json.dumps(train_line(2))]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert [each["step"] for each in read_log(tmp_path)] == [1, 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        *('{"step": 2}', '{"step": 2, "split": "validation"}', '{"step": 2, "tokens": 5, "tokens_per_second": 0}'),
        *('{"step": 2, "loss": 1e100, "tokens_per_second": 1e100}', '{"step": 2147483647, "loss": null, "lr": null}'),
    ],
)
def test_lines_without_values_can_be_drawn(tmp_path: Path, line: str) -> None:
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(train_line(1))}\n{line}\n")
    assert draw_curves(tmp_path, "one", higher_is_better=True) is not None
    assert mean_speed(read_log(tmp_path)) is None


def test_a_figure_has_the_same_bytes_at_any_time(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from matplotlib.figure import Figure
from tcnca.training.report import save_figure

def draw():
    figure = Figure()
    figure.subplots().plot([1, 3, 2], "o-", label="scores")
    figure.legend()
    return figure

for suffix in ("svg", "pdf", "png"):
    save_figure(draw, Path(sys.argv[1]) / f"figure.{suffix}")
"""
    for day in ("1", "2"):
        (tmp_path / day).mkdir()
        environment = {**os.environ, "SOURCE_DATE_EPOCH": f"{day}00000", "PYTHONHASHSEED": day}
        subprocess.run([sys.executable, "-c", script, str(tmp_path / day)], env=environment, check=True)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes(), path.name


def test_curves_leave_the_plots_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(train_line(1)) + "\n")
    with matplotlib.rc_context({"font.size": 33.0}):
        before = matplotlib.rcParams.copy()
        draw_curves(tmp_path, "one", higher_is_better=True)
        assert matplotlib.rcParams.copy() == before


def train_line(step: int, loss: float | None = 1.0, speed: float = 100.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 0.1, "tokens_per_second": speed}


def score_line(step: int, score: float | None, split: str = "validation") -> dict[str, Any]:
    return {"step": step, "split": split, "metric": "bits per byte", "value": score}


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
def test_curves_of_any_log(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_curves(tmp_path, "a $recipe", higher_is_better=False) == tmp_path / "curves.png"
    with Image.open(tmp_path / "curves.png") as picture:
        picture.load()
        assert np.asarray(picture.convert("L")).std() > 5


@pytest.mark.parametrize("width", [1, 3, 50])
def test_smoothing_is_the_mean_of_neighbors(width: int) -> None:
    values = np.random.default_rng(0).normal(size=40)
    values[[4, 5, 30]] = np.nan
    found = smooth(values, width)
    for place in range(40):
        near = values[max(place - width, 0) : place + min(width, place) + 1]
        assert found[place] == pytest.approx(np.nanmean(near), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.01444, "1.0144"), (0.0, "0.0000"), (1.2345e-6, "1.234e-06"), (3951870337.7, "3.952e+09"), (math.nan, "nan")],
)
def test_scores_have_four_digits_on_any_scale(value: float, text: str) -> None:
    assert format_score(value) == text
    score = Score(metric="mean squared error", value=value, count=1, higher_is_better=False)
    result = Result(step=1, seconds=1.0, scores={"test": score}, best=Best(value=value, step=1, count=1000))
    assert score_rows(result) == [("test", "mean squared error", text, "1")]
    assert cost_rows(result)[0] == ("best validation", f"{text} at step 1, on 1,000 answers")


@pytest.mark.parametrize(
    ("right", "count", "text"),
    [
        (5, 6, ", 95 % interval 0.436 to 0.970"),
        (0, 6, ", 95 % interval 0.000 to 0.390"),
        (9, 9, ", 95 % interval 0.701 to 1.000"),
        (500, 999, ", 95 % interval 0.470 to 0.531"),
        (500, 1000, ""),
    ],
)
def test_accuracies_of_few_answers_have_an_interval(right: int, count: int, text: str) -> None:
    """The bounds p solve (p - accuracy)² = 1.96² p (1 - p) / count."""
    assert format_interval("accuracy", right / count, count) == text
    assert format_interval("mean squared error", right / count, count) == ""


@pytest.mark.parametrize(("value", "count"), [(math.nan, 0), (math.nan, 5), (-1.0, 5), (1e9, 5), (0.5, 0), (0.5, -1)])
def test_odd_scores_have_no_interval(value: float, count: int) -> None:
    assert format_interval("accuracy", value, count) == ""


def test_the_best_validation() -> None:
    lines = [score_line(step, score) for step, score in enumerate([3.0, 1.0, None, 1.0], 1)]
    lines.append(score_line(4, 9.0, "test"))
    assert best_validation(lines, higher_is_better=False) == Best(step=2, value=1.0)
    # The last one, on more answers, is not comparable.
    partial = [{**line, "count": 7} for line in lines]
    partial.append({**score_line(5, 0.5), "count": 70})
    assert best_validation(partial, higher_is_better=False) == Best(step=2, value=1.0, count=7)
    assert best_validation(lines, higher_is_better=True) == Best(step=1, value=3.0)
    assert best_validation([train_line(1)], higher_is_better=True) is None


def test_the_mean_speed_is_all_tokens_over_all_time() -> None:
    # 70 tokens at 70 a second take a second, 35 at 10 a second take 3.5.
    lines = [{**train_line(10, speed=70.0), "tokens": 70}, score_line(10, 1.0)]
    lines.append({**train_line(15, speed=10.0), "tokens": 35})
    assert mean_speed(lines) == pytest.approx(105 / 4.5)
    assert mean_speed([score_line(10, 1.0)]) is None
