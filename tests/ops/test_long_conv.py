"""The long convolution against the sum that defines it, in every precision and under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcnca.ops import initial_long_conv_state, long_conv
from tests.comparison import assert_close

DIRECTIONS = pytest.mark.parametrize("directions", [1, 2], ids=["causal", "bidirectional"])


def direct_sum(x: Tensor, kernel: Tensor) -> Tensor:
    """`y[t] = Σ_l past[l] x[t - l] + Σ_l future[l] x[t + l]`, term by term in float64."""
    x, kernel = x.double(), kernel.double()
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for lag in range(kernel.shape[2]):
            for taps, source in zip(kernel, (t - lag, t + lag), strict=False):
                if 0 <= source < x.shape[1]:
                    y[:, t] += taps[:, lag] * x[:, source]
    return y


@DIRECTIONS
@pytest.mark.parametrize(("time", "taps"), [(1, 1), (1, 4), (7, 1), (7, 3), (7, 7), (6, 20)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_sum(directions: int, time: int, taps: int, dtype: torch.dtype) -> None:
    x, kernel = torch.randn(2, time, 3).to(dtype), torch.randn(directions, 3, taps).to(dtype)
    y, state = long_conv(x, kernel)
    assert state is None
    assert_close(y, direct_sum(x, kernel))


@DIRECTIONS
def test_gradients(directions: int) -> None:
    x = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(directions, 2, 4, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([6, 3])
    assert torch.autograd.gradcheck(lambda *args: long_conv(*args, lengths=lengths)[0], (x, kernel))


def test_gradients_through_a_state() -> None:
    x = torch.randn(2, 7, 2, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, kernel: Tensor) -> Tensor:
        state, outputs = None, []
        for piece in x.split([3, 1, 3], 1):
            y, state = long_conv(piece, kernel, state=state, return_state=True)
            outputs.append(y)
        return torch.cat(outputs, 1)

    assert torch.autograd.gradcheck(run, (x, kernel))


@pytest.mark.parametrize("time", [1, 5])
@torch.no_grad()
def test_autocast_sums_in_float32(time: int) -> None:
    # Sums of these cancel, and half precision would lose what remains.
    kernel = torch.tensor([1.0, -1.0, 1.0, -1.0]).expand(1, 3, 4) * 100
    past, x = torch.rand(2, 3, 3), torch.rand(2, time, 3)
    _, state = long_conv(past, kernel, state=initial_long_conv_state(2, 3, 4), return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, new = long_conv(x, kernel, state=state, return_state=True)
    assert new is not None
    assert (y.dtype, new.window.dtype) == (torch.float32, torch.float32)
    assert_close(y, direct_sum(torch.cat([past, x], 1), kernel)[:, 3:])
