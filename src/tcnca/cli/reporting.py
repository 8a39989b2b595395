"""What commands share: arguments, output and progress bars."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tcnca.cli.completion import complete_device, complete_run
from tcnca.errors import ConfigError, escape_control, shown

Run = Annotated[
    Path,
    typer.Argument(metavar="RUN|MODEL", autocompletion=complete_run, help="Run directory, or folder of a saved model."),
]
"""The argument `RUN|MODEL`."""
OptionalRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN|MODEL",
        autocompletion=complete_run,
        help="Run directory, or folder of a saved model. (default: the pretrained model of English Wikipedia text)",
    ),
]
"""The argument `RUN|MODEL` of commands that use the pretrained model without it."""
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads on a CPU. (default: PyTorch's, one for each core)")
]
"""The option `--threads`."""
Device = Annotated[
    str | None,
    typer.Option(
        "--device", autocompletion=complete_device, help="cpu, cuda or mps. (default: a GPU of NVIDIA if there is one)"
    ),
]
"""The option `--device`."""
_LINE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""
_MAX_WORD = 100
"""Characters of a word for which a similar one is searched."""
_MAX_DURATION = 1e9
"""Seconds, some thirty years."""


def parse_duration(name: str, text: str) -> float | None:
    """Return the seconds of a time such as 90s, 20m or 2h; None for an empty text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 1e-3 <= seconds <= _MAX_DURATION:
        limit = f" of at most {_MAX_DURATION / 3600:,.0f}h" if seconds > _MAX_DURATION else ""
        raise ConfigError(f"{name}: expected a time such as 90s, 20m or 2h{limit}, got {shown(text)}")
    return seconds


def check_changes(words: Sequence[str], options: Sequence[str]) -> None:
    """Raise a ConfigError that suggests `lr=1e-3` if `--lr 1e-3` was given, or the option that was misspelled."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("-"):
            continue
        option, equals, value = word.partition("=")
        value = value if equals else following if following and "=" not in following else "VALUE"
        close = difflib.get_close_matches(option[:_MAX_WORD], options, 1, 0.75)
        suggestion = close[0] if close else f"{option.lstrip('-').replace('-', '_')}={value}"
        raise ConfigError(
            f"{option}: did you mean {suggestion}? Keys of a recipe are given as key=value, without dashes"
        )


class _Terminal:
    """Standard output without control characters."""

    def write(self, text: str) -> int:
        return sys.stdout.write(escape_control(text, "\n\t"))

    def flush(self) -> None:
        sys.stdout.flush()

    def seekable(self) -> bool:
        return False


def open_stdout() -> TextIO:
    """Return standard output for values from files and models, which must not control the terminal."""
    return cast(TextIO, _Terminal()) if sys.stdout.isatty() else sys.stdout


class ProgressReporter(Progress):
    """Shows the progress of several activities: bars in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, unit: str = "") -> None:
        done = TextColumn(f"{{task.completed:,.0f}} {unit}".rstrip())
        columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._printed = 0.0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` is done."""
        now = time.monotonic()
        if what not in self._bars:
            self._bars[what] = self.add_task(what, total=total)
            self._print_line(f"{what} …", now)
        elif total and now - self._printed > _LINE_SECONDS:
            self._print_line(f"{what}: {done:,} of {total:,}", now)
        self.update(self._bars[what], completed=done, total=total)

    def _print_line(self, text: str, now: float) -> None:
        self._printed = now
        if self.disable:
            typer.echo(text, err=self.console.stderr)


@contextlib.contextmanager
def progress_bar(what: str, shows: bool = True, unit: str = "bytes") -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function of what is done and of the total, if it is known: it shows a bar, on a terminal only.

    `unit` names what is counted.
    """
    console = Console(stderr=True)
    if not shows or not console.is_terminal:
        yield lambda done, total: None
        return
    with ProgressReporter(console, unit) as reporter:
        yield functools.partial(reporter, escape(escape_control(what, "")))
