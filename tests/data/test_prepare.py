"""A data set is generated, read or downloaded once, completely or not at all, and never mistaken for another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from tcnca.data import CustomOptions, Dataset, data_folder, prepare_dataset
from tcnca.data.datasets import DatasetSpec, get_dataset
from tcnca.data.datasets.spec import Download
from tcnca.data.schema import Columns, Content, Ragged
from tcnca.errors import ConfigError, DataError

SIZES = {"train": 40, "validation": 4, "test": 4}


def contents(folder: Path) -> dict[str, str]:
    """Name and checksum of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def left(folder: Path) -> list[str]:
    """What is in a folder of sets, but for the locks, which stay."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def sizes(data: Dataset) -> dict[str, int]:
    return {split: len(next(iter(columns.values()))) for split, columns in data.splits.items()}


def texts_of(columns: Columns) -> list[bytes]:
    tokens = columns["tokens"]
    return [bytes(tokens[index]) for index in range(len(tokens))]


def test_generated_data_set(tmp_path: Path) -> None:
    prepared = prepare_dataset("recall", tmp_path, size=40)
    assert prepared.new
    assert prepared.folder == tmp_path / "recall-64-10"
    assert sizes(prepared.data) == SIZES
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["verified"], manifest["seed"]) == ("classification", True, 0)
    assert manifest["class_names"] == manifest["symbols"] == [*"abcde", *"12345"]
    # Shards are gone, and nothing else was left.
    assert left(tmp_path) == ["recall-64-10"]
    for columns in prepared.data.splits.values():
        for tokens, label in zip(np.asarray(columns["tokens"]), np.asarray(columns["labels"]), strict=True):
            pairs = dict(zip(tokens[:-1:2].tolist(), tokens[1::2].tolist(), strict=True))
            assert pairs[int(tokens[-1])] == label


def test_prepared_data_set_is_reused(tmp_path: Path) -> None:
    first = prepare_dataset("listops", tmp_path, size=40)
    before = contents(first.folder)
    times = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    again = prepare_dataset("listops", tmp_path, size=40)
    assert not again.new
    assert {path.name: path.stat().st_mtime_ns for path in again.folder.iterdir()} == times
    np.testing.assert_array_equal(again.data.columns("train")["labels"], first.data.columns("train")["labels"])
    assert prepare_dataset("listops", tmp_path, size=40, force=True).new
    assert contents(first.folder) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"recall-64-10: expected seed 1, got a data set prepared with 0; prepare it again with --force"),
        ({"size": 50}, r"recall-64-10: expected size 50, got a data set prepared with 40; .*--force"),
        ({"size": None}, r"recall-64-10: expected size as published, got a data set prepared with 40; .*--force"),
    ],
)
def test_other_options_are_refused(tmp_path: Path, change: dict[str, int | None], message: str) -> None:
    prepared = prepare_dataset("recall", tmp_path, size=40)
    before = contents(prepared.folder)
    wanted: dict[str, int | None] = {"size": 40, "seed": 0, **change}
    with pytest.raises(DataError, match=message):
        prepare_dataset("recall", tmp_path, **wanted)  # type: ignore[arg-type]
    assert contents(prepared.folder) == before


@pytest.mark.parametrize("force", [False, True])
def test_other_folder_is_not_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "recall-64-10").mkdir()
    (tmp_path / "recall-64-10" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="recall-64-10: exists and is not a prepared data set; choose another name or"):
        prepare_dataset("recall", tmp_path, size=40, force=force)
    assert (tmp_path / "recall-64-10" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a b", "set\n"])
def test_invalid_names(tmp_path: Path, table: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"name: expected letters, digits, .*, got"):
        prepare_dataset(name, tmp_path / "out", origin=table)
    assert not (tmp_path / "out").exists()


def test_custom_data(tmp_path: Path, table: Path) -> None:
    prepared = prepare_dataset("reviews", tmp_path / "sets", origin=table)
    assert prepared.new
    assert prepared.folder == tmp_path / "sets" / "reviews"
    assert sizes(prepared.data) == {"train": 54, "validation": 3, "test": 3}
    manifest = prepared.data.manifest
    assert (manifest["kind"], manifest["origin"], manifest["verified"]) == ("classification", "reviews.csv", False)
    assert manifest["class_names"] == ["bad", "good"]
    texts = {
        tokens.decode(): manifest["class_names"][label]
        for columns in prepared.data.splits.values()
        for tokens, label in zip(texts_of(columns), np.asarray(columns["labels"]), strict=True)
    }
    assert texts == {f"review {n}": "good" if n % 2 else "bad" for n in range(60)}
    assert not prepare_dataset("reviews", tmp_path / "sets", origin=table).new
    # What is there can be had without its source.
    assert not prepare_dataset("reviews", tmp_path / "sets").new


def test_changed_custom_data(tmp_path: Path, table: Path) -> None:
    prepare_dataset("reviews", tmp_path, origin=table)
    with table.open("a") as file:
        file.write("a late review,good\n")
    with pytest.raises(
        DataError, match=r"reviews: expected source of 890 bytes.*, got a data set prepared with 871 bytes.*--force"
    ):
        prepare_dataset("reviews", tmp_path, origin=table)
    assert sum(sizes(prepare_dataset("reviews", tmp_path, origin=table, force=True).data).values()) == 61


def test_custom_data_with_other_options(tmp_path: Path, table: Path) -> None:
    prepare_dataset("reviews", tmp_path, origin=table)
    with pytest.raises(DataError, match=r"reviews: expected --seed 1, got a data set prepared with 0; .*--force"):
        prepare_dataset("reviews", tmp_path, origin=table, custom=CustomOptions(seed=1))


class StoppedError(Exception):
    """What an impatient user raises."""


@pytest.mark.parametrize("when", ["generating", "storing"])
def test_interrupted_run_is_continued(tmp_path: Path, when: str) -> None:
    def progress(what: str, done: int, total: int | None) -> None:
        if what.startswith(when) and done:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare_dataset("recall", tmp_path, size=40, progress=progress)
    assert not (tmp_path / "recall-64-10").exists()
    assert left(tmp_path) == [".recall-64-10.shards"]
    prepared = prepare_dataset("recall", tmp_path, size=40)
    assert prepared.new
    assert left(tmp_path) == ["recall-64-10"]
    assert contents(prepared.folder) == contents(prepare_dataset("recall", tmp_path / "else", size=40).folder)


def test_interrupted_replacement_keeps_the_old_data_set(tmp_path: Path) -> None:
    before = contents(prepare_dataset("recall", tmp_path, size=40).folder)

    def progress(what: str, done: int, total: int | None) -> None:
        if what == "storing":
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare_dataset("recall", tmp_path, size=30, force=True, progress=progress)
    assert contents(tmp_path / "recall-64-10") == before


@pytest.mark.parametrize("seed", [0, 1])
def test_second_process_waits(tmp_path: Path, seed: int) -> None:
    """The other one finds the set, or hears that it is not the one that it wants."""
    told: list[str] = []
    ended = threading.Event()

    def second() -> None:
        try:
            prepare_dataset(
                "recall", tmp_path, size=40, seed=seed, progress=lambda what, done, total: told.append(what)
            )
        except DataError as error:
            told.append(str(error))
        ended.set()

    other = threading.Thread(target=second)

    def progress(what: str, done: int, total: int | None) -> None:
        if what == "storing" and not other.ident:
            other.start()
            assert not ended.wait(0.3)

    assert prepare_dataset("recall", tmp_path, size=40, progress=progress).new
    other.join()
    assert told[0] == "waiting for another process that prepares recall-64-10"
    assert [f"expected seed {seed}, got a data set prepared with 0" in news for news in told[1:]] == [True] * seed
    data = Dataset.open(tmp_path / "recall-64-10")
    assert data.manifest["seed"] == 0
    for name, file in data.manifest["files"].items():
        values = np.load(tmp_path / "recall-64-10" / name)
        assert hashlib.sha256(values.tobytes()).hexdigest() == file["values_sha256"]


def test_unverified_data_set_is_not_taken_for_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(b"not Wikipedia " * 100)
    prepare_dataset("enwik8", tmp_path / "sets", origin=tmp_path / "enwik8", unverified=True)
    assert not prepare_dataset("enwik8", tmp_path / "sets", unverified=True).new
    with pytest.raises(DataError, match=r"enwik8: was prepared from files that differ from the published ones"):
        prepare_dataset("enwik8", tmp_path / "sets")


DOWNLOAD = Download(url="https://example.org/tiny.bin", filename="tiny.bin", checksum=None, size=60)


def tiny_text(origin: Path, *, unverified: bool = False) -> Content:
    """A reader of lines of three characters, in parts of ten."""
    lines = origin.read_text().splitlines()
    parts: list[Columns] = [
        {"tokens": Ragged.from_bytes(line.encode() for line in lines[begin : begin + 10]), "labels": np.arange(10) % 2}
        for begin in range(0, len(lines), 10)
    ]
    return Content(
        kind="classification",
        splits={"train": parts, "test": parts},
        origin=origin.name,
        verified=not unverified,
        metadata={"class_names": ["negative", "positive"]},
    )


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The set `text` with a tiny reader, and what was fetched for it."""
    small: DatasetSpec = dataclasses.replace(
        get_dataset("text"), read=tiny_text, downloads=(DOWNLOAD,), disk_bytes=1000
    )
    monkeypatch.setattr("tcnca.data.prepare.get_dataset", lambda name: small)
    files: list[Path] = []

    def fetch(download: Download, folder: Path, progress: object) -> Path:
        assert download is DOWNLOAD
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / download.filename)
        files[-1].write_text("".join(f"{n:03}\n" for n in range(30)))
        return files[-1]

    monkeypatch.setattr("tcnca.data.download.download_file", fetch)
    return files


