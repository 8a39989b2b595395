"""Plots of a report: times over the sequence length for operators, bars for layers and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcnca.bench.report import (
    EAGER,
    GRAPH,
    KERNEL_SPEEDUP_PAPER,
    Report,
    Result,
    distinct_sizes,
    format_seconds,
    format_sizes,
    lra_mean,
)
from tcnca.errors import ConfigError
from tcnca.files import atomic_path
from tcnca.training.report import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
# Distinguishable for color-blind readers. EMA is blue and convolution orange, as in the paper.
_GRAY = "#888888"
_COLORS = {
    "tcn": "#d55e00",
    "naive-tcn": "#e69f00",
    "conv": "#cc79a7",
    "fft-ema": "#0072b2",
    "fft-ema-published": "#56b4e9",
    "fft-ema-cached": "#000000",
    "scan-ema": "#009e73",
    "tcnca": "#d55e00",
    "tcnca-linear": "#e69f00",
    "mega-fft": "#0072b2",
    "mega-scan": "#009e73",
}
# Curves of the operators, in the order of the legend.
_CURVES = {
    "fft-ema-published": "FFT-EMA as published",
    "fft-ema": "FFT-EMA",
    "scan-ema": "scan-EMA",
    "conv": "PyTorch's convolutions",
    "naive-tcn": "TCN, naive",
    "tcn": "TCN",
    "copy": "copy of the tensor",
}
_DIRECTIONS = {"bidirectional": "-bi", "causal": ""}
_STYLES = {"bidirectional": "-", "causal": "--"}
_MARKERS = "osD^v"
_MODES = {EAGER: "eager", GRAPH: "CUDA graph"}
_BASELINE = "mega-fft"
_BAR_PHASES = {"layer": ("forward", "backward"), "model": ("forward", "backward", "optimizer", "step")}


def check_plot_path(path: Path) -> None:
    """Raise a ConfigError unless the suffix is that of a supported format."""
    if path.suffix.lstrip(".").lower() not in FORMATS:
        suffixes = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(f"--plot: expected a file name that ends in one of {suffixes}, got {path}")


def save_plot(path: Path, report: Report) -> Path | None:
    """Plot a report in the format of the file's suffix. Return None, without a file, if there is nothing to plot."""
    check_plot_path(path)
    if not (_over_length(report) if report.suite == "ops" else report.timed):
        return None
    if report.suite == "lra" and all(result.name != _BASELINE for result in report.timed):
        return None
    # Importing matplotlib takes time that other commands should not spend.
    import matplotlib.style

    # Start from the default style, independent of the user's settings.
    with matplotlib.style.context(["default", STYLE]), atomic_path(path) as draft:
        draw(report).savefig(draft, dpi=200, format=path.suffix.lstrip(".").lower())
    return path


def draw(report: Report) -> Figure:
    """Draw the figure of a report."""
    figure = _draw_operators(report) if report.suite == "ops" else _draw_bars(report)
    settings = report.settings
    title = {
        "ops": f"Operators, {settings['channels']} channels, K={settings['kernel_size']}, D={settings['depth']}",
        "layer": "One layer of the EnWik8 models",
        "model": "A training step of the EnWik8 models",
        "lra": "Encoders of Long-Range Arena",
    }[report.suite]
    ending = " (interrupted)" if report.interrupted else ""
    title = f"{title} · {report.hardware['name']} · {settings['dtype']}{ending}"
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure


def _figure(width: float, height: float, **padding: Any) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(**padding))
    FigureCanvasAgg(figure)
    return figure


def _color(name: str) -> str:
    """Return the color of a candidate, the same for both directions and for compiled ones."""
    return _COLORS.get(name.removesuffix("-bi").removesuffix("-compiled"), _GRAY)


# Operators over the sequence length


def _over_length(report: Report) -> list[Result]:
    """Return the timed operators. The attention of models has no lengths to plot over."""
    return [result for result in report.timed if "model" not in result.sizes]


def _draw_operators(report: Report) -> Figure:
    """Plot forward and backward times by batch size and direction, and the cost of computing the EMA's kernel."""
    timed = _over_length(report)
    batches = sorted({int(result.sizes["batch"]) for result in timed})
    kernels = any(result.name.startswith("fft-ema-cached") for result in timed)
    rows = len(batches) + (1 if kernels else 0)
    figure = _figure(12, 0.8 + 2.7 * rows, wspace=0.04, hspace=0.06)
    grid = figure.add_gridspec(rows, 4)
    for row, batch in enumerate(batches):
        _draw_batch(figure, grid, row, batch, timed)
    _add_legend(figure, timed)
    if kernels:
        _draw_kernel_times(figure.add_subplot(grid[rows - 1, :2]), timed, batches[0])
        on_gpu = report.hardware["device"] == "cuda"
        _draw_kernel_shares(figure.add_subplot(grid[rows - 1, 2:]), timed, batches, on_gpu)
    return figure


