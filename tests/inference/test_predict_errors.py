"""Predictions that are stopped, and those that cannot be made."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tcnca.__main__
import tcnca.inference.predict
import tcnca.inference.writers
from tcnca import load, save
from tcnca.cli.reporting import open_stdout
from tcnca.inference import predict_inputs
from tcnca.models.prediction import predict_sequences
from tests.examples import small_model
from tests.inference.models import assert_near, saved
from tests.inference.test_predict import ROWS, TEXTS, expected, predicted, read_csv, tcnca_predict, write_csv

# Interruptions.


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".npz"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_keeps_what_was_predicted(
    suffix: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("classification", tmp_path / "model")
    data, out = write_csv(tmp_path / "rows.csv", ROWS), tmp_path / f"out{suffix}"
    out.write_text("before")
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_ROWS", 2)
    original, calls = predict_sequences, []

    def interrupted(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return original(*args, **more)

    monkeypatch.setattr(tcnca.inference.predict, "predict_sequences", interrupted)
    monkeypatch.setattr(tcnca.__main__, "_last_signal", 0.0)
    # A process in the background of a script ignores SIGINT.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: tcnca.__main__._terminate}
    previous = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        result = tcnca_predict(tmp_path / "model", data, "-o", out)
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
    assert result.exit_code == 128 + number
    partial = tmp_path / f"{out.name}.partial"
    assert f"stopped by {number.name}; 4 predictions saved in {partial}\n" in result.stderr
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model", out.name, partial.name, "rows.csv"])
    assert predictions_in(partial, suffix) == expected(load(tmp_path / "model"), TEXTS)[0][:4]


def predictions_in(path: Path, suffix: str) -> list[str]:
    if suffix == ".npz":
        with np.load(path) as arrays:
            assert len(arrays["probabilities"]) == len(arrays["labels"])
            return list(map(str, arrays["labels"]))
    text = path.read_text(encoding="utf-8")
    rows = read_csv(text) if suffix == ".csv" else [json.loads(line) for line in text.splitlines()]
    return [str(row["prediction"]) for row in rows]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".npz"])
def test_a_mistake_in_the_input_keeps_what_comes_before(suffix: str, tmp_path: Path) -> None:
    model = saved("classification", tmp_path / "model")
    data, out, partial = tmp_path / "rows.jsonl", tmp_path / f"out{suffix}", tmp_path / f"out{suffix}.partial"
    partial.write_text("of an earlier run")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]) + "{damaged\n" + json.dumps(ROWS[3]))
    result = tcnca_predict(tmp_path / "model", data, "-o", out)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {data}, line 4")
    assert result.stderr.endswith(f"; 3 predictions saved in {partial}\n")
    assert not out.exists()
    assert predictions_in(partial, suffix) == expected(model, TEXTS)[0][:3]


@pytest.mark.parametrize("values", [[float("nan")], [1e300], [0] * 65], ids=["nan", "large", "long"])
def test_values_that_do_not_fit_keep_what_comes_before(values: list[float], tmp_path: Path) -> None:
    """The first mistake of a file is named."""
    model = saved("regression", tmp_path / "model", "mega-full")  # reaches 64 time steps
    data, partial = tmp_path / "rows.jsonl", tmp_path / "out.csv.partial"
    data.write_text("".join(json.dumps({"values": each}) + "\n" for each in ([1, 2], [3], values)) + "{damaged\n")
    result = tcnca_predict(tmp_path / "model", data, "-o", tmp_path / "out.csv")
    assert result.stderr.startswith(f"Error: {data}, line 3")
    assert result.stderr.endswith(f"; 2 predictions saved in {partial}\n")
    found = [[float(row[f"prediction_{n}"]) for n in (1, 2)] for row in read_csv(partial.read_text())]
    assert_near(found, model.predict([[1.0, 2.0], [3.0]]).values, rtol=1e-5)


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_a_full_disk_keeps_what_was_predicted(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = saved("classification", tmp_path / "model"), tmp_path / f"out{suffix}"
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_ROWS", 2)
    data = write_csv(tmp_path / "rows.csv", [ROWS[1]] * 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400 if suffix == ".csv" else 100, hard))
    try:
        result = tcnca_predict(tmp_path / "model", data, "-o", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert f"Error: {out}: cannot be written (File too large)" in result.stderr
    partial = out.with_name(f"{out.name}.partial")
    if suffix == ".npz":  # it cannot be written, either
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.csv"]
        return
    rows = predictions_in(partial, suffix)
    assert result.stderr.endswith(f"; {len(rows)} predictions saved in {partial}\n")
    assert rows == expected(model, [TEXTS[1]] * len(rows))[0]
    assert len(rows) in (2, 4)
    predicted(tmp_path / "model", data, "-o", out)
    assert not partial.exists()


def test_a_stopped_command_has_printed_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("classification", tmp_path / "model")
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_ROWS", 2)
    fields, calls = tcnca.inference.writers._fields, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fields(*arguments)

    monkeypatch.setattr(tcnca.inference.writers, "_fields", interrupted)
    result = tcnca_predict(tmp_path / "model", write_csv(tmp_path / "rows.csv", ROWS))
    assert result.stderr == "\nstopped by SIGINT; 2 predictions printed\n"
    assert len(read_csv(result.stdout)) == 2


@pytest.mark.parametrize(("suffix", "field"), [(".csv", "other"), (".jsonl", "prediction")])
def test_a_row_that_does_not_fit_the_output_keeps_what_comes_before(suffix: str, field: str, tmp_path: Path) -> None:
    model, data = saved("classification", tmp_path / "model"), tmp_path / "rows.jsonl"
    rows: list[Any] = [*ROWS[:2], {**ROWS[2], field: 1}, *ROWS[3:]]
    data.write_text("\n".join(map(json.dumps, rows)))
    result = tcnca_predict(tmp_path / "model", data, "-o", tmp_path / f"out{suffix}")
    assert result.stderr.startswith(f"Error: {data}, line 3: expected")
    assert f"; 2 predictions saved in {tmp_path}/out{suffix}.partial" in result.stderr
    assert predictions_in(tmp_path / f"out{suffix}.partial", suffix) == expected(model, TEXTS)[0][:2]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".npz"])
def test_rows_of_a_write_that_was_interrupted_are_left_out(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, partial = saved("classification", tmp_path / "model"), tmp_path / f"out{suffix}.partial"
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_ROWS", 2)
    written: list[int] = []

    def interrupted(function: Any, limit: int) -> Any:
        def call(*arguments: Any) -> Any:
            written.append(1)
            if len(written) > limit:
                raise KeyboardInterrupt
            return function(*arguments)

        return call

    writers = tcnca.inference.writers
    monkeypatch.setattr(writers, "_fields", interrupted(writers._fields, 3))
    monkeypatch.setattr(writers._GrowingArray, "append", interrupted(writers._GrowingArray.append, 3))
    result = tcnca_predict(tmp_path / "model", write_csv(tmp_path / "rows.csv", ROWS), "-o", tmp_path / f"out{suffix}")
    assert f"; 2 predictions saved in {partial}" in result.stderr
    assert predictions_in(partial, suffix) == expected(model, TEXTS)[0][:2]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read when they are needed: never more than a block of them is ahead of what is written."""
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_ROWS", 4)
    model, out, ahead = saved("classification", tmp_path / "model"), io.StringIO(), []

    def lines() -> Iterator[str]:
        for number in range(50):
            ahead.append(number - max(out.getvalue().count("\n") - 1, 0))
            yield f"text {number}\n"

    monkeypatch.setattr(tcnca.inference.predict, "read_lines", lambda *_: lines())
    summary = predict_inputs(model, ["-"], stdin=io.BytesIO(), stdout=out)
    assert summary.count == 50
    assert max(ahead) <= 4


