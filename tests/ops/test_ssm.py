"""Diagonal state-space models: their kernel written out, their forms against each other, and their precision."""

from __future__ import annotations

import cmath
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tcnca.ops import ScanBackend, SSMBackend, SSMState, diagonal_scan, ssm, ssm_kernel
from tests.comparison import assert_close, relative_error
from tests.ops import properties
from tests.ops.properties import PYTORCH_SSM, in_pieces, leaf

SCANS: tuple[ScanBackend, ...] = ("scan", "recurrent")
every_backend = pytest.mark.parametrize("backend", PYTORCH_SSM)
every_scan = pytest.mark.parametrize("backend", SCANS)
DIRECTIONS = pytest.mark.parametrize("directions", [1, 2], ids=["causal", "bidirectional"])


def parameters(directions: int, channels: int, states: int) -> dict[str, Tensor]:
    """Dampings from slow to fast, phases beyond a turn, and weights, all real."""
    sizes = (directions, channels, states)
    return {"damping": leaf(*sizes), "phase": leaf(*sizes, scale=4.0), "weight": leaf(*sizes, 2)}


def run(x: Tensor, damping: Tensor, phase: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, SSMState | None]:
    return ssm(x, torch.complex(-torch.exp(damping), phase), torch.view_as_complex(weight), **options)


def naive_kernel(damping: Tensor, phase: Tensor, weight: Tensor, length: int) -> Tensor:
    """`k[l] = Re Σ_n weight exp(l · log_decay)`, number by number."""
    directions, channels, states = damping.shape
    kernel = torch.zeros(directions, channels, length, dtype=torch.float64)
    for place in itertools.product(range(directions), range(channels), range(states)):
        log_decay = complex(-cmath.exp(float(damping[place])).real, float(phase[place]))
        factor = complex(*weight[place].tolist())
        for lag in range(length):
            kernel[place[0], place[1], lag] += (factor * cmath.exp(lag * log_decay)).real
    return kernel


def naive_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """The first direction over the past, the second over the future; the present is in both."""
    y, time = torch.zeros_like(x), x.shape[1]
    for now, lag in itertools.product(range(time), range(kernel.shape[2])):
        if now - lag >= 0:
            y[:, now] += kernel[0, :, lag] * x[:, now - lag]
        if kernel.shape[0] == 2 and now + lag < time:
            y[:, now] += kernel[1, :, lag] * x[:, now + lag]
    return y


@every_backend
@DIRECTIONS
@pytest.mark.parametrize("time", [1, 2, 7, 33, 130])
@torch.no_grad()
def test_equals_the_convolution_written_out(backend: SSMBackend, directions: int, time: int) -> None:
    x, values = torch.randn(2, time, 2, dtype=torch.float64), parameters(directions, 2, 3)
    kernel = naive_kernel(**values, length=time)
    log_decay = torch.complex(-torch.exp(values["damping"]), values["phase"])
    assert_close(ssm_kernel(log_decay, torch.view_as_complex(values["weight"]), time), kernel, "kernel")
    assert_close(run(x, **values, backend=backend)[0], naive_convolution(x, kernel))


@DIRECTIONS
def test_backends_agree_with_their_gradients(directions: int) -> None:
    # More than one level of blocks of blocks.
    x, values = leaf(1, 1100, 1), parameters(directions, 1, 2)
    with torch.no_grad():
        values["damping"] -= 4.0
    leaves = {"x": x, **values}
    y = run(x, **values, backend="recurrent")[0]
    expected = properties.gradients(y, leaves)
    for backend in ("chunked", "fft"):
        other, _ = run(x, **values, backend=backend)
        assert_close(other.detach(), y.detach(), backend)
        properties.assert_same_gradients(properties.gradients(other, leaves), expected)


@every_backend
@DIRECTIONS
def test_gradcheck(backend: SSMBackend, directions: int) -> None:
    values = parameters(directions, 1, 2)

    def function(x: Tensor, *given: Tensor) -> Tensor:
        return run(x, *given, backend=backend)[0]

    assert gradcheck(function, (leaf(2, 5, 1), *values.values()))


@pytest.mark.parametrize(("time", "lengths"), [(1, [1, 0]), (4, None), (4, [2, 0])], ids=str)
@every_backend
def test_gradcheck_through_the_state(backend: SSMBackend, time: int, lengths: list[int] | None) -> None:
    real = None if lengths is None else torch.tensor(lengths)

    def function(x: Tensor, hidden: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        state = SSMState(hidden, torch.tensor([5, 1]))
        y, new = run(x, *given, backend=backend, lengths=real, state=state, return_state=True)
        assert new is not None
        return y, new.hidden

    assert gradcheck(function, (leaf(2, time, 1), leaf(2, 1, 2, 2), *parameters(1, 1, 2).values()))


@every_scan
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [1, 2, 17, 300])
def test_scan_equals_its_definition(backend: ScanBackend, reverse: bool, time: int) -> None:
    v = torch.randn(2, time, 3, dtype=torch.complex128)
    log_decay = torch.complex(-torch.rand(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64))
    # A triangular matrix of powers for each state.
    lags = torch.arange(time).unsqueeze(1) - torch.arange(time)
    lags = -lags if reverse else lags
    powers = torch.exp(log_decay * lags.unsqueeze(-1)).masked_fill((lags < 0).unsqueeze(-1), 0)
    h, _ = diagonal_scan(v, log_decay, backend=backend, reverse=reverse)
    expected = torch.einsum("tsn,bsn->btn", powers, v)
    assert_close(torch.view_as_real(h), torch.view_as_real(expected))


