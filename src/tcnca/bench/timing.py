"""How long something takes: medians of many runs on a CPU, and on a GPU both as called and as a replayed graph."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from tcnca.bench.entry import Subject
from tcnca.ops.driver import capture_graph

Part = Callable[[], None]
Parts = Mapping[str, Part]

_MOST = 1000
"""Runs beyond which a median gains nothing."""
_WARM = 3
"""Runs on a GPU before any is timed, in which kernels are compiled and chosen."""
_CACHES = 4
"""How many times the last cache of a GPU is overwritten to be rid of what is in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long some runs took, in seconds."""

    median: float
    """Half of them took longer."""
    low: float
    """A quarter of them took less."""
    high: float
    """A quarter of them took longer."""
    runs: int
    """How many there were."""


def times_of(seconds: list[float]) -> Times:
    """Median and quartiles."""
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    return Times(median=median, low=low, high=high, runs=len(seconds))


def parts_of(subject: Subject) -> list[Parts]:
    """What to time of a subject: groups of parts that follow one another, each part using what the one before made."""
    held: list[torch.Tensor] = []
    groups: list[Parts] = []
    if subject.infer is not None:
        groups.append({"inference": lambda: _drop(subject.infer)})

    def forward() -> None:
        held[:] = [subject.run()]

    def gradients() -> None:
        output = held.pop()
        torch.autograd.grad(output, subject.leaves, cotangent, allow_unused=True)

    def backward() -> None:
        held.pop().backward()

    if subject.update is not None:
        groups.append({"forward": forward, "backward": backward, "update": subject.update})
    elif subject.leaves:
        # Random, and made once: that of a sum would be a single number spread out, which some operators read faster.
        cotangent = torch.randn_like(subject.run()).detach()
        groups.append({"forward": forward, "backward": gradients})
    else:
        groups.append({"forward": forward})
    return groups


def _drop(function: Callable[[], torch.Tensor] | None) -> None:
    if function is not None:
        function()


class Clock:
    """Times parts on one device."""

    def __init__(self, device: torch.device, seconds: float, repeat: int) -> None:
        self.device, self.seconds, self.repeat = device, seconds, repeat
        self._flusher: torch.Tensor | None = None
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flusher = torch.empty(_CACHES * cache, dtype=torch.uint8, device=device)

    @property
    def graphs(self) -> bool:
        """Whether the device can replay graphs."""
        return self.device.type == "cuda"

    def eager(self, parts: Parts, isolated: bool) -> dict[str, Times]:
        """As a caller sees it who starts each part by itself: on a GPU with the time that launching takes."""
        for _ in range(_WARM if self.graphs else 1):
            _run(parts)
        return self._timed(parts, isolated, wait=True)

    def graph(self, parts: Parts, isolated: bool) -> dict[str, Times]:
        """As the device sees it: each part captured once and replayed, so that launching costs next to nothing."""
        return self._timed(captured(parts), isolated, wait=False)

    def peak(self, parts: Parts, before: int) -> int | None:
        """The most memory that a run held, above what was held `before` the contestant was made; None on a CPU."""
        if not self.graphs:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        _run(parts)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def held(self) -> int:
        """Memory held by tensors on the device; 0 on a CPU."""
        return torch.cuda.memory_allocated() if self.graphs else 0

    def tidy(self) -> None:
        """Let go of all that the last contestant has left on a GPU."""
        if self.graphs:
            gc.collect()
            torch.cuda.empty_cache()

    def _timed(self, parts: Parts, isolated: bool, wait: bool) -> dict[str, Times]:
        round_ = self._round_on_gpu if self.graphs else _round_on_cpu
        first = round_(parts, isolated, wait, 1)
        spent = sum(seconds[0] for seconds in first.values())
        runs = max(self.repeat, min(_MOST, int(self.seconds / max(spent, 1e-9))))
        others = round_(parts, isolated, wait, runs - 1)
        return {name: times_of(seconds + others[name]) for name, seconds in first.items()}

    def _round_on_gpu(self, parts: Parts, isolated: bool, wait: bool, runs: int) -> dict[str, list[float]]:
        marks = []
        for _ in range(runs):
            marks.append(list(self._marked(parts, isolated, wait)))
            if isolated or not wait:
                # Replays are launched far faster than they run, and the queue of launches has an end.
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found = {
            name: [run[place][0].elapsed_time(run[place][1]) * 1e-3 for run in marks]
            for place, name in enumerate(parts)
        }
        if len(parts) > 1 and not isolated:
            found["step"] = [run[0][0].elapsed_time(run[-1][1]) * 1e-3 for run in marks]
        return found

    def _marked(self, parts: Parts, isolated: bool, wait: bool) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Run all parts once, each between two events."""
        marks = []
        for part in parts.values():
            if isolated and self._flusher is not None:
                self._flusher.zero_()
                if wait:
                    torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            part()
            end.record()
            marks.append((begin, end))
        return marks


def captured(parts: Parts) -> dict[str, Part]:
    """The parts as CUDA graphs, to be replayed in their order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            _run(parts)
    torch.cuda.synchronize()
    # Memory cannot be given back while a graph is captured, and each stream keeps what it once had.
    torch.cuda.empty_cache()
    # One pool for all: what the forward pass keeps is where the backward pass looks for it.
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, Part] = {}
    for name, part in parts.items():
        with capture_graph(stream, pool) as graph:
            part()
        replays[name] = graph.replay
    return replays


def _run(parts: Parts) -> None:
    for part in parts.values():
        part()


def _round_on_cpu(parts: Parts, isolated: bool, wait: bool, runs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(runs):
        for name, part in parts.items():
            begun = time.perf_counter()
            part()
            found[name].append(time.perf_counter() - begun)
    if len(parts) > 1 and not isolated:
        found["step"] = [sum(run) for run in zip(*found.values(), strict=True)]
    return found
