"""`tcnca predict` on tables of numbers: the columns of training by name, as rows or as a series."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tcnca import load
from tcnca.cli import app
from tcnca.errors import format_score
from tcnca.training import evaluate_run
from tests.inference.models import assert_near, saved
from tests.inference.test_predict import predicted, read_csv, tcnca_predict, train, write_csv

SERIES = np.random.default_rng(0).normal(5, 2, (50, 2)).round(3)
FORECAST: dict[str, Any] = {"value_columns": ("heat", "rain")}
ROWS = np.random.default_rng(1).normal(5, 2, (8, 4)).round(3)
CLASSIFIER: dict[str, Any] = {"value_columns": ("a", "b", "c", "d"), "columns": {"label": "kind"}}
REGRESSION: dict[str, Any] = {"value_columns": ("a", "b", "c", "d"), "target_columns": ("y", "z"), "columns": {}}


def series_rows(first: str = "heat", second: str = "rain") -> list[dict[str, Any]]:
    return [{second: b, "when": f"{n}:00", first: a, "note": "x"} for n, (a, b) in enumerate(SERIES.tolist())]


def sequence_rows(**more: Any) -> list[dict[str, Any]]:
    rows = [{"id": f"#{n}", **dict(zip("dcba", row[::-1], strict=True))} for n, row in enumerate(ROWS.tolist())]
    return [{**row, **{name: values[n] for name, values in more.items()}} for n, row in enumerate(rows)]


def numbers(text: str, names: list[str], delimiter: str = ",") -> list[list[float]]:
    rows = read_csv(text, delimiter)
    return [[float(row[name].replace(",", ".")) for name in names] for row in rows]


# Trained runs.


def test_a_trained_run_forecasts_a_table(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "series.csv", series_rows())
    np.save(tmp_path / "series.npy", SERIES)
    run, small = tmp_path / "run", ["max_steps=2", "num_layers=1", "d_model=8"]
    output = CliRunner().invoke(app, ["train", "forecast", f"data={data}", *small, "--out", str(run), "--device=cpu"])
    assert "columns of values: 'rain', 'heat'; not used: 'when', 'note'\n" in output.output
    assert load(run).preprocessing.value_columns == ("rain", "heat")
    got = predicted(run, data, "--steps", 3)
    assert list(read_csv(got)[0]) == ["step", "rain", "heat"]
    want = np.asarray(load(run).predict(SERIES[:, ::-1].astype("float32"), steps=3).values)[0]
    assert_near(numbers(got, ["rain", "heat"]), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("classify", ["data.custom.label=5"]), ("regress", ["data.custom.targets=5"])],
)
def test_a_trained_run_predicts_rows(tmp_path: Path, recipe: str, options: list[str]) -> None:
    """Of a table without a header, whose columns have numbers."""
    rows = np.random.default_rng(2).normal(size=(40, 4)).round(3)
    last = (rows[:, 0] > 0).astype(int) if recipe == "classify" else rows.sum(1).round(3)
    lines = [",".join(map(str, [*row, end])) for row, end in zip(rows.tolist(), last.tolist(), strict=True)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.csv").write_text("\n".join(lines[:30]))
    (tmp_path / "data/test.csv").write_text("\n".join(lines[30:]))
    run = train(tmp_path / "run", recipe, f"data={tmp_path / 'data'}", *options)
    score = evaluate_run(run, split="test", device="cpu", verbose=False)
    result = tcnca_predict(run, tmp_path / "data/test.csv")
    assert f"{score.metric} {format_score(score.value)} (of {score.count})" in result.stderr
    found = read_csv(result.stdout)
    assert [[float(row[str(n)]) for n in range(1, 6)] for row in found] == [
        [*row, end] for row, end in zip(rows[30:].tolist(), last[30:].tolist(), strict=True)
    ]
    # Without the label, too.
    (tmp_path / "new.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines[30:]))
    result = tcnca_predict(run, tmp_path / "new.csv")
    assert result.stderr == ""
    assert [row["prediction"] for row in read_csv(result.stdout)] == [row["prediction"] for row in found]


# Series.


@pytest.mark.parametrize("name", ["series.csv", "series.tsv", "series.jsonl", "semicolons.csv"])
def test_columns_of_a_series_are_found_by_name(tmp_path: Path, name: str) -> None:
    model = saved("forecast", tmp_path / "model", **FORECAST)
    want = np.asarray(model.predict(SERIES, steps=3).values)[0]
    delimiter = {"series.tsv": "\t", "semicolons.csv": ";"}.get(name, ",")
    data = tmp_path / name
    if name == "series.jsonl":
        data.write_text("\n".join(map(json.dumps, series_rows())))
    else:
        write_csv(data, series_rows(), delimiter)
    predicted(tmp_path / "model", data, "--steps", 3, "-o", tmp_path / "out.csv")
    text = (tmp_path / "out.csv").read_text()
    assert text.startswith(delimiter.join(["step", "heat", "rain"]) if name == "semicolons.csv" else "step,heat,rain")
    assert_near(numbers(text, ["heat", "rain"], ";" if name == "semicolons.csv" else ","), want, rtol=1e-5)
    predicted(tmp_path / "model", data, "--steps", 3, "-o", tmp_path / "out.npy")
    assert_near(np.load(tmp_path / "out.npy"), want[None], rtol=1e-5)
    predicted(tmp_path / "model", data, "--steps", 3, "-o", tmp_path / "out.jsonl")
    assert_near(json.loads((tmp_path / "out.jsonl").read_text())["prediction"], want, rtol=1e-5)


def test_columns_of_a_series_with_other_names(tmp_path: Path) -> None:
    saved("forecast", tmp_path / "model", **FORECAST)
    want = predicted(tmp_path / "model", write_csv(tmp_path / "a.csv", series_rows()))
    data = write_csv(tmp_path / "b.csv", series_rows("warmth", "rainfall"))
    assert predicted(tmp_path / "model", data, "--values", "warmth,rainfall") == want
    assert predicted(tmp_path / "model", "-", "--format", "csv", input=(tmp_path / "a.csv").read_text()) == want
    (tmp_path / "c.csv").write_text("\n".join(f"{a},{b}" for a, b in SERIES.tolist()))
    assert predicted(tmp_path / "model", tmp_path / "c.csv") == want


def test_names_of_features_for_every_input(tmp_path: Path) -> None:
    saved("forecast", tmp_path / "model", value_columns=("step", "x, y"))
    np.save(tmp_path / "series.npy", SERIES)
    rows = read_csv(predicted(tmp_path / "model", tmp_path / "series.npy", "--steps", 2))
    assert list(rows[0]) == ["index", "step_2", "step", "x, y"]
    assert [row["step_2"] for row in rows] == ["1", "2"]
    # A series in each row, as for models of arrays.
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "values": SERIES.tolist()}))
    text = predicted(tmp_path / "model", tmp_path / "rows.jsonl", "--steps", 2, "-o", tmp_path / "out.csv")
    assert read_csv((tmp_path / "out.csv").read_text())[1] == {**rows[1], "id": "a"}
    assert text == ""


def test_decimal_commas_are_written_as_they_are_read(tmp_path: Path) -> None:
    saved("forecast", tmp_path / "model", **FORECAST)
    want = predicted(tmp_path / "model", write_csv(tmp_path / "a.csv", series_rows()), "--steps", 2)
    rows = [{name: str(value).replace(".", ",") for name, value in row.items()} for row in series_rows()]
    data = write_csv(tmp_path / "b.csv", rows, ";")
    text = predicted(tmp_path / "model", data, "--steps", 2)
    assert text == want.replace(",", ";").replace(".", ",")
    predicted(tmp_path / "model", data, "--steps", 2, "-o", tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv").read_text() == want.replace(",", "\t").replace(".", ",")


def test_decimals_are_written_alike_in_all_rows(tmp_path: Path) -> None:
    saved("regression", tmp_path / "model", **REGRESSION)
    options = ("-", "--format", "csv", "--batch-size", 1)
    names = ["prediction_y", "prediction_z"]
    for second, mark in (("1,5;2,5;3;4", ","), ("6;7;8;9", ",")):
        result = tcnca_predict(tmp_path / "model", *options, input=f"a;b;c;d\n1;2;3;4\n{second}\n")
        written = [row[name] for row in read_csv(result.stdout, ";") for name in names]
        assert len(written) == 4
        assert all(mark in each and "." not in each for each in written)
    result = tcnca_predict(tmp_path / "model", *options, input="a;b;c;d\n1.5;2;3;4\n1;2;3;4\n")
    assert all("." in row[name] for row in read_csv(result.stdout, ";") for name in names)


@pytest.mark.parametrize(
    ("y", "z", "message"),
    [
        (
            "1.5",
            "2",
            "line 2, column 'y': expected decimals with commas, as before, got '1.5'; write all numbers alike",
        ),
        ("1", "2_0", "line 2, column 'z': expected a number, got '2_0'"),
        ("1", "inf", "line 2, column 'z': expected a finite float32 number, got 'inf'"),
        ("1,5", "nan", "mean squared error"),
        ("1,5", "", "mean squared error"),
        ("", "", "mean squared error"),
    ],
)
def test_true_values_are_read_like_the_others(tmp_path: Path, y: str, z: str, message: str) -> None:
    saved("regression", tmp_path / "model", **REGRESSION)
    (tmp_path / "in.csv").write_text(f"a;b;c;d;y;z\n1,5;2;3;4;{y};{z}\n1;2;3;4;1;2\n")
    assert message in tcnca_predict(tmp_path / "model", tmp_path / "in.csv").stderr


# Sequences in rows.


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_rows_are_sequences(tmp_path: Path, name: str) -> None:
    model = saved("image", tmp_path / "model", image_size=None, input_mean=None, input_std=None, **CLASSIFIER)
    answers = model.predict(ROWS)
    rows = sequence_rows(kind=["1", *(answers.labels or [])[1:]])
    data = tmp_path / name
    if name == "rows.jsonl":
        data.write_text("\n".join(map(json.dumps, rows)))
    else:
        write_csv(data, rows)
    result = tcnca_predict(tmp_path / "model", data, "-o", tmp_path / "out.csv")
    assert "accuracy " in result.stderr
    found = read_csv((tmp_path / "out.csv").read_text())
    assert list(found[0]) == [*rows[0], "prediction", "probability_0", "probability_1"]
    assert [{key: row[key] for key in rows[0]} for row in found] == [
        {key: str(value) for key, value in row.items()} for row in rows
    ]
    assert [row["prediction"] for row in found] == answers.labels
    assert "accuracy" not in tcnca_predict(tmp_path / "model", data, "--label", "").stderr
    renamed = [{key.upper(): value for key, value in row.items()} for row in rows]
    options = ("--values", "A,B,C,D", "--label", "KIND")
    text = tcnca_predict(tmp_path / "model", write_csv(tmp_path / "other.csv", renamed), *options)
    assert text.stderr == result.stderr.replace(f"wrote 8 predictions to {tmp_path / 'out.csv'}\n", "")
    assert [row["prediction"] for row in read_csv(text.stdout)] == answers.labels


def test_rows_with_values_to_predict(tmp_path: Path) -> None:
    model = saved("regression", tmp_path / "model", **REGRESSION)
    values = np.asarray(model.predict(ROWS).values)
    rows = sequence_rows(y=(values[:, 0] + 1).tolist(), z=[*(values[:7, 1] - 3).tolist(), ""])
    result = tcnca_predict(tmp_path / "model", write_csv(tmp_path / "rows.csv", rows))
    assert list(read_csv(result.stdout)[0]) == [*rows[0], "prediction_y", "prediction_z"]
    assert_near(numbers(result.stdout, ["prediction_y", "prediction_z"]), values, rtol=1e-5)
    assert f"mean squared error {(8 + 7 * 9) / 15:.4f} (of 15)" in result.stderr
    commas: list[dict[str, Any]] = [
        {f" {key}": str(value).replace(".", ",") for key, value in row.items()} for row in rows
    ]
    other = tcnca_predict(tmp_path / "model", write_csv(tmp_path / "commas.csv", commas, ";"))
    assert other.stderr == result.stderr
    assert_near(numbers(other.stdout, ["prediction_y", "prediction_z"], ";"), values, rtol=1e-5)
    data = write_csv(tmp_path / "swapped.csv", [{"u": row["z"], "v": row["y"], **row} for row in rows])
    assert tcnca_predict(tmp_path / "model", data, "--label", "v,u").stderr == result.stderr
    assert tcnca_predict(tmp_path / "model", write_csv(tmp_path / "new.csv", sequence_rows())).stderr == ""


@pytest.mark.parametrize(
    ("columns", "first", "count", "warning"),
    [
        ("1,2,3,4", "1,2,3,4", 2, "the first line was read as data"),
        ("1,2,3,4", "0,1,2,3", 2, "the first line was read as data"),
        ("1,2,3,4", "4,3,2,1", 2, ""),
        ("2,3,4,5", "2,3,4,5", 2, "the first line was read as data"),
        ("0,1,2,3", "0,1,2,3", 1, "the first line was read as names"),
        ("0,1,2,3", "1,2,3,4", 2, "the first line was read as data"),
        ("2020,2021,2022,2023", "2020,2021,2022,2023", 1, "the first line was read as names"),
        ("a,b,c,d", "0,1,2,3", 2, "the first line was read as data"),
        ("a,b,c,d", "a,b,c,d", 1, ""),
    ],
)
def test_first_lines_of_numbers(tmp_path: Path, columns: str, first: str, count: int, warning: str) -> None:
    """No row is left out silently."""
    saved("regression", tmp_path / "model", value_columns=tuple(columns.split(",")), target_columns=("y", "z"))
    (tmp_path / "in.csv").write_text(f"{first}\n5,6,7,9\n")
    result = tcnca_predict(tmp_path / "model", tmp_path / "in.csv")
    assert len(read_csv(result.stdout)) == count
    assert (warning in result.stderr) if warning else not result.stderr


def test_first_lines_of_numbers_with_chosen_columns(tmp_path: Path) -> None:
    saved("regression", tmp_path / "model", value_columns=("a", "b", "c", "d"), target_columns=("y", "z"))
    for first, options, count in (
        ("9,0,1,2,3", "0,1,2,3", 1),
        ("1,2,3,4,5", "1,2,3,4", 2),
        ("5,1,0,0,0", "5,3,2,1", 2),
    ):
        (tmp_path / "in.csv").write_text(f"{first}\n5,6,7,9,1\n")
        result = tcnca_predict(tmp_path / "model", tmp_path / "in.csv", "--values", options)
        assert len(read_csv(result.stdout)) == count, result.output


def test_a_first_row_with_many_fields_needs_no_time(tmp_path: Path) -> None:
    saved("forecast", tmp_path / "model", **FORECAST)
    wide = {"heat": 1, "rain": 2, **{f"c{n}": n for n in range(100_000)}}
    rows = [wide, *[{"heat": 1, "rain": 2}] * 255]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    begin = time.process_time()
    predicted(tmp_path / "model", tmp_path / "in.jsonl")
    assert time.process_time() - begin < 3


# Errors.


@pytest.mark.parametrize(
    ("kind", "content", "options", "message"),
    [
        (
            "forecast",
            "heat,x\n1,2\n",
            "",
            "expected the column 'rain', as in training, got 'heat', 'x'; rename columns",
        ),
        ("forecast", "5,2,3\n4,5,7\n", "", "expected the columns 'heat', 'rain', as in training, got '1', '2', '3' (n"),
        (
            "forecast",
            "a,b,c\n1,2,3\n",
            "--values a,b,c",
            "expected 2 columns with --values, as in training ('heat', 'rain'), ",
        ),
        ("forecast", "a,b\n1,2\n", "--values a,c", "expected one of the columns 'a', 'b', got 'c'"),
        ("forecast", "a,b\n1,2\n", "--label a", "--label: expected none for in.csv, got 'a'; leave it out"),
        ("forecast", "heat,rain\n1,2\n3,\n", "", "line 3, column 'rain': expected a number, got an empty field; fill"),
        ("forecast", "heat,rain\n1,x\n", "", "line 2, column 'rain': expected a number, got 'x'; correct it, or remo"),
        (
            "forecast",
            "heat;rain\n5;1,234\n1,234;2",
            "",
            "line 2, column 'rain': expected decimals, got '1,234', which is amb",
        ),
        ("regression", "a;b;c;d\n1;2,345;3;4\n", "", "line 2, column 'b': expected decimals, got '2,345', which is am"),
        ("forecast", "heat,rain\n", "", "expected time steps of a series, got no rows; add some"),
        ("forecast", "heat,rain,date\n1,2,9\n1,2,8\n1,2,7\n", "", "expected rows from the first time to the last, "),
        ("regression", "a,b,c\n1,2,3\n", "", "expected the column 'd', as in training, got 'a', 'b', 'c'"),
        ("regression", "a,b,c,d\n1,2,3,inf\n", "", "line 2, column 'd': expected a finite float32 number, got 'inf'"),
        ("regression", "a,b,c,d\n1,2,3,4\n", "--label y", "expected one of the columns 'a', 'b', 'c', 'd', got 'y'"),
        (
            "regression",
            "a,b,c,d\n1,2,3,4\n",
            "--label a",
            "line 2, column 'a': expected 2 numbers, as in training, got 1",
        ),
    ],
)
def test_errors(
    kind: str, content: str, options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(kind, tmp_path / "model", **(FORECAST if kind == "forecast" else REGRESSION))
    (tmp_path / "in.csv").write_text(content)
    result = tcnca_predict("model", "in.csv", *options.split())
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.startswith(("Error: in.csv", "Error: --label"))


def test_columns_that_do_not_fit_the_model_are_not_used(tmp_path: Path) -> None:
    saved("forecast", tmp_path / "model", value_columns=("a", "b", "c"))
    data = write_csv(tmp_path / "in.csv", [{"a": 1, "b": 2, "c": 3}])
    assert "expected arrays (.npy, .npz), or a column 'values'" in tcnca_predict(tmp_path / "model", data).stderr
