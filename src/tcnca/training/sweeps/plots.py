"""The figures of a sweep: the scores of all runs, and their validations over steps and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tcnca.config import parse_value
from tcnca.training.files import atomic_path
from tcnca.training.logger import read_log
from tcnca.training.report import CURVES, GRAY, STYLE, format_ticks, series
from tcnca.training.sweeps.plan import Point, Sweep, is_number
from tcnca.training.sweeps.tables import Row, best_group, best_row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES = "sweep.png"
MAX_CURVES = 24
"""Runs whose lines can be told apart. Variants are few, and have a color each, however often they are repeated."""
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Distinguishable with color blindness too."""
_MARKERS = "osD^vPX*"
_TICK_SPACING = 0.07
"""Smallest distance of two labeled ticks, as a share of the axis."""
_CROSSES = 4
"""Rows of crosses at the bottom, which mark failed runs."""
_SPLITS = {"validation": "-", "test": "--"}
# Different sizes, so that both are visible where they coincide.
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


def save_scores(sweep: Sweep, rows: Sequence[Row]) -> Path | None:
    """Draw the scores into `sweep.png`; None if there are none."""
    if best_row(sweep, rows) is None:
        return None
    path = sweep.folder / SCORES
    with atomic_path(path) as temporary:
        draw_scores(sweep, rows).savefig(temporary, dpi=150, format="png")
    return path


def draw_scores(sweep: Sweep, rows: Sequence[Row]) -> Figure:
    """Draw the scores of runs along the first key with numbers, or a row of dots for each point. The best is marked."""
    # Slow to import, and needed only here.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A seed is not a quantity: runs that it repeats share a place, unless nothing else varies.
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
    marks = _legend_marks(sweep, rows, joined=bool(numeric), marked=best is not None)
    figure.legend(handles=marks, loc="outside right lower", frameon=False)
    return figure


