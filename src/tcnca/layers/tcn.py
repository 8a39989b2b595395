"""The TCN as a module."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnca.config import Config, PositiveInt, Probability, check_at_least
from tcnca.errors import ConfigError
from tcnca.layers.dropout import Dropout
from tcnca.layers.init import draw_kernels
from tcnca.layers.norm import fold, make_norm, weight_norm
from tcnca.ops import Activation, TCNState, activation, initial_tcn_state, receptive_field, tcn

TCNNorm = Literal["none", "weight", "rms", "layer", "batch", "sync_batch"]
TCNInit = Literal["ema", "series", "decay", "near", "graded", "normal"]
TCNBlock = Literal["linear", "chain", "residual"]
TCNOutput = Literal["none", "skip", "activation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TCNConfig(Config, kind="tcn"):
    """The structure of a TCN: `depth` blocks, block `i` of dilation `dilation_factor^i`.

    The defaults are the linear chain of TCNCA-linear, which trains best. The paper's TCN has `block="residual"`,
    `output="none"`, `init="decay"` and `norm="weight"`. See docs/tcn-block.md.
    """

    kernel_size: PositiveInt = 17
    """Taps of every kernel (the paper's K)."""
    dilation_factor: PositiveInt = 8
    """Growth of the dilation from block to block (the paper's f)."""
    depth: PositiveInt = 4
    """Number of blocks (the paper's D)."""
    convolutions: PositiveInt = 1
    """Convolutions in one block (the paper's B): 1 is the paper's, 2 the classic TCN's."""
    activation: Activation = "silu"
    """Non-linearity, where `block` or `output` has one."""
    norm: TCNNorm = "none"
    """Normalization of each convolution: `weight` of its kernels, `batch` of each channel of its output;
    `rms` and `layer` of its output mix channels, which the paper's TCN does not. See docs/tcn-block.md."""
    bias: bool = False
    """Whether convolutions have a bias."""
    dropout: Probability = 0.0
    """Dropout inside the blocks."""
    block: TCNBlock = "linear"
    """How convolutions follow each other. `linear`: one directly after the other. `chain`: after each,
    `h + a · activation(h)` with a learned `a` for each channel that begins at 0. `residual`:
    `x + activation(convolution(x))`."""
    output: TCNOutput = "skip"
    """What is made of the last block's `h`: nothing more (`none`), `h + ω · x` with a learned ω for each channel
    (`skip`), or the `activation` of that, as MEGA's EMA ends."""
    init: TCNInit = "ema"
    """How kernels start. `ema`: that of the first block as MEGA's EMA does, the others letting through what comes.
    `series`: for `linear` and `chain`, together one decaying exponential a channel, as far as
    `dilation_factor ^ depth` tokens if there are as many taps. `near`: random mixtures of decaying exponentials in the
    first block, nothing new in the others; `decay`: little in the others. `graded`: all N(0, 1 / kernel_size), each
    block 0.3 times the one before. `normal`: all alike. See docs/tcn-block.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A value that would be ignored is refused: two equal models would pass for a comparison.
        if self.activation != "silu" and self.block == "linear" and self.output != "activation":
            raise ConfigError(
                f"activation: expected block 'chain' or 'residual', or output 'activation', got {self.activation!r} "
                f"with block 'linear' and output {self.output!r}, which have no activation"
            )
        if self.init == "series" and self.block == "residual":
            raise ConfigError("init: expected 'series' with block 'linear' or 'chain', got it with block 'residual'")

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return receptive_field(self.kernel_size, self.dilation_factor, self.depth, self.convolutions)

    @classmethod
    def covering(cls, length: int, **fields: Any) -> TCNConfig:
        """The TCN with the smallest dilation factor whose receptive field is at least `length`.

        This is the rule of the paper's runtime comparison. `fields` sets the others, for example `depth=4`.
        """
        check_at_least("length", length, 1)
        config = cls(dilation_factor=1, **fields)
        if config.receptive_field < length and (config.depth == 1 or config.kernel_size == 1):
            raise ConfigError(
                f"length: expected at most {config.receptive_field} with depth {config.depth} and kernel_size "
                f"{config.kernel_size}, whatever the dilation factor, got {length}"
            )
        # The field grows with the factor, and a factor of `length` is always enough.
        factors = range(1, length + 1)
        enough = bisect.bisect_left(factors, length, key=lambda f: config.with_dilation_factor(f).receptive_field)
        return config.with_dilation_factor(factors[enough])

    def with_dilation_factor(self, dilation_factor: int) -> TCNConfig:
        """A copy with another dilation factor."""
        return dataclasses.replace(self, dilation_factor=dilation_factor)


class TCN(nn.Module):
    """A TCN with its own kernels for each of `d_model` channels."""

    def __init__(self, width: int, config: TCNConfig, causal: bool = True) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        shape = (config.depth, config.convolutions, width)
        self.weight = nn.Parameter(torch.empty(*shape, config.kernel_size))
        self.bias = nn.Parameter(torch.empty(*shape)) if config.bias else None
        self.scale = nn.Parameter(torch.empty(*shape)) if config.norm == "weight" else None
        normalized = config.norm not in ("none", "weight")
        convolutions = range(config.depth * config.convolutions)
        self.norms = nn.ModuleList(make_norm(config.norm, width) for _ in convolutions if normalized)
        self.dropout = Dropout(config.dropout)
        self.gain = nn.Parameter(torch.empty(*shape)) if config.block == "chain" else None
        self.omega = nn.Parameter(torch.empty(width)) if config.output != "none" else None
        self.function = activation(config.activation)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new kernels (see `TCNConfig.init`)."""
        kernels = draw_kernels(self.config, self.weight, self.causal)
        self.weight.copy_(kernels)
        if self.scale is not None:
            self.scale.copy_(kernels.norm(dim=-1))
            # A kernel of no length still needs a direction to grow into.
            self.weight.copy_(torch.where(self.scale.unsqueeze(-1) > 0, kernels, torch.randn_like(kernels)))
        for zero in (self.bias, self.gain):
            if zero is not None:
                nn.init.zeros_(zero)
        if self.omega is not None:
            nn.init.normal_(self.omega)

    def _bent(self, h: Tensor, number: int) -> Tensor:
        assert self.gain is not None
        return h + self.gain.flatten(0, 1)[number] * self.function(h)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        state: TCNState | None = None,
        return_state: bool = False,
        inplace: bool = False,
    ) -> tuple[Tensor, TCNState | None]:
        """`[batch, time, d_model]` to the same; the arguments are those of `tcnca.ops.tcn`."""
        weight = self.weight if self.scale is None else weight_norm(self.weight, self.scale)
        folded = fold(weight, self.bias, [*self.norms])
        weight, bias = (weight, self.bias) if folded is None else folded
        separate = len(self.norms) > 0 and folded is None
        chain, bent = self.config.block != "residual", self.gain is not None

        def normalize(h: Tensor, number: int) -> Tensor:
            h = self.norms[number](h, lengths) if separate else h
            return self._bent(h, number) if bent else h

        y, new = tcn(
            x,
            weight,
            self.config.dilation_factor,
            bias=bias,
            nonlinearity="none" if chain else self.config.activation,
            residual=not chain,
            normalize=normalize if separate or bent else None,
            dropout=self.dropout.probability if self.dropout.training else 0.0,
            causal=self.causal,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )
        y = y if self.omega is None else y + self.omega * x
        return self.function(y) if self.config.output == "activation" else y, new

    def initial_state(self, batch: int) -> TCNState:
        """The state before the first token."""
        depth, convolutions, width, kernel_size = self.weight.shape
        factor = self.config.dilation_factor
        where, kind = self.weight.device, self.weight.dtype
        return initial_tcn_state(batch, width, kernel_size, factor, depth, convolutions, where, kind)

    def macs(self, length: int) -> int:
        """Multiplications and additions for one token, in pairs, whatever the `length` of its sequence."""
        return self.weight.numel()

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        c = self.config
        return (
            f"kernel_size={c.kernel_size}, dilation_factor={c.dilation_factor}, depth={c.depth}, "
            f"convolutions={c.convolutions}, receptive_field={c.receptive_field}, causal={self.causal}"
        )
