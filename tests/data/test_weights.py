"""The mean of the weighted losses of all processes is the loss of the whole batch, even if their parts differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tcnca.data import Dataset, Task
from tcnca.data.schema import Ragged
from tcnca.data.tasks import ClassificationTask, ForecastTask, LanguageTask, RegressionTask

RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(size=(50, 9, 2)).astype(np.float32)
STATISTICS = {"mean": [0.0, 0.0], "std": [1.0, 1.0]}
TOKENS = Ragged.from_arrays([RANDOM.integers(0, 256, length).astype(np.uint8) for length in range(1, 51)])
SERIES = Ragged.from_arrays([RANDOM.normal(size=(length, 2)).astype(np.float32) for length in range(2, 60)])
TASKS: dict[str, tuple[Task, int]] = {
    "language": (LanguageTask(Dataset("one", {}, {"train": {"bytes": TOKENS.values}}), chunk_size=8), 10 * 32),
    "classification": (
        ClassificationTask(
            Dataset("two", {"class_names": [*"abc"]}, {"train": {"tokens": TOKENS, "labels": np.arange(50) % 3}})
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
