"""The EMA as a module."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnca.config import TokenCount, Width
from tcnca.errors import ConfigError
from tcnca.layers.mixer import Mixer, MixerConfig, ParamOptions
from tcnca.ops import EMABackend, EMAState, ema, initial_ema_state

EMAOutput = Literal["skip", "activation"]


class EMAConfig(MixerConfig, kind="ema"):
    """MEGA's multi-dimensional damped EMA."""

    d_state: Width = 16
    """Size of the hidden state of each channel (the paper's N)."""
    truncation: TokenCount | None = None
    """Length at which the kernel is cut off. The streaming state then holds as many past inputs."""
    backend: EMABackend = "auto"
    """Implementation: `chunked`, `scan`, `recurrent`, `fft`, or `triton` (kernels for NVIDIA GPUs); `auto` uses
    `triton` where it can run, else `chunked`. All compute the same function, `fft` with an error relative to the
    largest input of a row."""
    spread: bool = False
    """Whether decays are initialized uniformly between 0.5 and 1, instead of all near 0.75 as in MEGA."""
    output: EMAOutput = "activation"
    """Output: SiLU of `ema(x) + ω · x` (`activation`), as in MEGA, or the sum itself (`skip`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "triton" and self.truncation is not None:
            raise ConfigError(
                f"backend: expected 'auto' or 'chunked' with truncation {self.truncation}, got 'triton', which has no "
                "truncated kernels"
            )

    def build(self, d_model: int, causal: bool = True) -> EMA:
        """Return a new `EMA`."""
        return EMA(d_model, self, causal)


class EMA(Mixer):
    """MEGA's mixer, `silu(ema(x) + ω ⊙ x)`: each of `d_model` channels has its own decays.

    A bidirectional EMA has a second set of parameters for the future. Instead of a configuration, its fields can be
    passed: `EMA(64, d_state=8)`.
    """

    state_class = EMAState
    config: EMAConfig

    def __init__(self, d_model: int, config: EMAConfig | None = None, causal: bool = True, **fields: Any) -> None:
        config = EMAConfig.of(config, fields)
        super().__init__(d_model, config, causal)
        shape = (1 if causal else 2, d_model, config.d_state)
        self.delta = nn.Parameter(torch.empty(shape))
        self.alpha = nn.Parameter(torch.empty(shape))
        self.beta = nn.Parameter(torch.empty(shape))
        self.gamma = nn.Parameter(torch.empty(shape))
        self.omega = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters as in MEGA, or with other decays (see `EMAConfig.spread`)."""
        if self.delta.is_meta:
            return
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

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: EMAState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, EMAState | None]:
        """Implement `forward` with `tcnca.ops.ema`."""
        return ema(
            x,
            self.delta,
            self.alpha,
            self.beta,
            self.gamma,
            omega=self.omega,
            activation="silu" if self.config.output == "activation" else "none",
            backend=self.config.backend,
            truncation=self.config.truncation,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )

    @property
    def halo(self) -> tuple[int, int] | None:
        """The inputs that a truncated kernel sees; without truncation states are exchanged."""
        truncation = self.config.truncation
        if truncation is None:
            return None
        return truncation - 1, 0 if self.causal else truncation - 1

    def initial_state(self, batch: int) -> EMAState:
        """Return the state before the first token."""
        c, device, dtype = self.config, self.delta.device, self.delta.dtype
        return initial_ema_state(batch, self.d_model, c.d_state, c.truncation, device, dtype)

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token, of the recurrence whatever the backend.

        A truncated kernel needs one more for each hidden state, which removes the oldest input.
        """
        truncated = self.config.truncation is not None and self.config.truncation < length
        return (4 if truncated else 3) * self.delta.numel()

    @property
    def receptive_field(self) -> int | None:
        """Number of inputs that one output depends on; None without truncation."""
        truncation = self.config.truncation
        return truncation if self.causal or truncation is None else 2 * truncation - 1

    @property
    def signature(self) -> str:
        """What two EMAs must share for one to continue from a state of the other."""
        return f"EMA(d_state={self.config.d_state}, truncation={self.config.truncation})"

    def param_options(self) -> dict[str, ParamOptions]:
        """Exclude all parameters from weight decay."""
        return {name: ParamOptions("rest", wd_mult=0.0) for name, _ in self.named_parameters()}
