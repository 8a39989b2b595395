"""The runs of a sweep while they trained: validation over updates and over time, a thin line for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tcnca.training.curves import CURVES, GRAY, STYLE, series, ticks
from tcnca.training.files import beside
from tcnca.training.log import read_log
from tcnca.training.sweeps.picture import COLORS, handle
from tcnca.training.sweeps.plan import Point, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 24
"""Runs of which the lines are still told apart; variants are few, and have colors, however often they are repeated."""
_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)))
_MARGIN = 0.06


class Curve(NamedTuple):
    """The validations of a run."""

    name: str
    """What its color stands for."""
    updates: NDArray[np.float64]
    """Updates done at each."""
    seconds: NDArray[np.float64]
    """Seconds from the first line of the log to each; NaN for those before it."""
    scores: NDArray[np.float64]
    """Score at each; NaN where it was not finite."""


def save_curves(sweep: Sweep) -> Path | None:
    """Draw the curves into the folder of a sweep; None, and no picture, where there are none, or too many."""
    if sweep.variants is None and len(sweep.points) > MOST:
        return None
    curves = [curve for point in sweep.points if len((curve := read_curve(sweep, point)).scores)]
    if not curves:
        return None
    import matplotlib.style

    # What people have set for their own plots is not for this one.
    with matplotlib.style.context(["default", STYLE]), beside(sweep.folder / CURVES) as draft:
        draw_curves(sweep, curves).savefig(draft, format="png")
    return sweep.folder / CURVES


def read_curve(sweep: Sweep, point: Point) -> Curve:
    """The validations of a run, from its log."""
    lines = read_log(point.folder)
    updates, scores = series([line for line in lines if line.get("split") == "validation"], "score")
    name = point.values[_key(sweep)]
    return Curve(name, updates, _seconds(lines, updates), scores)


def _key(sweep: Sweep) -> str:
    return (sweep.compared or sweep.varied)[0]


def _seconds(lines: Sequence[Mapping[str, Any]], updates: NDArray[np.float64]) -> NDArray[np.float64]:
    """The time at some updates. It begins with the first line of the log: what was compiled before is no training."""
    steps, seconds = series(lines, "seconds")
    if not len(steps):
        return np.full(len(updates), math.nan)
    return np.interp(updates, steps, seconds - seconds[0], left=math.nan)


def draw_curves(sweep: Sweep, curves: Sequence[Curve]) -> Figure:
    """The curves of some runs."""
    # Slow to import, and of use only here.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Sweep of {sweep.recipe}", fontsize=11, fontweight="bold", x=0.01, ha="left")
    over_updates, over_time = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(curve.name for curve in curves))
    looks = {name: _look(place) for place, name in enumerate(names)}
    for curve in curves:
        for axes, x in ((over_updates, curve.updates), (over_time, curve.seconds)):
            axes.plot(x, curve.scores, linewidth=1.0, alpha=0.85, **looks[curve.name])
            axes.plot(x[-1:], curve.scores[-1:], "o", markersize=3.5, color=looks[curve.name]["color"])
    _limit(over_updates, curves, sweep.higher_is_better)
    for axes, label in ((over_updates, "updates"), (over_time, "seconds after the first updates")):
        ticks(axes)
        axes.set_xlim(left=0)
        axes.set_xlabel(label, color=GRAY)
        axes.grid(alpha=0.25)
    over_updates.set_ylabel(f"{sweep.split} {sweep.metric}", color=GRAY)
    figure.legend(
        handles=[handle(text, linewidth=1.8, **looks[name]) for name, text in _entries(sweep, curves, names).items()],
        title=_key(sweep) if len(sweep.compared) > 1 else f"{_key(sweep)}, last score",
        loc="outside right center",
        frameon=False,
        alignment="left",
    )
    return figure


def _look(place: int) -> dict[str, Any]:
    return {
        "color": COLORS[place % len(COLORS)],
        "linestyle": _STYLES[place // len(COLORS) % len(_STYLES)],
    }


def _entries(sweep: Sweep, curves: Sequence[Curve], names: Sequence[str]) -> dict[str, str]:
    """What the legend says of each name, from above to below as the lines end."""
    ends = {name: float(np.mean([curve.scores[-1] for curve in curves if curve.name == name])) for name in names}
    order = sorted(names, key=lambda name: (math.isnan(ends[name]), -ends[name]))
    # Over seeds, a mean is that of one thing; over other keys, of none.
    return {name: f"{name}  {ends[name]:.3f}" if len(sweep.compared) < 2 else name for name in order}


def _limit(axes: Axes, curves: Sequence[Curve], higher_is_better: bool) -> None:
    """Cut off the beginning, beside which the ends would all look the same."""
    sign = -1.0 if higher_is_better else 1.0
    known = [found for curve in curves if len(found := sign * curve.scores[np.isfinite(curve.scores)])]
    if not known:
        return
    later, last = np.array([(scores[len(scores) // 4], scores[-1]) for scores in known]).T
    best = min(scores.min() for scores in known)
    # All ends are seen, the bad ones too.
    worst = max(np.median(later), last.max())
    margin = _MARGIN * (worst - best)
    if margin > 0:
        axes.set_ylim(*sorted((sign * (best - margin), sign * (worst + margin))))
