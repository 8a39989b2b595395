"""The picture of a sweep: the score over the first key that has numbers, or a line of dots for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tcnca.training.files import beside
from tcnca.config import parse_value
from tcnca.training.sweeps.plan import Sweep, is_number
from tcnca.training.sweeps.table import Row, best_group, best_row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "sweep.png"

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Told apart by people who do not see all colors as well."""
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
    if best_row(sweep, rows) is None:
        return None
    path = sweep.folder / PICTURE
    with beside(path) as draft:
        draw(sweep, rows).savefig(draft, dpi=150, format="png")
    return path


def draw(sweep: Sweep, rows: Sequence[Row]) -> Figure:
    """The scores of some runs, of which those of the best point are marked."""
    # Slow to import, and of use only here.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A seed is no quantity: what it repeats has a place of its own, unless nothing else varies.
    keys = sweep.compared or sweep.varied
    numeric = [key for key in keys if all(is_number(parse_value(text)) for text in sweep.grid[key])]
    best = best_group(sweep, rows)
    names = list(dict.fromkeys(_name(row, keys) for row in rows))
    lines = len(rows) // len(sweep.grid[numeric[0]]) if numeric else len(names)
    figure = Figure(figsize=(8, max(4.5 if numeric else 2.5, 2 + 0.25 * lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if numeric:
        _lines(axes, sweep, rows, numeric[0])
    else:
        _dots(axes, sweep, rows, names)
    for row in best.rows if best else []:
        score = row.scores[sweep.split]
        axes.plot(*((_number(row, numeric[0]), score) if numeric else (score, names.index(_name(row, keys)))), **_RING)
    axes.set_title(f"Sweep of {sweep.recipe}", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    marks = _explanation(sweep, rows, joined=bool(numeric), marked=best is not None)
    figure.legend(handles=marks, loc="outside right lower", frameon=False)
    return figure


def _lines(axes: Axes, sweep: Sweep, rows: Sequence[Row], key: str) -> None:
    """A line for each combination of the other keys, along the numbers of one."""
    others = [other for other in sweep.varied if other != key]
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(_name(row, others), []).append(row)
    named = []
    for place, (name, members) in enumerate(series.items()):
        members = sorted(members, key=lambda row: _number(row, key))
        color, marker = COLORS[place % len(COLORS)], _MARKERS[place // len(COLORS) % len(_MARKERS)]
        for split, style in _SPLITS.items():
            found = [(_number(row, key), row.scores[split]) for row in members if _drawable(row, split)]
            x, y = [number for number, _ in found], [score for _, score in found]
            axes.plot(x, y, style, marker=marker, color=color, **_MARKS[split])
        failed = [_number(row, key) for row in members if row.state == "failed"]
        # One above the other, so that lines that fail at the same number are all seen.
        heights = [0.03 + 0.05 * (place % _ROWS)] * len(failed)
        axes.plot(failed, heights, "x", color=color, transform=axes.get_xaxis_transform(), markeredgewidth=2)
        named.append(handle(name, color=color, marker=marker, markersize=6))
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


def _dots(axes: Axes, sweep: Sweep, rows: Sequence[Row], names: Sequence[str]) -> None:
    """A line for each point, with a dot for each seed, where no key has numbers."""
    keys = sweep.compared or sweep.varied
    for row in rows:
        place = names.index(_name(row, keys))
        for split in _SPLITS:
            if _drawable(row, split):
                axes.plot(row.scores[split], place, "o", color=COLORS[0], **_MARKS[split])
        if row.state == "failed":
            axes.plot(0.02, place, "x", color=COLORS[0], transform=axes.get_yaxis_transform(), markeredgewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(sweep.metric)
    axes.set_ylabel(", ".join(keys))


def _name(row: Row, keys: Sequence[str]) -> str:
    return ", ".join(row.point.values[key] for key in keys)


def _scale(axes: Axes, texts: Sequence[str]) -> None:
    numbers = sorted(float(parse_value(text)) for text in texts)
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


def _explanation(sweep: Sweep, rows: Sequence[Row], joined: bool, marked: bool) -> list[Artist]:
    """What the marks mean, of those that are there; `joined`, if lines go through them, `marked`, if one is chosen."""
    seen = [split for split in _SPLITS if any(_drawable(row, split) for row in rows)]
    handles = [
        handle(split, color="dimgray", marker="o", linestyle=_SPLITS[split] if joined else "none", **_MARKS[split])
        for split in seen
    ]
    handles += [handle(f"chosen by\n{sweep.split}", **_RING)] if marked else []
    if any(row.state == "failed" for row in rows):
        handles += [handle("failed", color="dimgray", marker="x", markeredgewidth=2, linestyle="none")]
    return handles


def handle(label: str, **style: Any) -> Artist:
    """An entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def _number(row: Row, key: str) -> float:
    return float(parse_value(row.point.values[key]))


def _drawable(row: Row, split: str) -> bool:
    return math.isfinite(row.scores.get(split, math.nan))
