"""Plots of a report: times over the sequence length for operators, bars for layers and models."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcnca.bench.report import EAGER, GRAPH, Report, Result, distinct_sizes, format_number, format_seconds, format_sizes
from tcnca.extras import check_plot_path
from tcnca.training.report import AMBER, BLUE, GRAY, GREEN, ORANGE, PINK, SKY, YELLOW, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# EMA is blue and convolution orange, as in the paper.
_COLORS = {
    "tcn": ORANGE,
    "naive-tcn": AMBER,
    "conv": PINK,
    "fft-ema": BLUE,
    "fft-ema-published": SKY,
    "scan-ema": GREEN,
    "copy": "#888888",
    "tcnca": ORANGE,
    "tcnca-linear": AMBER,
    "mega-fft": BLUE,
    "mega-scan": GREEN,
    "mega": BLUE,
    "transformer": SKY,
    "gated-deltanet": PINK,
    "mamba2": YELLOW,
}
# Hatches of candidates that are another one in a different way, and lines of ways to generate.
_VARIANTS = {"-compiled": "//"}
_LINES = {"": "-", "-int8": "--", "-float8": ":", "-model": "-."}
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
_MODES = {EAGER: "eager", GRAPH: "CUDA graph"}
_BASELINE = "mega-fft"
# The optimizer takes almost no time, and is part of the step.
_BAR_PHASES = ("forward", "backward", "step")


def save_plot(path: Path, report: Report) -> Path | None:
    """Plot a report in the format of the file's suffix. Return None, without a file, if there is nothing to plot."""
    check_plot_path(path)
    plotted = report.timed
    if report.suite == "ops":
        plotted = _operators(report)
    elif report.suite == "lra":
        # Speeds are relative to that of the baseline.
        plotted = [result for result in plotted if result.name == _BASELINE]
    if not plotted:
        return None
    save_figure(functools.partial(draw, report), path)
    return path


def draw(report: Report) -> Figure:
    """Draw the figure of a report."""
    figure = {"ops": _draw_operators, "lra": _draw_lra, "generate": _draw_generation}.get(report.suite, _draw_phases)(
        report
    )
    settings = report.settings
    title = {
        "ops": f"Operators, {settings['channels']} channels, K={settings['kernel_size']}, D={settings['depth']}",
        "layer": "One layer of the EnWik8 models",
        "model": "A training step of the EnWik8 models",
        "lra": "Encoders of Long-Range Arena",
        "generate": "Generation of a token by the EnWik8 models",
    }[report.suite]
    ending = " (interrupted)" if report.interrupted else ""
    title = f"{title} · {report.hardware['name']} · {settings['dtype']}{ending}"
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure


def _panels(width: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 0.9 + 3.0 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _operators(report: Report) -> list[Result]:
    """Return what is plotted over the length, which attention and SSMs are not."""
    return [result for result in report.timed if result.name.removesuffix("-bi") in _CURVES]


def _draw_operators(report: Report) -> Figure:
    """Plot forward and backward times over the length, by batch size and direction."""
    timed = _operators(report)
    lengths, batches = (sorted({int(result.sizes[name]) for result in timed}) for name in ("length", "batch"))
    directions = {"bidirectional": "-bi", "causal": ""}
    figure, panels = _panels(12, len(batches), 4, sharey="row")
    for batch, row in zip(batches, panels, strict=True):
        for axes, (direction, phase) in zip(row, itertools.product(directions, ("forward", "backward")), strict=True):
            for name, label in _CURVES.items():
                # A copy has no direction; it is the lower bound of both.
                full_name = name if name == "copy" else name + directions[direction]
                chosen = [it for it in timed if it.name == full_name and it.sizes["batch"] == batch]
                times = {int(it.sizes["length"]): seconds for it in chosen if (seconds := it.seconds(phase))}
                x = sorted(times)
                style: dict[str, Any] = {"marker": "o", "markersize": 3, "ls": ":" if name == "copy" else "-"}
                if x:
                    axes.plot(x, [times[length] * 1e6 for length in x], color=_COLORS[name], label=label, **style)
            axes.set_title(f"{direction}, {phase}, batch {batch}", loc="left", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [f"{it // 1024}k" if it % 1024 == 0 else str(it) for it in lengths])
            axes.minorticks_off()
            axes.set_xlabel("length, tokens", color=GRAY)
            axes.grid(alpha=0.25, linewidth=0.6)
        row[0].set_ylabel("time on the device, µs" if report.hardware["device"] == "cuda" else "time, µs")
    _add_legend(figure)
    return figure


def _draw_generation(report: Report) -> Figure:
    """Plot the time of a token, and on a GPU the memory, over the position, by batch size."""
    batches = sorted({int(result.sizes["batch"]) for result in report.timed})
    memory = any(result.peak_bytes for result in report.timed)
    figure, panels = _panels(9, len(batches), 2 if memory else 1)
    for batch, row in zip(batches, panels, strict=True):
        candidates: dict[str, list[Result]] = {}
        for result in report.timed:
            if result.sizes["batch"] == batch:
                candidates.setdefault(result.label, []).append(result)
        for label, results in candidates.items():
            results.sort(key=lambda it: int(it.sizes["position"]))
            name = next((name for name in _LINES if name and results[0].name.endswith(name)), "")
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "ls": _LINES[name], "label": label}
            style["color"] = _COLORS[results[0].name.removesuffix(name)]
            x = [int(it.sizes["position"]) for it in results]
            row[0].plot(x, [(it.seconds("forward") or 0.0) * 1e3 for it in results], **style)
            if memory:
                row[1].plot(x, [(it.peak_bytes or 0) / 2**30 for it in results], **style)
        for axes, unit in zip(row, ("milliseconds a token", "peak memory, GiB"), strict=False):
            axes.set_title(f"batch {batch}", loc="left", fontsize=9)
            axes.set_xscale("log")
            low, high = axes.get_ylim()
            if high > 5 * low:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0.0)
            axes.set_xlabel("tokens before", color=GRAY)
            axes.set_ylabel(unit)
            axes.grid(alpha=0.25, linewidth=0.6)
    _add_legend(figure, columns=4)
    return figure


