"""Atomic files, JSON, and the lock that keeps two runs out of one directory."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from tcnca.data.store import disk_errors
from tcnca.errors import TrainingError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`, and move it to `path` when the block ends without an error."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def atomic_write(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def to_json(values: Any, indent: int | None = None) -> str:
    """Return `values` as JSON. NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(values), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def file_lock(folder: Path, owner: str) -> Iterator[None]:
    """Hold the lock of a directory. It is released when the process ends, however that happens.

    Raises:
        TrainingError: another process, a run or a sweep as `owner` says, holds the lock.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise TrainingError(
                f"{folder}: another {owner} is active in this directory; wait for it, or choose another --out"
            ) from None
    try:
        yield
    finally:
        lock.release()
