"""Write predictions: tables with the rows of the input, or arrays."""

from __future__ import annotations

import abc
import contextlib
import csv
import io
import json
import math
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import DataError
from tcnca.inference.readers import Example
from tcnca.models import Predictions

_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class Writer(abc.ABC):
    """Writes predictions as they come.

    Attributes:
        count: number of examples that were written.
    """

    count = 0

    @abc.abstractmethod
    def write(self, examples: Sequence[Example], predictions: Predictions) -> None:
        """Write the predictions of some examples."""

    def write_empty(self, header: Sequence[str], inputs: Sequence[str], predictions: Predictions) -> None:
        """Write what the output of a table without rows has.

        Args:
            header: the columns of the table.
            inputs: those of them that the inputs come from.
            predictions: of no examples.
        """
        self.write([], predictions)

    @abc.abstractmethod
    def close(self) -> None:
        """Complete the file with the predictions of `count` examples, also if the last `write` has failed."""


class _RowWriter(Writer):
    """Writes text, a row or more for each example."""

    def __init__(self, file: TextIO, probabilities: bool) -> None:
        self._file, self._probabilities = file, probabilities
        self._rows = io.StringIO(newline="")
        self._end, self._writing = 0, False

    def write(self, examples: Sequence[Example], predictions: Predictions) -> None:
        """Write the rows of some examples."""
        written = 0
        try:
            for number, example in enumerate(examples):
                self._write_row(example, predictions, number)
                written += 1
        except DataError:
            self._complete(written)  # the rows before the mistake
            raise
        self._complete(written)

    def _complete(self, written: int) -> None:
        """Write all rows in one call, so that `count` is right after a signal."""
        self._writing = True
        self._file.write(self._rows.getvalue())
        self._file.flush()
        self._rows = io.StringIO(newline="")
        self.count, self._end = self.count + written, self._file.tell() if self._file.seekable() else 0
        self._writing = False

    @abc.abstractmethod
    def _write_row(self, example: Example, predictions: Predictions, number: int) -> None:
        """Write the row of example `number` of the predictions, and a header before the first."""

    def close(self) -> None:
        """Close the file, and remove rows of a `write` that has failed."""
        try:
            self._file.close()
        except OSError:
            if not self._writing:
                raise  # else a full disk refuses the same rows again
        os.truncate(self._file.name, self._end)


class TableWriter(_RowWriter):
    """Writes CSV: the columns of the input, then the predicted class and the probability of each class, or the values.

    A forecast has a row for each step of each series: `index`, the other columns of the input, `step` and the values. A
    table that is one series has no index.

    Args:
        file: is written.
        delimiter: of the columns.
        probabilities: whether to write the probability of each class.
        names: columns of the values; empty for `prediction`, with numbers if there are several.
        decimal: mark of the decimals of predictions.
    """

    def __init__(
        self, file: TextIO, delimiter: str, probabilities: bool, names: Sequence[str] = (), decimal: str = "."
    ) -> None:
        super().__init__(file, probabilities)
        self._delimiter, self._names, self._decimal = delimiter, names, decimal
        self._columns: list[str] = []

    def _write_row(self, example: Example, predictions: Predictions, number: int) -> None:
        forecast = predictions.values is not None and predictions.values.ndim == 3
        row = example.row
        if forecast:
            # The series itself would be repeated for each step.
            others = {name: row[name] for name in row if name not in example.columns}
            row = others if example.is_table else {"index": self.count + number, **others}
        if not self._columns:
            self._write_header(list(row), predictions)
        kept = list(self._kept(row, example.place))
        if forecast:
            assert predictions.values is not None
            for step, values in enumerate(predictions.values[number], 1):
                self._write_fields([*kept, step, *map(_number, values)])
        else:
            self._write_fields([*kept, *_fields(predictions, number, self._probabilities)])

    def write_empty(self, header: Sequence[str], inputs: Sequence[str], predictions: Predictions) -> None:
        """Write the header alone."""
        forecast = predictions.values is not None and predictions.values.ndim == 3
        kept = ["index", *(name for name in header if name not in inputs)] if forecast else list(header)
        self._write_header(list(dict.fromkeys(kept)), predictions)
        self._complete(0)

    def _write_header(self, columns: list[str], predictions: Predictions) -> None:
        self._columns = columns
        self._write_fields([*columns, *self._new_columns(predictions)])

    def _write_fields(self, fields: Sequence[Any]) -> None:
        if self._decimal != ".":
            fields = [str(each).replace(".", self._decimal) if isinstance(each, float) else each for each in fields]
        # Before Python 3.13, a carriage return is not quoted by default.
        returns = any(isinstance(each, str) and "\r" in each for each in fields)
        quoting: Literal[0, 1] = csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
        csv.writer(self._rows, delimiter=self._delimiter, lineterminator="\n", quoting=quoting).writerow(fields)

    def _new_columns(self, predictions: Predictions) -> list[str]:
        if predictions.values is None:
            assert predictions.classes is not None
            chances = [f"probability_{name}" for name in predictions.classes] if self._probabilities else []
            new = ["prediction", *chances]
        else:
            count = predictions.values.shape[-1]
            new = list(self._names) if len(self._names) == count else numbered("prediction", count)
            new = [*unused_names(["step"], new), *new] if predictions.values.ndim == 3 else new
        return unused_names(new, self._columns)

    def _kept(self, row: Mapping[str, Any], place: str) -> Iterator[Any]:
        for name in row:
            if name not in self._columns:
                raise DataError(
                    f"{place}: expected the columns of the first row, got another, {name!r}; write a .jsonl, "
                    "whose rows can differ, with -o"
                )
        for name in self._columns:
            value = row.get(name)
            yield json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


