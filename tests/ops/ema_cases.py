"""Calls of the EMA's Triton scan and what they should give, for the tests in Triton's interpreter and on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tcnca.ops import EMABackend, EMAState, ema
from tests.comparison import TOLERANCE, relative_error

PARAMETERS = ("delta", "alpha", "beta", "gamma")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operator."""

    batch: int
    time: int
    channels: int
    hidden: int
    directions: int = 1
    lengths: bool = False
    state: bool = False
    final: bool = False
    omega: bool = False
    silu: bool = False
    dtype: torch.dtype = torch.float32
    strided: bool = False
    expanded: bool = False
    slow: bool = False

    def __str__(self) -> str:
        flags = ("lengths", "state", "final", "omega", "silu", "strided", "expanded", "slow")
        sizes = (self.batch, self.time, self.channels, self.hidden, self.directions)
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join([*map(str, sizes), kind, *(name for name in flags if getattr(self, name))])

    def leaves(self, device: str) -> dict[str, Tensor]:
        """Return inputs, parameters and, if there is a state, its hidden states; the same in every call."""
        draw = torch.Generator().manual_seed(self.time)
        found = {"x": torch.randn(self.batch, self.time, self.channels, generator=draw)}
        for name in PARAMETERS:
            found[name] = torch.randn(self.directions, self.channels, self.hidden, generator=draw)
            found[name] *= 0.2 if self.slow else 1.5
            if self.slow and name in ("delta", "alpha"):
                # Around -4 both sigmoids leave a decay of 0.9997: thousands of tokens are remembered.
                found[name] -= 4.0
        if self.slow:
            found["alpha"] = off_ties(found["delta"], found["alpha"])
        if self.state:
            found["hidden"] = torch.randn(self.batch, self.channels, self.hidden, generator=draw)
        if self.omega:
            found["omega"] = torch.randn(self.channels, generator=draw)
        found["x"] = found["x"].to(self.dtype)
        found = {name: value.to(device) for name, value in found.items()}
        if self.strided:
            found = {name: spread(value) if value.dim() > 1 else value for name, value in found.items()}
        return {name: value.detach().requires_grad_() for name, value in found.items()}

    def valid(self, device: str) -> Tensor | None:
        """Return lengths: a full row, an empty one, and one in between."""
        if not self.lengths:
            return None
        return torch.tensor([self.time, 0, self.time // 2 + 1][: self.batch], device=device)

    def slopes(self, device: str) -> tuple[Tensor, Tensor]:
        """Return the gradients of the output and of the final hidden states."""
        draw = torch.Generator().manual_seed(1)
        shape = (self.batch, 1, 1) if self.expanded else (self.batch, self.time, self.channels)
        g = torch.randn(shape, generator=draw).to(self.dtype).to(device)
        g = g.expand(self.batch, self.time, self.channels)
        return g, torch.randn(self.batch, self.channels, self.hidden, generator=draw).to(device)

    def results(self, given: dict[str, Tensor], backend: EMABackend) -> dict[str, Tensor]:
        """Return the output, the final hidden states with `final`, and every gradient."""
        device = str(given["x"].device)
        lengths, start, (g, to_final) = self.valid(device), None, self.slopes(device)
        if self.state:
            start = EMAState(given["hidden"], None, torch.full((self.batch,), 5, device=device))
        y, state = ema(
            given["x"],
            *(given[name] for name in PARAMETERS),
            omega=given.get("omega"),
            activation="silu" if self.silu else "none",
            backend=backend,
            lengths=lengths,
            state=start,
            return_state=self.final,
        )
        assert y.dtype == given["x"].dtype
        found, pulls = {"y": y}, [g.to(y.dtype)]
        if state is not None:
            found["hidden"] = state.hidden
            pulls.append(to_final.to(state.hidden))
            seen = self.time if lengths is None else lengths
            assert torch.equal(state.position, torch.full_like(state.position, 5 * self.state) + seen)
        # PyTorch's operators do not use the decay of a single token; the kernels return all gradients.
        gradients = torch.autograd.grad(
            list(found.values()), list(given.values()), pulls, materialize_grads=backend != "triton"
        )
        return found | {f"to {name}": value for name, value in zip(given, gradients, strict=True)}


def off_ties(delta: Tensor, alpha: Tensor) -> Tensor:
    """Return `alpha`, changed where the last digits of a sigmoid decide how float32 rounds a decay near 1."""
    while True:
        damped = torch.sigmoid(delta.double()) * torch.sigmoid(alpha.double())
        # Decays from 0.5 to 1 are multiples of 2⁻²⁴; sigmoids in float32 have errors of a few 1e-7.
        apart = ((damped * 2**24) % 1 - 0.5).abs() / 2**24
        tied = apart < 2e-6 * damped
        if not tied.any():
            return alpha
        alpha = torch.where(tied, alpha + 0.01, alpha)


def spread(value: Tensor) -> Tensor:
    """Return the same numbers with gaps between them, and another innermost dimension than the last."""
    wide = value.new_full((*value.shape[:-2], 2 * value.shape[-1] + 1, value.shape[-2] + 3), float("nan"))
    wide.transpose(-1, -2)[..., 2:-1, 1::2] = value
    return wide.transpose(-1, -2)[..., 2:-1, 1::2]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill newly allocated memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def rounded_coefficients() -> Iterator[None]:
    """Round the coefficients of float64 calls to float32, which all float32 calls do.

    For a decay of 0.9997, rounding changes its distance from 1 by up to a ten-thousandth, and results with it. All
    float32 calls share this error, so the tests measure only what is added to it.
    """
    modules = [importlib.import_module(f"tcnca.ops.ema.{name}") for name in ("naive", "api")]
    naive: Any = modules[0]
    exactly = naive.ema_coefficients

    def rounded(*parameters: Tensor) -> Any:
        exact = exactly(*parameters)
        held = exactly(*(part.detach().float() for part in parameters))
        return naive.EMACoefficients(*(one + (other - one).detach() for one, other in zip(exact, held, strict=True)))

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "ema_coefficients", rounded))
        yield


