"""`tcnca predict`: the rows of the input with predictions, in their order, for every kind of task and file."""

from __future__ import annotations

import csv
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
from typer.testing import CliRunner, Result

import tcnca.__main__
import tcnca.inference.predict
import tcnca.inference.readers
import tcnca.inference.writers
from tcnca import Preprocessing, RegressionHeadConfig, SequenceModel, ValueInputConfig, load, save
from tcnca.cli import app
from tcnca.cli.reporting import open_stdout
from tcnca.errors import format_score
from tcnca.inference import PredictOptions, predict_inputs
from tcnca.models.prediction import predict_sequences
from tcnca.training import evaluate_run, load_recipe
from tests.examples import small_config, small_model
from tests.inference.models import assert_near, saved
from tests.training.tiny import MODEL, TinyTrainer

runner = CliRunner()
TEXTS = ['dull, but\n"fine"', "great; really", "a long text " * 9, "", "ünïcode", "a\rb"]
ROWS = [{"id": str(number), "body": text, "stars": "good"} for number, text in enumerate(TEXTS)]


def tcnca_predict(*arguments: Any, **more: Any) -> Result:
    return runner.invoke(app, ["predict", *map(str, arguments), "--device", "cpu"], **more)


def predicted(*arguments: Any, **more: Any) -> str:
    """Return what the command prints to standard output."""
    result = tcnca_predict(*arguments, **more)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(text: str, delimiter: str = ",") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))


def expected(model: SequenceModel, texts: list[str]) -> tuple[list[str], Any]:
    found = model.predict(texts)
    assert found.labels is not None
    return found.labels, np.asarray(found.probabilities)


# Runs of `tcnca train`.


def train(folder: Path, recipe: str, *changes: str) -> Path:
    """Train a tiny model for a few steps."""
    small = ["max_steps=6", "batch.size=8", "eval.every=3", "eval.batch_size=3"]
    wanted = load_recipe(recipe).override([*small, *MODEL, *changes])
    TinyTrainer(folder, wanted).fit()
    return folder


