"""Runs the points of a sweep, each in a process of its own.

All state is in the sweep directory: the run of each point, and in it a log of what its process printed. A sweep that was
stopped at any time continues with the same command.
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
from tcnca.training.distributed import available_cores
from tcnca.training.files import file_lock
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import differences, load_recipe
from tcnca.training.report import read_result
from tcnca.training.signals import catch_signals
from tcnca.training.sweeps.plan import Point, Sweep

LOG = "sweep.log"
State = Literal["done", "failed", "stopped", "waiting"]
_FAILED = "failed: "


class Listener(Protocol):
    """Is told what happens to the runs of a sweep."""

    def started(self, point: Point, resumed: bool) -> None:
        """A run has started."""

    def ended(self, point: Point) -> None:
        """A run has ended, successfully or not."""

    def stopping(self, signal_name: str, running: int) -> None:
        """A signal has arrived, and `running` runs are told to save and end."""


def point_state(point: Point) -> tuple[State, str]:
    """Return the state of a run by what is in its directory, and why it failed if it did."""
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


def run_sweep(sweep: Sweep, listener: Listener) -> str:
    """Run the points that are not done. Returns the name of the signal that stopped the sweep, if one did."""
    with disk_errors(sweep.folder):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        with file_lock(sweep.folder, "sweep"), catch_signals() as caught:
            _run_points(sweep, listener, caught)
            return caught[0] if caught else ""


def _run_points(sweep: Sweep, listener: Listener, caught: list[str]) -> None:
    waiting = [point for point in sweep.points if point_state(point)[0] != "done"]
    free, running, handled = _environments(sweep), list[_Job](), 0
    try:
        while waiting or running:
            while waiting and free and not caught:
                point, environment = waiting.pop(0), free.pop(0)
                resumed = (point.folder / RECIPE).exists()
                running.append(_Job(sweep, point, environment, resumed))
                listener.started(point, resumed)
            if (arrived := len(caught)) > handled:
                waiting.clear()
                listener.stopping(caught[handled], len(running))
                for job in running:
                    # A second signal does not wait until the runs have saved.
                    job.process.kill() if handled else job.process.terminate()
                handled = arrived
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                free.append(job.environment)
                job.close(bool(caught))
                listener.ended(job.point)
    except KeyboardInterrupt:
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

    def __init__(self, sweep: Sweep, point: Point, environment: dict[str, str], resumed: bool) -> None:
        self.point, self.environment = point, environment
        point.folder.mkdir(exist_ok=True)
        arguments = sweep.train_command(point, "--out", str(point.folder), *(["--resume"] if resumed else []))
        self._log: BinaryIO = (point.folder / LOG).open("ab")
        self._log.write(f"$ {shlex.join(['tcnca', *arguments])}\n".encode())
        self._log.flush()
        self._start = self._log.tell()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tcnca", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )

    def close(self, asked: bool) -> None:
        """Log how the process ended; `asked` says that it was told to."""
        status = self.process.wait()
        stopped = asked or status in (128 + signal.SIGINT, -signal.SIGINT, -signal.SIGTERM)
        last = "done" if status == 0 else "stopped" if stopped else _FAILED + self._reason(status)
        # On a line of its own, even if the process was killed in the middle of one.
        self._log.write(f"\n{last}\n".encode())
        self._log.close()

    def _reason(self, status: int) -> str:
        if status < 0:
            memory = "; it may have run out of memory" if -status == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-status).name}{memory}"
        printed = (self.point.folder / LOG).read_bytes()[self._start :].decode(errors="replace").split("\n")
        lines = [line.strip() for line in printed if line.strip()] or [f"ended with status {status}"]
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        return (errors or lines)[-1]


def _environments(sweep: Sweep) -> list[dict[str, str]]:
    """Return the environment variables of each job, which give it its share of the machine."""
    jobs = range(sweep.jobs)
    if sweep.device != "cpu" and torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = visible.split(",")
        return [{"CUDA_VISIBLE_DEVICES": devices[job % len(devices)]} for job in jobs]
    share = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // sweep.jobs))
    return [{"OMP_NUM_THREADS": share} for _ in jobs]
