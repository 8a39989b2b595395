"""How many threads compute on the CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

_SECONDS = 3.0
"""Time after which no further measurement starts."""
_TURNS = 4
"""Measurements of each number; other programs may take cores during some of them."""


@contextlib.contextmanager
def use_threads(count: int | None = None) -> Iterator[None]:
    """Compute with `count` threads, if given, and restore the current number at the end of the block."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def fastest_threads(step: Callable[[], None]) -> int:
    """Return with how many threads `step`, which computes the same each time, is fastest: 1, 2, 4, ... or the default.

    It is the fewest that are at most 10 % slower than the fastest: a few percent are not worth another core. The
    default, which is the most, is measured first; if a step takes seconds, nothing else is.
    """
    most, start, times = torch.get_num_threads(), time.perf_counter(), dict[int, float]()
    numbers = [most, *(2**power for power in reversed(range((most - 1).bit_length())))]
    with use_threads():
        for threads in numbers * _TURNS if most > 1 else []:
            torch.set_num_threads(threads)
            step()  # starts the threads
            begin = time.perf_counter()
            if begin - start > _SECONDS:
                break
            step()
            times[threads] = min(time.perf_counter() - begin, times.get(threads, float("inf")))
    return min((threads for threads, spent in times.items() if spent <= 1.1 * min(times.values())), default=most)
