"""One process or many: PyTorch's own, as `torchrun` starts them. A run that is started alone needs none of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tcnca.errors import ConfigError

_LAST: list[dist.Work] = []
"""What a group did last. Were its thread the last to hold that, it would want Python's lock to let go of it, for which
a model wrapped for several processes, holding the lock as it goes, waits for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """Who this process is among how many, and where it computes."""

    rank: int = 0
    """Number of this process."""
    world: int = 1
    """Number of all processes."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    """What this one computes on."""

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def greatest(self, values: Tensor) -> Tensor:
        """The greatest over all processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def copy_first(self, values: Iterable[Tensor]) -> None:
        """Give all processes the values of the first one."""
        if self.world > 1:
            for value in values:
                dist.broadcast(value, 0)

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.world > 1:
            dist.barrier()

    def _reduced(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world == 1:
            return values
        dist.all_reduce(values, how)
        return values


def cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str | None) -> None:
    """Raise a ConfigError unless `device` is one that is there, or None."""
    there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if device is not None and device not in there:
        why = "" if len(there) > 1 else ", since there is no GPU"
        raise ConfigError(f"--device: got {device}, allowed are {', '.join(there)}{why}")


@contextlib.contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Join the processes that `torchrun` has started, if it has.

    Args:
        device: `cpu` or `cuda`; None for a GPU where there is one.
    """
    check_device(device)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world == 1:
        yield Processes(device=place)
        return
    # What is on the host is agreed upon there, without waiting for a GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(rank=rank, world=world, device=place)
        # All together: who leaves while another still speaks may wait for it for ever.
        last = dist.barrier(async_op=True)
        if last is not None:
            last.wait()
            _LAST.append(last)
    finally:
        dist.destroy_process_group()
