"""Calls of the state-space models' Triton kernels and what they should give, for Triton's interpreter and a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from tcnca.ops import SSMState, diagonal_scan, ssm
from tests.comparison import TOLERANCE, relative_error
from tests.ops.ema_cases import poisoned, spread


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `ssm`, or of `diagonal_scan`, where `directions=2` means `reverse` and `d_state` is not used."""

    op: Literal["ssm", "scan"]
    batch: int
    time: int
    channels: int
    d_state: int = 0
    directions: int = 1
    lengths: bool = False
    state: bool = False
    final: bool = False
    dtype: torch.dtype = torch.float32
    strided: bool = False
    expanded: bool = False
    slow: bool = False

    def __str__(self) -> str:
        flags = ("lengths", "state", "final", "strided", "expanded", "slow")
        sizes = (self.op, self.batch, self.time, self.channels, self.d_state, self.directions)
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join([*map(str, sizes), kind, *(name for name in flags if getattr(self, name))])

    def leaves(self, device: str) -> dict[str, Tensor]:
        """Return inputs, parameters and, if there is a state, its hidden states; the same in every call."""
        draw = torch.Generator().manual_seed(self.time)
        shape = (self.batch, self.time, self.channels)
        hidden: tuple[int, ...] = (self.channels, self.d_state) if self.op == "ssm" else (self.channels,)
        parameters = (self.directions, *hidden) if self.op == "ssm" else hidden
        kind = torch.complex64
        found = {"x": torch.randn(shape, generator=draw, dtype=torch.float32 if self.op == "ssm" else kind)}
        # Some states turn many times from one token to the next; slow ones remember thousands of tokens.
        damping = torch.exp(torch.randn(parameters, generator=draw) - (8.0 if self.slow else 2.0))
        phase = torch.randn(parameters, generator=draw) * 100.0
        found["log_decay"] = torch.complex(-damping, phase)
        if self.op == "ssm":
            found["weight"] = torch.randn(parameters, generator=draw, dtype=kind)
            found["x"] = found["x"].to(self.dtype)
        if self.state:
            found["hidden"] = torch.randn(self.batch, *hidden, 2, generator=draw)
        found = {name: value.to(device) for name, value in found.items()}
        if self.strided:
            found = {name: spread(value) if value.dim() > 1 else value for name, value in found.items()}
        return {name: value.detach().requires_grad_() for name, value in found.items()}

    def valid(self, device: str) -> Tensor | None:
        """Return lengths: a full row, an empty one, and one in between."""
        if not self.lengths:
            return None
        return torch.tensor([self.time, 0, self.time // 2 + 1][: self.batch], device=device)

    def run(self, given: dict[str, Tensor], backend: Any) -> tuple[Tensor, SSMState | None]:
        x, device = given["x"], str(given["x"].device)
        options: dict[str, Any] = {"backend": backend, "lengths": self.valid(device), "return_state": self.final}
        if self.state:
            options["state"] = SSMState(given["hidden"], torch.full((self.batch,), 5, device=device))
        if self.op == "ssm":
            return ssm(x, given["log_decay"], given["weight"], **options)
        return diagonal_scan(x, given["log_decay"], reverse=self.directions == 2, **options)

    def results(self, given: dict[str, Tensor], backend: Any) -> dict[str, Tensor]:
        """Return the output, the final hidden states with `final`, and every gradient, complex numbers as pairs."""
        y, state = self.run(given, backend)
        draw = torch.Generator().manual_seed(1)
        shape = (self.batch, 1, 1) if self.expanded else y.shape
        g = torch.randn(shape, generator=draw, dtype=torch.complex64 if self.op == "scan" else torch.float32)
        found, pulls = {"y": y}, [g.to(self.dtype if self.op == "ssm" else g.dtype).to(y).expand(y.shape)]
        if state is not None:
            found["hidden"] = state.hidden
            pulls.append(torch.randn(state.hidden.shape, generator=draw).to(state.hidden))
            valid = self.valid(str(y.device))
            seen = self.time if valid is None else valid
            assert torch.equal(state.position, torch.full_like(state.position, 5 * self.state) + seen)
        # PyTorch's operators do not use the decay of a single token; the kernels return all gradients.
        gradients = torch.autograd.grad(
            list(found.values()), list(given.values()), pulls, materialize_grads=backend != "triton" or self.time == 1
        )
        found |= {f"to {name}": value for name, value in zip(given, gradients, strict=True)}
        return {name: torch.view_as_real(value) if value.is_complex() else value for name, value in found.items()}


def exactly(value: Tensor) -> Tensor:
    """Return a leaf in float64."""
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64).requires_grad_()


def assert_right(case: Case, device: str) -> None:
    """Compare `triton` with PyTorch's operators in float64, in memory that contains NaN, and with a second run."""
    given = case.leaves(device)
    blocks = "chunked" if case.op == "ssm" else "scan"
    exact = {name: exactly(value) for name, value in given.items()}
    expected = case.results(exact, "recurrent" if case.time <= 200 else blocks)
    with poisoned():
        actual = case.results(given, "triton")
    again = actual if device == "cpu" else case.results(given, "triton")
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        # Only the output and the gradient of the input have the case's dtype.
        allowed = TOLERANCE[case.dtype if name in ("y", "to x") else torch.float32]
        if case.dtype == torch.bfloat16 and name in ("to log_decay", "to weight", "to hidden"):
            # Powers then have 16 bits, an error of up to 2⁻¹⁷ = 8e-6 of each term; sums may cancel to a tenth of them.
            allowed = 1e-4
        assert value.shape == expected[name].shape, name
        # Zeros have no relative error.
        zeros = not bool(expected[name].abs().max() > 0)
        error = float(value.detach().abs().max()) if zeros else relative_error(value, expected[name])
        assert error <= allowed, f"{name}: relative error {error:.1e}, allowed {allowed:.0e}"
        assert torch.equal(again[name], value), f"{name}: a second run differs"


def some_ssm(device: str, batch: int, time: int, channels: int, d_state: int, directions: int = 1) -> list[Tensor]:
    """Return random inputs, logarithms of decays and weights of `ssm`."""
    sizes = (directions, channels, d_state)
    log_decay = torch.complex(-torch.rand(sizes), 3.0 * torch.randn(sizes))
    weight = torch.randn(sizes, dtype=torch.complex64)
    return [value.to(device) for value in (torch.randn(batch, time, channels), log_decay, weight)]


def some_scan(device: str, batch: int, time: int, states: int) -> list[Tensor]:
    """Return random inputs and logarithms of decays of `diagonal_scan`."""
    log_decay = torch.complex(-torch.rand(states), 3.0 * torch.randn(states))
    return [value.to(device) for value in (torch.randn(batch, time, states, dtype=torch.complex64), log_decay)]
