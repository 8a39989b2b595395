"""Forecasting: windows of raw values; every value but the first of a sequence is predicted once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tcnca import RegressionHeadConfig, SequenceModel, ValueInputConfig
from tcnca.data import Batch, Dataset
from tcnca.data.schema import Column
from tcnca.data.tasks import ForecastTask
from tcnca.errors import ConfigError, DataError
from tests.data.helpers import ragged
from tests.examples import small_model

MEAN, STD = [10.0, -1.0], [4.0, 0.5]
# A sequence of one value has nothing to predict.
LENGTHS = [9, 1, 30, 2, 17, 8, 1, 25]


def series(lengths: list[int]) -> list[NDArray[np.float32]]:
    """Return sequences whose first feature is its position among all values."""
    total = sum(lengths)
    values = np.stack([np.arange(total), np.random.default_rng(0).normal(size=total)], 1).astype(np.float32)
    return np.split(values, np.cumsum(lengths)[:-1])


def forecast(lengths: list[int] = LENGTHS, window: int = 8) -> ForecastTask:
    return made(ragged(series(lengths)), window)


def made(column: Column, window: int) -> ForecastTask:
    splits = {"train": {"values": column}, "test": {"values": column}}
    return ForecastTask(Dataset("tiny", {"mean": MEAN, "std": STD}, splits), window=window)


def owner(place: int, lengths: list[int] = LENGTHS) -> int:
    """Return the sequence of the value at a position."""
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def windows(batch: Batch, values: NDArray[np.float32]) -> list[tuple[int, int]]:
    """Return begin and end of the counted targets of each row, after a comparison with the values."""
    found = []
    for row in range(len(batch)):
        counted = ~torch.isnan(batch.targets[row])
        assert bool((counted.all(1) == counted.any(1)).all())
        length = int(counted[:, 0].sum())
        assert bool(counted[:length].all())
        stated = batch.inputs.shape[1] if batch.lengths is None else int(batch.lengths[row])
        assert stated == max(length, 1)
        assert not batch.inputs[row, length:].any()
        if length:
            begin = int(batch.inputs[row, 0, 0])
            np.testing.assert_array_equal(batch.inputs[row, :length], values[begin : begin + length])
            np.testing.assert_array_equal(batch.targets[row, :length], values[begin + 1 : begin + 1 + length])
            found.append((begin + 1, begin + 1 + length))
    return found


@pytest.mark.parametrize("window", [1, 4, 8, 100])
def test_targets_are_the_next_values(window: int) -> None:
    task, values = forecast(window=window), np.concatenate(series(LENGTHS))
    for step in range(40):
        batch = task.batch(step, 5)
        assert batch.inputs.dtype == batch.targets.dtype == torch.float32
        found = windows(batch, values)
        assert len(found) == len(batch) == 5
        for begin, end in found:
            sequence = owner(begin - 1)
            assert owner(end - 1) == sequence
            assert end - begin == min(window, LENGTHS[sequence] - 1)


def test_windows_per_epoch() -> None:
    task, values = forecast(), np.concatenate(series(LENGTHS))
    expected = [math.ceil((length - 1) / 8) for length in LENGTHS]
    total = sum(expected)
    for epoch in range(3):
        batch = task.batch(epoch, total)
        owners = [owner(begin - 1) for begin, _ in windows(batch, values)]
        assert np.bincount(owners, minlength=len(LENGTHS)).tolist() == expected


def test_windows_are_shifted_and_reach_every_value() -> None:
    task, values = forecast([50], 8), np.concatenate(series([50]))
    epochs = [sorted(windows(task.batch(epoch, 7), values)) for epoch in range(60)]
    assert len({tuple(epoch) for epoch in epochs}) > 50
    times = np.zeros(50, np.int64)
    for epoch in epochs:
        for begin, end in epoch:
            assert begin >= 1
            assert end <= 50
            times[begin:end] += 1
    assert times[0] == 0
    assert (times[1:] > 0).all()


@pytest.mark.parametrize(("window", "size", "world_size"), [(1, 3, 2), (7, 3, 1), (8, 2, 5), (1000, 64, 3), (7, 1, 1)])
def test_every_value_is_predicted_once(window: int, size: int, world_size: int) -> None:
    task, values = forecast(window=window), np.concatenate(series(LENGTHS))
    times = np.zeros(len(values), np.int64)
    flags = set()
    for rank in range(world_size):
        batches = list(task.eval_batches("test", size, rank, world_size))
        flags.add(tuple(batch.continues for batch in batches))
        for batch in batches:
            assert batch.inputs.shape[1] <= window
            for begin, end in windows(batch, values):
                times[begin:end] += 1
    expected = np.ones(len(values), np.int64)
    expected[np.cumsum([0, *LENGTHS[:-1]])] = 0
    np.testing.assert_array_equal(times, expected)
    assert len(flags) == 1


@torch.no_grad()
def test_carried_evaluation_equals_one_call() -> None:
    task = forecast()
    assert task.causal
    assert (task.input, task.head) == (ValueInputConfig(features=2), RegressionHeadConfig(outputs=2, pooling="none"))
    model: SequenceModel = small_model("tcnca", input=task.input, head=task.head, causal=True).float()
    squares, number, state = 0.0, 0, None
    for batch in task.eval_batches("test", 3):
        outputs, state = model(batch.inputs, lengths=batch.lengths, state=state if batch.continues else None)
        total, count = task.metric_sums(outputs, batch)
        squares, number = squares + float(total), number + int(count)
    expected = 0.0
    for sequence in series(LENGTHS):
        if len(sequence) > 1:
            answers = model(torch.from_numpy(sequence[None, :-1])).logits[0].numpy()
            expected += float(((answers - sequence[1:]) ** 2).sum())
    assert number == 2 * (sum(LENGTHS) - len(LENGTHS))
    assert squares == pytest.approx(expected, rel=1e-5)


def test_loss_is_standardized_and_the_metric_is_not() -> None:
    task = forecast()
    targets = torch.tensor([[[1.0, 2.0], [torch.nan, torch.nan]]])
    batch = Batch(inputs=torch.zeros(1, 2, 2), targets=targets)
    outputs = torch.tensor([[[2.0, 4.0], [100.0, 100.0]]])
    assert float(task.loss(outputs, batch)) == pytest.approx(((1 / 4.0) ** 2 + (2 / 0.5) ** 2) / 2)
    squares, number = task.metric_sums(outputs, batch)
    assert float(squares) == pytest.approx(5.0)
    assert int(number) == 2
    assert (task.metric, task.higher_is_better) == ("mean squared error", False)


def test_invalid_windows_and_data() -> None:
    with pytest.raises(ConfigError, match="window: expected an integer >= 1, got 0"):
        forecast(window=0)
    with pytest.raises(DataError, match="tiny: expected a training sequence of at least two time steps, got none"):
        forecast([1, 1])


def test_preprocessing_standardizes_inputs_and_outputs() -> None:
    preprocessing = forecast().preprocessing()
    assert preprocessing.task == "forecast"
    assert preprocessing.input_mean == preprocessing.target_mean == tuple(MEAN)
    assert preprocessing.input_std == preprocessing.target_std == tuple(STD)
