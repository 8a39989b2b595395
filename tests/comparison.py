"""How close is equal: one table of tolerances, by floating type, used by every test."""

from __future__ import annotations

import torch
from torch import Tensor

# Greatest ‖actual - expected‖ / ‖expected‖, for sums of a few hundred terms in this type.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`‖actual - expected‖ / ‖expected‖`, infinite where anything is not finite."""
    difference = (actual.detach().double() - expected.detach().double()).norm()
    if not bool(torch.isfinite(difference)):
        return float("inf")
    return float(difference / expected.detach().double().norm().clamp(min=1e-30))


def assert_close(actual: Tensor, expected: Tensor, what: str = "output", dtype: torch.dtype | None = None) -> None:
    """Fail unless both have one shape and differ by no more than the table allows for `dtype` (actual's by default)."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)} against {list(expected.shape)}"
    if expected.numel() == 0:
        return
    allowed = TOLERANCE[dtype or actual.dtype]
    if not expected.abs().max() > 0:
        largest = float(actual.detach().abs().max())
        assert largest <= allowed, f"{what}: expected zeros, got up to {largest}"
        return
    error = relative_error(actual, expected)
    assert error <= allowed, f"{what}: relative error {error:.2e}, allowed {allowed:.0e}"
