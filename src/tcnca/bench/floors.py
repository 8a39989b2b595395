"""What the machine can do at best, measured on the spot: by a copy, and by a matrix product."""

from __future__ import annotations

import dataclasses

import torch

from tcnca.bench.entry import Work
from tcnca.bench.timing import Clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """The ceilings of a machine, from which the floor of a time follows."""

    bandwidth: float
    """Bytes a second of a large copy, read and written ones counted."""
    rate: float
    """Operations a second of a large matrix product, a multiplication and an addition counted as two."""
    dtype: str
    """Type of that product."""

    def seconds(self, work: Work) -> float:
        """Less than this no program needs for the work."""
        return max(work.bytes / self.bandwidth, work.flops / self.rate)


def measure_floors(clock: Clock, dtype: torch.dtype, *, copied: int | None = None, width: int | None = None) -> Floors:
    """Measure them.

    Args:
        clock: of the device.
        dtype: of the matrix product.
        copied: bytes to copy; by default far more than caches hold.
        width: of the square matrices; by default as large as the machine is fast.
    """
    copied = copied or (2**30 if clock.graphs else 2**27)
    width = width or (8192 if clock.graphs else 1024)
    source = torch.randint(0, 255, (copied,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=clock.device).to(dtype) for _ in range(2))
    copy = clock.eager({"forward": lambda: _discard(target.copy_(source))}, isolated=True)["forward"]
    product = clock.eager({"forward": lambda: _discard(a @ b)}, isolated=True)["forward"]
    return Floors(
        bandwidth=2 * copied / copy.median,
        rate=2 * width**3 / product.median,
        dtype=str(dtype).removeprefix("torch."),
    )


def _discard(_: torch.Tensor) -> None:
    """Let go of what was made."""