def _lines(axes: Axes, sweep: Sweep, rows: Sequence[Row], key: str) -> None:
    """Draw a line for each combination of the other keys, along the numbers of one."""
    others = [other for other in sweep.varied if other != key]
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(_name(row, others), []).append(row)
    named = []
    for place, (name, members) in enumerate(series.items()):
        members = sorted(members, key=lambda row: _number(row, key))
        color, marker = _COLORS[place % len(_COLORS)], _MARKERS[place // len(_COLORS) % len(_MARKERS)]
        for split, style in _SPLITS.items():
            found = [(_number(row, key), row.scores[split]) for row in members if _drawable(row, split)]
            x, y = [number for number, _ in found], [score for _, score in found]
            axes.plot(x, y, style, marker=marker, color=color, **_MARKS[split])
        failed = [_number(row, key) for row in members if row.state == "failed"]
        # Stacked, so that all lines that fail at the same number are visible.
        heights = [0.03 + 0.05 * (place % _CROSSES)] * len(failed)
        axes.plot(failed, heights, "x", color=color, transform=axes.get_xaxis_transform(), markeredgewidth=2)
        named.append(_handle(name, color=color, marker=marker, markersize=6))
    if any(row.state == "failed" for row in rows):
        low, high = axes.get_ylim()
        axes.set_ylim(low - (high - low) * 0.06 * min(len(series), _CROSSES), high)
    _scale(axes, sweep.grid[key])
    axes.set_xlabel(key)
    axes.set_ylabel(sweep.metric)
    if others:
        axes.figure.legend(
            handles=named, title=", ".join(others), loc="outside right upper", frameon=False, alignment="left"
        )


def _dots(axes: Axes, sweep: Sweep, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Draw a row for each point with a dot for each seed, if no key has numbers."""
    keys = sweep.compared or sweep.varied
    for row in rows:
        place = names.index(_name(row, keys))
        for split in _SPLITS:
            if _drawable(row, split):
                axes.plot(row.scores[split], place, "o", color=_COLORS[0], **_MARKS[split])
        if row.state == "failed":
            axes.plot(0.02, place, "x", color=_COLORS[0], transform=axes.get_yaxis_transform(), markeredgewidth=2)
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
            # Zero has its place next to the decades.
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    along = axes.xaxis.get_transform()
    places = along.transform(np.array(numbers))
    span = places[-1] - places[0]
    if span:
        axes.set_xlim(*along.inverted().transform(np.array([places[0] - 0.05 * span, places[-1] + 0.05 * span])))
    shown = [0]
    for place in range(1, len(numbers)):
        if places[place] - places[shown[-1]] > _TICK_SPACING * span:
            shown.append(place)
    axes.set_xticks([numbers[place] for place in shown], [f"{numbers[place]:g}" for place in shown])
    axes.minorticks_off()


def _legend_marks(sweep: Sweep, rows: Sequence[Row], joined: bool, marked: bool) -> list[Artist]:
    """Explain the marks that are used; `joined` if lines connect them, `marked` if a point is selected."""
    seen = [split for split in _SPLITS if any(_drawable(row, split) for row in rows)]
    handles = [
        _handle(split, color="dimgray", marker="o", linestyle=_SPLITS[split] if joined else "none", **_MARKS[split])
        for split in seen
    ]
    handles += [_handle(f"selected by\n{sweep.split}", **_RING)] if marked else []
    if any(row.state == "failed" for row in rows):
        handles += [_handle("failed", color="dimgray", marker="x", markeredgewidth=2, linestyle="none")]
    return handles


def _handle(label: str, **style: Any) -> Artist:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def _number(row: Row, key: str) -> float:
    return float(parse_value(row.point.values[key]))


def _drawable(row: Row, split: str) -> bool:
    return math.isfinite(row.scores.get(split, math.nan))


_LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)))
_MARGIN = 0.06


class Curve(NamedTuple):
    """The validations of a run."""

    name: str
    """Value that its color stands for."""
    steps: NDArray[np.float64]
    """Steps done at each."""
    seconds: NDArray[np.float64]
    """Seconds from the first line of the log to each; NaN before it."""
    scores: NDArray[np.float64]
    """Score at each; NaN if it was not finite."""


def save_curves(sweep: Sweep) -> Path | None:
    """Draw the validations into `curves.png`; None if there are none, or too many runs."""
    if sweep.variants is None and len(sweep.points) > MAX_CURVES:
        return None
    curves = [curve for point in sweep.points if len((curve := read_curve(sweep, point)).scores)]
    if not curves:
        return None
    import matplotlib.style

    # Not with the user's own settings of matplotlib.
    with matplotlib.style.context(["default", STYLE]), atomic_path(sweep.folder / CURVES) as temporary:
        draw_curves(sweep, curves).savefig(temporary, format="png")
    return sweep.folder / CURVES


def read_curve(sweep: Sweep, point: Point) -> Curve:
    """Read the validations of a run from its log."""
    lines = read_log(point.folder)
    steps, scores = series([line for line in lines if line.get("split") == "validation"], "value")
    return Curve(point.values[_color_key(sweep)], steps, _seconds(lines, steps), scores)


def _color_key(sweep: Sweep) -> str:
    return (sweep.compared or sweep.varied)[0]


def _seconds(lines: Sequence[Mapping[str, Any]], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time at some steps, from the first line of the log on, which leaves out most of the compilation."""
    steps, seconds = series(lines, "seconds")
    if not len(steps):
        return np.full(len(at), math.nan)
    return np.interp(at, steps, seconds - seconds[0], left=math.nan)


def draw_curves(sweep: Sweep, curves: Sequence[Curve]) -> Figure:
    """Draw the validations of runs over steps and over time."""
    # Slow to import, and needed only here.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Sweep of {sweep.recipe}", fontsize=11, fontweight="bold", x=0.01, ha="left")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(curve.name for curve in curves))
    looks = {name: _look(place) for place, name in enumerate(names)}
    for curve in curves:
        for axes, x in ((over_steps, curve.steps), (over_time, curve.seconds)):
            axes.plot(x, curve.scores, linewidth=1.0, alpha=0.85, **looks[curve.name])
            axes.plot(x[-1:], curve.scores[-1:], "o", markersize=3.5, color=looks[curve.name]["color"])
    _limit(over_steps, curves, sweep.higher_is_better)
    for axes, label in ((over_steps, "step"), (over_time, "seconds after the first steps")):
        format_ticks(axes)
        axes.set_xlim(left=0)
        axes.set_xlabel(label, color=GRAY)
        axes.grid(alpha=0.25)
    over_steps.set_ylabel(f"{sweep.split} {sweep.metric}", color=GRAY)
    figure.legend(
        handles=[_handle(text, linewidth=1.8, **looks[name]) for name, text in _entries(sweep, curves, names).items()],
        title=_color_key(sweep) if len(sweep.compared) > 1 else f"{_color_key(sweep)}, last score",
        loc="outside right center",
        frameon=False,
        alignment="left",
    )
    return figure


def _look(place: int) -> dict[str, Any]:
    return {
        "color": _COLORS[place % len(_COLORS)],
        "linestyle": _LINE_STYLES[place // len(_COLORS) % len(_LINE_STYLES)],
    }


def _entries(sweep: Sweep, curves: Sequence[Curve], names: Sequence[str]) -> dict[str, str]:
    """Return the legend text of each name, in the order in which the lines end."""
    ends = {name: float(np.mean([curve.scores[-1] for curve in curves if curve.name == name])) for name in names}
    order = sorted(names, key=lambda name: (math.isnan(ends[name]), -ends[name]))
    # A mean over seeds is meaningful; one over other keys is not.
    return {name: f"{name}  {ends[name]:.3f}" if len(sweep.compared) < 2 else name for name in order}


def _limit(axes: Axes, curves: Sequence[Curve], higher_is_better: bool) -> None:
    """Cut off the start, whose range would make all ends look the same."""
    sign = -1.0 if higher_is_better else 1.0
    known = [found for curve in curves if len(found := sign * curve.scores[np.isfinite(curve.scores)])]
    if not known:
        return
    later, last = np.array([(scores[len(scores) // 4], scores[-1]) for scores in known]).T
    best = min(scores.min() for scores in known)
    # All ends stay visible, bad ones too.
    worst = max(np.median(later), last.max())
    margin = _MARGIN * (worst - best)
    if margin > 0:
        axes.set_ylim(*sorted((sign * (best - margin), sign * (worst + margin))))
