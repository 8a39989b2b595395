"""The linear recurrent unit (Orvieto et al., 2023)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from tcnca.config import Fraction, Range
from tcnca.layers.ssm import DiagonalSSM, DiagonalSSMConfig, check_range, precise

MIN_SHARE = 1e-6
"""Least initial square of a decay, and least initial share of `max_phase`: their logarithms are parameters."""


class LRUConfig(DiagonalSSMConfig, kind="lru"):
    """The LRU, whose `d_state` complex decays start in a ring of the unit disk."""

    r_min: Fraction = 0.0
    """Smallest initial size of a decay. Nearer to 1, more of a long past is remembered."""
    r_max: Fraction = 1.0
    """Largest initial size of a decay."""
    max_phase: Annotated[float, Range(1e-6, 2 * math.pi)] = 2 * math.pi
    """Largest initial phase of a decay, in radians per token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("r_min", self.r_min, "r_max", self.r_max)

    def build(self, d_model: int, causal: bool = True) -> LRU:
        """Return a new `LRU`."""
        return LRU(d_model, self, causal)


class LRU(DiagonalSSM):
    """The LRU: `h[t] = λ h[t - 1] + exp(γ) ⊙ B x[t]`, `y = Re(C h) + D ⊙ x`, then the output.

    `λ = exp(-exp(ν) + i exp(θ))`. Instead of a configuration, its fields can be passed: `LRU(64, d_state=16)`.
    """

    config: LRUConfig
    scale = 1.0
    lr_mult = 0.5

    def __init__(self, d_model: int, config: LRUConfig | None = None, causal: bool = True, **fields: Any) -> None:
        config = LRUConfig.of(config, fields)
        super().__init__(d_model, config, causal, config.d_state)
        self.nu = nn.Parameter(torch.empty(self.states))
        self.theta = nn.Parameter(torch.empty(self.states))
        self.gamma = nn.Parameter(torch.empty(self.states))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the decays uniformly in the ring, γ so that states have the size of inputs, B, C and D normal."""
        if self.b.is_meta:
            return
        c = self.config
        radius, phase = torch.rand(2, self.states, dtype=torch.float64, device="cpu")
        square = (radius * (c.r_max**2 - c.r_min**2) + c.r_min**2).clamp(MIN_SHARE, 1.0 - MIN_SHARE)
        self.nu.copy_(torch.log(-0.5 * torch.log(square)))
        self.theta.copy_(torch.log(c.max_phase * phase.clamp(min=MIN_SHARE)))
        self.gamma.copy_(0.5 * torch.log1p(-square))
        nn.init.normal_(self.b, std=(2 * self.d_model) ** -0.5)
        nn.init.normal_(self.c, std=self.states**-0.5)
        nn.init.normal_(self.d)

    def recurrence(self) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the decays, complex `[states]`, and the factors of the inputs."""
        log_decay = torch.complex(-torch.exp(precise(self.nu)), torch.exp(precise(self.theta)))
        return log_decay, torch.exp(precise(self.gamma))
