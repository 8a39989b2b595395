"""The coefficients and the convolution kernel of a multi-dimensional damped EMA.

Parameters have the shape `[directions, channels, hidden]`: one direction if causal, else the past, then the future.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class EMACoefficients(NamedTuple):
    """Of the recurrence `s ← drive · x + decay · s`, `y = Σ readout · s`; each `[directions, channels, hidden]`."""

    drive: Tensor
    decay: Tensor
    readout: Tensor


def ema_coefficients(delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> EMACoefficients:
    """Coefficients from MEGA's parameters: `p = σ(δ)`, drive `p β`, decay `1 - p σ(α)`, readout `γ / √N`."""
    # A decay near 1 to a power of thousands needs more digits than half precision has.
    precise = torch.promote_types(delta.dtype, torch.float32)
    delta, alpha, beta, gamma = (part.to(precise) for part in (delta, alpha, beta, gamma))
    p = torch.sigmoid(delta)
    return EMACoefficients(p * beta, 1.0 - p * torch.sigmoid(alpha), gamma / math.sqrt(gamma.shape[-1]))


def decay_powers(decay: Tensor, exponents: Tensor) -> Tensor:
    """`decay` (`[…, hidden]`) to the powers `exponents` (`[time]`), as `[…, hidden, time]`."""
    # By the logarithm, as a kernel of thousands of taps needs. Sigmoids that round to 1 give a decay of 0.
    logarithm = torch.log(decay.clamp(min=torch.finfo(decay.dtype).tiny))
    return torch.exp(logarithm.unsqueeze(-1) * exponents.to(decay.dtype))


def ema_kernel(delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, length: int) -> Tensor:
    """The kernel `k[l] = Σ_n p β q^l γ / √N` for lags below `length`, as `[directions, channels, length]`."""
    drive, decay, readout = ema_coefficients(delta, alpha, beta, gamma)
    powers = decay_powers(decay, torch.arange(length, device=delta.device))
    return torch.einsum("xdnl,xdn->xdl", powers, drive * readout)
