"""Signals that ask a run to stop: it does so between two updates, when it has saved."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

_ONCE = 1.0
"""Seconds within which a signal counts once: `torchrun` passes on what the terminal has sent already."""


@contextlib.contextmanager
def signals() -> Iterator[list[str]]:
    """Collect the names of signals that ask to stop. Ctrl-C a second time stops at once."""
    caught: list[str] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not caught:
            first = now
        elif number == signal.SIGINT and now - first > _ONCE:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
