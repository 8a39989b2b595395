"""Runs the experiments behind the tables, and keeps their results.

A run has a directory, as `tcnca train` writes it; a result is a small file, which is kept when the run is deleted.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from tcnca.errors import ConfigError, format_score, plural
from tcnca.files import LOCK, disk_errors, file_lock
from tcnca.report.results import collect, read_run_result, result_path, write_result
from tcnca.report.tables import SPEED, SUITES, TABLES, Cell, Table
from tcnca.training.distributed import check_device
from tcnca.training.provenance import RECIPE
from tcnca.training.report import read_result
from tcnca.training.sweeps.results import FAILED, LOG, read_end
from tcnca.training.sweeps.runner import run_jobs

State = Literal["done", "collect", "stopped", "waiting"]


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
        """`done`, `stopped`, `waiting`, or `collect` if the run is finished and its result is not written yet."""
        if self.path.is_file():
            result = read_run_result(self.path)
            if (result.recipe, tuple(result.changes)) == (self.cell.recipe, self.cell.changes):
                return "done"
        if read_result(self.folder) is not None:
            return "collect"
        return "stopped" if (self.folder / RECIPE).exists() else "waiting"

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
    wanted = {word.strip().lower() for word in only}
    names = {kind: {name.lower() for table in chosen for name in getattr(table, kind)} for kind in ("rows", "columns")}
    if unknown := wanted - names["rows"] - names["columns"]:
        known = sorted(names["rows"]) + sorted(names["columns"])
        raise ConfigError(f"--only: expected names of rows and columns, {', '.join(known)}; got {', '.join(unknown)}")
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
        device: `cpu` or `cuda`; None for GPUs if there are any.

    Returns:
        The name of the signal that stopped the runs, if one did.
    """
    check_device(device)
    runs.mkdir(parents=True, exist_ok=True)
    with disk_errors(runs), file_lock(runs / LOCK):
        by_folder = {run.folder: run for run in wanted}
        states = {run.folder: run.state for run in wanted}
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
            result = collect(run.table, run.cell, folder, device)
            write_result(run.path, result)
            scores = [f"{split} {format_score(score)}" for split, score in result.scores.items()]
            return f"{', '.join([*scores, result.cost])}: {run.path}"

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


def run_speed(results: Path, console: Console, device: str | None = None) -> list[str]:
    """Measure run times with `tcnca bench`, unless their files are there. Returns the benchmarks that failed."""
    failed = []
    (results / SPEED).mkdir(parents=True, exist_ok=True)
    for suite in SUITES:
        path = results / SPEED / f"{suite}.json"
        if path.is_file():
            console.print(f"{SPEED}, {suite}: {path} is there; remove it to measure again")
            continue
        arguments = ["bench", suite, "--json", str(path), *(["--device", device] if device else [])]
        console.print(f"tcnca {' '.join(arguments)}")
        if subprocess.run([sys.executable, "-m", "tcnca", *arguments], check=False).returncode:
            failed.append(suite)
    return failed
