"""What trained models are used on: files to predict, prompts and texts to score, and the models themselves."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tcnca import SequenceModel
from tcnca.inference import PredictOptions, predict_inputs
from tests.data.helpers import zipped
from tests.fuzz import payloads
from tests.fuzz.subject import Attack, Subject, changed, command, entries, entry, fifo, linked, use_each, written
from tests.inference.models import saved

_KINDS = {
    "rows.csv": "classification",
    "rows.jsonl": "classification",
    "lines.txt": "classification",
    "pairs.tsv": "pairs",
    "numbers.jsonl": "regression",
    "signals.npz": "signals",
    "series.npy": "forecast",
    "series.csv": "forecast",
    "sequences.csv": "regression",
}
_COLUMNS: dict[str, dict[str, Any]] = {
    "forecast": {"value_columns": ("heat", "rain")},
    "regression": {"value_columns": ("a", "b", "c")},
}


@functools.cache
def _model(kind: str) -> SequenceModel:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return saved(kind, Path(folder), **_COLUMNS.get(kind, {}))


def _make_inputs() -> None:
    rng = np.random.default_rng(0)
    Path("rows.csv").write_text("id,body,stars\n" + 'a,"some, text",good\n' * 9, encoding="utf-8")
    Path("lines.txt").write_text("a line\n" * 9, encoding="utf-8")
    Path("pairs.tsv").write_text("one\ttwo\n" + "a text\tanother\n" * 9, encoding="utf-8")
    rows = [json.dumps({"body": f"text {n}", "stars": "bad", "more": [n]}) for n in range(9)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    Path("numbers.jsonl").write_text('{"values": [1, 2.5, -3e4]}\n' * 9, encoding="utf-8")
    arrays = {"x": rng.normal(size=(9, 6, 2)), "y": np.arange(9) % 2, "n": np.full(9, 5)}
    np.savez("signals.npz", allow_pickle=False, **arrays)
    np.save("series.npy", rng.normal(size=(50, 2)))
    Path("series.csv").write_text("date;rain;heat\n" + "".join(f"{n}:00;{n},5;{n}\n" for n in range(50)))
    Path("sequences.csv").write_text("id,a,b,c\n" + "#1,1,2.5,-3e4\n" * 9)


def _predict(name: str) -> None:
    if name in _KINDS:
        suffix = ".npz" if name.startswith("s") and name.endswith(("npy", "npz")) else ".jsonl"
        predict_inputs(_model(_KINDS[name]), [name], PredictOptions(out=Path(f"out-{name}{suffix}")))


def _predict_all() -> None:
    use_each(entries(), _predict)


_INPUTS: list[Attack] = [
    written("rows.csv", ("body," + ",".join(f"c{n}" for n in range(20_000)) + "\n" + "a" + "," * 20_000).encode()),
    written("rows.csv", b'body,stars\n"' + b"x" * 10**6),
    written("rows.csv", b"body,stars\n" + b"a\0,good\n" * 30),
    written("rows.csv", b"body,prediction,probability_bad\na,b,c\n"),
    written("rows.jsonl", b'{"body": "a", "more": ' + b"[" * 100_000 + b"\n"),
    written("rows.jsonl", b'{"body": "\\ud800", "more": NaN}\n'),
    written("rows.jsonl", b'{"body": "a"}\n{"body": "a", "prediction": 1}\n'),
    written("numbers.jsonl", b'{"values": [[1, 2], [3]]}\n'),
    written("numbers.jsonl", b'{"values": [1e999, NaN]}\n'),
    written("numbers.jsonl", b'{"values": ' + b"9" * 5_000 + b"}\n"),
    written("numbers.jsonl", b'{"values": {"a": 1}}\n{"values": null}\n'),
    written("series.csv", b"heat,rain\n" + b"1,2\n" * 10**5 + b"1,1e999\n"),
    written("series.csv", b"1,2\n" * 9 + b"1\0,2\n"),
    written("series.csv", b"heat;rain\n1,5;2\n1.5;2\n"),
    written("sequences.csv", b"a,b,c\n1,2," + b"9" * 10**6),
    written("sequences.csv", b"a,b,c\n1,2,3\n\n1_0,2,3\n"),
    written("sequences.csv", b'"a\n",b,c\n1,2,3\n'),
    written("lines.txt", b"\n" * 10**4),
    written("lines.txt", b"a\0b\x85c\xe2\x80\xa8d\n"),
    written("pairs.tsv", b"one\ttwo\n" + b"\t" * 10**5),
    written("series.npy", lambda: payloads.object_array(0)),
    written("series.npy", lambda: payloads.npy("<f4", (10**12,))),
    written("series.npy", lambda: payloads.npy("<c8", (3, 2), bytes(48))),
    written("signals.npz", lambda: payloads.zip_bomb("x.npy", payloads.npy("<f4", (2**26, 5, 2)))),
    written("signals.npz", lambda: zipped({"x.npy": payloads.npy("<f4", (2**40, 0, 2))})),
    written("signals.npz", lambda: payloads.pickled(0)),
    fifo("rows.csv"),
    fifo("signals.npz"),
    linked("lines.txt", "zeros without end"),
    linked("series.npy", "zeros without end"),
    linked(".out-rows.csv.jsonl", "a file outside"),
]


def _make_uses() -> None:
    saved("classification", Path("classifier"), max_length=50)
    saved("forecast", Path("forecast"), **_COLUMNS["forecast"])
    saved("language", Path("language"))
    _make_inputs()
    for name in set(_KINDS) - {"rows.csv", "series.csv"}:
        Path(name).unlink()
    Path("text.txt").write_text("A text.\nIts second line, with a é.\n" * 20, encoding="utf-8")


_CPU = ("--device", "cpu")
_PREDICT = command("predict", "classifier", "rows.csv", "-o", "out.csv", *_CPU)
_FORECAST = command("predict", "forecast", "series.csv", "--steps", "3", "-o", "out.csv", *_CPU)
_GENERATE = command(
    "generate", "language", "--prompt-file", "text.txt", "--max-tokens", "9", "--num-samples", "2", *_CPU
)
_SCORE = command("score", "language", "text.txt", "--json", "out.json", "--lines", "out.csv", *_CPU)


def _facts(folder: str, **values: object) -> list[Attack]:
    """Return attacks that each change a fact about the training data, which loading a model cannot check."""
    return [
        changed(f"{folder}/config.json", entry(f"preprocessing.{name}", value))
        for name, choices in values.items()
        for value in (choices if isinstance(choices, list) else [choices])
    ]


_CLASSIFIER = _facts(
    "classifier",
    class_names=[["a"], ["a", "a", "a"], [], ["\ud800", "\x1b[2J", "x" * 10**5], ["a"] * 10**5, None],
    columns=[{"text": ""}, {"text": "body", "label": "id"}, {"text": "x" * 10**5}, {}],
    byte_map=[[], [1], None],
    max_length=[1, 10**30],
    image_size=[[1, 1]],
    task=["language", "forecast", "\x1b[2J"],
)
_SERIES = _facts(
    "forecast",
    input_std=[[1e-300, 1e300], [1.0]],
    value_columns=[["heat", "heat"], ["heat"], ["\x1b[2J", "rain"], [], None],
    target_mean=[[1e308, 1e308], None],
    max_length=1,
    image_size=[[5, 10]],
)
_LANGUAGE = [
    written("text.txt", b""),
    written("text.txt", b"\xff\xfe\x00" * 999),
    written("text.txt", b"x" * 200_000),
    written("text.txt", b"\n" * 10_000),
    *_facts("language", byte_map=[[], [10, 65], None], symbols=[["a"], []], task=["recall", ""]),
    linked(".out.json", "a file outside"),
    linked(".out.csv", "a file outside"),
]

BASES: dict[str, Callable[[], None]] = {"inputs": _make_inputs, "uses": _make_uses}
SUBJECTS = {
    "predict": Subject(base="inputs", use=_predict_all, attacks=_INPUTS, independent=True, share=34),
    "cli-predict": Subject(base="uses", use=_PREDICT, attacks=_CLASSIFIER, targets="^classifier/config", share=8),
    "cli-forecast": Subject(base="uses", use=_FORECAST, attacks=_SERIES, targets="^forecast/config", share=5),
    "cli-generate": Subject(base="uses", use=_GENERATE, attacks=_LANGUAGE, targets="^language/config", share=6),
    "cli-score": Subject(base="uses", use=_SCORE, attacks=_LANGUAGE, targets="^language/config", share=6),
}
