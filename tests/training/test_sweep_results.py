"""The tables and figures of a sweep: the selection is honest, and the figures show the scores."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnca.errors import ConfigError
from tcnca.training.sweeps import Row, Sweep, Variants, plan, save_curves, save_scores, to_markdown, write_tables
from tcnca.training.sweeps.plots import draw_curves, draw_scores
from tcnca.training.sweeps.results import best_group, point_state, ranked

VARIANTS = Variants(
    name="some.yaml",
    about="One line.",
    changes={"plain": [], "wide": ["d_model=48", "betas=[0.9, 0.99]"], "none": ["model.mixer=null"]},
)


def planned(folder: Path, *changes: str, variants: Variants | None = None) -> Sweep:
    changes = changes or (() if variants else ("num_layers=1,2,3,4",))
    return plan("recall-small", changes, folder / "sweep", variants=variants)


def finished(sweep: Sweep, scores: Sequence[dict[str, float] | float | None]) -> list[Row]:
    """Return rows of runs with these scores; None has failed, and a number has half of it on the test split."""
    rows = []
    for point, score in zip(sweep.points, scores, strict=True):
        values = {"validation": score, "test": score / 2} if isinstance(score, float) else score
        state: Any = {"state": "failed", "error": "a | b"} if values is None else {"state": "done", "scores": values}
        rows.append(Row(point=point, **state))
    return rows


def test_unreadable_recipes_are_named(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "num_layers=1,2")
    for point, text in zip(sweep.points, (sweep.points[0].recipe.to_yaml(), "optimiser: {}"), strict=True):
        point.folder.mkdir(parents=True)
        (point.folder / "recipe.yaml").write_text(text)
        (point.folder / "result.json").write_text('{"scores": {}, "step": 1, "seconds": 1.0}')
    assert [point_state(point)[0] for point in sweep.points] == ["done", "failed"]
    with pytest.raises(ConfigError, match=r"num_layers=2.*optimiser"):
        planned(tmp_path, "num_layers=1,2")


def test_a_pipe_in_place_of_a_log_is_not_opened(tmp_path: Path) -> None:
    (point, _) = planned(tmp_path, "num_layers=1,2").points
    point.folder.mkdir(parents=True)
    os.mkfifo(point.folder / "sweep.log")
    assert point_state(point) == ("waiting", "")


def test_the_selection_is_by_validation_and_by_the_metric(tmp_path: Path) -> None:
    sweep = planned(tmp_path)
    validation, test = [0.3, math.nan, 0.7, 0.5], [0.9, 0.1, 0.2, 0.3]
    rows = finished(sweep, [{"validation": a, "test": b} for a, b in zip(validation, test, strict=True)])
    assert [row.point.values["num_layers"] for (row,) in ranked(sweep, rows)] == ["3", "4", "1", "2"]
    page = to_markdown(sweep, rows)
    assert "highest validation accuracy, 0.7000: num_layers=3. Its test accuracy is 0.2000" in page
    lower = dataclasses.replace(sweep, higher_is_better=False, metric="bits per byte")
    assert [row.point.values["num_layers"] for (row,) in ranked(lower, rows)] == ["1", "4", "3", "2"]
    # Without another, by the test split, which is stated.
    only = dataclasses.replace(sweep, split="test")
    rows = finished(only, [{"test": score} for score in test])
    assert best_group(only, rows) == rows[:1]
    assert "There is no validation split" in to_markdown(only, rows)
    assert best_group(sweep, finished(sweep, [None] * 4)) == []


def test_the_selection_is_by_the_mean_over_seeds(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "batch.seed=0,1,2", variants=VARIANTS)
    # The best single run is of a variant with a worse mean, and the best mean of one that has failed once.
    rows = finished(sweep, [0.5, 0.6, 0.65, 0.9, 0.1, 0.2, 0.8, 0.8, None])
    assert best_group(sweep, rows) == rows[:3]
    page = to_markdown(sweep, rows)
    assert "highest mean validation accuracy over 3 seeds, 0.5833: variant=plain. Its mean test accuracy is" in page
    lines = [re.split(r" +\| ?", line.strip("| ")) for line in page[page.index("Over seeds:") :].splitlines()]
    assert [line for line in lines if len(line) == 4] == [
        ["variant", "seeds", "mean validation", "standard deviation"],
        ["-------", "------", "---------------", "------------------"],
        ["plain", "3 of 3", "0.5833", "0.0764"],
        ["wide", "3 of 3", "0.4000", "0.4359"],
        ["none", "2 of 3", "0.8000", "0.0000"],
    ]
    assert "One line.\n\n- plain: the recipe unchanged\n- wide: `d_model=48 betas=[0.9, 0.99]`" in page
    assert page.count("    tcnca train recall-small batch.seed=") == 3
    # Nothing is selected before all is known.
    few = finished(sweep, [0.5, None, None] * 3)
    assert best_group(sweep, few) == []
    assert "No point is selected: none has a score for every seed." in to_markdown(sweep, few)


def test_scores_are_drawn_in_a_line_for_each_point(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "schedule.kind=linear,cosine,wsd", "seed=0,1")
    sweep.folder.mkdir()
    rows = finished(sweep, [0.5, 0.6, 0.7, 0.8, 0.9, None])
    axes = draw_scores(sweep, rows).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["linear", "cosine", "wsd"]
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()}
    assert drawn["validation"] == [[0.5, 0], [0.6, 0], [0.7, 1], [0.8, 1], [0.9, 2]]
    assert drawn["test"] == [[0.25, 0], [0.3, 0], [0.35, 1], [0.4, 1], [0.45, 2]]
    assert drawn["failed"] == [[0.01, 2]]
    (selected,) = axes.patches
    assert selected.get_y() == pytest.approx(0.6)  # type: ignore[attr-defined]
    assert save_scores(sweep, rows) == sweep.folder / "sweep.png"
    assert save_scores(sweep, finished(sweep, [None] * 6)) is None
    write_tables(sweep, rows)
    assert "schedule.kind=wsd,seed=1 failed: a | b" in (sweep.folder / "sweep.md").read_text()


def logged(folder: Path, seconds: float, scores: Sequence[float | None]) -> None:
    """Write a log with a line every ten steps and a validation every fifteen; compiling took a minute."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"step": step, "seconds": 60 + seconds * step, "loss": 1.0} for step in range(10, 101, 10)
    ]
    lines += [{"step": 15 * n, "split": "validation", "value": score} for n, score in enumerate(scores, 1)]
    lines += [{"step": 15 * len(scores), "split": "test", "value": 0.0}]
    lines.sort(key=lambda line: line["step"])
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_curves_are_over_steps_and_over_time(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "seed=0,1", variants=VARIANTS)
    for place, point in enumerate(sweep.points[:4]):
        logged(point.folder, 0.5 + place, [9.0 + place, 3.0, None, 2.5 + place, 2.0 + place])
    figure = draw_curves(sweep)
    over_steps, over_time = figure.axes
    steps, scores = [15, 30, 45, 60, 75], [10.0, 3.0, math.nan, 3.5, 3.0]
    np.testing.assert_array_equal(np.asarray(over_steps.get_lines()[1].get_xydata()).T, [steps, scores])
    # Interpolated between lines of the log, from the first one, at ten steps.
    times = [7.5, 30.0, 52.5, 75.0, 97.5]
    np.testing.assert_allclose(np.asarray(over_time.get_lines()[1].get_xydata()).T, [times, scores])
    colors = [line.get_color() for line in over_steps.get_lines()]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    # All later scores are visible; the beginning is cut off.
    assert over_steps.get_ylim() == pytest.approx((1.825, 5.675))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["plain", "wide"]
    assert save_curves(sweep) == sweep.folder / "curves.png"


def test_curves_of_many_runs_are_not_drawn(tmp_path: Path) -> None:
    many = plan("recall-small", [f"seed={','.join(map(str, range(25)))}"], tmp_path / "many")
    few = plan("recall-small", [f"seed={','.join(map(str, range(24)))}"], tmp_path / "few")
    assert save_curves(few) is None
    for sweep in (many, few):
        logged(sweep.points[0].folder, 1.0, [0.5])
    assert (save_curves(many), save_curves(few)) == (None, tmp_path / "few" / "curves.png")
