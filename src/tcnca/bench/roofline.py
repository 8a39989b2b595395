"""The roofline of a machine, measured with a copy and a matrix product, and the minimal cost of a computation."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from tcnca.bench.timing import Timer


class Cost(NamedTuple):
    """Minimal cost: every input read once, every output written once, every product computed once."""

    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Peak rates of a machine."""

    bytes_per_second: float
    """Bandwidth of a large copy, counting bytes read and written."""
    flops_per_second: float
    """Rate of a large matrix product, counting a multiplication and an addition as two."""
    dtype: str
    """Dtype of that product."""

    def seconds(self, cost: Cost) -> float:
        """Return the time that no program can beat."""
        return max(cost.bytes / self.bytes_per_second, cost.flops / self.flops_per_second)


def measure_roofline(
    timer: Timer, dtype: torch.dtype, *, size: int | None = None, width: int | None = None
) -> Roofline:
    """Measure the peak rates.

    Args:
        timer: timer of the device.
        dtype: dtype of the matrix product.
        size: bytes to copy. (default: much more than caches hold)
        width: width of the square matrices. (default: by device)
    """
    size = size or (2**30 if timer.on_gpu else 2**27)
    width = width or (8192 if timer.on_gpu else 1024)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=timer.device).to(dtype) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    def product() -> None:
        torch.matmul(a, b)

    return Roofline(
        bytes_per_second=2 * size / timer.eager({"forward": copy}, isolated=True)["forward"].median,
        flops_per_second=2 * width**3 / timer.eager({"forward": product}, isolated=True)["forward"].median,
        dtype=str(dtype).removeprefix("torch."),
    )
