"""Tables of numbers: the rows are the time steps of one long series, or sequences with a class or values to predict."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tcnca.data.custom.arrays import NamedArray, Selection, build_content
from tcnca.data.custom.options import (
    NUMBER,
    CustomOptions,
    list_names,
    missing_splits,
    refuse_options,
    unknown_name,
)
from tcnca.data.custom.tables import (
    JSON_LINES,
    LABEL_NAMES,
    PAIR_NAMES,
    TEXT_NAMES,
    Fields,
    csv_fields,
    find_delimiter,
    given_label,
    json_rows,
    split_name,
    table_lines,
)
from tcnca.data.npy import array_errors, check_memory
from tcnca.data.schema import Content, Kind
from tcnca.errors import DataError, shown

_TARGET_NAMES = ("target", "targets", "y", "label")
_INDEX_NAMES = ("", "index", "id", "unnamed: 0")
"""Names of columns that number the rows, also those that pandas writes."""
_TIME_NAME = re.compile(
    r"(date|time|date[ _-]?time|time[ _-]?stamp|year)([ _-]?(s|ms|us|ns|sec|seconds|utc|gmt|local))?(\s*[\[(].*[\])])?"
)
_TIME = re.compile(r"\d{1,4}([-/.:]\d{1,4}){1,2}([T ,]+\d.*)?")
"""What is a date or a time rather than a text."""
_MISSING = ("", "nan", "na", "n/a", "null", "none", "-", "?")
_PEEKED_ROWS = 100
"""Rows that tell which columns have numbers."""
_BLOCK_ROWS = 256
_BLOCK_FIELDS = 2**16
"""Rows, and fields, that are converted at once: few, so that the garbage collector does not look at them again."""
_NUMBER_BYTES = 20
"""Memory for each number: the values, their splits, and the deviations from their mean in double precision."""
_SEQUENCE_BYTES, _LABEL_BYTES, _SPLIT_BYTES = 300, 200, 50
"""Memory for each row besides its numbers: the digest of a sequence to draw splits, its label and line, its split."""
_MARKS = {",": "commas", ".": "points"}
_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2}(,\d{3})+\s*")
_MAX_DIGITS = 10
NUMBERED = " (numbered, since the first line has no names)"
Header = Literal["names", "numbers", "added"]
"""Names, numbers that are taken as names, or numbers from 1 on that are not in the file."""


class NumericTable:
    """A table whose fields are read as texts.

    Attributes:
        path: the file.
        columns: names of the columns, without surrounding spaces; from 1 on if the first line has numbers alone.
        decimal_commas: whether numbers may have commas in place of points.
        header: what the names are.

    Args:
        path: the file.
        trained: columns of the first file of training, see `add_header`.
        peek: number of the first rows.
    """

    def __init__(self, path: Path, trained: Collection[str] | None = None, peek: int = _PEEKED_ROWS) -> None:
        self.path, self.decimal_commas, self._peek = path, False, peek
        self.header: Header = "names"
        lines = table_lines(path)
        if path.suffix.lower() in JSON_LINES:
            self._rows = _json_fields(path, lines)
        else:
            delimiter, blank, lines = find_delimiter(lines, tabs=path.suffix.lower() == ".tsv")
            blank, lines, self.header = add_header(delimiter, blank, lines, trained)
            self._rows, self.decimal_commas = csv_fields(path, lines, delimiter, blank), delimiter != ","
        _, header = next(self._rows, (0, []))
        self.columns = [name.strip() for name in header]

    @functools.cached_property
    def head(self) -> list[Fields]:
        """The first rows."""
        return list(itertools.islice(self._rows, self._peek))

    def rows(self) -> Iterator[Fields]:
        """Return all rows, once."""
        return itertools.chain(self.head, self._rows)

    @functools.cached_property
    def peeked(self) -> dict[str, list[str]]:
        """The fields of each column in the first rows, without empty ones."""
        fields = zip(*(row for _, row in self.head), strict=True) if self.head else ([] for _ in self.columns)
        stripped = ([text for field in column if (text := field.strip())] for column in fields)
        return dict(zip(self.columns, stripped, strict=True))

    def has_numbers(self, column: str) -> bool:
        """Whether one of the first fields of a column is a number."""
        return any(_is_number(field, self.decimal_commas) for field in self.peeked[column])

    @property
    def origin(self) -> str:
        """Where the names of the columns come from, for messages."""
        if self.path.suffix.lower() in JSON_LINES:
            return ""
        return NUMBERED if self.header == "added" else " (named in the first line)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Roles:
    """The columns that are used, and those that are not."""

    kind: Kind
    values: list[str]
    label: str | None
    targets: list[str]
    split: str | None
    unused: list[str]


def add_header(
    delimiter: str, blank: int, lines: Iterator[str], trained: Collection[str] | None = None
) -> tuple[int, Iterator[str], Header]:
    """Put a header before lines that begin with numbers: the numbers of the columns from 1.

    Numbers in the first line are names if they are 0, 1, 2, …, as pandas writes them for columns without names, and the
    next line does not have whole numbers in order, too. With the columns of training, they are names if these are among
    them, unless training had no header, either.

    Returns the number of lines before the header, the lines from the header on, and what the header is.
    """
    first = next(lines, "")
    lines = itertools.chain([first], lines)
    fields = split_line(first, delimiter)
    if not _are_numbers(fields, delimiter != ","):
        return blank, lines, "names"
    if trained is not None:
        numbers = [int(name) for name in trained if name.isdecimal() and len(name) < _MAX_DIGITS]
        numbered = len(numbers) == len(trained) and 1 <= min(numbers, default=0) <= len(fields)
        are_names = bool(trained) and not numbered and set(fields) >= set(trained)
    elif are_names := in_order(fields) and int(fields[0]) == 0:
        next(lines)
        peeked = []
        for line in lines:
            peeked.append(line)
            if line.strip("\r\n"):
                break
        are_names = bool(peeked) and not in_order(split_line(peeked[-1], delimiter))
        lines = itertools.chain([first], peeked, lines)
    if are_names:
        return blank, lines, "numbers"
    header = delimiter.join(str(number) for number in range(1, len(fields) + 1))
    return blank - 1, itertools.chain([f"{header}\n"], lines), "added"


def split_line(line: str, delimiter: str) -> list[str]:
    """Return the fields of a line without surrounding spaces; none if it has quotes in wrong places."""
    with contextlib.suppress(csv.Error):  # which `csv_fields` reports
        return [field.strip() for field in next(csv.reader([line], delimiter=delimiter, strict=True), [])]
    return []


def in_order(fields: Sequence[str]) -> bool:
    """Whether fields are whole numbers that increase by 1."""
    if len(fields) < 2 or not all(field.isdecimal() and len(field) < _MAX_DIGITS for field in fields):
        return False
    whole = list(map(int, fields))
    return whole == list(range(whole[0], whole[0] + len(whole)))


def _json_fields(path: Path, lines: Iterator[str]) -> Iterator[Fields]:
    """Return the names of the fields of the first row, and the rows, all with the same fields."""
    header: Mapping[str, Any] | None = None
    for line, row in json_rows(path, lines):
        if header is None:
            header = row
            yield line, list(header)
        if row.keys() != header.keys():
            place = f"{path}, line {line}"
            missing = next((name for name in header if name not in row), None)
            if missing is None:
                other = next(name for name in row if name not in header)
                raise DataError(
                    f"{place}: expected the fields of the first row, got another, {shown(other)}; remove it"
                )
            raise DataError(
                f"{place}: expected a field {shown(missing)}, as in the first row, got {list_names(list(row))}; add it"
            )
        yield line, [field_text(row[name]) for name in header]


def field_text(value: Any) -> str:
    """Return a field of a row as a text, empty if there is none."""
    if isinstance(value, str):
        return value
    if type(value) in (int, float):
        try:
            return repr(value)
        except ValueError:  # thousands of digits
            return "a number that is too long"
    if isinstance(value, list | dict):
        return f"a JSON {type(value).__name__}"  # which may be nested too deeply to be written
    return "" if value is None else json.dumps(value)


def _is_number(field: str, decimal_commas: bool) -> bool:
    return NUMBER.fullmatch(field.replace(",", ".", 1) if decimal_commas else field) is not None


def _are_numbers(fields: Sequence[str], decimal_commas: bool) -> bool:
    """Whether fields are numbers, and perhaps dates and times."""
    numbers = [_is_number(field, decimal_commas) for field in fields]
    return any(numbers) and all(map(operator.or_, numbers, (bool(_TIME.fullmatch(field)) for field in fields)))


def holds_numbers(path: Path, options: CustomOptions) -> bool:
    """Return whether a table is one of numbers: by the options, or because most columns are, and none can be a text."""
    if options.kind in ("regression", "forecast"):
        return True
    if options.kind == "pairs":
        return False
    if options.values is not None or options.targets is not None:
        return True
    if options.text is not None or options.second is not None:
        return False
    table = NumericTable(path)
    others = [name for name in table.columns if name not in (options.label, options.split)]
    lower = {name.lower() for name in others}
    if lower & set(TEXT_NAMES) or any(lower.issuperset(pair) for pair in PAIR_NAMES):
        return False
    inputs = [name for name in others if name.lower() not in LABEL_NAMES and not _counts_rows(name)]
    try:
        peeked = table.peeked
    except DataError:  # for example of rows of texts whose fields differ
        peeked = NumericTable(path, peek=1).peeked
    # Columns with other names are never read as texts without being chosen, so that no text is lost here.
    columns = [[field for field in peeked[name] if field.lower() not in _MISSING] for name in inputs]
    numeric = [_are_numbers(fields, table.decimal_commas) for fields in columns]
    words = [
        fields
        for fields, known in zip(columns, numeric, strict=True)
        if not known and not all(map(_TIME.fullmatch, fields))
    ]
    return sum(numeric) > len(words) and all(2 * len(set(fields)) <= len(fields) for fields in words)


def read_numeric_tables(origin: Path, files: Mapping[str, Sequence[Path]], options: CustomOptions) -> Content:
    """Read the tables of each split; a single table may hold all of them, with a column for the split.

    For a forecast, a table is one long series, and its rows are the time steps. Otherwise each row is a sequence. The
    columns are determined in the first file of training, and are found by their names in all others.
    """
    refuse_options(options, ("text", "second", "labels", "lengths"), origin, "tables of numbers")
    if options.split is not None and len(files) > 1:
        raise DataError(f"{origin}: the files already are splits, so --split {options.split!r} has no use; remove it")
    missing_splits(files, options, origin)
    first = NumericTable(files["train"][0])
    if not first.head:
        raise DataError(f"{first.path}: expected rows, got none; add some")
    roles = _find_roles(first, options)
    for split, paths in files.items():
        if roles.kind == "forecast" and len(paths) > 1:
            raise DataError(f"{origin}: expected one series for {split}, got {len(paths)} files; give one of them")
    with array_errors(origin, "read fewer columns, or a part of the rows"):
        check_memory(_memory(first, roles, sum(path.stat().st_size for paths in files.values() for path in paths)))
    found: dict[str, list[_Rows]] = {}
    for split, paths in files.items():
        for path in paths:
            rows = _read(first if path == first.path else NumericTable(path, roles.values), roles)
            for name, part in ({split: rows} if rows.splits is None else rows.by_split()).items():
                found.setdefault(name, []).append(part)
    missing_splits(found, options, origin)
    selected = {split: _select(parts, roles) for split, parts in found.items()}
    columns = {} if roles.label is None else {"label": roles.label}
    names = {"value_columns": roles.values, "target_columns": roles.targets, "unused_columns": roles.unused}
    numbers = {"numbers_as_names": True} if first.header == "numbers" else {}
    return build_content(origin, selected, options, {"columns": columns, **names, **numbers})


def _memory(table: NumericTable, roles: _Roles, size: int) -> int:
    """Return the bytes of memory that files of `size` bytes need, from the length of the first rows."""
    length = sum(len(field) + 1 for _, row in table.head for field in row) / len(table.head)
    if table.path.suffix.lower() in JSON_LINES:
        length += sum(len(name) + 3 for name in table.columns)  # quotes and a colon
    row = _NUMBER_BYTES * len(roles.values + roles.targets)
    row += _SEQUENCE_BYTES * (roles.kind != "forecast")
    row += _LABEL_BYTES * (roles.label is not None) + _SPLIT_BYTES * (roles.split is not None)
    return int(row * size / max(length, 1))


def _find_roles(table: NumericTable, options: CustomOptions) -> _Roles:
    """Determine the columns from the options, or else from their names and their first fields."""
    kind, path = _find_kind(options, table.path), table.path
    if twice := _first_twice(table.columns):
        raise DataError(f"{path}: expected different column names, got {shown(twice)} twice; rename one of them")
    for name in (options.label, options.split):
        if name is not None and name not in table.columns:
            raise unknown_name(name, "column", table.columns, path)
    label = options.label
    targets = [] if options.targets is None else split_names(options.targets, table.columns, path)
    chosen = None if options.values is None else split_names(options.values, table.columns, path)
    taken = {options.split, *(chosen or ())}
    if kind == "classification" and label is None:
        label = _find_target(table, [name for name in table.columns if name not in taken], LABEL_NAMES, "label", kind)
    if kind == "regression" and not targets:
        names = [name for name in table.columns if name not in taken]
        targets = [_find_target(table, names, _TARGET_NAMES, "targets", kind)]
    taken = {label, options.split, *targets}
    values = chosen
    if values is None:
        numeric = [name for name in table.columns if name not in taken and table.has_numbers(name)]
        values = [name for name in numeric if not _counts_rows(name)]
        if not values:
            raise DataError(
                f"{path}: expected columns of numbers, got {list_names(table.columns)}{table.origin}; choose the "
                "columns to read with --values"
            )
        if kind == "forecast":
            check_order(table.path, table.peeked, table.decimal_commas)
    used = [*values, *(name for name in (label, options.split) if name is not None), *targets]
    if twice := _first_twice(used):
        raise DataError(f"{path}: column {shown(twice)} has two roles; choose another column for one of them")
    known = set(used)
    unused = [name for name in table.columns if name not in known]
    return _Roles(kind=kind, values=values, label=label, targets=targets, split=options.split, unused=unused)


def _find_kind(options: CustomOptions, path: Path) -> Kind:
    implied: dict[str, Kind] = {"label": "classification", "targets": "regression"}
    kind = options.kind or ("regression" if options.targets is not None else "classification")
    for option, meaning in implied.items():
        if getattr(options, option) is not None and kind != meaning:
            raise DataError(
                f"{path}: --{option} {getattr(options, option)!r} means {meaning} and contradicts "
                + (f"--kind {kind}" if options.kind else "--targets")
                + "; remove one of them"
            )
    return kind


def _find_target(table: NumericTable, candidates: Sequence[str], known: Collection[str], option: str, kind: str) -> str:
    """Return the column of the class or of the value to predict by its name."""
    found = [name for name in candidates if name.lower() in known]
    if len(found) == 1:
        return found[0]
    what = "the class" if option == "label" else "the value to predict"
    state = f"columns {list_names(found)} could each be" if found else "no column is obviously"
    others = "values to predict with --targets, or give --kind forecast if each row is a time step, or --kind language"
    raise DataError(
        f"{table.path}: {state} {what} of each row; choose one of {list_names(table.columns)}{table.origin} with "
        f"--{option}{f', {others} for its bytes' if kind == 'classification' else ''}"
    )


def _counts_rows(name: str) -> bool:
    """Whether a column of this name numbers the rows, or has their times."""
    return name.lower() in _INDEX_NAMES or _TIME_NAME.fullmatch(name.lower()) is not None


def check_order(path: Path | str, columns: Mapping[str, Sequence[str]], decimal_commas: bool) -> None:
    """Raise a DataError if the times in the first fields of columns decrease: some files have the newest first."""
    for name, fields in columns.items():
        times: Sequence[Any] = fields
        if not _TIME_NAME.fullmatch(name.lower()):
            continue
        if all(_is_number(field, decimal_commas) for field in fields):
            times = [float(field.replace(",", ".")) for field in fields]
        elif not all(re.match(r"\d{4}-\d\d-\d\d", field) for field in fields):
            continue
        if len(times) > 2 and all(map(operator.gt, times, times[1:])):
            raise DataError(
                f"{path}: expected rows from the first time to the last, got {shown(fields[0])} before "
                f"{shown(fields[1])} in column {shown(name)}; reverse their order, or name the columns of numbers with "
                "--values to read the rows as they are"
            )


def split_names(names: str, columns: Sequence[str], path: Path) -> list[str]:
    """Return the columns of an option, which are separated by commas; a name with a comma is in quotes."""
    if names in columns:
        return [names]
    try:
        found = [name.strip() for name in next(csv.reader([names], skipinitialspace=True, strict=True), [])]
    except csv.Error:
        found = []
    if not found:
        raise DataError(
            f"{path}: expected names of columns, separated by commas, got {shown(names)}; choose from "
            f"{list_names(columns)}"
        )
    known = set(columns)
    for name in found:
        if name not in known:
            raise unknown_name(name, "column", columns, path)
    if twice := _first_twice(found):
        raise DataError(f"{path}: expected different columns, got {shown(twice)} twice in {shown(names)}")
    return found


def _first_twice(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


class NumberParser:
    """Converts the fields of some columns to numbers.

    Numbers with decimal commas are read where commas do not separate the fields, if all numbers of the table with
    decimals have them. If all of these could be thousands, such as 1,234, `finish` raises an error.

    Args:
        name: the file, for messages.
        columns: names of the columns.
        decimal_commas: whether they may have decimal commas.
        advice: what else to do about a field that is not a number.

    Attributes:
        mark: of the decimals so far, a comma or a point; empty if there were none.
        decimal_commas: whether numbers may have decimal commas.
    """

    def __init__(self, name: Path | str, columns: Sequence[str], decimal_commas: bool, advice: str = "") -> None:
        self.mark = ""
        self.decimal_commas = decimal_commas
        self._name, self._columns, self._all_columns, self._advice = name, columns, columns, advice
        self._ambiguous, self._decided = "", not decimal_commas

    def parse(
        self, rows: Sequence[Sequence[str]], lines: Sequence[int], columns: Sequence[str] = ()
    ) -> NDArray[np.float32]:
        """Return the numbers of rows as `[rows, columns]`, by default of all columns; `lines` are their places."""
        self._columns = columns or self._all_columns
        fields = list(itertools.chain.from_iterable(rows))
        text = "\n".join(fields)
        if self.decimal_commas:
            self._check_marks(fields, text, lines)
            if "," in text:
                if not self._decided:
                    self._check_thousands(fields, lines)
                fields = [field.replace(",", ".") for field in fields]
        try:
            if "_" in text or not text.isascii():  # Python reads 1_000 and numbers in other scripts
                raise ValueError
            found = np.fromiter(map(float, fields), np.float64, len(fields))
        except ValueError:
            found = self._parse_each(rows, fields, lines)
        with np.errstate(over="ignore"):
            real = found.astype(np.float32)
        if not np.isfinite(real).all():
            place = int(np.argmin(np.isfinite(real)))
            raise self._error(rows[place // len(self._columns)][place % len(self._columns)], place, lines)
        return real.reshape(len(rows), len(self._columns))

    def _parse_each(self, rows: Sequence[Sequence[str]], fields: Sequence[str], lines: Sequence[int]) -> NDArray[Any]:
        found = np.empty(len(fields))
        for place, (original, field) in enumerate(zip(itertools.chain.from_iterable(rows), fields, strict=True)):
            if not NUMBER.fullmatch(field.strip()):
                raise self._error(original, place, lines)
            found[place] = float(field)
        return found

    def _check_marks(self, fields: Sequence[str], text: str, lines: Sequence[int]) -> None:
        """Raise a DataError if some numbers have decimal commas and others points, which may separate thousands."""
        if not self.mark:
            self.mark = next((mark for mark in text if mark in _MARKS), "") if "," in text or "." in text else ""
        other = "." if self.mark == "," else ","
        if self.mark and other in text:
            place = next(place for place, field in enumerate(fields) if other in field)
            raise DataError(
                f"{self._place(place, lines)}: expected decimals with {_MARKS[self.mark]}, as before, got "
                f"{shown(fields[place])}; write all numbers alike, without separators of thousands"
            )

    def _check_thousands(self, fields: Sequence[str], lines: Sequence[int]) -> None:
        """Note the first number whose comma may separate thousands, until one surely has decimals."""
        for place, field in enumerate(fields):
            if "," in field:
                if not _THOUSANDS.fullmatch(field):
                    self._decided = True
                    return
                self._ambiguous = (
                    self._ambiguous or f"{self._place(place, lines)}: expected decimals, got {shown(field)}"
                )

    def finish(self) -> None:
        """Raise a DataError if the commas of all numbers so far may separate thousands."""
        if self._ambiguous and not self._decided:
            raise DataError(
                f"{self._ambiguous}, which is ambiguous, since all numbers with commas have groups of three digits; "
                "write decimals with points, or remove the separators of thousands"
            )

    def _place(self, place: int, lines: Sequence[int]) -> str:
        row, column = divmod(place, len(self._columns))
        return f"{self._name}, line {lines[row]}, column {shown(self._columns[column])}"

    def _error(self, field: str, place: int, lines: Sequence[int]) -> DataError:
        expected, got, todo = "a number", shown(field), "correct it"
        bare = field.strip()
        if bare.lower() in _MISSING:
            got, todo = got if bare else "an empty field", "fill it in, for example with the value before"
        elif "," in bare:
            todo = "write decimals with a point, without separators of thousands"
            if not self.decimal_commas:
                todo += ", or separate the columns by semicolons if it is a decimal comma"
        elif NUMBER.fullmatch(bare) or bare.lower().lstrip("+-") in ("inf", "infinity"):
            expected = "a finite float32 number"
        return DataError(
            f"{self._place(place, lines)}: expected {expected}, got {got}; {todo}, or remove the row"
            + (f", or {self._advice}" if self._advice else "")
        )


def block_rows(columns: int) -> int:
    """Return how many rows with so many columns are converted at once."""
    return max(min(_BLOCK_ROWS, _BLOCK_FIELDS // columns), 1)


def pick_fields(indices: Sequence[int]) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return a function that takes some fields of a row."""
    if len(indices) == 1:
        return lambda row: (row[indices[0]],)
    return operator.itemgetter(*indices)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a table: the numbers of their values and targets, their labels with their lines, and their splits."""

    path: Path
    numbers: NDArray[np.float32]
    lines: NDArray[np.int64] | None
    labels: list[str] | None
    splits: list[str] | None

    def by_split(self) -> dict[str, _Rows]:
        """Return the rows of each split that a column names."""
        assert self.splits is not None
        found = {}
        names = np.array(self.splits)
        for split in dict.fromkeys(self.splits):
            places = np.flatnonzero(names == split)
            labels = None if self.labels is None else [self.labels[place] for place in places]
            lines = None if self.lines is None else self.lines[places]
            found[split] = _Rows(self.path, self.numbers[places], lines, labels, None)
        return found


def _read(table: NumericTable, roles: _Roles) -> _Rows:
    """Read the columns of a table that are used."""
    path, indices = table.path, {name: index for index, name in enumerate(table.columns)}
    columns = [*roles.values, *roles.targets]
    for name in (*columns, *(name for name in (roles.label, roles.split) if name is not None)):
        if name not in indices:
            raise DataError(
                f"{path}: expected a column {shown(name)}, as in the first file of training, got "
                f"{list_names(table.columns)}{table.origin}; add it"
            )
    pick = pick_fields([indices[name] for name in columns])
    label, split = (None if name is None else indices[name] for name in (roles.label, roles.split))
    advice = "choose other columns with --values" + (" or --targets" if roles.targets else "")
    parser = NumberParser(path, columns, table.decimal_commas, advice)
    numbers: list[NDArray[np.float32]] = []
    all_lines: list[NDArray[np.int64]] = []
    labels: list[str] = []
    splits: list[str] = []
    rows = table.rows()
    while block := list(itertools.islice(rows, block_rows(len(table.columns)))):
        lines = [line for line, _ in block]
        numbers.append(parser.parse([pick(row) for _, row in block], lines))
        if label is not None:
            all_lines.append(np.array(lines, np.int64))
            labels += [given_label(row[label].strip(), str(roles.label), f"{path}, line {n}") for n, row in block]
        if split is not None:
            splits += [split_name(row[split], str(roles.split), f"{path}, line {n}") for n, row in block]
    if not numbers:
        raise DataError(f"{path}: expected rows, got none; add some, or remove the file")
    parser.finish()
    return _Rows(
        path,
        np.concatenate(numbers),
        None if label is None else np.concatenate(all_lines),
        None if label is None else labels,
        None if split is None else splits,
    )


@dataclasses.dataclass(frozen=True)
class _ColumnArray(NamedArray):
    """A column of tables as an array, whose elements have places in the files."""

    rows: Sequence[_Rows]

    def place(self, *index: int) -> str:
        """Return the location of an element."""
        row = index[0]
        for part in self.rows:
            assert part.lines is not None
            if row < len(part.lines):
                return f"{part.path}, line {part.lines[row]}, column {shown(self.name)}"
            row -= len(part.lines)
        raise IndexError(index)


def _select(parts: Sequence[_Rows], roles: _Roles) -> Selection:
    """Return the rows of a split as arrays: a series `[time, features]`, or sequences `[examples, time]`."""
    path, numbers = parts[0].path, parts[0].numbers
    if len(parts) > 1:
        numbers = np.concatenate([part.numbers for part in parts])
    target: NamedArray | None = None
    if roles.label is not None:
        labels = np.array([label for part in parts for label in part.labels or ()], object)
        target = _ColumnArray(path, roles.label, labels, parts)
    elif roles.targets:
        target = NamedArray(path, "targets", numbers[:, len(roles.values) :])
    return Selection(
        kind=roles.kind,
        values=NamedArray(path, "values", numbers[:, : len(roles.values)]),
        lengths=None,
        target=target,
        is_series=roles.kind == "forecast",
    )