def test_a_trained_run_predicts_what_evaluation_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = {"bad": ["dull", "poor"], "good": ["great", "fine"]}
    rows = [
        {
            "part": ("train", "train", "valid", "test")[number % 4],
            "stars": (label := ["bad", "good"][number // 4 % 2]),
            "body": " ".join(rng.choice(words[label], rng.integers(1, 12))),
        }
        for number in range(96)
    ]
    data = write_csv(tmp_path / "reviews.csv", rows)
    columns = ["data.custom.text=body", "data.custom.label=stars", "data.custom.split=part"]
    run = train(tmp_path / "run", "classify", f"data={data}", *columns, "data.task.max_length=20", "eval.chunk_size=4")
    test = [row for row in rows if row["part"] == "test"]
    result = tcnca_predict(run, write_csv(tmp_path / "test.csv", test))
    assert result.exit_code == 0, result.stderr
    score = evaluate_run(run, split="test", device="cpu", verbose=False)
    assert f"accuracy {score.value:.4f} (of {score.count})" in result.stderr
    answers = read_csv(result.stdout)
    assert [{name: row[name] for name in test[0]} for row in answers] == test
    right = [row["prediction"] == row["stars"] for row in answers]
    assert sum(right) / len(right) == score.value
    assert "to 20, as in training (max_length)" in result.stderr
    model = load(run)
    assert model.config.attention is not None
    assert model.config.attention.chunk_size == 4
    chances = [[float(row[f"probability_{name}"]) for name in ("bad", "good")] for row in answers]
    assert_near(chances, expected(model, [row["body"] for row in test])[1], atol=1e-6)
    best = evaluate_run(run, split="test", best=True, device="cpu", verbose=False)
    assert f"accuracy {best.value:.4f}" in tcnca_predict(run, tmp_path / "test.csv", "--best").stderr


def test_a_run_that_is_not_finished_has_its_last_checkpoint(tmp_path: Path) -> None:
    models = {}
    for step, name in enumerate(("best", "between", "last"), 9):
        models[name] = saved("classification", tmp_path / f"checkpoints/step-{step:09}", class_names=(name, "b", "c"))
        (tmp_path / f"checkpoints/step-{step:09}/state.json").touch()
    (tmp_path / "checkpoints/best.json").write_text('{"checkpoint": "step-000000009", "score": 1}')
    assert load(tmp_path).preprocessing == models["last"].preprocessing
    assert load(tmp_path, best=True).preprocessing == models["best"].preprocessing


@pytest.mark.parametrize("recipe", ["classify", "regress", "forecast"])
def test_trained_runs_of_arrays(recipe: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(50, 9, (24, 10, 2)).astype(np.float32)
    targets = {"classify": {"labels": x[:, 0, 0] > 50}, "regress": {"targets": x.sum(1)}, "forecast": {}}[recipe]
    arrays: dict[str, Any] = {
        f"{split}_signal": x[part] for split, part in (("train", slice(16)), ("test", slice(16, 24)))
    }
    for name, values in targets.items():
        arrays |= {f"train_{name}": values[:16], f"test_{name}": values[16:]}
    np.savez(tmp_path / "all.npz", **arrays)
    np.savez(tmp_path / "test.npz", signal=x[16:], **{name: values[16:] for name, values in targets.items()})
    run = train(tmp_path / "run", recipe, f"data={tmp_path / 'all.npz'}", "data.custom.values=signal")
    result = tcnca_predict(run, tmp_path / "test.npz", "-o", tmp_path / "out.npz")
    assert result.exit_code == 0, result.stderr
    if recipe != "forecast":
        score = evaluate_run(run, split="test", device="cpu", verbose=False)
        assert f"{score.metric} {format_score(score.value)} (of {score.count})" in result.stderr
    found = dict(np.load(tmp_path / "out.npz"))
    answers = load(run).predict(x[16:])
    for name, values in found.items():
        if name == "classes":
            assert values.tolist() == ["false", "true"]
        elif name == "labels":
            assert values.tolist() == answers.labels
        else:
            assert_near(values, getattr(answers, name), rtol=1e-5)
    assert set(found) == ({"classes", "labels", "probabilities"} if recipe == "classify" else {"values"})


# Tables.


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rows_are_kept_in_order(delimiter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcnca.inference.predict, "_BLOCK_ROWS", 2)
    model = saved("classification", tmp_path / "model")
    suffix = ".tsv" if delimiter == "\t" else ".csv"
    data = write_csv(tmp_path / f"rows{suffix}", ROWS, delimiter)
    labels, chances = expected(model, TEXTS)
    for text in (
        predicted(tmp_path / "model", data),
        predicted(tmp_path / "model", data, "-o", tmp_path / f"out{suffix}")
        or (tmp_path / f"out{suffix}").read_bytes().decode(),
    ):
        rows = read_csv(text, delimiter)
        assert list(rows[0]) == [*ROWS[0], "prediction", *(f"probability_{name}" for name in ("bad", "fair", "good"))]
        assert [{name: row[name] for name in ROWS[0]} for row in rows] == ROWS
        assert [row["prediction"] for row in rows] == labels
        got = [[float(row[f"probability_{name}"]) for name in ("bad", "fair", "good")] for row in rows]
        assert_near(got, chances, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_json_lines_keep_their_types(tmp_path: Path) -> None:
    model = saved("classification", tmp_path / "model")
    rows = [{"body": text, "tags": [1, {"a": None}], "stars": None} for text in TEXTS]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    labels, chances = expected(model, TEXTS)
    result = tcnca_predict(tmp_path / "model", data)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert "accuracy" not in result.stderr  # no labels
    for row, before, label, chance in zip(found, rows, labels, chances, strict=True):
        assert row.pop("prediction") == label
        assert list(row["probabilities"]) == ["bad", "fair", "good"]
        assert_near(list(row.pop("probabilities").values()), chance, atol=1e-6)
        assert row == before
    text = predicted(tmp_path / "model", data, "--no-probabilities", "-o", tmp_path / "out.csv")
    assert text == ""
    table = read_csv((tmp_path / "out.csv").read_text(encoding="utf-8"))
    assert [json.loads(row["tags"]) for row in table] == [row["tags"] for row in rows]
    assert list(table[0]) == ["body", "tags", "stars", "prediction"]


def test_columns_with_other_names_and_an_earlier_prediction(tmp_path: Path) -> None:
    saved("classification", tmp_path / "model")
    data = write_csv(tmp_path / "rows.csv", [{"prediction": "x", "words": "a b", "truth": "bad"}])
    options = ("--text", "words", "--label", "truth", "--no-probabilities")
    result = tcnca_predict(tmp_path / "model", data, *options)
    assert list(read_csv(result.stdout)[0]) == ["prediction", "words", "truth", "prediction_2"]
    assert "accuracy" in result.stderr
    # Without facts about columns, usual names are found.
    saved("classification", tmp_path / "other", columns={})
    data = write_csv(tmp_path / "rows.csv", [{"id": "1", "Text": "a b"}])
    assert read_csv(predicted(tmp_path / "other", data))[0]["Text"] == "a b"


def test_pairs(tmp_path: Path) -> None:
    model = saved("pairs", tmp_path / "model")
    data = write_csv(tmp_path / "rows.csv", [{"two": "x y", "one": "a"}, {"two": "z", "one": "b c d"}])
    labels = model.predict(["a", "b c d"], ["x y", "z"]).labels
    assert [row["prediction"] for row in read_csv(predicted(tmp_path / "model", data))] == labels
    lines = predicted(tmp_path / "model", "-", input="a\tx y\nb c d\tz\n")
    assert [row["prediction"] for row in read_csv(lines)] == labels
    rows = read_csv(predicted(tmp_path / "model", "a", "x y", "b c d", "z"))
    assert [(row["text"], row["second"], row["prediction"]) for row in rows] == [
        ("a", "x y", (labels or [])[0]),
        ("b c d", "z", (labels or [])[1]),
    ]


def test_integers_are_the_indices_of_named_classes(tmp_path: Path) -> None:
    model = saved("signals", tmp_path / "model", class_names=("cat", "dog"))
    x = np.random.default_rng(0).normal(5, 2, (6, 5, 2))
    labels = model.predict(x).labels
    np.savez(tmp_path / "x.npz", x=x, y=[("cat", "dog").index(label) for label in labels or []])
    assert "accuracy 1.0000 (of 6)" in tcnca_predict(tmp_path / "model", tmp_path / "x.npz").stderr
    np.savez(tmp_path / "x.npz", x=x, y=[2, *[0] * 5])
    result = tcnca_predict(tmp_path / "model", tmp_path / "x.npz")
    assert "x.npz: y[0]: expected one of 'cat', 'dog', got '2'" in result.stderr


def test_unknown_classes_count_as_wrong(tmp_path: Path) -> None:
    model = saved("classification", tmp_path / "model")
    labels, _ = expected(model, TEXTS)
    rows = [{"body": text, "stars": label} for text, label in zip(TEXTS, labels, strict=True)]
    rows[1]["stars"], rows[3]["stars"] = "wow\x1b", "other"
    result = tcnca_predict(tmp_path / "model", write_csv(tmp_path / "rows.csv", rows))
    assert result.exit_code == 0
    assert len(read_csv(result.stdout)) == len(rows)
    assert result.stderr.startswith("warning: 2 labels outside the classes of the model, counted as wrong; the first: ")
    assert "rows.csv, line 4, column 'stars': expected one of 'bad', 'fair', 'good', got 'wow\\x1b'" in result.stderr
    assert "accuracy 0.6667 (of 6)" in result.stderr


def test_threads_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("classification", tmp_path / "model")
    used, before = [], torch.get_num_threads()

    def counted(*args: Any, **more: Any) -> Any:
        used.append(torch.get_num_threads())
        return predict_sequences(*args, **more)

    monkeypatch.setattr(tcnca.inference.predict, "predict_sequences", counted)
    predicted(tmp_path / "model", "a text", "--threads", before + 1)
    assert (used, torch.get_num_threads()) == ([before + 1], before)
    assert tcnca_predict(tmp_path / "model", "a text", "--threads", 0).exit_code == 2


def test_labels_are_not_compared_on_request(tmp_path: Path) -> None:
    saved("classification", tmp_path / "model")
    data = write_csv(tmp_path / "rows.csv", [{"body": "a b", "stars": "unknown"}])
    result = tcnca_predict(tmp_path / "model", data, "--label", "", "-o", "-")
    assert read_csv(result.stdout)[0]["stars"] == "unknown"
    assert result.stderr == ""  # no accuracy, and in a pipe no progress
    saved("signals", tmp_path / "signals")
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 5, 2)), y=[7, 8])
    assert tcnca_predict(tmp_path / "signals", tmp_path / "x.npz", "--label", "").exit_code == 0


# Lines and texts.


def test_texts_and_standard_input(tmp_path: Path) -> None:
    model = saved("classification", tmp_path / "model")
    texts = ["a great film", "dull"]
    labels = model.predict(texts).labels
    assert [row["prediction"] for row in read_csv(predicted(tmp_path / "model", *texts))] == labels
    text = predicted(tmp_path / "model", "-", input="\n".join([*texts, ""]))
    assert [(row["text"], row["prediction"]) for row in read_csv(text)] == list(zip(texts, labels or [], strict=True))
    text = predicted(tmp_path / "model", "-", "--format", "jsonl", input='{"body": "dull"}')
    assert json.loads(text)["prediction"] == (labels or [])[1]
    lines = tmp_path / "lines.txt"
    lines.write_text("dull\r\n\r\na great film\n\n")
    rows = read_csv(predicted(tmp_path / "model", lines))
    assert [row["text"] for row in rows] == ["dull", "", "a great film", ""]
    assert [row["prediction"] for row in rows] == model.predict(["dull", "", "a great film", ""]).labels
    assert read_csv(predicted(tmp_path / "model", "-", input="a\n\nb\n"))[1]["text"] == ""


def test_texts_can_have_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("classification", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").mkdir()
    rows = read_csv(predicted("model", "good", "bad"))
    assert [(row["text"], row["prediction"]) for row in rows] == list(
        zip(("good", "bad"), model.predict(["good", "bad"]).labels or [], strict=True)
    )


def test_texts_are_predicted_as_they_are_given(tmp_path: Path) -> None:
    """Also if they have line ends and tabs, or are longer than the name of a file can be."""
    texts, out = ["long " * 100, "a\nb\r\n\nc\td\n"], tmp_path / "out.csv"
    model = saved("classification", tmp_path / "model")
    out.write_text("an earlier result")
    predicted(tmp_path / "model", *texts, "-o", out)
    rows = read_csv(out.read_bytes().decode())
    assert [row["text"] for row in rows] == texts
    chances = [[float(row[f"probability_{name}"]) for name in ("bad", "fair", "good")] for row in rows]
    assert_near(chances, expected(model, texts)[1], atol=1e-6)
    pairs = saved("pairs", tmp_path / "pairs")
    row = read_csv(predicted(tmp_path / "pairs", "a\tb\nc", "d\n"))[0]
    assert (row["text"], row["second"]) == ("a\tb\nc", "d\n")
    chance = np.asarray(pairs.predict("a\tb\nc", "d\n").probabilities)[0, 1]
    assert float(row["probability_yes"]) == pytest.approx(chance, abs=1e-6)


def test_lines_of_numbers(tmp_path: Path) -> None:
    model = saved("regression", tmp_path / "model")
    values = np.asarray(model.predict([[1.0, 2.5], [3.0]]).values)
    rows = read_csv(predicted(tmp_path / "model", "-", input="1, 2.5\n[3]\n"))
    assert rows[0]["values"] == "1, 2.5"
    assert_near([[float(row[f"prediction_{n}"]) for n in (1, 2)] for row in rows], values, rtol=1e-5)
    text = predicted(tmp_path / "model", "-", "--format", "jsonl", input='{"values": [1, 2.5], "id": 3}')
    assert list(json.loads(text)) == ["values", "id", "prediction"]


def test_rows_of_numbers_are_compared_on_request(tmp_path: Path) -> None:
    model = saved("regression", tmp_path / "model")
    values = np.asarray(model.predict([[1.0, 2.5], [3.0]]).values)
    rows = [
        {"values": [1, 2.5], "truth": (values[0] + 1).tolist()},
        {"values": "3", "truth": (values[1] - 3).tolist()},
        {"values": [3], "truth": None},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    assert "mean squared error 5.0000 (of 4)" in tcnca_predict(tmp_path / "model", data, "--label", "truth").stderr
    assert "mean" not in tcnca_predict(tmp_path / "model", data).stderr
    data.write_text('{"values": [1], "truth": [1, 2, 3]}')
    result = tcnca_predict(tmp_path / "model", data, "--label", "truth")
    assert "line 1, column 'truth': expected 2 numbers, as in training, got 3" in result.stderr
    saved("signals", tmp_path / "signals")
    data.write_text('{"x": [[1, 2]], "truth": 0}\n{"x": [[1, 2]], "truth": "1"}')
    assert "accuracy 0.5000 (of 2)" in tcnca_predict(tmp_path / "signals", data, "--label", "truth").stderr


def test_lines_are_answered_as_they_come(tmp_path: Path) -> None:
    """With a batch of one, before the next line is read."""
    model, out = saved("classification", tmp_path / "model"), io.StringIO()

    class Lines(io.RawIOBase):
        """Gives one line for each call, and notes how much was answered before."""

        def __init__(self) -> None:
            self.answered: list[int] = []

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            self.answered.append(out.getvalue().count("line"))
            if len(self.answered) > 3:
                return 0
            buffer[:5] = b"line\n"
            return 5

    lines = Lines()
    stdin = io.BufferedReader(lines, 1)
    predict_inputs(model, ["-"], PredictOptions(batch_size=1), stdin=stdin, stdout=out)
    assert lines.answered == [0, 1, 2, 3]


# Arrays and forecasts.


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_in_blocks(compress: bool, order: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcnca.inference.readers, "_BLOCK", 500)
    model = saved("signals", tmp_path / "model")
    x = np.random.default_rng(0).normal(5, 2, (9, 7, 2))
    n = np.array([7, 1, 3, 7, 7, 2, 5, 6, 7])
    x[1, 1:] = np.nan  # padding may hold anything
    (np.savez_compressed if compress else np.savez)(tmp_path / "in.npz", x=np.asarray(x, order=order), n=n, y=n % 2)
    result = tcnca_predict(tmp_path / "model", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert result.exit_code == 0, result.stderr
    answers = model.predict([row[:length] for row, length in zip(x, n, strict=True)])
    found = np.load(tmp_path / "out.npz")
    assert found["labels"].dtype == np.int64
    assert found["labels"].astype(str).tolist() == answers.labels
    assert_near(found["probabilities"], answers.probabilities, atol=1e-6)
    right = float(np.mean(found["labels"] == n % 2))
    assert f"accuracy {right:.4f} (of 9)" in result.stderr
    rows = read_csv(predicted(tmp_path / "model", tmp_path / "in.npz"))
    assert [row["index"] for row in rows] == [str(index) for index in range(9)]


def test_an_array_alone(tmp_path: Path) -> None:
    model = saved("regression", tmp_path / "model")
    x = np.random.default_rng(0).normal(5, 2, (4, 6))
    np.save(tmp_path / "in.npy", x)
    predicted(tmp_path / "model", tmp_path / "in.npy", "-o", tmp_path / "out.npy")
    assert_near(np.load(tmp_path / "out.npy"), model.predict(x).values, rtol=1e-5)
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 4), np.uint8)
    model = saved("image", tmp_path / "image")
    np.save(tmp_path / "in.npy", images)
    rows = read_csv(predicted(tmp_path / "image", tmp_path / "in.npy"))
    assert [row["prediction"] for row in rows] == model.predict(images).labels


def test_forecasts_have_as_many_steps_as_asked(tmp_path: Path) -> None:
    model = saved("forecast", tmp_path / "model")
    series = np.random.default_rng(0).normal(5, 2, (50, 2))
    values = np.asarray(model.predict(series, steps=6).values)
    np.save(tmp_path / "series.npy", series)
    rows = read_csv(predicted(tmp_path / "model", tmp_path / "series.npy", "--steps", 6))
    assert [(row["index"], row["step"]) for row in rows] == [("0", str(step)) for step in range(1, 7)]
    assert_near([[float(row[f"prediction_{n}"]) for n in (1, 2)] for row in rows], values[0], rtol=1e-5)
    np.savez(tmp_path / "many.npz", values=np.stack([series, series[::-1]]), lengths=np.array([50, 20]))
    predicted(tmp_path / "model", tmp_path / "many.npz", "--steps", 6, "-o", tmp_path / "out.npz")
    found = np.load(tmp_path / "out.npz")["values"]
    assert found.shape == (2, 6, 2)
    assert_near(found[0], values[0], rtol=1e-4)
    assert_near(found[1], np.asarray(model.predict(series[::-1][:20], steps=6).values)[0], rtol=1e-4)
    text = predicted(tmp_path / "model", "-", "--format", "jsonl", input=json.dumps({"values": series.tolist()}))
    assert_near(json.loads(text)["prediction"], values[0, :1], rtol=1e-5)


def test_series_of_one_feature_are_read_alike_from_every_file(tmp_path: Path) -> None:
    config = small_config(input=ValueInputConfig(), head=RegressionHeadConfig(outputs=1, pooling="none"))
    model = SequenceModel(config, Preprocessing(task="forecast")).eval()
    save(model, tmp_path / "model")
    series = np.random.default_rng(0).normal(5, 2, (3, 8))
    for array, count in ((series, 3), (series[0], 1), (series[0, :, None], 1), (series[..., None], 3)):
        np.save(tmp_path / "series.npy", array)
        np.savez(tmp_path / "series.npz", values=array)
        want = np.asarray(model.predict(array, steps=2).values)
        assert want.shape == (count, 2, 1)
        for name in ("series.npy", "series.npz"):
            predicted(tmp_path / "model", tmp_path / name, "--steps", 2, "-o", tmp_path / "out.npy")
            assert_near(np.load(tmp_path / "out.npy"), want, rtol=1e-4)


def test_forecasts_of_a_table_keep_its_columns(tmp_path: Path) -> None:
    saved("forecast", tmp_path / "model", columns={"values": "x"})
    data = tmp_path / "series.jsonl"
    data.write_text('{"id": "a", "x": [[1, 2], [3, 4]], "step": 7}\n{"id": "b", "x": [[1, 2]], "step": 8}\n')
    predicted(tmp_path / "model", data, "--steps", 2, "-o", tmp_path / "out.csv")
    rows = read_csv((tmp_path / "out.csv").read_text())
    assert list(rows[0]) == ["index", "id", "step", "step_2", "prediction_1_2", "prediction_2_2"]
    found = [(row["index"], row["id"], row["step"], row["step_2"]) for row in rows]
    assert found == [("0", "a", "7", "1"), ("0", "a", "7", "2"), ("1", "b", "8", "1"), ("1", "b", "8", "2")]


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
        ("signals", "1,2", "INPUT, line 1: expected a JSON list with the 2 features of each time step, such as"),
        ("signals", "1,2,x", "INPUT, line 1: expected numbers with commas or spaces between them"),
        ("signals", "rows.csv --text body", "--text: expected none for rows.csv, got 'body'; leave it out"),
        ("signals", "three.npy --lengths n", "--lengths: expected none for three.npy, got 'n'; leave it out"),
        ("classification", "rows.csv --second body", "--second: expected none for rows.csv, got 'body'; leave it"),
        ("classification", "some_text --label stars", "--label: expected none for INPUT, got 'stars'; leave it out"),
        ("forecast", "three.npy --label y", "--label: expected none for three.npy, got 'y'; leave it out"),
        ("pairs", "alone", "INPUT: expected two texts for each pair, since the model compares pairs, got 1"),
        ("regression", "three.npy", "three.npy: array 'values': expected shape [examples, time, 1]"),
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
