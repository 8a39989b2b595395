"""`tcnca compare`: what is read from runs, when they reached a score, and the figure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tcnca.cli import app
from tcnca.errors import ConfigError
from tcnca.training import Result, Score
from tcnca.training.comparison import comparison_rows, read_runs
from tcnca.training.report import write_result


def make_run(folder: Path, scores: list[float | None], *, metric: str = "bits per byte", finished: bool = True) -> Path:
    """Write a run that takes a second for a step after a minute, and is validated every ten, at last on all answers."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(5, 10 * len(scores) + 1, 5):
        lines.append({"step": step, "seconds": 60.0 + step, "loss": 1.0, "tokens": 500, "tokens_per_second": 100.0})
        if step % 10 == 0:
            measured = {"split": "validation", "metric": metric, "value": scores[step // 10 - 1], "count": 70}
            lines.append({"step": step, "seconds": 60.0 + step, **measured})
    if finished:
        lines[-1:] = [{**line, "count": 1000} for line in lines[-1:]]
        score = Score(metric=metric, value=1.25, count=1000, higher_is_better=metric == "accuracy")
        write_result(folder, Result(step=10 * len(scores), seconds=100.0, scores={"test": score}, parameters=12345))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def test_runs_are_compared_by_scores_and_cost(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "one" / "run", [3.0, 2.0, 1.5, 0.5]),
        make_run(tmp_path / "other" / "run", [2.0, None], finished=False),
        make_run(tmp_path / "third", [9.0, 1.0]),
    ]
    titles, first, second, third = comparison_rows(read_runs(folders), [2.0, 0.6])
    assert dict(zip(titles, first, strict=True)) == {
        "run": str(folders[0]),
        "validation": "–",
        "test": "1.2500",
        "steps": "40",
        "tokens": "4,000",
        "time": "0:01:40",
        "tokens/s": "100",
        "parameters": "12,345",
        "GiB": "–",
        "time to 2": "0:01:20",
        "time to 0.6": "–",  # the last validation had more answers
    }
    assert second[3:] == ["20 (not finished)", "2,000", "0:01:20", "100", "–", "–", "0:01:10", "–"]
    assert third[0] == "third"
    result = Result(step=20, seconds=9.0, scores={}, parameters=1, source="other.txt")
    write_result(folders[2], result)
    titles, *rows = comparison_rows(read_runs(folders), [])
    assert [dict(zip(titles, row, strict=True))["data"] for row in rows] == ["", "–", "other.txt"]
    assert third[-2] == "–"
    steps, seconds, scores = read_runs(folders)[1].validations()
    np.testing.assert_array_equal([steps, seconds, scores], [[10, 20], [70, 80], [2.0, math.nan]])


def test_a_higher_accuracy_is_better(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "run", [0.2, 0.6, 0.4, 0.9], metric="accuracy")])
    assert run.seconds_to(0.5) == 80.0
    assert run.seconds_to(0.8) is None


def test_runs_of_several_metrics_are_in_several_tables(tmp_path: Path) -> None:
    folders = [str(make_run(tmp_path / metric, [0.5], metric=metric)) for metric in ("accuracy", "bits per byte")]
    result = CliRunner().invoke(app, ["compare", *folders])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line for line in lines if line.startswith("Scores")] == ["Scores: accuracy.", "Scores: bits per byte."]
    assert sum(line.startswith("| run") for line in lines) == 2
    for option in (("--reach", "0.5"), ("--plot", "figure.png")):
        result = CliRunner().invoke(app, ["compare", *folders, *option])
        assert f"{option[0]}: expected runs with one metric, got accuracy and bits per byte" in result.output
    with pytest.raises(ConfigError, match=r"expected the directory of a run, with a log\.jsonl"):
        read_runs([tmp_path])


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / name, [3.0, 2.0, 1.0])) for name in ("one", "two")]
    figure = tmp_path / "figure.png"
    result = CliRunner().invoke(app, ["compare", *runs, "--reach", "2", "--plot", str(figure)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split(" | ")[-1].strip(" |") == "time to 2"
    assert [line.split()[1] for line in lines[2:4]] == ["one", "two"]
    assert "Scores: bits per byte." in lines
    with Image.open(figure) as image:
        assert image.width > 1000
    result = CliRunner().invoke(app, ["compare", *runs, "--plot", "figure.gif"])
    assert "--plot: expected a file name that ends in" in result.output
    assert not Path("figure.gif").exists()


def test_a_run_without_validations_is_drawn_empty(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    (run / "log.jsonl").write_text('{"step": 1, "seconds": 2.0, "loss": 1.0}\n')
    result = CliRunner().invoke(app, ["compare", str(run), "--plot", str(tmp_path / "figure.svg")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figure.svg").is_file()
