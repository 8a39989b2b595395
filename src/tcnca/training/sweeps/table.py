"""What came out of a sweep: a row for each run, as a table for machines, one for people, and a picture."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tcnca.training.checkpoints import Checkpoints, read_progress
from tcnca.training.files import write_whole
from tcnca.training.log import read_log
from tcnca.training.processes import Processes
from tcnca.training.report import mean_speed, read_result
from tcnca.training.sweeps.plan import Point, Sweep
from tcnca.training.sweeps.running import State, outcome

CSV, MARKDOWN = "sweep.csv", "sweep.md"
HEADINGS = ("state", "validation", "best validation", "test", "updates", "seconds", "tokens/s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run of a sweep, in numbers. None is what it has not got."""

    point: Point
    """Which run."""
    state: State
    """How it stands."""
    error: str = ""
    """Why it failed, if it did."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The final score on each split."""
    best_validation: float | None = None
    """The best score on the validation split, at any time of the run."""
    updates: int | None = None
    """Updates done."""
    seconds: float | None = None
    """Time spent."""
    tokens_per_second: float | None = None
    """Mean speed of training."""


def read_rows(sweep: Sweep) -> list[Row]:
    """A row for each point, in their order, from what is in the folders."""
    return [read_row(sweep, point) for point in sweep.points]


def read_row(sweep: Sweep, point: Point) -> Row:
    """The row of a point."""
    state, error = outcome(point)
    lines = read_log(point.folder)
    result = read_result(point.folder) if state == "done" else None
    found = result["scores"] if result else {}
    # That of a model which is all NaN is null.
    scores = {split: float(score["value"]) for split, score in found.items() if score["value"] is not None}
    # Where there is no validation split, validations look at the test split, and are none.
    seen = [line["score"] for line in lines if line.get("split") == sweep.split == "validation"]
    seen = [score for score in (*seen, scores.get("validation")) if score is not None]
    last = result or max(_steps(point, lines), key=lambda each: each["step"], default={})
    return Row(
        point=point,
        state=state,
        error=error,
        scores=scores,
        best_validation=(max(seen) if sweep.higher_is_better else min(seen)) if seen else None,
        updates=last.get("step"),
        seconds=last.get("seconds"),
        tokens_per_second=mean_speed(lines),
    )


def _steps(point: Point, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """How far a run is by its log, and by its last checkpoint."""
    kept = Checkpoints(point.folder / "checkpoints", 1, Processes()).latest()
    logged = [line for line in lines if "seconds" in line][-1:]
    return [*logged, *([dataclasses.asdict(read_progress(kept))] if kept else [])]


def ranked(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """Rows with the best first, by the split that chooses; those without a score are last."""

    def order(row: Row) -> tuple[bool, float]:
        score = row.scores.get(sweep.split, math.nan)
        return not math.isfinite(score), (-score if sweep.higher_is_better else score) if math.isfinite(score) else 0.0

    return sorted(rows, key=order)


def best_row(sweep: Sweep, rows: Sequence[Row]) -> Row | None:
    """The row of the point that is chosen; None while no run is done."""
    first = ranked(sweep, rows)[0]
    return first if math.isfinite(first.scores.get(sweep.split, math.nan)) else None


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Write the table for machines and the one for people."""
    write_whole(sweep.folder / CSV, _csv(sweep, rows))
    write_whole(sweep.folder / MARKDOWN, _markdown(sweep, rows))


def _csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    numbers = ["updates", "seconds", "tokens_per_second"]
    titles = ["state", "metric", "validation", "test", "best_validation", *numbers, "folder", "error"]
    # Keys of a recipe may be called as columns are: those have two names, not one for two columns.
    writer.writerow([*(f"recipe.{key}" if key in titles else key for key in sweep.grid), *titles])
    for row in rows:
        scores = [row.scores.get("validation"), row.scores.get("test"), row.best_validation]
        spent = [getattr(row, number) for number in numbers]
        start = [*row.point.values.values(), row.state, sweep.metric]
        writer.writerow([*start, *scores, *spent, row.point.folder, row.error])
    return file.getvalue()


def cells(sweep: Sweep, row: Row) -> list[str]:
    """A row for people: the values of the keys that vary, then what `HEADINGS` names."""
    scores = [row.scores.get("validation"), row.best_validation, row.scores.get("test")]
    return [
        *(row.point.values[key] for key in sweep.varied),
        row.state,
        *("–" if score is None else f"{score:.4f}" for score in scores),
        *("–" if number is None else f"{number:,.0f}" for number in (row.updates, row.seconds, row.tokens_per_second)),
    ]


def _markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    best = best_row(sweep, rows)
    titles = [*sweep.varied, *HEADINGS, "folder"]
    table = [titles, ["---"] * len(titles)]
    for row in ranked(sweep, rows):
        texts = [_plain(text) for text in (*cells(sweep, row), row.point.folder.name)]
        table.append([f"**{text}**" for text in texts] if row is best else texts)
    parts = [f"# Sweep of {sweep.recipe}", f"    {sweep.command}", count(rows)]
    parts += ["\n".join(f"| {' | '.join(line)} |" for line in table)]
    parts += ["\n".join(f"- {row.point.folder.name} failed: {_plain(row.error)}" for row in rows if row.error)]
    if best is not None:
        parts += [chosen(sweep, best), "The command that makes this run:"]
        parts += [f"    {shlex.join(['tcnca', *sweep.train_command(best.point)])}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def count(rows: Sequence[Row]) -> str:
    """How many runs stand how."""
    states = [row.state for row in rows]
    found = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{len(rows)} run{'s' if len(rows) > 1 else ''}: {', '.join(found)}."


def chosen(sweep: Sweep, best: Row) -> str:
    """Which point is chosen, by what, and what its score is worth."""
    better = "greatest" if sweep.higher_is_better else "least"
    point = " ".join(f"{key}={best.point.values[key]}" for key in sweep.varied)
    start = f"Chosen by the {better} {sweep.split} {sweep.metric}, {best.scores[sweep.split]:.4f}: {point}."
    if sweep.split == "test":
        return f"{start} There is no validation split: it was the test score that chose, so it flatters."
    if "test" not in best.scores:
        return start
    return (
        f"{start} Its test {sweep.metric} is {best.scores['test']:.4f}, which is the result of the sweep: the test "
        f"scores of the other points had no say in it."
    )
