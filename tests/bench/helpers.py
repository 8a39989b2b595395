"""Benchmarks that take no time: a machine with a known roofline, and candidates of a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tcnca.bench import Report, Result, Settings, bench_cases
from tcnca.bench.case import BenchCase
from tcnca.bench.operators import function_case
from tcnca.bench.timing import Cost, Roofline, Timer, Timing

CPU = torch.device("cpu")
ROOFLINE = Roofline(bytes_per_second=1e9, flops_per_second=1e9)
SMALL: dict[str, dict[str, Any]] = {
    "ops": {"lengths": (67,), "batches": (2,), "channels": 5, "kernel_size": 4, "depth": 3},
    "layer": {"lengths": (70,), "batches": (1,)},
    "model": {"lengths": (70,), "batches": (1,), "num_layers": 1},
    "lra": {"lengths": (70,), "batches": (2,), "num_layers": 1},
    "generate": {"lengths": (5,), "batches": (2,), "num_layers": 1},
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
        "sizes": {"batch": 1, "length": 5},
        "tokens": 5,
        "inputs": lambda checking: [torch.randn(5)],
        "run": run,
        "oracle": lambda x: x * x,
        "cost": {"forward": Cost(2e3, 5.0), "backward": Cost(3e3, 5e6)},
        "tolerance": 1e-5,
    }
    return function_case(**{**fields, **changes})


def timed(name: str, sizes: dict[str, int | str], **milliseconds: float) -> Result:
    """A result as if it had been measured, with graphs twice as fast as eager mode."""
    times = {}
    for phase, value in milliseconds.items():
        modes = {"eager": value * 1e-3, "graph": value * 0.5e-3}
        times[phase] = {mode: Timing(median=it, q1=it, q3=it, runs=3) for mode, it in modes.items()}
    return Result(
        name=name,
        label=name.replace("tcnca", "TCNCA"),
        sizes=sizes,
        tokens=65_536,
        status="timed",
        tolerance=1e-2,
        errors={"output": 1e-3},
        times=times,
        roofline=dict.fromkeys(times, 1e-6),
        peak_bytes=20_000_000_000,
    )


def report(suite: str, results: list[Result], device: str = "cuda") -> Report:
    return Report(
        suite=suite,
        hardware={"device": device, "name": "a machine", "memory_gib": 1},
        versions={"torch": "2"},
        commit=None,
        started="2026",
        command=f"tcnca bench {suite}",
        settings={"dtype": "bfloat16", "channels": 64, "kernel_size": 17, "depth": 4},
        results=results,
    )


LONG: dict[str, int | str] = {"batch": 8, "length": 131_072, "dilation_factor": 20}
OPS = [
    timed("tcn-bi", LONG, forward=1.0, backward=2.0),
    timed("fft-ema-published-bi", LONG, forward=45.0, backward=40.0),
    timed("fft-ema-bi", LONG, forward=10.0, backward=20.0),
    timed("fft-ema-cached-bi", LONG, forward=8.0, backward=10.0),
    timed("fft-ema-bi", {**LONG, "length": 8192}, forward=7.0, backward=9.0),
]
_STEP = {"forward": 20.0, "backward": 40.0, "optimizer": 1.0, "step": 61.0}
_MODEL: dict[str, int | str] = {"batch": 8, "length": 8192, "num_layers": 12}
_TOKEN: dict[str, int | str] = {"batch": 8, "position": 64, "num_layers": 6, "d_model": 256}
_TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
LRA = [
    timed(name, {"task": task, "batch": 2, "length": 1024, "num_layers": 4}, inference=inference, **_STEP)
    for index, task in enumerate(_TASKS)
    for name, inference in (("tcnca", 1.0), ("mega-fft", 1.0 + index))
]
REPORTS = {
    "ops": report("ops", OPS),
    "layer": report("layer", [timed("tcnca", {"batch": 1, "length": 64}, forward=1.0, backward=2.0)]),
    "model": report("model", [timed(name, _MODEL, **_STEP) for name in ("tcnca", "mega-fft-compiled")]),
    "lra": report("lra", LRA),
    "generate": report("generate", [timed(name, _TOKEN, forward=2.0) for name in ("mega-int8", "tcnca-model")]),
}
