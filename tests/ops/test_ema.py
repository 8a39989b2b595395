"""The EMA: its kernel written out, its forms against each other, and its precision."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca.ops import EMABackend, EMAState, ema
from tcnca.ops.ema.naive import add_skip
from tests.comparison import assert_close
from tests.ops import properties
from tests.ops.ema_cases import Case as KernelCase
from tests.ops.ema_cases import assert_right
from tests.ops.properties import PYTORCH_EMA, THOROUGH, in_pieces, leaf

every_backend = pytest.mark.parametrize("backend", PYTORCH_EMA)
DIRECTIONS = st.sampled_from([1, 2])


Parameters = tuple[Tensor, Tensor, Tensor, Tensor]


def parameters(directions: int, channels: int, hidden: int) -> Parameters:
    """Delta, alpha, beta, gamma, with decays from slow to fast."""
    delta, alpha, beta, gamma = (leaf(directions, channels, hidden, scale=1.5) for _ in range(4))
    return delta, alpha, beta, gamma


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def naive_kernel(delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, length: int) -> Tensor:
    """`k[l] = Σ_n p β q^l γ / √N`, with `p = σ(δ)` and `q = 1 - p σ(α)`."""
    directions, channels, hidden = delta.shape
    kernel = torch.zeros(directions, channels, length, dtype=torch.float64)
    for place in itertools.product(range(directions), range(channels), range(hidden)):
        p = sigmoid(float(delta[place]))
        q = 1 - p * sigmoid(float(alpha[place]))
        for lag in range(length):
            kernel[place[0], place[1], lag] += p * float(beta[place]) * q**lag * float(gamma[place]) / math.sqrt(hidden)
    return kernel


def naive_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """The first direction over the past, the second over the future; the present is in both."""
    y = torch.zeros_like(x)
    for row, time, channel in itertools.product(*map(range, x.shape)):
        for lag in range(kernel.shape[2]):
            if time - lag >= 0:
                y[row, time, channel] += kernel[0, channel, lag] * x[row, time - lag, channel]
            if kernel.shape[0] == 2 and time + lag < x.shape[1]:
                y[row, time, channel] += kernel[1, channel, lag] * x[row, time + lag, channel]
    return y


@every_backend
@THOROUGH
@given(
    time=st.integers(1, 12), hidden=st.integers(1, 3), directions=DIRECTIONS, truncation=st.none() | st.integers(1, 14)
)
def test_equals_the_convolution_written_out(
    backend: EMABackend, time: int, hidden: int, directions: int, truncation: int | None
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        x, values = torch.randn(2, time, 2, dtype=torch.float64), parameters(directions, 2, hidden)
        y, _ = ema(x, *values, backend=backend, truncation=truncation)
        expected = naive_convolution(x, naive_kernel(*values, length=time if truncation is None else truncation))
    assert_close(y, expected)


@THOROUGH
@given(
    time=st.integers(1, 30),
    directions=DIRECTIONS,
    truncation=st.none() | st.integers(2, 35),
    skip=st.booleans(),
)
def test_backends_agree(time: int, directions: int, truncation: int | None, skip: bool) -> None:
    torch.manual_seed(0)
    x, values, omega = leaf(2, time, 3), parameters(directions, 3, 4), leaf(3)
    leaves = dict(zip(("x", "delta", "alpha", "beta", "gamma", "omega"), (x, *values, omega), strict=True))
    options: dict[str, Any] = {"truncation": truncation}
    options |= {"omega": omega, "activation": "silu"} if skip else {}
    y, _ = ema(x, *values, backend="fft", **options)
    expected = properties.gradients(y, leaves)
    for backend in ("chunked", "recurrent", "scan"):
        other, _ = ema(x, *values, backend=backend, **options)
        assert_close(other.detach(), y.detach(), backend)
        properties.assert_same_gradients(properties.gradients(other, leaves), expected)


@every_backend
@pytest.mark.parametrize("directions", [1, 2], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, [7, 4]], ids=["full", "padded"])
def test_the_skip_and_the_silu_follow_the_sum_of_directions(
    backend: EMABackend, directions: int, lengths: list[int] | None
) -> None:
    with torch.no_grad():
        x, values, omega = leaf(2, 7, 3), parameters(directions, 3, 4), leaf(3)
        options: dict[str, Any] = {"backend": backend, "lengths": None if lengths is None else torch.tensor(lengths)}
        y, _ = ema(x, *values, **options)
        # Padding is zeros for the convolution, but not for the skip connection.
        assert_close(ema(x, *values, omega=omega, **options)[0], y + omega * x)
        found, _ = ema(x, *values, omega=omega, activation="silu", **options)
        assert_close(found, (y + omega * x) * torch.sigmoid(y + omega * x))


def test_gradients_of_the_skip_and_the_silu_keep_sequences_of_half_precision_only() -> None:
    y, x = (torch.randn(2, 9, 3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        add_skip(y, x, torch.randn(3, requires_grad=True), "silu")
    assert {part.dtype for part in kept if part.shape == x.shape} == {torch.bfloat16}


@every_backend
@pytest.mark.parametrize(("directions", "truncation"), [(1, None), (2, 3)], ids=["causal", "bidirectional-truncated"])
def test_gradcheck(backend: EMABackend, truncation: int | None, directions: int) -> None:
    def function(x: Tensor, *values: Tensor) -> Tensor:
        return ema(x, *values, backend=backend, truncation=truncation)[0]

    assert gradcheck(function, (leaf(2, 5, 1), *parameters(directions, 1, 2)))


@pytest.mark.parametrize(("time", "lengths"), [(1, [2, 0]), (4, None), (4, [2, 0])], ids=str)
@pytest.mark.parametrize(("backend", "truncation"), [("fft", None), ("chunked", None), ("scan", 3), ("recurrent", 3)])
def test_gradcheck_through_the_state(
    backend: EMABackend, truncation: int | None, time: int, lengths: list[int] | None
) -> None:
    position = torch.tensor([5, 1])
    real = None if lengths is None else torch.tensor(lengths).clamp(max=time)

    def function(x: Tensor, hidden: Tensor, window: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        state = EMAState(hidden, None if truncation is None else window, position)
        options: dict[str, Any] = {"backend": backend, "truncation": truncation, "lengths": real}
        y, new = ema(x, *values, state=state, return_state=True, **options)
        assert new is not None
        return (y, new.hidden) if new.window is None else (y, new.hidden, new.window)

    assert gradcheck(function, (leaf(2, time, 1), leaf(2, 1, 2), leaf(2, 3, 1), *parameters(1, 1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_backend
@pytest.mark.parametrize(("directions", "truncation"), [(1, 9), (2, None)], ids=["causal-truncated", "bidirectional"])
def test_lower_precision_is_close_to_float64(
    dtype: torch.dtype, truncation: int | None, backend: EMABackend, directions: int
) -> None:
    with torch.no_grad():
        x, *values = (part.to(dtype) for part in (leaf(2, 40, 3), *parameters(directions, 3, 4)))
        y, _ = ema(x, *values, backend=backend, truncation=truncation)
        expected, _ = ema(x.double(), *(part.double() for part in values), truncation=truncation)
        # As under autocast, omega is wider than the input.
        options: dict[str, Any] = {"omega": leaf(3).float(), "activation": "silu", "truncation": truncation}
        other, _ = ema(x, *values, backend=backend, **options)
        with_skip, _ = ema(x.double(), *(part.double() for part in values), **options)
    assert y.dtype == other.dtype == dtype
    assert_close(y, expected)
    assert_close(other, with_skip, "with skip and SiLU")


# Decays near 1, which float32 rounds; a gradient of two parts that cancel.
HARD = [
    KernelCase(1, 40_000, 5, 16, state=True, final=True, slow=True),
    pytest.param(
        KernelCase(4, 8191, 64, 16, directions=2, dtype=torch.bfloat16, expanded=True), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("case", HARD, ids=str)
def test_float32_error_is_that_of_its_coefficients(case: KernelCase) -> None:
    assert_right(case, "cpu", "chunked")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("truncation", [None, 100], ids=["full", "truncated"])
@pytest.mark.parametrize("sizes", [[1] * 300, [1, 200, 99]], ids=["token by token", "pieces"])
def test_a_long_past_keeps_its_precision(dtype: torch.dtype, truncation: int | None, sizes: list[int]) -> None:
    with torch.no_grad():
        # Slow decays: an output sums hundreds of inputs, which half precision would round away.
        x = leaf(2, 300, 3).to(dtype)
        values = [(leaf(1, 3, 4, scale=0.2) + shift).to(dtype) for shift in (-2.0, -2.0, 1.0, 1.0)]
        y, state = in_pieces(partial(_ema, values=values, truncation=truncation), [x], sizes)
        expected, _ = ema(x.double(), *(part.double() for part in values), truncation=truncation)
    assert y.dtype == dtype
    assert_close(y, expected)
    held = state.tensors()
    if truncation is None:
        assert held["hidden"].dtype == torch.float32
    else:
        assert held["window"].dtype == dtype


def _ema(x: Tensor, values: list[Tensor], **options: Any) -> tuple[Tensor, EMAState | None]:
    return ema(x, *values, **options)


@every_backend
def test_autocast_changes_nothing(backend: EMABackend) -> None:
    with torch.no_grad():
        x, *values = (part.float() for part in (leaf(2, 60, 3), *parameters(1, 3, 4)))
        options: dict[str, Any] = {"omega": leaf(3).float(), "activation": "silu", "return_state": True}
        expected, state = ema(x, *values, backend=backend, **options)
        with torch.autocast("cpu", torch.bfloat16):
            y, other = ema(x, *values, backend=backend, **options)
    assert state is not None
    assert other is not None
    assert torch.equal(y, expected)
    assert all(torch.equal(*pair) for pair in zip(state.tensors().values(), other.tensors().values(), strict=True))


@pytest.mark.parametrize("sizes", [None, [1, 1, 3]], ids=["no state", "pieces"])
@every_backend
def test_a_saturated_decay_gives_no_nan(backend: EMABackend, sizes: list[int] | None) -> None:
    # Sigmoids of 20 round to 1 in float32, and the decay to exactly 0: only the present is left.
    x, values = torch.ones(1, 5, 1), [torch.full((1, 1, 1), v, requires_grad=True) for v in (20.0, 20.0, 1.0, 1.0)]
    run = partial(_ema, values=values, backend=backend)
    y = run(x)[0] if sizes is None else in_pieces(run, [x], sizes)[0]
    assert_close(y.detach(), x)
    for gradient in torch.autograd.grad(y.sum(), values):
        assert bool(gradient.isfinite().all())


def test_a_truncated_ema_forgets_an_outlier() -> None:
    """Decays near 1, so that whatever stays behind of the outlier stays for good."""
    torch.manual_seed(0)
    values = [torch.full((1, 2, 3), level) for level in (-3.0, -6.0, 1.0, 1.0)]
    x = torch.randn(1, 600, 2)
    x[:, 100] = 1e5
    exact, _ = ema(x.double(), *(part.double() for part in values), truncation=64)
    state, outputs = None, []
    for time in range(600):
        y, state = ema(x[:, time : time + 1], *values, truncation=64, state=state, return_state=True)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1)[:, 200:], exact[:, 200:])
