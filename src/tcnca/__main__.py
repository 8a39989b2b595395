"""`python -m tcnca`, and the command `tcnca`."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import FrameType

from tcnca.errors import Stopped
from tcnca.signals import DUPLICATE_SECONDS

_last_signal = -DUPLICATE_SECONDS
_python_format = warnings.formatwarning
_SPINS = 3000
"""Turns that a waiting thread of OpenMP makes, about ten microseconds, before it gives its core away."""


def main() -> None:
    """Run the command line. A signal while modules are imported ends it without a traceback, too."""
    _limit_spinning()
    _use_large_pages()
    warnings.formatwarning = _format_warning
    for name in ("SIGTERM", "SIGBREAK"):  # the second on Windows
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As for standard error: a path or a value that the terminal's encoding does not have must not end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from tcnca.cli import app

        app()
    except (KeyboardInterrupt, Stopped) as error:
        number = error.signal_number if isinstance(error, Stopped) else signal.SIGINT
        print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)


def _limit_spinning() -> None:
    """Let waiting threads sleep soon; call it before PyTorch is imported.

    By default GNU's OpenMP, which PyTorch uses on Linux, spins for milliseconds. If another program runs on one of the
    cores, the thread that is waited for does not get a core in that time, at every operation.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def _use_large_pages() -> None:
    """Let PyTorch ask Linux for large pages for large tensors; call it before PyTorch is imported.

    Memory of more than 32 MB comes from the system and is returned to it, which clears every page of the next tensor.
    With pages of 4 KB that takes about half of the time of long sequences on a CPU.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning of ours as a message, and others as Python prints them."""
    if Path(__file__).parent in Path(filename).parents:
        return f"Warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End the command. A second signal right after the first does not interrupt what that one has begun."""
    global _last_signal
    now = time.monotonic()
    if now - _last_signal > DUPLICATE_SECONDS:
        _last_signal = now
        raise Stopped(number)


if __name__ == "__main__":
    main()
