"""The pictures of a model: connectivity, coverage of lags, influence of inputs, kernels and attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import plot_text, plural
from tcnca.files import disk_errors
from tcnca.inspection.costs import Dilated
from tcnca.inspection.probes import Array, Influence, Response, mean_weights
from tcnca.training.report import AMBER, BLUE, GRAY, GREEN, ORANGE, PINK, SKY, YELLOW, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEVELS = (BLUE, ORANGE, GREEN, PINK)
_COLORS = ("black", BLUE, GREEN, AMBER, ORANGE)
_ENLARGE = 40
"""Ratio of receptive fields from which the smaller part of a tree is drawn again, larger."""
_CLEAR = 200
"""Inputs that can be told apart in one panel."""
_FANS = 49
"""Nodes of one level whose edges are drawn, evenly spaced if there are more."""
_MAX_STEPS = 1000
"""Bars next to each other in one panel."""
_MAX_LINEAR_COUNT = 40
"""Largest count that is drawn on a linear axis."""
_MAX_COLUMNS = 8
"""Convolutions or heads of a layer that are drawn."""
_FAINT = 1e-4
"""Smallest magnitude or weight that has a color of its own."""


def save(draw: Callable[[], Figure], path: Path) -> Path:
    """Draw a figure into a file, whose folder need not exist."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(draw, path)
    return path


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(plot_text(title), fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure


# Connectivity


def draw_connectivity(structure: Dilated, title: str) -> Figure:
    """Draw the tree of taps that reach one output, as in Figure 1c of the paper; again and larger if it is wide."""
    from matplotlib.lines import Line2D

    depths = _panel_depths(structure)
    figure = _figure(9.0, 0.8 + sum(0.75 + 0.55 * depth for depth in depths), title)
    panels = figure.subplots(len(depths), 1, squeeze=False, height_ratios=[1 + depth for depth in depths])[:, 0]
    for number, (axes, depth) in enumerate(zip(panels, depths, strict=True)):
        inner = depths[number + 1] if number + 1 < len(depths) else None
        thinned = _draw_tree(axes, structure, depth, inner)
        text = "all convolutions" if number == 0 else "enlarged: the first convolution"
        text = f"enlarged: the first {depth} convolutions" if number and depth > 1 else text
        if thinned > 1:
            text += f" (where units are dense, the edges of about one in {thinned} are shown)"
        axes.set_title(text, loc="left", fontsize=9)
    panels[-1].set_xlabel("time relative to the output, tokens", color=GRAY)
    if structure.residual:
        skip = Line2D([], [], color="black", linestyle=":", linewidth=1.2, label="skip connection")
        panels[0].legend(handles=[skip], frameon=False, fontsize=8, loc="upper left")
    return figure


def _panel_depths(structure: Dilated) -> list[int]:
    """Return how many convolutions, from the input on, each panel shows."""
    fields = [
        1 + (structure.kernel_size - 1) * sum(structure.dilations[:n]) for n in range(len(structure.dilations) + 1)
    ]
    depths = [len(structure.dilations)]
    while fields[depths[-1]] > _CLEAR:
        smaller = [n for n in range(1, depths[-1]) if fields[depths[-1]] >= _ENLARGE * fields[n]]
        clear = [n for n in range(1, depths[-1]) if fields[n] <= _CLEAR]
        if not (smaller or clear):
            break
        depths.append(smaller[-1] if smaller else clear[-1])
    return depths


def _tree_levels(structure: Dilated, depth: int) -> list[NDArray[np.int64]]:
    """Return the times of the units that reach an output at time 0, of each level from the input to the output."""
    levels = [np.zeros(1, np.int64)]
    above = levels[0]
    for number in range(depth - 1, -1, -1):
        reached = (levels[-1][:, None] + structure.taps * structure.dilations[number]).ravel()
        if structure.residual and number % structure.convolutions == 0:
            reached = np.concatenate([reached, above])
        levels.append(np.unique(reached))
        if number % structure.convolutions == 0:
            above = levels[-1]
    return levels[::-1]


def _draw_tree(axes: Axes, structure: Dilated, depth: int, inner: int | None) -> int:
    """Draw the first `depth` convolutions; return of how many units of the widest level one is drawn.

    The part that the next panel shows, the first `inner` convolutions under the latest unit, is marked.
    """
    levels, taps, thinned = _tree_levels(structure, depth), structure.taps, 1
    for number in range(depth):
        units, dilation = levels[number + 1], structure.dilations[number]
        chosen = units[np.unique(np.linspace(0, len(units) - 1, min(len(units), _FANS)).round().astype(int))]
        thinned = max(thinned, round(len(units) / len(chosen)))
        color = _level_color(structure, number)
        if structure.kernel_size > 3 and (structure.kernel_size - 1) * dilation * _FANS < len(levels[0]):
            # Lines would touch each other.
            for unit in chosen:
                ends = unit + taps[[0, -1]] * dilation
                axes.fill([unit, *ends], [number + 1, number, number], color=color, lw=0.7, alpha=0.7)
        else:
            edges = [(unit + tap * dilation, unit) for unit in chosen for tap in taps]
            alpha = float(np.clip(12 / np.sqrt(len(edges)), 0.5, 1.0))
            _draw_edges(axes, edges, (number, number + 1), color=color, lw=0.7, alpha=alpha)
        if structure.residual and number % structure.convolutions == 0:
            top = number + structure.convolutions
            if top <= depth and len(levels[top]) <= _FANS:
                skips = [(unit, unit) for unit in levels[top]]
                _draw_edges(axes, skips, (number, top), color="black", lw=1.0, ls=":")
    low, high = levels[0][0], levels[0][-1]
    span = max(high - low, 1)
    for number, units in enumerate(levels):
        if len(units) > _CLEAR:
            # Too close for dots: a line, with gaps where they can be seen.
            cuts = np.flatnonzero(np.diff(units) > span / _CLEAR)
            begins, ends = units[np.append(0, cuts + 1)], units[np.append(cuts, len(units) - 1)]
            axes.hlines(np.full(len(begins), number), begins, ends, color="black", lw=2.6)
        else:
            axes.plot(units, np.full(len(units), number), "o", color="black", ms=2.6)
    missing = np.setdiff1d(np.arange(low, high + 1), levels[0])
    if len(missing) and span <= _CLEAR:
        axes.plot(missing, np.zeros(len(missing)), "o", color="white", mec=GRAY, mew=0.6, ms=2.6)
    if inner is not None:
        part = _tree_levels(structure, inner)[0]
        left, right = part[0] - 0.006 * span, part[-1] + 0.006 * span
        corners = [left, right, right, left], [-0.25, -0.25, inner + 0.25, inner + 0.25]
        axes.fill(*corners, color=YELLOW, alpha=0.6, lw=0)
        axes.annotate(
            "enlarged below",
            (left, -0.27),
            (-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
        )
    axes.set_yticks([0, *(number + 0.5 for number in range(depth)), depth])
    names = [f"dilation {dilation:,}" for dilation in structure.dilations[:depth]]
    axes.set_yticklabels(["input", *names, "output" if depth == len(structure.dilations) else ""])
    for label, number in zip(axes.get_yticklabels()[1:-1], range(depth), strict=True):
        label.set_color(_level_color(structure, number))
    axes.set_ylim(-0.45, depth + 0.35)
    axes.set_xlim(low - 0.02 * span, high + 0.02 * span)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _count_ticks(axes.xaxis)
    return thinned


def _draw_edges(axes: Axes, edges: Sequence[tuple[int, int]], heights: tuple[int, int], **style: Any) -> None:
    """Draw edges between two heights as one line with gaps, which takes little space in a file."""
    x = np.array([(lower, upper, np.nan) for lower, upper in edges]).ravel()
    axes.plot(x, np.tile([*heights, np.nan], len(edges)), **style)


def _level_color(structure: Dilated, convolution: int) -> str:
    return _LEVELS[(convolution // structure.convolutions) % len(_LEVELS)]


def _count_ticks(axis: Any) -> None:
    """Put whole numbers with separators of thousands at an axis."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace("-", "\N{MINUS SIGN}"))


# Coverage of lags


def draw_coverage(structure: Dilated, title: str) -> Figure:
    """Draw in how many ways each lag is reached, and which lags are not."""
    lags, counts = structure.lags()
    reached = counts > 0
    figure = _figure(9.0, 3.6, title)
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=[1, 0.09])
    logarithmic = counts.max() > _MAX_LINEAR_COUNT
    floor = 0.5 if logarithmic else 0.0
    # More steps than pixels would be drawn in arbitrary shades.
    size = -(-len(lags) // _MAX_STEPS)
    starts = np.arange(0, len(lags), size)
    edges = np.append(lags[starts], lags[-1] + 1) - 0.5
    styles: list[tuple[Any, str, str]] = [(np.minimum, BLUE, "")]
    if size > 1:
        styles = [(np.maximum, "#a6cee3", f"most in {size} neighboring lags"), (np.minimum, BLUE, "fewest")]
    for reduce, color, label in styles:
        heights = np.maximum(reduce.reduceat(counts, starts), floor)
        axes.stairs(heights, edges, baseline=floor, fill=True, color=color, lw=0, label=label)
    if size > 1:
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(floor, 4 * counts.max())
    else:
        axes.set_ylim(0, 1.25 * counts.max())
        _count_ticks(axes.yaxis)
    axes.set_ylabel("ways to reach the lag")
    strip.set_yticks([])
    strip.spines["left"].set_visible(False)
    for wanted, color in ((True, BLUE), (False, ORANGE)):
        spans = [(lags[begin] - 0.5, end - begin) for begin, end in _runs(reached == wanted)]
        strip.broken_barh(spans, (0, 1), color=color, lw=0, rasterized=len(spans) > _MAX_STEPS)
    _count_ticks(strip.xaxis)
    strip.set_xlabel(f"lag, tokens{'' if structure.causal else ' (negative: in the future)'}", color=GRAY)
    missing = int((~reached).sum())
    text = f"{plural(missing, 'gap')} (orange)" if missing else "no gaps"
    axes.set_title(f"{reached.mean():.1%} of {plural(len(lags), 'lag')} reached, {text}", loc="left", fontsize=9)
    return figure


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return begin and end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


# Influence of inputs


def draw_influence(found: Influence, title: str, marks: Mapping[str, int | None], about: str) -> Figure:
    """Draw the influence of inputs over the lag, and how it accumulates. `marks` are distances with a name."""
    figure = _figure(9.0, 3.7, title)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    both, last = bool((found.lags < 0).any()), int(np.abs(found.lags).max())
    sides = {"past": (found.lags >= 0, BLUE), **({"future": (found.lags <= 0, ORANGE)} if both else {})}
    for name, (side, color) in sides.items():
        order = np.argsort(np.abs(found.lags[side]))
        distance, norms = np.abs(found.lags[side])[order], found.norms[side][order]
        shown = norms > 0
        left.plot(distance[shown], norms[shown], ".", ms=2.2, color=color, alpha=0.3, mew=0)
        left.plot(*_log_bins(distance, norms), color=color, lw=1.6, ls="-" if name == "past" else "--", label=name)
    order = np.argsort(np.abs(found.lags), kind="stable")
    shares = np.cumsum(found.norms[order]) / max(found.norms.sum(), 1e-300)
    right.plot(np.abs(found.lags)[order], shares, color=BLUE, lw=1.6)
    positive = found.norms[found.norms > 0]
    if len(positive):
        left.set_yscale("log")
        left.set_ylim(np.quantile(positive, 0.002) / 3, positive.max() * 4)
    for axes in (left, right):
        _lag_axis(axes, np.array([0, last]))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlabel("distance, tokens" if both else "lag, tokens", color=GRAY)
    for name, mark in marks.items():
        if mark is not None and mark <= last:
            for axes in (left, right):
                axes.axvline(mark, color=GRAY, lw=0.9, ls="--")
            place = {"rotation": 90, "ha": "right", "va": "top", "transform": left.get_xaxis_transform()}
            left.text(mark * 0.96, 0.98, f"{name}, {mark:,}", fontsize=7.5, color=GRAY, **place)
    what = "features of the last layer" if found.pooled else "outputs"
    left.set_ylabel("norm of the derivative, RMS")
    left.set_title(f"{what} by input embeddings; {plot_text(about)}", loc="left", fontsize=9)
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("share of the sum of norms", loc="left", fontsize=9)
    if both:
        left.legend(frameon=False, fontsize=8, loc="lower left")
    for share in (0.5, 0.9):
        reach = found.reach(share)
        right.plot([reach], [share], "o", color=BLUE, ms=4)
        text = f"{share:.0%} within {plural(reach, 'token')}"
        near = reach < last**0.5
        place = {"xytext": (6, -10) if near else (-6, 4), "ha": "left" if near else "right"}
        right.annotate(text, (reach, share), textcoords="offset points", fontsize=8, color=BLUE, **place)
    return figure


def _log_bins(distance: NDArray[np.int64], values: Array, per_octave: int = 4) -> tuple[Array, Array]:
    """Return centers and root mean squares of values in bins that are evenly spaced on a logarithmic scale."""
    bins = np.floor(per_octave * np.log2(distance + 1.0)).astype(int)
    kinds, index = np.unique(bins, return_inverse=True)
    number = np.bincount(index, minlength=len(kinds))
    centers = np.exp(np.bincount(index, np.log(distance + 1.0)) / number) - 1
    return centers, np.sqrt(np.bincount(index, values**2) / number)


# Kernels


def draw_responses(responses: Mapping[int, Response], title: str) -> Figure:
    """Draw the impulse responses of the mixers of some layers: all channels as a picture, and some of them as lines."""
    from matplotlib.colors import LogNorm

    figure = _figure(9.0, 0.8 + 2.4 * len(responses), title)
    panels = figure.subplots(len(responses), 2, squeeze=False)
    image: Any = None
    for (layer, response), (left, right) in zip(responses.items(), panels, strict=True):
        weights = np.abs(response.values)
        distance = (weights * np.log1p(np.abs(response.lags))).sum(-1) / np.maximum(weights.sum(-1), 1e-300)
        order = np.argsort(distance, kind="stable")
        picture, edges = _binned_magnitudes(response, order)
        norm = LogNorm(_FAINT, 1.0, clip=True)
        image = left.pcolormesh(edges, np.arange(len(order) + 1), picture, norm=norm, cmap="viridis", rasterized=True)
        left.set_title(f"layer {layer}: {plural(len(order), 'channel')}", loc="left", fontsize=9)
        left.set_ylabel("channel, by mean lag")
        left.set_yticks([])
        picked = np.unique(np.linspace(0, len(order) - 1, min(len(_COLORS), len(order))).round().astype(int))
        for row, color in zip(picked, _COLORS, strict=False):
            label = f"{response.channels[order[row]]}"
            right.plot(edges[:-1], np.maximum(picture[row], _FAINT / 10), color=color, lw=1.1, label=label)
        right.set_title(f"layer {layer}: some channels", loc="left", fontsize=9)
        right.set_yscale("log")
        right.set_ylim(_FAINT / 3, 2.0)
        right.set_ylabel("magnitude")
        right.grid(alpha=0.25, linewidth=0.6)
        legend = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "title": "channel", "title_fontsize": 7.5}
        right.legend(frameon=False, fontsize=7.5, **legend)
        for axes in (left, right):
            _lag_axis(axes, response.lags)
    for axes in panels[-1]:
        axes.set_xlabel("lag, tokens", color=GRAY)
    label = "magnitude, largest of a channel = 1"
    figure.colorbar(image, ax=panels.ravel().tolist(), location="bottom", label=label, aspect=70)
    return figure


def _lag_axis(axes: Axes, lags: NDArray[np.int64]) -> None:
    """Scale the axis of lags logarithmically from lag 1 on, with ticks at 0 and at powers of ten."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("symlog", linthresh=1.0, linscale=0.4)
    axes.set_xlim(lags[0], max(lags[-1] + 1, 2))
    powers = [10**power for power in range(10) if 10**power <= np.abs(lags).max()]
    ticks = [tick for tick in (*(-power for power in powers[::-1]), 0, *powers) if lags[0] <= tick <= lags[-1]]
    names = [f"{tick // 1000}k" if abs(tick) >= 1000 else f"{tick}" for tick in ticks]
    axes.set_xticks(ticks, [name.replace("-", "\N{MINUS SIGN}") for name in names])
    axes.xaxis.set_minor_locator(NullLocator())


def _binned_magnitudes(response: Response, order: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the largest magnitude of each channel in bins of lags, relative to its largest, and the bins' edges."""
    magnitudes = np.abs(response.values[order])
    magnitudes /= np.maximum(magnitudes.max(-1, keepdims=True), 1e-300)
    last = np.abs(response.lags).max() + 1
    steps = np.unique(np.round(np.geomspace(1, max(last, 2), 160)).astype(int))
    starts = np.unique(np.concatenate([-steps + 1, [0], steps]))
    starts = starts[(starts >= response.lags[0]) & (starts <= response.lags[-1])]
    starts[0] = response.lags[0]
    places = np.searchsorted(response.lags, starts)
    picture = np.maximum.reduceat(magnitudes, places, axis=1)
    return picture, np.append(starts, response.lags[-1] + 1).astype(np.float64)


def draw_kernels(kernels: Mapping[int, Array], structure: Dilated, title: str) -> Figure:
    """Draw the kernels `[convolutions, channels, taps]` of some layers, as they are learned."""
    from matplotlib.colors import SymLogNorm

    convolutions = min(next(iter(kernels.values())).shape[0], _MAX_COLUMNS)
    figure = _figure(2.6 + 1.6 * convolutions, 0.9 + 1.9 * len(kernels), title)
    panels = figure.subplots(len(kernels), convolutions, squeeze=False, sharex=True)
    lead = structure.taps[0]
    limit = max(float(np.abs(values).max()) for values in kernels.values()) or 1.0
    # The tap of lag 0, which starts at 1, is far larger than the others of later convolutions.
    norm = SymLogNorm(limit / 30, vmin=-limit, vmax=limit)
    image: Any = None
    for number, axes in enumerate(panels[0]):
        text = f"convolution {number + 1},\ndilation {structure.dilations[number]:,}"
        axes.set_title(text, loc="left", fontsize=9)
    for (layer, values), row in zip(kernels.items(), panels, strict=True):
        taps = np.arange(values.shape[2])
        weight = np.abs(values[0])
        order = np.argsort((weight * np.abs(taps - lead)).sum(-1) / np.maximum(weight.sum(-1), 1e-300))
        for number, axes in enumerate(row):
            extent = (-0.5 - lead, taps[-1] + 0.5 - lead, 0, len(order))
            style: dict[str, Any] = {"cmap": "RdBu_r", "aspect": "auto", "interpolation": "nearest", "origin": "lower"}
            image = axes.imshow(values[number, order], norm=norm, extent=extent, **style)
            axes.set_yticks([])
            axes.locator_params("x", integer=True)
        row[0].set_ylabel(f"layer {layer}\n{plural(len(order), 'channel')}")
    for axes in panels[-1]:
        axes.set_xlabel("lag / dilation", color=GRAY)
    figure.colorbar(image, ax=panels.ravel().tolist(), label="weight of the tap", aspect=35)
    return figure


# Attention


def draw_attention(maps: Mapping[int, Array], visible: NDArray[np.bool_], title: str) -> Figure:
    """Draw the attention weights of some layers, and their mean over the lag; `visible` as `visible_keys` returns."""
    from matplotlib.colors import LogNorm

    heads = min(next(iter(maps.values())).shape[0], _MAX_COLUMNS)
    cells = [(layer, head) for layer in maps for head in range(heads)]
    size, columns = (2.9, min(len(maps), 4)) if heads == 1 else (1.7, heads)
    rows = -(-len(cells) // columns)
    figure = _figure(max(1.2 + size * columns, 6.0), 0.9 + (size + 0.2) * rows + 2.1, title)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[size] * rows + [1.7])
    style: dict[str, Any] = {"cmap": "viridis", "norm": LogNorm(_FAINT, 1.0, clip=True), "interpolation": "nearest"}
    image: Any = None
    for index, (layer, head) in enumerate(cells):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        image = axes.imshow(np.where(visible, np.maximum(maps[layer][head], _FAINT), np.nan), **style)
        axes.set_title(f"layer {layer}" + (f", head {head}" if heads > 1 else ""), loc="left", fontsize=9)
        axes.locator_params(nbins=4, integer=True)
        if index + columns < len(cells):
            axes.set_xticklabels([])
        else:
            axes.set_xlabel("key, token", color=GRAY)
        if index % columns:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("query, token", color=GRAY)
    figure.colorbar(image, ax=list(figure.axes), location="right", label="attention weight", shrink=0.9, aspect=25)
    axes = figure.add_subplot(grid[rows, :])
    colors = itertools.cycle((*_LEVELS, AMBER, SKY, "black"))
    for (layer, weights), color in zip(maps.items(), colors, strict=False):
        lags, means = mean_weights(weights, visible)
        axes.plot(lags, means, color=color, lw=1.2, label=f"layer {layer}")
    axes.set_yscale("log")
    axes.set_xlabel("lag between query and key, tokens", color=GRAY)
    axes.set_ylabel("mean weight")
    axes.set_title("mean over the queries that see a key at this lag", loc="left", fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, ncols=min(len(maps), 6))
    return figure
