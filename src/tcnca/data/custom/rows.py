"""Rows of tables: separated by commas, semicolons or tabs, or JSON Lines."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tcnca.data.custom.folders import explained
from tcnca.errors import DataError

JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", *JSON_LINES)
"""Endings of the files that are read as tables."""

Row = tuple[int, Mapping[str, Any]]
"""The line on which it begins, and its fields by column."""

# A field holds a whole document; the most that csv takes on every machine.
_LONGEST_FIELD = 2**31 - 1
_QUOTED = re.compile(r'"[^"]*("|$)')


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a table, one by one; blank lines are skipped.

    The fields of a .tsv are separated by tabs. Those of a .csv are separated by commas, or by semicolons if its header
    has some and no comma outside quotes, as spreadsheets write it where the comma marks decimals.
    """
    read = _json_rows if path.suffix.lower() in JSON_LINES else _csv_rows
    try:
        with explained(path), path.open(encoding="utf-8-sig", newline="") as file:
            yield from read(path, file)
    except UnicodeDecodeError as error:
        raise _undecodable(path) from error


def _csv_rows(path: Path, file: TextIO) -> Iterator[Row]:
    opening = _opening(file)
    # Strict, since otherwise a quote that is never closed swallows the rest of the file without a word.
    reader = csv.reader(itertools.chain(opening, file), delimiter=_delimiter(path, opening[-1]), strict=True)
    header: list[str] = []
    line = 1
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        for fields in reader:
            if fields and not header:
                header = _header(path, line, fields)
            elif fields:
                _check_width(path, line, fields, header)
                yield line, dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {line}: cannot be read ({error}); put fields with quotes in quotes, those inside doubled"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _opening(file: TextIO) -> list[str]:
    """The lines up to the first that is not blank."""
    lines = [file.readline()]
    while lines[-1] and not lines[-1].strip("\r\n"):
        lines.append(file.readline())
    return lines


def _delimiter(path: Path, header: str) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    bare = _QUOTED.sub("", header)
    return ";" if ";" in bare and "," not in bare else ","


def _header(path: Path, line: int, names: list[str]) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}, line {line}: two columns are called {twice!r}; give each a name of its own")
    return names


def _check_width(path: Path, line: int, fields: list[str], header: list[str]) -> None:
    if len(fields) < len(header):
        raise DataError(
            f"{path}, line {line}: field {header[len(fields)]!r} is missing, the row has {len(fields)} of "
            f"{len(header)}; add it"
        )
    if len(fields) > len(header):
        raise DataError(
            f"{path}, line {line}: has {len(fields)} fields, there are {len(header)} columns; "
            "put a field that holds the delimiter in quotes"
        )


def _json_rows(path: Path, file: TextIO) -> Iterator[Row]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {line}: is not JSON ({error}); each line is one JSON object") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {line}: holds a JSON {type(row).__name__}; each line is one JSON object, "
                'such as {"text": "...", "label": "..."}'
            )
        yield line, row


def _undecodable(path: Path) -> DataError:
    """The error of a file that is not UTF-8; the decoder itself knows only its own piece of the file."""
    offset, place, found = 0, "", "it"
    with path.open("rb") as file:
        for line, text in enumerate(file, 1):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                place = f", line {line}"
                found = f"byte 0x{text[error.start]:02x} at offset {offset + error.start}"
                break
            offset += len(text)
    return DataError(
        f"{path}{place}: {found} is not UTF-8; convert the file, for example with `iconv -f latin-1 -t utf-8`, "
        "or --kind language to learn its bytes as they are"
    )
