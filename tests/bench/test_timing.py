"""Timing on a CPU and on a GPU. A stand-in for CUDA shows how times are added up."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tcnca.bench import SUITES, measure
from tcnca.bench.case import Workload
from tcnca.bench.report import GRAPHED_STEP
from tcnca.bench.timing import Timer, Timing, capture_phases
from tests.bench.helpers import CPU, ROOFLINE, small_cases, square_case, timer


def test_medians_and_quartiles() -> None:
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(median=3.0, q1=2.0, q3=4.0, runs=5)


def test_number_of_runs_depends_on_the_time_they_take() -> None:
    assert Timer(CPU, 1.0, 2).eager({"forward": lambda: None}, isolated=True)["forward"].runs == 1000
    assert Timer(CPU, 0.0, 7).eager({"forward": lambda: None}, isolated=True)["forward"].runs == 7


def test_cpu_time_leaves_out_the_time_of_others() -> None:
    phases = {"sleep": lambda: time.sleep(0.02)}
    assert Timer(CPU, 0.0, 2).eager(phases, isolated=True)["sleep"].median >= 0.02
    assert Timer(CPU, 0.0, 2, cpu_time=True).eager(phases, isolated=True)["sleep"].median < 0.01


def test_training_step_is_timed_whole_and_by_phase() -> None:
    weight = torch.ones(3, requires_grad=True)
    gradients: list[torch.Tensor] = []

    def optimizer_step() -> None:
        assert weight.grad is not None
        gradients.append(weight.grad)
        weight.grad = None

    workload = Workload(lambda: (2 * weight).sum(), (weight,), optimizer_step, lambda: weight.detach())
    inference, training = workload.phases()
    assert list(inference) == ["inference"]
    found = timer().eager(training, isolated=False)
    assert list(found) == ["forward", "backward", "optimizer", "step"]
    assert found["step"].median >= found["forward"].median
    assert all(torch.equal(gradient, torch.full((3,), 2.0)) for gradient in gradients)


def test_backward_frees_what_the_forward_pass_saved() -> None:
    """Otherwise memory would grow from run to run."""
    (phases,) = square_case(lambda x: x * x).build().phases()
    phases["forward"]()
    phases["backward"]()
    with pytest.raises(IndexError):
        phases["backward"]()


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_suite_is_timed_in_eager_mode_and_as_a_graph(suite: str) -> None:
    device = torch.device("cuda")
    gpu_timer = Timer(device, 0.0, 3)
    for case in small_cases(suite, channels=8, device=device, dtype=torch.bfloat16):
        result = measure(case, gpu_timer, ROOFLINE)
        if result.status == "not available":
            assert result.reason
            continue
        assert (result.status, result.reason) == ("timed", ""), case.name
        for phase, modes in result.times.items():
            expected = {"eager", "graph"} if case.graph and phase != GRAPHED_STEP else {"eager"}
            assert set(modes) == expected, (case.name, phase)
            assert all(timing.median > 0 for timing in modes.values())
        assert result.peak_bytes is not None
        assert result.peak_bytes > 0


@pytest.mark.gpu
def test_graph_computes_what_eager_mode_computes() -> None:
    (case,) = small_cases("ops", only=("tcn",), device=torch.device("cuda"), lengths=(300,), channels=64)
    workload = case.build()
    expected = workload.run().detach().clone()
    output: list[torch.Tensor] = []

    def forward() -> None:
        output[:] = [workload.run()]

    replay = capture_phases({"forward": forward})["forward"]
    with torch.no_grad():
        output[0].fill_(float("nan"))
    replay()
    torch.cuda.synchronize()
    assert torch.equal(output[0], expected)


@pytest.mark.gpu
def test_failed_capture_leaves_cuda_usable() -> None:
    x, found = torch.rand(5, device="cuda"), torch.zeros(5, device="cuda")

    def synchronize() -> None:
        torch.rand(5, device="cuda")
        torch.cuda.synchronize()

    def draw() -> None:
        found.copy_(x + torch.rand_like(x))

    with pytest.raises(RuntimeError):
        capture_phases({"forward": synchronize})
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    replay = capture_phases({"forward": draw})["forward"]
    drawn = []
    for _ in range(2):
        replay()
        drawn.append(found.clone())
    assert not torch.equal(*drawn)
    assert bool((drawn[0] >= x).all())


class FakeCUDA:
    """Has a clock that advances only when something runs, and a log of what ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def event(self, **_: Any) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def run(self, name: str, milliseconds: float) -> None:
        self.now += milliseconds
        self.log.append(name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCUDA:
    fake = FakeCUDA()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 40)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: fake.log.append(name))
    return fake


def gpu_timer(cuda: FakeCUDA) -> Timer:
    timer = Timer(CPU, 0.0, 3)
    timer.device = torch.device("cuda")
    timer._flush_buffer = SimpleNamespace(zero_=lambda: cuda.run("flush", 50.0))  # type: ignore[assignment]
    return timer


def test_isolated_phases_start_from_cold_caches(cuda: FakeCUDA) -> None:
    phases = {"forward": lambda: cuda.run("forward", 2.0), "backward": lambda: cuda.run("backward", 5.0)}
    found = gpu_timer(cuda).eager(phases, isolated=True)
    assert {name: timing.median for name, timing in found.items()} == {"forward": 2e-3, "backward": 5e-3}
    assert found["forward"].runs == 3
    # After the warm-up: flush and synchronize before each phase.
    start = cuda.log.index("flush")
    assert cuda.log[start : start + 6] == ["flush", "synchronize", "forward", "flush", "synchronize", "backward"]


def test_training_steps_follow_one_another(cuda: FakeCUDA) -> None:
    phases = {name: lambda name=name: cuda.run(name, 1.0) for name in ("forward", "backward", "optimizer")}
    found = gpu_timer(cuda).eager(phases, isolated=False)
    assert found["step"].median == pytest.approx(3e-3)
    assert "flush" not in cuda.log
    assert cuda.log[-7:-1] == ["forward", "backward", "optimizer"] * 2


def test_eager_times_stay_if_capture_fails(cuda: FakeCUDA, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(phases: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("tcnca.bench.timing.capture_phases", refuse)
    result = measure(square_case(lambda x: x * x), gpu_timer(cuda), ROOFLINE)
    assert result.status == "timed"
    assert set(result.times["forward"]) == {"eager"}
    assert result.reason == "not captured as a graph: operation not permitted when stream is capturing"
    assert result.peak_bytes == 60
