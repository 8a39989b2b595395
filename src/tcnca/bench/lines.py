"""Times of operators over the length of the sequence, as in the paper's Figure 2, and what making a kernel costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tcnca.bench.colors import color_of
from tcnca.bench.report import Report, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = ("fft-ema-published", "fft-ema", "scan-ema", "conv", "plain-tcn", "tcn", "copy")
_NAMES = {
    "fft-ema-published": "FFT-EMA as published",
    "fft-ema": "FFT-EMA",
    "scan-ema": "scan-EMA",
    "conv": "PyTorch's convolutions",
    "plain-tcn": "TCN, plain PyTorch",
    "tcn": "TCN",
    "copy": "copy of the tensor",
}
_DIRECTIONS = {"bidirectional": "-bi", "causal": ""}
_STYLES = {"bidirectional": "-", "causal": "--"}
_MARKERS = "osD^v"
_PAPER = {8192: 1.51, 16_384: 1.25, 32_768: 1.23, 65_536: 1.20, 131_072: 1.25}


def draw_lines(report: Report) -> Figure:
    """Forward and backward times for each batch and direction, and below them the share of making kernels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    timed = drawable(report)
    batches = sorted({int(entry.sizes["batch"]) for entry in timed})
    kernels = any(entry.name.startswith("fft-ema-cached") for entry in timed)
    rows = len(batches) + (1 if kernels else 0)
    figure = Figure(figsize=(12, 0.8 + 2.7 * rows), layout=ConstrainedLayoutEngine(wspace=0.04, hspace=0.06))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 4)
    for row, batch in enumerate(batches):
        _row(figure, grid, row, batch, timed)
    _legend(figure, timed)
    if kernels:
        _kernel_times(figure.add_subplot(grid[rows - 1, :2]), timed, batches[0])
        _kernel_shares(figure.add_subplot(grid[rows - 1, 2:]), timed, batches, report.hardware["device"] == "cuda")
    return figure


def drawable(report: Report) -> list[Result]:
    """What has a place over the length: operators that were timed. The attention has sizes of its own."""
    return [entry for entry in report.entries if entry.status == "timed" and "of" not in entry.sizes]


def _row(figure: Figure, grid: Any, row: int, batch: int, timed: Sequence[Result]) -> None:
    """The four panels of one batch, with one scale for all."""
    panels: list[Axes] = []
    for direction, end in _DIRECTIONS.items():
        for part in ("forward", "backward"):
            column = len(panels)
            axes = figure.add_subplot(grid[row, column], sharey=panels[0] if panels else None)
            for name in _SHOWN:
                # A copy has no direction; it is the floor of both.
                _line(axes, _series(timed, name if name == "copy" else name + end, batch, part), color_of(name))
            axes.set_title(f"{direction}, {part}, batch {batch}", loc="left", fontsize=9)
            axes.set_yscale("log")
            _length_axis(axes, timed)
            axes.tick_params(labelleft=column == 0)
            panels.append(axes)
    panels[0].set_ylabel(_how(timed))


def _how(timed: Sequence[Result]) -> str:
    replayed = any("graph" in ways for entry in timed for ways in entry.times.values())
    return "time on the device, µs" if replayed else "time, µs"


def _series(timed: Sequence[Result], name: str, batch: int, part: str) -> list[tuple[int, float]]:
    found = [
        (int(entry.sizes["length"]), seconds * 1e6)
        for entry in timed
        if entry.name == name and entry.sizes["batch"] == batch and (seconds := entry.seconds(part)) is not None
    ]
    return sorted(found)


def _line(axes: Axes, points: Sequence[tuple[int, float]], color: str, **style: Any) -> None:
    if points:
        dotted = {"linestyle": ":"} if color == color_of("copy") else {}
        lengths, values = zip(*points, strict=True)
        look = {"marker": "o", "markersize": 3, "linewidth": 1.4, **dotted, **style}
        axes.plot(lengths, values, color=color, **look)


def _length_axis(axes: Axes, timed: Sequence[Result]) -> None:
    lengths = sorted({int(entry.sizes["length"]) for entry in timed})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length, tokens", color="#666666")
    axes.grid(alpha=0.25, linewidth=0.6)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _legend(figure: Figure, timed: Sequence[Result]) -> None:
    from matplotlib.lines import Line2D

    there = {entry.name.removesuffix("-bi") for entry in timed}
    handles = [
        Line2D(
            [], [], color=color_of(name), marker="o", markersize=3, label=_NAMES[name],
            linestyle=":" if name == "copy" else "-",
        )
        for name in _SHOWN
        if name in there
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower left", frameon=False, ncols=len(handles), columnspacing=1.6)


def _kernel_times(axes: Axes, timed: Sequence[Result], batch: int) -> None:
    """The FFT-EMA with and without making its kernel."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator

    for direction, end in _DIRECTIONS.items():
        for name in ("fft-ema", "fft-ema-cached"):
            points = _series(timed, name + end, batch, "forward")
            _line(axes, points, color_of(name), linestyle=_STYLES[direction])
    axes.set_yscale("log")
    _length_axis(axes, timed)
    axes.set_ylabel(_how(timed))
    # Less than a power of ten may lie between the lines, which would leave the axis without a number.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_title(f"what making the EMA's kernel costs, forward, batch {batch}", loc="left", fontsize=9)
    looks: list[tuple[str, str, Any]] = [
        ("kernel made in the call", color_of("fft-ema"), "-"),
        ("kernel kept", color_of("fft-ema-cached"), "-"),
    ]
    looks += [(direction, "#666666", style) for direction, style in _STYLES.items()]
    handles = [Line2D([], [], color=color, linestyle=style, label=label) for label, color, style in looks]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="best")


def _kernel_shares(axes: Axes, timed: Sequence[Result], batches: Sequence[int], on_gpu: bool) -> None:
    """The share of the FFT-EMA's time that goes into its kernel."""
    for place, batch in enumerate(batches):
        for direction, end in _DIRECTIONS.items():
            made = dict(_series(timed, f"fft-ema{end}", batch, "forward"))
            kept = dict(_series(timed, f"fft-ema-cached{end}", batch, "forward"))
            points = [(length, 100 * (1 - kept[length] / made[length])) for length in made if length in kept]
            style = {"linestyle": _STYLES[direction], "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4}
            _line(axes, points, color_of("fft-ema"), label=f"{direction}, batch {batch}", **style)
    if on_gpu:
        paper = [(length, 100 * (1 - 1 / speedup)) for length, speedup in _PAPER.items()]
        _line(axes, paper, "#666666", label="the paper, on a V100", linestyle="none", marker="x", markersize=5)
    _length_axis(axes, timed)
    axes.set_ylabel("share of the time, %")
    axes.set_ylim(0, 100)
    axes.set_title("share of the FFT-EMA's time that makes the kernel, forward", loc="left", fontsize=9)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, ncols=2)
