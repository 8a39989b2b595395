"""Read what is to be predicted, example by example: tables, lines of text or numbers, and arrays.

Files can be larger than memory. The formats are those of training (`tcnca.data.custom`), and the names of columns and
arrays are the ones that the model was trained with.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import dataclasses
import itertools
import math
import re
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tcnca.config import Config
from tcnca.data.custom.arrays import VALUE_NAMES, NamedArray, label_names
from tcnca.data.custom.numeric_tables import (
    NUMBERED,
    NumberParser,
    add_header,
    block_rows,
    check_order,
    field_text,
    in_order,
    split_line,
    split_names,
)
from tcnca.data.custom.options import list_names, unknown_name
from tcnca.data.custom.tables import (
    PAIR_NAMES,
    TEXT_NAMES,
    Row,
    csv_rows,
    find_delimiter,
    json_rows,
    label_field,
    text_field,
)
from tcnca.data.npy import SAVE_AGAIN, ArrayReader, array_errors, check_memory, list_arrays
from tcnca.errors import ConfigError, DataError, plural, shown
from tcnca.files import parse_json
from tcnca.models import SequenceModel, ValueInputConfig
from tcnca.models.prediction import PredictionKind, class_names, is_one_sequence, prediction_kind

Format = Literal["csv", "tsv", "jsonl", "text"]
FORMATS: Mapping[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
}
"""Format of a file of rows, by its suffix."""

Column = Literal["text", "second", "values"]
"""What a column of inputs is used for."""
_BLOCK = 2**24
"""Bytes of an array that are read at once."""
_INDEX = "index"
_CHECKED_PARTS = 1000
"""Parts of a series between checks of the memory."""
_SEPARATOR = re.compile(r"\s*[,;]\s*|\s+")
"""What is between the numbers of a text."""


class ColumnOptions(Config):
    """Columns and arrays with other names than in training."""

    text: str | None = None
    """Column with the text; the first text of a pair."""
    second: str | None = None
    """Column with the second text of a pair."""
    values: str | None = None
    """Column or array with the sequences of numbers; for a model of a table of numbers, its columns in the order of
    training, separated by commas."""
    lengths: str | None = None
    """Array with the number of time steps of each sequence; empty if no sequence has padding."""
    label: str | None = None
    """Column or array with the true class, or array or columns with the true values; empty not to compare."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A sequence, or a pair of them, to predict."""

    place: str
    """Where it is, for messages."""
    row: Mapping[str, Any]
    """The row that it comes from, which is kept."""
    inputs: tuple[Any, ...]
    """A text, numbers, or two texts."""
    target: Any = None
    """The true class or values, if they are given."""
    columns: tuple[str, ...] = ()
    """Columns of the row that the inputs come from."""
    size: int = 0
    """Characters of the row in the file."""
    is_table: bool = False
    """Whether it is a whole table, a series, and not a row."""


class Reader(abc.ABC):
    """Yields examples, and knows how far it is.

    Attributes:
        name: the file, for messages.
        format: of the rows; None for arrays.
        delimiter: of the columns of a table.
        total: what `position` is at the end; None if it is not known.
        unknown: number of true classes that the model does not have.
        first_unknown: the first of them, and where it is.
        header: columns of a table, known when its rows are read.
        columns: those of them that the inputs come from.
        decimal: mark of the decimals in these columns, known when the first rows are read. If these have none, it is a
            comma where semicolons separate the columns.
        warning: what may be wrong with the input.
    """

    format: Format | None = None
    delimiter = ","
    total: int | None = None
    unknown = 0
    first_unknown = ""
    header: Sequence[str] = ()
    columns: tuple[str, ...] = ()
    decimal = "."
    warning = ""

    def __init__(self, model: SequenceModel, options: ColumnOptions, name: str) -> None:
        self.model, self.options, self.name = model, options, name
        self.kind: PredictionKind = prediction_kind(model)
        self.facts = model.preprocessing
        self.classes = frozenset(class_names(model) or ())

    @abc.abstractmethod
    def __iter__(self) -> Generator[Example, None, None]:
        """Yield the examples; close the generator to release its files."""

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """How much has been read."""

    def check_options(self, *used: str) -> None:
        """Raise a ConfigError for the name of a column or array that is not used."""
        for field in dataclasses.fields(self.options):
            if (value := getattr(self.options, field.name)) and field.name not in used:
                raise ConfigError(f"--{field.name}: expected none for {self.name}, got {shown(value)}; leave it out")

    def check_class(self, label: str, place: str) -> None:
        """Note a label that is not one of the model's classes. No prediction is equal to it."""
        if label not in self.classes:
            self.unknown += 1
            known = list_names(sorted(self.classes))
            self.first_unknown = self.first_unknown or f"{place}: expected one of {known}, got {shown(label)}"


