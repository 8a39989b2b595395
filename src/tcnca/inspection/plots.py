"""The pictures of a model: connectivity, coverage of lags, influence of inputs, kernels and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import plural
from tcnca.files import atomic_path, disk_errors
from tcnca.inspection.costs import Dilated
from tcnca.inspection.probes import Array, Influence, Response
from tcnca.training.report import GRAY, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable for color-blind readers.
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_LEVELS = (BLUE, ORANGE, GREEN, PINK)
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
_MAX_HEADS = 8
"""Heads of a layer whose maps are drawn."""
_EXAMPLES = 5
"""Channels of a layer whose responses are drawn as lines."""


def save(draw: Callable[[], Figure], path: Path) -> Path:
    """Draw a figure into a file, in the format that its name says. The same figure gives the same file."""
    # Slow to import, and needed only here.
    import matplotlib.style

    # Not with the user's own settings of matplotlib.
    style = {**STYLE, "svg.hashsalt": path.stem, "svg.fonttype": "none"}
    vector = path.suffix == ".svg"
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.style.context(["default", style]), atomic_path(path) as draft:
            draw().savefig(draft, format=path.suffix[1:], dpi=150, metadata={"Date": None} if vector else None)
    return path


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(_plain(title), fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure


def _plain(text: str) -> str:
    """Return a text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")


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
    lead = 0 if structure.causal else (structure.kernel_size - 1) // 2
    taps = lead - np.arange(structure.kernel_size)
    levels = [np.zeros(1, np.int64)]
    above = levels[0]
    for number in range(depth - 1, -1, -1):
        reached = (levels[-1][:, None] + taps * structure.dilations[number]).ravel()
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
    levels = _tree_levels(structure, depth)
    lead = 0 if structure.causal else (structure.kernel_size - 1) // 2
    taps = lead - np.arange(structure.kernel_size)
    thinned = 1
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
        axes.fill(*corners, color="#f0e442", alpha=0.6, lw=0)
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


