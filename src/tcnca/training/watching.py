"""What a run tells: a bar for people, lines of JSON for machines, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LOG = "log.jsonl"


class Watch:
    """Shows and keeps the numbers of a run; a silent one for processes that are not the first."""

    def __init__(self, folder: Path, console: Console | None) -> None:
        self.console = console
        self._file = None
        self._board: Callable[[str, float, int], Any] | None = None
        self._progress: Progress | None = None
        if console is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / LOG).open("a", encoding="utf-8")
            self._board = _tensorboard(folder)
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
            self._progress = Progress(
                *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
            )
            self._bar = self._progress.add_task("starting", total=1.0)
            self._score = ""

    def __enter__(self) -> Watch:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """Tell people something."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Show and keep numbers; `step` says of when they are."""
        if self._file is None or self._progress is None:
            return
        self._file.write(json.dumps({"time": time.time(), **numbers}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float) and name != "step":
                    self._board(name, value, numbers["step"])
        if "score" in numbers:
            self._score = f", {numbers['metric']} {numbers['score']:.4f}"
            self.say(f"update {numbers['step']:,}: {numbers['split']} {numbers['metric']} {numbers['score']:.4f}")
            return
        text = f"update {numbers['step']:,}, loss {numbers['loss']:.4f}{self._score}"
        text += f", {numbers['tokens_per_second']:,.0f} tokens/s"
        if "memory_gib" in numbers:
            text += f", {numbers['memory_gib']:.1f} GiB"
        self._progress.update(self._bar, description=text, completed=numbers["done"])
        if not self._progress.console.is_terminal:
            self.say(text)


def _tensorboard(folder: Path) -> Callable[[str, float, int], Any] | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard")).add_scalar
