"""The damped EMA of whole sequences in PyTorch's own operators: the recurrence, a parallel scan and the kernel.

The recurrence is the oracle of the others. Parameters are `[directions, channels, d_state]`: one direction is causal;
of two, the first looks into the past and the second into the future. A truncation `m` keeps the kernel's first `m`
lags: in a recurrence, an input is subtracted again `m` steps after it entered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class EMACoefficients(NamedTuple):
    """Coefficients of `s ← drive · x + decay · s`, `y = Σ readout · s`; each `[directions, channels, d_state]`."""

    drive: Tensor
    decay: Tensor
    readout: Tensor


def ema_coefficients(delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> EMACoefficients:
    """Return the coefficients of MEGA's parameters: `p = σ(δ)`, drive `p β`, decay `1 - p σ(α)`, readout `γ / √N`."""
    # A decay near 1 to a power of thousands needs more digits than half precision has.
    precise = torch.promote_types(delta.dtype, torch.float32)
    delta, alpha, beta, gamma = (part.to(precise) for part in (delta, alpha, beta, gamma))
    p = torch.sigmoid(delta)
    return EMACoefficients(p * beta, 1.0 - p * torch.sigmoid(alpha), gamma / math.sqrt(gamma.shape[-1]))


def ema_recurrent(x: Tensor, coefficients: EMACoefficients, truncation: int | None = None) -> Tensor:
    """Run the recurrence over `x` (`[batch, time, channels]`) token by token."""
    return _each_direction(_recurrence, x, coefficients, truncation)


def ema_scan(x: Tensor, coefficients: EMACoefficients, truncation: int | None = None) -> Tensor:
    """Run the recurrence as a parallel scan: log₂(time) passes, each doubling how far back every state sees."""
    return _each_direction(_scan, x, coefficients, truncation)


def _each_direction(
    run: Callable[[Tensor, EMACoefficients], Tensor], x: Tensor, coefficients: EMACoefficients, truncation: int | None
) -> Tensor:
    past = EMACoefficients(*(part[0] for part in coefficients))
    y = run(_driven(x, past, truncation), past)
    if coefficients.drive.shape[0] == 2:
        future = EMACoefficients(*(part[1] for part in coefficients))
        y = y + run(_driven(x.flip(1), future, truncation), future).flip(1)
    return y.to(x.dtype)


def _driven(x: Tensor, coefficients: EMACoefficients, truncation: int | None) -> Tensor:
    """Return what enters the hidden states at each time, `[batch, time, channels, d_state]`."""
    entering = x.unsqueeze(-1) * coefficients.drive
    if truncation is None or truncation >= x.shape[1]:
        return entering
    leaving = F.pad(entering[:, :-truncation], (0, 0, 0, 0, truncation, 0))
    return entering - coefficients.decay**truncation * leaving


def _recurrence(driven: Tensor, coefficients: EMACoefficients) -> Tensor:
    hidden = torch.zeros_like(driven[:, 0])
    outputs = []
    for time in range(driven.shape[1]):
        hidden = driven[:, time] + coefficients.decay * hidden
        outputs.append((hidden * coefficients.readout).sum(-1))
    return torch.stack(outputs, 1)


def _scan(driven: Tensor, coefficients: EMACoefficients) -> Tensor:
    hidden, decay, span = driven, coefficients.decay, 1
    while span < driven.shape[1]:
        hidden = hidden + decay * F.pad(hidden[:, :-span], (0, 0, 0, 0, span, 0))
        decay, span = decay * decay, 2 * span
    return (hidden * coefficients.readout).sum(-1)


def add_skip(y: Tensor, x: Tensor, omega: Tensor | None, activation: str) -> Tensor:
    """Return `activation(y + ω x)` in the dtype of `x`, where `y` is the EMA of `x` in all its directions."""
    # The sum is rounded first: for its gradient, the SiLU keeps its input.
    y = (y if omega is None else y + omega * x).to(x.dtype)
    return F.silu(y) if activation == "silu" else y


def decay_powers(decay: Tensor, exponents: Tensor) -> Tensor:
    """Return `decay` (`[…, d_state]`) to the powers `exponents` (`[time]`), as `[…, d_state, time]`."""
    # By the logarithm, as a kernel of thousands of taps needs. Sigmoids that round to 1 give a decay of 0.
    logarithm = torch.log(decay.clamp(min=torch.finfo(decay.dtype).tiny))
    return torch.exp(logarithm.unsqueeze(-1) * exponents.to(decay.dtype))


def ema_kernel(delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, length: int) -> Tensor:
    """Return the kernel `k[l] = Σ_n p β q^l γ / √N` for lags below `length`, as `[directions, channels, length]`."""
    drive, decay, readout = ema_coefficients(delta, alpha, beta, gamma)
    powers = decay_powers(decay, torch.arange(length, device=delta.device))
    return torch.einsum("xdnl,xdn->xdl", powers, drive * readout)
