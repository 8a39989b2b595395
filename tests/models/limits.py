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
    """Raise an error if the block takes longer than `seconds`, or allocates `memory` bytes more than there are."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"expected an answer within {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
