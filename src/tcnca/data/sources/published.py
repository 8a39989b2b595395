"""A published file, and what its host said of it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
    """A published file."""

    url: str
    """Its address."""
    filename: str
    """What to call it."""
    checksum: str | None
    """`sha256:...` or `md5:...`; None if none was published, to take the one that the host states."""
    size: int | None
    """Number of bytes, if known."""


def note_checksum(path: Path, checksum: str) -> None:
    """Remember, beside a file, the checksum that its host stated, for it to be known again without asking."""
    _note(path).write_text(f"{checksum or _UNSTATED}\n", encoding="utf-8")


def noted_checksum(path: Path) -> str | None:
    """The checksum that was noted, empty if the host had stated none; None without a note."""
    note = _note(path)
    text = note.read_text(encoding="utf-8", errors="replace").strip() if note.is_file() else ""
    if text == _UNSTATED:
        return ""
    return text if re.fullmatch("sha256:[0-9a-f]{64}", text) else None


_UNSTATED = "none"


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.checksum")
