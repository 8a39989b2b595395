"""The boundary of the command line, where errors and signals become messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

from tcnca.errors import DiskFullError, PeerError, Stopped, TcncaError, escape_control, is_out_of_memory, shorten
from tcnca.version import __version__

DEBUG = "TCNCA_DEBUG"
"""Environment variable that shows the traceback of every error."""
_BUG = 70
"""Exit code of an error that is not the user's, as in sysexits.h."""


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """End the process with a message instead of a traceback. All commands run inside this block."""
    try:
        yield
    except Stopped as error:
        _end(error, f"\nstopped by {signal.Signals(error.signal_number).name}", 128 + error.signal_number)
    except TcncaError as error:
        _end(error, f"Error: {error}", 1)
    except Exception as error:
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()))
        if is_out_of_memory(error):
            advice = "a smaller batch.size, a larger grad_accum_steps or activation_checkpointing=true need less"
            _end(error, f"Error: not enough memory; in training, {advice} ({reason})", 1)
        if isinstance(error, OSError) and error.strerror is not None:
            # Without a name it is of the output, such as a file on a full disk.
            _end(error, f"Error: {error.filename or 'output'}: {error.strerror}", 1)
        _end(
            error,
            f"Error: {reason}\nThis is a bug in tcnca {__version__}. Please report it with the command, the version "
            f"and the traceback that the same command prints with {DEBUG}=1 in front of it.",
            _BUG,
        )


def _end(error: BaseException, text: str, code: int) -> NoReturn:
    """Print a text and the notes of an error, and end the process."""
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exception(error)
    text = escape_control("; ".join([text, *getattr(error, "__notes__", ())]))
    # Standard error may be closed, or its reader may have ended.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
    sys.exit(code)


def exit_code(name: str) -> int:
    """Return the exit code of a process that a signal has stopped; that of Ctrl-C if another process had the signal."""
    return 128 + getattr(signal, name, signal.SIGINT)


@contextlib.contextmanager
def continue_with(advice: str) -> Iterator[None]:
    """Add advice to the message if a signal, the disk or the end of another process stops the block."""
    try:
        yield
    except (KeyboardInterrupt, Stopped, OSError, DiskFullError, PeerError) as error:
        error.add_note(advice)
        raise
