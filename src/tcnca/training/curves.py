"""The curves of a run as a picture: loss, validation, learning rate and speed over its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tcnca.training.files import beside
from tcnca.training.log import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = "curves.png"
GRAY = "#666666"
_INK, _FAINT, _ACCENT = "#1f4e79", "#a9c4de", "#c8553d"
STYLE = {
    "font.size": 9.0,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.xmargin": 0.02,
}
_LINES_TO_SMOOTH = 20


def draw_curves(folder: Path, title: str, *, higher_is_better: bool) -> Path | None:
    """Draw the log of a run into its folder.

    Args:
        folder: of the run.
        title: to put above.
        higher_is_better: whether a validation with a higher score is better.

    Returns:
        The picture, or None if nothing was logged yet.
    """
    lines = read_log(folder)
    if not lines:
        return None
    # Loading matplotlib takes a while, which no command but this one's end should wait for.
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # What people have set for their own plots is not for this one.
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(7.2, 4.8), dpi=200, layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.06))
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        axes = figure.subplots(2, 2, sharex=True)
        _loss(axes[0, 0], lines)
        _validation(axes[0, 1], lines, higher_is_better)
        _plain(axes[1, 0], lines, "rate", "learning rate")
        _plain(axes[1, 1], lines, "tokens_per_second", "tokens per second")
        for axis in axes.flat:
            ticks(axis)
        for axis in axes[1]:
            axis.set_xlim(0, 1.02 * lines[-1]["step"])
            axis.set_xlabel("updates", color=GRAY)
        with beside(folder / CURVES) as draft:
            FigureCanvasAgg(figure).print_png(draft)
    return folder / CURVES


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Updates, and a number at each; NaN where it was not finite. Numbers of a split are not those of training."""
    found = [(line["step"], line[name]) for line in lines if name in line and ("split" in line) == (name == "score")]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)


def smoothed(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Means over `width` neighbors on each side, as far as there are any; what is NaN does not count."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    # At the beginning as many on one side as on the other: a loss that falls steeply would be drawn down.
    low, high = np.maximum(place - width, 0), np.minimum(place + np.minimum(width, place) + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def best_of(
    lines: Sequence[Mapping[str, Any]], *, higher_is_better: bool, split: str = "validation"
) -> tuple[int, float] | None:
    """The update with the best validation, and its score; the first of those that are equal."""
    found = [(line["step"], line["score"]) for line in lines if line.get("split") == split]
    found = [(step, score) for step, score in found if score is not None]
    if not found:
        return None
    return max(found, key=lambda each: (each[1] if higher_is_better else -each[1], -each[0]))


_DECADES = 30
"""How many times its least value the loss must reach for a logarithmic axis to show more."""


def _loss(axis: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    steps, losses = series(lines, "loss")
    axis.set_title("training loss", loc="left", fontsize=9)
    known = losses[np.isfinite(losses)]
    logarithmic = len(known) > 0 and known.min() > 0 and known.max() > _DECADES * known.min()
    if logarithmic:
        axis.set_yscale("log")
    if len(steps) < _LINES_TO_SMOOTH:
        axis.plot(steps, losses, color=_INK, linewidth=1.2)
        return
    axis.plot(steps, losses, color=_FAINT, linewidth=0.7)
    # Means of what the axis shows: on a logarithmic one, the mean of losses would draw every peak as a table.
    shown = np.log(losses) if logarithmic else losses
    means = smoothed(shown, max(len(steps) // 50, 1))
    axis.plot(steps, np.exp(means) if logarithmic else means, color=_INK, linewidth=1.4)


def _validation(axis: Axes, lines: Sequence[Mapping[str, Any]], higher_is_better: bool) -> None:
    lines = [line for line in lines if line.get("split") == "validation"]
    steps, scores = series(lines, "score")
    best = best_of(lines, higher_is_better=higher_is_better)
    axis.set_title(f"validation {lines[0]['metric']}" if lines else "validation", loc="left", fontsize=9)
    if best is None:
        axis.text(0.5, 0.5, "none yet", color=GRAY, ha="center", va="center", transform=axis.transAxes)
        axis.set_yticks([])
        return
    axis.plot(steps, scores, color=_INK, linewidth=1.2, marker="o", markersize=1.8)
    axis.margins(y=0.18)
    final = (int(steps[-1]), float(scores[-1]))
    marks = [(*best, "best and final")] if best == final else [(*best, "best"), (*final, "final")]
    for step, score, name in marks:
        color = _INK if name == "final" else _ACCENT
        axis.plot([step], [score], "o", color=color, markersize=4, clip_on=False)
        late = step > (steps[0] + steps[-1]) / 2 or len(steps) == 1
        above = higher_is_better == (name != "final")
        axis.annotate(
            f"{name} {score:.4f}",
            (step, score),
            xytext=(0, 6 if above else -6),
            textcoords="offset points",
            ha="right" if late else "left",
            va="bottom" if above else "top",
            color=color,
            fontsize=8,
        )


def _plain(axis: Axes, lines: Sequence[Mapping[str, Any]], name: str, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=9)
    steps, values = series(lines, name)
    axis.plot(steps, values, color=_INK, linewidth=1.2)
    if np.any(values > 0):
        axis.set_ylim(0, 1.08 * np.nanmax(values))


def ticks(axis: Axes) -> None:
    """Few and short numbers at an axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(_short))
    if len(axis.get_yticks()) and axis.get_yscale() == "linear":
        axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.yaxis.set_major_formatter(FuncFormatter(_short))


def _short(value: float, _: int) -> str:
    """A number at an axis: 0.003, 1e-05, 250, 40k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
