"""The tables and figures of a sweep: the selection is honest, and the figures show the scores."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

from tcnca.errors import ConfigError
from tcnca.training.sweeps.plan import Sweep, Variants, plan
from tcnca.training.sweeps.plots import draw_curves, draw_scores, read_curve, save_curves, save_scores
from tcnca.training.sweeps.runner import point_state
from tcnca.training.sweeps.tables import Row, best_group, best_row, grouped, ranked, read_rows, selection, write_tables

VARIANTS = Variants(
    name="some.yaml",
    about="One line.",
    changes={"plain": [], "wide": ["d_model=48", "betas=[0.9, 0.99]"], "none": ["model.mixer=null"]},
)


def planned(folder: Path, *changes: str, variants: Variants | None = None) -> Sweep:
    changes = changes or (() if variants else ("num_layers=1,2,3,4",))
    return plan("recall-small", changes, folder / "sweep", variants=variants)


def test_unreadable_recipes_of_other_runs_do_not_matter(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "num_layers=1,2")
    for point, text in zip(sweep.points, (sweep.points[0].recipe.to_yaml(), "optimiser: {}"), strict=True):
        point.folder.mkdir(parents=True)
        (point.folder / "recipe.yaml").write_text(text)
        (point.folder / "result.json").write_text('{"scores": {}, "step": 1, "seconds": 1.0}')
    assert [point_state(point)[0] for point in sweep.points] == ["done", "failed"]
    assert "optimiser" in point_state(sweep.points[1])[1]
    sweep.points[1].folder.rename(sweep.folder / "old")
    assert planned(tmp_path, "num_layers=1,2").count_others() == 1
    (sweep.folder / "old").rename(sweep.points[1].folder)
    with pytest.raises(ConfigError, match=r"num_layers=2.*optimiser.*remove this one to run it again"):
        planned(tmp_path, "num_layers=1,2")


def finished(sweep: Sweep, scores: Sequence[dict[str, float] | float | None]) -> list[Row]:
    """Return rows of runs with these scores; None has failed, and a number has half of it on the test split."""
    rows = []
    for point, score in zip(sweep.points, scores, strict=True):
        values = {"validation": score, "test": score / 2} if isinstance(score, float) else score
        state: Any = {"state": "failed", "error": "a | b"} if values is None else {"state": "done", "scores": values}
        rows.append(Row(point=point, **state))
    return rows


def test_the_selection_is_by_validation_and_by_the_metric(tmp_path: Path) -> None:
    sweep = planned(tmp_path)
    validation, test = [0.3, math.nan, 0.7, 0.5], [0.9, 0.1, 0.2, 0.3]
    rows = finished(sweep, [{"validation": a, "test": b} for a, b in zip(validation, test, strict=True)])
    assert [row.point.values["num_layers"] for row in ranked(sweep, rows)] == ["3", "4", "1", "2"]
    best = best_row(sweep, rows)
    assert best is rows[2]
    assert "highest validation accuracy, 0.7000: num_layers=3. Its test accuracy is 0.2000" in selection(sweep, rows)
    lower = dataclasses.replace(sweep, higher_is_better=False, metric="bits per byte")
    assert [row.point.values["num_layers"] for row in ranked(lower, rows)] == ["1", "4", "3", "2"]
    # Without another, by the test split, which is stated.
    only = dataclasses.replace(sweep, split="test")
    rows = finished(only, [{"test": score} for score in test])
    assert best_row(only, rows) is rows[0]
    assert "There is no validation split" in selection(only, rows)
    assert best_row(sweep, finished(sweep, [None] * 4)) is None


def test_validations_on_the_test_split_are_none(tmp_path: Path) -> None:
    sweep = dataclasses.replace(planned(tmp_path, "num_layers=1,2"), split="test")
    place = sweep.points[0].folder
    place.mkdir(parents=True)
    line = {"step": 5, "split": "validation", "metric": "accuracy", "value": 0.9}
    (place / "log.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 6, "va')
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
def test_the_figure_has_the_scores_along_the_first_numbers(
    tmp_path: Path, changes: list[str], scale: str, lines: int
) -> None:
    sweep = planned(tmp_path, *changes)
    count = len(sweep.points)
    rows = finished(sweep, [{"validation": n / count, "test": n / count / 2} for n in range(count - 1)] + [None])
    axes = draw_scores(sweep, rows).axes[0]
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


def test_figures_of_words_and_of_nothing(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "schedule.kind=linear,cosine,wsd")
    sweep.folder.mkdir()
    rows = finished(sweep, [{"validation": 0.5}, {"validation": 0.6}, None])
    assert best_row(sweep, rows) is rows[1]
    axes = draw_scores(sweep, rows).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["linear", "cosine", "wsd"]
    assert save_scores(sweep, rows) == sweep.folder / "sweep.png"
    assert save_scores(sweep, finished(sweep, [None] * 3)) is None
    write_tables(sweep, rows)
    assert "schedule.kind=wsd failed: a \\| b" in (sweep.folder / "sweep.md").read_text()


def test_the_selection_is_by_the_mean_over_seeds(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "batch.seed=0,1,2", variants=VARIANTS)
    # The best single run is of a variant with a worse mean, and the best mean of one that has failed once.
    scores = [0.5, 0.6, 0.65, 0.9, 0.1, 0.2, 0.8, 0.8, None]
    rows = finished(sweep, scores)
    best = best_group(sweep, rows)
    assert best is not None
    assert best.rows == rows[:3]
    assert best_row(sweep, rows) is rows[3]
    assert [group.rows[0].point.values["variant"] for group in grouped(sweep, rows)] == ["plain", "wide", "none"]
    said = selection(sweep, rows)
    assert "highest mean validation accuracy over 3 seeds, 0.5833: variant=plain. Its mean test" in said
    assert f"accuracy is {statistics.fmean([0.25, 0.3, 0.325]):.4f}" in said
    sweep.folder.mkdir()
    write_tables(sweep, rows)
    page = (sweep.folder / "sweep.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page[page.index("Over seeds:") :].splitlines() if "|" in line]
    assert lines[0] == ["variant", "seeds", "mean validation", "standard deviation"]
    assert lines[2] == [f"**{text}**" for text in ("plain", "3", "0.5833", "0.0764")]
    assert lines[3:] == [["wide", "3", "0.4000", "0.4359"], ["none", "2 of 3", "0.8000", "0.0000"]]
    assert "One line.\n\n- plain: the recipe unchanged\n- wide: `d_model=48 betas=[0.9, 0.99]`" in page
    assert page.count("    tcnca train recall-small batch.seed=") == 3
    rings = [line for line in draw_scores(sweep, rows).axes[0].get_lines() if line.get_markeredgecolor() == "black"]
    assert [float(np.asarray(ring.get_xdata())[0]) for ring in rings] == scores[:3]
    # Nothing is selected before all is known; the figure has what there is.
    few = finished(sweep, [0.5, None, None] * 3)
    assert best_group(sweep, few) is None
    assert selection(sweep, few) == "No point is selected: none has a score for every seed."
    picture = draw_scores(sweep, few)
    assert len(picture.axes[0].get_yticks()) == 3
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["validation", "test", "failed"]


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
    sweep = dataclasses.replace(planned(tmp_path, "seed=0,1", variants=VARIANTS), higher_is_better=False)
    for place, point in enumerate(sweep.points[:4]):
        logged(point.folder, 0.5 + place, [9.0 + place, 3.0, None, 2.5 + place, 2.0 + place])
    curve = read_curve(sweep, sweep.points[1])
    assert curve.name == "plain"
    assert curve.steps.tolist() == [15, 30, 45, 60, 75]
    # Interpolated between lines of the log, from the first one, at ten steps.
    assert curve.seconds.tolist() == pytest.approx([7.5, 30.0, 52.5, 75.0, 97.5])
    assert curve.scores.tolist() == pytest.approx([10.0, 3.0, math.nan, 3.5, 3.0], nan_ok=True)

    curves = [read_curve(sweep, point) for point in sweep.points[:4]]
    figure = draw_curves(sweep, curves)
    over_steps, over_time = figure.axes
    assert (over_steps.get_xlabel(), over_time.get_xlabel()) == ("step", "seconds after the first steps")
    assert over_steps.get_ylabel() == "validation accuracy"
    for axes, name in ((over_steps, "steps"), (over_time, "seconds")):
        lines = [line for line in axes.get_lines() if line.get_marker() == "None"]
        for line, drawn in zip(lines, curves, strict=True):
            np.testing.assert_array_equal(np.asarray(line.get_xydata()).T, [getattr(drawn, name), drawn.scores])
        colors = [line.get_color() for line in lines]
        assert colors[0] == colors[1] != colors[2] == colors[3]
    # From the best score to the worst end; the beginning is cut off.
    low, high = over_steps.get_ylim()
    assert (low, high) == pytest.approx((1.82, 5.18))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["wide  4.500", "plain  2.500"]
    assert save_curves(sweep) == sweep.folder / "curves.png"


def test_curves_of_many_runs_are_not_drawn(tmp_path: Path) -> None:
    many = plan("recall-small", [f"seed={','.join(map(str, range(25)))}"], tmp_path / "many")
    few = plan("recall-small", [f"seed={','.join(map(str, range(24)))}"], tmp_path / "few")
    assert save_curves(few) is None
    for sweep in (many, few):
        logged(sweep.points[0].folder, 1.0, [0.5])
    assert (save_curves(many), save_curves(few)) == (None, tmp_path / "few" / "curves.png")


def test_curves_show_runs_that_end_worse_than_they_began(tmp_path: Path) -> None:
    sweep = dataclasses.replace(planned(tmp_path, variants=VARIANTS), higher_is_better=False)
    for point, scores in zip(sweep.points, ([5.0, 3.0, 2.0], [5.0, 3.0, 2.5], [5.0, 8.0, 9.0]), strict=True):
        logged(point.folder, 1.0, scores)
    over_steps, _ = draw_curves(sweep, [read_curve(sweep, point) for point in sweep.points]).axes
    low, high = over_steps.get_ylim()
    assert low < 2.0
    assert high > 9.0