class RowReader(Reader):
    """Reads rows of a table, or lines of text or numbers.

    A line of numbers has commas or spaces between them, or is a JSON list. The two texts of a pair are separated by a
    tab. If the model was trained on a table of numbers, the rows have them in the same columns: they are the time steps
    of one series for a forecast, else sequences.
    """

    def __init__(
        self,
        model: SequenceModel,
        options: ColumnOptions,
        name: str,
        lines: Iterable[str],
        format: Format,
        size: int | None = None,
        position: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(model, options, name)
        self.format, self.total = format, size
        self._lines, self._position, self._rows, self._size = self._counted(lines), position, 0, 0
        self._reads_values = isinstance(model.config.input, ValueInputConfig)
        self._trained_columns = value_columns(model) if format != "text" else ()
        self._numbered = False
        self._parser: NumberParser | None = None
        one: Column = "values" if self._reads_values else "text"
        self._text_columns: tuple[Column, ...] = ("text", "second") if self.kind == "pairs" else (one,)
        target = () if self.kind == "forecast" else ("label",)
        self.check_options(*(() if format == "text" else (*self._text_columns, *target)))

    @property
    def position(self) -> int:
        """Bytes of a file, else rows."""
        return self._rows if self._position is None else self._position()

    def __iter__(self) -> Generator[Example, None, None]:
        """Yield an example for each row."""
        targets: tuple[str, ...] = ()
        rows = self._counted_rows()
        for line, row in rows:
            if not self.columns:
                self.columns, targets = self._find_columns(list(row))
                if self._numbered and in_order(list(map(str.strip, row.values()))):
                    self.warning = f"{self.name}: the first line was read as data, not as names, as in training"
                if self._parser is not None and self.kind == "forecast":
                    series = self._read_series(self._parser, itertools.chain([(line, row)], rows))
                    yield Example(self.name, {}, (series,), columns=self.columns, is_table=True)
                    return
            place = f"{self.name}, line {line}"
            if self._parser is None:
                inputs = tuple(self._input(row, column, place) for column in self.columns)
            else:
                inputs = (self._parse(self._parser, [(line, row)])[0],)
            target = self._target(row, targets, line) if targets and all(name in row for name in targets) else None
            size, self._size = self._size, 0
            yield Example(place, row, inputs, target, self.columns, size)
        if self._parser is not None:
            self._parser.finish()
        if self.header and not self._rows:
            self.columns, targets = self._find_columns(self.header)
            if self._parser is not None and self.kind == "forecast":
                raise DataError(f"{self.name}: expected time steps of a series, got no rows; add some")

    def _parse(self, parser: NumberParser, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Return the numbers of rows, `[rows, columns]`."""
        fields = [[field_text(row.get(name)) for name in self.columns] for _, row in rows]
        found = parser.parse(fields, [line for line, _ in rows])
        self.decimal = parser.mark or self.decimal
        return found

    def _read_series(self, parser: NumberParser, rows: Iterator[Row]) -> NDArray[np.float32]:
        """Return all rows as a series, `[time, features]`."""
        parts: list[NDArray[np.float32]] = []
        while block := list(itertools.islice(rows, block_rows(len(self.columns)))):
            if not parts and self.options.values is None:
                names = list(block[0][1])  # those of other rows may differ, in JSON Lines
                rows_read = block[: block_rows(len(names))]
                first = {name: [field_text(row.get(name)).strip() for _, row in rows_read] for name in names}
                check_order(self.name, first, parser.decimal_commas)
            parts.append(self._parse(parser, block))
            if len(parts) % _CHECKED_PARTS == 0:
                with array_errors(self.name, "give a part of the series"):
                    check_memory(2 * len(parts) * parts[0].nbytes)
        parser.finish()
        return np.concatenate(parts)

    def _counted_rows(self) -> Iterator[Row]:
        for row in self._read():
            self._rows += 1
            yield row

    def _counted(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self._size += len(line)
            yield line

    def _read(self) -> Iterator[Row]:
        if self.format == "jsonl":
            return json_rows(self.name, self._lines)
        if self.format == "text":
            return self._text_rows()
        self.delimiter, blank, lines = find_delimiter(self._lines, tabs=self.format == "tsv")
        if self._trained_columns:
            trained = self._trained_columns if self.options.values is None else split_line(self.options.values, ",")
            blank, lines, header = add_header(self.delimiter, blank, lines, trained)
            self._numbered = header == "added"
            if header == "numbers":
                self.warning = f"{self.name}: the first line was read as names, not as data"
        lines, copy = itertools.tee(lines)
        with contextlib.suppress(csv.Error):  # which `csv_rows` reports
            self.header = next(csv.reader(copy, delimiter=self.delimiter, strict=True), [])
        return csv_rows(self.name, lines, self.delimiter, blank)

    def _text_rows(self) -> Iterator[Row]:
        for number, line in enumerate(self._lines, 1):
            content = line.rstrip("\r\n")
            # An empty line is an empty text, but neither numbers nor a pair.
            if not content.strip() and (self._reads_values or self.kind == "pairs"):
                continue
            parts = content.split("\t") if self.kind == "pairs" else [content]
            if len(parts) != len(self._text_columns):
                raise DataError(
                    f"{self.name}, line {number}: expected two texts with a tab between them, since the model compares "
                    f"pairs, got {len(parts)}; or give a table with two columns of texts"
                )
            yield number, dict(zip(self._text_columns, parts, strict=True))

    def _find_columns(self, columns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the columns of the inputs, and those of the label or the true values if there are any."""
        if self.format == "text":
            return tuple(columns), ()
        chosen = self.options.values is not None or self.options.label
        if self._numbered and len(columns) == len(self._trained_columns) and not chosen:
            # Without a header and without the label: as many columns as there are values.
            self._set_parser(columns)
            return tuple(columns), ()
        if self._trained_columns and not self._has_lists(columns):
            found = self._find_numbers(columns)
        else:
            find = self._find_values if self._reads_values else self._find_text
            found = tuple(find(role, columns) for role in self._text_columns)
        return found, self._find_targets(columns)

    def _find_targets(self, columns: Sequence[str]) -> tuple[str, ...]:
        label = self.options.label
        if label is None:
            trained = self.facts.columns.get("label")
            known = (self.facts.target_columns or ()) if trained is None else (trained,)
            stripped = {name.strip(): name for name in columns} if self._trained_columns else {}
            return tuple(stripped.get(name, name) for name in known)
        if label and self.kind == "regression":
            return tuple(split_names(label, columns, Path(self.name)))
        if label and label not in columns:
            raise unknown_name(label, "column", columns, Path(self.name))
        return (label,) if label else ()

    def _has_lists(self, columns: Sequence[str]) -> bool:
        """Whether a column has a list of numbers in each row, and not all columns of training are there."""
        if self.options.values is not None:
            return self.options.values in columns and len(self._trained_columns) > 1
        return "values" in columns and not set(self._trained_columns) <= {name.strip() for name in columns}

    def _find_numbers(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns with the numbers that the model was trained on."""
        trained, names = self._trained_columns, {name.strip(): name for name in columns}
        if self.options.values is not None:
            chosen = split_names(self.options.values, list(names), Path(self.name))
            if len(chosen) != len(trained):
                raise DataError(
                    f"{self.name}: expected {plural(len(trained), 'column')} with --values, as in training "
                    f"({list_names(trained)}), got {len(chosen)}"
                )
            trained = tuple(chosen)
        missing = [name for name in trained if name not in names]
        if missing:
            several = "the column" if len(missing) == 1 else "the columns"
            numbered = NUMBERED if self._numbered else ""
            raise DataError(
                f"{self.name}: expected {several} {list_names(missing)}, as in training, got "
                f"{list_names(columns)}{numbered}; rename columns, or name {plural(len(trained), 'column')} in the "
                "order of training with --values"
            )
        self._set_parser(trained)
        return tuple(names[name] for name in trained)

    def _set_parser(self, names: Sequence[str]) -> None:
        commas = self.format != "jsonl" and self.delimiter != ","
        self._parser = NumberParser(self.name, names, commas)
        self.decimal = "," if commas and self.delimiter == ";" else "."

    def _find_values(self, role: Column, columns: Sequence[str]) -> str:
        name = self.options.values or self.facts.columns.get(role, role)
        if name not in columns:
            raise DataError(
                f"{self.name}: expected arrays (.npy, .npz), or a column {shown(name)} with a list of numbers in each "
                f"row, since the model was trained on numbers, got {list_names(columns)}"
            )
        return name

    def _find_text(self, role: Column, columns: Sequence[str]) -> str:
        given, trained = getattr(self.options, role), self.facts.columns.get(role)
        if given is not None and given not in columns:
            raise unknown_name(given, "column", columns, Path(self.name))
        if given is not None:
            return given
        if trained is not None:
            if trained not in columns:
                raise DataError(
                    f"{self.name}: expected the column {shown(trained)}, as in training, got {list_names(columns)}; "
                    f"rename one, or choose it with --{role}"
                )
            return trained
        # A model of a published data set, or from Python.
        lower = {name.lower(): name for name in columns}
        pairs = [pair for pair in PAIR_NAMES if pair[0] in lower and pair[1] in lower]
        known = [name for name in TEXT_NAMES if name in lower]
        if self.kind == "pairs":
            known = [pair[0 if role == "text" else 1] for pair in pairs]
        if len(known) != 1:
            raise DataError(
                f"{self.name}: no column is obviously the {role}; choose one of {list_names(columns)} with --{role}"
            )
        return lower[known[0]]

    def _input(self, row: Mapping[str, Any], column: str, place: str) -> Any:
        if not self._reads_values:
            return text_field(row, column, place)
        if column not in row:
            raise DataError(f"{place}: expected a field {shown(column)}, got {list_names(list(row))}; add it")
        numbers, input = parse_numbers(row[column], place), self.model.config.input
        if isinstance(input, ValueInputConfig) and input.features > 1 and numbers.ndim == 1:
            raise DataError(
                f"{place}: expected a JSON list with the {input.features} features of each time step, such as "
                f"[[1, 2], [3, 4]] for 2 time steps of 2 features, got {plural(len(numbers), 'number')} without "
                "brackets around each time step; write a whole sequence in each row"
            )
        return numbers

    def _target(self, row: Mapping[str, Any], columns: Sequence[str], line: int) -> Any:
        """Return the true class or values; None if the field is empty."""
        place = f"{self.name}, line {line}"
        cell = f"{place}, column {shown(columns[0])}"
        if self.kind != "regression":
            label = label_field(row, columns[0], place)
            if label:
                self.check_class(label, cell)
            return label or None
        if all(row[column] in (None, "") for column in columns):
            return None
        outputs = getattr(self.model.config.head, "outputs", 1)
        if self._parser is not None and len(columns) == outputs:
            return np.array([self._true_value(self._parser, row[column], column, line) for column in columns])
        values = np.concatenate(
            [self._true_values(row[column], f"{place}, column {shown(column)}") for column in columns]
        )
        if len(values) != outputs:
            raise DataError(f"{cell}: expected {plural(outputs, 'number')}, as in training, got {len(values)}")
        return values

    def _true_value(self, parser: NumberParser, value: Any, column: str, line: int) -> float:
        """Return a number of a table of numbers, NaN if there is none."""
        text = field_text(value).strip()
        return float(parser.parse([[text]], [line], [column])[0, 0]) if text.lower() not in ("", "nan") else math.nan

    def _true_values(self, value: Any, cell: str) -> NDArray[np.float64]:
        return np.array([np.nan]) if value in (None, "") else parse_numbers(value, cell).reshape(-1)


class TextsReader(RowReader):
    """Reads the arguments of a command: texts, with all their line ends and tabs, or lines of numbers."""

    def __init__(self, model: SequenceModel, options: ColumnOptions, texts: Sequence[str]) -> None:
        super().__init__(model, options, "INPUT", texts, "text")
        count = len(self._text_columns)
        rows = [texts[begin : begin + count] for begin in range(0, len(texts), count)]
        self.total = len(rows)
        self._texts = [dict[str, str](zip(self._text_columns, row, strict=True)) for row in rows]

    def _read(self) -> Iterator[Row]:
        return iter(enumerate(self._texts, 1))


def value_columns(model: SequenceModel) -> tuple[str, ...]:
    """Return the columns of the table of numbers that a model was trained on; none for other models."""
    input, columns = model.config.input, model.preprocessing.value_columns or ()
    if not isinstance(input, ValueInputConfig):
        return ()
    features = len(columns) if prediction_kind(model) == "forecast" else 1
    return columns if input.features == features and len(set(columns)) == len(columns) else ()


def parse_numbers(value: Any, place: str) -> NDArray[np.float64]:
    """Return the numbers of a JSON list, or of a text with commas, semicolons or spaces between them."""
    parts = value
    if isinstance(value, str) and not value.lstrip().startswith("["):
        parts = _split_numbers(value.strip(), place)
    try:
        return np.asarray(parse_json(parts) if isinstance(parts, str) else parts, np.float64)
    except (ValueError, TypeError, ConfigError) as error:
        raise DataError(
            f"{place}: expected numbers with commas or spaces between them, or a JSON list, got {shown(value)}; leave "
            "no gaps, and write decimals with a point"
        ) from error


def _split_numbers(text: str, place: str) -> list[str]:
    separators = {each.strip() or " " for each in _SEPARATOR.findall(text)}
    # With several of them, commas may be decimal points.
    if len(separators) > 1:
        raise DataError(
            f"{place}: expected one separator between the numbers, got {list_names(sorted(separators))} in "
            f"{shown(text)}; write decimals with a point"
        )
    return _SEPARATOR.split(text) if text else []


class ArraysReader(Reader):
    """Reads sequences from an .npy or .npz, some rows at a time. Rows of the output have the index of the sequence."""

    def __init__(self, model: SequenceModel, options: ColumnOptions, path: Path) -> None:
        super().__init__(model, options, str(path))
        self._path, self._done = path, 0
        lengths = () if path.suffix.lower() == ".npy" else ("lengths",)
        self.check_options("values", *lengths, *(() if self.kind == "forecast" else ("label",)))

    @property
    def position(self) -> int:
        """Number of sequences."""
        return self._done

    def __iter__(self) -> Generator[Example, None, None]:
        """Yield an example for each sequence."""
        with contextlib.ExitStack() as stack:
            archive, names = None, ["values"]
            if self._path.suffix.lower() == ".npz":
                with array_errors(self._path, SAVE_AGAIN):
                    archive = stack.enter_context(zipfile.ZipFile(self._path))
                    names = list(list_arrays(archive))
            arrays = {}
            for role, name in self._roles(names, archive is None).items():
                arrays[role] = ArrayReader(self._path, archive, name)
                stack.callback(arrays[role].close)
            values = arrays["values"]
            if 0 in values.shape:
                return
            # With lengths or labels, there are several examples.
            if len(arrays) == 1 and values.shape and is_one_sequence(self.model, values.shape):
                self.total = 1
                yield Example(f"{self._path}: {values.name}", {_INDEX: 0}, (values.read(values.shape[0]),))
                self._done = 1
                return
            self._check(arrays)
            if "lengths" not in arrays:
                self.warning = self._lengths_warning(archive, names, arrays)
            self.total = values.shape[0]
            size = max(math.prod(values.shape[1:]) * values.dtype.itemsize, 1)
            with array_errors(values, "use shorter sequences"):
                check_memory(4 * size)
            for begin in range(0, self.total, max(_BLOCK // size, 1)):
                count = min(max(_BLOCK // size, 1), self.total - begin)
                yield from self._examples(begin, {role: array.read(count) for role, array in arrays.items()}, arrays)

    def _roles(self, names: Sequence[str], alone: bool) -> dict[str, str]:
        """Return the name of the array of each role."""
        columns, path = self.facts.columns, self._path
        given = {"values": self.options.values, "lengths": self.options.lengths, "target": self.options.label}
        for name in given.values():
            if name and name not in names:
                raise unknown_name(name, "array", names, path)
        values = given["values"] or ("values" if alone else columns.get("values"))
        if values is None:
            found = [name for name in (*VALUE_NAMES, "tokens", "pixels", "images") if name in names]
            if len(found) != 1 and len(names) != 1:
                state = f"arrays {list_names(found)} could each be" if found else "no array is obviously"
                raise DataError(f"{path}: {state} the values; choose one of {list_names(names)} with --values")
            values = (found or names)[0]
        if values not in names:
            raise DataError(
                f"{path}: expected the array {shown(values)}, as in training, got {list_names(names)}; choose it with "
                "--values"
            )
        roles = {"values": values}
        lengths = given["lengths"]
        if lengths is None:
            lengths = next((name for name in (columns.get("lengths"), "lengths") if name in names), None)
        if lengths:
            roles["lengths"] = lengths
        role: Literal["labels", "targets"] = "targets" if self.kind == "regression" else "labels"
        target = given["target"]
        if target is None:
            target = next((name for name in (columns.get(role), role, "y") if name in names), None)
        if target and self.kind != "forecast":
            roles["target"] = target
        return roles

    def _lengths_warning(
        self, archive: zipfile.ZipFile | None, names: Sequence[str], arrays: Mapping[str, ArrayReader]
    ) -> str:
        """Return a warning if the sequences seem to have lengths that are not used, else an empty text."""
        columns = self.facts.columns
        if self.options.lengths == "" or (columns and "lengths" not in columns):
            return ""
        used = {*columns.values(), *(array.name for array in arrays.values()), "labels", "targets", "y"}
        found = []
        for name in names:
            with contextlib.suppress(DataError):  # of an array that is not needed
                if name not in used:
                    array = ArrayReader(self._path, archive, name)
                    array.close()
                    if array.dtype.kind in "iu" and array.shape == arrays["values"].shape[:1]:
                        found.append(name)
        if not found and "lengths" not in columns:
            return ""
        expected = f" in the array {shown(columns['lengths'])}, as in training" if "lengths" in columns else ""
        advice = f"name their array with --lengths{f' (is it {list_names(found)}?)' if found else ''}"
        if archive is None:
            advice = "save them with the values in an .npz"
        return (
            f"{self._path}: expected the lengths of the sequences{expected}, got none, so that padding is read as "
            f"data; {advice}, or give --lengths '' if there is no padding"
        )

    def _check(self, arrays: Mapping[str, ArrayReader]) -> None:
        """Raise a DataError unless the shapes of the arrays fit the model and each other."""
        values, input = arrays["values"], self.model.config.input
        fits: tuple[int, ...] = (2,)
        expected = "[examples, time] with whole numbers, the tokens"
        if isinstance(input, ValueInputConfig):
            expected = f"[examples, time, {input.features}], {plural(input.features, 'feature')} as in training"
            fits = (2, 3) if input.features == 1 else (3,)
        wrong = isinstance(input, ValueInputConfig) and len(values.shape) == 3 and values.shape[2] != input.features
        if len(values.shape) not in fits or (wrong and self.facts.image_size is None):
            raise DataError(f"{values}: expected shape {expected}, got {values.shape}")
        for array in arrays.values():
            if array.shape[:1] != values.shape[:1]:
                found = array.shape[0] if array.shape else 0
                raise DataError(f"{array}: expected {values.shape[0]:,} examples, as in {values.name!r}, got {found:,}")
        lengths, target = arrays.get("lengths"), arrays.get("target")
        if lengths is not None and (lengths.dtype.kind not in "iu" or len(lengths.shape) != 1):
            raise DataError(f"{lengths}: expected integers of shape [examples], got {lengths.dtype} {lengths.shape}")
        if target is not None and self.kind == "regression":
            outputs = getattr(self.model.config.head, "outputs", 1)
            if target.dtype.kind not in "fiub" or math.prod(target.shape[1:]) != outputs:
                raise DataError(
                    f"{target}: expected {plural(outputs, 'real number')} for each example, as in training, got "
                    f"{target.dtype} of shape {target.shape}; name another array with --label"
                )

    def _labels(self, labels: NamedArray) -> list[str]:
        """Return labels as text; integers are the indices of classes whose names are not numbers."""
        advice = "name another array with --label, or give --label '' to predict without comparing"
        names, classes = label_names(labels, advice), class_names(self.model) or ()
        if labels.array.dtype.kind not in "iu" or any(name.lstrip("-").isdigit() for name in classes):
            return names
        return [classes[int(name)] if name.isdigit() and int(name) < len(classes) else name for name in names]

    def _examples(
        self, begin: int, parts: Mapping[str, NDArray[Any]], arrays: Mapping[str, ArrayReader]
    ) -> Iterator[Example]:
        values, lengths, targets = parts["values"], parts.get("lengths"), None
        if "target" in parts:
            named = NamedArray(self._path, arrays["target"].name, parts["target"])
            targets = parts["target"].reshape(len(values), -1) if self.kind == "regression" else self._labels(named)
        for row, sequence in enumerate(values):
            index = begin + row
            self._done = index + 1
            if lengths is not None:
                if not 1 <= lengths[row] <= len(sequence):
                    raise DataError(
                        f"{self._path}: {arrays['lengths'].name}[{index}]: expected 1 to {len(sequence)}, the time "
                        f"steps of {arrays['values'].name!r}, got {lengths[row]}"
                    )
                sequence = sequence[: lengths[row]]
            target = None if targets is None else targets[row]
            if isinstance(target, str):
                self.check_class(target, f"{self._path}: {arrays['target'].name}[{index}]")
            yield Example(f"{self._path}: {arrays['values'].name}[{index}]", {_INDEX: index}, (sequence,), target)