class JSONWriter(_RowWriter):
    """Writes JSON Lines: the row of the input with `prediction`, and `probabilities` by class."""

    def __init__(self, file: TextIO, probabilities: bool) -> None:
        super().__init__(file, probabilities)
        self._names: list[str] = []

    def _write_row(self, example: Example, predictions: Predictions, number: int) -> None:
        self._names = self._names or unused_names(["prediction", "probabilities"], list(example.row))
        new: dict[str, Any] = {}
        if predictions.values is not None:
            values = predictions.values[number]
            # As the input of a line of numbers: without brackets around a single feature.
            plain = _nested(values[..., 0] if values.shape[-1] == 1 else values)
            new[self._names[0]] = plain
        elif predictions.labels is not None and predictions.classes is not None:
            label, *chances = _fields(predictions, number, self._probabilities)
            new[self._names[0]] = label
            if self._probabilities:
                new[self._names[1]] = dict(zip(predictions.classes, chances, strict=True))
        for name in new:
            if name in example.row:
                raise DataError(f"{example.place}: expected no field {name!r}, which the first row has not; rename it")
        self._rows.write(_json({**example.row, **new}) + "\n")


class ArrayWriter(Writer):
    """Writes arrays: `labels`, `probabilities` and `classes`, or `values`, in an .npz; `values` alone in an .npy.

    The arrays grow in files of their own until the number of examples is known.
    """

    def __init__(self, path: Path, out: Path, probabilities: bool) -> None:
        self._path, self._single, self._probabilities = path, out.suffix.lower() == ".npy", probabilities
        self._folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{out.name}-")
        self._parts: dict[str, _GrowingArray] = {}
        self._classes: tuple[str, ...] | None = None

    def write(self, examples: Sequence[Example], predictions: Predictions) -> None:
        """Append the predictions to the arrays."""
        self._classes = predictions.classes
        found: dict[str, NDArray[Any]] = {}
        if predictions.values is not None:
            found["values"] = predictions.values
        elif predictions.classes is not None and predictions.probabilities is not None:
            found["labels"] = np.array(predictions.labels, _label_dtype(predictions.classes))
            if self._probabilities:
                found["probabilities"] = predictions.probabilities
        for name, values in found.items():
            if name not in self._parts:
                self._parts[name] = _GrowingArray(Path(self._folder.name, name), values)
            self._parts[name].append(values)
        self.count += len(examples)

    def close(self) -> None:
        """Write the file."""
        if self._single:
            with self._path.open("wb") as file:
                self._parts["values"].copy_to(file, self.count)
        else:
            with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for name, part in self._parts.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        part.copy_to(member, self.count)
                if self._classes is not None and self._probabilities:
                    with archive.open("classes.npy", "w") as member:
                        np.lib.format.write_array(member, np.array(self._classes, _label_dtype(self._classes)))

    def discard(self) -> None:
        """Remove the files of the arrays."""
        for part in self._parts.values():
            with contextlib.suppress(OSError):  # rows that a full disk refuses again
                part.file.close()
        self._folder.cleanup()


class _GrowingArray:
    """The rows of an array, in a file without a header."""

    def __init__(self, path: Path, like: NDArray[Any]) -> None:
        self.file: Any = path.open("w+b")
        self._dtype, self._row = like.dtype, like.shape[1:]

    def append(self, values: NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(values).tobytes())

    def copy_to(self, file: BinaryIO | Any, count: int) -> None:
        """Write a whole .npy of the first `count` rows."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (count, *self._row)}
        np.lib.format.write_array_header_1_0(file, header)
        self.file.truncate(count * math.prod(self._row) * self._dtype.itemsize)
        self.file.seek(0)
        shutil.copyfileobj(self.file, file)


def numbered(name: str, count: int) -> list[str]:
    """Return `count` names, with numbers if there are several."""
    return [name] if count == 1 else [f"{name}_{number}" for number in range(1, count + 1)]


def unused_names(names: Sequence[str], used: Sequence[str]) -> list[str]:
    """Return names with the smallest number that makes all of them different from those that are used."""
    number, found = 1, list(names)
    while set(found) & set(used):
        number += 1
        found = [f"{name}_{number}" for name in names]
    return found


def _fields(predictions: Predictions, number: int, probabilities: bool) -> list[Any]:
    """Return the class and the probabilities, or the values, of one example."""
    if predictions.values is not None:
        return [_number(value) for value in predictions.values[number]]
    assert predictions.labels is not None
    assert predictions.probabilities is not None
    chances = [_number(value) for value in predictions.probabilities[number]] if probabilities else []
    return [predictions.labels[number], *chances]


def _number(value: Any) -> float | None:
    """Return a number with as many digits as tell a float32 from all others; None for NaN and infinity."""
    return float(str(value)) if np.isfinite(value) else None


def _nested(values: NDArray[np.float32]) -> Any:
    return [_nested(part) for part in values] if values.ndim else _number(values[()])


def _label_dtype(classes: Sequence[str]) -> Any:
    """Return the type of labels in an array: integers if all names are integers."""
    return np.int64 if all(_INTEGER.fullmatch(name) for name in classes) else np.array(classes).dtype


def _json(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False)
    return json.dumps(row) if _SURROGATE.search(text) else text
