"""S5: one diagonal state-space model for all channels (Smith et al., 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tcnca.config import LayerCount
from tcnca.errors import ConfigError
from tcnca.layers.ssm import DiagonalSSM, DiagonalSSMConfig, SSMOutput, StepSize, check_range, draw_log_dt, precise

MAX_BLOCK = 2**10
"""States of a block, of whose matrix the eigenvectors are computed."""
MAX_REAL = -1e-4
"""Largest real part of an eigenvalue: with a positive one, states would grow without limit."""


class S5Config(DiagonalSSMConfig, kind="s5"):
    """S5 with the initialization by HiPPO-LegS.

    `d_state` is the paper's P: `d_state / 2` complex numbers, one of each conjugate pair.
    """

    blocks: LayerCount = 1
    """Blocks of the initial state matrix, each a HiPPO matrix of `d_state / blocks` states, an even number."""
    dt_min: StepSize = 0.001
    """Smallest initial step size."""
    dt_max: StepSize = 0.1
    """Largest initial step size."""
    output: SSMOutput = "gate"
    """What is applied to the result `y`: nothing (`none`), GELU (`activation`), `a ⊙ σ(b)` with `[a, b] = W gelu(y)`
    (`glu`), or `y ⊙ σ(W gelu(y))` (`gate`), as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_state % (2 * self.blocks) or self.d_state > MAX_BLOCK * self.blocks:
            raise ConfigError(
                f"d_state, blocks: expected an even number of at most {MAX_BLOCK} states for each block, got "
                f"{self.d_state} states and {self.blocks} blocks"
            )
        check_range("dt_min", self.dt_min, "dt_max", self.dt_max)

    def build(self, d_model: int, causal: bool = True) -> S5:
        """Return a new `S5`."""
        return S5(d_model, self, causal)


class S5(DiagonalSSM):
    """S5: `h[t] = exp(ΛΔ) h[t - 1] + Λ⁻¹ (exp(ΛΔ) - 1) B x[t]`, `y = 2 Re(C h) + D ⊙ x`, then the output.

    Real parts of Λ are kept below 0. Instead of a configuration, its fields can be passed: `S5(64, d_state=16)`.
    """

    config: S5Config
    scale = 2.0
    lr_mult = 0.25
    """As published for Text: 0.001 where that of the others is 0.004."""

    def __init__(self, d_model: int, config: S5Config | None = None, causal: bool = True, **fields: Any) -> None:
        config = S5Config.of(config, fields)
        super().__init__(d_model, config, causal, config.d_state // 2)
        self.real = nn.Parameter(torch.empty(self.states))
        self.imag = nn.Parameter(torch.empty(self.states))
        self.log_dt = nn.Parameter(torch.empty(self.states))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize Λ, B and C in the basis of a HiPPO matrix's eigenvectors, ln Δ uniform, D normal."""
        if self.b.is_meta:
            return
        states, blocks = self.config.d_state, self.config.blocks
        eigenvalues, vectors = hippo_eigenvectors(states // blocks)
        self.real.copy_(eigenvalues.real.repeat(blocks))
        self.imag.copy_(eigenvalues.imag.repeat(blocks))
        draw_log_dt(self.log_dt, self.config.dt_min, self.config.dt_max)
        b = torch.randn(blocks, states // blocks, self.d_model, dtype=torch.float64, device="cpu") * states**-0.5
        self.b.copy_(torch.view_as_real((vectors.mH @ b.to(vectors.dtype)).flatten(0, 1)))
        shape = (*self.c.shape[:2], blocks, states // blocks, 2)
        parts = torch.randn(shape, dtype=torch.float64, device="cpu") * states**-0.5
        self.c.copy_(torch.view_as_real((torch.view_as_complex(parts) @ vectors).flatten(2, 3)))
        nn.init.normal_(self.d)

    def recurrence(self) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the decays and the factors of the inputs, complex `[states]`."""
        eigenvalues = torch.complex(precise(self.real).clamp(max=MAX_REAL), precise(self.imag))
        log_decay = eigenvalues * torch.exp(precise(self.log_dt))
        return log_decay, torch.expm1(log_decay) / eigenvalues


def hippo_eigenvectors(size: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues with positive imaginary part and the eigenvectors of HiPPO-LegS' normal part.

    As `[size / 2]` and `[size, size / 2]`, in complex128. The other half are their conjugates.
    """
    # On the CPU whatever the default device: not all of them have float64.
    n = torch.arange(size, dtype=torch.float64, device="cpu")
    root = torch.sqrt(2 * n + 1)
    a = -torch.outer(root, root).tril(-1) - torch.diag(n + 1)
    p = torch.sqrt(n + 0.5)
    # A + p pᵀ is -1/2 on the diagonal and antisymmetric, up to rounding, elsewhere.
    normal = (a + torch.outer(p, p)).fill_diagonal_(0.0)
    imag, vectors = torch.linalg.eigh(normal * -1j)
    half = size // 2
    return torch.complex(torch.full_like(imag[half:], -0.5), imag[half:]), vectors[:, half:]
