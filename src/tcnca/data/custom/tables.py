"""Tables: separated by commas, semicolons or tabs, or JSON Lines; texts and their classes from them."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from tcnca.data.archives import MAX_LINE
from tcnca.data.custom.options import (
    ARRAY_OPTIONS,
    SPLIT_NAMES,
    CustomOptions,
    complete_splits,
    encode_labels,
    find_classes,
    list_names,
    missing_splits,
    refuse_options,
    unknown_name,
)
from tcnca.data.custom.streams import read_errors
from tcnca.data.npy import array_errors, check_memory
from tcnca.data.schema import Column, Content, Ragged
from tcnca.errors import ConfigError, DataError, shown
from tcnca.files import parse_json

JSON_LINES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv", *JSON_LINES)
"""Suffixes of the files that are read as tables."""

Row = tuple[int, Mapping[str, Any]]
"""The line on which a row begins, and its fields by column."""

Fields = tuple[int, list[str]]
"""The line on which a row begins, and its fields."""

TEXT_NAMES = ("text", "sentence", "content", "review", "document", "input")
LABEL_NAMES = ("label", "class", "target", "category", "sentiment", "y")
PAIR_NAMES = (
    ("text1", "text2"),
    ("first", "second"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("query", "document"),
    ("question", "answer"),
)
# Texts, labels and their splits are in memory at the same time.
_COPIES = 3
# What bytes that are not UTF-8 are read as.
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_UTF16_MARKS = ("\udcff\udcfe", "\udcfe\udcff")
_LINE_END = re.compile(r"\r\n|\r|\n")
# A line of numbers and times.
_NUMERIC = re.compile(r"[-+0-9.,:;/TeE \r\n]*")
_QUOTED = re.compile(r'"[^"]*("|$)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """The names of the columns that are used."""

    text: str
    second: str | None
    label: str
    split: str | None


@dataclasses.dataclass(frozen=True)
class _Examples:
    """The examples of a split, column by column, and their locations."""

    texts: list[bytes] = dataclasses.field(default_factory=list)
    seconds: list[bytes] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)


def read_tables(origin: Path, files: Mapping[str, Sequence[Path]], options: CustomOptions) -> Content:
    """Read the tables of each split; a single table may hold all of them, with a column for the split.

    The columns are determined in the first file of training, and all others must have the same.
    """
    refuse_options(options, ARRAY_OPTIONS, origin, "tables")
    if options.split is not None and len(files) > 1:
        raise DataError(f"{origin}: the files already are splits, so --split {options.split!r} has no use; remove it")
    missing_splits(files, options, origin)
    with array_errors(origin, "split it, or give --kind language to model its bytes"):
        check_memory(_COPIES * sum(path.stat().st_size for paths in files.values() for path in paths))
    roles, found = None, {split: _Examples() for split in files if options.split is None}
    for split, paths in files.items():
        for path in paths:
            for line, row in read_rows(path):
                roles = roles or find_roles(list(row), options, path)
                place = f"{path}, line {line}"
                into = split if roles.split is None else split_name(_field(row, roles.split, place), roles.split, place)
                examples = found.setdefault(into, _Examples())
                examples.texts.append(text_field(row, roles.text, place))
                if roles.second is not None:
                    examples.seconds.append(text_field(row, roles.second, place))
                examples.labels.append(given_label(label_field(row, roles.label, place), roles.label, place))
                examples.places.append(place)
    if roles is None:
        raise DataError(f"{origin}: expected rows, got none; add some")
    for split, examples in found.items():
        if not examples.labels:
            raise DataError(f"{origin}: expected rows for {split}, got none; add some, or remove the file")
    missing_splits(found, options, origin)
    _check_texts(origin, roles, found)
    return _content(origin, roles, found, options)


def read_rows(path: Path) -> Iterator[Row]:
    """Return the rows of a table; blank lines are skipped.

    The fields of a .tsv are separated by tabs. Those of a .csv are separated by commas, or by semicolons if its header
    has semicolons and no comma outside quotes, as spreadsheets write it where the comma is the decimal separator.
    """
    lines = table_lines(path)
    if path.suffix.lower() in JSON_LINES:
        return json_rows(path, lines)
    delimiter, blank, lines = find_delimiter(lines, tabs=path.suffix.lower() == ".tsv")
    return csv_rows(path, lines, delimiter, blank)


def table_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a table with their ends."""
    with read_errors(path), open_lines(path.open("rb")) as file:
        yield from read_lines(file, path, ", or give --kind language to model the bytes of the file")


def open_lines(binary: BinaryIO) -> io.TextIOWrapper:
    """Open a file for `read_lines`."""
    return io.TextIOWrapper(binary, "utf-8-sig", "surrogateescape", newline="")