def _add_legend(figure: Figure, columns: int | None = None) -> None:
    """Add one legend for all panels."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    options: dict[str, Any] = {"loc": "outside lower left", "frameon": False, "ncols": columns or len(entries)}
    figure.legend(list(entries.values()), list(entries), **options)


def _modes(report: Report) -> list[str]:
    return [mode for mode in _MODES if any(mode in it for result in report.timed for it in result.times.values())]


def _draw_phases(report: Report) -> Figure:
    """Plot milliseconds of every phase of a layer or a training step."""
    modes, sizes = _modes(report), distinct_sizes(report.timed)
    figure, panels = _panels(9, len(modes) * len(sizes), 1)
    for axes, (mode, size) in zip(panels.flat, itertools.product(modes, sizes), strict=True):
        results = [result for result in report.timed if result.sizes == size]
        bars: list[dict[str, tuple[float, str]]] = []
        for result in results:
            times = {phase: seconds for phase in _BAR_PHASES if (seconds := result.seconds(phase, mode))}
            bars.append({phase: (seconds * 1e3, format_number(seconds * 1e3)) for phase, seconds in times.items()})
        groups = [phase for phase in _BAR_PHASES if any(phase in heights for heights in bars)]
        _draw_bars(axes, groups, results, [_speed_label(result, mode) for result in results], bars)
        axes.set_title(f"{_MODES[mode]}; {format_sizes(size)}", loc="left", fontsize=9)
        axes.set_ylabel("milliseconds")
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _speed_label(result: Result, mode: str) -> str:
    """Return the label of a candidate, with speed and memory if it trains."""
    seconds = result.seconds("step", mode)
    speed = f"\n{result.tokens / seconds:,.0f} tokens/s" if seconds else ""
    memory = f", {result.peak_bytes / 1e9:.3g} GB" if seconds and result.peak_bytes else ""
    return result.label + speed + memory


def _draw_lra(report: Report) -> Figure:
    """Plot the speed of inference and of training steps on each task relative to MEGA, and the paper's."""
    modes, phases = _modes(report), {"inference": "inference", "step": "a training step"}
    tasks = list(dict.fromkeys(str(result.sizes["task"]) for result in report.timed))
    candidates = list({result.name: result for result in report.timed}.values())
    paper = {str(ratio.sizes["task"]): ratio.paper for ratio in report.ratios if ratio.paper is not None}
    figure, panels = _panels(13, len(modes), 2)
    for axes, (mode, phase) in zip(panels.flat, itertools.product(modes, phases), strict=True):
        times = {(it.name, str(it.sizes["task"])): it.seconds(phase, mode) for it in report.timed}
        bars: list[dict[str, tuple[float, str]]] = []
        for candidate in candidates:
            heights = {}
            for task in tasks:
                baseline, seconds = times.get((_BASELINE, task)), times.get((candidate.name, task))
                if baseline and seconds:
                    heights[task] = baseline / seconds, f"{baseline / seconds:.2f}×\n{format_seconds(seconds)}"
            bars.append(heights)
        _draw_bars(axes, tasks, candidates, [candidate.label for candidate in candidates], bars)
        for spot, task in enumerate(tasks):
            if phase == "inference" and task in paper:
                label, spots = "TCNCA's inference in the paper, on a V100", (spot - 0.45, spot + 0.45)
                axes.plot(spots, [paper[task]] * 2, color="black", linestyle=":", label=label)
        axes.set_title(f"{phases[phase]}, {_MODES[mode]}", loc="left", fontsize=9)
        axes.set_ylabel("speed, MEGA by FFT = 1")
    _add_legend(figure)
    return figure


def _draw_bars(
    axes: Axes,
    groups: Sequence[str],
    results: Sequence[Result],
    labels: Sequence[str],
    bars: Sequence[Mapping[str, tuple[float, str]]],
) -> None:
    """Draw one bar for each candidate in each group, from heights with their texts."""
    width = 0.84 / len(results)
    for index, (result, label, heights) in enumerate(zip(results, labels, bars, strict=True)):
        offset = (index - (len(results) - 1) / 2) * width
        name = next((name for name in _VARIANTS if result.name.endswith(name)), "")
        style: dict[str, Any] = {"hatch": _VARIANTS[name], "edgecolor": "white"} if name else {}
        spots = [groups.index(group) + offset for group in heights]
        color = _COLORS[result.name.removesuffix(name)]
        drawn = axes.bar(spots, [height for height, _ in heights.values()], 0.92 * width, color=color, **style)
        drawn.set_label(label)
        axes.bar_label(drawn, [text for _, text in heights.values()], fontsize=6.5, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.22)