def _draw_batch(figure: Figure, grid: Any, row: int, batch: int, timed: Sequence[Result]) -> None:
    """Draw the four panels of one batch size with a shared scale."""
    panels: list[Axes] = []
    for direction, suffix in _DIRECTIONS.items():
        for phase in ("forward", "backward"):
            axes = figure.add_subplot(grid[row, len(panels)], sharey=panels[0] if panels else None)
            for name in _CURVES:
                # A copy has no direction; it is the lower bound of both.
                points = _series(timed, name if name == "copy" else name + suffix, batch, phase)
                _plot(axes, points, _color(name), linestyle=":" if name == "copy" else "-")
            axes.set_title(f"{direction}, {phase}, batch {batch}", loc="left", fontsize=9)
            axes.set_yscale("log")
            _set_length_axis(axes, timed)
            axes.tick_params(labelleft=not panels)
            panels.append(axes)
    panels[0].set_ylabel(_time_label(timed))


def _time_label(timed: Sequence[Result]) -> str:
    graphs = any(GRAPH in modes for result in timed for modes in result.times.values())
    return "time on the device, µs" if graphs else "time, µs"


def _series(timed: Sequence[Result], name: str, batch: int, phase: str) -> list[tuple[int, float]]:
    return sorted(
        (int(result.sizes["length"]), seconds * 1e6)
        for result in timed
        if result.name == name and result.sizes["batch"] == batch and (seconds := result.seconds(phase)) is not None
    )


def _plot(axes: Axes, points: Sequence[tuple[int, float]], color: str, **style: Any) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=color, **{"marker": "o", "markersize": 3, "linewidth": 1.4, **style})


def _set_length_axis(axes: Axes, timed: Sequence[Result]) -> None:
    lengths = sorted({int(result.sizes["length"]) for result in timed})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{it // 1024}k" if it % 1024 == 0 else str(it) for it in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length, tokens", color="#666666")
    axes.grid(alpha=0.25, linewidth=0.6)


def _add_legend(figure: Figure, timed: Sequence[Result]) -> None:
    from matplotlib.lines import Line2D

    names = {result.name.removesuffix("-bi") for result in timed}
    handles = [
        Line2D([], [], color=_color(name), marker="o", markersize=3, label=label, ls=":" if name == "copy" else "-")
        for name, label in _CURVES.items()
        if name in names
    ]
    figure.legend(handles=handles, loc="outside lower left", frameon=False, ncols=len(handles), columnspacing=1.6)


def _draw_kernel_times(axes: Axes, timed: Sequence[Result], batch: int) -> None:
    """Plot the FFT-EMA with and without computing its kernel."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator

    for direction, suffix in _DIRECTIONS.items():
        for name in ("fft-ema", "fft-ema-cached"):
            points = _series(timed, name + suffix, batch, "forward")
            _plot(axes, points, _color(name), linestyle=_STYLES[direction])
    axes.set_yscale("log")
    _set_length_axis(axes, timed)
    axes.set_ylabel(_time_label(timed))
    # The curves can span less than a factor of ten, which would leave the axis without a tick.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_title(f"cost of computing the EMA's kernel, forward, batch {batch}", loc="left", fontsize=9)
    kernels = {"kernel computed in the call": "fft-ema", "cached kernel": "fft-ema-cached"}
    handles = [Line2D([], [], color=_color(name), label=label) for label, name in kernels.items()]
    handles += [Line2D([], [], color="#666666", ls=style, label=label) for label, style in _STYLES.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="best")


def _draw_kernel_shares(axes: Axes, timed: Sequence[Result], batches: Sequence[int], on_gpu: bool) -> None:
    """Plot the share of the FFT-EMA's time that its kernel takes."""
    for index, batch in enumerate(batches):
        for direction, suffix in _DIRECTIONS.items():
            whole = dict(_series(timed, f"fft-ema{suffix}", batch, "forward"))
            cached = dict(_series(timed, f"fft-ema-cached{suffix}", batch, "forward"))
            points = [(length, 100 * (1 - cached[length] / whole[length])) for length in whole if length in cached]
            style = {"linestyle": _STYLES[direction], "marker": _MARKERS[index % len(_MARKERS)], "markersize": 4}
            _plot(axes, points, _color("fft-ema"), label=f"{direction}, batch {batch}", **style)
    if on_gpu:
        paper = [(length, 100 * (1 - 1 / speedup)) for length, speedup in KERNEL_SPEEDUP_PAPER.items()]
        _plot(axes, paper, "#666666", label="the paper, on a V100", linestyle="none", marker="x", markersize=5)
    _set_length_axis(axes, timed)
    axes.set_ylabel("share of the time, %")
    axes.set_ylim(0, 100)
    axes.set_title("share of the FFT-EMA's time that computes the kernel, forward", loc="left", fontsize=9)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, ncols=2)


# Layers and models


