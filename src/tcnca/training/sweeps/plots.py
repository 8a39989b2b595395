"""The figures of a sweep: the scores of all runs, and their validations over steps and time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tcnca.extras import missing
from tcnca.training.comparison import draw_validations, seconds_at
from tcnca.training.logger import read_log
from tcnca.training.report import CURVES, comparable_validations, save_figure, series
from tcnca.training.sweeps.plan import Sweep
from tcnca.training.sweeps.results import Row, best_group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = "sweep.png"
MAX_CURVES = 24
"""Runs whose lines can be told apart. Variants are few, and have a color each, however often they are repeated."""


def save_scores(sweep: Sweep, rows: Sequence[Row]) -> Path | None:
    """Draw the scores into `sweep.png`; None if there are none, or no matplotlib."""
    if missing("plots") or not any(row.scores for row in rows):
        return None
    save_figure(functools.partial(draw_scores, sweep, rows), sweep.folder / SCORES)
    return sweep.folder / SCORES


def save_curves(sweep: Sweep) -> Path | None:
    """Draw the validations into `curves.png`; None if there are none, too many runs, or no matplotlib."""
    if missing("plots") or (sweep.variants is None and len(sweep.points) > MAX_CURVES):
        return None
    if not any(comparable_validations(read_log(point.folder)) for point in sweep.points):
        return None
    save_figure(functools.partial(draw_curves, sweep), sweep.folder / CURVES)
    return sweep.folder / CURVES


def draw_scores(sweep: Sweep, rows: Sequence[Row]) -> Figure:
    """Draw a line of dots for each point: validation and test of each seed. The selected point is marked."""
    # Slow to import, and needed only here.
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(_name(sweep, row) for row in rows))
    figure = Figure(figsize=(8, 2 + 0.25 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    drawn: dict[str, list[tuple[float, int]]] = {"validation": [], "test": []}
    for row in rows:
        for split in drawn.keys() & row.scores.keys():
            drawn[split].append((row.scores[split], names.index(_name(sweep, row))))
    # Of different sizes, so that both are visible where they coincide.
    for (split, found), size, color in zip(drawn.items(), (6, 9), ("C0", "none"), strict=True):
        if found:
            axes.plot(*zip(*found, strict=True), "o", markersize=size, markerfacecolor=color, label=split)
    failed = [names.index(_name(sweep, row)) for row in rows if row.state == "failed"]
    if failed:
        axes.plot([0.01] * len(failed), failed, "rx", transform=axes.get_yaxis_transform(), label="failed")
    if best := best_group(sweep, rows):
        axes.axhspan(*(names.index(_name(sweep, best[0])) + side for side in (-0.4, 0.4)), alpha=0.15, label="selected")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(f"Sweep of {sweep.recipe}", loc="left")
    axes.set_xlabel(sweep.metric)
    axes.set_ylabel(", ".join(sweep.compared))
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _name(sweep: Sweep, row: Row) -> str:
    return ", ".join(row.point.values[key] for key in sweep.compared)


def draw_curves(sweep: Sweep) -> Figure:
    """Draw the validations of runs over steps and over time, with a color for each value of the first key."""
    key, curves = sweep.compared[0], []
    for point in sweep.points:
        lines = read_log(point.folder)
        steps, scores = series(comparable_validations(lines), "value")
        seconds = series(lines, "seconds")[1]
        # From the first line of the log on, which leaves out most of the compilation.
        times = seconds_at(lines, steps) - (seconds[0] if len(seconds) else 0.0)
        curves.append((point.values[key], sweep.grid[key].index(point.values[key]), steps, times, scores))
    figure = draw_validations(curves, f"{sweep.split} {sweep.metric}", "seconds after the first steps", key)
    figure.suptitle(f"Sweep of {sweep.recipe}", x=0.01, ha="left")
    return figure
