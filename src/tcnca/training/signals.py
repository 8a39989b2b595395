"""Signals that ask a run to stop. The loop reacts between two steps, after it has saved."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_DUPLICATE_SECONDS = 1.0
"""A second SIGINT within this time is ignored: `torchrun` forwards the one that the terminal has already sent."""


@contextlib.contextmanager
def catch_signals() -> Iterator[list[str]]:
    """Collect the names of SIGINT and SIGTERM instead of ending the process. A second Ctrl-C interrupts at once.

    Outside the main thread, where Python handles no signals, nothing is collected.
    """
    caught: list[str] = []
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not caught:
            first = now
        elif number == signal.SIGINT and now - first > _DUPLICATE_SECONDS:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def end_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process at once, for calls that Python's handlers cannot interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
