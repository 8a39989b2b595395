"""The tables of a sweep: a row for each run, as CSV and as Markdown, and the choice among them."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tcnca.training.checkpoint import CheckpointManager, read_state
from tcnca.training.distributed import DistContext
from tcnca.training.files import atomic_write
from tcnca.training.logger import read_log
from tcnca.training.report import mean_speed, read_result
from tcnca.training.sweeps.plan import Point, Sweep
from tcnca.training.sweeps.runner import State, point_state

CSV, MARKDOWN = "sweep.csv", "sweep.md"
HEADINGS = ("state", "validation", "best validation", "test", "steps", "seconds", "tokens/s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of a run of a sweep; None for those that it does not have."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ only in their seed."""

    rows: list[Row]
    """One for each seed."""

    def scores(self, split: str) -> list[float]:
        """Return the final scores on a split of the runs that have one."""
        found = [row.scores.get(split, math.nan) for row in self.rows]
        return [score for score in found if math.isfinite(score)]

    def mean(self, split: str) -> float:
        """Return the mean over all seeds; NaN if some have no score, since failed runs must not be left out."""
        scores = self.scores(split)
        return statistics.fmean(scores) if len(scores) == len(self.rows) else math.nan


def read_rows(sweep: Sweep) -> list[Row]:
    """Read a row for each point from the run directories, in the order of the points."""
    return [read_row(sweep, point) for point in sweep.points]


def read_row(sweep: Sweep, point: Point) -> Row:
    """Read the row of a point."""
    state, error = point_state(point)
    lines = read_log(point.folder)
    result = read_result(point.folder) if state == "done" else None
    found = result.scores if result else {}
    scores = {split: score.value for split, score in found.items() if not math.isnan(score.value)}
    # Without a validation split, validations look at the test split and do not count.
    seen = [line["value"] for line in lines if line.get("split") == sweep.split == "validation"]
    seen = [value for value in (*seen, scores.get("validation")) if value is not None]
    reached = [(result.step, result.seconds)] if result else _reached(point, lines)
    steps, seconds = max(reached, default=(None, None))
    return Row(
        point=point,
        state=state,
        error=error,
        scores=scores,
        best_validation=(max(seen) if sweep.higher_is_better else min(seen)) if seen else None,
        steps=steps,
        seconds=seconds,
        tokens_per_second=mean_speed(lines),
    )


