"""Times of layers and models as groups of bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tcnca.bench.colors import color_of
from tcnca.bench.ratios import MEAN
from tcnca.bench.report import EAGER, GRAPH, Report, Result, short_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = {"layer": ("forward", "backward"), "model": ("forward", "backward", "update", "step")}
_HOW = {EAGER: "as called", GRAPH: "replayed as a graph"}
BASE = "mega-fft"
_PANEL = 3.2
"""Inches."""


def draw_bars(report: Report) -> Figure:
    """Milliseconds of every part of a layer or model; for Long-Range Arena, speed as a multiple of MEGA's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    timed = [entry for entry in report.entries if entry.status == "timed"]
    hows = [how for how in (EAGER, GRAPH) if any(how in ways for entry in timed for ways in entry.times.values())]
    arena, sizes = report.suite == "lra", _sizes(timed)
    rows, columns = (len(hows), 2) if arena else (len(hows) * len(sizes), 1)
    shape = (13 if arena else 9, 0.9 + _PANEL * rows)
    figure = Figure(figsize=shape, layout=ConstrainedLayoutEngine(hspace=0.08))
    FigureCanvasAgg(figure)
    spots: Iterator[Axes] = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for how in hows:
        for part in ("inference", "step") if arena else ():
            _speeds(next(spots), report, timed, part, how)
        for size in () if arena else sizes:
            _milliseconds(next(spots), report.suite, [each for each in timed if each.sizes == size], how)
    if arena:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", frameon=False, ncols=len(handles))
    return figure


def _sizes(timed: Sequence[Result]) -> list[dict[str, int | str]]:
    found: list[dict[str, int | str]] = []
    for entry in timed:
        if entry.sizes not in found:
            found.append(entry.sizes)
    return found


def _look(entry: Result) -> dict[str, Any]:
    compiled = entry.name.endswith("-compiled")
    return {"color": color_of(entry.name), **({"hatch": "//", "edgecolor": "white"} if compiled else {})}


def _milliseconds(axes: Axes, suite: str, entries: Sequence[Result], how: str) -> None:
    parts = [part for part in _PARTS[suite] if any(entry.seconds(part, how) for entry in entries)]
    width = 0.84 / max(len(entries), 1)
    for place, entry in enumerate(entries):
        offset = (place - (len(entries) - 1) / 2) * width
        heights = [(entry.seconds(part, how) or 0.0) * 1e3 for part in parts]
        bars = axes.bar([spot + offset for spot in range(len(parts))], heights, 0.92 * width, **_look(entry))
        bars.set_label(_with_speed(entry, how))
        axes.bar_label(bars, [_label(height) for height in heights], fontsize=7, padding=1)
    sizes = ", ".join(f"{name} {value}" for name, value in entries[0].sizes.items())
    axes.set_title(f"{_HOW[how]}; {sizes}", loc="left", fontsize=9)
    _finish(axes, parts, "milliseconds")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _label(height: float) -> str:
    if not height:
        return ""
    if height >= 1000:
        return f"{height:,.0f}"
    return f"{height:.3g}" if height >= 10 else f"{height:.2g}" if height >= 1 else f"{height:.1g}"


def _with_speed(entry: Result, how: str) -> str:
    """The label of a contestant, with its speed and memory where it trains."""
    seconds = entry.seconds("step", how)
    speed = f"\n{entry.tokens / seconds:,.0f} tokens/s" if seconds else ""
    memory = f", {entry.peak_bytes / 1e9:.3g} GB" if seconds and entry.peak_bytes else ""
    return entry.label + speed + memory


def _speeds(axes: Axes, report: Report, timed: Sequence[Result], part: str, how: str) -> None:
    """Bars of speed, MEGA by FFT being 1, with the milliseconds written on them."""
    tasks = list(dict.fromkeys(str(entry.sizes["task"]) for entry in timed))
    names = list(dict.fromkeys(entry.name for entry in timed))
    width = 0.84 / len(names)
    for place, name in enumerate(names):
        mine = {str(entry.sizes["task"]): entry for entry in timed if entry.name == name}
        spots, heights, texts = [], [], []
        for spot, task in enumerate(tasks):
            base = _seconds(timed, BASE, task, part, how)
            own = mine[task].seconds(part, how) if task in mine else None
            if base and own:
                spots.append(spot + (place - (len(names) - 1) / 2) * width)
                heights.append(base / own)
                # What is 1 by definition need not say so.
                texts.append(short_time(own) if name == BASE else f"{base / own:.2f}×\n{short_time(own)}")
        bars = axes.bar(spots, heights, 0.92 * width, color=color_of(name), label=next(iter(mine.values())).label)
        # Its neighbors are taller as a rule, and leave room for a line of letters only.
        upright: dict[str, Any] = {"rotation": 90, "padding": 3} if name == BASE else {"padding": 1}
        axes.bar_label(bars, texts, fontsize=6.5, **upright)
        if name == "tcnca" and part == "inference":
            _paper(axes, report, tasks, (place - (len(names) - 1) / 2) * width)
    what = "inference" if part == "inference" else "a step of training"
    mean = _mean(report, part, how)
    average = f"; TCNCA is {mean:.2f}× as fast as MEGA by FFT in the mean" if mean else ""
    axes.set_title(f"{what}, {_HOW[how]}{average}", loc="left", fontsize=9)
    _finish(axes, tasks, "speed, MEGA by FFT = 1")


def _seconds(timed: Sequence[Result], name: str, task: str, part: str, how: str) -> float | None:
    for entry in timed:
        if entry.name == name and entry.sizes["task"] == task:
            return entry.seconds(part, how)
    return None


def _paper(axes: Axes, report: Report, tasks: Sequence[str], offset: float) -> None:
    """The paper's speed-ups of TCNCA's inference, on its bars."""
    found = {row["sizes"]["task"]: row["paper"] for row in report.ratios if row["paper"]}
    spots = [(spot + offset, found[task]) for spot, task in enumerate(tasks) if task in found]
    if spots:
        x, y = zip(*spots, strict=True)
        look: dict[str, Any] = {"color": "black", "markeredgecolor": "white", "markersize": 6, "linestyle": "none"}
        axes.plot(x, y, "D", label="TCNCA's inference in the paper, on a V100", **look)


def _mean(report: Report, part: str, how: str) -> float | None:
    for row in report.ratios:
        if row["sizes"] == MEAN and row["part"] == part and row["how"] == how and row["title"].endswith("FFT"):
            return float(row["value"])
    return None


def _finish(axes: Axes, names: Sequence[str], unit: str) -> None:
    axes.set_xticks(range(len(names)), list(names))
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(unit)
    axes.margins(y=0.22)