@every_scan
@pytest.mark.parametrize(
    ("reverse", "lengths"), [(True, None), (True, [3, 4]), (False, [2, 0]), (False, None)], ids=str
)
def test_scan_gradcheck(backend: ScanBackend, reverse: bool, lengths: list[int] | None) -> None:
    real = None if lengths is None else torch.tensor(lengths)

    def function(v: Tensor, damping: Tensor, phase: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        log_decay = torch.complex(-torch.exp(damping), phase)
        state = None if reverse else SSMState(hidden, torch.tensor([5, 1]))
        options: dict[str, Any] = {"backend": backend, "reverse": reverse, "lengths": real}
        h, new = diagonal_scan(torch.view_as_complex(v), log_decay, state=state, return_state=not reverse, **options)
        return (torch.view_as_real(h),) if new is None else (torch.view_as_real(h), new.hidden)

    assert gradcheck(function, (leaf(2, 4, 2, 2), leaf(2), leaf(2), leaf(2, 2, 2)))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_lower_precision_is_close_to_float64(backend: SSMBackend, dtype: torch.dtype) -> None:
    """Decays as S4D has them: slow ones that turn fast, over a thousand tokens."""
    x, values = torch.randn(2, 1000, 3).to(dtype), {k: v.float() for k, v in parameters(1, 3, 4).items()}
    values["damping"] = values["damping"] * 0.5 - 5.0
    y, state = in_pieces(partial(run, **values, backend=backend), [x], [600, 1, 399])
    expected, _ = run(x.double(), **{name: value.double() for name, value in values.items()})
    assert y.dtype == dtype
    assert state.tensors()["hidden"].dtype == torch.float32
    assert_close(y, expected)


@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-5])
@DIRECTIONS
@every_backend
def test_long_memories_are_as_precise_as_short_ones(backend: SSMBackend, directions: int, damping: float) -> None:
    """Neither phases of thousands of turns nor a decay near 1 lose digits in float32."""
    x, phase, weight = leaf(1, 4096, 2), leaf(directions, 2, 3, scale=4.0), leaf(directions, 2, 3, 2)
    logs = torch.full_like(phase, damping).log()
    single = [part.detach().float().requires_grad_() for part in (x, logs, phase, weight)]
    exact = [part.detach().double().requires_grad_() for part in single]
    y, _ = run(*single, backend=backend)
    expected, _ = run(*exact, backend="recurrent")
    assert relative_error(y, expected) <= 2e-6
    found, wanted = torch.autograd.grad(y.square().mean(), single), torch.autograd.grad(expected.square().mean(), exact)
    for gradient, other in zip(found, wanted, strict=True):
        assert relative_error(gradient, other) <= 1e-5


@pytest.mark.parametrize("size", [1, 1024])
@every_scan
def test_long_memories_survive_streaming(backend: ScanBackend, size: int) -> None:
    v = torch.view_as_complex(leaf(1, 2048, 4, 2).detach()).to(torch.complex64)
    log_decay = torch.complex(torch.full((4,), -1e-5), torch.linspace(0.5, 6.0, 4))
    expected, _ = diagonal_scan(v.to(torch.complex128), log_decay.to(torch.complex128), backend="recurrent")
    state, found = None, []
    for piece in v.split(size, 1):
        h, state = diagonal_scan(piece, log_decay, backend=backend, state=state, return_state=True)
        found.append(h)
    error = (torch.cat(found, 1) - expected).abs().max()
    assert error <= 2e-6 * expected.abs().max()


@torch.no_grad()
def test_autocast_changes_nothing() -> None:
    x, values = torch.randn(2, 60, 3), {name: value.float() for name, value in parameters(1, 3, 4).items()}
    v, log_decay = torch.randn(2, 60, 3, dtype=torch.complex64), torch.full((3,), -0.1 + 1j)
    runs = [partial(run, x, **values, backend=backend) for backend in PYTORCH_SSM]
    for call in (*runs, partial(diagonal_scan, v, log_decay)):
        expected, state = call(return_state=True)
        with torch.autocast("cpu", torch.bfloat16):
            y, other = call(return_state=True)
        assert state is not None
        assert other is not None
        assert torch.equal(y, expected)
        assert torch.equal(state.hidden, other.hidden)


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
@torch.no_grad()
def test_infinity_and_nan_do_not_go_back_in_time(backend: SSMBackend) -> None:
    x, values = torch.randn(1, 200, 2, dtype=torch.float64), parameters(1, 2, 3)
    y = run(x, **values, backend=backend)[0]
    for outlier in (1e300, torch.inf, torch.nan):
        changed = x.clone()
        changed[:, 150:, 0] = outlier
        other = run(changed, **values, backend=backend)[0]
        assert torch.equal(other[:, :150], y[:, :150])
        assert torch.equal(other[..., 1], y[..., 1]), "another channel"
        if outlier != 1e300:
            assert not other[:, 150:, 0].isfinite().any()


def test_another_dtype_of_the_state_is_kept_precise() -> None:
    x, values = (
        torch.randn(1, 5, 2).bfloat16(),
        {k: v.detach().float() for k, v in parameters(1, 2, 3).items()},
    )
    _, state = run(x, **values, return_state=True)
    assert state is not None
    kept = state.to(torch.bfloat16)
    assert (kept.hidden.dtype, kept.position.dtype) == (torch.float32, torch.long)
    assert torch.equal(kept.hidden, state.hidden)
