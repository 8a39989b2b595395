"""What a run leaves when it ends: its result as JSON, a report for people, and its curves as a figure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tcnca.config import NonNegativeInt, Seconds
from tcnca.errors import TrainingError, escape_control, format_interval, format_score, plural
from tcnca.extras import missing
from tcnca.files import atomic_path, atomic_write, read_json, to_json
from tcnca.training.evaluate import Score
from tcnca.training.logger import read_log
from tcnca.training.provenance import Launch, read_launches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULT = "result.json"
REPORT = "report.md"
CURVES = "curves.png"
GRAY = "#666666"
# The palette of Okabe and Ito, distinguishable for color-blind readers.
BLUE, SKY, GREEN, YELLOW = "#0072b2", "#56b4e9", "#009e73", "#f0e442"
AMBER, ORANGE, PINK = "#e69f00", "#d55e00", "#cc79a7"
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
_DARK, _LIGHT, _ACCENT = "#1f4e79", "#a9c4de", "#c8553d"
_LINES_TO_SMOOTH = 20
_LOG_SCALE_RATIO = 30
"""Largest loss over smallest above which the axis is logarithmic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The best validation of a run."""

    value: float
    step: NonNegativeInt
    count: NonNegativeInt | None = None
    """Answers it is the mean of: of the whole split, or of `eval.batches` of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run."""

    step: NonNegativeInt
    """Steps done."""
    seconds: Seconds
    """Time spent, over all launches."""
    stopped: str = ""
    """Name of the signal that stopped the run before its end, if one did."""
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    """Final score on each split."""
    best: Best | None = None
    """Best validation."""
    tokens: int = 0
    """Tokens read in training, up to the last line of the log."""
    tokens_per_second: float | None = None
    """Mean speed of training."""
    memory_gib: float | None = None
    """Peak memory of the main process: of its GPU, or of the process itself on a CPU."""
    parameters: int = 0
    """Number of learned parameters."""
    source: str = ""
    """Data set."""
    data: str = ""
    """Digest of the data set; empty if it is generated on the fly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredScore:
    """A `Score` as JSON stores it, with null for NaN."""

    metric: str
    value: float | None
    count: int
    higher_is_better: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredResult(Result):
    """A `Result` as JSON stores it."""

    scores: dict[str, _StoredScore]  # type: ignore[assignment]


def write_result(folder: Path, result: Result) -> None:
    """Write `result.json`."""
    atomic_write(folder / RESULT, to_json(dataclasses.asdict(result), indent=1) + "\n")


def read_result(folder: Path) -> Result | None:
    """Read the result of a run; None if the run is not finished."""
    path = folder / RESULT
    if not path.is_file():
        return None
    remedy = "remove it, and resuming the run writes it again"
    stored: _StoredResult = read_json(path, _StoredResult, error=TrainingError, remedy=remedy)
    scores = {
        split: Score(**{**vars(score), "value": np.nan if score.value is None else score.value})
        for split, score in stored.scores.items()
    }
    return Result(**{**vars(stored), "scores": scores})


