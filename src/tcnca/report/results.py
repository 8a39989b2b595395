"""Results of the runs behind a table: one JSON file for each, with all that is needed to check it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcnca.config import NonNegativeFloat, NonNegativeInt, Seed
from tcnca.errors import TrainingError
from tcnca.files import atomic_write, read_json, to_json
from tcnca.report.tables import SPEED, TABLES, Cell, Table
from tcnca.training import evaluate_run
from tcnca.training.comparison import ComparedRun
from tcnca.training.logger import read_log
from tcnca.training.provenance import Budget, read_launches
from tcnca.training.report import duration, read_result


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of one run of a cell."""

    table: str
    row: str
    column: str
    recipe: str
    changes: list[str]
    """Changes to the recipe, as the cell has them."""
    seed: Seed
    budget: Budget | None
    """Seconds to train; None if the number of steps ended the run."""
    command: str
    """Command that repeats the run."""
    scores: dict[str, float]
    """Final score on each split."""
    answers: dict[str, NonNegativeInt]
    """Answers that each score is the mean of."""
    evaluations: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scores on test, measured in other ways."""
    steps: NonNegativeInt
    tokens: NonNegativeInt
    seconds: NonNegativeFloat
    """Time of training, with validations and compilation."""
    tokens_per_second: NonNegativeFloat | None
    memory_gib: NonNegativeFloat | None
    parameters: NonNegativeInt
    curve: list[list[float | None]] = dataclasses.field(default_factory=list)
    """Step, seconds and score of each validation during training, on the part of the split that they have in common."""
    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    commit: str | None
    started: str
    """Start of the run, in UTC."""

    @property
    def cost(self) -> str:
        """What the run was given, as text: its time or its steps."""
        return duration(self.budget) if self.budget is not None else f"{self.steps:,} steps"


def result_path(folder: Path, table: Table, cell: Cell, budget: float | None, seed: int) -> Path:
    """Return the file of a run's result."""
    time = "" if budget is None else f",{budget:g}s"
    return folder / table.name / f"{cell.name}{time}{f',seed={seed}' if seed else ''}.json"


def collect(table: Table, cell: Cell, run: Path, device: str | None = None) -> RunResult:
    """Read the result of a finished run from its directory, and measure its model in the table's other ways."""
    result, launches, lines = read_result(run), read_launches(run), read_log(run)
    if result is None or not launches:
        raise TrainingError(f"{run}: the run is not finished")
    evaluations = {
        name: evaluate_run(run, changes, split="test", device=device, verbose=False).value
        for name, changes in table.evaluations.items()
        if "test" in result.scores
    }
    validations = zip(*ComparedRun("", lines, result).validations(), strict=True)
    first = launches[0]
    return RunResult(
        table=table.name,
        row=cell.row,
        column=cell.column,
        recipe=cell.recipe,
        changes=list(cell.changes),
        seed=first.seed,
        budget=first.budget,
        command=first.command,
        scores={split: score.value for split, score in result.scores.items()},
        answers={split: score.count for split, score in result.scores.items()},
        evaluations=evaluations,
        steps=result.step,
        tokens=result.tokens,
        seconds=round(result.seconds, 1),
        tokens_per_second=None if result.tokens_per_second is None else round(result.tokens_per_second, 1),
        memory_gib=None if result.memory_gib is None else round(result.memory_gib, 2),
        parameters=result.parameters,
        curve=[[int(step), round(float(time), 1), round(float(score), 5)] for step, time, score in validations],
        hardware=first.hardware,
        versions=first.versions,
        commit=first.commit,
        started=first.started,
    )


def write_result(path: Path, result: RunResult) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, to_json(dataclasses.asdict(result), indent=1) + "\n")


def read_run_result(path: Path) -> RunResult:
    """Read a result."""
    remedy = "remove it, and `tcnca reproduce` writes it again"
    result: RunResult = read_json(path, RunResult, remedy=remedy)
    return result


def read_results(folder: Path) -> list[RunResult]:
    """Read all results of a folder, in the order of their files."""
    paths = [path for name in TABLES for path in sorted((folder / name).glob("*.json"))]
    return [read_run_result(path) for path in paths]


def speed_paths(folder: Path) -> list[Path]:
    """Return the files of `tcnca bench`."""
    return sorted((folder / SPEED).glob("*.json"))


def results_of(results: Sequence[RunResult], table: Table, cell: Cell) -> list[RunResult]:
    """Return the results of a cell as it is defined now: of the largest budget, one for each seed."""

    def cost(result: RunResult) -> tuple[float, Any]:
        return result.budget or 0.0, result.started

    found = [
        result
        for result in results
        if (result.table, result.row, result.column) == (table.name, cell.row, cell.column)
        and (result.recipe, tuple(result.changes)) == (cell.recipe, cell.changes)
    ]
    most = max((result.budget or 0.0 for result in found), default=0.0)
    latest = {result.seed: result for result in sorted(found, key=cost) if (result.budget or 0.0) == most}
    return [latest[seed] for seed in sorted(latest)]
