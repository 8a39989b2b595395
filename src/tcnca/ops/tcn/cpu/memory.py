"""Scratch memory. To get fresh memory from the system can take longer than what is computed in it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

MOST_KEPT = 1 << 26  # bytes that a thread keeps from one call to the next


class Scratch:
    """Memory for one tensor at a time."""

    def __init__(self, like: Tensor) -> None:
        self.memory = like.new_empty(0)

    def take(self, *shape: int) -> Tensor:
        """A tensor of any content; the one taken before it is given up."""
        if self.memory.numel() < math.prod(shape):
            empty = self.memory = self.memory.new_empty(0)  # what it has is let go before more is asked for
            # What is kept must be of use outside of inference mode too.
            with torch.inference_mode(False):
                self.memory = empty.new_empty(math.prod(shape))
        return self.memory[: math.prod(shape)].view(shape)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Scratch by what it is for."""

    rows: Scratch
    slopes: Scratch
    clean: Scratch
    inner: Scratch
    gradients: Scratch

    def bytes(self) -> int:
        """All that it holds."""
        held: list[Tensor] = [getattr(self, field.name).memory for field in dataclasses.fields(self)]
        return sum(part.numel() * part.element_size() for part in held)


class _Kept(threading.local):
    def __init__(self) -> None:
        self.memory: Memory | None = None


_kept = _Kept()


@contextlib.contextmanager
def borrowed(like: Tensor) -> Iterator[Memory]:
    """Scratch of a tensor's type; the thread keeps it for its next call, unless it is large."""
    memory, _kept.memory = _kept.memory, None
    if memory is None or memory.rows.memory.dtype != like.dtype:
        memory = Memory(*(Scratch(like) for _ in dataclasses.fields(Memory)))
    yield memory
    if memory.bytes() <= MOST_KEPT:
        _kept.memory = memory
