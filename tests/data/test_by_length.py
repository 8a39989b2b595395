"""Batches of like lengths, and batches padded to few lengths."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

import tcnca
from tcnca.data import Batch
from tcnca.data.columns import Column, Ragged
from tcnca.data.store import Dataset
from tcnca.data.tasks import ClassificationTask, PairTask
from tcnca.errors import ConfigError

RANDOM = np.random.default_rng(5)
COUNT, SIZE = 640, 10
TEXTS = [RANDOM.integers(0, 256, length).astype(np.uint8) for length in RANDOM.integers(1, 900, COUNT)]
# The label says which example it is.
COLUMNS: dict[str, Column] = {"tokens": Ragged.of(TEXTS), "labels": np.arange(COUNT)}


def texts(by_length: bool, max_length: int | None = None) -> ClassificationTask:
    data = Dataset("tiny", {"class_names": [str(place) for place in range(COUNT)]}, {"train": COLUMNS})
    return ClassificationTask(data, max_length=max_length, by_length=by_length)


def width(batch: Batch) -> int:
    return batch.inputs.shape[1]


def test_an_epoch_still_meets_every_example_once() -> None:
    task = texts(True)
    batches = [task.batch(step, SIZE, seed=1) for step in range(COUNT // SIZE)]
    assert Counter(int(label) for batch in batches for label in batch.targets) == Counter(range(COUNT))
    for batch in batches:
        for row, label in enumerate(batch.targets.tolist()):
            text = TEXTS[label]
            assert batch.inputs[row, : len(text)].tolist() == text.tolist()


@pytest.mark.parametrize(("count", "size"), [(100, 32), (33, 32), (32, 32), (100, 99)])
def test_batches_of_a_small_set_hold_different_examples(count: int, size: int) -> None:
    """Of several epochs at once, the copies of an example would be side by side, and a batch few examples."""
    columns: dict[str, Column] = {"tokens": Ragged.of(TEXTS[:count]), "labels": np.arange(count)}
    data = Dataset("tiny", {"class_names": [str(place) for place in range(count)]}, {"train": columns})
    task = ClassificationTask(data, by_length=True)
    seen = Counter[int]()
    for step in range(3 * count // size):
        found = Counter(task.batch(step, size).targets.tolist())
        # Twice, where an epoch ends inside.
        assert max(found.values()) <= 2
        seen += found
    assert max(seen.values()) - min(seen[place] for place in range(count)) <= 2


def test_there_is_much_less_padding() -> None:
    real = sum(len(text) for text in TEXTS)
    area = {
        by_length: sum(texts(by_length).batch(step, SIZE).inputs.numel() for step in range(COUNT // SIZE))
        for by_length in (False, True)
    }
    assert area[False] > 1.6 * real
    assert area[True] < 1.1 * real


def test_batches_come_in_no_order_and_anew_each_epoch() -> None:
    task = texts(True)
    first, second = ([width(task.batch(epoch * 64 + step, SIZE)) for step in range(64)] for epoch in range(2))
    assert abs(np.corrcoef(first, np.arange(64))[0, 1]) < 0.5
    assert first != second
    assert [width(task.batch(step, SIZE, seed=1)) for step in range(64)] != first


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_one_batch(world_size: int) -> None:
    task = texts(True, max_length=500)
    whole = task.batch(7, SIZE, seed=2)
    parts = [task.batch(7, SIZE, 2, rank, world_size) for rank in range(world_size)]
    assert torch.cat([part.targets for part in parts]).tolist() == whole.targets.tolist()


def test_pairs_are_sorted_by_their_longer_sequence() -> None:
    columns: dict[str, Column] = {
        "first": Ragged.of(TEXTS),
        "second": Ragged.of(TEXTS[::-1]),
        "labels": np.arange(COUNT),
    }
    data = Dataset("tiny", {"class_names": [str(place) for place in range(COUNT)]}, {"train": columns})
    task = PairTask(data, by_length=True)
    longer = {place: max(len(TEXTS[place]), len(TEXTS[COUNT - 1 - place])) for place in range(COUNT)}
    spans = []
    for step in range(32):
        found = [longer[label] for label in task.batch(step, SIZE).targets.tolist()]
        spans.append(max(found) - min(found))
    assert np.mean(spans) < 100


def test_a_stream_has_no_lengths() -> None:
    with pytest.raises(ConfigError, match="by_length: got True, but the examples of a stream have no lengths"):
        tcnca.data.load_task("listops", stream=True, by_length=True)


@pytest.mark.parametrize(("time", "wide"), [(1, 64), (64, 64), (65, 96), (96, 96), (97, 128), (500, 512), (2000, 2048)])
def test_rows_are_widened_to_few_lengths(time: int, wide: int) -> None:
    lengths = torch.tensor([time, 1])
    values = torch.randn(2, time, 3)
    batch = Batch(inputs=values, targets=torch.tensor([0, 1]), lengths=lengths, second=values, second_lengths=lengths)
    found = batch.widened()
    assert found.second is not None
    for inputs in (found.inputs, found.second):
        assert inputs.shape == (2, wide, 3)
        assert torch.equal(inputs[:, :time], values)
        assert not inputs[:, time:].any()
    assert found.tokens == batch.tokens


def test_full_rows_are_left_alone() -> None:
    batch = Batch(inputs=torch.zeros(2, 100), targets=torch.tensor([0, 1]))
    assert batch.widened().inputs.shape == (2, 100)