def test_downloaded_data_set(tmp_path: Path, fetched: list[Path]) -> None:
    prepared = prepare_dataset("text", tmp_path)
    assert fetched == [tmp_path / "downloads" / "tiny.bin"]
    assert sizes(prepared.data) == {"train": 30, "test": 30}
    assert bytes(prepared.data.columns("test")["tokens"][17]) == b"017"
    assert prepared.data.manifest["title"] == "Text (Long-Range Arena)"
    assert prepared.data.manifest["verified"]
    assert not prepare_dataset("text", tmp_path).new
    assert len(fetched) == 1


def test_part_of_a_downloaded_data_set(tmp_path: Path, fetched: list[Path]) -> None:
    data = prepare_dataset("text", tmp_path, size=13).data
    assert sizes(data) == {"train": 13, "test": 13}
    assert not data.manifest["verified"]
    assert texts_of(data.columns("train")) == [f"{n:03}".encode() for n in range(13)]
    with pytest.raises(DataError, match="text: expected size as published, got a data set prepared with 13"):
        prepare_dataset("text", tmp_path)


def test_data_set_without_downloads(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="acl-citations: is not publicly available; give --from FOLDER"):
        prepare_dataset("acl-citations", tmp_path)
    with pytest.raises(ConfigError, match="size: expected none, since acl-citations is always used completely, got 5"):
        prepare_dataset("acl-citations", tmp_path, origin=tmp_path, size=5)


