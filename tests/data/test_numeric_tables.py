"""Tables of numbers: what equals the same arrays, the roles of columns, ways to write numbers, and errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data import load_task, npy
from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.custom.options import describe_columns
from tcnca.data.schema import Content, Kind
from tcnca.errors import DataError
from tests.data.helpers import assert_refused, assert_same_columns, split

FORECAST = CustomOptions(kind="forecast")
SERIES = np.random.default_rng(0).normal(50, 20, (60, 3)).round(3)
ROWS = np.random.default_rng(1).normal(size=(40, 7)).round(4)
NAMES = [f"v{n}" for n in range(7)]
CLASSES = [("cat", "dog")[n % 2] for n in range(40)]


def _table(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]], delimiter: str = ",") -> Path:
    """Write a table; JSON Lines if that is the suffix."""
    if path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(header, row, strict=True))) for row in rows]
    else:
        lines = [delimiter.join(map(str, row)) for row in ([header] if header else []) + list(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _dated(series: NDArray[Any]) -> list[list[Any]]:
    return [[f"2024-01-{n // 24 + 1:02} {n % 24:02}:00", *row] for n, row in enumerate(series.tolist())]


def _series(content: Content) -> NDArray[Any]:
    """Return the series whose parts are the splits."""
    return np.concatenate([np.asarray(split(content, name)["values"])[0] for name in content.splits])


def _assert_same_splits(got: Content, expected: Content) -> None:
    assert (got.kind, list(got.splits)) == (expected.kind, list(expected.splits))
    for name in expected.splits:
        assert_same_columns(split(got, name), split(expected, name))
    for key in ("mean", "std", "class_names"):
        assert got.metadata.get(key) == expected.metadata.get(key)


# Equal to arrays.


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "semicolons.csv"])
def test_a_series_is_read_as_from_an_array(tmp_path: Path, name: str) -> None:
    delimiter = {"a.tsv": "\t", "semicolons.csv": ";"}.get(name, ",")
    path = _table(tmp_path / name, ["date", "a", "b", "c"], _dated(SERIES), delimiter)
    np.save(tmp_path / "a.npy", SERIES)
    content = read_custom(path, FORECAST)
    _assert_same_splits(content, read_custom(tmp_path / "a.npy"))
    assert content.origin == name
    names = {"value_columns": ["a", "b", "c"], "target_columns": [], "unused_columns": ["date"], "columns": {}}
    assert {key: content.metadata[key] for key in names} == names


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_sequences_and_classes_are_read_as_from_arrays(tmp_path: Path, name: str) -> None:
    rows = [[n, *row, label] for n, (row, label) in enumerate(zip(ROWS.tolist(), CLASSES, strict=True))]
    content = read_custom(_table(tmp_path / name, ["id", *NAMES, "label"], rows))
    np.savez(tmp_path / "a.npz", values=ROWS, labels=np.array(CLASSES))
    _assert_same_splits(content, read_custom(tmp_path / "a.npz"))
    assert content.metadata["columns"] == {"label": "label"}
    assert content.metadata["unused_columns"] == ["id"]


@pytest.mark.parametrize("outputs", [1, 2])
def test_sequences_and_targets_are_read_as_from_arrays(tmp_path: Path, outputs: int) -> None:
    path = _table(tmp_path / "a.csv", [*NAMES[: 7 - outputs], *("y", "z")[:outputs]], ROWS.tolist())
    np.savez(tmp_path / "a.npz", values=ROWS[:, : 7 - outputs], targets=ROWS[:, 7 - outputs :])
    expected = read_custom(tmp_path / "a.npz")
    content = read_custom(path, CustomOptions(targets="y,z" if outputs == 2 else "y"))
    _assert_same_splits(content, expected)
    assert content.metadata["target_columns"] == ["y", "z"][:outputs]
    if outputs == 1:
        _assert_same_splits(read_custom(path, CustomOptions(kind="regression")), expected)


def test_splits_from_files_and_from_a_column(tmp_path: Path) -> None:
    cuts = {"train": slice(20), "valid": slice(20, 30), "test": slice(30, 40)}
    rows = [[*row, label] for row, label in zip(ROWS.tolist(), CLASSES, strict=True)]
    (tmp_path / "files").mkdir()
    for name, cut in cuts.items():
        _table(tmp_path / f"files/{name}.csv", [*NAMES, "label"], rows[cut])
    # The columns are found by their names.
    _table(tmp_path / "files/test.csv", ["label", *NAMES], [[row[-1], *row[:-1]] for row in rows[30:]])
    parts = [name for name, cut in cuts.items() for _ in rows[cut]]
    whole = [[part, *row] for part, row in zip(parts, rows, strict=True)]
    path = _table(tmp_path / "whole.csv", ["part", *NAMES, "label"], whole)
    _assert_same_splits(read_custom(path, CustomOptions(split="part")), read_custom(tmp_path / "files"))
    (tmp_path / "files/test.csv").write_text("label,v0\ncat,1\n")
    with pytest.raises(DataError, match=r"test\.csv: expected a column 'v1', as in the first file of training, got"):
        read_custom(tmp_path / "files")


def test_series_of_each_split(tmp_path: Path) -> None:
    for name, cut in {"train": slice(40), "test": slice(40, 60)}.items():
        _table(tmp_path / f"{name}.csv", ["a", "b", "c"], SERIES[cut].tolist())
    content = read_custom(tmp_path, FORECAST)
    np.testing.assert_array_equal(_series(content), SERIES.astype(np.float32))
    assert list(content.splits) == ["train", "validation", "test"]
    (tmp_path / "train").mkdir()
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    with pytest.raises(DataError, match="expected one series for train, got 2 files; give one of them"):
        read_custom(tmp_path, FORECAST)


# Roles of columns.


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *[(name, 5) for name in ("time", "Date", "TIMESTAMP", "datetime", "date_time", "time_s", "Time [s]", "Year")],
        *[(name, 5) for name in ("", "index", "ID", "Unnamed: 0")],
        *[("when", first) for first in ("Monday", "2024-01-05T10:00:00Z", "5.1.2024", "10:30")],
    ],
)
def test_times_and_numbers_of_rows_are_not_features(tmp_path: Path, name: str, first: Any) -> None:
    rows = [[first, *row] for row in SERIES.tolist()]
    content = read_custom(_table(tmp_path / "a.csv", [name, "a", "response_time", "timeout"], rows), FORECAST)
    assert content.metadata["value_columns"] == ["a", "response_time", "timeout"]
    assert content.metadata["unused_columns"] == [name]
    labels = [[*row, n % 2] for n, row in enumerate(rows)]
    path = _table(tmp_path / "a.csv", [name, "a", "b", "c", "label"], labels)
    if first != "Monday":
        assert read_custom(path).metadata["value_columns"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("values", "columns"),
    [("b", [1]), ("c,a", [2, 0]), (" a , b", [0, 1]), ("time,a", [3, 0]), ('"x, y",a', [4, 0]), ("x, y", [4])],
)
def test_chosen_columns(tmp_path: Path, values: str, columns: list[int]) -> None:
    table = np.column_stack([SERIES, np.arange(60), np.arange(60) % 7])
    path = _table(tmp_path / "a.csv", ["a", "b", "c", "time", '"x, y"'], table.tolist())
    content = read_custom(path, CustomOptions(kind="forecast", values=values))
    np.testing.assert_array_equal(_series(content), table[:, columns].astype(np.float32))


def test_spaces_around_names_and_numbers(tmp_path: Path) -> None:
    path = _table(tmp_path / "a.csv", ["a", " b ", " label"], [[n, f" {n / 2} ", f" {'xy'[n % 2]}"] for n in range(20)])
    content = read_custom(path, CustomOptions(label="label"))
    assert content.metadata["value_columns"] == ["a", "b"]
    assert content.metadata["class_names"] == ["x", "y"]


@pytest.mark.parametrize("field", ["NA", "nan", "?", "", "-"])
def test_missing_values_are_named(tmp_path: Path, field: str) -> None:
    rows = [[n, n / 2, "xy"[n % 2]] for n in range(40)]
    path = _table(tmp_path / "a.csv", ["a", "b", "label"], [*rows[:20], [1, field, "x"], *rows[20:]])
    got = f"'{field}'" if field.strip() else "an empty field"
    assert_refused(path, rf"^, line 22, column 'b': expected a number, got {re.escape(got)}; fill it in")


def test_a_column_of_categories_is_not_used(tmp_path: Path) -> None:
    rows = [[f"sensor {n % 3}", n, n / 2, "xy"[n % 2]] for n in range(40)]
    content = read_custom(_table(tmp_path / "a.csv", ["sensor", "a", "b", "label"], rows))
    assert content.metadata["value_columns"] == ["a", "b"]
    assert content.metadata["unused_columns"] == ["sensor"]
    for header, more in ((["sensor", "a", "label"], ""), (["note", "a", "b", "label"], "unique")):
        rows = [[f"{more}{n if more else n % 3}!", *[n] * (len(header) - 2), "xy"[n % 2]] for n in range(40)]
        path = _table(tmp_path / "b.csv", header, rows)
        assert_refused(path, "^: no column is obviously the text; .* columns of numbers with --values and their class")
    # Where a column is named like a text, it is one.
    rows = [[f"word {n % 3}", n, n / 2, "xy"[n % 2]] for n in range(40)]
    path = _table(tmp_path / "c.csv", ["text", "a", "b", "label"], rows)
    assert read_custom(path).metadata["columns"] == {"text": "text", "label": "label"}


# Tables without a header.


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_columns_without_names_are_numbered(tmp_path: Path, delimiter: str) -> None:
    """As in files of the UCR archive, whose first column is the class."""
    rows = [[n % 2 + 1, *row] for n, row in enumerate(ROWS.tolist())]
    path = _table(tmp_path / ("a.csv" if delimiter == "," else "a.tsv"), [], rows, delimiter)
    content = read_custom(path, CustomOptions(label="1"))
    np.savez(tmp_path / "a.npz", values=ROWS, labels=np.arange(40) % 2 + 1)
    _assert_same_splits(content, read_custom(tmp_path / "a.npz"))
    assert content.metadata["value_columns"] == [str(n) for n in range(2, 9)]
    message = r"^: no column is obviously the class .* '8' \(numbered, since the first line has no names\) with --label"
    assert_refused(path, message)


@pytest.mark.parametrize("first", ["1", "0", "-1.5e3", "5,5", "1,2", "1,2,3", "0,1\n1,2", "0,1,2\n\n7,8,9", "0,2"])
def test_first_lines_that_are_data(tmp_path: Path, first: str) -> None:
    given = first.split()
    lines = [*first.split("\n"), *(",".join([f"{n}"] * (given[0].count(",") + 1)) for n in range(30))]
    (tmp_path / "a.csv").write_text("\n\n" + "\n".join(lines))
    content = read_custom(tmp_path / "a.csv", FORECAST)
    assert len(_series(content)) == 30 + len(given)
    np.testing.assert_array_equal(_series(content)[0], np.array(given[0].split(","), np.float32))
    assert "first line" not in describe_columns({**content.metadata, "kind": "forecast"})
    (tmp_path / "a.csv").write_text("\n\n" + "\n".join([*lines, "x" + lines[-1]]))
    assert_refused(tmp_path / "a.csv", f"^, line {len(lines) + 3}, column '1': expected a number, got 'x", FORECAST)


def test_first_lines_that_are_numbers_in_several_files(tmp_path: Path) -> None:
    """They have a header if the first file of training has one."""
    rows = [f"{n}.5,{n},3" for n in range(20)]
    for header in ("0,1,2", ""):
        (tmp_path / "train.csv").write_text("\n".join([header, *rows] if header else rows))
        (tmp_path / "test.csv").write_text("\n".join(["0,1,2", "1,2,3" if header else "5,5,5", *rows]))
        content = read_custom(tmp_path, FORECAST)
        assert np.asarray(split(content, "test")["values"]).shape == (1, 21 if header else 22, 3)


@pytest.mark.parametrize("header", ["0,1", "0,1,2", ",0,1", "a"])
def test_first_lines_that_are_names(tmp_path: Path, header: str) -> None:
    """Whole numbers from 0 on are names, as pandas writes them."""
    names = header.split(",")
    content = read_custom(_table(tmp_path / "a.csv", names, [[f"{n}.5"] * len(names) for n in range(30)]), FORECAST)
    assert len(_series(content)) == 30
    assert content.metadata["value_columns"] == [name for name in names if name]
    said = "; the first line, 0, 1, …, was read as names" in describe_columns({**content.metadata, "kind": "forecast"})
    assert said == header.startswith("0")


def test_dates_without_a_header(tmp_path: Path) -> None:
    content = read_custom(_table(tmp_path / "a.csv", [], _dated(SERIES)), FORECAST)
    np.testing.assert_array_equal(_series(content), SERIES.astype(np.float32))
    assert content.metadata["value_columns"] == ["2", "3", "4"]


# Ways to write numbers.


@pytest.mark.parametrize("header", [["date", "a", "b", "c"], []])
@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_decimal_commas(tmp_path: Path, delimiter: str, header: list[str]) -> None:
    rows = [[row[0], *(str(number).replace(".", ",") for number in row[1:])] for row in _dated(SERIES)]
    path = _table(tmp_path / ("a.csv" if delimiter == ";" else "a.tsv"), header, rows, delimiter)
    np.testing.assert_array_equal(_series(read_custom(path, FORECAST)), SERIES.astype(np.float32))


@pytest.mark.parametrize("field", ["1e-3", "-.5", "+2.", " 7 ", "7\xa0", "1E5", '"3.5"'])
def test_forms_of_numbers(tmp_path: Path, field: str) -> None:
    path = _table(tmp_path / "a.csv", ["a", "b"], [[field, n] for n in range(20)])
    assert _series(read_custom(path, FORECAST))[3, 0] == np.float32(float(field.strip('"')))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("", "expected a number, got an empty field; fill it in, for example with the value before, or remove the row"),
        ("nan", "expected a number, got 'nan'; fill it in"),
        ("N/A", "expected a number, got 'N/A'; fill it in"),
        ("inf", "expected a finite float32 number, got 'inf'"),
        ("-Infinity", "expected a finite float32 number, got '-Infinity'"),
        ("1e39", "expected a finite float32 number, got '1e39'"),
        (
            "12 km",
            "expected a number, got '12 km'; correct it, or remove the row, or choose other columns with --values",
        ),
        ("1_000", "expected a number, got '1_000'"),
        ("٣", "expected a number, got '٣'"),
        ("0x1f", "expected a number, got '0x1f'"),
        ('"1,5"', "expected a number, got '1,5'; write decimals with a point, .* separate the columns by semicolons"),
        ('"1,234.5"', "expected a number, got '1,234.5'; write decimals with a point, without separators of thousands"),
    ],
)
@pytest.mark.parametrize("row", [3, 700])
def test_fields_that_are_not_numbers(tmp_path: Path, field: str, message: str, row: int) -> None:
    rows = [[n, n / 2] for n in range(900)]
    rows[row][1] = field  # type: ignore[call-overload]
    path = _table(tmp_path / "a.csv", ["a", "b"], rows)
    assert_refused(path, f"^, line {row + 2}, column 'b': {message}", FORECAST)


def test_points_among_decimal_commas(tmp_path: Path) -> None:
    """They separate thousands, or one of both is a mistake."""
    path = _table(tmp_path / "a.csv", ["a", "b"], [[f"{n},5", n] for n in range(800)] + [["1,5", "1.234"]], ";")
    message = (
        r"^, line 802, column 'b': expected decimals with commas, as before, got '1\.234'; write all numbers alike"
    )
    assert_refused(path, message, FORECAST)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_commas_that_may_separate_thousands(tmp_path: Path, name: str) -> None:
    rows = [[n, "1,234" if n else "5"] for n in range(300)] + [[1, "-12,345"]]
    path = _table(tmp_path / name, ["a", "b"], rows, ";" if name == "a.csv" else "\t")
    message = (
        r"^, line 3, column 'b': expected decimals, got '1,234', which is ambiguous, .*; write decimals with points, or"
    )
    assert_refused(path, message, FORECAST)


@pytest.mark.parametrize("field", ["2,5", "0,125", "-,500", "1234,567", "1,234e3", "3,14159"])
def test_commas_that_are_surely_decimals(tmp_path: Path, field: str) -> None:
    path = _table(tmp_path / "a.csv", ["a", "b"], [["1,234", n] for n in range(300)] + [["7", field]], ";")
    series = _series(read_custom(path, FORECAST))
    assert series[0, 0] == np.float32(1.234)
    assert series[-1, 1] == np.float32(float(field.replace(",", ".")))


@pytest.mark.parametrize(
    ("value", "got"), [("null", "an empty field"), ('"x"', "'x'"), ("[1]", "'a JSON list'"), ("true", "'true'")]
)
def test_fields_of_json_lines(tmp_path: Path, value: str, got: str) -> None:
    lines = ['{"a": 1, "b": "2.5"}'] * 9
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, f'{{"b": {value}, "a": 1}}']))
    assert_refused(tmp_path / "a.jsonl", f"^, line 10, column 'b': expected a number, got {got}", FORECAST)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"a": 1}', "expected a field 'b', as in the first row, got 'a'; add it"),
        ("{}", "expected a field 'a', as in the first row, got none; add it"),
        ('{"b": 1, "c": 2}', "expected a field 'a', as in the first row, got 'b', 'c'; add it"),
        ('{"b": 1, "c": 2, "a": 1}', "expected the fields of the first row, got another, 'c'; remove it"),
    ],
)
@pytest.mark.parametrize("count", [9, 500])
def test_fields_of_json_lines_that_are_missing_or_unknown(tmp_path: Path, row: str, message: str, count: int) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(['{"a": 1, "b": "2.5"}'] * count + [row]))
    assert_refused(tmp_path / "a.jsonl", f"^, line {count + 1}: {message}$", FORECAST)


@pytest.mark.parametrize("times", [["2024-02-01", "2024-01-31", "2024-01-30"], [30, 20.5, -1]])
def test_the_newest_rows_first_are_refused(tmp_path: Path, times: list[Any]) -> None:
    rows = [[time, n] for n, time in enumerate(times)] * 4
    path = _table(tmp_path / "a.csv", ["date", "a"], rows[:3])
    message = "^: expected rows from the first time to the last, got .* in column 'date'; reverse their order"
    assert_refused(path, message, FORECAST)
    _table(tmp_path / "a.csv", ["date", "a"], rows)  # not in order, either, but not reversed
    assert len(_series(read_custom(path, FORECAST))) == 12
    path = _table(tmp_path / "a.csv", ["date", "a"], [[-n, n] for n in range(9)])
    assert len(_series(read_custom(path, CustomOptions(kind="forecast", values="a")))) == 9


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "forecast", "values": "a,d"}, "^: expected one of the columns 'a', 'b', 'note', got 'd'"),
        ({"kind": "forecast", "values": "a,a"}, "^: expected different columns, got 'a' twice in 'a,a'"),
        ({"kind": "forecast", "values": ""}, "^: expected names of columns, separated by commas, got ''; choose from"),
        ({"kind": "forecast", "values": "note"}, "^, line 2, column 'note': expected a number, got 'x'"),
        ({"kind": "forecast", "label": "a"}, "^: --label 'a' means classification and contradicts --kind forecast"),
        ({"kind": "forecast", "targets": "a"}, "^: --targets 'a' means regression and contradicts --kind forecast"),
        ({"targets": "a", "label": "b"}, "^: --label 'b' means classification and contradicts --targets; remove one"),
        ({"kind": "forecast", "text": "note"}, "^: --text 'note' does not apply to tables of numbers; remove it"),
        ({"kind": "regression"}, "^: no column is obviously the value to predict .* with --targets$"),
        ({"kind": "regression", "targets": "note"}, "^, line 2, column 'note': .* with --values or --targets$"),
        ({"values": "a"}, "^: no column is obviously the class .* with --label, .* --kind forecast if each row is a"),
        ({"values": "a", "label": "a"}, "^: column 'a' has two roles"),
        ({"values": "a", "label": "c"}, "^: expected one of the columns 'a', 'b', 'note', got 'c'"),
    ],
)
def test_errors_of_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = _table(tmp_path / "a.csv", ["a", "b", "note"], [[n, n / 2, "x"] for n in range(20)])
    assert_refused(path, message, CustomOptions(**options))


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("", "forecast", "^: expected rows, got none"),
        ("a,b\n", "forecast", "^: expected rows, got none"),
        ("a,b\nx,y\n", "forecast", "^: expected columns of numbers, got 'a', 'b' .*; choose the columns .* --values"),
        ("a, a\n1,2\n", "forecast", "^: expected different column names, got 'a' twice"),
        ("0,0,x\n1,2,y\n", None, "^, line 1: expected different column names, got '0' twice; name the columns in"),
        ("a,b\n1,2\n1\n", "forecast", "^, line 3: expected 2 fields, got 1"),
        ("a,b\n1,2\n", "forecast", "^: expected at least 6 time steps for train and validation and test, got 1"),
        ("a,label\n1,x\n2,\n", None, "^, line 3, column 'label': expected a label, got an empty field"),
        ("a,label\n1,x\n2,x\n3,x\n", None, "^: expected at least two classes, got only 'x'"),
    ],
)
def test_errors_of_tables(tmp_path: Path, content: str, kind: Kind | None, message: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert_refused(tmp_path / "a.csv", message, CustomOptions(kind=kind))


def test_a_class_outside_training_is_named_with_its_place(tmp_path: Path) -> None:
    rows = [[n, n / 2, "xy"[n % 2]] for n in range(20)]
    _table(tmp_path / "train.csv", ["a", "b", "label"], rows)
    path = _table(tmp_path / "test.csv", ["a", "b", "label"], [*rows[:3], [1, 2, "z"]])
    with pytest.raises(DataError) as caught:
        read_custom(tmp_path)
    expected = "line 5, column 'label': expected a label of the training split, got 'z'"
    assert str(caught.value).startswith(f"{path}, {expected}")


def test_values_to_predict_without_options(tmp_path: Path) -> None:
    path = _table(tmp_path / "a.csv", ["a", "b", "y"], [[n, n / 2, n / 7] for n in range(40)])
    message = (
        "^: expected a class with at least 3 different examples .* yourself, or name values to predict with --targets$"
    )
    assert_refused(path, message)
    words = _table(tmp_path / "b.csv", ["text", "label"], [[n, f"c{n}"] for n in range(40)])
    assert_refused(words, "^: expected a class with .* give the splits yourself$")


def test_keys_of_recipes_in_errors(tmp_path: Path) -> None:
    path = _table(tmp_path / "a.csv", ["a", "b"], [[n, n / 2] for n in range(20)])
    with pytest.raises(DataError, match=r"with data\.custom\.label=…, .* or give data\.custom\.kind=forecast if each"):
        load_task(path)


def test_a_table_of_numbers_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _table(tmp_path / "a.csv", ["a", "b"], [[n, n] for n in range(20_000)])
    message = r"^: cannot be read \(it needs about .* GB of memory.*\); read fewer columns, or a part of the rows"
    monkeypatch.setattr(npy, "available_memory", lambda: 10**6)
    assert_refused(path, message, FORECAST)
    monkeypatch.setattr(npy, "available_memory", lambda: 5 * 10**6)
    assert len(_series(read_custom(path, FORECAST))) == 20_000
    assert_refused(path, message, CustomOptions(targets="b"))  # each row is a sequence


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_labels_need_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = _table(tmp_path / name, ["a", "label"], [[n, "xy"[n % 2]] for n in range(9_000)])
    monkeypatch.setattr(npy, "available_memory", lambda: 10**7)
    read_custom(path)
    monkeypatch.setattr(npy, "available_memory", lambda: 3 * 10**6)
    assert_refused(path, "^: cannot be read .it needs about", CustomOptions())


def test_json_lines_with_other_fields_that_may_be_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a", "stars": 1}\n{"stars": 2}')
    assert_refused(tmp_path / "a.jsonl", "^: no column is obviously the text; choose one of 'body', 'stars'")
    (tmp_path / "a.jsonl").write_text('{"a": 1, "label": 1}\n{"label": 2}')
    assert_refused(tmp_path / "a.jsonl", "^, line 2: expected a field 'a'")


def test_first_rows_without_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 3)
    assert_refused(tmp_path / "a.jsonl", "^: expected columns of numbers, got none", FORECAST)
    (tmp_path / "a.jsonl").write_text('{}\n{"a": 1}')
    assert_refused(tmp_path / "a.jsonl", "^, line 2: expected the fields of the first row, got another, 'a'", FORECAST)


def test_rows_without_fields_need_no_time(tmp_path: Path) -> None:
    wide = "{" + ", ".join(f'"c{n}": 1' for n in range(200_000)) + "}\n"
    (tmp_path / "a.jsonl").write_text(wide + "{}\n" * 99)
    begin = time.process_time()
    assert_refused(tmp_path / "a.jsonl", "^, line 2: expected a field 'c0', as in the first row, got none", FORECAST)
    assert time.process_time() - begin < 2


def test_tables_are_read_in_linear_time(tmp_path: Path) -> None:
    long = _table(tmp_path / "long.csv", ["a", "b", "c"], np.tile(SERIES, (2000, 1)).tolist())
    wide = [",".join([*(f"c{n}" for n in range(20_000)), "label"])]
    wide += [",".join([f"{row}.5"] * 20_000 + [f"{row % 2}"]) for row in range(8)]
    (tmp_path / "wide.csv").write_text("\n".join(wide))
    begin = time.process_time()
    assert len(_series(read_custom(long, FORECAST))) == 120_000
    assert len(read_custom(tmp_path / "wide.csv").metadata["value_columns"]) == 20_000
    assert time.process_time() - begin < 4
