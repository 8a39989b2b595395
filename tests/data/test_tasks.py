"""Every task: batches are pure functions of seed and step, and processes share them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tcnca.data import Batch, Dataset, Task
from tcnca.data.tasks import ClassificationTask, ForecastTask, LanguageTask, PairTask, RegressionTask
from tests.data.helpers import ragged

RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(size=(50, 9, 2)).astype(np.float32)
STATISTICS = {"mean": [0.0, 0.0], "std": [1.0, 1.0]}
TOKENS = ragged([RANDOM.integers(0, 256, length).astype(np.uint8) for length in range(1, 51)])
SERIES = ragged([RANDOM.normal(size=(length, 2)).astype(np.float32) for length in range(2, 60)])
TASKS: dict[str, tuple[Task, int]] = {
    "language": (LanguageTask(Dataset("one", {}, {"train": {"bytes": TOKENS.values}}), chunk_size=8), 10 * 32),
    "classification": (
        ClassificationTask(
            Dataset("two", {"class_names": [*"abc"]}, {"train": {"tokens": TOKENS, "labels": np.arange(50) % 3}})
        ),
        10,
    ),
    "pairs": (
        PairTask(
            Dataset(
                "pairs",
                {"class_names": [*"abc"]},
                {"train": {"first": TOKENS, "second": TOKENS.take(np.arange(50)[::-1]), "labels": np.arange(50) % 3}},
            )
        ),
        10,
    ),
    "regression": (
        RegressionTask(Dataset("three", STATISTICS, {"train": {"values": VALUES, "targets": VALUES[:, 0]}})),
        10,
    ),
    "forecast": (ForecastTask(Dataset("four", STATISTICS, {"train": {"values": SERIES}}), window=16), 10),
}
each_task = pytest.mark.parametrize("name", TASKS)


def answers(task: Task, targets: torch.Tensor) -> torch.Tensor:
    """Return outputs that depend on the targets only."""
    if targets.is_floating_point():
        return targets.nan_to_num().sin()
    return torch.sin(targets.clamp(min=0)[..., None] * torch.arange(1.0, 1.0 + (len(task.class_names) or 256)))


def rows(batch: Batch) -> list[list[float]]:
    """Return valid inputs and targets of each row, and of the second sequence of a pair."""
    found = []
    for row in range(len(batch)):
        length = batch.inputs.shape[1] if batch.lengths is None else int(batch.lengths[row])
        targets = batch.targets[row].flatten().nan_to_num(-7.0)
        parts = [batch.inputs[row, :length].flatten(), targets[targets != -7.0]]
        if batch.second is not None:
            length = batch.second.shape[1] if batch.second_lengths is None else int(batch.second_lengths[row])
            parts.append(batch.second[row, :length].flatten())
        found.append([value for part in parts for value in part.tolist()])
    return found


@each_task
def test_batch_is_a_pure_function_of_seed_and_step(name: str) -> None:
    task, size = TASKS[name]
    steps = [0, 5, 1000, 2]
    first = {step: rows(task.batch(step, size, 7)) for step in steps}
    again = copy.deepcopy(task)
    for step in reversed(steps):
        assert rows(task.batch(step, size, 7)) == first[step] == rows(again.batch(step, size, 7))
    assert rows(task.batch(0, size, 8)) != first[0]


@each_task
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_a_batch(name: str, world_size: int) -> None:
    task, size = TASKS[name]
    for step in range(6):
        parts = [rows(task.batch(step, size, 0, rank, world_size)) for rank in range(world_size)]
        assert [row for part in parts for row in part] == rows(task.batch(step, size))


@each_task
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_weighted_losses_of_processes_average_to_the_loss_of_the_batch(name: str, world_size: int) -> None:
    task, size = TASKS[name]
    uneven = False
    for step in range(6):
        whole = task.batch(step, size, seed=3)
        assert whole.weight == 1
        parts = [task.batch(step, size, 3, rank, world_size) for rank in range(world_size)]
        losses = [task.loss(answers(task, part.targets), part) for part in parts]
        mean = torch.stack([loss * part.weight for loss, part in zip(losses, parts, strict=True)]).mean()
        torch.testing.assert_close(mean, task.loss(answers(task, whole.targets), whole))
        uneven |= not torch.allclose(mean, torch.stack(losses).mean(), rtol=1e-4)
    # Equal weights would be wrong.
    assert uneven or world_size in (1, 2)


@each_task
def test_the_loss_is_zero_if_nothing_is_counted(name: str) -> None:
    task, size = TASKS[name]
    batch = task.batch(0, size)
    outputs = answers(task, batch.targets).requires_grad_()
    batch.targets.fill_(torch.nan if batch.targets.is_floating_point() else -100)
    loss = task.loss(outputs, batch)
    loss.backward()
    assert float(loss.detach()) == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


@each_task
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_parts_of_the_time_axis_make_the_batch(name: str, count: int) -> None:
    """Inputs and targets of all parts are those of the batch, and so is the mean of their losses."""
    task, size = TASKS[name]
    batch = task.batch(3, size, seed=1)
    parts = [batch.divide(rank, count) for rank in range(count)]
    time = batch.inputs.shape[1]
    assert len({part.inputs.shape[1] for part in parts}) == 1
    torch.testing.assert_close(torch.cat([part.inputs for part in parts], 1)[:, :time], batch.inputs)
    if batch.second is not None:
        joined = torch.cat([part.second for part in parts if part.second is not None], 1)
        torch.testing.assert_close(joined[:, : batch.second.shape[1]], batch.second)
    assert sum(part.tokens for part in parts) == batch.tokens
    # Lengths are those of whole rows; with padding behind the last part there are some.
    lengths = torch.full((len(batch),), time) if batch.lengths is None else batch.lengths
    for part in parts:
        assert part.lengths is None or torch.equal(part.lengths, lengths)
        assert part.lengths is not None or count * part.inputs.shape[1] == time

    def loss(each: Batch) -> torch.Tensor:
        return task.loss(answers(task, each.targets), each) * each.weight

    torch.testing.assert_close(torch.stack([loss(part) for part in parts]).mean(), loss(batch))
