"""What a reader of files hands over to be stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tcnca.data.columns import Columns

Kind = Literal["language", "classification", "pairs", "regression", "forecast"]
SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """The examples of a set, split by split, and what there is to know about them.

    By kind, the columns of a split are

    - `language`: `bytes`, uint8 `[bytes]`, one long stream;
    - `classification`: `tokens` (Ragged uint8, or uint8 `[examples, time]`), or `pixels` (uint8 `[examples, height,
      width]`), or `values` (float32 `[examples, time, features]`, or Ragged `[time, features]`); and `labels`, int64
      `[examples]`;
    - `pairs`: `first` and `second` (Ragged uint8), and `labels`;
    - `regression`: `values`, and `targets`, float32 `[examples, outputs]`;
    - `forecast`: `values` alone.
    """

    kind: Kind
    """What a model is to do with it."""
    splits: Mapping[str, Iterable[Columns]]
    """For each split its examples, in one part or several that fit in memory one by one."""
    origin: str
    """Where it comes from, for people: a web address or a file's name."""
    verified: bool
    """Whether it was found to be, byte for byte, the published set."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More to remember, fit for JSON: `num_classes` (their names), for example."""
