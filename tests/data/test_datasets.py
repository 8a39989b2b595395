"""The registry has the published data sets in their published sizes, and their tasks fit the presets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tcnca import ConfigError, LanguageModelHeadConfig, SequenceModel, TokenInputConfig, build, preset
from tcnca.data import (
    Batch,
    Dataset,
    DatasetSpec,
    Task,
    datasets,
    list_datasets,
    load_task,
    prepare_dataset,
    register_dataset,
)
from tcnca.data.datasets import canonical_name, get_dataset, is_dataset
from tcnca.data.datasets.listops import ListOps
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS, Column, Ragged
from tcnca.data.tasks import ClassificationTask
from tests.data.helpers import ragged


@pytest.mark.parametrize("name", ["listops", "pathfinder", "pathx", "recall-64-10", "recall-8192-20"])
def test_disk_bytes(name: str) -> None:
    spec = get_dataset(name)
    assert spec.generator is not None
    count = 1 if name.startswith("path") else 64
    made = spec.generator.examples(CounterRNG(0), count)
    size = 0
    for column in made.values():
        size += column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes
    assert spec.disk_bytes == pytest.approx(size / count * sum(spec.sizes.values()), rel=0.1)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("recall", "recall-64-10"),
        ("recall-64", "recall-64-10"),
        ("recall-1024", "recall-1024-10"),
        ("recall-1024-20", "recall-1024-20"),
        ("recall-6-4", "recall-6-4"),
        ("listops", "listops"),
        ("reviews", "reviews"),
    ],
)
def test_canonical_names(name: str, full: str) -> None:
    assert canonical_name(name) == full
    assert is_dataset(name) == (name != "reviews")
    if is_dataset(name):
        assert get_dataset(name).name == full


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"dataset: did you mean enwik8\? Got 'enwiki8'"):
        get_dataset("enwiki8")
    with pytest.raises(ConfigError, match=r"dataset: expected one of enwik8, listops, .*acl-citations, got 'zzz'$"):
        get_dataset("zzz")
    assert not is_dataset("recall-64-10-5")


def small_set(name: str) -> Dataset:
    """Four short examples in the form of a set."""
    spec, random = get_dataset(name), np.random.default_rng(0)
    labels = np.arange(4) % 2
    texts = ragged([random.integers(0, 256, length).astype(np.uint8) for length in (40, 300, 7, 120)])
    columns: dict[str, Column]
    metadata: dict[str, Any] = {"class_names": ["no", "yes"], **spec.metadata}
    if name == "enwik8":
        columns = {"bytes": random.integers(0, 205, 400).astype(np.uint8)}
        metadata["symbols"] = list(range(205))
    elif name == "listops":
        columns = ListOps(shortest=20, longest=200).examples(CounterRNG(0), 4)
    elif spec.generator is not None:
        columns = spec.generator.examples(CounterRNG(0), 1 if name == "pathx" else 4)
    elif name == "image":
        columns = {"pixels": random.integers(0, 256, (4, 32, 32)).astype(np.uint8), "labels": np.arange(4) + 6}
        metadata["class_names"] = list("0123456789")
    elif name == "text":
        columns = {"tokens": texts, "labels": labels}
    else:
        columns = {"first": texts, "second": texts.take(np.array([2, 3, 0, 1])), "labels": labels}
    return Dataset(name, metadata, {"train": columns, "validation": columns})


def run(model: SequenceModel, task: Task, batch: Batch) -> None:
    """One step of training up to the gradients, which all must be numbers, and one answer for each target."""
    pair = {} if batch.second is None else {"second": batch.second, "lengths2": batch.second_lengths}
    logits = model(batch.inputs, lengths=batch.lengths, return_state=False, **pair).logits
    loss = task.loss(logits, batch)
    loss.backward()
    assert bool(loss.isfinite())
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    assert any(bool(gradient.any()) for gradient in gradients if gradient is not None)
    assert int(task.metric_sums(logits, batch)[1]) > 0


SHRUNK: dict[str, Any] = {"num_layers": 1, "d_model": 8, "d_ff": 8, "d_key": 4, "d_value": 8}


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("enwik8", "enwik8"),
        ("listops", "listops"),
        ("text", "text"),
        ("retrieval", "retrieval"),
        ("image", "image"),
        ("pathfinder", "pathfinder"),
        ("pathx", "pathx"),
        ("acl-citations", "retrieval"),
        ("recall", "recall-64"),
        ("recall-1024-20", "recall-1024"),
    ],
)
@pytest.mark.parametrize("family", ["tcnca", "mega"])
def test_tasks_fit_the_presets(family: str, name: str, of: str) -> None:
    task = get_dataset(name).task(small_set(canonical_name(name)))
    family = "tcnca-simple" if family == "tcnca" and of.startswith("recall") else family
    changes: dict[str, Any] = {"vocab_size": 20} if name == "recall-1024-20" else {}
    found = preset(f"{family}-{of}", **changes).model
    assert found.causal == task.causal
    if isinstance(task.input, TokenInputConfig):
        assert isinstance(found.input, TokenInputConfig)
        assert task.input.vocab_size <= found.input.vocab_size
        assert task.input.scale_embeddings == found.input.scale_embeddings
    else:
        assert found.input == task.input
    assert type(found.head) is type(task.head)
    if isinstance(found.head, LanguageModelHeadConfig):
        assert found.head == task.head
    else:
        assert found.head.num_classes == len(task.class_names)  # type: ignore[attr-defined]
        changes["head.hidden"] = 8
    if name == "pathx":
        changes["chunk_size"] = 128  # attention over chunks of 4096 would take most of a minute
    batch = task.batch(0, 4 * 64 if name == "enwik8" else 2)
    run(build(f"{family}-{of}", **SHRUNK, **changes).train(), task, batch)


@pytest.mark.parametrize(
    ("name", "train", "expected"),
    [
        ("listops", 96, (96, 2, 2)),
        ("listops", 100, (100, 3, 3)),
        ("text", 10, (10, None, 10)),
        ("image", 9, (9, 1, 2)),
        ("pathfinder", 1, (1, 1, 1)),
        ("enwik8", 900_000, (900_000, 50_000, 50_000)),
    ],
)
def test_smaller_sizes_keep_the_proportions(name: str, train: int, expected: tuple[int | None, ...]) -> None:
    sizes = get_dataset(name).sizes_for(train)
    assert tuple(sizes.get(split) for split in SPLITS) == expected


@dataclasses.dataclass(frozen=True)
class Parity:
    """Generator of bits, labeled with their sum modulo 2."""

    version: ClassVar[int] = 1

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate `count` sequences of 12 bits."""
        bits = rng.integers(0, 2, count, 12)
        return {"tokens": bits.astype(np.uint8), "labels": bits.sum(1) % 2}


def test_a_new_data_set_is_one_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_BY_NAME", dict(datasets._BY_NAME))
    spec = DatasetSpec(
        name="parity",
        title="Parity",
        description="compute the parity of bits",
        source="generated",
        sizes={"train": 500, "validation": 50, "test": 50},
        disk_bytes=600 * 20,
        task=ClassificationTask,
        metadata={"symbols": ["0", "1"], "class_names": ["even", "odd"]},
        generator=Parity(),
    )
    register_dataset(spec)
    assert list_datasets()[-1] is spec
    prepare_dataset("parity", tmp_path, size=40)
    for task in (load_task("parity", tmp_path), load_task("parity", tmp_path, stream=True)):
        batch = task.batch(0, 8)
        assert torch.equal(batch.inputs.sum(1) % 2, batch.targets)
    with pytest.raises(ConfigError, match="name: expected one that is not registered, got 'parity'"):
        register_dataset(spec)
