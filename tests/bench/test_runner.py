"""Measuring: every candidate is checked first, failures become results, and an interrupted run keeps its numbers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.bench import SUITES, Report, measure, read_json, run_suite, write_json
from tcnca.bench import runner as runner_module
from tcnca.bench.case import BenchCase, Workload
from tcnca.bench.timing import Cost, Timer, measure_roofline
from tcnca.errors import KernelError
from tests.bench.helpers import ROOFLINE, settings, square_case, timer


def raising(error: BaseException) -> BenchCase:
    def run(x: Tensor) -> Tensor:
        raise error

    return square_case(run)


def run_cases(monkeypatch: pytest.MonkeyPatch, *cases: BenchCase) -> Report:
    monkeypatch.setattr(runner_module, "SUITES", {"ops": lambda _: list(cases)})
    return run_suite("ops", settings(), "tcnca bench ops")


def test_correct_candidate_is_timed() -> None:
    result = measure(square_case(lambda x: x.square()), timer(), ROOFLINE)
    assert (result.status, result.reason) == ("timed", "")
    assert set(result.times) == {"forward", "backward"}
    for phase in ("forward", "backward"):
        timing = result.times[phase]["eager"]
        assert 0 < timing.q1 <= timing.median <= timing.q3
        assert timing.runs == 2
    # The larger of bytes over bandwidth and operations over rate.
    assert result.roofline == {"forward": pytest.approx(2e-6), "backward": pytest.approx(5e-3)}
    assert result.errors["output"] < 1e-6
    assert result.peak_bytes is None


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: x * x * 1.001, id="inaccurate"),
        pytest.param(lambda x: x * x.detach(), id="wrong gradient"),
        pytest.param(lambda x: torch.full_like(x, math.nan) * x, id="nan"),
        pytest.param(lambda x: (x * x).unsqueeze(0), id="another shape"),
    ],
)
def test_wrong_candidate_is_not_timed(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timer, "eager", lambda *_: pytest.fail("it was timed"))
    result = measure(square_case(wrong), timer(), ROOFLINE)
    assert result.status in ("wrong", "failed")
    assert result.times == {}
    assert result.reason


def test_gradients_are_compared_one_by_one_or_as_one_vector() -> None:
    """A wrong small gradient counts fully by itself, and little next to large ones, as in a model."""

    def workload(factor: float) -> Workload:
        leaves = torch.full((4,), 100.0).requires_grad_(), torch.full((4,), 0.01).requires_grad_()
        return Workload(lambda: leaves[1] * (1e4 + factor * leaves[0]), leaves)

    case = dataclasses.replace(square_case(torch.square), build_check=lambda: (workload(1.0), workload(2.0)))
    assert case.check_errors()["gradients"] == pytest.approx(0.5, rel=1e-3)
    assert dataclasses.replace(case, joint_gradients=True).check_errors()["gradients"] < 0.02


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 900 GiB"), "out of memory", "900 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes"), "out of memory", "7 bytes"),
        (KernelError("x: expected a CUDA device, got cpu"), "not available", "expected a CUDA device"),
        (TypeError("first line\n" + "x" * 10_000), "failed", "first line xxx"),
    ],
    ids=["gpu memory", "cpu memory", "kernel", "other"],
)
def test_failures_become_results(error: Exception, status: str, reason: str) -> None:
    result = measure(raising(error), timer(), ROOFLINE)
    assert result.status == status
    assert reason in result.reason
    assert len(result.reason) <= 301


def test_without_leaves_there_is_no_backward_pass() -> None:
    assert set(measure(square_case(torch.square, learned=0), timer(), ROOFLINE).times) == {"forward"}


def test_roofline_is_that_of_a_machine() -> None:
    roofline = measure_roofline(timer(), torch.float32)
    assert 1e6 < roofline.bytes_per_second < 1e14
    assert 1e6 < roofline.flops_per_second < 1e16
    assert roofline.seconds(Cost(roofline.bytes_per_second, 0.0)) == pytest.approx(1.0)
    assert roofline.seconds(Cost(0.0, 2 * roofline.flops_per_second)) == pytest.approx(2.0)


@pytest.mark.parametrize("suite", SUITES)
def test_suite_runs_on_a_cpu(suite: str, tmp_path: Path) -> None:
    only = ("tcn", "fft-ema", "fft-ema-cached", "attention") if suite == "ops" else ("tcnca", "mega-")
    started: list[str] = []
    report = run_suite(
        suite, settings(suite, only=only), "tcnca bench", on_start=lambda case, index, total: started.append(case.name)
    )
    assert [result.name for result in report.results] == started
    phases = {"lra": {"inference", "step"}, "model": {"step"}}.get(suite, {"forward"})
    for result in report.results:
        assert result.status == "timed", result.reason
        assert phases <= set(result.times)
        assert all(result.roofline[phase] > 0 for phase in result.times)
    assert report.ratios
    assert not report.interrupted
    write_json(tmp_path / "report.json", report)
    again = read_json(tmp_path / "report.json")
    assert (again.results, again.ratios) == (report.results, report.ratios)


def test_failures_do_not_stop_the_other_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full, infinite = raising(torch.OutOfMemoryError("full")), square_case(lambda x: x / 0)
    path = tmp_path / "deep" / "report.json"
    write_json(path, run_cases(monkeypatch, full, infinite, square_case(lambda x: x * x)))

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    values = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert values["roofline"] == ROOFLINE._asdict()
    assert values["hardware"]["device"] == values["settings"]["device"] == "cpu"
    assert values["settings"]["dtype"] == "float32"
    assert [result["status"] for result in values["results"]] == ["out of memory", "wrong", "timed"]
    assert values["results"][1]["errors"]["output"] is None
    assert set(values["results"][2]["times"]["forward"]["eager"]) == {"median", "q1", "q3", "runs"}


def test_interrupted_measurement_of_the_roofline_leaves_an_empty_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner_module, "measure_roofline", interrupted)
    report = run_cases(monkeypatch, square_case(lambda x: x * x))
    assert (report.interrupted, report.results, report.roofline) == (True, [], {})
