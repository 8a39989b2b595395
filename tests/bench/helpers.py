"""Benchmarks that take no time: a machine with a known roofline, and candidates of a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tcnca.bench import BenchCase, Cost, Result, Roofline, Settings, Timer, Timing, bench_cases
from tcnca.bench.operators import Inputs, function_case

CPU = torch.device("cpu")
ROOFLINE = Roofline(bytes_per_second=1e9, flops_per_second=1e9, dtype="float32")
SMALL: dict[str, dict[str, Any]] = {
    "ops": {"lengths": (67,), "batches": (2,), "channels": 5, "kernel_size": 4, "depth": 3},
    "layer": {"lengths": (70,), "batches": (1,)},
    "model": {"lengths": (70,), "batches": (1,), "num_layers": 1},
    "lra": {"lengths": (70,), "batches": (2,), "num_layers": 1},
}


def settings(suite: str = "", **changes: Any) -> Settings:
    """Settings of a suite at a small size, with as few runs as possible."""
    chosen: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "seconds": 0.0, "repeat": 2}
    return Settings(**{**chosen, **SMALL.get(suite, {}), **changes})


def small_cases(suite: str, **changes: Any) -> list[BenchCase]:
    return bench_cases(suite, settings(suite, **changes))


def timer() -> Timer:
    return Timer(CPU, 0.0, 2)


def square_case(run: Callable[[Tensor], Tensor], name: str = "square", **changes: Any) -> BenchCase:
    """A case whose oracle squares."""
    fields: dict[str, Any] = {
        "dtype": torch.float32,
        "name": name,
        "label": name,
        "description": "a test",
        "sizes": {"batch": 1, "length": 5},
        "tokens": 5,
        "inputs": lambda checking: Inputs((torch.randn(5),)),
        "run": run,
        "oracle": lambda x: x * x,
        "cost": {"forward": Cost(2e3, 5.0), "backward": Cost(3e3, 5e6)},
        "tolerance": 1e-5,
    }
    return function_case(**{**fields, **changes})


def timed(suite: str, name: str, sizes: dict[str, int | str], **milliseconds: float) -> Result:
    """A result as if it had been measured, with graphs twice as fast as eager mode."""
    times = {}
    for phase, value in milliseconds.items():
        modes = {"eager": value * 1e-3, "graph": value * 0.5e-3}
        times[phase] = {mode: Timing(median=it, q1=it, q3=it, runs=3) for mode, it in modes.items()}
    return Result(
        suite=suite,
        name=name,
        label=name.replace("tcnca", "TCNCA"),
        description="a test",
        sizes=sizes,
        tokens=65_536,
        status="timed",
        tolerance=1e-2,
        errors={"output": 1e-3},
        times=times,
        roofline=dict.fromkeys(times, 1e-6),
        peak_bytes=20_000_000_000,
    )