def draw_influence(found: Influence, title: str, marks: Mapping[str, int | None], *, about: str) -> Figure:
    """Draw the influence of inputs over the lag, and how it accumulates. `marks` are distances with a name."""
    figure = _figure(9.0, 3.7, title)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    sides = {"past": (found.lags >= 0, BLUE), "future": (found.lags <= 0, ORANGE)}
    positive = found.norms[found.norms > 0]
    for name, (side, color) in sides.items():
        if name == "future" and not (found.lags < 0).any():
            continue
        distance, norms = np.abs(found.lags[side]), found.norms[side]
        order = np.argsort(distance)
        distance, norms = distance[order], norms[order]
        centers, means = _log_bins(distance, norms)
        shown = norms > 0
        left.plot(distance[shown] + 1, norms[shown], ".", ms=1.6, color=color, alpha=0.25, mew=0, rasterized=True)
        left.plot(centers + 1, means, color=color, lw=1.6, label=name)
        sums = np.cumsum(norms)
        right.plot(distance + 1, sums / max(found.norms.sum(), 1e-300), color=color, lw=1.6, label=name)
    left.set_yscale("log")
    if len(positive):
        left.set_ylim(np.quantile(positive, 0.002) / 3, positive.max() * 4)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlim(0.9, np.abs(found.lags).max() + 1)
        axes.set_xlabel("lag + 1, tokens", color=GRAY)
        axes.grid(alpha=0.25, linewidth=0.6)
        for mark in marks.values():
            if mark is not None and mark <= np.abs(found.lags).max():
                axes.axvline(mark, color=GRAY, lw=0.9, ls="--")
    for name, mark in marks.items():
        if mark is not None and mark <= np.abs(found.lags).max():
            left.text(
                mark * 0.96,
                0.98,
                f"{name}, {mark:,}",
                rotation=90,
                fontsize=7.5,
                color=GRAY,
                ha="right",
                va="top",
                transform=left.get_xaxis_transform(),
            )
    what = "features" if found.pooled else "outputs"
    left.set_ylabel("norm of the derivative, root mean square")
    left.set_title(f"{what} by input embeddings; {about}", loc="left", fontsize=9)
    right.set_ylim(0, 1.02)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("sum of norms within a lag", loc="left", fontsize=9)
    if (found.lags < 0).any():
        left.legend(frameon=False, fontsize=8, loc="lower left")
    else:
        for share in (0.5, 0.9):
            reach = found.reach(share)
            right.plot([reach + 1], [share], "o", color=BLUE, ms=4)
            right.annotate(
                f"{share:.0%} within {plural(reach, 'token')}",
                (reach + 1, share),
                (-6, 4),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=BLUE,
            )
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
    """Draw the impulse responses of the mixers of some layers: all channels by size, and some of them as lines."""
    from matplotlib.colors import LogNorm

    figure = _figure(9.0, 0.7 + 2.5 * len(responses), title)
    panels = figure.subplots(len(responses), 2, squeeze=False, width_ratios=[1, 1.15])
    image: Any = None
    for (layer, response), (left, right) in zip(responses.items(), panels, strict=True):
        order = np.argsort(response.reach(0.5), kind="stable")
        picture, edges = _binned_magnitudes(response, order)
        image = left.pcolormesh(
            edges,
            np.arange(len(order) + 1),
            picture,
            norm=LogNorm(1e-4, 1.0, clip=True),
            cmap="viridis",
            rasterized=True,
        )
        left.set_title(f"layer {layer}: magnitude, largest of a channel = 1", loc="left", fontsize=9)
        left.set_ylabel(f"channels, {len(order)}, by reach")
        left.set_yticks([])
        picked = order[np.linspace(0, len(order) - 1, min(_EXAMPLES, len(order))).round().astype(int)]
        colors = ("#440154", BLUE, GREEN, "#e69f00", ORANGE)
        for place, (channel, color) in enumerate(zip(picked, colors, strict=False)):
            values = response.values[channel] / max(np.abs(response.values[channel]).max(), 1e-300)
            number = response.channels[channel]
            right.plot(response.lags, values - 1.1 * place, color=color, lw=0.9, label=f"{number}")
            right.axhline(-1.1 * place, color=color, lw=0.4, alpha=0.5)
        right.set_title(f"layer {layer}: responses of {len(picked)} channels", loc="left", fontsize=9)
        right.set_yticks([])
        right.legend(
            frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), title="channel", title_fontsize=7
        )
        for axes in (left, right):
            axes.set_xscale("symlog", linthresh=1.0, linscale=0.4)
            axes.set_xlim(response.lags[0], response.lags[-1] + 1)
            _decade_ticks(axes, response.lags)
    for axes in panels[-1]:
        axes.set_xlabel("lag, tokens", color=GRAY)
    figure.colorbar(image, ax=panels[:, 0].tolist(), location="left", shrink=0.8, label="magnitude", aspect=30)
    return figure


def _decade_ticks(axes: Axes, lags: NDArray[np.int64]) -> None:
    """Put ticks at 0 and at powers of ten, on both sides if there are lags on both."""
    from matplotlib.ticker import NullLocator

    powers = [10**power for power in range(10) if 10**power <= np.abs(lags).max()]
    ticks = [tick for tick in (*(-power for power in powers), 0, *powers) if lags[0] <= tick <= lags[-1]]
    names = [f"{tick // 1000}k" if abs(tick) >= 1000 else f"{tick}" for tick in ticks]
    axes.set_xticks(ticks, names)
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
    convolutions = next(iter(kernels.values())).shape[0]
    figure = _figure(1.6 + 1.9 * convolutions, 0.9 + 2.3 * len(kernels), title)
    panels = figure.subplots(len(kernels), convolutions, squeeze=False, sharex=True)
    lead = 0 if structure.causal else (structure.kernel_size - 1) // 2
    for (layer, values), row in zip(kernels.items(), panels, strict=True):
        taps = np.arange(values.shape[2])
        # By where the first kernel, which starts as an average over the past, has its center of mass.
        weight = np.abs(values[0])
        order = np.argsort((weight * np.abs(taps - lead)).sum(-1) / np.maximum(weight.sum(-1), 1e-300))
        for number, axes in enumerate(row):
            picture = values[number, order]
            limit = max(float(np.quantile(np.abs(picture), 0.995)), 1e-12)
            image = axes.imshow(
                picture,
                cmap="RdBu_r",
                vmin=-limit,
                vmax=limit,
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5 - lead, taps[-1] + 0.5 - lead, len(order), 0),
            )
            figure.colorbar(image, ax=axes, location="bottom", aspect=14, pad=0.02, shrink=0.9).ax.tick_params(
                labelsize=7
            )
            axes.set_yticks([])
            if layer == next(iter(kernels)):
                axes.set_title(
                    f"convolution {number + 1},\ndilation {structure.dilations[number]:,}", loc="left", fontsize=9
                )
            axes.locator_params("x", integer=True)
        row[0].set_ylabel(f"layer {layer}\n{len(order)} channels")
    for axes in panels[-1]:
        axes.set_xlabel("lag / dilation, taps", color=GRAY, fontsize=8)
    return figure


