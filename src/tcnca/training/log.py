"""The log of a run: a line of JSON for every few updates and every validation."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

LOG = "log.jsonl"


def open_log(folder: Path) -> TextIO:
    """The log, to add lines to. A line that a killed run has left unfinished is ended, so that the next one stands."""
    file = (folder / LOG).open("a+b")
    with file:
        if file.tell():
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return (folder / LOG).open("a", encoding="utf-8")


def plain(value: Any) -> Any:
    """What JSON can hold: it has no NaN and no infinity, so these become null."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run as if it had never been stopped, in the order of updates.

    What was done again after a run was killed counts as it was the last time, and lines that were cut off do not.
    """
    path = folder / LOG
    if not path.is_file():
        return []
    kept: dict[tuple[int, Any], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = _parsed(text)
        if line is None:
            continue
        while kept and next(reversed(kept))[0] > line["step"]:
            kept.popitem()
        kept[line["step"], line.get("split")] = line
    return list(kept.values())


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
