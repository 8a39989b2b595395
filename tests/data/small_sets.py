"""Small sets on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tcnca.data.columns import Columns, Ragged
from tcnca.data.store import Dataset, SetWriter


def write(folder: Path, splits: Mapping[str, Iterable[Columns]], **facts: Any) -> Dataset:
    with SetWriter(folder) as writer:
        for split, parts in splits.items():
            for columns in parts:
                writer.append(split, columns)
        writer.finish(facts)
    return Dataset.open(folder)


def small(folder: Path, label: int = 1) -> Dataset:
    """A set of a plain and a ragged column."""
    tokens = Ragged.of_bytes([b"abc", b"", b"defgh"])
    return write(folder, {"train": [{"tokens": tokens, "labels": np.arange(3) + label}]}, kind="classification")


def beside(folder: Path) -> list[str]:
    """What is where the set is to be, and not the set."""
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)
