"""Limits for code that reads hostile files: an error instead of a test that hangs or a machine without memory."""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HANG = 60
"""Seconds by the clock after which a block is taken for one that never ends."""


@contextlib.contextmanager
def limited(seconds: float, memory: int = 2**30) -> Iterator[None]:
    """Raise an error if the block takes more than `seconds` of computing, or allocates `memory` bytes more.

    Only this thread counts: other tests leave threads and garbage behind, and other processes use the machine as well.
    An alarm ends a block that hangs. It repeats, as Python drops an exception that is raised while it frees an object.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"expected an answer within {seconds} s, got none within {HANG} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    collects = gc.isenabled()
    gc.disable()
    signal.setitimer(signal.ITIMER_REAL, HANG, 1)
    started = time.thread_time()
    try:
        yield
        spent = time.thread_time() - started
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if collects:
            gc.enable()
    if spent > seconds:
        raise TimeoutError(f"expected an answer within {seconds} s, took {spent:.1f} s")
