"""The picture of a sweep: the score over the first key that has numbers, or a line of dots for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tcnca.training.files import beside
from tcnca.training.recipe import parsed
from tcnca.training.sweeps.plan import Sweep, is_number
from tcnca.training.sweeps.table import Row, best_row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "sweep.png"

# Told apart by people who do not see all colours as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_MARKERS = "osD^vPX*"
_APART = 0.07
"""Least distance of two numbers that are written under the axis, of its length."""
_ROWS = 4
"""Rows of crosses at the bottom."""
_SPLITS = {"validation": "-", "test": "--"}
# Of different size, so that both are seen where they meet.
_MARKS: dict[str, dict[str, Any]] = {
    "validation": {"markersize": 6},
    "test": {"markersize": 9, "markerfacecolor": "none"},
}
_RING: dict[str, Any] = {
    "marker": "o",
    "linestyle": "none",
    "markersize": 15,
    "color": "none",
    "markeredgecolor": "black",
    "markeredgewidth": 1.2,
}


def save_picture(sweep: Sweep, rows: Sequence[Row]) -> Path | None:
    """Draw the scores into the folder of a sweep; None, and no picture, while there are none."""
    best = best_row(sweep, rows)
    if best is None:
        return None
    path = sweep.folder / PICTURE
    with beside(path) as draft:
        draw(sweep, rows, best).savefig(draft, dpi=150, format="png")
    return path


def draw(sweep: Sweep, rows: Sequence[Row], best: Row) -> Figure:
    """The scores of some runs, of which one is the best."""
    # Slow to import, and of use only here.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numeric = [key for key in sweep.varied if all(is_number(parsed(text)) for text in sweep.grid[key])]
    lines = len(rows) // len(sweep.grid[numeric[0]]) if numeric else len(rows)
    figure = Figure(figsize=(8, max(4.5 if numeric else 2.5, 2 + 0.25 * lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if numeric:
        _lines(axes, sweep, rows, best, numeric[0])
    else:
        _dots(axes, sweep, rows, best)
    axes.set_title(f"Sweep of {sweep.recipe}", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=_explanation(sweep, rows, joined=bool(numeric)), loc="outside right lower", frameon=False)
    return figure


def _lines(axes: Axes, sweep: Sweep, rows: Sequence[Row], best: Row, key: str) -> None:
    """A line for each combination of the other keys, along the numbers of one."""
    others = [other for other in sweep.varied if other != key]
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(", ".join(row.point.values[other] for other in others), []).append(row)
    named = []
    for place, (name, members) in enumerate(series.items()):
        members = sorted(members, key=lambda row: _number(row, key))
        colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place // len(_COLOURS) % len(_MARKERS)]
        for split, style in _SPLITS.items():
            found = [(_number(row, key), row.scores[split]) for row in members if _drawable(row, split)]
            x, y = [number for number, _ in found], [score for _, score in found]
            axes.plot(x, y, style, marker=marker, color=colour, **_MARKS[split])
        failed = [_number(row, key) for row in members if row.state == "failed"]
        # One above the other, so that lines that fail at the same number are all seen.
        heights = [0.03 + 0.05 * (place % _ROWS)] * len(failed)
        axes.plot(failed, heights, "x", color=colour, transform=axes.get_xaxis_transform(), markeredgewidth=2)
        named.append(_handle(name, color=colour, marker=marker, markersize=6))
    axes.plot(_number(best, key), best.scores[sweep.split], **_RING)
    if any(row.state == "failed" for row in rows):
        low, high = axes.get_ylim()
        axes.set_ylim(low - (high - low) * 0.06 * min(len(series), _ROWS), high)
    _scale(axes, sweep.grid[key])
    axes.set_xlabel(key)
    axes.set_ylabel(sweep.metric)
    if others:
        axes.figure.legend(
            handles=named, title=", ".join(others), loc="outside right upper", frameon=False, alignment="left"
        )


def _dots(axes: Axes, sweep: Sweep, rows: Sequence[Row], best: Row) -> None:
    """A line for each run, where no key has numbers."""
    for place, row in enumerate(rows):
        for split in _SPLITS:
            if _drawable(row, split):
                axes.plot(row.scores[split], place, "o", color=_COLOURS[0], **_MARKS[split])
        if row.state == "failed":
            axes.plot(0.02, place, "x", color=_COLOURS[0], transform=axes.get_yaxis_transform(), markeredgewidth=2)
    axes.plot(best.scores[sweep.split], list(rows).index(best), **_RING)
    names = [", ".join(row.point.values[key] for key in sweep.varied) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(sweep.metric)
    axes.set_ylabel(", ".join(sweep.varied))


def _scale(axes: Axes, texts: Sequence[str]) -> None:
    numbers = sorted(float(parsed(text)) for text in texts)
    positive = [number for number in numbers if number > 0]
    if numbers[0] >= 0 and positive and positive[-1] > 10 * positive[0]:
        if numbers[0] > 0:
            axes.set_xscale("log")
        else:
            # Zero has its place beside the decades.
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    along = axes.xaxis.get_transform()
    places = along.transform(np.array(numbers))
    span = places[-1] - places[0]
    if span:
        axes.set_xlim(*along.inverted().transform(np.array([places[0] - 0.05 * span, places[-1] + 0.05 * span])))
    shown = [0]
    for place in range(1, len(numbers)):
        if places[place] - places[shown[-1]] > _APART * span:
            shown.append(place)
    axes.set_xticks([numbers[place] for place in shown], [f"{numbers[place]:g}" for place in shown])
    axes.minorticks_off()


def _explanation(sweep: Sweep, rows: Sequence[Row], joined: bool) -> list[Artist]:
    """What the marks mean, of those that are there; `joined`, if lines go through them."""
    seen = [split for split in _SPLITS if any(_drawable(row, split) for row in rows)]
    handles = [
        _handle(split, color="dimgrey", marker="o", linestyle=_SPLITS[split] if joined else "none", **_MARKS[split])
        for split in seen
    ]
    handles += [_handle(f"chosen by\n{sweep.split}", **_RING)]
    if any(row.state == "failed" for row in rows):
        handles += [_handle("failed", color="dimgrey", marker="x", markeredgewidth=2, linestyle="none")]
    return handles


def _handle(label: str, **style: Any) -> Artist:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def _number(row: Row, key: str) -> float:
    return float(parsed(row.point.values[key]))


def _drawable(row: Row, split: str) -> bool:
    return math.isfinite(row.scores.get(split, math.nan))
