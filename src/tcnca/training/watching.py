"""What is seen of a run while it goes: a bar for people, lines of JSON for machines, and TensorBoard."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from tcnca.data.store import disk_errors
from tcnca.training.log import LOG, open_log, plain

if TYPE_CHECKING:
    from tcnca.training.board import Board

__all__ = ["BOARD", "LOG", "Watch"]

BOARD = "tensorboard"
_SILENCE = 5.0
"""Seconds between two lines of a kind for one who has no terminal."""
_BLINK = 0.1
"""Seconds between two changes of the bar."""


class Watch:
    """Shows and keeps the numbers of a run; a silent one, without a console, for processes that are not the first."""

    def __init__(self, folder: Path, console: Console | None) -> None:
        self.folder, self.console = folder, console
        self._file: TextIO | None = None
        self._board: Board | None = None
        self._pace = _Pace()
        self._numbers: Mapping[str, Any] = {}
        self._score = ""
        self._changed = -math.inf
        self._said: dict[str, float] = {}
        # In a narrow terminal it is the end of the text that is cut off.
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
        columns = (BarColumn(10), TextColumn("{task.percentage:.0f} %"), _Left(), text)
        silent = console is None or not console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, expand=True, disable=silent)
        self._bar = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Watch:
        if self.console is not None:
            # Takes a while, which is not to be part of the first updates.
            importlib.import_module("tcnca.training.board")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        with disk_errors(self.folder), contextlib.ExitStack() as closing:
            if self._file is not None:
                closing.callback(self._file.close)
            if self._board is not None:
                closing.callback(self._board.close)

    def say(self, text: str) -> None:
        """Tell people something."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def advance(self, step: int, done: float) -> None:
        """Take note that `step` updates are done, which is the share `done` of the run.

        The first call says where the run, or this part of it, begins; the time left is judged from there.
        """
        if self.console is None:
            return
        now = time.monotonic()
        self._pace.add(done, now)
        if self.console.is_terminal and now - self._changed >= _BLINK:
            self._changed = now
            self._progress.update(
                self._bar, description=self._text(step), completed=done, ends=now + self._pace.left(done, now)
            )

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Show and keep numbers; `step` says of when they are."""
        if self.console is None:
            return
        if "loss" in numbers and "memory_gib" not in numbers:
            numbers = {**numbers, **_resident()}
        self._keep(numbers)
        if "score" in numbers:
            self._score = f", {numbers['metric']} {numbers['score']:.4f}"
            if self._due("score"):
                self.say(f"update {numbers['step']:,}: {numbers['split']} {numbers['metric']} {numbers['score']:.4f}")
            return
        self._numbers, self._changed = numbers, -math.inf
        self.advance(numbers["step"], numbers["done"])
        if not self.console.is_terminal and self._due("loss"):
            now = time.monotonic()
            left = _clock(self._pace.left(numbers["done"], now))
            self.say(f"{self._text(numbers['step'])}, {100 * numbers['done']:.0f} % done, {left} left")

    def _keep(self, numbers: Mapping[str, Any]) -> None:
        with disk_errors(self.folder):
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = open_log(self.folder)
                self._board = _board(self.folder / BOARD, numbers["step"])
            self._file.write(json.dumps(plain({"time": time.time(), **numbers})) + "\n")
            self._file.flush()
            if self._board is not None:
                self._board.add(_scalars(numbers), numbers["step"])

    def _text(self, step: int) -> str:
        text = f"update {step:,}"
        if self._numbers:
            text += f", loss {self._numbers['loss']:.4f}"
        text += self._score
        if self._numbers:
            text += f", {self._numbers['tokens_per_second']:,.0f} tokens/s"
        if "memory_gib" in self._numbers:
            text += f", {self._numbers['memory_gib']:.1f} GiB"
        return text

    def _due(self, kind: str) -> bool:
        """Whether it is time to say something of a kind again."""
        now = time.monotonic()
        due = now - self._said.get(kind, -math.inf) >= _SILENCE
        if due:
            self._said[kind] = now
        return due


class _Pace:
    """Judges how long a run will take by its latter half: how it began, while it was compiled, says little."""

    _APART = 0.002
    """Share of the run between two marks."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def add(self, done: float, now: float) -> None:
        """Take note of how much is done."""
        if not self._marks or done - self._marks[-1][0] >= self._APART:
            self._marks.append((done, now))

    def left(self, done: float, now: float) -> float:
        """Seconds to the end; infinite while nothing is known."""
        before, then = self._marks[(len(self._marks) - 1) // 2]
        return (1 - done) * (now - then) / (done - before) if done > before else math.inf


class _Left(ProgressColumn):
    """The time left, which goes down between two updates as well."""

    def render(self, task: Task) -> Text:
        """For the bar."""
        return Text(_clock(task.fields.get("ends", math.inf) - time.monotonic()), style="progress.remaining")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=max(round(seconds), 0))) if math.isfinite(seconds) else "-:--:--"


def _scalars(numbers: Mapping[str, Any]) -> dict[str, float]:
    if "score" in numbers:
        return {f"{numbers['split']}/{numbers['metric']}": numbers["score"]}
    return {
        f"train/{name}": value
        for name, value in numbers.items()
        if isinstance(value, int | float) and name not in ("step", "done", "seconds")
    }


def _board(folder: Path, step: int) -> Board:
    from tcnca.training.board import Board

    return Board(folder, step if folder.exists() else None)


def _resident() -> dict[str, float]:
    """The most memory that this process has had, where the system tells."""
    try:
        import resource
    except ImportError:
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
