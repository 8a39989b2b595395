"""`python -m tcnca`, and the command `tcnca`."""

from __future__ import annotations

import io
import signal
import sys
import time
from types import FrameType

from tcnca.errors import Stopped

_DUPLICATE_SECONDS = 1.0
"""A second SIGTERM within this time is ignored, so that it does not interrupt what the first one has begun."""
_last_signal = -_DUPLICATE_SECONDS


def main() -> None:
    """Run the command line. A signal while modules are imported ends it without a traceback, too."""
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


def _terminate(number: int, frame: FrameType | None) -> None:
    global _last_signal
    now = time.monotonic()
    if now - _last_signal > _DUPLICATE_SECONDS:
        _last_signal = now
        raise Stopped(number)


if __name__ == "__main__":
    main()