def test_blocks_are_limited_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by columns that are not predicted, and by long predictions."""
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_BYTES", 1000)
    sizes = []

    def counted(model: Any, sequences: Any, *arguments: Any, **more: Any) -> Any:
        sizes.append(len(sequences))
        return predict_sequences(model, sequences, *arguments, **more)

    monkeypatch.setattr(tcnca.inference.predict, "predict_sequences", counted)
    saved("classification", tmp_path / "model")
    data = write_csv(tmp_path / "rows.csv", [{"body": "a", "stars": "bad", "notes": "x" * 400}] * 9)
    predicted(tmp_path / "model", data, "-o", tmp_path / "out.csv")
    assert sizes == [3, 3, 3]
    sizes.clear()
    saved("forecast", tmp_path / "forecast")
    np.savez(tmp_path / "in.npz", values=np.zeros((4, 2, 2)))
    predicted(tmp_path / "forecast", tmp_path / "in.npz", "--steps", 100, "-o", tmp_path / "out.npy")
    assert sizes == [2, 2]


# Errors.


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "rows.csv", ROWS)
    write_csv(tmp_path / "other.csv", [{"txt": "a", "stars": "good"}])
    write_csv(tmp_path / "class.csv", [ROWS[0], {**ROWS[1], "stars": "wow"}])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("body,stars\n")
    (tmp_path / "latin.csv").write_bytes(b"body\nfine\ncaf\xe9\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "quote.csv").write_text('body\n"open\n')
    (tmp_path / "packed.csv").write_bytes(b"\x1f\x8b\x08\x00" + bytes(20))
    (tmp_path / "binary.dat").write_bytes(b"1")
    np.save(tmp_path / "three.npy", np.zeros((2, 5, 3)))
    np.save(tmp_path / "none.npy", np.zeros((0, 5, 2)))
    np.savez(tmp_path / "names.npz", a=np.zeros((2, 5, 2)))
    np.savez(tmp_path / "counts.npz", x=np.zeros((2, 5, 2)), y=np.zeros(3, int))
    np.savez(tmp_path / "lengths.npz", x=np.zeros((2, 5, 2)), n=np.array([1, 6]))
    np.savez(tmp_path / "nan.npz", x=np.full((1, 5, 2), np.nan))
    with zipfile.ZipFile(tmp_path / "header.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00 damaged")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not really")
    np.savez(tmp_path / "no.npz")
    np.savez(tmp_path / "real.npz", x=np.zeros((2, 5, 2)), y=np.zeros(2))
    (tmp_path / "gaps.jsonl").write_text('{"x": "1,5 2,5;2"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("classification", "nope.csv", "nope.csv: no such file; check the path"),
        ("classification", "nope.csv rows.csv", "nope.csv: no such file; check the path, or give texts that look like"),
        ("classification", "text nope.csv", "nope.csv: no such file; check the path"),
        (
            "classification",
            "text rows.csv",
            "INPUT: expected one file, or texts, got texts and the file rows.csv; give",
        ),
        ("classification", ".", ".: expected a file, got a folder"),
        ("classification", "other.csv", "other.csv: expected the column 'body', as in training, got 'txt', 'stars'"),
        ("classification", "rows.csv --text bdy", "rows.csv: did you mean 'body'? expected one of the columns"),
        ("classification", "empty.csv", "empty.csv: expected something to predict, got no rows"),
        ("classification", "latin.csv", "latin.csv, line 3: expected UTF-8, got byte 0xe9"),
        ("classification", "latin.txt", "latin.txt, line 1: expected UTF-8, got byte 0xe9"),
        ("classification", "quote.csv", "quote.csv, line 2: cannot be read"),
        ("classification", "packed.csv", "packed.csv: is compressed (gz); unpack it"),
        ("classification", "binary.dat", "binary.dat: expected one of .csv, .tsv"),
        ("classification", "rows.csv -o rows.csv", "--out: expected another file than the input"),
        ("classification", "rows.csv -o out.npy", "--out: expected a file that ends in .csv"),
        ("classification", "rows.csv -o model.csv", "--out: expected a file, got model.csv, which is something else"),
        ("classification", "rows.csv --steps 2", "--steps: expected a run that forecasts, got one of classification"),
        ("classification", "rows.csv class.csv", "INPUT: expected one file, or texts, got 2 files"),
        (
            "classification",
            "three.npy",
            "three.npy: array 'values': expected shape [examples, time] with whole numbers",
        ),
        ("classification", "rows.csv --best", "model: has no best checkpoint"),
        ("language", "rows.csv", "model: expected a model that predicts a class, values or a forecast, got a language"),
        ("signals", "rows.csv", "rows.csv: expected arrays (.npy, .npz), or a column 'x' with a list of numbers"),
        ("signals", "three.npy", "three.npy: array 'values': expected shape [examples, time, 2], 2 features as in"),
        ("signals", "none.npy", "none.npy: expected something to predict, got no rows"),
        ("signals", "names.npz", "names.npz: expected the array 'x', as in training, got 'a'"),
        ("signals", "counts.npz", "counts.npz: array 'y': expected 2 examples, as in 'x', got 3"),
        ("signals", "lengths.npz", "lengths.npz: n[1]: expected 1 to 5, the time steps of 'x', got 6"),
        ("signals", "nan.npz", "nan.npz: x[0], time step 0: expected finite float32 numbers"),
        ("signals", "header.npz", "header.npz: array 'x': cannot be read"),
        ("signals", "bad.npz", "bad.npz: cannot be read"),
        ("signals", "no.npz", "no.npz: cannot be read (expected arrays, got none); save it again with np.save"),
        (
            "signals",
            "real.npz",
            "real.npz: array 'y': expected integers, booleans or strings of shape [examples] as labels, got float64 of "
            "shape (2,); name another array with --label, or give --label '' to predict without comparing",
        ),
        ("signals", "1,2", "INPUT, line 1: expected a JSON list with the 2 features of each time step, such as"),
        ("signals", "1,2,x", "INPUT, line 1: expected numbers with commas or spaces between them"),
        ("signals", "1,,3", "INPUT, line 1: expected numbers with commas or spaces between them, or a JSON list, got"),
        ("signals", "1,2,", "INPUT, line 1: expected numbers with commas or spaces between them, or a JSON list, got"),
        ("signals", "1,5;2,5", "INPUT, line 1: expected one separator between the numbers, got ',', ';' in '1,5;2,5'"),
        ("signals", "gaps.jsonl", "gaps.jsonl, line 1: expected one separator between the numbers, got ' ', ',', ';'"),
        ("signals", "rows.csv --text body", "--text: expected none for rows.csv, got 'body'; leave it out"),
        ("signals", "three.npy --lengths n", "--lengths: expected none for three.npy, got 'n'; leave it out"),
        ("classification", "rows.csv --second body", "--second: expected none for rows.csv, got 'body'; leave it"),
        ("classification", "some_text --label stars", "--label: expected none for INPUT, got 'stars'; leave it out"),
        ("forecast", "three.npy --label y", "--label: expected none for three.npy, got 'y'; leave it out"),
        ("pairs", "alone", "INPUT: expected two texts for each pair, since the model compares pairs, got 1"),
        ("regression", "three.npy", "three.npy: array 'values': expected shape [examples, time, 1], 1 feature as in"),
    ],
)
def test_errors(kind: str, arguments: str, message: str, place: Path) -> None:
    saved(kind, place / "model")
    (place / "model.csv").mkdir()
    before = sorted(path.name for path in place.iterdir())
    result = tcnca_predict("model", *arguments.split())
    assert result.exit_code == 1
    assert f"Error: {message}" in " ".join(result.stderr.split("\n")), result.stderr
    assert sorted(path.name for path in place.iterdir()) == before


def test_a_table_without_rows_gives_its_header(tmp_path: Path) -> None:
    saved("classification", tmp_path / "model")
    (tmp_path / "in.csv").write_text("id;body;stars\n\n")
    for suffix, content in {"csv": "id;body;stars;prediction\n", "jsonl": ""}.items():
        out = tmp_path / f"out.{suffix}"
        result = tcnca_predict(tmp_path / "model", tmp_path / "in.csv", "-o", out, "--no-probabilities")
        assert (result.exit_code, out.read_text()) == (0, content), result.stderr
        assert result.stderr == f"the input has a header, but no rows to predict\nwrote 0 predictions to {out}\n"
    assert tcnca_predict(tmp_path / "model", tmp_path / "in.csv", "-o", tmp_path / "out.npz").exit_code == 0
    assert np.load(tmp_path / "out.npz")["probabilities"].shape == (0, 3)
    (tmp_path / "in.csv").write_text("id,txt\n")
    assert "expected the column 'body'" in tcnca_predict(tmp_path / "model", tmp_path / "in.csv").stderr
    saved("forecast", tmp_path / "forecast")
    (tmp_path / "in.csv").write_text("id,values\n")
    expected = "index,id,step,prediction_1,prediction_2\n"
    assert predicted(tmp_path / "forecast", tmp_path / "in.csv") == expected


def test_lengths_with_another_name(tmp_path: Path) -> None:
    run, data = tmp_path / "model", tmp_path / "x.npz"
    saved("signals", run)  # its lengths were the array "n"
    x, n = np.random.default_rng(0).normal(size=(2, 9, 2)), np.array([3, 9])
    np.savez(data, x=x, n=n)
    expected = predicted(run, data)
    np.savez(data, x=x, lengths=n)
    assert predicted(run, data) == expected
    np.savez(data, x=x, sizes=n, other=np.array([{}, {}]))
    assert predicted(run, data, "--lengths", "sizes") == expected
    result = tcnca_predict(run, data)
    assert result.stdout != expected
    assert result.stderr == (
        f"warning: {data}: expected the lengths of the sequences in the array 'n', as in training, got none, so that "
        "padding is read as data; name their array with --lengths (is it 'sizes'?), or give --lengths '' if there is "
        "no padding\n"
    )
    assert tcnca_predict(run, data, "--lengths", "").stderr == ""
    assert "did you mean 'sizes'?" in tcnca_predict(run, data, "--lengths", "size").stderr
    saved("signals", run, columns={})  # a model from Python
    np.savez(data, values=x, sizes=n, weights=x[:, 0, 0])
    assert "--lengths (is it 'sizes'?)" in tcnca_predict(run, data).stderr
    saved("signals", run, columns={"values": "values"})  # trained without lengths
    assert tcnca_predict(run, data).stderr == ""


def test_sequences_beyond_a_position_bias_are_named(tmp_path: Path) -> None:
    saved("regression", tmp_path / "model", "mega-full")  # reaches 64 time steps
    np.save(tmp_path / "long.npy", np.zeros((2, 65)))
    result = tcnca_predict(tmp_path / "model", tmp_path / "long.npy")
    assert "long.npy: values[0]: expected at most 64 tokens or time steps" in result.stderr
    assert result.exit_code == 1


def test_empty_texts_and_missing_runs(tmp_path: Path) -> None:
    saved("classification", tmp_path / "model")
    assert "INPUT: expected a text or a file, got an empty text" in tcnca_predict(tmp_path / "model", " ").stderr
    assert "expected something to predict" in tcnca_predict(tmp_path / "model", "-", input="").stderr
    assert "expected a run directory or a saved model" in tcnca_predict(tmp_path / "nope", "text").stderr
    save(small_model(dtype=torch.float32), tmp_path / "plain")  # a language model from Python
    assert "continue a text with `tcnca generate`" in tcnca_predict(tmp_path / "plain", "text").stderr


def test_rows_do_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, text in ((True, "a\\x1b[2J\\x9bb\n"), (False, "a\x1b[2J\x9bb\n")):
        screen = io.StringIO()
        monkeypatch.setattr("sys.stdout", screen)
        monkeypatch.setattr(screen, "isatty", terminal.__bool__)
        open_stdout().write("a\x1b[2J\x9bb\n")
        assert screen.getvalue() == text
