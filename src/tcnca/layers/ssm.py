"""What the state-space mixers share: their outputs, and the recurrence of S5 and the LRU."""

from __future__ import annotations

import abc
import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.config import Probability, Range, Width
from tcnca.errors import ConfigError
from tcnca.layers.linear import GLUOutput
from tcnca.layers.mixer import Mixer, MixerConfig, ParamOptions
from tcnca.ops import ScanBackend, SSMState, diagonal_scan, initial_ssm_state, without_autocast, zero_padding

SSMOutput = Literal["none", "activation", "glu", "gate"]
StepSize = Annotated[float, Range(1e-9, 1e9)]


def make_output(d_model: int, kind: SSMOutput, dropout: float) -> nn.Module:
    """Return the module that is applied to the output of a state-space model."""
    if kind == "none":
        return nn.Identity()
    return nn.GELU() if kind == "activation" else GLUOutput(d_model, dropout, self_gated=kind == "gate")


def check_range(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise a ConfigError unless `low <= high`."""
    if low > high:
        raise ConfigError(f"{low_name}, {high_name}: expected {low_name} <= {high_name}, got {low} and {high}")


def precise(parameter: Tensor) -> Tensor:
    """Return a parameter in float32 or better, in which all of a state-space model is computed."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def as_complex(parts: Tensor) -> Tensor:
    """Return complex numbers in complex64 or better of their real and imaginary parts, the last dimension."""
    return torch.view_as_complex(precise(parts).contiguous())


def draw_log_dt(log_dt: Tensor, dt_min: float, dt_max: float) -> None:
    """Initialize the logarithms of step sizes, uniform between those of `dt_min` and `dt_max`."""
    nn.init.uniform_(log_dt, math.log(dt_min), math.log(dt_max))


class SSMConfig(MixerConfig):
    """What the configurations of state-space mixers share."""

    d_state: Width = 64
    """Size of the state that all channels share."""
    output: SSMOutput = "glu"
    """What is applied to the result `y`: nothing (`none`), GELU (`activation`), `a ⊙ σ(b)` with `[a, b] = W gelu(y)`
    (`glu`), or `y ⊙ σ(W gelu(y))` (`gate`)."""
    dropout: Probability = 0.0
    """Dropout before the linear map of `glu` and `gate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout and self.output in ("none", "activation"):
            raise ConfigError(f"dropout: expected 0 with output {self.output!r}, which has none, got {self.dropout}")


class SSM(Mixer):
    """Base of the state-space mixers, with complex hidden states of the sizes `sizes`, C, D and an output."""

    state_class = SSMState
    config: SSMConfig
    lr_mult: float
    """Factor of the learning rate of all parameters but C, D and those of the output."""

    def __init__(self, d_model: int, config: SSMConfig, causal: bool, *sizes: int) -> None:
        super().__init__(d_model, config, causal)
        self.sizes = sizes
        self.c = nn.Parameter(torch.empty(1 if causal else 2, d_model, sizes[-1], 2))
        self.d = nn.Parameter(torch.empty(d_model))
        self.output = make_output(d_model, config.output, config.dropout)

    def initial_state(self, batch: int) -> SSMState:
        """Return the state before the first token."""
        return initial_ssm_state(batch, *self.sizes, device=self.c.device, dtype=self.c.dtype)

    @property
    def halo(self) -> None:
        """None: the operators exchange states."""
        return None

    @property
    def receptive_field(self) -> None:
        """Number of inputs that one output depends on: there is no limit."""
        return None

    @property
    def signature(self) -> str:
        """What two mixers must share for one to continue from a state of the other."""
        return f"{type(self).__name__}(d_state={self.config.d_state})"

    def param_options(self) -> dict[str, ParamOptions]:
        """Train all but C and D slowly and without weight decay, as published."""
        slow = ParamOptions("ssm", self.lr_mult, wd_mult=0.0)
        own = dict(self.named_parameters(recurse=False))
        return {name: slow for name in own if name not in ("c", "d")} | {"c": ParamOptions("matrices")}


class DiagonalSSMConfig(SSMConfig):
    """What the configurations of S5 and the LRU share."""

    backend: ScanBackend = "auto"
    """Implementation: `scan` (in parallel), `recurrent` (token by token), or `triton` on a GPU. `auto` uses `triton`
    where it can run, otherwise `scan`."""


class DiagonalSSM(SSM):
    """Base of S5 and the LRU: `h[t] = λ h[t - 1] + g ⊙ B x[t]`, `y = s Re(C h) + D ⊙ x`, then the output.

    λ, g, B and C are complex. A bidirectional one runs the same recurrence from the end as well, with its own C.

    Args:
        d_model: number of channels.
        config: the configuration.
        causal: whether an output depends on the past and present only.
        states: number of complex states.
    """

    config: DiagonalSSMConfig
    scale: float
    """The factor s of the output."""

    def __init__(self, d_model: int, config: DiagonalSSMConfig, causal: bool, states: int) -> None:
        super().__init__(d_model, config, causal, states)
        self.states = states
        self.b = nn.Parameter(torch.empty(states, d_model, 2))

    @abc.abstractmethod
    def recurrence(self) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the decays λ and the factors g of the inputs, complex `[states]`."""

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: SSMState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, SSMState | None]:
        """Implement `forward` with `tcnca.ops.diagonal_scan`."""
        x = zero_padding(x, lengths)
        with without_autocast(x.device):
            log_decay, gain = self.recurrence()
            # Complex products with real inputs and outputs, as real ones.
            to_states = torch.view_as_real(as_complex(self.b) * gain.unsqueeze(-1)).movedim(-1, 1).flatten(0, 1)
            v = F.linear(x.to(to_states.dtype), to_states).unflatten(-1, (-1, 2))
            h, new = diagonal_scan(
                torch.view_as_complex(v),
                log_decay,
                backend=self.config.backend,
                lengths=lengths,
                state=state,
                return_state=return_state,
                inplace=inplace,
            )
            y = self._read(h, 0) + self.d * x
            if not self.causal:
                h, _ = diagonal_scan(
                    torch.view_as_complex(v), log_decay, backend=self.config.backend, reverse=True, lengths=lengths
                )
                y = y + self._read(h, 1)
        return self.output(y.to(x.dtype)), new

    def _read(self, h: Tensor, direction: int) -> Tensor:
        """Return `s Re(C h)`, with the C of a direction."""
        from_states = self.scale * torch.view_as_real(as_complex(self.c[direction]).conj_physical())
        return F.linear(torch.view_as_real(h).flatten(-2), from_states.flatten(1))

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token, of the recurrence whatever the backend."""
        directions = self.c.shape[0]
        return self.b.numel() + self.c.numel() + 4 * directions * self.states
