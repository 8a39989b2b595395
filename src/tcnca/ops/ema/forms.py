"""Three ways to compute one thing: an EMA over a whole sequence that starts from nothing.

Each takes `x` (`[batch, time, channels]`) and returns `[batch, time, channels]`. A truncation `m` keeps
the kernel's first `m` lags: in a recurrence that means to take out again, `m` steps later, what went in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.ema.kernel import EMACoefficients

Form = Callable[[Tensor, EMACoefficients, int | None], Tensor]


def ema_fft(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve with `kernel` (`[directions, channels, lags]`) in the frequency domain.

    A second direction looks into the future. Both directions see the present: they overlap at lag 0.
    """
    time, lags = x.shape[1], kernel.shape[-1]
    size = max(2 * time, time + lags)
    # Half precision loses too much in a transform of this length.
    precise = torch.promote_types(x.dtype, torch.float32)
    two_sided = F.pad(kernel[0].to(precise), (0, size - lags))
    if kernel.shape[0] == 2:
        # Lag -l sits at place size - l of a circular kernel.
        future = F.pad(kernel[1].to(precise), (0, size - lags))
        two_sided = two_sided + future.flip(-1).roll(1, -1)
    # Time last and contiguous: some versions of the compiler misjudge the layout of other transforms.
    rows = x.to(precise).transpose(1, 2).contiguous()
    spectrum = torch.fft.rfft(rows, n=size) * torch.fft.rfft(two_sided, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., :time].transpose(1, 2).to(x.dtype)


def ema_steps(x: Tensor, coefficients: EMACoefficients, truncation: int | None = None) -> Tensor:
    """Run the recurrence token by token."""
    return _both_directions(_steps, x, coefficients, truncation)


def ema_scan(x: Tensor, coefficients: EMACoefficients, truncation: int | None = None) -> Tensor:
    """Run the recurrence as a parallel scan: log₂(time) passes, each doubling how far back every state sees."""
    return _both_directions(_scan, x, coefficients, truncation)


def _both_directions(run: Form, x: Tensor, coefficients: EMACoefficients, truncation: int | None) -> Tensor:
    y = run(x, EMACoefficients(*(part[0] for part in coefficients)), truncation)
    if coefficients.drive.shape[0] == 2:
        y = y + run(x.flip(1), EMACoefficients(*(part[1] for part in coefficients)), truncation).flip(1)
    return y.to(x.dtype)


def _driven(x: Tensor, coefficients: EMACoefficients, truncation: int | None) -> Tensor:
    """What enters the hidden states at each time, `[batch, time, channels, hidden]`."""
    entering = x.unsqueeze(-1) * coefficients.drive
    if truncation is None or truncation >= x.shape[1]:
        return entering
    leaving = F.pad(entering[:, :-truncation], (0, 0, 0, 0, truncation, 0))
    return entering - coefficients.decay**truncation * leaving


def _steps(x: Tensor, coefficients: EMACoefficients, truncation: int | None) -> Tensor:
    driven = _driven(x, coefficients, truncation)
    hidden = torch.zeros_like(driven[:, 0])
    outputs = []
    for time in range(x.shape[1]):
        hidden = driven[:, time] + coefficients.decay * hidden
        outputs.append((hidden * coefficients.readout).sum(-1))
    return torch.stack(outputs, 1)


def _scan(x: Tensor, coefficients: EMACoefficients, truncation: int | None) -> Tensor:
    hidden = _driven(x, coefficients, truncation)
    decay, reach = coefficients.decay, 1
    while reach < x.shape[1]:
        hidden = hidden + decay * F.pad(hidden[:, :-reach], (0, 0, 0, 0, reach, 0))
        decay, reach = decay * decay, 2 * reach
    return (hidden * coefficients.readout).sum(-1)
