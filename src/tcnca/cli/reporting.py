"""What commands share: errors without a traceback, arguments, and progress bars."""

from __future__ import annotations

import contextlib
import difflib
import re
import time
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tcnca.errors import ConfigError, TcncaError

_LINE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""


@contextlib.contextmanager
def explained(interrupted: str = "stopped") -> Iterator[None]:
    """End the command with the message of an error, or with `interrupted` on Ctrl-C, instead of a traceback."""
    try:
        yield
    except TcncaError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(f"\n{interrupted}", err=True)
        raise typer.Exit(130) from None


def say(console: Console, text: str) -> None:
    """Print a text as it is, without wrapping or markup."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def parse_duration(name: str, text: str) -> float:
    """Return the seconds of a time such as 90s, 20m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"{name}: expected a time such as 90s, 20m or 2h, got {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def check_changes(words: Sequence[str], options: Sequence[str]) -> None:
    """Raise a ConfigError that suggests `lr=1e-3` if `--lr 1e-3` was given, or the option that was misspelled."""
    for place, word in enumerate(words):
        if not word.startswith("-"):
            continue
        option, equals, value = word.partition("=")
        key = option.lstrip("-").replace("-", "_")
        following = words[place + 1] if place + 1 < len(words) else ""
        value = value if equals else following if following and "=" not in following else "VALUE"
        close = difflib.get_close_matches(option, options, 1, 0.75)
        suggestion = close[0] if close else f"{key}={value}"
        raise ConfigError(
            f"{option}: did you mean {suggestion}? Keys of a recipe are given as key=value, without dashes"
        )


class Watcher:
    """Shows progress: bars in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started: dict[str, float] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, tuple[int, float]] = {}
        self._bars: dict[str, TaskID] = {}
        self._printed = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` is done."""
        now = time.perf_counter()
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=total)
            self.started[what], self.first[what] = now, done
            if not self.console.is_terminal:
                say(self.console, f"{what} …")
            self._printed = now
        if not self.console.is_terminal and total and now - self._printed > _LINE_SECONDS:
            say(self.console, f"{what}: {done:,} of {total:,}")
            self._printed = now
        self._progress.update(self._bars[what], completed=done, total=total)
        self.last[what] = done, now

    def amount(self, what: str) -> tuple[int, float]:
        """Return how much of something was done, and in how many seconds."""
        if what not in self.last:
            return 0, 0.0
        done, now = self.last[what]
        return done - self.first[what], now - self.started[what]
