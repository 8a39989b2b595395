"""`tcnca data`: prepare, list and show, with errors that say what to do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tcnca.cli import app
from tcnca.data import list_datasets, load_task, prepare_dataset
from tcnca.data.schema import Ragged
from tcnca.data.store import DatasetWriter

runner = CliRunner()


class Said(NamedTuple):
    """What a command said, and where."""

    stdout: str
    stderr: str


def run(*arguments: object, code: int = 0) -> Said:
    """Run the command in a wide terminal; a traceback is never the answer."""
    result = runner.invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    return Said(result.stdout, result.stderr)


def shows(*arguments: object) -> str:
    return run("show", *arguments).stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a file of each form."""
    folder = tmp_path / "sources"
    folder.mkdir()
    rows = [(f"review {n}", "good" if n % 2 else "bad") for n in range(60)]
    (folder / "reviews.csv").write_text("body,stars\n" + "".join(f"{text},{label}\n" for text, label in rows))
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    (folder / "reviews.jsonl").write_text("\n".join(lines))
    (folder / "book.txt").write_text("It was a dark and stormy night.\n" * 40)
    random = np.random.default_rng(0)
    np.savez(folder / "signals.npz", values=random.normal(size=(40, 9, 2)), labels=np.arange(40) % 4)
    np.savez(folder / "heights.npz", values=random.normal(size=(40, 9, 2)), targets=random.normal(size=40))
    np.save(folder / "series.npy", random.normal(size=(300, 2)))
    table = "".join(f"{n}:00,{n / 7:.3f},{n % 5}\n" for n in range(300))
    (folder / "weather.csv").write_text("time,heat,rain\n" + table)
    return folder


def test_list_without_prepared_data_sets(tmp_path: Path) -> None:
    rows = json.loads(run("list", "--data", tmp_path, "--json").stdout)
    assert [row["name"] for row in rows] == [entry.name for entry in list_datasets()]
    by_name = {row["name"]: row for row in rows}
    assert by_name["enwik8"]["sizes"] == {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}
    assert {row["prepared"] for row in rows} == {"no"}
    plain = run("list", "--data", tmp_path).stdout
    for row in rows:
        assert row["name"] in plain
    assert "90,000,000 / 5,000,000 / 5,000,000" in plain
    assert "25,000 / – / 25,000" in plain


def states(folder: Path) -> dict[str, str]:
    return {row["name"]: row["prepared"] for row in json.loads(run("list", "--data", folder, "--json").stdout)}


def test_list_of_prepared_data_sets(tmp_path: Path, sources: Path) -> None:
    prepare_dataset("recall-64-10", tmp_path)
    prepare_dataset("listops", tmp_path, size=40)
    prepare_dataset("book", tmp_path, origin=sources / "book.txt")
    (tmp_path / ".pathx.shards").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "manifest.json").write_text("{")
    (tmp_path / "enwik").write_text("not Wikipedia" * 100)
    prepare_dataset("enwik8", tmp_path, origin=tmp_path / "enwik", unverified=True)
    prepare_dataset("recall-16-4", tmp_path, size=20)
    found = states(tmp_path)
    assert found["recall-64-10"] == found["book"] == "yes"
    assert found["listops"] == "yes, another size"
    rows = {row["name"]: row for row in json.loads(run("list", "--data", tmp_path, "--json").stdout)}
    # What is there, not what was published.
    assert rows["listops"]["sizes"]["train"] < 96_000
    assert rows["listops"]["bytes"] < 10_000_000
    assert rows["pathx"]["sizes"] == {"train": 160_000, "validation": 20_000, "test": 20_000}
    assert found["pathx"] == "begun"
    assert found["text"] == "damaged"
    assert found["enwik8"] == "yes, unverified"
    assert found["retrieval"] == "no"
    assert rows["recall-16-4"]["description"] == rows["recall-64-10"]["description"]
    plain = run("list", "--data", tmp_path).stdout
    assert "your own: language; book.txt" in plain


def test_prepare_a_generated_data_set(tmp_path: Path) -> None:
    command = ("prepare", "recall", "--out", tmp_path, "--size", 40, "--workers", 1)
    output = run(*command).stdout
    assert "Associative recall, length 64, vocab_size 10: generated" in output
    assert [line.split() for line in output.splitlines() if line.split()[:1] == ["train"]] == [
        ["train", "40", "65", "65.0", "65", "10"]
    ]
    assert f"ready in {tmp_path / 'recall-64-10'}" in output
    before = (tmp_path / "recall-64-10" / "manifest.json").read_bytes()
    again = run(*command).stdout
    assert "is already prepared; --force prepares it again" in again
    assert "generating" not in again
    assert (tmp_path / "recall-64-10" / "manifest.json").read_bytes() == before
    assert "ready" in run(*command, "--force").stdout


