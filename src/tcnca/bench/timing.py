"""Timing: medians of many runs, on a GPU both in eager mode and as replayed CUDA graphs, and the machine's roofline."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import numpy as np
import torch

from tcnca.config import NonNegativeFloat, Range
from tcnca.ops.driver import capture_graph

Phases = Mapping[str, Callable[[], object]]

_MAX_RUNS = 1000
"""More runs do not improve a median."""
_WARMUP_RUNS = 3
"""Runs on a GPU before timing, in which kernels are compiled and selected."""
_FLUSH_FACTOR = 4
"""Size of the buffer that flushes the L2 cache of a GPU, as a multiple of that cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and quartiles of the time of a phase, in seconds."""

    median: Annotated[float, Range(1e-12, 1e9)]
    q1: NonNegativeFloat
    q3: NonNegativeFloat
    runs: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarize the times of several runs."""
        q1, median, q3 = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        return cls(median=median, q1=q1, q3=q3, runs=len(seconds))


class Timer:
    """Times phases on one device.

    Args:
        device: device to time on.
        seconds: time to spend on a group of phases.
        repeat: minimum number of runs.
        cpu_time: on a CPU, measure the time that the calling thread computes, without that in which others run in its
            place. This is only meaningful for one thread.
    """

    def __init__(self, device: torch.device, seconds: float, repeat: int, *, cpu_time: bool = False) -> None:
        self.device, self.seconds, self.repeat = device, seconds, repeat
        self._clock = time.thread_time if cpu_time else time.perf_counter
        self._flush_buffer: torch.Tensor | None = None
        if self.on_gpu:
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush_buffer = torch.empty(_FLUSH_FACTOR * cache, dtype=torch.uint8, device=device)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, which can replay graphs."""
        return self.device.type == "cuda"

    def eager(self, phases: Phases, isolated: bool) -> dict[str, Timing]:
        """Time each phase as a caller sees it: on a GPU including the time of kernel launches."""
        for _ in range(_WARMUP_RUNS if self.on_gpu else 1):
            _run(phases)
        return self._time(phases, isolated, eager=True)

    def graph(self, phases: Phases, isolated: bool) -> dict[str, Timing]:
        """Time each phase as the device sees it: captured once and replayed, so that launches cost almost nothing."""
        return self._time(capture_phases(phases), isolated, eager=False)

    def peak_memory(self, phases: Phases, before: int) -> int | None:
        """Return the peak memory of a run above the `before` bytes allocated earlier; None on a CPU."""
        if not self.on_gpu:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        _run(phases)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def allocated(self) -> int:
        """Return the bytes allocated on the GPU; 0 on a CPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def free_memory(self) -> None:
        """Free what the last candidate left on a GPU."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def _time(self, phases: Phases, isolated: bool, eager: bool) -> dict[str, Timing]:
        first = self._measure(phases, isolated, eager, 1)
        spent = sum(first[name][0] for name in phases)
        runs = max(self.repeat, min(_MAX_RUNS, int(self.seconds / max(spent, 1e-9))))
        others = self._measure(phases, isolated, eager, runs - 1)
        return {name: Timing.of(seconds + others[name]) for name, seconds in first.items()}

    def _measure(self, phases: Phases, isolated: bool, eager: bool, runs: int) -> dict[str, list[float]]:
        """Return the times of each phase and, unless phases are isolated, of the whole step."""
        measure = self._runs_on_gpu if self.on_gpu else self._runs_on_cpu
        times = measure(phases, isolated, eager, runs)
        found = {name: [run[index] for run in times] for index, name in enumerate(phases)}
        if len(phases) > 1 and not isolated:
            found["step"] = [run[-1] for run in times]
        return found

    def _runs_on_gpu(self, phases: Phases, isolated: bool, eager: bool, runs: int) -> list[list[float]]:
        """Return the time of each phase and of all phases together, for each run."""
        events = []
        for _ in range(runs):
            run = []
            for phase in phases.values():
                if isolated and self._flush_buffer is not None:
                    self._flush_buffer.zero_()
                    if eager:
                        torch.cuda.synchronize()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                phase()
                end.record()
                run.append((start, end))
            events.append([*run, (run[0][0], run[-1][1])])
            if isolated or not eager:
                # Replays are launched much faster than they run, and the launch queue is bounded.
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) * 1e-3 for start, end in run] for run in events]

    def _runs_on_cpu(self, phases: Phases, isolated: bool, eager: bool, runs: int) -> list[list[float]]:
        found = []
        for _ in range(runs):
            times = [self._clock()]
            for phase in phases.values():
                phase()
                times.append(self._clock())
            found.append([*np.diff(times).tolist(), times[-1] - times[0]])
        return found


def capture_phases(phases: Phases) -> dict[str, Callable[[], object]]:
    """Capture each phase as a CUDA graph and return the replays, to be called in the same order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP_RUNS):
            _run(phases)
    torch.cuda.synchronize()
    # Memory cannot be freed during capture, and each stream caches its own.
    torch.cuda.empty_cache()
    # One pool for all graphs: the backward pass reads what the forward pass saved.
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, Callable[[], object]] = {}
    for name, phase in phases.items():
        with capture_graph(stream, pool) as graph:
            phase()
        replays[name] = graph.replay
    return replays


def _run(phases: Phases) -> None:
    for phase in phases.values():
        phase()


class Cost(NamedTuple):
    """Minimal cost: every input read once, every output written once, every product computed once."""

    bytes: float
    flops: float


class Roofline(NamedTuple):
    """Peak rates of a machine: of a large copy, counting bytes read and written, and of a large matrix product."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, cost: Cost) -> float:
        """Return the time that no program can beat."""
        return max(cost.bytes / self.bytes_per_second, cost.flops / self.flops_per_second)


def measure_roofline(timer: Timer, dtype: torch.dtype) -> Roofline:
    """Measure the peak rates with a copy that exceeds all caches, and a matrix product in `dtype`."""
    size, width = (2**30, 8192) if timer.on_gpu else (2**27, 1024)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=timer.device).to(dtype) for _ in range(2))
    copy = timer.eager({"copy": lambda: target.copy_(source)}, isolated=True)["copy"].median
    product = timer.eager({"product": lambda: torch.matmul(a, b)}, isolated=True)["product"].median
    return Roofline(2 * size / copy, 2 * width**3 / product)
