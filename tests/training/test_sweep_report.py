"""What is told of a sweep: the choice is honest, and the picture has the scores."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

from tcnca.errors import ConfigError
from tcnca.training.sweeps.picture import draw, save_picture
from tcnca.training.sweeps.plan import Sweep, plan
from tcnca.training.sweeps.running import outcome
from tcnca.training.sweeps.table import Row, best_row, chosen, ranked, read_rows, write_tables


def planned(folder: Path, *changes: str, **more: Any) -> Sweep:
    return plan("recall-small", changes or ["num_layers=1,2,3,4"], folder / "sweep", **more)


def test_recipes_of_another_time_are_no_hindrance_to_others(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "num_layers=1,2")
    for point, text in zip(sweep.points, (sweep.points[0].recipe.to_yaml(), "optimizer: {}"), strict=True):
        point.folder.mkdir(parents=True)
        (point.folder / "recipe.yaml").write_text(text)
        (point.folder / "result.json").write_text('{"scores": {}, "step": 1, "seconds": 1.0}')
    assert [outcome(point)[0] for point in sweep.points] == ["done", "failed"]
    assert "optimizer: no such key" in outcome(sweep.points[1])[1]
    sweep.points[1].folder.rename(sweep.folder / "old")
    assert planned(tmp_path, "num_layers=1,2").others() == 1
    (sweep.folder / "old").rename(sweep.points[1].folder)
    with pytest.raises(ConfigError, match=r"num_layers=2.*optimizer: no such key.*remove this one to run it anew"):
        planned(tmp_path, "num_layers=1,2")


def finished(sweep: Sweep, scores: list[dict[str, float] | None]) -> list[Row]:
    """Rows as of runs that are done, or that have failed."""
    found = zip(sweep.points, scores, strict=True)
    rows = [Row(point=point, state="done", scores=numbers or {}) for point, numbers in found]
    return [row if row.scores else dataclasses.replace(row, state="failed", error="a | b") for row in rows]


def test_the_choice_is_by_validation_and_by_the_metric(tmp_path: Path) -> None:
    sweep = planned(tmp_path)
    validation, test = [0.3, math.nan, 0.7, 0.5], [0.9, 0.1, 0.2, 0.3]
    rows = finished(sweep, [{"validation": a, "test": b} for a, b in zip(validation, test, strict=True)])
    assert [row.point.values["num_layers"] for row in ranked(sweep, rows)] == ["3", "4", "1", "2"]
    best = best_row(sweep, rows)
    assert best is rows[2]
    assert "greatest validation accuracy, 0.7000: num_layers=3. Its test accuracy is 0.2000" in chosen(sweep, rows)
    lower = dataclasses.replace(sweep, higher_is_better=False, metric="bits per byte")
    assert [row.point.values["num_layers"] for row in ranked(lower, rows)] == ["1", "4", "3", "2"]
    # Where there is nothing else, by the test split, and that is said.
    only = dataclasses.replace(sweep, split="test")
    rows = finished(only, [{"test": score} for score in test])
    assert best_row(only, rows) is rows[0]
    assert "There is no validation split" in chosen(only, rows)
    assert best_row(sweep, finished(sweep, [None] * 4)) is None


def test_validations_on_the_test_split_are_none(tmp_path: Path) -> None:
    sweep = dataclasses.replace(planned(tmp_path, "num_layers=1,2"), split="test")
    place = sweep.points[0].folder
    place.mkdir(parents=True)
    line = {"step": 5, "split": "validation", "metric": "accuracy", "score": 0.9}
    (place / "log.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 6, "sc')
    assert read_rows(sweep)[0].best_validation is None
    assert read_rows(dataclasses.replace(sweep, split="validation"))[0].best_validation == 0.9


def places(line: Line2D) -> list[list[float]]:
    found: list[list[float]] = np.asarray(line.get_xydata()).tolist()
    return found


@pytest.mark.parametrize(
    ("changes", "scale", "lines"),
    [
        (["lr=1e-3,1e-1,1e-2"], "log", 1),
        (["lr=0.1,0.2,0.3"], "linear", 1),
        (["weight_decay=0,0.1,10"], "symlog", 1),
        (["schedule.kind=linear,cosine", "lr=0.1,0.2", "num_layers=1,2,3"], "linear", 6),
    ],
)
def test_the_picture_has_the_scores_along_the_first_numbers(
    tmp_path: Path, changes: list[str], scale: str, lines: int
) -> None:
    sweep = planned(tmp_path, *changes)
    count = len(sweep.points)
    rows = finished(sweep, [{"validation": n / count, "test": n / count / 2} for n in range(count - 1)] + [None])
    axes = draw(sweep, rows).axes[0]
    key = next(change.partition("=")[0] for change in changes if "linear" not in change)
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == (scale, key, "accuracy")
    drawn = [line for line in axes.get_lines() if line.get_linestyle() in ("-", "--")]
    assert len(drawn) == 2 * lines
    numbers = [(float(row.point.values[key]), row.scores) for row in rows if row.scores]
    for style, split in (("-", "validation"), ("--", "test")):
        found = [place for line in drawn if line.get_linestyle() == style for place in places(line)]
        assert sorted(found) == sorted([number, scores[split]] for number, scores in numbers)
    crosses = [x for line in axes.get_lines() if line.get_marker() == "x" for x, _ in places(line)]
    assert crosses == [float(sweep.points[-1].values[key])]


def test_pictures_of_words_and_of_nothing(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "schedule.kind=linear,cosine,stable")
    sweep.folder.mkdir()
    rows = finished(sweep, [{"validation": 0.5}, {"validation": 0.6}, None])
    assert best_row(sweep, rows) is rows[1]
    axes = draw(sweep, rows).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["linear", "cosine", "wsd"]
    assert save_picture(sweep, rows) == sweep.folder / "sweep.png"
    assert save_picture(sweep, finished(sweep, [None] * 3)) is None
    write_tables(sweep, rows)
    assert "schedule.kind=wsd failed: a \\| b" in (sweep.folder / "sweep.md").read_text()
