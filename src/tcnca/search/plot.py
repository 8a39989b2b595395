"""The plot of a search: time over parameters and reached lags, with the front and the recommendation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from tcnca.search.search import Candidate, SearchReport
from tcnca.training.report import BLUE, GRAY, ORANGE, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GRAY, _LIGHT = "#a8afb5", "#dfe3e6"


def save_plot(path: Path, report: SearchReport) -> None:
    """Draw a report in the format of the file's suffix."""
    save_figure(functools.partial(draw, report), path)


def draw(report: SearchReport) -> Figure:
    """Draw time over parameters, and time over the reached lags."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    length = report.size["length"]

    def reached(each: Candidate) -> float:
        return 100.0 * (1.0 - each.missed_lags / length)

    best = next(each for each in report.measured if each.structure == report.recommendation.structure)
    predicted = [each for each in report.candidates if each.seconds is None]
    groups = {
        "predicted, with gaps": ([it for it in predicted if it.missed_lags], {"s": 10, "color": _LIGHT}),
        "predicted, without gaps": ([it for it in predicted if not it.missed_lags], {"s": 10, "color": _GRAY}),
        "measured": ([it for it in report.measured if not it.front], {"s": 16, "color": BLUE}),
        "Pareto front": (
            [it for it in report.measured if it.front],
            {"s": 30, "facecolors": "white", "edgecolors": BLUE, "linewidths": 1.4},
        ),
        f"recommended: {best.structure}": ([best], {"s": 60, "color": ORANGE, "marker": "D", "zorder": 3}),
    }
    for axes, value in ((left, lambda each: each.parameters), (right, reached)):
        for label, (members, style) in groups.items():
            times = [1e3 * (it.predicted_seconds if it.seconds is None else it.seconds) for it in members]
            axes.scatter([value(each) for each in members], times, label=label, **style)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.margins(x=0.05, y=0.12)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2.0, 0.5)))
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:,g}")
    left.set_xlabel("parameters", color=GRAY)
    left.set_ylabel("forward and backward, ms")
    right.set_xlabel("lags reached, %", color=GRAY)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower left",
        frameon=False,
        ncols=5,
        columnspacing=0.8,
        handletextpad=0.2,
    )
    size = report.size
    shape = f"{size['batch']} × {length:,} × {size['channels']}, {'causal' if size['causal'] else 'bidirectional'}"
    title = f"TCN structures for {shape} · {report.hardware['name']} · {size['dtype']}"
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure
