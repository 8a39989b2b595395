"""What a run reports: the meter of its steps, and a log for people, for programs (JSON lines) and for TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import io
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from tcnca.config import NonNegativeInt, Range, Seconds, check
from tcnca.errors import ConfigError, format_score
from tcnca.extras import missing
from tcnca.files import atomic_write, disk_errors, parse_json, to_json
from tcnca.ops.checks import has_float64
from tcnca.training.distributed import DistContext

LOG = "log.jsonl"
TENSORBOARD = "tensorboard"
_LINE_SECONDS = 5.0
"""Seconds between two printed lines of a kind."""
_SPEED_SECONDS = 300.0
"""Last seconds from which the time left is estimated."""


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


@dataclasses.dataclass(kw_only=True)
class MeterState:
    """The sums of a process since the last line of the log. Sums that are not finite are saved as None."""

    loss: float | None
    grad_norm: float | None
    tokens: Annotated[int, Range(0, 2**53)]
    steps: NonNegativeInt
    skipped: NonNegativeInt
    seconds: Seconds


class Meter:
    """Accumulates training steps on the device. Only `read`, `state` and `first_nonfinite` wait for it."""

    loss: Tensor
    grad_norm: Tensor
    started: float

    def __init__(self, dist: DistContext, state: Sequence[MeterState] = ()) -> None:
        """`state` is what `Meter.state` returned when the run was saved, on any number of processes."""
        self.dist = dist
        self._sums_device = dist.device if has_float64(dist.device) else torch.device("cpu")
        self._nonfinite = torch.full((), -1, dtype=torch.int64, device=dist.device)
        self._clear()
        if state:
            same = len(state) == dist.world_size
            own = state[dist.rank] if same else _merged(state, dist)
            self.loss, self.grad_norm = self.loss + _number(own.loss), self.grad_norm + _number(own.grad_norm)
            self.steps, self.skipped, self.tokens = own.steps, own.skipped, own.tokens
            self.started -= own.seconds

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
        step = int(self.dist.all_reduce_max(self._exact(self._nonfinite)))
        return None if step < 0 else step

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the block from the speed."""
        started = time.monotonic()
        yield
        self.started += time.monotonic() - started

    def state(self) -> list[MeterState]:
        """Return the sums of every process since the last `read`, to be saved with a checkpoint."""
        if not self.steps:
            return []
        sums = torch.stack([self._exact(self.loss), self._exact(self.grad_norm), self._tokens()])
        seconds = time.monotonic() - self.started
        return [
            MeterState(
                loss=loss,
                grad_norm=grad_norm,
                tokens=int(tokens),
                steps=self.steps,
                skipped=self.skipped,
                seconds=seconds,
            )
            for loss, grad_norm, tokens in self.dist.all_gather(sums).tolist()
        ]

    def read(self) -> dict[str, float]:
        """Return the means since the last `read`, and start again."""
        loss, tokens = self.dist.all_reduce_sum(torch.stack([self._exact(self.loss), self._tokens()])).tolist()
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

    def _tokens(self) -> Tensor:
        return torch.tensor(float(self.tokens), dtype=torch.float64, device=self._sums_device)

    def _exact(self, value: Tensor) -> Tensor:
        return value.to(self._sums_device).double()


def _number(saved: float | None) -> float:
    return math.nan if saved is None else saved


def _merged(state: Sequence[MeterState], dist: DistContext) -> MeterState:
    """Return the sums of this process if another number of processes saved them: the main one takes over all."""
    # The loss of a step is the mean over processes.
    loss = sum(_number(each.loss) for each in state) / len(state) * dist.world_size
    tokens = sum(each.tokens for each in state)
    return dataclasses.replace(state[0], loss=loss * dist.is_main, tokens=tokens * dist.is_main)


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of an NVIDIA GPU, or else of this process, where the system reports it."""
    if device.type == "cuda":
        return {"memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    try:
        import resource
    except ImportError:
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}


class LogConsole(Console):
    """A console that falls silent when nobody reads it any more, instead of ending the process."""

    broken_pipe = False

    def on_broken_pipe(self) -> None:
        """Do without output. What is still in Python's buffer must not fail at the end of the process."""
        self.quiet = self.broken_pipe = True
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Logger:
    """Prints progress, and writes `log.jsonl` and TensorBoard files into the run directory."""

    def __init__(self, folder: Path, console: Console | None = None, *, enabled: bool = True) -> None:
        """A logger that is not `enabled`, as on processes other than the main one, does nothing."""
        self.folder, self.enabled = folder, enabled
        self.console = console or LogConsole()
        self._file: TextIO | None = None
        self._tensorboard: _TensorBoardWriter | None = None
        self._values: Mapping[str, Any] = {}
        self._metric = ""
        self._printed: dict[str, float] = {}
        # In a narrow terminal the end of the text is cut off, not the bar.
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
        self._progress = Progress(
            *(BarColumn(10), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn(), text),
            console=self.console,
            transient=True,
            expand=True,
            disable=not enabled or not self.console.is_terminal,
            speed_estimate_period=_SPEED_SECONDS,
            get_time=lambda: time.monotonic(),
        )
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
        if self.enabled and not missing("tensorboard"):
            importlib.import_module("tensorboard.summary.writer.record_writer")

    def print(self, text: str) -> None:
        """Print a line for people."""
        if self.enabled:
            self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @property
    def broken_pipe(self) -> bool:
        """Whether the reader of the output has ended, as in `tcnca train … | head`."""
        return getattr(self.console, "broken_pipe", False)

    def rewind(self, step: int) -> None:
        """Remove from the log what was done after `step`, from where the run is resumed."""
        if self.enabled and (self.folder / LOG).is_file():
            lines = [line for line in read_log(self.folder) if line["step"] <= step]
            atomic_write(self.folder / LOG, "".join(to_json(line) + "\n" for line in lines))

    def progress(self, step: int, progress: float) -> None:
        """Show that `step` steps, a share `progress` of the run, are done.

        The first call says where this part of the run starts; the time left is estimated from there.
        """
        if self.enabled:
            self._progress.update(self._bar, description=self._text(step), completed=progress)

    def restart_clock(self, progress: float) -> None:
        """Estimate the time left from here on, as the steps so far took unusually long."""
        if self.enabled:
            self._progress.reset(self._bar)
            self._progress.update(self._bar, completed=progress)

    def log(self, values: Mapping[str, Any]) -> None:
        """Print and store values, of which `step` says when they were measured."""
        if not self.enabled:
            return
        self._store(values)
        step = values["step"]
        if "split" in values:
            self._metric = f"{values['split']} {values['metric']} {format_score(values['value'])}"
            self._print_line("validation", f"step {step:,}: {self._metric}")
            return
        self._values = values
        self.progress(step, values["progress"])
        if not self.console.is_terminal:
            self._print_line("training", f"{self._text(step)}, {self._done(self._bar)}")

    @contextlib.contextmanager
    def evaluation(self, split: str) -> Iterator[Callable[[int, float | None], None]]:
        """Yield a function that shows the progress of an evaluation: batches done, and the share if it is known."""
        self._printed["evaluation"] = time.monotonic()
        bar = self._progress.add_task(f"evaluating {split}", total=1.0)

        def show(batches: int, share: float | None) -> None:
            self._progress.update(bar, completed=share or 0.0)
            if not self.console.is_terminal:
                known = f", {self._done(bar)}" if share else ""
                self._print_line("evaluation", f"evaluating {split}: batch {batches:,}{known}")

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
                if not missing("tensorboard"):
                    self._tensorboard = _TensorBoardWriter(path, values["step"] if path.exists() else None)
            self._file.write(to_json({"time": time.time(), **values}) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.add(_scalars(values), values["step"])

    def _text(self, step: int) -> str:
        values = self._values
        loss = f", loss {format_score(values['loss'])}" if values else ""
        speed = f", {values['tokens_per_second']:,.0f} tokens/s" if values else ""
        memory = f", {values['memory_gib']:.1f} GiB" if "memory_gib" in values else ""
        metric = self._metric and f", {self._metric}"
        return f"step {step:,}{loss}{metric}{speed}{memory}"

    def _done(self, bar: TaskID) -> str:
        task = next(task for task in self._progress.tasks if task.id == bar)
        left = "-:--:--" if task.time_remaining is None else datetime.timedelta(seconds=task.time_remaining)
        return f"{task.percentage:.0f} % done, {left} left"

    def _print_line(self, kind: str, text: str) -> None:
        """Print a line, unless one of its kind was printed a moment ago."""
        now = time.monotonic()
        if now - self._printed.get(kind, -math.inf) >= _LINE_SECONDS:
            self._printed[kind] = now
            self.print(text)


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
    kept: dict[tuple[int, Any, Any], dict[str, Any]] = {}
    for line in _read_lines(path):
        while kept and next(reversed(kept))[0] > line["step"]:
            kept.popitem()
        # A model may be validated on a part of a split and on all of it.
        kept[line["step"], line.get("split"), line.get("count")] = line
    return list(kept.values())


_MAX_LINE = 2**16
"""Bytes of a line of the log. Ours have some hundred."""
_Number = Annotated[float, Range(-1e100, 1e100)]
# Types of the values that are read again. NaN is stored as null.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("step", "count"), NonNegativeInt),
    **dict.fromkeys(("split", "metric"), str),
    **dict.fromkeys(("value", "loss", "lr"), _Number | None),
    "seconds": Seconds,
    **dict.fromkeys(("tokens", "tokens_per_second", "memory_gib"), Annotated[float, Range(0, 1e100)]),
}


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a log that are complete, and whose values have the types that are expected."""
    with path.open("rb") as file:
        while text := file.readline(_MAX_LINE):
            try:
                line = parse_json(text, dict[str, Any])
                for name in line.keys() & _FIELDS.keys():
                    check(name, line[name], _FIELDS[name])
            except ConfigError:
                continue
            if "step" in line:
                yield line