@pytest.mark.parametrize(
    ("source", "options", "kind", "classes"),
    [
        ("reviews.csv", ("--text", "body", "--label", "stars"), "classification", "train: bad 26, good 28"),
        ("reviews.jsonl", (), "classification", "train: bad 26, good 28"),
        ("book.txt", (), "language", None),
        ("signals.npz", ("--validation", "0.1"), "classification", "train: 0 "),
        ("heights.npz", ("--test", "0.2"), "regression", None),
        ("series.npy", (), "forecast", None),
        ("weather.csv", ("--kind", "forecast"), "forecast", "columns of values: 'heat', 'rain'; not used: 'time'"),
        (
            "weather.csv",
            ("--label", "rain", "--values", "heat"),
            "classification",
            "values: 'heat'; label: 'rain'; not",
        ),
        ("weather.csv", ("--targets", "rain"), "regression", "of values: 'heat'; targets: 'rain'; not used: 'time'"),
    ],
)
def test_prepare_and_show_custom_data(
    tmp_path: Path, sources: Path, source: str, options: tuple[str, ...], kind: str, classes: str | None
) -> None:
    sets = tmp_path / "sets"
    output = run("prepare", "mine", "--from", sources / source, "--out", sets, *options).stdout
    assert f"ready in {sets / 'mine'}" in output
    assert classes is None or classes in output
    manifest = json.loads((sets / "mine" / "manifest.json").read_text())
    assert (manifest["kind"], manifest["origin"]) == (kind, source)
    title = "mine, test from byte 0" if kind == "language" else "mine, test 0"
    assert title in shows("mine", "--data", sets, "--split", "test", "--count", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lisptops",), "or give --from FILE"),
        (("recall-16", "--from", "book.txt"), "since recall-16-10 is generated, got book.txt; remove --from"),
        (("mine", "--from", "nowhere.csv"), "nowhere.csv: no such file or folder; check the path"),
        (("mine", "--from", "book.txt", "--kind", "nonsense"), "kind: expected one of language"),
        (("mine", "--from", "book.txt", "--validation", "2"), "validation, test: expected fractions above 0"),
        (("acl-citations",), "acl-citations: is not publicly available; give --from FOLDER"),
        (("recall", "--seed", "9"), "expected seed 9, got a data set prepared with 0; prepare it again with --force"),
    ],
)
def test_errors_of_prepare(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(sources)
    prepare_dataset("recall", tmp_path)
    result = run("prepare", *arguments, "--out", tmp_path, code=1)
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert "Error" not in result.stdout


def test_interrupted_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tcnca.data.prepare_dataset", interrupted)
    result = run("prepare", "listops", "--out", tmp_path, code=130)
    assert "stopped by SIGINT; the same command continues from here" in result.stderr


def test_show_generated_examples(tmp_path: Path) -> None:
    output = shows("listops", "--data", tmp_path, "--count", 2, "--index", 3, "--full")
    titles = [line for line in output.splitlines() if line.startswith("listops, train ")]
    assert [title.split(":")[0] for title in titles] == ["listops, train 3", "listops, train 4"]
    body = output.splitlines()[1].split()
    assert body[0] in ("[MIN", "[MAX", "[MED", "[SM")
    assert body[-1] == "]"
    assert 500 < len(body) < 2000
    assert not any(tmp_path.iterdir())


def test_show_a_prepared_data_set(tmp_path: Path) -> None:
    data = prepare_dataset("recall", tmp_path, size=40).data
    output = shows("recall", "--data", tmp_path, "--split", "test", "--count", 4)
    symbols = data.manifest["symbols"]
    for index in range(4):
        example = data.example("test", index)
        assert f"recall-64-10, test {index}: {symbols[int(example['labels'])]}\n" in output
        assert " ".join(symbols[token] for token in example["tokens"]) in output


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with a set of dark pictures, each with one bright pixel."""
    pixels = np.zeros((5, 32, 32), np.uint8)
    pixels[np.arange(5), 8, 3 * np.arange(5)] = 255
    with DatasetWriter(tmp_path / "image") as writer:
        for split in ("train", "test"):
            writer.append(split, {"pixels": pixels, "labels": np.arange(5)})
        writer.commit({"kind": "classification", "class_names": list("abcde"), "verified": False, "request": {}})
    return tmp_path


def test_show_images_without_extras(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.chdir(pictures)
    lines = shows("image", "--data", pictures, "--split", "test", "--index", 1).splitlines()
    assert "image, test 1: b" in lines
    assert lines[-1] == "images are not saved: PIL is not installed; pip install 'tcnca[plots]'"
    said = run("show", "image", "--data", pictures, "--picture", "x.png", code=1)
    assert said.stderr == "Error: x.png: PIL is not installed; pip install 'tcnca[plots]'\n"


def test_show_images(pictures: Path) -> None:
    path = pictures / "seen" / "sheet.png"
    command = ("image", "--data", pictures, "--split", "test", "--index", 1, "--count", 2, "--picture", path)
    lines = shows(*command).splitlines()
    begin = lines.index("image, test 1: b")
    assert lines[begin + 1 : begin + 17] == ["", "", "", "", "   █", *[""] * 11]
    assert "image, test 2: c" in lines
    assert lines[-1] == f"images are in {path}"
    with Image.open(path) as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (2 * 264, 280))
        # Eight times as large, under a line of text.
        assert sheet.getpixel((4 + 3 * 8, 4 + 16 + 8 * 8)) == 255
        assert sheet.getpixel((4 + 4 * 8, 4 + 16 + 8 * 8)) == 0


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("a [bold]film[/bold] [/]", "[red]"),
        ("I :smile: at :cat:", "yes"),
        ("a film", "a :dog:"),
        ("two\nlines", "no"),
        ("so " * 300, "no"),
    ],
)
def test_show_prints_text_unchanged(tmp_path: Path, text: str, label: str) -> None:
    with DatasetWriter(tmp_path / "mine") as writer:
        writer.append("train", {"tokens": Ragged.from_bytes([text.encode()]), "labels": np.zeros(1, np.int64)})
        writer.commit({"kind": "classification", "class_names": [label], "verified": False, "request": {}})
    output = shows("mine", "--data", tmp_path, "--count", 1)
    assert output == f"mine, train 0: {label}\n{text}\n\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "nothing: expected a prepared data set in"),
        (("text",), "text: is not prepared in"),
        (("listops", "--index", "-1", "--count", "1"), "index: expected 0 to"),
        (("recall", "--index", "40", "--count", "3"), "index: expected 0 to 39 for train of recall-64-10, got 40"),
        (
            ("listops", "--index", "99999999999"),
            "only the first 100 examples are available; run `tcnca data prepare listops",
        ),
    ],
)
def test_errors_of_show(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    prepare_dataset("recall", tmp_path, size=40)
    result = run("show", *arguments, "--data", tmp_path, code=1)
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


def test_error_lists_accepted_files(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("text,label\ngood,1\n")
    for name, form in (("text", "aclImdb_v1.tar.gz"), ("image", "cifar-10-python.tar.gz")):
        result = run("prepare", name, "--from", tmp_path / "reviews.csv", "--out", tmp_path, code=1)
        assert f"{name} is read from {form}" in result.stderr


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"format": 2}',
        '{"format": 2, "kind": "language", "splits": {"train": 1}, "files": []}',
    ],
    ids=["empty", "list", "deep", "bare", "odd"],
)
def test_one_odd_manifest_does_not_hide_the_others(tmp_path: Path, manifest: str) -> None:
    for name in ("mine", "enwik8", "recall-7-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest)
    prepare_dataset("recall", tmp_path, size=40)
    found = states(tmp_path)
    assert found["recall-64-10"] == "yes, another size"
    assert found["mine"] == found["enwik8"] == found["recall-7-3"] == "damaged"
    lines = run("list", "--data", tmp_path).stdout.splitlines()
    assert len([line for line in lines if "damaged: " in line]) == 3
    assert any(f"{tmp_path / 'mine' / 'manifest.json'}: " in line for line in lines)


def test_list_prints_no_control_characters(tmp_path: Path, sources: Path) -> None:
    folder = prepare_dataset("book", tmp_path, origin=sources / "book.txt").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "origin": "[red]\x1b[2J\a"}))
    output = run("list", "--data", tmp_path).stdout
    assert "\x1b" not in output
    assert "[red]\ufffd[2J\ufffd" in output


def test_steps_and_features_are_shown(tmp_path: Path, sources: Path) -> None:
    output = run("prepare", "signals", "--from", sources / "signals.npz", "--out", tmp_path).stdout
    assert "9 time steps of 2 features\n" in output
    assert "warning" not in output
    values = np.random.default_rng(0).normal(size=(40, 3, 500))
    np.savez(sources / "first.npz", values=values, labels=np.arange(40) % 4)
    output = run("prepare", "first", "--from", sources / "first.npz", "--out", tmp_path).stdout
    assert "3 time steps of 500 features\nwarning: values: 500 features in only 3 time steps; arrays are " in output
    assert load_task("first", tmp_path).notes()
    assert not load_task("signals", tmp_path).notes()


def test_pipe_as_source_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("mine", "text", "enwik8"):
        error = run("prepare", name, "--from", tmp_path / "pipe.csv", "--out", tmp_path, code=1).stderr
        assert "pipe.csv: expected a file or a folder, got a pipe or a device; save the data to a file" in error