def _draw_bars(report: Report) -> Figure:
    """Plot milliseconds of every phase; for Long-Range Arena, speed relative to MEGA."""
    timed = report.timed
    modes = [mode for mode in _MODES if any(mode in ways for it in timed for ways in it.times.values())]
    lra, sizes = report.suite == "lra", distinct_sizes(timed)
    rows, columns = (len(modes), 2) if lra else (len(modes) * len(sizes), 1)
    figure = _figure(13 if lra else 9, 0.9 + 3.2 * rows, hspace=0.08)
    panels: Iterator[Axes] = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for mode in modes:
        for phase in ("inference", "step") if lra else ():
            _draw_speeds(next(panels), report, phase, mode)
        for size in () if lra else sizes:
            _draw_milliseconds(next(panels), report.suite, [each for each in timed if each.sizes == size], mode)
    if lra:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", frameon=False, ncols=len(handles))
    return figure


def _draw_milliseconds(axes: Axes, suite: str, results: Sequence[Result], mode: str) -> None:
    phases = [phase for phase in _BAR_PHASES[suite] if any(result.seconds(phase, mode) for result in results)]
    width = 0.84 / max(len(results), 1)
    for index, result in enumerate(results):
        offset = (index - (len(results) - 1) / 2) * width
        heights = [(result.seconds(phase, mode) or 0.0) * 1e3 for phase in phases]
        style: dict[str, Any] = {"hatch": "//", "edgecolor": "white"} if result.name.endswith("-compiled") else {}
        spots = [spot + offset for spot in range(len(phases))]
        bars = axes.bar(spots, heights, 0.92 * width, color=_color(result.name), **style)
        bars.set_label(_bar_label(result, mode))
        axes.bar_label(bars, [_format_height(height) for height in heights], fontsize=7, padding=1)
    axes.set_title(f"{_MODES[mode]}; {format_sizes(results[0].sizes)}", loc="left", fontsize=9)
    _set_bar_axes(axes, phases, "milliseconds")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _format_height(height: float) -> str:
    if not height:
        return ""
    if height >= 1000:
        return f"{height:,.0f}"
    return f"{height:.3g}" if height >= 10 else f"{height:.2g}" if height >= 1 else f"{height:.1g}"


def _bar_label(result: Result, mode: str) -> str:
    """Return the label of a candidate, with speed and memory if it trains."""
    seconds = result.seconds("step", mode)
    speed = f"\n{result.tokens / seconds:,.0f} tokens/s" if seconds else ""
    memory = f", {result.peak_bytes / 1e9:.3g} GB" if seconds and result.peak_bytes else ""
    return result.label + speed + memory


def _draw_speeds(axes: Axes, report: Report, phase: str, mode: str) -> None:
    """Draw bars of speed relative to the baseline, labeled with times."""
    by_name: dict[str, dict[str, Result]] = {}
    for result in report.timed:
        by_name.setdefault(result.name, {})[str(result.sizes["task"])] = result
    tasks = list(dict.fromkeys(str(result.sizes["task"]) for result in report.timed))
    width = 0.84 / len(by_name)
    for index, (name, results) in enumerate(by_name.items()):
        offset = (index - (len(by_name) - 1) / 2) * width
        spots, heights, labels = [], [], []
        for spot, task in enumerate(tasks):
            baseline = by_name[_BASELINE][task].seconds(phase, mode) if task in by_name[_BASELINE] else None
            seconds = results[task].seconds(phase, mode) if task in results else None
            if baseline and seconds:
                spots.append(spot + offset)
                heights.append(baseline / seconds)
                speedup = "" if name == _BASELINE else f"{baseline / seconds:.2f}×\n"
                labels.append(speedup + format_seconds(seconds))
        bars = axes.bar(spots, heights, 0.92 * width, color=_color(name), label=next(iter(results.values())).label)
        # The bars next to the baseline are usually taller and leave little room.
        style: dict[str, Any] = {"rotation": 90, "padding": 3} if name == _BASELINE else {"padding": 1}
        axes.bar_label(bars, labels, fontsize=6.5, **style)
        if name == "tcnca" and phase == "inference":
            _draw_paper_speeds(axes, report, tasks, offset)
    mean = lra_mean(report, phase, mode)
    average = f"; TCNCA is {mean:.2f}× as fast as MEGA by FFT on average" if mean else ""
    name = "inference" if phase == "inference" else "a training step"
    axes.set_title(f"{name}, {_MODES[mode]}{average}", loc="left", fontsize=9)
    _set_bar_axes(axes, tasks, "speed, MEGA by FFT = 1")


def _draw_paper_speeds(axes: Axes, report: Report, tasks: Sequence[str], offset: float) -> None:
    found = {ratio.sizes["task"]: ratio.paper for ratio in report.ratios if ratio.paper}
    points = [(spot + offset, found[task]) for spot, task in enumerate(tasks) if task in found]
    if points:
        x, y = zip(*points, strict=True)
        style: dict[str, Any] = {"color": "black", "markeredgecolor": "white", "markersize": 6, "linestyle": "none"}
        axes.plot(x, y, "D", label="TCNCA's inference in the paper, on a V100", **style)


def _set_bar_axes(axes: Axes, names: Sequence[str], unit: str) -> None:
    axes.set_xticks(range(len(names)), list(names))
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(unit)
    axes.margins(y=0.22)
