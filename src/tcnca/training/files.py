"""Files of a run that are whole or not there, and folders with one process at work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from tcnca.data.store import disk_errors
from tcnca.errors import TrainingError


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which is moved there at the end."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        yield draft
        draft.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write a text file."""
    with beside(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def alone_in(folder: Path, what: str) -> Iterator[None]:
    """Refuse to work in a folder where another `what` is at work. The lock ends with its process, however that ends."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            cure = "wait for it, or choose another --out"
            raise TrainingError(f"{folder}: another {what} is at work there; {cure}") from None
    try:
        yield
    finally:
        lock.release()
