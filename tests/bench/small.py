"""Benchmarks that take no time: a machine whose floors are known, contestants of a few numbers, and a silent watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tcnca.bench import Clock, Entry, Floors, Inputs, Result, Settings, Times, Work
from tcnca.bench.functions import function_entry

CPU = torch.device("cpu")
FLOORS = Floors(bandwidth=1e9, rate=1e9, dtype="float32")


def settings(**changes: Any) -> Settings:
    chosen: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "seconds": 0.0, "repeat": 2, **changes}
    return Settings(**chosen)


def clock() -> Clock:
    return Clock(CPU, 0.0, 2)


def contestant(run: Callable[[Tensor], Tensor], name: str = "square", **changes: Any) -> Entry:
    """An entry whose oracle squares."""
    fields: dict[str, Any] = {
        "suite": "ops",
        "name": name,
        "label": name,
        "about": "a test",
        "sizes": {"batch": 1, "length": 5},
        "tokens": 5,
        "inputs": lambda checking: Inputs((torch.randn(5),)),
        "run": run,
        "oracle": lambda x: x * x,
        "work": {"forward": Work(2e3, 5.0), "backward": Work(3e3, 5e6)},
        "tolerance": 1e-5,
    }
    return function_entry(**{**fields, **changes})


class Silent:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.results: list[Result] = []

    def started(self, entry: Entry, done: int, total: int) -> None:
        self.begun.append(entry.name)

    def ended(self, result: Result) -> None:
        self.results.append(result)


def timed(suite: str, name: str, sizes: dict[str, int | str], **milliseconds: float) -> Result:
    """A result as if it had been measured, on the device twice as fast as called."""
    times = {}
    for part, value in milliseconds.items():
        ways = {"eager": value * 1e-3, "graph": value * 0.5e-3}
        times[part] = {how: Times(median=it, low=it, high=it, runs=3) for how, it in ways.items()}
    return Result(
        suite=suite,
        name=name,
        label=name,
        about="a test",
        sizes=sizes,
        tokens=65_536,
        status="timed",
        tolerance=1e-2,
        errors={"output": 1e-3},
        times=times,
        floor=dict.fromkeys(times, 1e-6),
        peak_bytes=20_000_000_000,
    )
