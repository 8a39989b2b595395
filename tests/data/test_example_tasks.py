"""Tasks of separate examples: what a batch holds, and what counts of it."""

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
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.data import IGNORE, Batch, Dataset
from tcnca.data.columns import Column, Ragged
from tcnca.data.datasets import entry
from tcnca.data.tasks import ClassificationTask, PairTask, RecallTask, RegressionTask
from tcnca.data.tasks.examples import ExampleTask
from tcnca.errors import ConfigError

RANDOM = np.random.default_rng(0)
LENGTHS = [7, 3, 12, 1, 5, 9, 2, 30, 4, 6, 8]
COUNT = len(LENGTHS)
TEXTS = [RANDOM.integers(1, 256, length).astype(np.uint8) for length in LENGTHS]
LABELS = np.arange(COUNT) % 3
# No two alike, so that an example can be told by its first value.
PIXELS = RANDOM.permutation(COUNT * 12).reshape(COUNT, 3, 4).astype(np.uint8)
VALUES = RANDOM.normal(5.0, 3.0, (COUNT, 6, 2)).astype(np.float32)
SERIES = [RANDOM.normal(-2.0, 0.5, (length, 2)).astype(np.float32) for length in LENGTHS]
TARGETS = RANDOM.normal(100.0, 20.0, (COUNT, 2)).astype(np.float32)
SPREAD = {"mean": [5.0, 4.0], "deviation": [3.0, 2.0]}


def data(columns: dict[str, Column], **facts: Any) -> Dataset:
    manifest = {"class_names": ["a", "b", "c"], **facts}
    return Dataset("tiny", manifest, {"train": columns, "validation": columns})


def texts(max_length: int | None = None) -> ClassificationTask:
    return ClassificationTask(data({"tokens": Ragged.of(TEXTS), "labels": LABELS}), max_length=max_length)


def pairs(max_length: int | None = None) -> PairTask:
    columns: dict[str, Column] = {"first": Ragged.of(TEXTS), "second": Ragged.of(TEXTS[::-1]), "labels": LABELS}
    return PairTask(data(columns), max_length=max_length)


def regression() -> RegressionTask:
    return RegressionTask(data({"values": VALUES, "targets": TARGETS}, **SPREAD))


def recall() -> RecallTask:
    return RecallTask(data({"tokens": PIXELS.reshape(COUNT, 12) % 4, "labels": LABELS}, symbols=list("ab12")))


TASKS: Mapping[str, ExampleTask] = {
    "texts": texts(),
    "pairs": pairs(),
    "pixels": ClassificationTask(data({"pixels": PIXELS, "labels": LABELS}, mean=0.48, deviation=0.24)),
    "values": ClassificationTask(data({"values": VALUES, "labels": LABELS}, **SPREAD)),
    "series": ClassificationTask(data({"values": Ragged.of(SERIES), "labels": LABELS}, **SPREAD)),
    "regression": regression(),
    "recall": recall(),
}
each_task = pytest.mark.parametrize("name", TASKS)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """Each row as it is, without its padding."""
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
    """All examples, one at a time, in their order."""
    return [rows_of(task._collate(task.data.columns("train"), np.array([place])))[0] for place in range(COUNT)]


def chosen(task: ExampleTask, batch: Batch) -> list[int]:
    """Which examples a batch holds."""
    known = examples_of(task)
    return [known.index(row) for row in rows_of(batch)]


def padded(texts: list[NDArray[np.uint8]], max_length: int | None = None) -> tuple[NDArray[np.int64], list[int]]:
    cut = [text[:max_length] for text in texts]
    out = np.zeros((len(cut), max(map(len, cut))), np.int64)
    for row, text in zip(out, cut, strict=True):
        row[: len(text)] = text
    return out, [len(text) for text in cut]


@pytest.mark.parametrize("max_length", [None, 10, 5, 1])
def test_texts_are_padded_and_cut(max_length: int | None) -> None:
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


def test_an_empty_text_is_one_step_of_padding() -> None:
    column = Ragged.of_bytes([b"", b""])
    task = ClassificationTask(data({"tokens": column, "labels": np.array([0, 1])}))
    batch = task.batch(0, 2)
    assert batch.inputs.tolist() == [[0], [0]]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [0, 0]
    assert batch.tokens == 0


