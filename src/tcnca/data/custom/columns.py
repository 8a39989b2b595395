"""Which column of a table is what."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

from tcnca.data.custom.options import CustomOptions
from tcnca.data.custom.rows import JSON_LINES
from tcnca.errors import DataError

_TEXTS = ("text", "sentence", "content", "review", "document", "input")
_LABELS = ("label", "class", "target", "category", "y")
_PAIRS = (
    ("text1", "text2"),
    ("first", "second"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("query", "document"),
    ("question", "answer"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """The names of the columns that matter."""

    text: str
    second: str | None
    label: str
    split: str | None


def roles_of(columns: Sequence[str], options: CustomOptions, path: Path) -> Roles:
    """What the options say, and where they say nothing, what the columns' names do."""
    for name in (options.text, options.second, options.label, options.split):
        if name is not None and name not in columns:
            raise unknown(name, "column", columns, path)
    text, second = _texts(columns, options, path)
    taken = {text, second, options.split}
    label = options.label or _obvious([name for name in columns if name not in taken], _LABELS, "label", columns, path)
    roles = Roles(text=text, second=second, label=label, split=options.split)
    names = [name for name in dataclasses.astuple(roles) if name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: column {twice!r} is to be two things at once; name another for one of them")
    return roles


def _texts(columns: Sequence[str], options: CustomOptions, path: Path) -> tuple[str, str | None]:
    """The column of the text, and that of the second one if there are pairs."""
    if options.kind == "classification" and options.second is not None:
        raise DataError(
            f"{path}: --second {options.second!r} makes pairs, --kind says classification; leave one of them out"
        )
    found = _pairs(columns)
    if options.second is not None:
        partners = [first for first, second in found if second == options.second]
        others = [name for name in columns if name != options.second]
        return options.text or next(iter(partners), None) or _text(others, options, columns, path), options.second
    if options.text is not None and options.kind != "pairs":
        return options.text, None
    if options.text is not None:
        found = [pair for pair in found if pair[0] == options.text]
    if options.kind != "classification" and len(found) == 1:
        return found[0]
    if options.kind == "pairs" or (options.kind is None and found):
        state = "several columns could be" if found else "no columns are obviously"
        raise DataError(
            f"{path}: {state} the two texts of a pair, there are {listed(columns)}; name them with --text and --second"
        )
    return _text(columns, options, columns, path), None


def _text(candidates: Sequence[str], options: CustomOptions, columns: Sequence[str], path: Path) -> str:
    rest = [name for name in candidates if name not in (options.label, options.split)]
    return _obvious(rest, _TEXTS, "text", columns, path)


def _pairs(columns: Sequence[str]) -> list[tuple[str, str]]:
    names = {name.lower(): name for name in columns}
    return [(names[first], names[second]) for first, second in _PAIRS if first in names and second in names]


def _obvious(candidates: Sequence[str], known: Collection[str], option: str, columns: Sequence[str], path: Path) -> str:
    found = [name for name in candidates if name.lower() in known]
    if len(found) == 1:
        return found[0]
    state = f"columns {listed(found)} could each be" if found else "no column is obviously"
    origin = "" if path.suffix.lower() in JSON_LINES else " (the first line names them)"
    raise DataError(
        f"{path}: {state} the {option}, there are {listed(columns)}{origin}; "
        f"say which with --{option}, or --kind language to learn the bytes as they are"
    )


def unknown(name: str, what: str, names: Sequence[str], path: Path) -> DataError:
    """The error of a column or array that is not there."""
    close = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "; name one of them"
    return DataError(f"{path}: has no {what} {name!r}, there are {listed(names)}{hint}")


def listed(names: Sequence[str]) -> str:
    """Names for people, in quotes."""
    return ", ".join(repr(name) for name in names)
