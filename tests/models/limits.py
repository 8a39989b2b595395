"""Limits for code that reads hostile files: an error instead of a test that hangs or a machine without memory."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def limited(seconds: float, memory: int = 2**30) -> Iterator[None]:
    """Raise an error if the block takes more than `seconds` of computing, or allocates `memory` bytes more.

    By the clock it may take ten times as long: other processes use the machine as well, and a wait computes nothing.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"expected an answer within {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, stop) for number in timers}
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