def read_lines(file: TextIO, name: Path | str, advice: str = "") -> Iterator[str]:
    """Yield the lines of a file that `open_lines` has opened, with their ends; `name` is named in errors."""
    number = 0
    with read_errors(Path(name)):
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) < MAX_LINE and line.isascii():
                yield line
                continue
            place = f"{name}, line {number}"
            if len(line) == MAX_LINE:
                raise DataError(f"{place}: expected fewer than {MAX_LINE:,} characters, got more; cut the text{advice}")
            if wrong := _NOT_UTF8.search(line):
                encoding = "utf-16" if number == 1 and line.startswith(_UTF16_MARKS) else "latin-1"
                raise DataError(
                    f"{place}: expected UTF-8, got byte 0x{ord(wrong[0]) - 0xDC00:02x}; convert the file, for example "
                    f"with `iconv -f {encoding} -t utf-8`{advice}"
                )
            yield line


def find_delimiter(lines: Iterator[str], tabs: bool) -> tuple[str, int, Iterator[str]]:
    """Return the delimiter of a table, the number of blank lines before its header, and its lines from there.

    Without `tabs`, columns are separated by semicolons if the header has semicolons and no comma outside quotes, or
    consists of numbers with decimal commas.
    """
    blank = 0
    while (first := next(lines, "")) and not first.strip("\r\n"):
        blank += 1
    bare = _QUOTED.sub("", first)
    semicolons = ";" in bare and ("," not in bare or _NUMERIC.fullmatch(bare) is not None)
    delimiter = "\t" if tabs else ";" if semicolons else ","
    return delimiter, blank, itertools.chain([first], lines)


def csv_rows(path: Path | str, lines: Iterator[str], delimiter: str, blank: int) -> Iterator[Row]:
    """Return the rows of a table from its header on, after `blank` lines; `path` is named in errors."""
    rows = csv_fields(path, lines, delimiter, blank)
    _, header = next(rows, (0, []))
    for line, fields in rows:
        yield line, dict(zip(header, fields, strict=True))


def csv_fields(path: Path | str, lines: Iterator[str], delimiter: str, blank: int) -> Iterator[Fields]:
    """Return the header of a table and its rows, all with as many fields."""
    # Strict, since otherwise an unclosed quote would silently swallow the rest of the file.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    line = blank + 1
    limit = csv.field_size_limit(MAX_LINE)
    try:
        for fields in reader:
            if fields and not header:
                header = fields
                if len(set(header)) < len(header):
                    twice = Counter(header).most_common(1)[0][0]
                    raise DataError(
                        f"{path}, line {line}: expected different column names, got {shown(twice)} twice; name the "
                        "columns in the first line"
                    )
                yield line, header
            elif fields:
                if len(fields) != len(header):
                    raise DataError(
                        f"{path}, line {line}: expected {len(header)} fields, got {len(fields)}; add missing ones, or "
                        "put a field that contains the delimiter in quotes"
                    )
                if delimiter == "\t" and _merges_rows(fields):
                    raise DataError(
                        f"{path}, line {line}: expected a row on one line, got a quote that opens a field of several "
                        "rows; double the quotes inside the fields or remove them, and if a field has tabs and line "
                        "breaks, write .csv or .jsonl instead"
                    )
                yield line, fields
            line = blank + reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {line}: cannot be read ({error}); put fields that contain quotes in quotes, and double them"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _merges_rows(fields: Sequence[str]) -> bool:
    """Whether several lines have become a row, each of which would be a row of as many fields without its quotes."""
    tabs, lines = len(fields) - 1, _LINE_END.split("\t".join(fields))
    return tabs > 0 and len(lines) > 1 and all(line.count("\t") == tabs for line in lines)


def json_rows(path: Path | str, lines: Iterator[str]) -> Iterator[Row]:
    """Return the rows of JSON Lines; `path` is named in errors."""
    for line, part in enumerate(lines, 1):
        if not part.strip():
            continue
        try:
            row = parse_json(part)
        except ConfigError as error:
            raise DataError(f"{path}, line {line}: {error}; write one JSON object per line") from error
        if not isinstance(row, dict):
            raise DataError(
                f'{path}, line {line}: expected a JSON object such as {{"text": "...", "label": "..."}}, got a '
                f"JSON {type(row).__name__}"
            )
        yield line, row


def find_roles(columns: Sequence[str], options: CustomOptions, path: Path) -> Roles:
    """Determine the columns from the options, or else from their names."""
    given = (options.text, options.second, options.label, options.split)
    if unknown := [name for name in given if name is not None and name not in columns]:
        raise unknown_name(unknown[0], "column", columns, path, *unknown[1:])
    text, second = _find_texts(columns, options, path)
    others = [name for name in columns if name not in (text, second, options.split)]
    label = options.label or _find_column(others, LABEL_NAMES, "label", columns, path)
    roles = Roles(text=text, second=second, label=label, split=options.split)
    names = [name for name in dataclasses.astuple(roles) if name is not None]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path}: column {shown(twice)} has two roles; choose another column for one of them")
    return roles


