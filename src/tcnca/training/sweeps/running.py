"""Sweeps: a recipe at every combination of some values, each a run of its own, in a process of its own.

What a sweep knows is in its folder: the run of each point, and beside the run a log of what its process said. So a
sweep that was stopped at any instant goes on by the same command.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from typing import BinaryIO, Literal, Protocol

import torch

from tcnca.data.store import disk_errors
from tcnca.errors import ConfigError
from tcnca.training.files import alone_in
from tcnca.training.processes import cores
from tcnca.training.recipe import differences, load_recipe
from tcnca.training.report import read_result
from tcnca.training.run import RECIPE
from tcnca.training.stopping import signals
from tcnca.training.sweeps.plan import Point, Sweep

LOG = "sweep.log"
State = Literal["done", "failed", "stopped", "waiting"]

_FAILED = "failed: "


class Watcher(Protocol):
    """Hears what happens to the runs of a sweep."""

    def started(self, point: Point, again: bool) -> None:
        """A run was started; `again`, if there was something to go on with."""

    def ended(self, point: Point) -> None:
        """A run has ended, well or not."""

    def stopping(self, name: str, running: int) -> None:
        """A signal came; so many runs are told to save and end."""


def outcome(point: Point) -> tuple[State, str]:
    """How a run stands, by what is in its folder, and why it failed if it did."""
    if read_result(point.folder) is not None:
        try:
            trained = load_recipe(str(point.folder / RECIPE))
        except ConfigError as error:
            return "failed", str(error)
        if trained == point.recipe:
            return "done", ""
        return "failed", f"the recipe was changed meanwhile: {differences(trained, point.recipe)}"
    try:
        lines = (point.folder / LOG).read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    except OSError:
        return ("stopped" if (point.folder / RECIPE).exists() else "waiting"), ""
    if lines[-1].startswith(_FAILED):
        return "failed", lines[-1].removeprefix(_FAILED)
    return "stopped", ""


def run_sweep(sweep: Sweep, watcher: Watcher) -> str:
    """Run what is not done yet. Returns the signal that stopped it, if one did."""
    with disk_errors(sweep.folder):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        with alone_in(sweep.folder, "sweep"), signals() as caught:
            _work(sweep, watcher, caught)
            return caught[0] if caught else ""


def _work(sweep: Sweep, watcher: Watcher, caught: list[str]) -> None:
    waiting = [point for point in sweep.points if outcome(point)[0] != "done"]
    free, running, told = _slots(sweep), list[_Job](), 0
    try:
        while waiting or running:
            while waiting and free and not caught:
                point, slot = waiting.pop(0), free.pop(0)
                again = (point.folder / RECIPE).exists()
                running.append(_Job(sweep, point, slot, again))
                watcher.started(point, again)
            if (heard := len(caught)) > told:
                waiting.clear()
                watcher.stopping(caught[told], len(running))
                for job in running:
                    # Whoever asks twice does not want to wait until it has saved.
                    job.process.kill() if told else job.process.terminate()
                told = heard
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                free.append(job.slot)
                job.close(bool(caught))
                watcher.ended(job.point)
    except KeyboardInterrupt:
        # Ctrl-C a second time, which is not to be waited for either.
        for job in running:
            job.process.kill()
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
            job.close(True)


class _Job:
    """The process of a run."""

    def __init__(self, sweep: Sweep, point: Point, slot: dict[str, str], again: bool) -> None:
        self.point, self.slot = point, slot
        point.folder.mkdir(exist_ok=True)
        arguments = sweep.train_command(point, "--out", str(point.folder), *(["--resume"] if again else []))
        self._log: BinaryIO = (point.folder / LOG).open("ab")
        self._log.write(f"$ {shlex.join(['tcnca', *arguments])}\n".encode())
        self._log.flush()
        self._begin = self._log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tcnca", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **slot},
        )

    def close(self, asked: bool) -> None:
        """Write down how the process ended; `asked`, if it was told to."""
        status = self.process.wait()
        stopped = asked or status in (128 + signal.SIGINT, -signal.SIGINT, -signal.SIGTERM)
        last = "done" if status == 0 else "stopped" if stopped else _FAILED + self._reason(status)
        # On a line of its own, also where the process was cut off in the middle of one.
        self._log.write(f"\n{last}\n".encode())
        self._log.close()

    def _reason(self, status: int) -> str:
        if status < 0:
            memory = "; there may be too little memory" if -status == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-status).name}{memory}"
        said = (self.point.folder / LOG).read_bytes()[self._begin :].decode(errors="replace").split("\n")
        lines = [line.strip() for line in said if line.strip()] or [f"ended with status {status}"]
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        return (errors or lines)[-1]


def _slots(sweep: Sweep) -> list[dict[str, str]]:
    """For each run of those side by side, what part of the machine it gets, as environment variables."""
    jobs = range(sweep.jobs)
    if sweep.device != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = visible.split(",")
        return [{"CUDA_VISIBLE_DEVICES": devices[job % len(devices)]} for job in jobs]
    share = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // sweep.jobs))
    return [{"OMP_NUM_THREADS": share} for _ in jobs]
