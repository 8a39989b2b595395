"""The results of a sweep: a row for each run, as CSV and as Markdown, and the choice among them."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tcnca.errors import ConfigError, format_score
from tcnca.files import atomic_write, check_regular
from tcnca.training.logger import read_log
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import differences, load_recipe
from tcnca.training.report import markdown_table, mean_speed, read_result
from tcnca.training.sweeps.plan import Point, Sweep

CSV, MARKDOWN = "sweep.csv", "sweep.md"
LOG = "sweep.log"
"""What the process of a run has printed; its last line says how it ended."""
FAILED = "failed: "
"""Start of the last line of the log of a run that failed."""
_MAX_END = 2**18
"""Bytes of the end of a log that are read."""
State = Literal["done", "failed", "stopped", "waiting"]
_NUMBERS = (
    *("validation", "best_validation", "test", "steps", "seconds", "tokens_per_second", "parameters"),
    "memory_gib",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The results of a run of a sweep."""

    point: Point
    """The run."""
    state: State
    """Its state."""
    error: str = ""
    """Why it failed, if it did."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Final score on each split."""
    best_validation: float | None = None
    """Best validation score during the run."""
    steps: int | None = None
    """Steps done."""
    seconds: float | None = None
    """Time spent."""
    tokens_per_second: float | None = None
    """Mean speed of training."""
    parameters: int | None = None
    """Number of learned parameters."""
    memory_gib: float | None = None
    """Peak memory."""

    def score(self, split: str) -> float:
        """Return the final score on a split; NaN if there is none."""
        return self.scores.get(split, math.nan)

    def number(self, name: str) -> float | None:
        """Return a column of the tables; None if there is no such number."""
        value = self.scores.get(name) if name in ("validation", "test") else getattr(self, name)
        return None if value is None or math.isnan(value) else value


def point_state(point: Point) -> tuple[State, str]:
    """Return the state of a run by what is in its directory, and why it failed if it did."""
    if read_result(point.folder) is not None:
        try:
            trained = load_recipe(str(point.folder / RECIPE))
        except ConfigError as error:
            return "failed", str(error)
        if trained == point.recipe:
            return "done", ""
        return "failed", f"the recipe was changed meanwhile: {differences(trained, point.recipe)}"
    try:
        last = read_end(point.folder / LOG).rstrip("\n").split("\n")[-1]
    except OSError:
        return ("stopped" if (point.folder / RECIPE).exists() else "waiting"), ""
    return ("failed", last.removeprefix(FAILED)) if last.startswith(FAILED) else ("stopped", "")


def read_end(path: Path, start: int = 0) -> str:
    """Read a text file from `start` on, or only its end if there is much."""
    check_regular(path)
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, io.SEEK_END) - _MAX_END))
        return file.read(_MAX_END).decode(errors="replace")


def read_row(point: Point) -> Row:
    """Read the results of a run from its directory."""
    state, error = point_state(point)
    lines = read_log(point.folder)
    result = read_result(point.folder) if state == "done" else None
    timed = [line for line in lines if "seconds" in line]
    steps, seconds = (timed[-1]["step"], timed[-1]["seconds"]) if timed else (None, None)
    return Row(
        point=point,
        state=state,
        error=error,
        scores={split: score.value for split, score in result.scores.items()} if result else {},
        best_validation=result.best.value if result and result.best else None,
        steps=result.step if result else steps,
        seconds=result.seconds if result else seconds,
        tokens_per_second=mean_speed(lines),
        parameters=result.parameters if result else None,
        memory_gib=result.memory_gib if result else None,
    )


def read_rows(sweep: Sweep) -> list[Row]:
    """Read the results of all runs, in the order of the points."""
    return [read_row(point) for point in sweep.points]


