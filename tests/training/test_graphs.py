"""Training with CUDA graphs computes what training without them computes."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.data import Batch
from tcnca.training import DistContext, Trainer
from tcnca.training.config import RuntimeConfig
from tcnca.training.graphs import TrainingGraphs, should_capture
from tests.training.tiny import assert_same, fit, recipe, weights

LISTOPS = ["data=listops", "data.stream=true", "model=tcnca-listops", "eval.batch_size=4", "eval.max_batches=1"]
"""Rows of several lengths, dropout, and in one variant batch norms."""


def test_batches_of_equal_signatures_run_the_same_code() -> None:
    batch = Batch(inputs=torch.zeros(2, 3, dtype=torch.long), targets=torch.zeros(2, dtype=torch.long))
    other = dataclasses.replace(batch, inputs=torch.ones(2, 3, dtype=torch.long))
    assert batch.signature() == other.signature()
    lengths = torch.tensor([1, 2])
    for change in ({"lengths": lengths}, {"continues": True}, {"inputs": torch.zeros(2, 3)}):
        assert dataclasses.replace(batch, **change).signature() != batch.signature()
    assert dataclasses.replace(batch, weight=0.5).signature() == batch.signature()
    batch.copy_(other)
    assert torch.equal(batch.inputs, other.inputs)


def test_nothing_is_captured_on_a_cpu_or_with_several_processes(tmp_path: Path) -> None:
    runtime = RuntimeConfig(cuda_graphs=True)
    gpu = torch.device("cuda", 0)
    assert should_capture(runtime, DistContext(device=gpu))
    assert not should_capture(RuntimeConfig(), DistContext(device=gpu))
    assert not should_capture(runtime, DistContext(device=gpu, world_size=2))
    assert not should_capture(runtime, DistContext())
    plain, with_option = (fit(tmp_path / on, f"cuda_graphs={on}", "max_steps=3") for on in ("false", "true"))
    assert with_option.graphed_step is None
    assert_same(weights(plain.model), weights(with_option.model))


class GPUTrainer(Trainer):
    """A silent trainer on the GPU that records the loss of every step."""

    def __init__(self, folder: Path, *changes: str, stop_after: int = 0, resume: bool = False) -> None:
        super().__init__(recipe(*changes), folder, device="cuda", verbose=False, resume=resume)
        self.stop_after = stop_after
        self.losses: list[float] = []

    def _step(self, *given: Any) -> Any:
        if self.state.step + 1 == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        output = super()._step(*given)
        self.losses.append(float(output.loss))
        return output


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Check that weights agree up to the order of summation, which varies on a GPU and which Adam can amplify."""
    assert one.keys() == other.keys()
    difference = sum(float((tensor - other[name]).double().square().sum()) for name, tensor in one.items())
    size = sum(float(tensor.double().square().sum()) for tensor in one.values())
    assert difference**0.5 < 1e-3 * size**0.5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["grad_accum_steps=3"],
        ["model=mega-recall-64", "optimizer=muon", "eval.every=3", "eval.max_batches=1"],
        ["activation_checkpointing=true"],
        # Without dropout, whose mask depends on the padding: only graphs pad rows that are not compiled.
        [*LISTOPS, "nonfinite=skip", "model.norm=batch", "model.dropout=0"],
        [*LISTOPS, "compile=true", "precision=bf16", "model.attention.dropout=0.1"],
    ],
    ids=["recall", "accumulated", "mega-muon-validated", "checkpointed", "listops", "compiled"],
)
def test_a_graphed_run_equals_one_without_graphs(tmp_path: Path, changes: list[str]) -> None:
    steps = ["max_steps=12", "lr=1e-4", "eval.every=0", "checkpoint.every=0"]
    plain, graphed = (GPUTrainer(tmp_path / on, *steps, *changes, f"cuda_graphs={on}") for on in ("false", "true"))
    for trainer in (plain, graphed):
        trainer.fit()
    assert plain.graphed_step is None
    assert graphed.graphed_step is not None
    assert graphed.graphed_step.num_graphs > 0
    rough = "precision=bf16" in changes
    assert graphed.losses == pytest.approx(plain.losses, rel=1e-2 if rough else 1e-4)
    assert len(set(graphed.losses)) > 1
    if not rough:
        assert_close(weights(graphed.model), weights(plain.model))


@pytest.mark.gpu
def test_a_resumed_graphed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Dropout, too: the graphs of the second part are captured at other steps."""
    changes = ["cuda_graphs=true", "lr=1e-4", "eval.every=0", "max_steps=14"]
    whole = GPUTrainer(tmp_path / "whole", *changes)
    whole.fit()
    first = GPUTrainer(tmp_path / "parts", *changes, stop_after=7)
    first.fit()
    second = GPUTrainer(tmp_path / "parts", *changes, resume=True)
    second.fit()
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-4)
    assert_close(weights(second.model), weights(whole.model))


@pytest.mark.gpu
def test_the_number_of_graphs_is_bounded_and_a_failure_is_survived() -> None:
    device = torch.device("cuda", 0)
    weight = torch.ones((), device=device, requires_grad=True)
    warnings: list[str] = []

    def step(batch: Batch) -> Tensor:
        loss = (weight * batch.inputs).sum() * batch.weight
        if batch.inputs.shape[1] == 5:
            loss.item()  # synchronizes, which cannot be captured
        loss.backward()
        return loss.detach()

    graphed = TrainingGraphs(step, device, warnings.append)
    for number, width in enumerate((3, 4, 3, 4, 3, 4, 3)):
        factor = float(number)  # varies without another graph
        batch = Batch(inputs=torch.full((2, width), float(width)), targets=torch.zeros(2), weight=factor)
        weight.grad = None if weight.grad is None else weight.grad.zero_()
        assert float(graphed(batch)) == 2 * width**2 * factor
        assert weight.grad is not None
        assert float(weight.grad) == 2 * width**2 * factor
    assert graphed.num_graphs == 2
    assert not warnings
    for _ in range(4):
        batch = Batch(inputs=torch.full((2, 5), 5.0), targets=torch.zeros(2))
        assert float(graphed(batch)) == 50
    assert graphed.num_graphs == 0
    assert len(warnings) == 1
    assert float(graphed(Batch(inputs=torch.ones(2, 3), targets=torch.zeros(2)))) == 6