def _find_texts(columns: Sequence[str], options: CustomOptions, path: Path) -> tuple[str, str | None]:
    """Return the column of the text, and of the second text if there are pairs."""
    if options.kind == "classification" and options.second is not None:
        raise DataError(f"{path}: --second {options.second!r} contradicts --kind classification; remove one of them")
    names = {name.lower(): name for name in columns}
    pairs = [(names[first], names[second]) for first, second in PAIR_NAMES if first in names and second in names]
    if options.second is not None:
        partners = [first for first, second in pairs if second == options.second]
        others = [name for name in columns if name != options.second]
        return options.text or next(iter(partners), None) or _find_text(others, options, columns, path), options.second
    if options.text is not None and options.kind != "pairs":
        return options.text, None
    if options.text is not None:
        pairs = [pair for pair in pairs if pair[0] == options.text]
    if options.kind != "classification" and len(pairs) == 1:
        return pairs[0]
    if options.kind == "pairs" or (options.kind is None and pairs):
        state = "several columns could be" if pairs else "no columns are obviously"
        raise DataError(
            f"{path}: {state} the two texts of a pair; choose two of {list_names(columns)} with --text and --second"
        )
    return _find_text(columns, options, columns, path), None


def _find_text(candidates: Sequence[str], options: CustomOptions, columns: Sequence[str], path: Path) -> str:
    others = [name for name in candidates if name not in (options.label, options.split)]
    return _find_column(
        others, TEXT_NAMES, "text", columns, path, ", columns of numbers with --values and their class with --label"
    )


def _find_column(
    candidates: Sequence[str], known: Collection[str], option: str, columns: Sequence[str], path: Path, more: str = ""
) -> str:
    found = [name for name in candidates if name.lower() in known]
    if len(found) == 1:
        return found[0]
    state = f"columns {list_names(found)} could each be" if found else "no column is obviously"
    origin = "" if path.suffix.lower() in JSON_LINES else " (named in the first line)"
    raise DataError(
        f"{path}: {state} the {option}; choose one of {list_names(columns)}{origin} with --{option}{more}, or give "
        "--kind language to model the bytes of the file"
    )


def _field(row: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in row:
        raise DataError(f"{place}: expected a field {shown(name)}, got {list_names(list(row))}; add it")
    return row[name]


def text_field(row: Mapping[str, Any], name: str, place: str) -> bytes:
    """Return the text of a column as UTF-8; `place` is named in errors."""
    value = _field(row, name, place)
    if not isinstance(value, str):
        raise DataError(f"{place}, column {shown(name)}: expected text, got {shown(value)}; put it in quotes")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}, column {shown(name)}: expected valid Unicode, got the unpaired surrogate "
            f"{value[error.start]!a}; remove it"
        ) from error


def label_field(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return the class in a column, empty if there is none; `place` is named in errors."""
    value = _field(row, name, place)
    if isinstance(value, dict | list):
        raise DataError(f"{place}, column {shown(name)}: expected one name or number, got {shown(value)}")
    # Surrounding spaces are typing errors, not another class.
    return value.strip() if isinstance(value, str) else "" if value is None else json.dumps(value)


def given_label(label: str, name: str, place: str) -> str:
    """Return the class in a column, or raise a DataError if there is none."""
    if not label:
        raise DataError(
            f"{place}, column {shown(name)}: expected a label, got an empty field; add it, or remove the row"
        )
    return label


def split_name(value: Any, name: str, place: str) -> str:
    """Return the split that a column names."""
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in SPLIT_NAMES:
        raise DataError(f"{place}, column {shown(name)}: expected one of {', '.join(SPLIT_NAMES)}, got {shown(value)}")
    return SPLIT_NAMES[word]


def _check_texts(origin: Path, roles: Roles, found: Mapping[str, _Examples]) -> None:
    for option, column, name in (("text", roles.text, "texts"), ("second", roles.second, "seconds")):
        if column is not None and not any(any(getattr(examples, name)) for examples in found.values()):
            raise DataError(f"{origin}: expected text in column {shown(column)}, got none; choose it with --{option}")


def _content(origin: Path, roles: Roles, found: Mapping[str, _Examples], options: CustomOptions) -> Content:
    classes = find_classes(found["train"].labels, origin)
    parts: dict[str, dict[str, Column]] = {}
    for split, examples in found.items():
        texts = Ragged.from_bytes(examples.texts)
        both = {"first": texts, "second": Ragged.from_bytes(examples.seconds)}
        inputs: Mapping[str, Column] = {"tokens": texts} if roles.second is None else both
        parts[split] = {**inputs, "labels": encode_labels(examples.labels, classes, examples.places.__getitem__)}
    named = {"text": roles.text, "second": roles.second, "label": roles.label}
    columns = {role: name for role, name in named.items() if name is not None}
    return Content(
        kind="classification" if roles.second is None else "pairs",
        splits={split: [columns] for split, columns in complete_splits(parts, options, origin).items()},
        origin=origin.resolve().name,
        verified=False,
        metadata={"class_names": classes, "columns": columns},
    )
