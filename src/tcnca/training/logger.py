"""What a run reports: the meter of its steps, and a log for people, for programs (JSON lines) and for TensorBoard."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text
from torch import Tensor

from tcnca.data.store import disk_errors
from tcnca.training.distributed import DistContext
from tcnca.training.files import to_json

LOG = "log.jsonl"
TENSORBOARD = "tensorboard"
_LINE_SECONDS = 5.0
"""Seconds between two printed lines of a kind where there is no terminal."""
_BAR_SECONDS = 0.1
"""Seconds between two changes of the progress bar."""


class StepOutput(NamedTuple):
    """The result of one training step."""

    loss: Tensor
    grad_norm: Tensor
    tokens: int
    """Tokens read by this process."""
    data_wait: float
    """Seconds spent waiting for the batch."""
    skipped: bool
    """Whether the optimizer step was skipped because the loss or the gradient was not finite."""


class Meter:
    """Accumulates training steps on the device. Only `read`, `state` and `first_nonfinite` wait for it."""

    loss: Tensor
    grad_norm: Tensor
    started: float

    def __init__(self, dist: DistContext, state: Mapping[str, float] | None = None) -> None:
        """`state` is what `Meter.state` returned when the run was saved."""
        self.dist = dist
        self._nonfinite = torch.full((), -1, dtype=torch.int64, device=dist.device)
        self._clear()
        if state:
            # Loss and tokens are summed over processes: the main process takes over the saved sums.
            share = float(dist.is_main)
            self.loss, self.grad_norm = self.loss + state["loss"] * share, self.grad_norm + state["grad_norm"]
            self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
            self.tokens, self.started = int(state["tokens"] * share), self.started - state["seconds"]

    def _clear(self) -> None:
        self.loss = torch.zeros((), device=self.dist.device)
        self.grad_norm = torch.zeros((), device=self.dist.device)
        self.steps, self.skipped, self.tokens, self.data_wait = 0, 0, 0, 0.0
        self.started = time.monotonic()

    def add(self, step: int, output: StepOutput) -> None:
        """Add a step."""
        self.steps += 1
        self.tokens += output.tokens
        self.data_wait += output.data_wait
        if output.skipped:
            self.skipped += 1
            return
        finite = torch.isfinite(output.loss) & torch.isfinite(output.grad_norm)
        self._nonfinite = torch.where((self._nonfinite < 0) & ~finite, step, self._nonfinite)
        self.loss, self.grad_norm = self.loss + output.loss, self.grad_norm + output.grad_norm

    def first_nonfinite(self) -> int | None:
        """Return the first step whose loss or gradient was not finite on any process."""
        step = int(self.dist.all_reduce_max(self._nonfinite.double()))
        return None if step < 0 else step

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the block from the speed."""
        started = time.monotonic()
        yield
        self.started += time.monotonic() - started

    def state(self) -> dict[str, float]:
        """Return the sums since the last `read`, to be saved with a checkpoint."""
        if not self.steps:
            return {}
        loss, tokens = self._sums()
        sums = {"loss": loss, "grad_norm": float(self.grad_norm), "tokens": tokens}
        return {**sums, "seconds": time.monotonic() - self.started, "steps": self.steps, "skipped": self.skipped}

    def read(self) -> dict[str, float]:
        """Return the means since the last `read`, and start again."""
        loss, tokens = self._sums()
        seconds = max(time.monotonic() - self.started, 1e-9)
        counted = self.steps - self.skipped
        values = {
            "loss": loss / self.dist.world_size / counted if counted else math.nan,
            "grad_norm": float(self.grad_norm) / counted if counted else math.nan,
            **({"skipped_steps": self.skipped} if self.skipped else {}),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "data_wait": self.data_wait / seconds,
            **_peak_memory(self.dist.device),
        }
        self._clear()
        return values

    def _sums(self) -> tuple[float, float]:
        tokens = torch.tensor(float(self.tokens), device=self.dist.device)
        loss, total = self.dist.all_reduce_sum(torch.stack([self.loss.double(), tokens.double()])).tolist()
        return loss, total


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of the GPU, or of this process on a CPU, where the system reports it."""
    if device.type == "cuda":
        return {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    try:
        import resource
    except ImportError:
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}


class Logger:
    """Prints progress, and writes `log.jsonl` and TensorBoard files into the run directory."""

    def __init__(self, folder: Path, console: Console | None = None, *, enabled: bool = True) -> None:
        """A logger that is not `enabled`, as on processes other than the main one, does nothing."""
        self.folder, self.enabled = folder, enabled
        self.console = console or Console(emoji=False, highlight=False)
        self._file: TextIO | None = None
        self._tensorboard: _TensorBoardWriter | None = None
        self._estimate = _TimeEstimate()
        self._values: Mapping[str, Any] = {}
        self._metric = ""
        self._drawn = -math.inf
        self._printed: dict[str, float] = {}
        # In a narrow terminal the end of the text is cut off, not the bar.
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
        columns = (BarColumn(10), TextColumn("{task.percentage:.0f} %"), _TimeLeft(), text)
        silent = not enabled or not self.console.is_terminal
        self._progress = Progress(*columns, console=self.console, transient=True, expand=True, disable=silent)
        self._bar = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Logger:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        with disk_errors(self.folder), contextlib.ExitStack() as closing:
            if self._file is not None:
                closing.callback(self._file.close)
            if self._tensorboard is not None:
                closing.callback(self._tensorboard.close)

    def preload(self) -> None:
        """Import what writes TensorBoard files, which is slow, so that the first steps do not wait for it."""
        if self.enabled:
            importlib.import_module("tensorboard.summary.writer.record_writer")

    def print(self, text: str) -> None:
        """Print a line for people."""
        if self.enabled:
            self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def progress(self, step: int, progress: float) -> None:
        """Show that `step` steps, a share `progress` of the run, are done.

        The first call says where this part of the run starts; the time left is estimated from there.
        """
        if not self.enabled:
            return
        now = time.monotonic()
        self._estimate.add(progress, now)
        if self.console.is_terminal and now - self._drawn >= _BAR_SECONDS:
            self._drawn = now
            ends = now + self._estimate.left(progress, now)
            self._progress.update(self._bar, description=self._text(step), completed=progress, ends=ends)

    def log(self, values: Mapping[str, Any]) -> None:
        """Print and store values, of which `step` says when they were measured."""
        if not self.enabled:
            return
        self._store(values)
        step = values["step"]
        if "split" in values:
            self._metric = f", {values['metric']} {values['value']:.4f}"
            if self._due("evaluation"):
                self.print(f"step {step:,}: {values['split']} {values['metric']} {values['value']:.4f}")
            return
        self._values, self._drawn = values, -math.inf
        self.progress(step, values["progress"])
        if not self.console.is_terminal and self._due("training"):
            left = _clock(self._estimate.left(values["progress"], time.monotonic()))
            self.print(f"{self._text(step)}, {100 * values['progress']:.0f} % done, {left} left")

    @contextlib.contextmanager
    def evaluation(self, split: str) -> Iterator[Callable[[int, float | None], None]]:
        """Yield a function that shows the progress of an evaluation: batches done, and the share if it is known."""
        started = printed = time.monotonic()
        bar = self._progress.add_task(f"evaluating {split}", total=1.0)

        def show(batches: int, share: float | None) -> None:
            nonlocal printed
            now = time.monotonic()
            left = (now - started) * (1 / share - 1) if share else math.inf
            self._progress.update(bar, completed=share or 0.0, ends=now + left)
            if not self.console.is_terminal and now - printed >= _LINE_SECONDS:
                printed = now
                known = f", {100 * share:.0f} % done, {_clock(left)} left" if share else ""
                self.print(f"evaluating {split}: batch {batches:,}{known}")

        try:
            yield show
        finally:
            self._progress.remove_task(bar)

    def _store(self, values: Mapping[str, Any]) -> None:
        with disk_errors(self.folder):
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = _open_log(self.folder)
                path = self.folder / TENSORBOARD
                self._tensorboard = _TensorBoardWriter(path, values["step"] if path.exists() else None)
            self._file.write(to_json({"time": time.time(), **values}) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.add(_scalars(values), values["step"])

    def _text(self, step: int) -> str:
        text = f"step {step:,}"
        if self._values:
            text += f", loss {self._values['loss']:.4f}"
        text += self._metric
        if self._values:
            text += f", {self._values['tokens_per_second']:,.0f} tokens/s"
        if "memory_gib" in self._values:
            text += f", {self._values['memory_gib']:.1f} GiB"
        return text

    def _due(self, kind: str) -> bool:
        """Return whether a line of a kind may be printed again, and note that it is."""
        now = time.monotonic()
        due = now - self._printed.get(kind, -math.inf) >= _LINE_SECONDS
        if due:
            self._printed[kind] = now
        return due


class _TimeEstimate:
    """Estimates the time left from the second half of what is done: the start, while code compiles, says little."""

    _SPACING = 0.002
    """Share of the run between two marks."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def add(self, progress: float, now: float) -> None:
        if not self._marks or progress - self._marks[-1][0] >= self._SPACING:
            self._marks.append((progress, now))

    def left(self, progress: float, now: float) -> float:
        """Return the seconds to the end; infinity while nothing is known."""
        before, then = self._marks[(len(self._marks) - 1) // 2]
        return (1 - progress) * (now - then) / (progress - before) if progress > before else math.inf


class _TimeLeft(ProgressColumn):
    """The time left, which also counts down between two steps."""

    def render(self, task: Task) -> Text:
        return Text(_clock(task.fields.get("ends", math.inf) - time.monotonic()), style="progress.remaining")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=max(round(seconds), 0))) if math.isfinite(seconds) else "-:--:--"


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    if "split" in values:
        return {f"{values['split']}/{values['metric']}": values["value"]}
    return {
        f"train/{name}": value
        for name, value in values.items()
        if isinstance(value, int | float) and name not in ("step", "progress", "seconds")
    }


class _TensorBoardWriter:
    """Writes TensorBoard files in this thread, where errors of the disk are seen."""

    def __init__(self, folder: Path, resumed: int | None) -> None:
        """`resumed` is the first step that is logged again: older values from there on are hidden."""
        from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._events, self._summaries = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resumed is not None:
            log = event_pb2.SessionLog
            self._write(step=resumed, session_log=log(status=log.START))

    def add(self, values: Mapping[str, float], step: int) -> None:
        shown = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summaries.Summary(value=shown))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


def _open_log(folder: Path) -> TextIO:
    """Open the log for appending. A line that a killed run has left unfinished is ended first."""
    with (folder / LOG).open("a+b") as file:
        if file.tell():
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return (folder / LOG).open("a", encoding="utf-8")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read the log of a run in the order of its steps, as if it had never been interrupted.

    Steps that were repeated after an interruption count once, with their last values; incomplete lines are dropped.
    """
    path = folder / LOG
    if not path.is_file():
        return []
    kept: dict[tuple[int, Any], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            continue
        while kept and next(reversed(kept))[0] > line["step"]:
            kept.popitem()
        kept[line["step"], line.get("split")] = line
    return list(kept.values())
