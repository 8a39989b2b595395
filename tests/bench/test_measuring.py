"""What is measured of one contestant: it is checked first, and whatever goes wrong is told."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tcnca.bench import Clock, Inputs, Pair, Subject, Work, measure, measure_floors
from tcnca.bench.check import errors_of
from tcnca.bench.timing import parts_of, times_of
from tcnca.errors import KernelError
from tests.bench.small import CPU, FLOORS, clock, contestant


def test_right_contestant_is_timed() -> None:
    result = measure(contestant(lambda x: x.square()), clock(), FLOORS)
    assert (result.status, result.reason) == ("timed", "")
    assert set(result.times) == {"forward", "backward"}
    for part in ("forward", "backward"):
        times = result.times[part]["eager"]
        assert 0 < times.low <= times.median <= times.high
        assert times.runs == 2
        assert result.share(part) == result.floor[part] / times.median
    # The larger of the two: bytes over the bandwidth, operations over the rate.
    assert result.floor == {"forward": pytest.approx(2e-6), "backward": pytest.approx(5e-3)}
    assert result.errors["output"] < 1e-6
    assert result.peak_bytes is None


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: x * x * 1.001, id="a little off"),
        pytest.param(lambda x: x * x.detach(), id="right output, wrong gradient"),
        pytest.param(lambda x: torch.full_like(x, math.nan) * x, id="not a number"),
        pytest.param(lambda x: (x * x).unsqueeze(0), id="another shape"),
    ],
)
def test_wrong_contestant_is_caught_and_not_timed(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "eager", lambda *_: pytest.fail("it was timed"))
    result = measure(contestant(wrong), clock(), FLOORS)  # type: ignore[arg-type]
    assert result.status in ("wrong", "failed")
    assert result.times == {}
    assert result.reason


def test_gradients_are_compared_one_by_one_or_as_one_vector() -> None:
    """A small one that is wrong counts fully by itself, and little beside large ones, as in a model."""
    large, small = torch.full((4,), 100.0), torch.full((4,), 0.01)

    def subject(wrong: float) -> Subject:
        leaves = large.clone().requires_grad_(), small.clone().requires_grad_()
        return Subject(lambda: leaves[1] * leaves[0] + (wrong * leaves[0]).detach() * leaves[1], leaves)

    pair = Pair(subject(1e-1), subject(0.0))
    assert errors_of(pair, together=False)["gradients"] == pytest.approx(0.1, rel=1e-3)
    other = Pair(
        Subject(lambda: pair.subject.leaves[1] * (1e4 + pair.subject.leaves[0]), pair.subject.leaves),
        Subject(lambda: pair.oracle.leaves[1] * (1e4 + 2 * pair.oracle.leaves[0]), pair.oracle.leaves),
    )
    assert errors_of(other, together=False)["gradients"] == pytest.approx(0.5, rel=1e-3)
    assert errors_of(other, together=True)["gradients"] < 0.02


def test_out_of_memory_is_told_as_such() -> None:
    def run(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 900 GiB")

    result = measure(contestant(run), clock(), FLOORS)
    assert result.status == "out of memory"
    assert "900 GiB" in result.reason


def test_memory_of_a_cpu_can_end_too() -> None:
    def run(x: Tensor) -> Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")

    assert measure(contestant(run), clock(), FLOORS).status == "out of memory"


def test_kernel_that_cannot_run_here_is_not_available() -> None:
    def run(x: Tensor) -> Tensor:
        raise KernelError("x: got one on cpu, allowed is a CUDA device")

    result = measure(contestant(run), clock(), FLOORS)
    assert result.status == "not available"
    assert "allowed is a CUDA device" in result.reason


def test_other_failures_are_told_in_one_line() -> None:
    def run(x: Tensor) -> Tensor:
        raise TypeError("first line\n" + "x" * 10_000)

    result = measure(contestant(run), clock(), FLOORS)
    assert result.status == "failed"
    assert "\n" not in result.reason
    assert len(result.reason) <= 300


def test_ctrl_c_is_no_failure_of_a_contestant() -> None:
    def run(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(contestant(run), clock(), FLOORS)


def test_without_leaves_there_is_no_backward_pass() -> None:
    entry = contestant(
        lambda x: x.square(),
        inputs=lambda checking: Inputs((), (torch.ones(3),)),
        work={"forward": Work(1.0, 0.0)},
    )
    assert set(measure(entry, clock(), FLOORS).times) == {"forward"}


def test_step_of_training_is_timed_whole_and_in_parts() -> None:
    weight = torch.ones(3, requires_grad=True)
    seen: list[Tensor] = []

    def update() -> None:
        assert weight.grad is not None
        seen.append(weight.grad)
        weight.grad = None

    subject = Subject(lambda: (2 * weight).sum(), (weight,), update, lambda: weight.detach())
    inference, training = parts_of(subject)
    assert list(inference) == ["inference"]
    found = clock().eager(training, isolated=False)
    assert list(found) == ["forward", "backward", "update", "step"]
    assert found["step"].median >= found["forward"].median
    assert all(torch.equal(gradient, torch.full((3,), 2.0)) for gradient in seen)


def test_times_are_medians_and_quartiles() -> None:
    times = times_of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (times.median, times.low, times.high, times.runs) == (3.0, 2.0, 4.0, 5)


def test_as_many_runs_as_there_is_time_for() -> None:
    assert Clock(CPU, 1.0, 2).eager({"forward": lambda: None}, isolated=True)["forward"].runs == 1000
    assert Clock(CPU, 0.0, 7).eager({"forward": lambda: None}, isolated=True)["forward"].runs == 7


def test_floors_are_those_of_a_machine() -> None:
    floors = measure_floors(clock(), torch.float32, copied=2**20, width=64)
    assert 1e6 < floors.bandwidth < 1e14
    assert 1e6 < floors.rate < 1e16
    assert floors.seconds(Work(floors.bandwidth, 0.0)) == pytest.approx(1.0)
    assert floors.seconds(Work(0.0, 2 * floors.rate)) == pytest.approx(2.0)