def test_options_that_do_not_fit(tmp_path: Path, table: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"origin: expected none, since recall-64-10 is generated, got .*; remove --from"
    ):
        prepare_dataset("recall", tmp_path, origin=table)
    with pytest.raises(ConfigError, match="size: expected none, since reviews is always used completely, got 10"):
        prepare_dataset("reviews", tmp_path, origin=table, size=10)
    with pytest.raises(ConfigError, match="workers: expected an integer >= 1, got 0"):
        prepare_dataset("recall", tmp_path, workers=0)
    with pytest.raises(ConfigError, match="size: expected an integer >= 1, got 0"):
        prepare_dataset("recall", tmp_path, size=0)
    with pytest.raises(ConfigError, match=r"dataset: did you mean listops\? .*Got 'lisptops'; or give --from FILE"):
        prepare_dataset("lisptops", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [table.name]


def test_options_without_effect_are_refused(tmp_path: Path, table: Path) -> None:
    with pytest.raises(ConfigError, match=r"name: expected letters, .*, and not 'downloads', got"):
        prepare_dataset("downloads", tmp_path, origin=table)
    with pytest.raises(ConfigError, match="size: expected at most 25000, the size of text, got 26000"):
        prepare_dataset("text", tmp_path, size=26_000)
    with pytest.raises(
        ConfigError, match="custom: expected no options for your own files, since recall-64-10 is a known data set"
    ):
        prepare_dataset("recall", tmp_path, custom=CustomOptions(label="stars"))
    with pytest.raises(ConfigError, match="seed: expected 0, since text is not generated, got 3; remove --seed"):
        prepare_dataset("text", tmp_path, origin=table, seed=3)
    with pytest.raises(ConfigError, match="unverified: expected False, since reviews was not published"):
        prepare_dataset("reviews", tmp_path, origin=table, unverified=True)
    with pytest.raises(ConfigError, match="unverified: expected False, since recall-64-10 was not published"):
        prepare_dataset("recall", tmp_path, unverified=True)


def test_seed_of_custom_splits(tmp_path: Path, table: Path) -> None:
    def test_texts(place: str, seed: int, custom: CustomOptions | None) -> set[bytes]:
        data = prepare_dataset("reviews", tmp_path / place, origin=table, seed=seed, custom=custom).data
        tokens = data.columns("test")["tokens"]
        return {bytes(tokens[index]) for index in range(len(tokens))}

    assert test_texts("a", 0, None) != test_texts("b", 1, None)
    assert test_texts("b", 1, None) == test_texts("c", 0, CustomOptions(seed=1))


def test_digest(tmp_path: Path) -> None:
    sets = [
        prepare_dataset("recall", tmp_path / str(place), size=40, seed=seed) for place, seed in enumerate((0, 0, 1))
    ]
    digests = [prepared.data.digest for prepared in sets]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 64


def test_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TCNCA_DATA", str(tmp_path / "kept"))
    assert data_folder() == tmp_path / "kept"
    assert prepare_dataset("recall-16-4", size=2).folder == tmp_path / "kept" / "recall-16-4"
    monkeypatch.delenv("TCNCA_DATA")
    assert data_folder() == Path("data")
