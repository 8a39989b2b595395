"""Files: atomic writes, JSON, locks between processes, and errors of the disk that say what to do."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from tcnca.config import check
from tcnca.errors import ConfigError, DataError, DiskFullError, TcncaError, TrainingError

LOCK = ".lock"
"""Lock file of a run directory or of a sweep."""
_MAX_JSON = 2**25
"""Bytes that a JSON file may have."""
_REPLACE_PAUSES = (0.01, 0.1, 0.3, 0.6, 1.0)
"""Seconds to wait for programs that have a file open, such as `tcnca compare` or a virus scanner."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a DataError that names a file or folder, and says what to do."""
    try:
        yield
    except BrokenPipeError:
        # Not of the disk: the reader of the output has ended.
        raise
    except OSError as error:
        found = DataError(f"{path}: cannot be written ({error.strerror}); choose another place")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found = DiskFullError(f"{path}: the disk is full; free some space or choose another place")
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)
        raise found from error


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file. The lock is released when the process ends, even if it is killed.

    Args:
        path: the lock file.
        on_wait: called before waiting for another process that holds the lock; None to raise a TrainingError instead.
    """
    lock = filelock.FileLock(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Where no file can be created, the lock would wait forever.
        path.touch()
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if on_wait is None:
                raise TrainingError(
                    f"{path.parent}: another process is active in this directory; wait for it, or choose another --out"
                ) from None
            on_wait()
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_no_links(folder: Path) -> None:
    """Raise a TrainingError if a folder contains links: a folder from elsewhere could name any file to be written."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink():
                raise TrainingError(
                    f"{path}: expected no links in a run directory, got one; replace it by what it names"
                )


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`, and move it to `path` when the block ends without an error."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        try:
            # It may be left from a killed run, or be a link in a folder from elsewhere, whose target would be written.
            temporary.unlink(missing_ok=True)
            yield temporary
            replace_file(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def replace_file(source: Path, target: Path) -> None:
    """Rename a file, which replaces the target. On Windows, wait for programs that have the target open."""
    for pause in _REPLACE_PAUSES if os.name == "nt" else ():
        try:
            source.replace(target)
            return
        except PermissionError:
            time.sleep(pause)
    source.replace(target)


def partial_path(path: Path) -> Path:
    """Return the file for what a command has written to `path` before it ended early."""
    return path.with_name(f"{path.name}.partial")


def atomic_write(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with atomic_path(path) as temporary:
        # Paths and values from files can contain halves of characters, which UTF-8 does not have.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def check_regular(path: Path) -> None:
    """Raise an OSError unless `path` is a regular file: opening a pipe would wait, and reading a device may not end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_json(path: Path, hint: Any = Any, *, error: type[TcncaError] = DataError, remedy: str = "") -> Any:
    """Read a JSON file, and check its content; raise an `error` that names the file and the remedy.

    Args:
        path: the file.
        hint: type of the content, such as `dict[str, int]` or a dataclass, see `tcnca.config.check`.
        error: type of the error.
        remedy: what to do if the file cannot be read.
    """
    advice = f"; {remedy}" if remedy else ""
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(_MAX_JSON + 1)
        return parse_json(content, hint)
    except OSError as reason:
        raise error(f"{path}: cannot be read ({reason.strerror}){advice}") from reason
    except ConfigError as reason:
        raise error(f"{path}: {reason}{advice}") from reason


def parse_json(content: bytes | str, hint: Any = Any) -> Any:
    """Return the value of a JSON text, checked against a type, or raise a ConfigError."""
    if len(content) > _MAX_JSON:
        raise ConfigError(f"expected JSON of at most {_MAX_JSON:,} bytes, got more")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ConfigError("expected JSON, but it is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"expected JSON ({error})") from error
    return check("", value, hint)


def to_json(values: Any, indent: int | None = None) -> str:
    """Return `values` as JSON. NaN and infinity, which JSON does not have, become null.

    With an indent, a list of numbers is one line.
    """
    text = json.dumps(_finite(values), indent=indent)
    # Strings have no newlines, so the brackets are those of lists.
    return re.sub(r'\[\n[^]["{]+\]', lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
