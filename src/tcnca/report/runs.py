"""Runs the experiments behind the tables, and keeps their results.

A run has a directory, as `tcnca train` writes it; a result is a small file, which is kept when the run is deleted.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from tcnca.bench.report import read_json
from tcnca.errors import ConfigError, TcncaError, format_score, plural
from tcnca.files import LOCK, check_no_links, file_lock
from tcnca.report.results import cell_recipe, collect, is_current, read_run_result, result_path, write_result
from tcnca.report.tables import SPEED, SUITES, TABLES, Cell, Table
from tcnca.training.distributed import check_device
from tcnca.training.provenance import RECIPE, read_launches
from tcnca.training.recipe import load_recipe
from tcnca.training.report import read_result
from tcnca.training.sweeps.results import FAILED, LOG, read_end
from tcnca.training.sweeps.runner import run_jobs

State = Literal["done", "collect", "stopped", "waiting", "outdated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellRun:
    """A run of a cell with one seed."""

    table: Table
    cell: Cell
    seed: int
    budget: float | None
    """Seconds to train; None if the number of steps ends the run."""
    path: Path
    """File of the result."""
    folder: Path
    """Run directory."""

    @property
    def state(self) -> State:
        """What is there of it.

        `done`, `stopped`, `waiting`, `collect` if the run is finished and its result is not written yet, or `outdated`
        if the directory holds a run of another recipe, such as that of an earlier version of the table.
        """
        if self.path.is_file():
            result = read_run_result(self.path)
            if is_current(result, self.cell) and result.budget == self.budget:
                return "done"
        if not (self.folder / RECIPE).exists():
            return "waiting"
        recipes = [cell_recipe(self.cell, self.seed, device) for device in ("cpu", "cuda")]
        launches = read_launches(self.folder)
        if load_recipe(str(self.folder / RECIPE)) not in recipes or (launches and launches[0].budget != self.budget):
            return "outdated"
        return "stopped" if read_result(self.folder) is None else "collect"

    def command(self, device: str | None = None) -> list[str]:
        """Return the arguments of `tcnca` that train it."""
        seed = [f"batch.seed={self.seed}"] if self.seed else []
        budget = [] if self.budget is None else ["--budget", f"{self.budget:g}s"]
        return [
            "train",
            self.cell.recipe,
            *self.cell.changes,
            *seed,
            *budget,
            *(["--device", device] if device else []),
        ]


def select_runs(
    tables: Sequence[str],
    only: Sequence[str] = (),
    *,
    seeds: Sequence[int] = (0,),
    budget: float | None = None,
    results: Path,
    runs: Path,
) -> list[CellRun]:
    """Return the runs of some tables.

    Args:
        tables: names of tables.
        only: names of rows and columns, in any case. Those of rows select rows, those of columns select columns.
        seeds: seeds of each cell.
        budget: seconds to train, instead of what the tables say.
        results: folder of the results.
        runs: folder of the run directories.
    """
    chosen = [TABLES[name] for name in tables if name != SPEED]
    if budget is not None and (fixed := [table.name for table in chosen if table.fixed_budgets]):
        raise ConfigError(f"--budget: expected none with {fixed[0]}, whose columns are times; choose them with --only")
    wanted = {word.strip().lower() for word in only}
    names = {kind: {name.lower() for table in chosen for name in getattr(table, kind)} for kind in ("rows", "columns")}
    if unknown := wanted - names["rows"] - names["columns"]:
        known = ", ".join([*sorted(names["rows"]), *sorted(names["columns"])]) or "which speed does not have"
        raise ConfigError(f"--only: expected names of rows and columns, {known}; got {', '.join(sorted(unknown))}")
    rows, columns = (names[kind] & wanted or names[kind] for kind in ("rows", "columns"))
    found = []
    for table in chosen:
        for cell in table.cells:
            if not cell.recipe or cell.row.lower() not in rows or cell.column.lower() not in columns:
                continue
            for seed in seeds:
                time = cell.budget if budget is None else budget
                path = result_path(results, table, cell, time, seed)
                folder = runs / table.name / path.stem
                found.append(CellRun(table=table, cell=cell, seed=seed, budget=time, path=path, folder=folder))
    return found


def run_cells(
    wanted: Sequence[CellRun],
    runs: Path,
    console: Console,
    *,
    resume: bool = False,
    jobs: int = 1,
    device: str | None = None,
) -> str:
    """Train what is not done, and write each result as soon as it is there.

    Args:
        wanted: the runs.
        runs: folder of the run directories.
        console: where to print; it must not interpret markup.
        resume: continue runs that were stopped.
        jobs: runs at a time.
        device: `cpu`, `cuda` or `mps`; None for GPUs if there are any.

    Returns:
        The name of the signal that stopped the runs, if one did.
    """
    check_device(device)
    for option, folder in (("--runs", runs), *(("--results", run.path.parent) for run in wanted)):
        # Before hours of training.
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(f"{option}: {folder} cannot be written ({error.strerror})") from error
    check_no_links(runs)
    with file_lock(runs / LOCK):
        by_folder = {run.folder: run for run in wanted}
        states = {run.folder: run.state for run in wanted}
        for folder, state in states.items():
            if state == "outdated":
                raise ConfigError(
                    f"{folder}: holds a run of another recipe or budget, as the table was changed since; remove it, or "
                    "choose another folder with --runs"
                )
        stopped = [folder for folder, state in states.items() if state == "stopped"]
        if stopped and not resume:
            others = f" (one of {len(stopped)})" if stopped[1:] else ""
            raise ConfigError(
                f"{stopped[0]}: holds a run that is not finished{others}; continue with --resume, or remove it to "
                "start again"
            )

        def finish(folder: Path) -> str:
            run = by_folder[folder]
            if read_result(folder) is None:
                last = read_end(folder / LOG).rstrip("\n").split("\n")[-1]
                failed = last.startswith(FAILED)
                return f"{last} (see {folder / LOG})" if failed else "stopped"
            try:
                result = collect(run.table, run.cell, folder, device=device, jobs=jobs)
                write_result(run.path, result)
            except (TcncaError, OSError) as error:
                return f"trained, but without a result: {error}"  # the other runs go on
            scores = {split: math.nan if score is None else score for split, score in result.scores.items()}
            shown = [f"{split} {format_score(score)}" for split, score in scores.items()]
            return f"{', '.join([*shown, result.cost])}: {run.path}"

        for folder, state in states.items():
            if state == "collect":
                console.print(f"{folder.name}: {finish(folder)}")
        waiting = {
            folder: by_folder[folder].command(device)
            for folder, state in states.items()
            if state in ("waiting", "stopped")
        }
        done = f", {len(states) - len(waiting)} already done" if len(waiting) < len(states) else ""
        console.print(f"{plural(len(states), 'run')}{done}")
        return run_jobs(waiting, finish, console, jobs=jobs, device=device)


def is_measured(path: Path) -> bool:
    """Return whether a benchmark was measured to its end."""
    return path.is_file() and not read_json(path).interrupted


def run_speed(results: Path, console: Console, device: str | None = None) -> list[str]:
    """Measure run times with `tcnca bench`, unless their files are there. Returns the benchmarks that failed."""
    failed = []
    (results / SPEED).mkdir(parents=True, exist_ok=True)
    for suite in SUITES:
        path = results / SPEED / f"{suite}.json"
        if is_measured(path):
            console.print(f"{SPEED}, {suite}: {path} is there; remove it to measure again")
            continue
        arguments = ["bench", suite, "--json", str(path), *(["--device", device] if device else [])]
        console.print(f"tcnca {' '.join(arguments)}")
        if subprocess.run([sys.executable, "-m", "tcnca", *arguments], check=False).returncode:
            failed.append(suite)
    return failed
