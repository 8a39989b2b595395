"""Signals: those that ask a run to stop, which it does between two steps after it has saved, and other handlers."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
"""Signals that ask a process to save and end. SIGBREAK is the one that processes send each other on Windows."""
DUPLICATE_SECONDS = 1.0
"""A second signal within this time is taken for the first: `torchrun` forwards the one that the terminal has sent."""


@contextlib.contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any] | int) -> Iterator[None]:
    """Handle signals in a block. Outside the main thread, where Python handles no signals, nothing changes."""
    numbers = numbers if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[str]]:
    """Collect the names of `STOP_SIGNALS` instead of ending the process. A second Ctrl-C interrupts at once."""
    caught: list[str] = []
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not caught:
            first = now
        elif now - first <= DUPLICATE_SECONDS:
            return
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    with handle_signals(STOP_SIGNALS, handle):
        yield caught


def ask_to_end(process: subprocess.Popen[Any]) -> None:
    """Let a process that was started with `start_options` save and end. On Windows, `terminate` would kill it."""
    if process.poll() is None:
        process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))


def start_options() -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` for a process that `ask_to_end` can end."""
    # On Windows, an event is sent to a group of processes, which must not be our own.
    flag = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    return {"creationflags": flag} if flag else {}