def mean_speed(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the tokens per second of training over all lines of a log."""
    pairs = [(line.get("tokens"), line.get("tokens_per_second")) for line in lines]
    read = [(tokens, speed) for tokens, speed in pairs if tokens and speed]
    return sum(tokens for tokens, _ in read) / sum(tokens / speed for tokens, speed in read) if read else None


def comparable_validations(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the validations on as many answers as the first one.

    The final one, on the whole split, is left out if those before it were on a part of it.
    """
    found = [line for line in lines if line.get("split") == "validation"]
    return [line for line in found if line.get("count") == found[0].get("count")]


def best_validation(lines: Sequence[Mapping[str, Any]], *, higher_is_better: bool) -> Best | None:
    """Return the best of the comparable validations; the first of equal ones."""
    scored = [line for line in comparable_validations(lines) if line.get("value") is not None]
    found = [Best(value=line["value"], step=line["step"], count=line.get("count")) for line in scored]
    return max(found, key=lambda each: (each.value if higher_is_better else -each.value, -each.step), default=None)


def write_report(folder: Path, result: Result) -> None:
    """Write `report.md`: scores, cost, curves, and how to repeat the run."""
    launches = read_launches(folder)
    text = [f"# {launches[0].recipe if launches else folder.name}", ""]
    text += ["| split | metric | value | answers |", "| --- | --- | ---: | ---: |"]
    text += [f"| {' | '.join(row)} |" for row in score_rows(result)]
    text += ["", "| | |", "| --- | --- |"]
    text += [f"| {name} | {value} |" for name, value in [*cost_rows(result), *_provenance_rows(result, launches)]]
    if (folder / CURVES).is_file():
        text += ["", f"![Loss, validation, learning rate and speed over the steps]({CURVES})"]
    if launches:
        text += ["", "Repeat with", "", "```sh", launches[0].command, "```"]
    # Names and commands come from the files of the run.
    atomic_write(folder / REPORT, escape_control("\n".join(text)) + "\n")


def score_rows(result: Result) -> list[tuple[str, str, str, str]]:
    """Return split, metric, value and number of answers of each final score, as text."""
    rows = []
    for split, each in result.scores.items():
        value = format_score(each.value) + format_interval(each.metric, each.value, each.count)
        rows.append((split, each.metric, value, f"{each.count:,}"))
    return rows


def cost_rows(result: Result) -> list[tuple[str, str]]:
    """Return what a run took, as names and texts."""
    rows = []
    if result.best is not None:
        on = "" if result.best.count is None else f", on {plural(result.best.count, 'answer')}"
        rows.append(("best validation", f"{format_score(result.best.value)} at step {result.best.step:,}{on}"))
    rows += [("steps", f"{result.step:,}"), ("tokens", f"{result.tokens:,}"), ("time", duration(result.seconds))]
    if result.tokens_per_second is not None:
        rows.append(("tokens/s", f"{result.tokens_per_second:,.0f}"))
    if result.memory_gib is not None:
        rows.append(("peak memory", f"{result.memory_gib:.2f} GiB"))
    return [*rows, ("parameters", f"{result.parameters:,}")]


def markdown_table(titles: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns are aligned as plain text too."""
    cells = [[text.replace("|", "\\|") for text in line] for line in (titles, *body)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
    cells.insert(1, ["-" * width for width in widths])
    lines = ([text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def duration(seconds: float) -> str:
    """Return a time as text: 9.3 s, or 1:02:03."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def _provenance_rows(result: Result, launches: Sequence[Launch]) -> list[tuple[str, str]]:
    rows = [("data", f"{result.source}, {f'digest {result.data}' if result.data else 'generated on the fly'}")]
    if not launches:
        return rows
    first = launches[0]
    rows += [("started from weights", first.init_weights)] if first.init_weights is not None else []
    rows += [("seed", f"{first.seed}")]
    if first.budget is not None:
        rows += [("budget", duration(first.budget))]
    # A run may have been resumed on another machine.
    rows += [("hardware", "; ".join(dict.fromkeys(_hardware(launch) for launch in launches)))]
    rows += [("versions", "; ".join(dict.fromkeys(_versions(launch) for launch in launches)))]
    commits = dict.fromkeys(launch.commit or "none, an installed library" for launch in launches)
    rows += [("commit", ", ".join(commits)), ("started", first.started)]
    resumed = [f"step {launch.step:,}" for launch in launches[1:]]
    return [*rows, *([("resumed from", ", ".join(resumed))] if resumed else [])]


def _hardware(launch: Launch) -> str:
    # Of the fields, each kind of device has others.
    facts = {"name": "unknown", "count": 1, "cores": "unknown", **launch.hardware}
    several = f", {launch.processes} processes" if launch.processes > 1 else ""
    if "memory_gib" in facts:
        return f"{facts['count']} × {facts['name']}, {facts['memory_gib']} GiB{several}"
    threads = facts.get("threads")
    used = f", {plural(threads, 'thread')}" if isinstance(threads, int) else ""
    return f"{facts['name']}, {facts['cores']} core{'' if facts['cores'] == 1 else 's'}{used}{several}"


def _versions(launch: Launch) -> str:
    return ", ".join(f"{name} {version}" for name, version in launch.versions.items()) + f"; {launch.platform}"


def draw_curves(folder: Path, title: str, *, higher_is_better: bool) -> Path | None:
    """Draw the log of a run into `curves.png`; None if nothing was logged yet, or without matplotlib."""
    lines = read_log(folder)
    if not lines or missing("plots"):
        return None
    # Slow to import, and needed only here.
    import matplotlib.style
    from matplotlib.figure import Figure

    # Not with the user's own settings of matplotlib.
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(7.2, 4.8), dpi=200, layout="constrained")
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        axes = figure.subplots(2, 2, sharex=True)
        _draw_loss(axes[0, 0], lines)
        _draw_validation(axes[0, 1], lines, higher_is_better)
        _draw_line(axes[1, 0], lines, "lr", "learning rate")
        _draw_line(axes[1, 1], lines, "tokens_per_second", "tokens per second")
        for axis in axes.flat:
            format_ticks(axis)
        for axis in axes[1]:
            axis.set_xlim(0, 1.02 * lines[-1]["step"])
            axis.set_xlabel("step", color=GRAY)
        with atomic_path(folder / CURVES) as temporary:
            figure.savefig(temporary, format="png")
    return folder / CURVES


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure into a file, in the format that its name says. The same figure gives the same file."""
    import matplotlib.style

    # Not with the user's own settings of matplotlib.
    style = {**STYLE, "svg.hashsalt": path.stem, "svg.fonttype": "none"}
    suffix = path.suffix.lstrip(".").lower()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with matplotlib.style.context(["default", style]), atomic_path(path) as temporary:
        draw().savefig(temporary, format=suffix, dpi=150, metadata=metadata)


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the steps at which a value was logged, and the values; NaN where it was not finite.

    `value` is the score of a split; all other names are of training.
    """
    found = [(line["step"], line[name]) for line in lines if name in line and ("split" in line) == (name == "value")]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)


