"""Tables of texts and their classes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcnca.data.columns import Column, Ragged
from tcnca.data.custom.columns import Roles, roles_of
from tcnca.data.custom.labels import classes_of, numbered
from tcnca.data.custom.options import OF_ARRAYS, CustomOptions, refuse
from tcnca.data.custom.rows import rows_of
from tcnca.data.custom.splits import WORDS, complete, missing
from tcnca.data.schema import Content
from tcnca.errors import DataError


@dataclasses.dataclass(frozen=True)
class _Examples:
    """The examples of a split, column by column, and where each was found."""

    texts: list[bytes] = dataclasses.field(default_factory=list)
    seconds: list[bytes] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)
    places: list[tuple[Path, int]] = dataclasses.field(default_factory=list)

    def place(self, index: int) -> str:
        """For people."""
        path, line = self.places[index]
        return f"{path}, line {line}"


def read_tables(origin: Path, files: Mapping[str, Sequence[Path]], options: CustomOptions) -> Content:
    """Read the tables of each split; a single table may hold all of them, with a column that says which.

    The columns are found in the first file of training, and all others must have the same.
    """
    refuse(options, OF_ARRAYS, origin, "tables")
    if options.split is not None and len(files) > 1:
        raise DataError(
            f"{origin}: the files are splits already, --split {options.split!r} would be others; leave it out"
        )
    missing(files, options, origin)
    roles, found = None, {split: _Examples() for split in files if options.split is None}
    for split, paths in files.items():
        for path in paths:
            for line, row in rows_of(path):
                roles = roles or roles_of(list(row), options, path)
                into = split if roles.split is None else _split(row, roles.split, f"{path}, line {line}")
                _add(found.setdefault(into, _Examples()), roles, row, path, line)
    if roles is None:
        raise DataError(f"{origin}: has no rows; add some")
    for split, examples in found.items():
        if not examples.labels:
            raise DataError(f"{origin}: has no rows for {split}; add some, or leave the file out")
    missing(found, options, origin)
    _check_texts(origin, roles, found)
    return _content(origin, roles, found, options)


def _add(examples: _Examples, roles: Roles, row: Mapping[str, Any], path: Path, line: int) -> None:
    place = f"{path}, line {line}"
    examples.texts.append(_text(row, roles.text, place))
    if roles.second is not None:
        examples.seconds.append(_text(row, roles.second, place))
    examples.labels.append(_label(row, roles.label, place))
    examples.places.append((path, line))


def _field(row: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in row:
        there = ", ".join(repr(column) for column in row)
        raise DataError(f"{place}: field {name!r} is missing, there are {there}; add it")
    return row[name]


def _text(row: Mapping[str, Any], name: str, place: str) -> bytes:
    value = _field(row, name, place)
    if not isinstance(value, str):
        raise DataError(f"{place}: field {name!r} holds {json.dumps(value)[:40]}, it must be text; put it in quotes")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: field {name!r} holds half a character, {value[error.start]!a}, which UTF-8 cannot write; "
            "remove it"
        ) from error


def _label(row: Mapping[str, Any], name: str, place: str) -> str:
    value = _field(row, name, place)
    if isinstance(value, dict | list):
        raise DataError(f"{place}: label {name!r} holds {json.dumps(value)[:40]}, it must be one name or number")
    # Spaces about a name are a slip of whoever wrote it, not another class.
    label = value.strip() if isinstance(value, str) else "" if value is None else json.dumps(value)
    if not label:
        raise DataError(f"{place}: label {name!r} is empty; fill it in, or remove the row")
    return label


def _split(row: Mapping[str, Any], name: str, place: str) -> str:
    value = _field(row, name, place)
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in WORDS:
        raise DataError(f"{place}: {name!r} says {value!r}, allowed are {', '.join(WORDS)}; correct it")
    return WORDS[word]


def _check_texts(origin: Path, roles: Roles, found: Mapping[str, _Examples]) -> None:
    columns = {"text": (roles.text, [examples.texts for examples in found.values()])}
    if roles.second is not None:
        columns["second"] = (roles.second, [examples.seconds for examples in found.values()])
    for option, (name, texts) in columns.items():
        if not any(text for split in texts for text in split):
            raise DataError(
                f"{origin}: column {name!r} is empty in every row; say with --{option} which column holds the text"
            )


def _content(origin: Path, roles: Roles, found: Mapping[str, _Examples], options: CustomOptions) -> Content:
    classes = classes_of(found["train"].labels, origin)
    parts: dict[str, dict[str, Column]] = {}
    for split, examples in found.items():
        texts = Ragged.of_bytes(examples.texts)
        both = {"first": texts, "second": Ragged.of_bytes(examples.seconds)}
        inputs: Mapping[str, Column] = {"tokens": texts} if roles.second is None else both
        parts[split] = {**inputs, "labels": numbered(examples.labels, classes, examples.place)}
    return Content(
        kind="classification" if roles.second is None else "pairs",
        splits={split: [columns] for split, columns in complete(parts, options, origin).items()},
        origin=origin.resolve().name,
        verified=False,
        facts={"class_names": classes},
    )
