"""Results of the runs behind a table: one JSON file for each, with all that is needed to check it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcnca.config import NonNegativeFloat, NonNegativeInt, PositiveInt, Seed
from tcnca.errors import ConfigError, TrainingError, plural
from tcnca.files import atomic_write, read_json, to_json
from tcnca.report.tables import SPEED, TABLES, Cell, Table
from tcnca.training import Recipe, evaluate_run, load_recipe
from tcnca.training.comparison import ComparedRun
from tcnca.training.logger import read_log
from tcnca.training.provenance import RECIPE, Budget, read_launches
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
    settings: dict[str, Any]
    """The whole recipe of the run, with these changes."""
    seed: Seed
    budget: Budget | None
    """Seconds to train; None if the number of steps ended the run."""
    command: str
    """Command that repeats the run."""
    scores: dict[str, float | None]
    """Final score on each split; None if it is not a number."""
    answers: dict[str, NonNegativeInt]
    """Answers that each score is the mean of."""
    evaluations: dict[str, float | None] = dataclasses.field(default_factory=dict)
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
    jobs: PositiveInt = 1
    """Runs that shared the machine."""
    hardware: list[dict[str, str | int | float]]
    """Devices of the run, of each launch with others than before."""
    versions: dict[str, str]
    """Versions of Python and of the libraries that compute, at the first launch."""
    commits: list[str]
    """Commits of the library's source, of each launch with another than before; empty for an installed library."""
    started: str
    """Start of the run, in UTC."""

    @property
    def cost(self) -> str:
        """What the run was given, as text: its time or its steps, and the machine.

        How many runs shared the machine matters to those that end with their time.
        """
        given = duration(self.budget) if self.budget is not None else f"{self.steps:,} steps"
        shared = f", {self.jobs} runs at a time" if self.jobs > 1 and self.budget is not None else ""
        return f"{given}, {' and '.join(map(describe_hardware, self.hardware))}{shared}"


def describe_hardware(hardware: dict[str, str | int | float]) -> str:
    """Return the device of a run or a benchmark as text."""
    count, threads = hardware.get("count", 1), hardware.get("threads", hardware.get("cores"))
    several = f"{count} × " if isinstance(count, int) and count > 1 else ""
    shown = f", {plural(threads, 'thread')}" if hardware.get("device") == "cpu" and isinstance(threads, int) else ""
    return f"{several}{hardware.get('name', 'unknown')}{shown}"


def result_path(folder: Path, table: Table, cell: Cell, budget: float | None, seed: int) -> Path:
    """Return the file of a run's result."""
    time = "" if budget is None else f",{budget:g}s"
    return folder / table.name / f"{cell.name}{time}{f',seed={seed}' if seed else ''}.json"


@functools.cache
def cell_recipe(cell: Cell, seed: int, device: str) -> Recipe:
    """Return the recipe of a run of a cell on `cpu` or `cuda`."""
    changes = [*cell.changes, *([f"batch.seed={seed}"] if seed else [])]
    return load_recipe(cell.recipe).override(changes).for_device(device)


def is_current(result: RunResult, cell: Cell) -> bool:
    """Return whether a result is of the cell as it is defined now, and of its recipe as it is now."""
    if (result.row, result.column, result.recipe) != (cell.row, cell.column, cell.recipe):
        return False
    try:
        settings = Recipe.from_dict(result.settings)
    except ConfigError:
        return False  # it has keys of an earlier version
    return any(settings == cell_recipe(cell, result.seed, device) for device in ("cpu", "cuda"))


def collect(table: Table, cell: Cell, run: Path, *, device: str | None = None, jobs: int = 1) -> RunResult:
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
        settings=load_recipe(str(run / RECIPE)).to_dict(),
        seed=first.seed,
        budget=first.budget,
        command=first.command,
        scores={split: _finite(score.value) for split, score in result.scores.items()},
        answers={split: score.count for split, score in result.scores.items()},
        evaluations={name: _finite(score) for name, score in evaluations.items()},
        steps=result.step,
        tokens=result.tokens,
        seconds=round(result.seconds, 1),
        tokens_per_second=None if result.tokens_per_second is None else round(result.tokens_per_second, 1),
        memory_gib=None if result.memory_gib is None else round(result.memory_gib, 2),
        parameters=result.parameters,
        curve=[[int(step), round(float(time), 1), round(float(score), 5)] for step, time, score in validations],
        jobs=jobs,
        hardware=[hardware for hardware, _ in itertools.groupby(launch.hardware for launch in launches)],
        versions=first.versions,
        commits=[commit for commit, _ in itertools.groupby(launch.commit for launch in launches) if commit],
        started=first.started,
    )


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


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
    """Return the results of a cell as it is defined now: one for each seed, with the largest budget on one machine.

    A run without a budget, which takes all its steps, counts as the largest.
    """

    def cost(result: RunResult) -> tuple[float, str]:
        return math.inf if result.budget is None else result.budget, result.started

    found = [result for result in results if result.table == table.name and is_current(result, cell)]
    if table.fixed_budgets:
        found = [result for result in found if result.budget == cell.budget]
    best = max(found, key=cost, default=None)
    same = [each for each in found if best and (each.budget, each.cost) == (best.budget, best.cost)]
    latest = {result.seed: result for result in sorted(same, key=cost)}
    return [latest[seed] for seed in sorted(latest)]