# Attention


def draw_attention(maps: Mapping[int, Array], title: str, chunk_size: int | None) -> Figure:
    """Draw the attention weights of some layers, and their mean over the lag."""
    from matplotlib.colors import LogNorm

    heads = min(next(iter(maps.values())).shape[0], _MAX_HEADS)
    size = 2.9 if heads == 1 else 1.7
    columns = len(maps) if heads == 1 else heads
    rows = 1 if heads == 1 else len(maps)
    figure = _figure(max(1.2 + size * columns, 6.0), 0.9 + (size + 0.2) * rows + 2.1, title)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[size] * rows + [1.7])
    for index, (layer, weights) in enumerate(maps.items()):
        for head in range(heads):
            axes = figure.add_subplot(grid[(0, index) if heads == 1 else (index, head)])
            time = weights.shape[1]
            image = axes.imshow(
                np.where(weights[head] > 0, weights[head], np.nan),
                cmap="viridis",
                norm=LogNorm(1e-4, 1.0, clip=True),
                interpolation="nearest",
            )
            axes.set_title(f"layer {layer}" + (f", head {head}" if heads > 1 else ""), loc="left", fontsize=9)
            for border in range(chunk_size or time, time, chunk_size or time):
                for line in (axes.axhline, axes.axvline):
                    line(border - 0.5, color=GRAY, lw=0.5)
            axes.locator_params(nbins=4, integer=True)
            if heads == 1 or index == len(maps) - 1:
                axes.set_xlabel("key, token", color=GRAY)
            if (heads == 1 and index == 0) or (heads > 1 and head == 0):
                axes.set_ylabel("query, token", color=GRAY)
    maps_axes = list(figure.axes)
    figure.colorbar(image, ax=maps_axes, location="right", label="attention weight", shrink=0.9, aspect=25)
    axes = figure.add_subplot(grid[rows, :])
    colors = (BLUE, ORANGE, GREEN, PINK, "#e69f00", "#56b4e9", "black")
    for (layer, weights), color in zip(maps.items(), [colors[n % len(colors)] for n in range(len(maps))], strict=True):
        lags, means = mean_weights(weights)
        shown = means > 0
        axes.plot(lags[shown], means[shown], color=color, lw=1.2, label=f"layer {layer}")
    axes.set_yscale("log")
    axes.set_xlabel("lag between query and key, tokens", color=GRAY)
    axes.set_ylabel("mean weight")
    axes.set_title("mean over the queries that see a key at this lag", loc="left", fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, ncols=min(len(maps), 4))
    return figure


def mean_weights(weights: Array) -> tuple[NDArray[np.int64], Array]:
    """Return lags, and the mean weight at each over heads and the queries that see a key there."""
    time = weights.shape[1]
    lags, means = np.arange(1 - time, time), np.zeros(2 * time - 1)
    for index, lag in enumerate(lags):
        diagonal = np.diagonal(weights, -lag, 1, 2)
        seen = diagonal > 0
        means[index] = diagonal[seen].mean() if seen.any() else 0.0
    known = np.flatnonzero(means > 0)
    kept = slice(known[0], known[-1] + 1) if len(known) else slice(0, 0)
    return lags[kept], means[kept]
