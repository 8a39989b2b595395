"""What a run leaves in its folder when it is done: its numbers for machines, and a page for people."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcnca.errors import TrainingError
from tcnca.training.curves import CURVES, best_of
from tcnca.training.evaluate import Score
from tcnca.training.files import write_whole
from tcnca.training.log import plain, read_log
from tcnca.training.record import Part, read_record
from tcnca.training.run import Result, Run

RESULT = "result.json"
REPORT = "report.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The numbers of a run."""

    step: int
    """Updates done."""
    seconds: float
    """Time spent, over all its parts."""
    stopped: str
    """The signal that stopped it before its end, if one did."""
    scores: dict[str, Score]
    """For each split that was looked at in the end, the score."""
    best: dict[str, float] | None
    """The best validation: its `score`, and the `step` it was at."""
    tokens: int
    """Tokens read in training, as far as they are logged: what follows the last line of the log is not."""
    tokens_per_second: float | None
    """Mean speed of training."""
    memory_gib: float | None
    """The most memory that the first process has had: of its GPU, or of itself on a CPU."""
    parameters: int
    """Numbers that were learned."""
    source: str
    """What it was trained on."""
    data: str
    """Digest of the set; empty for one that is made as it is needed."""


def report_of(run: Run, result: Result) -> Report:
    """The numbers of a run that is done, with what its log knows of all its parts."""
    lines = read_log(run.folder)
    best = best_of(lines, higher_is_better=run.task.higher_is_better)
    return Report(
        step=result.step,
        seconds=result.seconds,
        stopped=result.stopped,
        scores=result.scores,
        best=None if best is None else {"step": best[0], "score": best[1]},
        tokens=round(sum(line.get("tokens", 0) for line in lines)),
        tokens_per_second=mean_speed(lines),
        memory_gib=max((line["memory_gib"] for line in lines if line.get("memory_gib") is not None), default=None),
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        source=run.recipe.data.source,
        data=run.progress.data,
    )


def mean_speed(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per second of training, over all lines of a log."""
    read = [(line["tokens"], line["tokens_per_second"]) for line in lines if line.get("tokens")]
    return sum(tokens for tokens, _ in read) / sum(tokens / speed for tokens, speed in read) if read else None


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write numbers of a run as JSON, whole or not at all."""
    write_whole(path, json.dumps(plain(values), indent=1) + "\n")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The numbers of a run that is done; None while it is not."""
    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: cannot be read ({error}); remove it, and --resume makes it again") from error
    return values


def write_report(folder: Path, report: Report) -> None:
    """Write the page of a run into its folder: its scores, what it took, its curves, and how to make it again."""
    parts = read_record(folder)
    text = [f"# {parts[0].recipe if parts else folder.name}", ""]
    text += ["| split | metric | value | answers |", "| --- | --- | ---: | ---: |"]
    text += [f"| {' | '.join(row)} |" for row in score_rows(report)]
    text += ["", "| | |", "| --- | --- |"]
    text += [f"| {name} | {value} |" for name, value in [*cost_rows(report), *_made_with(report, parts)]]
    if (folder / CURVES).is_file():
        text += ["", f"![Loss, validation, learning rate and speed over the updates]({CURVES})"]
    if parts:
        text += ["", "Made again with", "", "```sh", parts[0].command, "```"]
    write_whole(folder / REPORT, "\n".join(text) + "\n")


def score_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """For each split its metric, value and number of answers, for people."""
    return [(split, each.metric, f"{each.value:.4f}", f"{each.count:,}") for split, each in report.scores.items()]


def cost_rows(report: Report) -> list[tuple[str, str]]:
    """What a run was and took, for people."""
    rows = []
    if report.best is not None:
        rows.append(("best validation", f"{report.best['score']:.4f} at update {report.best['step']:,}"))
    rows += [("max_steps", f"{report.step:,}"), ("tokens", f"{report.tokens:,}"), ("time", duration(report.seconds))]
    if report.tokens_per_second is not None:
        rows.append(("tokens/s", f"{report.tokens_per_second:,.0f}"))
    if report.memory_gib is not None:
        rows.append(("peak memory", f"{report.memory_gib:.2f} GiB"))
    return [*rows, ("parameters", f"{report.parameters:,}")]


def duration(seconds: float) -> str:
    """A time for people: 9.3 s, or 1:02:03."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def _made_with(report: Report, parts: Sequence[Part]) -> list[tuple[str, str]]:
    rows = [("data", f"{report.source}, {f'digest {report.data}' if report.data else 'made as it is needed'}")]
    if not parts:
        return rows
    first = parts[0]
    rows += [("seed", f"{first.seed}")]
    if first.budget is not None:
        rows += [("budget", duration(first.budget))]
    # A run may have gone on somewhere else.
    rows += [("hardware", "; ".join(dict.fromkeys(_hardware(part) for part in parts)))]
    rows += [("versions", "; ".join(dict.fromkeys(_versions(part) for part in parts)))]
    commits = dict.fromkeys(part.commit or "none, an installed library" for part in parts)
    rows += [("commit", ", ".join(commits)), ("begun", first.begun)]
    resumed = [f"update {part.step:,}" for part in parts[1:]]
    return [*rows, *([("gone on from", ", ".join(resumed))] if resumed else [])]


def _hardware(part: Part) -> str:
    facts = part.hardware
    several = f", {part.processes} processes" if part.processes > 1 else ""
    if "memory_gib" in facts:
        return f"{facts['count']} × {facts['name']}, {facts['memory_gib']} GiB{several}"
    return f"{facts['name']}, {facts['cores']} cores{several}"


def _versions(part: Part) -> str:
    return ", ".join(f"{name} {version}" for name, version in part.versions.items()) + f"; {part.platform}"
