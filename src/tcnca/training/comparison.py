"""Finished and unfinished runs next to each other: scores, cost, when each reached a score, and a figure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import ConfigError, escape_control, format_score
from tcnca.training.logger import LOG, read_log
from tcnca.training.report import (
    GRAY,
    RESULT,
    Result,
    comparable_validations,
    duration,
    format_ticks,
    mean_speed,
    read_result,
    save_figure,
    series,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Array = NDArray[np.float64]
_LINES = ("-", "--", ":")
"""Styles of lines, of which each has ten colors."""


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run, as its directory describes it."""

    name: str
    lines: list[dict[str, Any]]
    """The log."""
    result: Result | None
    """None until the run is finished."""

    @property
    def metric(self) -> str:
        """Name of the score."""
        return next((str(line["metric"]) for line in self.lines if "metric" in line), "")

    def validations(self) -> tuple[_Array, _Array, _Array]:
        """Return the steps, seconds and scores of the comparable validations."""
        steps, scores = series(comparable_validations(self.lines), "value")
        return steps, seconds_at(self.lines, steps), scores

    def seconds_to(self, score: float) -> float | None:
        """Return the time of the first validation that is at least as good as `score`."""
        _, seconds, scores = self.validations()
        known = self.result.scores.values() if self.result is not None else ()
        higher_is_better = next((each.higher_is_better for each in known), self.metric == "accuracy")
        reached = seconds[scores >= score if higher_is_better else scores <= score]
        return float(reached[0]) if len(reached) else None


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read run directories, named by their folders or, where these are equal, by their paths."""
    names = [folder.resolve().name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        if not any((folder / file).is_file() for file in (LOG, RESULT)):
            raise ConfigError(f"{escape_control(str(folder))}: expected the directory of a run, with a {LOG}")
        runs.append(ComparedRun(name if names.count(name) == 1 else str(folder), read_log(folder), read_result(folder)))
    return runs


def group_by_metric(runs: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Return the runs of each metric; those that have no score yet are with the first."""
    metrics = list(dict.fromkeys(run.metric for run in runs if run.metric)) or [""]
    return {metric: [run for run in runs if (run.metric or metrics[0]) == metric] for metric in metrics}


def comparison_rows(runs: Sequence[ComparedRun], reach: Sequence[float]) -> list[list[str]]:
    """Return a table as text, with the titles first."""
    to = [f"time to {score:g}" for score in reach]
    titles = ["run", "validation", "test", "steps", "tokens", "time", "tokens/s", "parameters", "GiB", *to]
    rows = [titles, *(_row(run, reach) for run in runs)]
    sources = [run.result.source if run.result else "–" for run in runs]
    if len({run.result.source for run in runs if run.result}) > 1:  # whose scores cannot be compared
        rows = [[row[0], source, *row[1:]] for row, source in zip(rows, ["data", *sources], strict=True)]
    return rows


def _row(run: ComparedRun, reach: Sequence[float]) -> list[str]:
    result, lines = run.result, run.lines
    scores = {split: format_score(score.value) for split, score in result.scores.items()} if result else {}
    trained = [line for line in lines if "split" not in line]
    seconds = result.seconds if result else trained[-1].get("seconds", 0.0) if trained else 0.0
    speed, memory = mean_speed(lines), [line["memory_gib"] for line in lines if line.get("memory_gib") is not None]
    times = [run.seconds_to(score) for score in reach]
    return [
        run.name,
        *(scores.get(split, "–") for split in ("validation", "test")),
        f"{lines[-1]['step'] if lines else 0:,}" + ("" if result else " (not finished)"),
        f"{sum(line.get('tokens', 0) for line in lines):,.0f}",
        duration(seconds),
        "–" if speed is None else f"{speed:,.0f}",
        f"{result.parameters:,}" if result else "–",
        f"{max(memory):.1f}" if memory else "–",
        *("–" if time is None else duration(time) for time in times),
    ]


def seconds_at(lines: Sequence[Mapping[str, Any]], steps: _Array) -> _Array:
    """Return when steps were taken, between the start and the lines of a log; NaN without lines."""
    logged, seconds = series(lines, "seconds")
    return np.interp(steps, [0, *logged], [0.0, *seconds]) if len(logged) else np.nan * steps


def save_comparison(runs: Sequence[ComparedRun], path: Path) -> None:
    """Draw the validations of runs over steps and over minutes, in the format that the name of the file says."""
    curves = []
    for place, run in enumerate(runs):
        steps, seconds, scores = run.validations()
        curves.append((run.name, place, steps, seconds / 60, scores))
    save_figure(functools.partial(draw_validations, curves, f"validation {runs[0].metric}", "minutes"), path)


def draw_validations(
    curves: Iterable[tuple[str, int, _Array, _Array, _Array]], score: str, time: str, legend: str = ""
) -> Figure:
    """Draw scores over steps and over time.

    A curve is its name, the number of its color, steps, times and scores. Curves of one name share an entry of the
    legend.
    """
    # Slow to import, and needed only here.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    later = []
    for name, color, steps, times, scores in curves:
        if len(scores):
            for axes, x in ((over_steps, steps), (over_time, times)):
                dashes = _LINES[color // 10 % len(_LINES)]
                axes.plot(x, scores, color=f"C{color % 10}", linestyle=dashes, marker="o", markersize=2, label=name)
            later.append(scores[len(scores) // 4 :])
    # The range of the first quarter would make all ends look the same.
    known = np.concatenate([*later, []])
    known = known[np.isfinite(known)]
    if len(known) and (margin := 0.05 * np.ptp(known)):
        over_steps.set_ylim(known.min() - margin, known.max() + margin)
    for axes, label in ((over_steps, "step"), (over_time, time)):
        format_ticks(axes)
        axes.set_xlim(left=0)
        axes.set_xlabel(label, color=GRAY)
        axes.grid(alpha=0.25)
    over_steps.set_ylabel(score, color=GRAY)
    handles, labels = over_steps.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), title=legend or None, loc="outside right center", frameon=False)
    return figure