def _reached(point: Point, lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return step and seconds of an unfinished run, by its log and by its last checkpoint."""
    latest = CheckpointManager(point.folder / "checkpoints", 1, DistContext()).latest()
    states = [read_state(latest)] if latest else []
    logged = [(line["step"], line["seconds"]) for line in lines if "seconds" in line][-1:]
    return [*logged, *((state.step, state.seconds) for state in states)]


def ranked(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """Sort rows by the score on the selecting split, the best first; those without a score are last."""
    return sorted(rows, key=lambda row: _order(sweep, row.scores.get(sweep.split, math.nan)))


def grouped(sweep: Sweep, rows: Sequence[Row]) -> list[Group]:
    """Group rows that differ only in their seed, the best mean first; those without one are last."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.point.values[key] for key in sweep.compared), []).append(row)
    return sorted(
        (Group(rows=members) for members in found.values()), key=lambda group: _order(sweep, group.mean(sweep.split))
    )


def _order(sweep: Sweep, score: float) -> tuple[bool, float]:
    return not math.isfinite(score), (-score if sweep.higher_is_better else score) if math.isfinite(score) else 0.0


def best_row(sweep: Sweep, rows: Sequence[Row]) -> Row | None:
    """Return the row with the best score; None if no run is done."""
    first = ranked(sweep, rows)[0]
    return first if math.isfinite(first.scores.get(sweep.split, math.nan)) else None


def best_group(sweep: Sweep, rows: Sequence[Row]) -> Group | None:
    """Return the selected point with its runs; None if no point has a score for every seed."""
    first = grouped(sweep, rows)[0]
    return first if math.isfinite(first.mean(sweep.split)) else None


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Write `sweep.csv` and `sweep.md`."""
    atomic_write(sweep.folder / CSV, _csv(sweep, rows))
    atomic_write(sweep.folder / MARKDOWN, _markdown(sweep, rows))


def _csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    numbers = ["steps", "seconds", "tokens_per_second"]
    titles = ["state", "metric", "validation", "test", "best_validation", *numbers, "folder", "error"]
    # A key of the recipe may have the name of a column.
    writer.writerow([*(f"recipe.{key}" if key in titles else key for key in sweep.grid), *titles])
    for row in rows:
        scores = [row.scores.get("validation"), row.scores.get("test"), row.best_validation]
        spent = [getattr(row, number) for number in numbers]
        start = [*row.point.values.values(), row.state, sweep.metric]
        writer.writerow([*start, *scores, *spent, row.point.folder, row.error])
    return file.getvalue()


def cells(sweep: Sweep, row: Row) -> list[str]:
    """Return a row as text: the values of the keys that vary, then the columns of `HEADINGS`."""
    scores = [row.scores.get("validation"), row.best_validation, row.scores.get("test")]
    return [
        *(row.point.values[key] for key in sweep.varied),
        row.state,
        *("–" if score is None else f"{score:.4f}" for score in scores),
        *("–" if number is None else f"{number:,.0f}" for number in (row.steps, row.seconds, row.tokens_per_second)),
    ]


def seed_headings(sweep: Sweep) -> list[str]:
    """Return the headings of the table over seeds."""
    return [*sweep.compared, "seeds", f"mean {sweep.split}", "standard deviation"]


def seed_cells(sweep: Sweep, group: Group) -> list[str]:
    """Return a row of the table over seeds, as text."""
    scores = group.scores(sweep.split)
    missing = "" if len(scores) == len(group.rows) else f" of {len(group.rows)}"
    return [
        *(group.rows[0].point.values[key] for key in sweep.compared),
        f"{len(scores)}{missing}",
        f"{statistics.fmean(scores):.4f}" if scores else "–",
        f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else "–",
    ]


def _markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    best = best_group(sweep, rows)
    runs = best.rows if best else []
    parts = [f"# Sweep of {sweep.recipe}", f"    {sweep.command}", *_legend(sweep), count(rows)]
    body = [([*cells(sweep, row), row.point.folder.name], row in runs) for row in ranked(sweep, rows)]
    parts += [_table([*sweep.varied, *HEADINGS, "folder"], body)]
    parts += [_list(f"{row.point.folder.name} failed: {_plain(row.error)}" for row in rows if row.error)]
    if sweep.seed:
        over = [(seed_cells(sweep, group), group == best) for group in grouped(sweep, rows)]
        parts += ["Over seeds:", _table(seed_headings(sweep), over)]
    parts += [selection(sweep, rows)]
    if runs:
        parts += [f"Repeat {'these runs' if len(runs) > 1 else 'this run'} with"]
        parts += ["\n".join(f"    {shlex.join(['tcnca', *sweep.train_command(row.point)])}" for row in runs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _legend(sweep: Sweep) -> list[str]:
    """Describe the variants."""
    if sweep.variants is None:
        return []
    changes = {name: f"`{' '.join(texts)}`" for name, texts in sweep.variants.changes.items() if texts}
    return [
        sweep.variants.about,
        _list(f"{name}: {changes.get(name, 'the recipe unchanged')}" for name in sweep.variants.changes),
    ]


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(titles: Sequence[str], body: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Return a table in Markdown; marked rows are bold."""
    lines = [titles, ["---"] * len(titles)]
    for texts, marked in body:
        plain = [_plain(text) for text in texts]
        lines.append([f"**{text}**" for text in plain] if marked else plain)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def count(rows: Sequence[Row]) -> str:
    """Return how many runs are in each state."""
    states = [row.state for row in rows]
    found = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{len(rows)} run{'s' if len(rows) > 1 else ''}: {', '.join(found)}."


def selection(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return which point is selected, by what, and its test score; empty if there are no scores."""
    best = best_group(sweep, rows)
    if best is None:
        return "No point is selected: none has a score for every seed." if best_row(sweep, rows) else ""
    values, repeated = best.rows[0].point.values, len(best.rows) > 1
    mean, over = ("mean ", f" over {len(best.rows)} seeds") if repeated else ("", "")
    found = f"{mean}{sweep.split} {sweep.metric}{over}, {best.mean(sweep.split):.4f}"
    point = " ".join(f"{key}={values[key]}" for key in sweep.compared)
    # If only the seed varies, there was nothing to select.
    start = f"Selected by the {'highest' if sweep.higher_is_better else 'lowest'} {found}: {point}."
    start = start if point else f"The {found}."
    if sweep.split == "test":
        optimistic = " There is no validation split: the point was selected by its test score, which is optimistic."
        return f"{start}{optimistic if point else ''}"
    if not best.scores("test"):
        return start
    result = f"{start} Its {mean}test {sweep.metric} is {best.mean('test'):.4f}"
    return f"{result}, the result of the sweep: test scores played no part in the selection."
