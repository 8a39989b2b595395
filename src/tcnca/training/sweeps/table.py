"""What came out of a sweep: a row for each run, as a table for machines, one for people, and a picture."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tcnca.training.checkpoints import Checkpoints, read_progress
from tcnca.training.files import write_whole
from tcnca.training.log import read_log
from tcnca.training.processes import Processes
from tcnca.training.report import mean_speed, read_result
from tcnca.training.sweeps.plan import Point, Sweep
from tcnca.training.sweeps.running import State, outcome

CSV, MARKDOWN = "sweep.csv", "sweep.md"
HEADINGS = ("state", "validation", "best validation", "test", "max_steps", "seconds", "tokens/s")


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
    max_steps: int | None = None
    """Updates done."""
    seconds: float | None = None
    """Time spent."""
    tokens_per_second: float | None = None
    """Mean speed of training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in nothing but their seed."""

    rows: list[Row]
    """One for each seed."""

    def scores(self, split: str) -> list[float]:
        """The final scores on a split, of the runs that have one."""
        found = [row.scores.get(split, math.nan) for row in self.rows]
        return [score for score in found if math.isfinite(score)]

    def mean(self, split: str) -> float:
        """Mean over all seeds, NaN while some have no score: those that fail are not the ones to leave out."""
        scores = self.scores(split)
        return statistics.fmean(scores) if len(scores) == len(self.rows) else math.nan


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
        max_steps=last.get("step"),
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
    return sorted(rows, key=lambda row: _order(sweep, row.scores.get(sweep.split, math.nan)))


def grouped(sweep: Sweep, rows: Sequence[Row]) -> list[Group]:
    """Rows that differ in their seed alone put together, with the best mean first; those without one are last."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.point.values[key] for key in sweep.compared), []).append(row)
    return sorted(
        (Group(rows=members) for members in found.values()), key=lambda group: _order(sweep, group.mean(sweep.split))
    )


def _order(sweep: Sweep, score: float) -> tuple[bool, float]:
    return not math.isfinite(score), (-score if sweep.higher_is_better else score) if math.isfinite(score) else 0.0


def best_row(sweep: Sweep, rows: Sequence[Row]) -> Row | None:
    """The row with the best score; None while no run is done."""
    first = ranked(sweep, rows)[0]
    return first if math.isfinite(first.scores.get(sweep.split, math.nan)) else None


def best_group(sweep: Sweep, rows: Sequence[Row]) -> Group | None:
    """The point that is chosen, with a run for each seed; None while none has a score for every seed."""
    first = grouped(sweep, rows)[0]
    return first if math.isfinite(first.mean(sweep.split)) else None


def write_tables(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Write the table for machines and the one for people."""
    write_whole(sweep.folder / CSV, _csv(sweep, rows))
    write_whole(sweep.folder / MARKDOWN, _markdown(sweep, rows))


def _csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    numbers = ["max_steps", "seconds", "tokens_per_second"]
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
        *("–" if number is None else f"{number:,.0f}" for number in (row.max_steps, row.seconds, row.tokens_per_second)),
    ]


def seed_headings(sweep: Sweep) -> list[str]:
    """Headings of the table over seeds."""
    return [*sweep.compared, "seeds", f"mean {sweep.split}", "standard deviation"]


def seed_cells(sweep: Sweep, group: Group) -> list[str]:
    """A row of the table over seeds, for people."""
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
    parts += [chosen(sweep, rows)]
    if runs:
        parts += [f"What makes {'these runs' if len(runs) > 1 else 'this run'}:"]
        parts += ["\n".join(f"    {shlex.join(['tcnca', *sweep.train_command(row.point)])}" for row in runs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _legend(sweep: Sweep) -> list[str]:
    """What the variants are."""
    if sweep.variants is None:
        return []
    changes = {name: f"`{' '.join(texts)}`" for name, texts in sweep.variants.changes.items() if texts}
    return [
        sweep.variants.about,
        _list(f"{name}: {changes.get(name, 'the recipe as it is')}" for name in sweep.variants.changes),
    ]


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(titles: Sequence[str], body: Iterable[tuple[Sequence[str], bool]]) -> str:
    """A table in Markdown; rows that are marked are bold."""
    lines = [titles, ["---"] * len(titles)]
    for texts, marked in body:
        plain = [_plain(text) for text in texts]
        lines.append([f"**{text}**" for text in plain] if marked else plain)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def count(rows: Sequence[Row]) -> str:
    """How many runs stand how."""
    states = [row.state for row in rows]
    found = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"{len(rows)} run{'s' if len(rows) > 1 else ''}: {', '.join(found)}."


def chosen(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Which point is chosen, by what, and what its score is worth; nothing while there are no scores."""
    best = best_group(sweep, rows)
    if best is None:
        return "None is chosen, as none has a score for every seed." if best_row(sweep, rows) else ""
    values, repeated = best.rows[0].point.values, len(best.rows) > 1
    mean, over = ("mean ", f" over {len(best.rows)} seeds") if repeated else ("", "")
    found = f"{mean}{sweep.split} {sweep.metric}{over}, {best.mean(sweep.split):.4f}"
    point = " ".join(f"{key}={values[key]}" for key in sweep.compared)
    # Where nothing but the seed varies, there was nothing to choose.
    start = f"Chosen by the {'greatest' if sweep.higher_is_better else 'least'} {found}: {point}."
    start = start if point else f"The {found}."
    if sweep.split == "test":
        flatters = " There is no validation split: it was the test score that chose, so it flatters."
        return f"{start}{flatters if point else ''}"
    if not best.scores("test"):
        return start
    result = f"{start} Its {mean}test {sweep.metric} is {best.mean('test'):.4f}"
    return f"{result}, which is the result of the sweep: the test scores of the other points had no say in it."