def smooth(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return means over up to `width` neighbors on each side, leaving out NaN."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    # Symmetric at the start: a loss that falls steeply would be drawn too low.
    low, high = np.maximum(place - width, 0), np.minimum(place + np.minimum(width, place) + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _draw_loss(axis: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    steps, losses = series(lines, "loss")
    axis.set_title("training loss", loc="left", fontsize=9)
    known = losses[np.isfinite(losses)]
    logarithmic = len(known) > 0 and known.min() > 0 and known.max() > _LOG_SCALE_RATIO * known.min()
    if logarithmic:
        axis.set_yscale("log")
    if len(steps) < _LINES_TO_SMOOTH:
        axis.plot(steps, losses, color=_DARK, linewidth=1.2)
        return
    axis.plot(steps, losses, color=_LIGHT, linewidth=0.7)
    # Smoothed on the scale of the axis: on a logarithmic one the mean of losses would turn every peak into a plateau.
    means = smooth(np.log(losses) if logarithmic else losses, max(len(steps) // 50, 1))
    axis.plot(steps, np.exp(means) if logarithmic else means, color=_DARK, linewidth=1.4)


def _draw_validation(axis: Axes, lines: Sequence[Mapping[str, Any]], higher_is_better: bool) -> None:
    lines = [line for line in lines if line.get("split") == "validation"]
    steps, values = series(lines, "value")
    best = best_validation(lines, higher_is_better=higher_is_better)
    axis.set_title(f"validation {lines[0].get('metric', '')}" if lines else "validation", loc="left", fontsize=9)
    if best is None:
        axis.text(0.5, 0.5, "none yet", color=GRAY, ha="center", va="center", transform=axis.transAxes)
        axis.set_yticks([])
        return
    axis.plot(*series(comparable_validations(lines), "value"), color=_DARK, linewidth=1.2, marker="o", markersize=1.8)
    axis.margins(y=0.18)
    final = (int(steps[-1]), float(values[-1]))
    found = (best.step, best.value)
    marks = [(*found, "best and final")] if found == final else [(*found, "best"), (*final, "final")]
    for step, value, name in marks:
        color = _DARK if name == "final" else _ACCENT
        axis.plot([step], [value], "o", color=color, markersize=4, clip_on=False)
        late = step > (steps[0] + steps[-1]) / 2 or len(steps) == 1
        above = higher_is_better == (name != "final")
        axis.annotate(
            f"{name} {format_score(value)}",
            (step, value),
            xytext=(0, 6 if above else -6),
            textcoords="offset points",
            ha="right" if late else "left",
            va="bottom" if above else "top",
            color=color,
            fontsize=8,
        )


def _draw_line(axis: Axes, lines: Sequence[Mapping[str, Any]], name: str, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=9)
    steps, values = series(lines, name)
    axis.plot(steps, values, color=_DARK, linewidth=1.2)
    if np.any(values > 0):
        axis.set_ylim(0, 1.08 * np.nanmax(values))


def format_ticks(axis: Axes) -> None:
    """Put few and short numbers at an axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(_short))
    if len(axis.get_yticks()) and axis.get_yscale() == "linear":
        axis.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.yaxis.set_major_formatter(FuncFormatter(_short))


def _short(value: float, _: int) -> str:
    """Return a number as 0.003, 1e-05, 250, 40k or 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
