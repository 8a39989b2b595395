"""Tasks of separate examples: the content of batches, losses and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tcnca import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.data import IGNORE, Batch, Dataset, load_task
from tcnca.data.datasets import get_dataset
from tcnca.data.schema import Column, Ragged
from tcnca.data.tasks import ClassificationTask, PairTask, RecallTask, RegressionTask
from tcnca.data.tasks.examples import ExampleTask
from tcnca.errors import ConfigError
from tcnca.models.preprocessing import Preprocessing
from tests.data.helpers import ragged
from tests.examples import small_config

RANDOM = np.random.default_rng(0)
LENGTHS = [7, 3, 12, 1, 5, 9, 2, 30, 4, 6, 8]
COUNT = len(LENGTHS)
TEXTS = [RANDOM.integers(1, 256, length).astype(np.uint8) for length in LENGTHS]
LABELS = np.arange(COUNT) % 3
# All different, so that an example can be identified.
PIXELS = RANDOM.permutation(COUNT * 12).reshape(COUNT, 3, 4).astype(np.uint8)
VALUES = RANDOM.normal(5.0, 3.0, (COUNT, 6, 2)).astype(np.float32)
SERIES = [RANDOM.normal(-2.0, 0.5, (length, 2)).astype(np.float32) for length in LENGTHS]
TARGETS = RANDOM.normal(100.0, 20.0, (COUNT, 2)).astype(np.float32)
STATISTICS = {"mean": [5.0, 4.0], "std": [3.0, 2.0]}


def data(columns: dict[str, Column], **metadata: Any) -> Dataset:
    manifest = {"class_names": ["a", "b", "c"], **metadata}
    return Dataset("tiny", manifest, {"train": columns, "validation": columns})


def texts(max_length: int | None = None) -> ClassificationTask:
    return ClassificationTask(data({"tokens": ragged(TEXTS), "labels": LABELS}), max_length=max_length)


def pairs(max_length: int | None = None) -> PairTask:
    columns: dict[str, Column] = {
        "first": ragged(TEXTS),
        "second": ragged(TEXTS[::-1]),
        "labels": LABELS,
    }
    return PairTask(data(columns), max_length=max_length)


def regression() -> RegressionTask:
    return RegressionTask(data({"values": VALUES, "targets": TARGETS}, **STATISTICS))


def recall() -> RecallTask:
    return RecallTask(data({"tokens": PIXELS.reshape(COUNT, 12) % 4, "labels": LABELS}, symbols=list("ab12")))


TASKS: Mapping[str, ExampleTask] = {
    "texts": texts(),
    "pairs": pairs(),
    "pixels": ClassificationTask(data({"pixels": PIXELS, "labels": LABELS}, mean=0.48, std=0.24)),
    "values": ClassificationTask(data({"values": VALUES, "labels": LABELS}, **STATISTICS)),
    "series": ClassificationTask(data({"values": ragged(SERIES), "labels": LABELS}, **STATISTICS)),
    "regression": regression(),
    "recall": recall(),
}
each_task = pytest.mark.parametrize("name", TASKS)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """Return each row without its padding."""
    rows = []
    for row in range(len(batch)):
        real: list[Any] = []
        for inputs, lengths in ((batch.inputs, batch.lengths), (batch.second, batch.second_lengths)):
            if inputs is not None:
                length = inputs.shape[1] if lengths is None else int(lengths[row])
                assert not inputs[row, length:].any()
                real.append(tuple(inputs[row, :length].flatten().tolist()))
        rows.append((*real, tuple(batch.targets[row].flatten().tolist())))
    return rows


def examples_of(task: ExampleTask) -> list[tuple[Any, ...]]:
    """Return all examples in order."""
    return [rows_of(task._collate(task.data.columns("train"), np.array([place])))[0] for place in range(COUNT)]


def chosen(task: ExampleTask, batch: Batch) -> list[int]:
    """Return the indices of the examples of a batch."""
    known = examples_of(task)
    return [known.index(row) for row in rows_of(batch)]


def padded(texts: list[NDArray[np.uint8]], max_length: int | None = None) -> tuple[NDArray[np.int64], list[int]]:
    cut = [text[:max_length] for text in texts]
    out = np.zeros((len(cut), max(map(len, cut))), np.int64)
    for row, text in zip(out, cut, strict=True):
        row[: len(text)] = text
    return out, [len(text) for text in cut]


@pytest.mark.parametrize("max_length", [None, 10, 5, 1])
def test_texts_are_padded_and_truncated(max_length: int | None) -> None:
    order = chosen(texts(), texts().batch(0, COUNT))
    batch = texts(max_length).batch(0, COUNT)
    inputs, lengths = padded([TEXTS[place] for place in order], max_length)
    np.testing.assert_array_equal(batch.inputs, inputs)
    assert batch.inputs.dtype == torch.int64
    assert (batch.lengths is None) == (max_length == 1)
    if batch.lengths is not None:
        assert batch.lengths.tolist() == lengths
    np.testing.assert_array_equal(batch.targets, LABELS[order])
    assert batch.tokens == sum(lengths)


@pytest.mark.parametrize("max_length", [None, 5])
def test_pairs_have_both_texts(max_length: int | None) -> None:
    order = chosen(pairs(), pairs().batch(0, 4))
    batch = pairs(max_length).batch(0, 4)
    first, lengths = padded([TEXTS[place] for place in order], max_length)
    second, second_lengths = padded([TEXTS[::-1][place] for place in order], max_length)
    assert batch.second is not None
    np.testing.assert_array_equal(batch.inputs, first)
    np.testing.assert_array_equal(batch.second, second)
    assert batch.tokens == sum(lengths) + sum(second_lengths)
    np.testing.assert_array_equal(batch.targets, LABELS[order])


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("pixels", PIXELS.reshape(COUNT, 12, 1) / np.float32(255)),
        ("values", VALUES),
        ("series", SERIES),
        ("regression", VALUES),
    ],
)
def test_inputs_are_raw(name: str, raw: Any) -> None:
    task = TASKS[name]
    batch = task.batch(0, COUNT)
    assert batch.inputs.dtype == torch.float32
    for row, index in enumerate(chosen(task, batch)):
        length = len(raw[index])
        assert batch.lengths is None or int(batch.lengths[row]) == length
        np.testing.assert_array_equal(batch.inputs[row, :length], raw[index])
        assert not batch.inputs[row, length:].any()


def test_preprocessing() -> None:
    names = ("a", "b", "c")
    every_byte = tuple(range(256))
    found = {name: task.preprocessing() for name, task in TASKS.items()}
    assert found["texts"] == Preprocessing(task="classification", class_names=names, byte_map=every_byte)
    assert found["pairs"] == Preprocessing(task="pairs", class_names=names, byte_map=every_byte)
    assert found["recall"] == Preprocessing(task="recall", class_names=names, symbols=("a", "b", "1", "2"))
    pixels: dict[str, Any] = {"input_mean": (0.48,), "input_std": (0.24,), "image_size": (3, 4)}
    assert found["pixels"] == Preprocessing(task="classification", class_names=names, **pixels)
    assert found["regression"].target_mean == pytest.approx(TARGETS.astype(np.float64).mean(0).tolist())
    assert found["regression"].target_std == pytest.approx(TARGETS.astype(np.float64).std(0).tolist())


def test_invalid_options() -> None:
    with pytest.raises(ConfigError, match="max_length: expected None, since images are not truncated, got 5"):
        ClassificationTask(data({"pixels": PIXELS, "labels": LABELS}), max_length=5)
    with pytest.raises(ConfigError, match="max_length: expected an integer >= 1, got 0"):
        texts(0)
    with pytest.raises(ConfigError, match="by_length: expected False for a stream"):
        load_task("listops", stream=True, by_length=True)
    with pytest.raises(ConfigError, match="batch_size: expected at least one row for each of the 3 processes, got 2"):
        texts().batch(0, 2, world_size=3)
    with pytest.raises(ConfigError, match="batch_size: expected an integer >= 1, got 0"):
        next(texts().eval_batches("validation", 0))


def test_regression_loss_is_standardized_and_the_metric_is_not() -> None:
    task = regression()
    batch = task.batch(0, COUNT)
    np.testing.assert_array_equal(batch.targets, TARGETS[chosen(task, batch)])
    assert batch.targets.dtype == torch.float32
    mean, std = TARGETS.mean(0, dtype=np.float64), TARGETS.std(0, dtype=np.float64)
    outputs = torch.from_numpy(mean.astype(np.float32)).expand(COUNT, 2)
    # A model that always answers the mean has a loss of 1 and a mean squared error of the variance.
    assert float(task.loss(outputs, batch)) == pytest.approx(1.0, rel=1e-5)
    squares, number = task.metric_sums(outputs, batch)
    assert float(squares) / int(number) == pytest.approx(float((std**2).mean()), rel=1e-5)
    constant: dict[str, Column] = {"values": VALUES, "targets": np.full((COUNT, 1), 7.0, np.float32)}
    task = RegressionTask(data(constant, **STATISTICS))
    assert float(task.loss(torch.full((COUNT, 1), 9.0), task.batch(0, COUNT))) == pytest.approx(4.0)


@each_task
def test_every_epoch_has_every_example_once(name: str) -> None:
    task = TASKS[name]
    walk = [place for step in range(COUNT) for place in chosen(task, task.batch(step, 4))]
    epochs = [walk[begin : begin + COUNT] for begin in range(0, len(walk), COUNT)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 4


def counts(batch: Batch) -> list[bool]:
    """Whether each row counts."""
    targets = batch.targets.flatten(1) if batch.targets.dim() > 1 else batch.targets[:, None]
    real = ~torch.isnan(targets) if targets.is_floating_point() else targets != IGNORE
    return [bool(row) for row in real.any(1)]


@each_task
@pytest.mark.parametrize(("size", "world_size"), [(4, 1), (4, 2), (3, 5), (64, 1), (1, 4), (10, 3)])
def test_evaluation_has_every_example_once(name: str, size: int, world_size: int) -> None:
    task = TASKS[name]
    found: list[int] = []
    batches = []
    for rank in range(world_size):
        mine = list(task.eval_batches("validation", size, rank, world_size))
        batches.append(len(mine))
        for batch in mine:
            assert 1 <= len(batch) <= size
            real = counts(batch)
            assert all(real) or len(batch) == 1
            found += chosen(task, batch) if all(real) else []
    assert sorted(found) == list(range(COUNT))
    assert set(batches) == {math.ceil(COUNT / size)}


def test_evaluation_groups_similar_lengths_in_random_order() -> None:
    def lengths() -> list[list[int]]:
        batches = texts().eval_batches("validation", 3)
        return [sorted(LENGTHS[place] for place in chosen(texts(), batch)) for batch in batches]

    found = lengths()
    assert [length for batch in sorted(found) for length in batch] == sorted(LENGTHS)
    assert found != sorted(found)
    assert lengths() == found


def test_class_loss_and_metric_skip_ignored_targets() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [9.0, 0.0, 0.0], [1.0, 0.0, 2.0]])
    batch = Batch(inputs=torch.zeros(4, 1, dtype=torch.int64), targets=torch.tensor([0, 1, IGNORE, 1]))
    right, number = texts().metric_sums(logits, batch)
    assert (int(right), int(number)) == (2, 3)
    costs = [
        math.log(math.exp(2) + math.exp(1) + 1) - 2,
        math.log(1 + math.exp(3) + math.exp(1)) - 3,
        math.log(math.exp(1) + 1 + math.exp(2)),
    ]
    assert float(texts().loss(logits, batch)) == pytest.approx(sum(costs) / 3, rel=1e-6)


def test_real_valued_loss_and_metric_ignore_nan() -> None:
    task = regression()
    outputs = torch.tensor([[1.0, 2.0], [0.0, -1.0], [5.0, 5.0]])
    targets = torch.tensor([[0.0, 4.0], [0.5, torch.nan], [torch.nan, torch.nan]])
    batch = Batch(inputs=torch.zeros(3, 1, 2), targets=targets)
    first, second = TARGETS.astype(np.float64).var(0)
    assert float(task.loss(outputs, batch)) == pytest.approx((1.25 / first + 4.0 / second) / 3, rel=1e-5)
    squares, number = task.metric_sums(outputs, batch)
    assert float(squares) == pytest.approx(5.25, rel=1e-6)
    assert int(number) == 3


def test_recall_counts_the_last_token_only() -> None:
    task = recall()
    batch = task.batch(0, COUNT)
    assert (batch.targets[:, :-1] == IGNORE).all()
    np.testing.assert_array_equal(batch.targets[:, -1], LABELS[chosen(task, batch)])
    logits = torch.randn(COUNT, 12, 4, requires_grad=True)
    expected = -logits[:, -1].log_softmax(-1)[torch.arange(COUNT), batch.targets[:, -1]].mean()
    loss = task.loss(logits, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[:, :-1].any()
    assert logits.grad[:, -1].any()
    right, number = task.metric_sums(logits, batch)
    assert (int(right), int(number)) == (int((logits[:, -1].argmax(-1) == batch.targets[:, -1]).sum()), COUNT)


def test_streams_are_read_in_their_order() -> None:
    known = get_dataset("recall-16-4")
    columns = known.stream().take(3, 0, 300)
    task = known.task(Dataset("recall-16-4", known.metadata, {"train": columns}), stream=known.stream())
    expected = np.asarray(columns["tokens"])
    for step in (0, 7, 2):
        parts = [task.batch(step, 37, 3, rank, 2) for rank in range(2)]
        np.testing.assert_array_equal(torch.cat([part.inputs for part in parts]), expected[step * 37 : step * 37 + 37])
        answers = torch.cat([part.targets for part in parts])[:, -1]
        np.testing.assert_array_equal(answers, np.asarray(columns["labels"])[step * 37 : step * 37 + 37])
    assert not torch.equal(task.batch(0, 37, 3).inputs, task.batch(0, 37, 4).inputs)


def test_input_and_head() -> None:
    expected: dict[str, tuple[Any, Any]] = {
        "texts": (TokenInputConfig(vocab_size=256), ClassifierHeadConfig(num_classes=3)),
        "pairs": (TokenInputConfig(vocab_size=256), PairHeadConfig(num_classes=3)),
        "pixels": (ValueInputConfig(features=1), ClassifierHeadConfig(num_classes=3)),
        "values": (ValueInputConfig(features=2), ClassifierHeadConfig(num_classes=3)),
        "series": (ValueInputConfig(features=2), ClassifierHeadConfig(num_classes=3)),
        "regression": (ValueInputConfig(features=2), RegressionHeadConfig(outputs=2)),
        "recall": (TokenInputConfig(vocab_size=4), LanguageModelHeadConfig(tie_embeddings=False)),
    }
    for name, task in TASKS.items():
        assert (task.input, task.head, task.causal) == (*expected[name], name == "recall")
        assert task.sizes == {"train": COUNT, "validation": COUNT}
        assert task.metric == ("mean squared error" if name == "regression" else "accuracy")
        assert task.higher_is_better == (name != "regression")


def test_an_empty_text_is_one_step_of_padding() -> None:
    task = ClassificationTask(data({"tokens": Ragged.from_bytes([b"", b""]), "labels": np.array([0, 1])}))
    batch = task.batch(0, 2)
    assert batch.inputs.tolist() == [[0], [0]]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [0, 0]


def test_equal_inputs_are_noted() -> None:
    """They can come about without a mistake, since equal inputs stay in one split."""
    same, longer = np.array([1, 2, 3], np.uint8), np.array([1, 2, 3, 4], np.uint8)

    def notes(*rows: NDArray[np.uint8], max_length: int | None = None) -> str:
        columns: dict[str, Column] = {"tokens": ragged(list(rows)), "labels": np.arange(len(rows)) % 2}
        return "".join(ClassificationTask(data(columns), max_length=max_length).notes())

    assert "got 3 equal ones (empty), which teach nothing" in notes(*[same[:0]] * 3)
    assert "got 3 equal ones, which" in notes(same, same, same)
    assert "got 2 equal ones up to max_length=3, which" in notes(same, longer, max_length=3)
    assert notes(same, longer) == notes(same, longer, max_length=4) == ""
    pair: dict[str, Column] = {"first": ragged([same, same]), "second": ragged([same, longer]), "labels": np.arange(2)}
    assert PairTask(data(pair)).notes() == []
    assert not any(task.notes() for task in TASKS.values())
    assert load_task("recall-64-10", stream=True).notes() == []


def test_batches_by_length_are_a_function_of_seed_and_step() -> None:
    task = ClassificationTask(texts().data, by_length=True)
    whole = rows_of(task.batch(5, 4, 2))
    assert whole == rows_of(ClassificationTask(texts().data, by_length=True).batch(5, 4, 2))
    parts = [rows_of(task.batch(5, 4, 2, rank, 3)) for rank in range(3)]
    assert [row for part in parts for row in part] == whole


def test_pairs_are_sorted_by_their_longer_sequence() -> None:
    task = PairTask(pairs().data, by_length=True)
    longer = [max(one, other) for one, other in zip(LENGTHS, LENGTHS[::-1], strict=True)]
    found = sorted(sorted(longer[index] for index in chosen(task, task.batch(step, 2))) for step in range(5))
    lengths = [length for batch in found for length in batch]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(("time", "width"), [(1, 64), (64, 64), (65, 96), (97, 128), (500, 512), (2000, 2048)])
def test_pad_to_bucket(time: int, width: int) -> None:
    lengths = torch.tensor([time, 1])
    values = torch.randn(2, time, 3)
    batch = Batch(inputs=values, targets=torch.tensor([0, 1]), lengths=lengths, second=values, second_lengths=lengths)
    found = batch.pad_to_bucket()
    assert found.second is not None
    for inputs in (found.inputs, found.second):
        assert inputs.shape == (2, width, 3)
        assert torch.equal(inputs[:, :time], values)
        assert not inputs[:, time:].any()
    assert found.tokens == batch.tokens


def test_full_rows_are_padded_to_buckets_unless_they_are_the_longest() -> None:
    full = Batch(inputs=torch.ones(2, 100), targets=torch.tensor([0, 1]))
    for longest in (0, 100):
        assert full.pad_to_bucket(longest).inputs.shape == (2, 100)
    padded = full.pad_to_bucket(101)
    assert padded.inputs.shape == (2, 128)
    assert (padded.lengths is not None, padded.tokens) == (True, full.tokens)
    expected = {"texts": 30, "pairs": 30, "series": 30, "pixels": 0, "values": 0, "regression": 0, "recall": 0}
    assert {name: task.longest for name, task in TASKS.items()} == expected
    assert texts(max_length=10).longest == 10
    task = ClassificationTask(data({"tokens": ragged(TEXTS * 40), "labels": np.tile(LABELS, 40)}), by_length=True)
    shapes = {tuple(task.batch(step, 4).pad_to_bucket(task.longest).inputs.shape) for step in range(200)}
    assert shapes == {(4, 64), (4, 30)}


@pytest.mark.parametrize("name", ["pixels", "series", "regression"])
def test_a_model_with_preprocessing_sees_standardized_values(name: str) -> None:
    """Raw batches and a model that normalizes equal standardized batches and a model that does not."""
    task = TASKS[name]
    preprocessing, batch = task.preprocessing(), task.batch(0, COUNT)
    config = small_config(input=task.input, head=task.head, causal=False)
    torch.manual_seed(0)
    model = SequenceModel(config, preprocessing).eval()
    torch.manual_seed(0)
    plain = SequenceModel(config).eval()
    mean, std = (torch.tensor(values) for values in (preprocessing.input_mean, preprocessing.input_std))
    standardized = (batch.inputs - mean) / std
    if batch.lengths is not None:
        standardized[torch.arange(standardized.shape[1]) >= batch.lengths[:, None]] = 0
    with torch.no_grad():
        found = model(batch.inputs, lengths=batch.lengths).logits
        expected = plain(standardized, lengths=batch.lengths).logits
    if name == "regression":
        mean, std = (torch.tensor(values) for values in (preprocessing.target_mean, preprocessing.target_std))
        loss = ((expected - (batch.targets - mean) / std) ** 2).mean()
        torch.testing.assert_close(task.loss(found, batch), loss, rtol=1e-5, atol=1e-6)
        expected = expected * std + mean
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
