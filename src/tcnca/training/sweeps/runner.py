"""Runs the points of a sweep, each in its own process.

All state is in the sweep directory: the run of each point, and in it a log of what its process printed. A sweep that
was stopped at any time continues with the same command.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tcnca.errors import format_score, plural
from tcnca.files import LOCK, check_no_links, disk_errors, file_lock
from tcnca.signals import STOP_SIGNALS, ask_to_end, catch_signals, start_options
from tcnca.training.distributed import available_cores
from tcnca.training.provenance import RECIPE
from tcnca.training.sweeps.plan import Sweep
from tcnca.training.sweeps.results import FAILED, LOG, read_end, read_row, read_rows, write_tables


def run_sweep(sweep: Sweep, console: Console, *, deadline: float | None = None) -> str:
    """Run the points that are not done, and write the tables after each.

    Args:
        sweep: the sweep.
        console: where to print; it must not interpret markup, since brackets occur in values.
        deadline: time of `time.monotonic()` at which runs are stopped, to be resumed later; None for no limit.

    Returns:
        The name of the signal that stopped the sweep, if one did.
    """
    check_no_links(sweep.folder)
    with disk_errors(sweep.folder), file_lock(sweep.folder / LOCK):
        rows = {row.point.folder: row for row in read_rows(sweep)}
        waiting = {row.point.folder: sweep.train_command(row.point) for row in rows.values() if row.state != "done"}
        done = f", {len(rows) - len(waiting)} already done" if len(waiting) < len(rows) else ""
        console.print(f"{plural(len(rows), 'run')} in {sweep.folder}{done}")

        def finish(folder: Path) -> str:
            row = rows[folder] = read_row(rows[folder].point)
            write_tables(sweep, list(rows.values()))
            scores = [f"{split} {sweep.metric} {format_score(score)}" for split, score in row.scores.items()]
            reason = f": {row.error} (see {folder / LOG})" if row.error else ""
            return f"{', '.join([row.state, *scores])}{reason}"

        return run_jobs(waiting, finish, console, jobs=sweep.jobs, device=sweep.device, deadline=deadline)


def run_jobs(
    commands: Mapping[Path, Sequence[str]],
    finish: Callable[[Path], str],
    console: Console,
    *,
    jobs: int = 1,
    device: str | None = None,
    deadline: float | None = None,
) -> str:
    """Train runs, each in its own process, which logs to `sweep.log` in the directory of the run.

    Args:
        commands: arguments of `tcnca` by run directory, without `--out` and `--resume`. A directory that holds a run is
            resumed.
        finish: is called with the directory when a run has ended, and returns what to print.
        console: where to print.
        jobs: runs at a time.
        device: `cpu`, `cuda` or `mps`; None for GPUs if there are any.
        deadline: time of `time.monotonic()` at which runs are stopped; None for no limit.

    Returns:
        The name of the signal that stopped the runs, if one did.
    """
    columns = (BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with catch_signals() as caught, progress:
        waiting = list(commands)
        bar = progress.add_task("", total=len(waiting))
        free, running, handled, late = _environments(jobs, device), list[_Job](), 0, False
        try:
            while waiting or running:
                while waiting and free and not caught:
                    folder = waiting.pop(0)
                    job = _Job(folder, commands[folder], free.pop(0))
                    running.append(job)
                    progress.update(bar, description=f"running {', '.join(each.folder.name for each in running)}")
                    console.print(f"{folder.name}: {'resumes' if job.resumed else 'starts'}")
                if (arrived := len(caught)) > handled:
                    waiting.clear()
                    console.print(f"{caught[handled]}: runs save and end; another signal ends them at once")
                    for job in running:
                        # A second signal does not wait until the runs have saved.
                        job.process.kill() if handled else ask_to_end(job.process)
                    handled = arrived
                if deadline is not None and time.monotonic() > deadline and not late:
                    late = True
                    waiting.clear()
                    console.print("the time is over: runs save and end")
                    for job in running:
                        ask_to_end(job.process)
                time.sleep(0.1)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    free.append(job.environment)
                    job.close(asked=late or bool(caught))
                    console.print(f"{job.folder.name}: {finish(job.folder)}")
                    progress.advance(bar)
        except KeyboardInterrupt:
            for job in running:
                job.process.kill()
        finally:
            for job in running:
                ask_to_end(job.process)
            for job in running:
                job.close(asked=True)
        return caught[0] if caught else ""


class _Job:
    """The process of a run."""

    def __init__(self, folder: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.resumed = (folder / RECIPE).exists()
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [*command, "--out", str(folder), *(["--resume"] if self.resumed else [])]
        self._log: BinaryIO = (folder / LOG).open("ab")
        self._log.write(f"$ {shlex.join(['tcnca', *arguments])}\n".encode())
        self._log.flush()
        self._start = self._log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tcnca", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            **start_options(),
        )

    def close(self, *, asked: bool) -> None:
        """Wait for the process, and log how it ended; `asked` says that it was told to."""
        status = self.process.wait()
        codes = [code for number in STOP_SIGNALS for code in (128 + number, -number)]
        stopped = asked or status in codes
        last = "done" if status == 0 else "stopped" if stopped else FAILED + self._reason(status)
        # On its own line, even if the process was killed in the middle of one.
        self._log.write(f"\n{last}\n".encode())
        self._log.close()

    def _reason(self, status: int) -> str:
        if status < 0:
            name = signal.Signals(-status).name
            return f"ended by {name}" + ("; it may have run out of memory" if name == "SIGKILL" else "")
        printed = read_end(self.folder / LOG, self._start).split("\n")
        lines = [line.strip() for line in printed if line.strip()] or [f"ended with status {status}"]
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        return (errors or lines)[-1]


def _environments(jobs: int, device: str | None) -> list[dict[str, str]]:
    """Return the environment variables of each job, which give it its share of the machine."""
    if device != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = visible.split(",")
        return [{"CUDA_VISIBLE_DEVICES": devices[job % len(devices)]} for job in range(jobs)]
    share = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // jobs))
    return [{"OMP_NUM_THREADS": share} for _ in range(jobs)]
