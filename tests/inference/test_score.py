"""The bits of a text: as in evaluation, for any pieces, with its curve, its lines and its most surprising places."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tcnca
from tcnca import ClassifierHeadConfig, InputError, Preprocessing, TokenInputConfig
from tcnca.cli import app
from tcnca.cli.score import _starts_chunk
from tcnca.data.tasks import LanguageTask
from tcnca.inference.scoring import CONTEXT, MAX_POINTS, UNKNOWN_BITS, WINDOW, Curve, Lines, Place, Places
from tcnca.training.evaluate import evaluate
from tests.data.helpers import write_dataset
from tests.examples import FAMILY, small_model
from tests.inference.models import saved, text_model

runner = CliRunner()
TEXT = b"The first line.\nAnother one,\n\nand a last one without an end " * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return tcnca.save(text_model(), tmp_path_factory.mktemp("text"))


def run(*arguments: Any, stdin: bytes | None = None) -> Any:
    return runner.invoke(app, ["score", *map(str, arguments)], input=stdin, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "symbols", [None, sorted(set(TEXT)), sorted(set(TEXT) - {10})], ids=["all", "some", "no-newline"]
)
def test_the_total_is_that_of_evaluation(tmp_path: Path, symbols: list[int] | None) -> None:
    text = TEXT if symbols is None or 10 in symbols else TEXT.replace(b"\n", b" ")
    data = {"bytes": np.frombuffer(text, np.uint8)}
    metadata: dict[str, Any] = {"kind": "language", **({} if symbols is None else {"symbols": symbols})}
    dataset = write_dataset(tmp_path / "data", {"train": [data], "test": [data]}, **metadata)
    task = LanguageTask(dataset, chunk_size=8, eval_length=100, segments=1)
    model = text_model(byte_map=bytes(task.preprocessing().byte_map or ()))
    result = evaluate(model, task, "test")
    bits = tcnca.score(model, text)
    assert result.count == len(bits) == len(text)
    assert float(bits.mean()) == pytest.approx(result.value, rel=1e-6)


@pytest.mark.parametrize("family", FAMILY)
def test_pieces_do_not_matter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = text_model(family=family), TEXT[:60]
    whole = tcnca.score(model, text)
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 8)
    np.testing.assert_allclose(tcnca.score(model, text), whole, rtol=1e-4, atol=1e-4)


def test_scores_leave_the_mode_of_the_model() -> None:
    model = text_model(dropout=0.5)
    expected = tcnca.score(model, "a text")
    model.train()
    assert np.array_equal(tcnca.score(model, "a text"), expected)
    assert model.training


def test_models_without_bytes_are_refused() -> None:
    with pytest.raises(InputError, match=r"^model: expected a language model, got a classifier; use tcnca predict"):
        tcnca.score(text_model(head=ClassifierHeadConfig()), "a")
    with pytest.raises(InputError, match=r"^model: expected a language model of bytes, got one without"):
        tcnca.score(small_model(), "a")


@given(sizes=st.lists(st.integers(0, 3 * MAX_POINTS), max_size=6))
def test_curve_is_the_mean_of_equal_parts(sizes: list[int]) -> None:
    bits = np.random.default_rng(0).random(sum(sizes))
    curve = Curve()
    for piece in np.split(bits, np.cumsum(sizes)[:-1]) if sizes else []:
        curve.add(piece)
    expected = [bits[begin : begin + curve.width].mean() for begin in range(0, len(bits), curve.width)]
    np.testing.assert_allclose(curve.values(), expected)
    assert len(expected) <= MAX_POINTS
    assert curve.width == 1 or len(expected) > MAX_POINTS // 2


def plain_places(data: bytes, bits: Any, count: int) -> list[tuple[int, int]]:
    """Offset and line of the windows with the most bits, each taken if it overlaps none before it."""
    # Of each group of positions the best one, as documented.
    sums = [bits[start : start + WINDOW].sum() for start in range(len(data) - WINDOW + 1)]
    starts = [
        max(range(begin, min(begin + WINDOW, len(sums))), key=sums.__getitem__) for begin in range(0, len(sums), WINDOW)
    ]
    found: list[int] = []
    for start in sorted(starts, key=lambda start: -sums[start]):
        if all(abs(start - other) >= WINDOW for other in found):
            found.append(start)
    return [(start, 1 + data[:start].count(b"\n")) for start in found[:count]]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5) | st.just([1] * 300) | st.just([40] * 9),
    count=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_places_have_the_most_bits_and_do_not_overlap(sizes: list[int], count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    letters = list(b"abc\n" if seed % 2 else b"a" * 99 + b"\n")
    data = random.choice(letters, sum(sizes)).astype(np.uint8).tobytes()
    bits = random.random(len(data)) ** 4
    places, begin = Places(count), 0
    for size in sizes:
        places.add(data[begin : begin + size], bits[begin : begin + size])
        begin += size
    best = places.best()
    if len(data) < WINDOW:
        assert [place.text for place in best] == [data][: len(data)]
        return
    assert [(place.offset, place.line) for place in best] == plain_places(data, bits, count)
    for place in best:
        assert place.text == data[place.offset : place.offset + WINDOW]
        # The rest of its first line, and of its last.
        before, after = data[: place.offset], data[place.offset + WINDOW :]
        assert place.before == before[max(before.rfind(b"\n") + 1, len(before) - CONTEXT) :]
        rest = b"" if place.text.endswith(b"\n") else after.partition(b"\n")[0]
        assert place.after == rest[:CONTEXT]
        assert place.bits == pytest.approx(bits[place.offset : place.offset + WINDOW].sum())


def test_many_places_are_found_at_once() -> None:
    """Without a comparison of each place with all others, and of equal ones the first."""
    places, size = Places(12_000), 14_000 * WINDOW
    places.add(b"a" * size, np.ones(size))
    begin = time.thread_time()
    assert [place.offset for place in places.best()[:3]] == [0, WINDOW, 2 * WINDOW]
    assert time.thread_time() - begin < 2


@given(text=st.text("ab\r\n", max_size=60), size=st.integers(1, 20))
def test_lines_have_the_bits_of_their_bytes(text: str, size: int) -> None:
    data = text.encode()
    bits = np.random.default_rng(0).random(len(data))
    lines, found = Lines(), list[Place]()
    for begin in range(0, len(data), size):
        found += lines.add(data[begin : begin + size], bits[begin : begin + size])
    found += lines.finish()
    expected = data.split(b"\n")
    whole = [*(line + b"\n" for line in expected[:-1]), *filter(None, expected[-1:])]
    assert [(place.line, place.length) for place in found] == list(enumerate(map(len, whole), 1))
    offset = 0
    for place, line in zip(found, whole, strict=True):
        assert (place.offset, place.text) == (offset, line.rstrip(b"\r\n"))
        assert place.bits == pytest.approx(bits[offset : offset + len(line)].sum())
        offset += len(line)


def test_the_command_writes_totals_curve_places_and_lines(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(TEXT)
    bits = tcnca.score(tcnca.load(folder), TEXT)
    options = ("--json", tmp_path / "s.json", "--plot", tmp_path / "s.png", "--top", 3)
    result = run(folder, tmp_path / "log.txt", *options, "--lines", tmp_path / "lines.csv")
    assert result.exit_code == 0, result.output
    assert f"{bits.mean():.4f}" in result.stdout
    assert "most surprising places" in result.stdout
    written = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    (model,) = written["scores"]
    assert (model["bytes"], model["unknown_bytes"], written["complete"]) == (len(TEXT), 0, True)
    assert "unknown bytes" not in result.stdout
    assert model["bits"] == pytest.approx(bits.sum())
    assert model["curve"] == {"bytes_per_point": 1, "bits_per_byte": [round(float(value), 4) for value in bits]}
    assert len(model["places"]) == 3
    assert f'"bits_per_byte": {model["curve"]["bits_per_byte"]}\n' in (tmp_path / "s.json").read_text()
    for place in model["places"]:
        whole = place["before"] + place["text"] + place["after"]
        assert whole in TEXT.decode()
        assert place["text"] == TEXT[place["offset"] :][:WINDOW].decode()
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "lines.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == TEXT.decode().split("\n")
    assert sum(float(row["bits"]) for row in rows) == pytest.approx(bits.sum(), rel=1e-4)


def test_lines_and_standard_input(folder: Path) -> None:
    result = run(folder, "-", "--lines", "-", stdin=TEXT)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["line"] for row in rows] == list(range(1, 29))
    assert "bits per byte" in result.stderr


@pytest.mark.parametrize("width", [60, 100])
def test_places_fit_the_terminal(folder: Path, width: int) -> None:
    text = b"an ordinary line that is much longer than the terminal, so that most of it is cut off at the end\n" * 30
    result = runner.invoke(app, ["score", str(folder), "-"], input=text, env={"COLUMNS": str(width)})
    table = result.stdout.partition("most surprising places")[2]
    assert re.search(r" bits per byte +line +offset +text ", table)
    rows = re.findall(r"^ +\d+\.\d\d +\d+ +[\d,]+   .*$", table, re.MULTILINE)
    assert len(rows) == 10
    assert max(map(len, table.splitlines())) <= width
    assert min(len(row.rstrip()) for row in rows) > width - 20


@pytest.mark.parametrize(("offset", "chunk", "expected"), [
    (0, 2048, False),
    (2000, 2048, False),
    (2030, 2048, True),
    (2048, 2048, True),
    (2079, 2048, True),
    (2080, 2048, False),
    (4090, 2048, True),
    (128, 128, False),
])  # fmt: skip
def test_places_at_the_start_of_a_chunk_are_known(offset: int, chunk: int, expected: bool) -> None:
    assert _starts_chunk(Place(1.0, offset, 1, 32, b""), chunk) == expected


def test_the_command_explains_places_at_the_start_of_a_chunk() -> None:
    note = "The attention of this model starts anew every 2,048 bytes"
    assert note in run("-", stdin=b"one line after the other\n" * 90).stdout
    assert note not in run("-", stdin=b"one line after the other\n" * 9).stdout


def test_runs_and_texts_are_compared(folder: Path, tmp_path: Path) -> None:
    other, text = tcnca.save(text_model(family="mega"), tmp_path / "other"), tmp_path / "text.txt"
    text.write_bytes(TEXT[:50])
    files = ("--json", tmp_path / "s.json", "--plot", tmp_path / "s.png")
    result = run(folder, other, "-", text, *files, stdin=TEXT)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    scores = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["scores"]
    pairs = [(str(model), file) for file in ("-", str(text)) for model in (folder, other)]
    assert [(score["run"], score["file"]) for score in scores] == pairs
    for score in scores:
        expected = tcnca.score(tcnca.load(score["run"]), TEXT if score["file"] == "-" else TEXT[:50])
        assert score["bits"] == pytest.approx(expected.sum())
        assert f"{score['bits_per_byte']:.4f}" in result.stdout
    assert "most surprising places" not in result.stdout
    result = run(folder, other, text, "--top", "1", "--plot", tmp_path / "s.svg", "--threads", "1")
    drawn = texts_of(tmp_path / "s.svg")
    assert {"Bits per byte of text.txt (moving mean over 2%)", "offset in the text (bytes)"} < set(drawn)
    assert next(text for text in drawn if text.startswith("other: ")).endswith(" bits per byte")
    titles = [line.strip() for line in result.stdout.splitlines() if line.startswith("most")]
    assert titles == [f"most surprising places: {name}, {text}" for name in (folder, other)]


def texts_of(plot: Path) -> list[str]:
    """Return the texts of an SVG."""
    return re.findall(r"<text [^>]*>(.+)</text>", plot.read_text(encoding="utf-8"))


def test_plots_explain_themselves(folder: Path, tmp_path: Path) -> None:
    long, plot = tmp_path / "a_$x$.log", tmp_path / "s.svg"
    long.write_bytes(TEXT * 10)
    assert run(folder, long, "-", "--plot", plot, stdin=TEXT).exit_code == 0
    drawn = texts_of(plot)
    for text in (
        f"Bits per byte of 2 texts by {folder.name}",
        "a_$x$.log",
        "standard input",
        "moving mean (2% of the text)",
        "mean of the text",
        "most surprising places (means of 32 bytes)",
    ):
        assert drawn.count(text) == 1, drawn


def test_ctrl_c_keeps_what_was_scored(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> Any:
        yield TEXT[:20]  # in the second line
        raise KeyboardInterrupt

    lines, partial = tmp_path / "lines.csv", tmp_path / "lines.csv.partial"
    lines.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr("tcnca.cli.score._read", interrupted)
        result = run(folder, "-", "--json", tmp_path / "s.json", "--lines", lines)
    assert result.exit_code == 130
    assert result.stderr.endswith(f"\nstopped by SIGINT; 1 line saved in {partial}\n")
    written = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert (written["scores"][0]["bytes"], written["complete"]) == (20, False)
    assert lines.read_text() == "before"
    with partial.open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["The first line."]
    assert run(folder, "-", "--lines", lines, stdin=TEXT).exit_code == 0
    assert not partial.exists()
    before = lines.read_bytes()
    monkeypatch.setattr("tcnca.cli.score._read", lambda path: iter(()))
    result = run(folder, "-", "--json", tmp_path / "n.json", "--lines", lines)
    assert (result.exit_code, result.stdout) == (1, "")
    assert lines.read_bytes() == before
    assert not partial.exists()
    assert not (tmp_path / "n.json").exists()


def test_a_mistake_keeps_what_was_scored(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    result = run(folder, tmp_path / "text", "-", "--json", tmp_path / "s.json", stdin=b"")
    assert (result.exit_code, result.stderr) == (1, "Error: -: expected a text, got an empty one\n")
    written = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert [score["bytes"] for score in written["scores"]] == [len(TEXT)]
    assert not written["complete"]
    assert f"{len(TEXT)}" in result.stdout


def test_bytes_that_the_model_does_not_know_are_counted(tmp_path: Path) -> None:
    narrow = tcnca.save(text_model(b"\nab"), tmp_path / "narrow")
    result = run(narrow, "-", "--json", tmp_path / "s.json", stdin=b"ab\na\xff\xffb\n")
    (found,) = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["scores"]
    bits = tcnca.score(tcnca.load(narrow), b"ab\nab\n").sum() + 2 * UNKNOWN_BITS
    assert found["bits"] == pytest.approx(bits)
    assert (found["bytes"], found["unknown_bytes"]) == (8, 2)
    assert "unknown bytes" in result.stdout


def test_json_on_standard_output(folder: Path) -> None:
    result = run(folder, "-", "--json", "-", stdin=TEXT)
    assert json.loads(result.stdout)["scores"][0]["bytes"] == len(TEXT)
    assert "bits per byte" in result.stderr
    assert not Path("-").exists()


def test_lines_do_not_control_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda file: True, raising=False)
    result = run(folder, "-", "--lines", "-", stdin="\x1b[2J\u009b31m\n".encode())
    assert result.exit_code == 0, result.output
    assert "31m" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\x9b" not in result.stdout


def test_a_text_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    text, link = tmp_path / "text", tmp_path / "link"
    text.write_bytes(TEXT)
    link.symlink_to(text)
    for option in ("--json", "--plot", "--lines"):
        for path in (text, link):
            result = run(folder, text, option, path)
            assert f"Error: {option}: expected another file than the text, got {path}" in result.stderr
        for name in (str(tmp_path), ""):
            result = run(folder, text, option, name)
            assert f"Error: {option}: expected a file, got {name or '.'}, which is a folder" in result.stderr
    assert text.read_bytes() == TEXT


def test_outputs_are_different_files(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.png"
    text.write_bytes(TEXT)
    for options, message in {
        ("--json", out, "--plot", out): f"--plot: expected another output than that of --json, got {out}",
        ("--json", "-", "--lines", "-"): "--lines: expected another output than that of --json, got -",
        (
            "--json",
            f"{out}.partial",
            "--lines",
            out,
        ): f"--lines: expected another output than that of --json, got {out}",
    }.items():
        result = run(folder, text, *options)
        assert result.stderr == f"Error: {message}\n"
    text.rename(f"{out}.partial")
    result = run(folder, f"{out}.partial", "--lines", out)
    assert f"--lines: expected another file than the text, got {out}" in result.stderr


def test_mistakes_are_answered(folder: Path, tmp_path: Path) -> None:
    tcnca.save(text_model(head=ClassifierHeadConfig(), causal=False), tmp_path / "classifier")
    saved("pairs", tmp_path / "pairs")
    narrow = tcnca.save(text_model(byte_map=b"abc"), tmp_path / "narrow")
    words = small_model(dtype=torch.float32, input=TokenInputConfig(vocab_size=2))
    words.preprocessing = Preprocessing(task="recall", symbols=("a", "b"))
    tcnca.save(words, tmp_path / "words")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("abcx", encoding="utf-8")
    text = tmp_path / "text"
    mistakes: dict[tuple[Any, ...], str] = {
        (folder, tmp_path): "[RUN...] FILE...: expected a text after the runs, got none",
        (folder, tmp_path / "nowhere"): f"{tmp_path}/nowhere: expected a run directory or a text to score, got",
        (folder, tmp_path / "empty"): f"{tmp_path}/empty: expected a text, got an empty one",
        (folder, narrow, text, "--lines", "-"): "--lines: expected one run and one text, got 2 and 1",
        (tmp_path, text): f"{tmp_path}: expected a run directory or a saved model, got a folder without config.json",
        (folder, text, "--best"): f"{folder}: has no best checkpoint",
        (tmp_path / "words", text): f"{tmp_path}/words: expected a language model of bytes, got one of words",
        (tmp_path / "classifier", text): f"{tmp_path}/classifier: expected a language model, got a classifier; use",
        (tmp_path / "pairs", text): f"{tmp_path}/pairs: expected a language model, got a classifier of pairs; use",
        (folder, text, "--plot", tmp_path / "s.txt"): "--plot: expected a file name that ends in one of .png, .svg",
        **{
            (folder, text, option, tmp_path / "no/file.png"): f"{option}: expected a file in a folder that exists, got "
            for option in ("--json", "--plot", "--lines")
        },
        (tmp_path / "nothing", text): f"{tmp_path}/nothing: expected a run directory or a text to score, got",
    }
    for arguments, message in mistakes.items():
        result = run(*arguments)
        assert result.exit_code == 1, arguments
        assert f"Error: {message}" in result.stderr
        assert not (tmp_path / "no").exists()
