"""S4D: a diagonal state-space model for each channel (Gu et al., 2022)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tcnca.config import Width
from tcnca.errors import ConfigError
from tcnca.layers.ssm import SSM, SSMConfig, StepSize, as_complex, check_range, draw_log_dt, precise
from tcnca.ops import SSMBackend, SSMState, ssm, zero_padding

MIN_DAMPING = 1e-4
"""Keeps A away from zero, by which is divided."""


class S4DConfig(SSMConfig, kind="s4d"):
    """S4D with the initialization S4D-Lin.

    The published block is `output="glu"` with residual connections and no feed-forward net; inside MEGA's gated block,
    in place of the EMA, `output="none"` leaves out what the gates do.
    """

    d_state: Width = 64
    """Size of the hidden state of each channel (the paper's N): `d_state / 2` complex numbers. Even."""
    dt_min: StepSize = 0.001
    """Smallest initial step size."""
    dt_max: StepSize = 0.1
    """Largest initial step size."""
    backend: SSMBackend = "auto"
    """Implementation: `chunked`, `fft`, `recurrent`, or `triton` on a GPU. `auto` uses `triton` where it can run,
    otherwise `chunked`. All compute the same function, `fft` with an error relative to the largest input of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_state % 2:
            raise ConfigError(f"d_state: expected an even number, for conjugate pairs, got {self.d_state}")
        check_range("dt_min", self.dt_min, "dt_max", self.dt_max)

    def build(self, d_model: int, causal: bool = True) -> S4D:
        """Return a new `S4D`."""
        return S4D(d_model, self, causal)


class S4D(SSM):
    """S4D: `y = k ∗ x + D ⊙ x`, then the output; `k[l] = 2 Re Σ_n C (exp(ΔA) - 1) / A · exp(l Δ A)` for each channel.

    A bidirectional S4D has a second C, whose kernel looks into the future; both kernels see the present. (The published
    code starts the second one at the next token, which is the same family of functions, since D sees the present too.)
    Instead of a configuration, its fields can be passed: `S4D(64, d_state=16)`.
    """

    config: S4DConfig
    lr_mult = 0.1
    """Factor of the learning rate of A and Δ: as published, 0.001 where that of the others is 0.01."""

    def __init__(self, d_model: int, config: S4DConfig | None = None, causal: bool = True, **fields: Any) -> None:
        config = S4DConfig.of(config, fields)
        states = config.d_state // 2
        super().__init__(d_model, config, causal, d_model, states)
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.log_damping = nn.Parameter(torch.empty(d_model, states))
        self.frequency = nn.Parameter(torch.empty(d_model, states))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize `A_n = -1/2 + iπn`, ln Δ uniform, C and D normal."""
        if self.c.is_meta:
            return
        draw_log_dt(self.log_dt, self.config.dt_min, self.config.dt_max)
        nn.init.constant_(self.log_damping, math.log(0.5))
        self.frequency.copy_(math.pi * torch.arange(self.frequency.shape[1], device=self.frequency.device))
        nn.init.normal_(self.c, std=0.5**0.5)
        nn.init.normal_(self.d)

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: SSMState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, SSMState | None]:
        """Implement `forward` with `tcnca.ops.ssm`."""
        x = zero_padding(x, lengths)
        damping = torch.exp(precise(self.log_damping)).clamp(min=MIN_DAMPING)
        a = torch.complex(-damping, precise(self.frequency))
        log_decay = a * torch.exp(precise(self.log_dt)).unsqueeze(-1)
        weight = 2.0 * as_complex(self.c) * (torch.expm1(log_decay) / a)
        y, new = ssm(
            x,
            log_decay.expand_as(weight),
            weight,
            backend=self.config.backend,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )
        # Under autocast the parameters are wider than what the operator returns.
        return self.output((y + self.d * x).to(y.dtype)), new

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token, of the recurrence whatever the backend."""
        # A complex product and the real part of one, for each complex state.
        return 3 * self.c.numel()