def cancellation(exact: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how much larger the two parts of δ's gradient, by the drive and by the decay, are than their sum.

    They cancel for an output that converges: δ only decides how soon. Except for factors, the parts are the gradients
    of β and α, because δ enters as `p` in `p β` and `p σ(α)`.
    """
    p, damping = torch.sigmoid(exact["delta"]), torch.sigmoid(exact["alpha"])
    parts = (exact["beta"] * expected["to beta"], expected["to alpha"] / (1.0 - damping))
    sizes = [float(((1.0 - p) * part).detach().norm()) for part in parts]
    return max(sum(sizes) / max(float(expected["to delta"].norm()), 1e-30), 1.0)


def assert_right(case: Case, device: str, backend: EMABackend = "triton") -> None:
    """Compare a backend with PyTorch's operators in float64, in memory that contains NaN, and with a second run."""
    given = case.leaves(device)
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    with rounded_coefficients():
        expected = case.results(exact, "scan" if case.time <= 1000 else "fft")
    with poisoned():
        actual = case.results(given, backend)
    again = actual if device == "cpu" else case.results(given, backend)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        # The output and the gradient of the input have the case's dtype, and so has all that goes through a SiLU.
        rounded = name in ("y", "to x") or (case.silu and name.startswith("to "))
        allowed = TOLERANCE[case.dtype if rounded else torch.float32]
        allowed *= cancellation(exact, expected) if name == "to delta" else 1.0
        assert value.shape == expected[name].shape, name
        # Zeros have no relative error.
        zeros = not bool(expected[name].abs().max() > 0)
        error = float(value.detach().abs().max()) if zeros else relative_error(value, expected[name])
        assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.0e}"
        assert torch.equal(again[name], value), f"{name}: a second run differs"


def some(device: str, *sizes: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Return random tensors of these sizes."""
    return [torch.randn(size, device=device, **options) for size in sizes]
