"""`tcnca watch`: print the unusual lines of a growing log."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from tcnca.cli.boundary import exit_code
from tcnca.cli.reporting import Device, Run, Threads
from tcnca.errors import ConfigError, DataError, StateError, TrainingError, escape_control, shorten
from tcnca.files import file_lock, to_json

if TYPE_CHECKING:
    from tcnca.inference.watching import FileTail, LogWatch, UnusualLine, WatchState

_STDIN = Path("-")
_POLL_SECONDS = 0.2
"""Time between two looks for new lines."""


def watch(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A growing log; - for standard input.")],
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to continue, and to save where the watch ends.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, help="Print lines of at least so many bits per byte; 0 for all lines.")
    ] = None,
    z_score: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Print lines so many standard deviations above the mean of the last thousand lines. (default: 4)",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop at the end of the file.")] = False,
    from_end: Annotated[
        bool, typer.Option("--from-end", help="Without a saved state, skip the lines that are there already.")
    ] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print lines as JSON objects.")] = False,
    save_every: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Time between two saves.")] = 5.0,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Follow a log like `tail -F`, and print the lines that surprise a language model.

    Each line is scored when it is complete: its bits per byte, given all lines before it. With --state, a watch that
    was stopped continues where it was, also in a file that was rotated since then.
    """
    if threshold is not None and z_score is not None:
        raise ConfigError("--threshold, --z-score: expected one of them, got both")
    if state is not None and (state.is_dir() or (state.exists() and file.exists() and state.samefile(file))):
        raise ConfigError(f"--state: expected a file of its own, got {state}")
    if once and file != _STDIN and not file.exists():
        raise DataError(f"{file}: expected a file to watch, got nothing of this name")

    from tcnca.inference.loading import load
    from tcnca.inference.scoring import check_bytes
    from tcnca.inference.watching import FileTail, LogWatch, PipeTail
    from tcnca.signals import catch_signals
    from tcnca.training.distributed import dist_context
    from tcnca.training.threads import use_threads

    with contextlib.ExitStack() as stack:
        stack.enter_context(use_threads(threads))
        place = stack.enter_context(dist_context(device)).device
        if state is not None:
            stack.enter_context(_alone(state))
        saved = None if state is None or not state.exists() else _load(state, file)
        model = load(run, place, best=best)
        check_bytes(model, str(run))
        piped = file == _STDIN
        limits = {"threshold": threshold} if z_score is None else {"z_score": z_score}
        try:
            tail = PipeTail(_stdin()) if piped else FileTail(file, None if saved is None else saved.tail)
            scores = LogWatch(model, tail, state=saved, **limits)
        except StateError as error:
            raise StateError(f"{state}: {error}; remove the file to start again") from error
        if isinstance(tail, FileTail):
            stack.callback(tail.close)
            _print_start(tail, saved)
        caught = stack.enter_context(catch_signals())
        while from_end and saved is None and not caught and tail.read():
            pass
        # A pipe ends by itself.
        _follow(scores, caught, once and not piped, jsonl, str(file), state, save_every)
    if caught:
        typer.echo(f"stopped by {caught[0]}", err=True)
        raise typer.Exit(exit_code(caught[0]))


def _stdin() -> BinaryIO:
    return sys.stdin.buffer


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Raise a DataError if another process watches with the same state."""
    try:
        with file_lock(state.with_name(f".{state.name}.lock")):
            yield
    except TrainingError as error:
        raise DataError(f"{state}: expected one watch with this state, got another that is running") from error


def _load(state: Path, file: Path) -> WatchState:
    """Return a saved state, or raise an error if it is damaged or that of another file."""
    from tcnca.inference.watching import WatchState

    try:
        saved = WatchState.load(state)
    except StateError as error:
        reason = str(error).removesuffix("; is the file complete?")
        raise StateError(f"{reason}; remove the file to start again") from error
    expected = str(file) if file == _STDIN else os.path.abspath(file)
    found = str(_STDIN) if saved.tail is None else saved.tail.path
    if found != expected:
        raise ConfigError(
            f"--state: expected the state of {expected}, got that of {shorten(found)}; give another --state, or remove "
            "the file"
        )
    return saved


def _print_start(tail: FileTail, saved: WatchState | None) -> None:
    if tail.continues:
        text = f"continuing at line {tail.line:,} of {tail.path}"
    elif not tail.path.exists():
        text = f"waiting for {tail.path}"
    elif saved is not None and saved.tail is not None and int(saved.tail.offset):
        text = f"{tail.path}: another file than that of the saved state; starting at its first line"
    else:
        return
    typer.echo(text, err=True)


def _follow(
    scores: LogWatch, caught: list[str], once: bool, jsonl: bool, name: str, state: Path | None, save_every: float
) -> None:
    """Print unusual lines until a signal comes, or the end of the log."""
    saved_at, saved_position = time.monotonic(), -1
    while not caught:
        found = scores.read()
        for each in found or ():
            _print(each, name, jsonl)
        if found is None:
            if scores.tail.ended or once:
                break
            time.sleep(_POLL_SECONDS)
        if state is not None and time.monotonic() - saved_at >= save_every and scores.position != saved_position:
            scores.save(state)
            saved_at, saved_position = time.monotonic(), scores.position
    if state is not None:
        scores.save(state)


def _print(found: UnusualLine, name: str, jsonl: bool) -> None:
    place = found.place
    if jsonl:
        typer.echo(to_json({**place.to_dict(), "limit": round(found.limit, 4)}))
        return
    text = escape_control(place.text.decode("utf-8", "replace"), "\t")
    typer.echo(f"{place.bits / place.length:.2f} {name}:{place.line}: {text}")
