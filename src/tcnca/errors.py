"""The errors that the library raises. Each message names the field, what is expected and what it got."""

from __future__ import annotations

import math
import re
import reprlib
from typing import Any


class TcncaError(ValueError):
    """Base of every error raised on purpose by this library."""


class ConfigError(TcncaError):
    """A configuration that cannot be built."""


class InputError(TcncaError):
    """A tensor of the wrong shape, type or value."""


class VocabularyError(InputError, IndexError):
    """A token outside the vocabulary."""


class StateError(TcncaError):
    """A streaming state that does not belong to this model, batch or call."""


class CheckpointError(TcncaError):
    """A checkpoint that cannot be read, or holds what this library cannot honor."""


class DataError(TcncaError):
    """Data that is missing, damaged or not of the form it should have. Names the file and what to do."""


class DiskFullError(DataError):
    """A disk without space for a file."""


class TrainingError(TcncaError):
    """A run that cannot go on. Says at which step, and what can be done."""


class PeerError(TrainingError):
    """Another process of a distributed run has ended, so that this one cannot go on."""


class KernelError(TcncaError):
    """A kernel that cannot be compiled, loaded or started. Says what can be done."""


class ExportError(TcncaError):
    """A model that cannot be exported, or not in this way."""


class MissingPackageError(TcncaError, ImportError):
    """An optional package that is not installed. Says how to install it."""


class Stopped(SystemExit):
    """A signal has stopped the command line. Like Ctrl-C, it is not an error."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    # A size of more than 64 bits.
    *("Storage size calculation overflowed", "numel: integer multiplication overflow"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or of PyTorch means that there is not enough memory."""
    # `torch.OutOfMemoryError` on a GPU, without importing PyTorch, and a plain RuntimeError on a CPU.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or any(text in str(error) for text in _OUT_OF_MEMORY))
    )


# ---- Values in messages


_MAX_CHARACTERS = 300
_MANY_ANSWERS = 1000
"""Answers from which an accuracy is given without its interval, which is then at most 0.062 wide."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 16, 16, 16
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 200, 200, 80


def shown(value: Any) -> str:
    """Return a value as Python writes it, shortened: a file can contain values of any size."""
    try:
        return shorten(_SHORT.repr(value))
    except ValueError:
        # Python refuses to write integers of thousands of digits.
        return f"a value of type {type(value).__name__} that is too large to print"


def shorten(text: str) -> str:
    """Return the beginning of a text that is too long for a message."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def plural(count: int, noun: str) -> str:
    """Return a number of things: 1 step, 2,000 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_score(value: float) -> str:
    """Return a loss or a score with four decimals; outside of 0.01 to 10,000 with four significant digits."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.4g}"


def format_interval(metric: str, value: float, count: int) -> str:
    """Return Wilson's 95 % interval of an accuracy of few answers, after a comma; nothing for other scores."""
    if metric != "accuracy" or not 0 <= value <= 1 or not 0 < count < _MANY_ANSWERS:
        return ""
    z = 1.96
    center = (value + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(value * (1 - value) / count + (z / (2 * count)) ** 2) / (1 + z**2 / count)
    return f", 95 % interval {max(center - half, 0):.3f} to {center + half:.3f}"


def plot_text(text: str) -> str:
    """Return a text for matplotlib, which would read dollar signs as a formula, without control characters."""
    return escape_control(text, "").replace("$", r"\$")


def escape_control(text: str, keep: str = "\n") -> str:
    """Escape control characters except those to `keep`: texts from files must not control a terminal."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)