def test_pixels_are_normalized() -> None:
    task = TASKS["pixels"]
    batch = task.batch(0, COUNT)
    order = chosen(task, batch)
    expected = (PIXELS[order].reshape(COUNT, 12, 1) / 255 - 0.48) / 0.24
    np.testing.assert_allclose(batch.inputs, expected, rtol=1e-5, atol=1e-6)
    assert batch.inputs.dtype == torch.float32
    assert batch.lengths is None
    assert sorted(order) == list(range(COUNT))


def test_pictures_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="max_length: got 5, but a picture is read whole; leave it out"):
        ClassificationTask(data({"pixels": PIXELS, "labels": LABELS}), max_length=5)


def test_values_are_standardized() -> None:
    batch = TASKS["values"].batch(0, COUNT)
    order = chosen(TASKS["values"], batch)
    np.testing.assert_allclose(batch.inputs, (VALUES[order] - [5.0, 4.0]) / [3.0, 2.0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.targets, LABELS[order])


def test_series_are_standardized_and_padded_with_zeros() -> None:
    batch = TASKS["series"].batch(0, COUNT)
    assert batch.inputs.shape == (COUNT, max(LENGTHS), 2)
    assert batch.lengths is not None
    for row, place in enumerate(chosen(TASKS["series"], batch)):
        length, expected = LENGTHS[place], (SERIES[place] - [5.0, 4.0]) / [3.0, 2.0]
        assert int(batch.lengths[row]) == length
        np.testing.assert_allclose(batch.inputs[row, :length], expected, rtol=1e-5, atol=1e-6)
        assert not batch.inputs[row, length:].any()


def test_numbers_to_predict_are_standardized() -> None:
    task = regression()
    batch = task.batch(0, COUNT)
    order = chosen(task, batch)
    expected = (TARGETS - TARGETS.mean(0, dtype=np.float64)) / TARGETS.std(0, dtype=np.float64)
    np.testing.assert_allclose(batch.targets, expected[order], rtol=1e-4, atol=1e-5)
    assert batch.targets.dtype == torch.float32


def test_a_number_that_never_changes_can_be_predicted() -> None:
    columns: dict[str, Column] = {"values": VALUES, "targets": np.full((COUNT, 1), 7.0, np.float32)}
    task = RegressionTask(data(columns, **SPREAD))
    batch = task.batch(0, COUNT)
    assert not batch.targets.any()
    assert float(task.metric_sums(torch.full((COUNT, 1), 2.0), batch)[0]) == pytest.approx(4.0 * COUNT)


@each_task
def test_a_batch_is_a_pure_function_of_seed_and_step(name: str) -> None:
    task = TASKS[name]
    steps = [0, 5, 1000, 2]
    first = {step: rows_of(task.batch(step, 4, 7)) for step in steps}
    again = type(task)(task.data)
    for step in reversed(steps):
        assert rows_of(task.batch(step, 4, 7)) == first[step] == rows_of(again.batch(step, 4, 7))
    assert rows_of(task.batch(0, 4, 8)) != first[0]


@each_task
def test_every_epoch_has_every_example_once(name: str) -> None:
    task = TASKS[name]
    walk = [place for step in range(COUNT) for place in chosen(task, task.batch(step, 4))]
    epochs = [walk[begin : begin + COUNT] for begin in range(0, len(walk), COUNT)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) == 4


@each_task
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_share_a_batch(name: str, world_size: int) -> None:
    task = TASKS[name]
    for step in range(3):
        parts = [rows_of(task.batch(step, 5, 0, rank, world_size)) for rank in range(world_size)]
        assert [row for part in parts for row in part] == rows_of(task.batch(step, 5))


def test_a_batch_without_a_row_for_each_process() -> None:
    with pytest.raises(ConfigError, match="size: the batch has 2 rows, allowed is at least one for each of 3"):
        texts().batch(0, 2, world_size=3)


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


def test_evaluation_has_texts_of_like_lengths_together_but_not_the_short_ones_first() -> None:
    def lengths() -> list[list[int]]:
        batches = texts().eval_batches("validation", 3)
        return [sorted(LENGTHS[place] for place in chosen(texts(), batch)) for batch in batches]

    found = lengths()
    assert [length for batch in sorted(found) for length in batch] == sorted(LENGTHS)
    assert found != sorted(found)
    assert lengths() == found


def test_rows_that_do_not_count_leave_the_examples_alone() -> None:
    before = examples_of(texts())
    task = texts()
    for rank in range(5):
        list(task.eval_batches("validation", 1, rank, 5))
    assert examples_of(task) == before


@pytest.mark.parametrize("world_size", [1, 3])
def test_accuracy_is_of_all_examples(world_size: int) -> None:
    task = texts()
    right = total = 0
    for rank in range(world_size):
        for batch in task.eval_batches("validation", 4, rank, world_size):
            # Says class 1 whatever it is asked.
            logits = torch.tensor([0.0, 1.0, 0.5]).expand(len(batch), 3)
            sum_, count = task.metric_sums(logits, batch)
            right, total = right + int(sum_), total + int(count)
    assert (right, total) == (int((LABELS == 1).sum()), COUNT)


def test_class_loss_and_tally_leave_out_what_does_not_count() -> None:
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


def test_number_loss_and_tally_leave_out_what_does_not_count() -> None:
    task = regression()
    outputs = torch.tensor([[1.0, 2.0], [0.0, -1.0], [5.0, 5.0]])
    targets = torch.tensor([[0.0, 4.0], [0.5, torch.nan], [torch.nan, torch.nan]])
    batch = Batch(inputs=torch.zeros(3, 1, 2), targets=targets)
    assert float(task.loss(outputs, batch)) == pytest.approx((1.0 + 4.0 + 0.25) / 3, rel=1e-6)
    squares, number = task.metric_sums(outputs, batch)
    first, second = TARGETS.astype(np.float64).std(0) ** 2
    assert int(number) == 3
    assert float(squares) == pytest.approx(1.25 * first + 4.0 * second, rel=1e-5)


def test_squared_error_is_in_the_units_of_the_numbers() -> None:
    task = regression()
    squares = number = 0.0
    for batch in task.eval_batches("validation", 4):
        total, count = task.metric_sums(torch.zeros(len(batch), 2), batch)
        squares, number = squares + float(total), number + int(count)
    # Whoever always says the mean is wrong by the variance.
    assert squares / number == pytest.approx(float(TARGETS.astype(np.float64).var(0).mean()), rel=1e-5)


def test_recall_counts_the_last_answer_only() -> None:
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
    known = entry("recall-16-4")
    columns = known.stream().take(3, 0, 300)
    task = known.task(Dataset("recall-16-4", known.facts, {"train": columns}), stream=known.stream())
    expected = np.asarray(columns["tokens"])
    for step in (0, 7, 2):
        parts = [task.batch(step, 37, 3, rank, 2) for rank in range(2)]
        np.testing.assert_array_equal(torch.cat([part.inputs for part in parts]), expected[step * 37 : step * 37 + 37])
        answers = torch.cat([part.targets for part in parts])[:, -1]
        np.testing.assert_array_equal(answers, np.asarray(columns["labels"])[step * 37 : step * 37 + 37])
    assert not torch.equal(task.batch(0, 37, 3).inputs, task.batch(0, 37, 4).inputs)


def test_what_a_model_must_take_in_and_give_out() -> None:
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


def test_a_batch_moves_with_all_its_tensors() -> None:
    moved = pairs().batch(0, 4).to("meta")
    tensors = (moved.inputs, moved.lengths, moved.second, moved.second_lengths, moved.targets)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert Batch(inputs=torch.zeros(1, 1), targets=torch.zeros(1), continues=True).to("meta").continues


def test_a_model_is_called_with_the_arguments_of_a_batch() -> None:
    batch = texts().batch(0, 3)
    assert set(batch.model_inputs()) == {"x", "lengths"}
    assert batch.model_inputs()["x"] is batch.inputs
    pair = pairs().batch(0, 3)
    assert set(pair.model_inputs()) == {"x", "lengths", "second", "lengths2"}
    assert pair.model_inputs()["second"] is pair.second
    assert pair.model_inputs()["lengths2"] is pair.second_lengths


def test_steps_of_an_epoch() -> None:
    assert [texts().steps_per_epoch(size) for size in (1, 4, COUNT, 100)] == [COUNT, -(-COUNT // 4), 1, 1]
