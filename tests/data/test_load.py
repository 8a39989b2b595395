"""A name, a folder or a file becomes a task, and the task fits a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tcnca.data import CustomOptions, Dataset, Task, load_task, npy, prepare_dataset
from tcnca.data.load import STREAM_EVAL_SIZE, load_examples
from tcnca.data.schema import Columns, Ragged
from tcnca.data.store import DatasetWriter
from tcnca.data.tasks import (
    ClassificationTask,
    ForecastTask,
    LanguageTask,
    PairTask,
    RecallTask,
    RegressionTask,
)
from tcnca.errors import ConfigError, DataError


def write_custom(folder: Path, name: str) -> Path:
    """A small file of each form."""
    random = np.random.default_rng(0)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "pairs.csv":
        path.write_text("text,text2,label\n" + "".join(f"one {n},another {n},{n % 2}\n" for n in range(60)))
    elif path.suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"review {n},{n % 2}\n" for n in range(60)))
    elif name == "regression.npz":
        np.savez(path, values=random.normal(size=(40, 9, 2)), targets=random.normal(size=(40, 3)))
    elif name == "signals.npz":
        np.savez(path, values=random.normal(size=(40, 9, 2)), labels=np.arange(40) % 4)
    elif path.suffix == ".npy":
        np.save(path, random.normal(size=(300, 2)))
    else:
        path.write_text("It was a dark and stormy night.\n" * 30)
    return path


CUSTOM: dict[str, tuple[type[Task], CustomOptions]] = {
    "reviews.csv": (ClassificationTask, CustomOptions()),
    "pairs.csv": (PairTask, CustomOptions(text="text", second="text2")),
    "signals.npz": (ClassificationTask, CustomOptions()),
    "regression.npz": (RegressionTask, CustomOptions()),
    "series.npy": (ForecastTask, CustomOptions()),
    "book.txt": (LanguageTask, CustomOptions()),
}
each_form = pytest.mark.parametrize("name", CUSTOM)


def first_batch(found: Task) -> list[torch.Tensor]:
    batch = found.batch(0, 64 if isinstance(found, LanguageTask) else 4)
    return [tensor.nan_to_num(7.0) for tensor in (batch.inputs, batch.targets)]


def options(found: type[Task]) -> dict[str, Any]:
    return {LanguageTask: {"chunk_size": 16}, ForecastTask: {"window": 16}}.get(found, {})


@each_form
def test_custom_data_is_the_same_from_memory_and_prepared(tmp_path: Path, name: str) -> None:
    kind, own = CUSTOM[name]
    path = write_custom(tmp_path, name)
    read = load_task(path, custom=own, **options(kind))
    prepare_dataset("mine", tmp_path / "sets", origin=path, custom=own)
    named = load_task("mine", tmp_path / "sets", **options(kind))
    placed = load_task(tmp_path / "sets" / "mine", **options(kind))
    assert type(read) is type(named) is type(placed) is kind
    assert read.sizes == named.sizes == placed.sizes
    assert set(read.sizes) == {"train", "validation", "test"}
    for other in (named, placed):
        for mine, theirs in zip(first_batch(read), first_batch(other), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["text", "image", "listops", "recall"])
def test_file_with_the_name_of_a_data_set(tmp_path: Path, name: str) -> None:
    path = write_custom(tmp_path / "corpus", name)
    found = load_task(path, tmp_path, chunk_size=16)
    assert isinstance(found, LanguageTask)


def test_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"listops: is not prepared in .*; run `tcnca data prepare listops --out "):
        load_task("listops", tmp_path)
    with pytest.raises(DataError, match=r"nothing: expected a prepared data set in .*, a file, or a data set of"):
        load_task("nothing", tmp_path)


def test_options_of_the_task(tmp_path: Path) -> None:
    path = write_custom(tmp_path, "reviews.csv")
    assert load_task(path, max_length=3).batch(0, 4).inputs.shape == (4, 3)
    with pytest.raises(ConfigError, match=r"mx_length: did you mean max_length\? Expected one of max_length, "):
        load_task(path, mx_length=3)
    with pytest.raises(ConfigError, match=r"max_length: .*xpected one of chunk_size, chunks_per_row"):
        load_task(write_custom(tmp_path, "book.txt"), max_length=3)
    with pytest.raises(ConfigError, match="chunk_size: expected an integer >= 1, got 0"):
        load_task(write_custom(tmp_path, "book.txt"), chunk_size=0)


def published_text(folder: Path, count: int) -> Path:
    """A set `text`, which has no validation split, whose texts are their numbers."""
    with DatasetWriter(folder / "text") as writer:
        for split in ("train", "test"):
            tokens = Ragged.from_bytes(f"{split} {n}".encode() for n in range(count))
            writer.append(split, {"tokens": tokens, "labels": np.arange(count) % 2})
        metadata = {"dataset": "text", "kind": "classification", "class_names": ["negative", "positive"]}
        writer.commit({**metadata, "verified": True, "request": {"size": None}})
    return folder / "text"


def examples(columns: Columns) -> list[tuple[bytes, int]]:
    labels = np.asarray(columns["labels"])
    return [(bytes(columns["tokens"][index]), int(labels[index])) for index in range(len(labels))]


def held_out(found: Task) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
    return examples(found.data.columns("train")), examples(found.data.columns("validation"))


def test_val_fraction(tmp_path: Path) -> None:
    published_text(tmp_path, 40)
    whole = load_task("text", tmp_path)
    assert set(whole.sizes) == {"train", "test"}
    train, validation = held_out(load_task("text", tmp_path, val_fraction=0.2))
    assert (len(train), len(validation)) == (32, 8)
    assert sorted(train + validation) == sorted(examples(whole.data.columns("train")))
    assert held_out(load_task("text", tmp_path, val_fraction=0.2)) == (train, validation)
    assert held_out(load_task("text", tmp_path, val_fraction=0.2, seed=1))[1] != validation
    assert load_task("text", tmp_path, val_fraction=0.2).sizes["test"] == 40


@pytest.mark.parametrize("share", [1.0, -0.1, 2.0])
def test_invalid_val_fraction(tmp_path: Path, share: float) -> None:
    published_text(tmp_path, 10)
    with pytest.raises(ConfigError, match=f"val_fraction: expected a number between 0 and 1, got {share}"):
        load_task("text", tmp_path, val_fraction=share)


def test_val_fraction_with_a_validation_split(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"val_fraction: expected 0, since reviews\.csv has a validation split, got 0\.1"
    ):
        load_task(write_custom(tmp_path, "reviews.csv"), val_fraction=0.1)


def test_stream_with_a_data_set_of_another_version(tmp_path: Path) -> None:
    manifest = prepare_dataset("recall-16", tmp_path, size=40).folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(DataError, match="recall-16-10: expected version 1 of the generator, got 0"):
        load_task("recall-16", tmp_path, stream=True)


def test_stream_without_a_prepared_data_set(tmp_path: Path) -> None:
    found = load_task("recall-16", tmp_path, stream=True)
    assert isinstance(found, RecallTask)
    with pytest.raises(ConfigError, match="recall-16: expected data of kind language, got classification"):
        load_task("recall-16", tmp_path, stream=True, kind="language")
    assert found.sizes == {"train": 0, "validation": STREAM_EVAL_SIZE, "test": STREAM_EVAL_SIZE}
    seen = {tuple(row.tolist()) for step in range(5) for row in found.batch(step, 100).inputs}
    held = {
        tuple(row.tolist())
        for split in ("validation", "test")
        for b in found.eval_batches(split, 50)
        for row in b.inputs
    }
    assert len(seen) > 450
    assert len(held) == 2 * STREAM_EVAL_SIZE
    assert not seen & held
    again = load_task("recall-16", tmp_path, stream=True)
    assert torch.equal(found.batch(3, 10, 1).inputs, again.batch(3, 10, 1).inputs)
    assert not any(tmp_path.iterdir())


def test_stream_with_a_prepared_data_set(tmp_path: Path) -> None:
    prepare_dataset("recall-16", tmp_path, size=40)
    stored, streamed = load_task("recall-16", tmp_path), load_task("recall-16", tmp_path, stream=True)
    assert streamed.sizes == {"train": 40, "validation": 4, "test": 4}
    for mine, theirs in zip(streamed.eval_batches("test", 4), stored.eval_batches("test", 4), strict=True):
        assert torch.equal(mine.inputs, theirs.inputs)
    drawn = {tuple(row.tolist()) for step in range(4) for row in streamed.batch(step, 40).inputs}
    assert len(drawn) > 80


def test_examples_of_a_data_set_that_is_not_prepared(tmp_path: Path) -> None:
    data: Dataset = load_examples("listops", tmp_path, "test", 5)
    assert len(data.columns("test")["labels"]) == 5
    with pytest.raises(DataError, match="text: is not prepared"):
        load_examples("text", tmp_path, "train", 5)


def test_custom_options_of_a_prepared_data_set_are_refused(tmp_path: Path) -> None:
    path = write_custom(tmp_path, "pairs.csv")
    own = CustomOptions(text="text", second="text2")
    prepare_dataset("mine", tmp_path / "sets", origin=path, custom=own)
    for source in ("mine", tmp_path / "sets" / "mine"):
        with pytest.raises(ConfigError, match=r"custom: expected no options, .*mine is already prepared, got text="):
            load_task(source, tmp_path / "sets", custom=own)
    assert load_task("mine", tmp_path / "sets", custom=CustomOptions()).kind == "pairs"


@pytest.mark.parametrize("name", ["enwik8", "nothing", "recall-" + "9" * 5000])
def test_manifest_that_names_another_data_set(tmp_path: Path, name: str) -> None:
    manifest = published_text(tmp_path, 10) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"dataset": "text"', f'"dataset": "{name}"'))
    with pytest.raises(DataError, match=r"text: expected .*; prepare the data set again with --force"):
        load_task("text", tmp_path)


def test_file_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "available_memory", lambda: 10**9)
    path = write_custom(tmp_path, "book.txt")
    os.truncate(path, 10**9)
    with pytest.raises(DataError, match=r"book\.txt: .*needs about 2\.0 GB .*prepare it with `tcnca data prepare`"):
        load_task(path)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "nul\0"])
def test_impossible_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"expected a prepared data set|cannot be read"):
        load_task(name, tmp_path)


def test_errors_name_the_keys_of_recipes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,body,sentiment\n1,good,1\n")
    message = r"choose one of 'id', .* with data\.custom\.text=…, .* or give data\.custom\.kind=language to model"
    with pytest.raises(DataError, match=message):
        load_task(path)
    with pytest.raises(DataError, match=r"data\.custom\.lengths='x' does not apply to tables; remove it$"):
        load_task(path, custom=CustomOptions(lengths="x"))