def ranked(sweep: Sweep, rows: Sequence[Row]) -> list[list[Row]]:
    """Group runs that differ only in their seed, and sort the groups by their mean score, those without one last."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.point.values[key] for key in sweep.compared), []).append(row)
    sign = -1 if sweep.higher_is_better else 1

    def order(group: list[Row]) -> tuple[bool, float]:
        mean = mean_score(group, sweep.split)
        return math.isnan(mean), 0.0 if math.isnan(mean) else sign * mean

    return sorted(groups.values(), key=order)


def mean_score(group: Sequence[Row], split: str) -> float:
    """Return the mean score of a group; NaN if a run has none, since failed runs must not be left out."""
    return statistics.fmean(row.score(split) for row in group)


def best_group(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """Return the runs of the selected point; empty if no point has a score for every seed."""
    first = ranked(sweep, rows)[0]
    return [] if math.isnan(mean_score(first, sweep.split)) else first


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Write `sweep.csv` and `sweep.md`."""
    atomic_write(sweep.folder / CSV, _to_csv(sweep, rows))
    atomic_write(sweep.folder / MARKDOWN, to_markdown(sweep, rows))


def _to_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    # The keys of the recipe come last: one of them may have the name of a column.
    writer.writerow(["state", "metric", *_NUMBERS, "folder", "error", *sweep.grid])
    for row in rows:
        numbers = [row.number(name) for name in _NUMBERS]
        writer.writerow([row.state, sweep.metric, *numbers, row.point.folder, row.error, *row.point.values.values()])
    return file.getvalue()


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return the results as a page: the command, the variants, the tables, and the selected point."""
    states = [row.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    parts = [f"# Sweep of {sweep.recipe}", f"    {sweep.command}"]
    if sweep.variants is not None:
        changes = {name: f"`{' '.join(texts)}`" for name, texts in sweep.variants.changes.items() if texts}
        listed = [f"- {name}: {changes.get(name, 'the recipe unchanged')}" for name in sweep.variants.changes]
        parts += [sweep.variants.about, "\n".join(listed)]
    parts += [f"Runs: {counts}.", _run_table(sweep, rows)]
    parts += ["\n".join(f"- {row.point.folder.name} failed: {row.error}" for row in rows if row.error)]
    if sweep.seed:
        parts += ["Over seeds:", _seed_table(sweep, rows)]
    parts += [_selection(sweep, rows)]
    if best := best_group(sweep, rows):
        parts += ["Repeat with"]
        parts += ["\n".join(f"    {shlex.join(['tcnca', *sweep.train_command(row.point)])}" for row in best)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _run_table(sweep: Sweep, rows: Sequence[Row]) -> str:
    body = []
    for row in (row for group in ranked(sweep, rows) for row in group):
        texts = []
        for name in _NUMBERS:
            number = row.number(name)
            score = name in ("validation", "best_validation", "test")
            digits = 1 if name == "memory_gib" else 0
            texts.append("–" if number is None else format_score(number) if score else f"{number:,.{digits}f}")
        body.append([*(row.point.values[key] for key in sweep.varied), row.state, *texts])
    return markdown_table([*sweep.varied, "state", *(name.replace("_", " ") for name in _NUMBERS)], body)


def _seed_table(sweep: Sweep, rows: Sequence[Row]) -> str:
    body = []
    for group in ranked(sweep, rows):
        scores = [score for row in group if not math.isnan(score := row.score(sweep.split))]
        body.append(
            [
                *(group[0].point.values[key] for key in sweep.compared),
                f"{len(scores)} of {len(group)}",
                format_score(statistics.fmean(scores)) if scores else "–",
                format_score(statistics.stdev(scores)) if len(scores) > 1 else "–",
            ]
        )
    return markdown_table([*sweep.compared, "seeds", f"mean {sweep.split}", "standard deviation"], body)


def _selection(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Say which point is selected, by what, and its test score."""
    best = best_group(sweep, rows)
    if not best:
        return "No point is selected: none has a score for every seed."
    mean, over = ("mean ", f" over {len(best)} seeds") if len(best) > 1 else ("", "")
    point = " ".join(f"{key}={best[0].point.values[key]}" for key in sweep.compared)
    score = f"{mean}{sweep.split} {sweep.metric}{over}, {format_score(mean_score(best, sweep.split))}"
    start = f"Selected by the {'highest' if sweep.higher_is_better else 'lowest'} {score}: {point}."
    if sweep.split == "test":
        return f"{start} There is no validation split: the point was selected by its test score, which is optimistic."
    test = mean_score(best, "test")
    return start if math.isnan(test) else f"{start} Its {mean}test {sweep.metric} is {format_score(test)}."
