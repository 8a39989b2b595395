"""The EMA as a module."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.config import Config, PositiveInt
from tcnca.errors import ConfigError
from tcnca.ops import EMABackend, EMAState, ema, initial_ema_state

EMAOutput = Literal["skip", "activation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMAConfig(Config, kind="ema"):
    """MEGA's multi-dimensional damped EMA."""

    d_state: PositiveInt = 16
    """Hidden states of each channel (the paper's N)."""
    truncation: PositiveInt | None = None
    """Lags after which the kernel is cut off. Streaming then keeps a window of so many inputs."""
    backend: EMABackend = "auto"
    """How it is computed: `fft`, `scan`, `recurrent`, or `fused`, by kernels for NVIDIA GPUs; `auto` takes `fused` where it
    can run, else `fft`. All give the same."""
    spread: bool = False
    """Whether decays start uniform between 0.5 and 1, instead of all near 0.75 as MEGA's do."""
    output: EMAOutput = "activation"
    """What comes out: a SiLU of `ema(x) + ω · x` (`activation`), as MEGA has it, or that itself (`skip`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "fused" and self.truncation is not None:
            raise ConfigError(
                f"backend: expected 'fused' without truncation, got it with truncation {self.truncation}; 'auto' takes "
                "'fft' for a truncated kernel"
            )


class EMA(nn.Module):
    """MEGA's mixer: `silu(ema(x) + ω ⊙ x)`, or without SiLU, each of `d_model` channels with `hidden` decays of its own.

    Bidirectional, a second set of parameters looks into the future. `tcnca.ops.ema` takes a kernel made beforehand;
    the module makes it anew in every call, as it cannot know when its parameters change.
    """

    def __init__(self, width: int, config: EMAConfig, causal: bool = True) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        shape = (1 if causal else 2, width, config.d_state)
        self.delta = nn.Parameter(torch.empty(shape))
        self.alpha = nn.Parameter(torch.empty(shape))
        self.beta = nn.Parameter(torch.empty(shape))
        self.gamma = nn.Parameter(torch.empty(shape))
        self.omega = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters as MEGA does, or with other decays (see `EMAConfig.spread`)."""
        nn.init.normal_(self.delta, std=0.2)
        nn.init.normal_(self.alpha, std=0.2)
        if self.config.spread:
            # The decay is 1 - σ(α) σ(δ), of which the first factor is near a half.
            damping = 0.5 * torch.rand_like(self.delta) / self.alpha.sigmoid()
            self.delta.copy_(damping.clamp(1e-6, 1.0 - 1e-6).logit())
        nn.init.normal_(self.beta, std=0.02)
        # Neighboring hidden states start with opposite signs.
        self.beta[..., 0::2] += 1.0
        self.beta[..., 1::2] -= 1.0
        nn.init.normal_(self.gamma)
        nn.init.normal_(self.omega)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        state: EMAState | None = None,
        return_state: bool = False,
        inplace: bool = False,
    ) -> tuple[Tensor, EMAState | None]:
        """`[batch, time, d_model]` to the same; the arguments are those of `tcnca.ops.ema`."""
        averaged, new = ema(
            x,
            self.delta,
            self.alpha,
            self.beta,
            self.gamma,
            backend=self.config.backend,
            truncation=self.config.truncation,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )
        y = averaged + x * self.omega
        return F.silu(y) if self.config.output == "activation" else y, new

    def initial_state(self, batch: int) -> EMAState:
        """The state before the first token."""
        where, kind = self.delta.device, self.delta.dtype
        return initial_ema_state(batch, self.omega.shape[0], self.config.d_state, self.config.truncation, where, kind)

    def macs(self, length: int) -> int:
        """Multiplications and additions for one token of a sequence of `length`, by the recurrence, in pairs.

        A truncated kernel needs one more for each hidden state, to take out again what once went in.
        """
        truncated = self.config.truncation is not None and self.config.truncation < length
        return (4 if truncated else 3) * self.delta.numel()

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        c = self.config
        return f"d_state={c.d_state}, truncation={c.truncation}, backend={c.backend}, causal={self.causal}"
