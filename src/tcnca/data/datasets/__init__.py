"""The sets that are known by name, each in a file of its own, in one registry."""

from __future__ import annotations

import difflib
import re

from tcnca.data.datasets.acl_citations import ACL_CITATIONS
from tcnca.data.datasets.definition import Entry
from tcnca.data.datasets.enwik8 import ENWIK8
from tcnca.data.datasets.image import IMAGE
from tcnca.data.datasets.listops import LISTOPS
from tcnca.data.datasets.pathfinder import PATHFINDER, PATHX
from tcnca.data.datasets.recall import LENGTHS, VOCABULARIES, recall
from tcnca.data.datasets.retrieval import RETRIEVAL
from tcnca.data.datasets.text import TEXT
from tcnca.errors import ConfigError

__all__ = ["Entry", "canonical", "entries", "entry", "known"]

_ENTRIES = {
    entry.name: entry
    for entry in (
        ENWIK8,
        LISTOPS,
        TEXT,
        RETRIEVAL,
        IMAGE,
        PATHFINDER,
        PATHX,
        *(recall(length, vocabulary) for vocabulary in VOCABULARIES for length in LENGTHS),
        ACL_CITATIONS,
    )
}
_RECALL = re.compile(r"recall(?:-(\d+))?(?:-(\d+))?")


def entries() -> tuple[Entry, ...]:
    """All sets, in the order in which the paper has them."""
    return tuple(_ENTRIES.values())


def known(name: str) -> bool:
    """Whether a set is known by this name."""
    return name in _ENTRIES or _RECALL.fullmatch(name) is not None


def entry(name: str) -> Entry:
    """The set called `name`; `recall-LENGTH-VOCABULARY` for any length and vocabulary, `recall` for 64 and 10."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    if match := _RECALL.fullmatch(name):
        return recall(*(int(number) for number in match.groups() if number is not None))
    close = difflib.get_close_matches(name, _ENTRIES, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"set: got {name!r}, allowed are {', '.join(_ENTRIES)}{hint}")


def canonical(name: str) -> str:
    """The name under which a set is stored: `recall` is `recall-64-10`."""
    return entry(name).name if known(name) else name
