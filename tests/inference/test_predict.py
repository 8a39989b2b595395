"""`tcnca predict`: the rows of the input with predictions, in their order, for every kind of task and file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import tcnca.inference.predict
import tcnca.inference.readers
from tcnca import Preprocessing, RegressionHeadConfig, SequenceModel, ValueInputConfig, load, save
from tcnca.cli import app
from tcnca.errors import format_score
from tcnca.inference import PredictOptions, predict_inputs
from tcnca.models.prediction import predict_sequences
from tcnca.training import evaluate_run, load_recipe
from tests.examples import small_config
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
    np.savez(tmp_path / "x.npz", x=x, y=[[("cat", "dog").index(label)] for label in labels or []])
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
    assert "accuracy 0.6667 (of 6), 95 % interval 0.300 to 0.903" in result.stderr


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
    for line in ("1;2.5", "1 ;\t2.5", " 1 ,2.5 ", "1 2.5", "1\t2.5"):
        (row,) = read_csv(predicted(tmp_path / "model", "-", input=line))
        assert_near(float(row["prediction_1"]), values[0, 0], rtol=1e-5)
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
    rows[0]["truth"][1] = None  # as in evaluation, a missing value is not counted
    rows[1]["truth"] = "nan, nan"
    data.write_text("\n".join(map(json.dumps, rows)))
    assert "mean squared error 1.0000 (of 1)" in tcnca_predict(tmp_path / "model", data, "--label", "truth").stderr
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
