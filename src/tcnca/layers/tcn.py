"""The TCN as a module, and the initialization of its kernels."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnca.config import LayerCount, Probability, TokenCount, Width, check
from tcnca.errors import ConfigError, shown
from tcnca.layers.ema import EMA, EMAConfig
from tcnca.layers.linear import Dropout
from tcnca.layers.mixer import Mixer, MixerConfig, ParamOptions
from tcnca.layers.norm import make_norm, weight_norm
from tcnca.ops import Activation, TCNState, activation, ema_kernel, initial_tcn_state, receptive_field, tcn

TCNNorm = Literal["none", "weight", "rms", "layer", "batch", "sync_batch"]
TCNInit = Literal["ema", "series", "decay", "near", "graded", "normal"]
TCNBlock = Literal["linear", "chain", "residual"]
TCNOutput = Literal["none", "skip", "activation"]

FAR_SCALE = 0.1
"""Scale of the random kernels of later blocks."""
GRADE = 0.3
"""Scale of a block relative to the previous one."""
MIXED = 4
"""Exponentials in a mixture."""
MAX_CONVOLUTIONS = 2**10
"""Convolutions of one TCN."""
MAX_RECEPTIVE_FIELD = 2**31 - 1
"""Tokens. The streaming state holds as many values of each channel."""


class TCNConfig(MixerConfig, kind="tcn"):
    """The structure of a TCN: `depth` blocks, block `i` of dilation `dilation_factor^i`.

    The defaults are the linear chain of TCNCA-linear, which trains best. The paper's TCN has `block="residual"`,
    `output="none"`, `init="decay"` and `norm="weight"`. See docs/tcn-block.md.
    """

    kernel_size: Width = 17
    """Taps of every kernel (the paper's K)."""
    dilation_factor: TokenCount = 8
    """Growth of the dilation from block to block (the paper's f)."""
    depth: LayerCount = 4
    """Number of blocks (the paper's D)."""
    convolutions: LayerCount = 1
    """Convolutions in one block (the paper's B): 1 in the paper, 2 in the classic TCN."""
    activation: Activation = "silu"
    """Non-linearity, where `block` or `output` has one."""
    norm: TCNNorm = "none"
    """Normalization of each convolution: `weight` of its kernels, `batch` of each channel of its output;
    `rms` and `layer` of its output mix channels, which the paper's TCN does not do. See docs/tcn-block.md."""
    bias: bool = False
    """Whether convolutions have a bias."""
    dropout: Probability = 0.0
    """Dropout inside the blocks."""
    block: TCNBlock = "linear"
    """Structure of the blocks. `linear`: convolutions only. `chain`: each convolution is followed by
    `h + a · activation(h)` with a learned `a` for each channel, initially 0. `residual`:
    `x + activation(convolution(x))`."""
    output: TCNOutput = "skip"
    """Output, from the `h` of the last block: `h` itself (`none`), `h + ω · x` with a learned ω for each channel
    (`skip`), or the `activation` of that sum, as in MEGA's EMA."""
    init: TCNInit = "ema"
    """Initialization of the kernels. `ema`: the first block as MEGA's EMA, the others as the identity. `series`, for
    `linear` and `chain`: together one decaying exponential for each channel, over `dilation_factor ^ depth` tokens if
    there are as many taps. `near`: random mixtures of decaying exponentials in the first block, the identity in the
    others; `decay`: small random values in the others. `graded`: N(0, 1 / kernel_size), each block 0.3 times the
    previous one. `normal`: all blocks alike. See docs/tcn-block.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A field without effect is an error, since two identical models could be taken for a comparison.
        if self.activation != "silu" and self.block == "linear" and self.output != "activation":
            raise ConfigError(
                f"activation: expected block 'chain' or 'residual' or output 'activation' with "
                f"{self.activation!r}, got block 'linear' and output {self.output!r}, which have no non-linearity"
            )
        if self.init == "series" and self.block == "residual":
            raise ConfigError("init: expected block 'linear' or 'chain' with 'series', got 'residual'")
        if self.depth * self.convolutions > MAX_CONVOLUTIONS:
            raise ConfigError(
                f"depth, convolutions: expected a product of at most {MAX_CONVOLUTIONS}, got {self.depth} and "
                f"{self.convolutions}"
            )
        # With kernels of one tap the dilation has no effect, but it must be a number that PyTorch can take.
        field = max(self.receptive_field, self.dilation_factor ** (self.depth - 1))
        if field > MAX_RECEPTIVE_FIELD:
            raise ConfigError(
                f"dilation_factor: expected a receptive field of at most {MAX_RECEPTIVE_FIELD} tokens, got "
                f"{shown(field)}; reduce dilation_factor, depth or kernel_size"
            )

    def build(self, d_model: int, causal: bool = True) -> TCN:
        """Return a new `TCN`."""
        return TCN(d_model, self, causal)

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return receptive_field(self.kernel_size, self.dilation_factor, self.depth, self.convolutions)

    @classmethod
    def covering(cls, length: int, **fields: Any) -> TCNConfig:
        """Return the TCN with the smallest dilation factor whose receptive field is at least `length`.

        This is the rule of the paper's runtime comparison. `fields` sets the others, for example `depth=4`.
        """
        check("length", length, TokenCount)
        config = cls(dilation_factor=1, **fields)
        factor = smallest_factor(length, config.kernel_size, config.depth, config.convolutions)
        if factor is None:
            raise ConfigError(
                f"length: expected at most {config.receptive_field} with depth {config.depth} and "
                f"kernel_size {config.kernel_size}, whatever the dilation factor, got {length}"
            )
        return dataclasses.replace(config, dilation_factor=factor)


def smallest_factor(length: int, kernel_size: int, depth: int, convolutions: int, least: int = 1) -> int | None:
    """Return the smallest dilation factor from `least` on whose receptive field covers `length`; None without one."""

    def field(factor: int) -> int:
        return receptive_field(kernel_size, factor, depth, convolutions)

    # The receptive field grows with the factor, and `length` is enough where the factor has an effect.
    factors = range(least, max(length, least) + 1)
    place = bisect.bisect_left(factors, length, key=field)
    return factors[place] if place < len(factors) else None


class TCN(Mixer):
    """A TCN with separate kernels for each of `d_model` channels.

    Instead of a configuration, its fields can be passed: `TCN(64, kernel_size=9, depth=3)`.
    """

    state_class = TCNState
    rounds_inputs = True
    config: TCNConfig

    def __init__(self, d_model: int, config: TCNConfig | None = None, causal: bool = True, **fields: Any) -> None:
        config = TCNConfig.of(config, fields)
        super().__init__(d_model, config, causal)
        shape = (config.depth, config.convolutions, d_model)
        self.weight = nn.Parameter(torch.empty(*shape, config.kernel_size))
        self.bias = nn.Parameter(torch.empty(*shape)) if config.bias else None
        self.scale = nn.Parameter(torch.empty(*shape)) if config.norm == "weight" else None
        norms = config.depth * config.convolutions if config.norm not in ("none", "weight") else 0
        self.norms = nn.ModuleList(make_norm(config.norm, d_model) for _ in range(norms))
        self.dropout = Dropout(config.dropout)
        self.gain = nn.Parameter(torch.empty(*shape)) if config.block == "chain" else None
        self.omega = nn.Parameter(torch.empty(d_model)) if config.output != "none" else None
        self.activation = activation(config.activation)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the kernels (see `TCNConfig.init`)."""
        if self.weight.is_meta:
            return
        kernels = _initial_kernels(self.config, self.weight, self.causal)
        self.weight.copy_(kernels)
        if self.scale is not None:
            self.scale.copy_(kernels.norm(dim=-1))
            # A kernel of norm 0 still needs a direction to grow in.
            self.weight.copy_(torch.where(self.scale.unsqueeze(-1) > 0, kernels, torch.randn_like(kernels)))
        for zero in (self.bias, self.gain):
            if zero is not None:
                nn.init.zeros_(zero)
        if self.omega is not None:
            nn.init.normal_(self.omega)

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: TCNState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, TCNState | None]:
        """Implement `forward` with `tcnca.ops.tcn`."""
        weight = self.weight if self.scale is None else weight_norm(self.weight, self.scale)
        residual, gain, normed = self.config.block == "residual", self.gain, len(self.norms) > 0

        def normalize(h: Tensor, number: int) -> Tensor:
            h = self.norms[number](h, lengths) if normed else h
            return h if gain is None else h + gain.flatten(0, 1)[number] * self.activation(h)

        y, new = tcn(
            x,
            weight,
            self.config.dilation_factor,
            bias=self.bias,
            activation=self.config.activation if residual else "none",
            residual=residual,
            omega=self.omega,
            norm_fn=normalize if normed or gain is not None else None,
            dropout=self.dropout.probability if self.dropout.training else 0.0,
            causal=self.causal,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )
        return self.activation(y) if self.config.output == "activation" else y, new

    @property
    def halo(self) -> tuple[int, int] | None:
        """One halo for all blocks if they are linear; otherwise every convolution has its own."""
        c = self.config
        if c.block != "linear" or len(self.norms) or (self.training and self.dropout.probability):
            return None
        future = 0 if self.causal else (c.receptive_field - 1) // (c.kernel_size - 1 or 1) * ((c.kernel_size - 1) // 2)
        return c.receptive_field - 1 - future, future

    def initial_state(self, batch: int) -> TCNState:
        """Return the state before the first token."""
        c, device, dtype = self.config, self.weight.device, self.weight.dtype
        return initial_tcn_state(
            batch, self.d_model, c.kernel_size, c.dilation_factor, c.depth, c.convolutions, device, dtype
        )

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token, which do not depend on `length`."""
        return self.weight.numel()

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return self.config.receptive_field

    @property
    def signature(self) -> str:
        """What two TCNs must share for one to continue from a state of the other."""
        names = ("kernel_size", "dilation_factor", "depth", "convolutions")
        return f"TCN({', '.join(f'{name}={getattr(self.config, name)}' for name in names)})"

    def param_options(self) -> dict[str, ParamOptions]:
        """Put the kernels into their own group, whose factors are in the recipe."""
        return {"weight": ParamOptions("kernels")}


def _initial_kernels(config: TCNConfig, like: Tensor, causal: bool) -> Tensor:
    """Return new kernels (see `TCNConfig.init`) of the shape, dtype and device of `like`.

    All but `normal` give far taps little weight: random ones would add noise from far tokens to every position.
    """
    if config.init == "series":
        return _series(config, like, causal)
    kernels = nn.init.normal_(torch.empty_like(like), std=config.kernel_size**-0.5)
    if config.init == "normal":
        return kernels
    init = _init_residual if config.block == "residual" else _init_chain
    return init(config, kernels, causal)


def _init_residual(config: TCNConfig, kernels: Tensor, causal: bool) -> Tensor:
    """Initialize residual blocks, whose skip connections pass their input on."""
    if config.init == "graded":
        return kernels * _grades(kernels)
    kernels[0] = _decaying_mixtures(kernels[0], causal)
    kernels[1:] *= FAR_SCALE
    if config.init == "ema":
        kernels[0, 0] = _averages(kernels[0, 0], causal)
    if config.init != "decay":
        # With zeros in all convolutions of a block, none would have a gradient.
        kernels[1:, -1] = 0.0
    return kernels


def _init_chain(config: TCNConfig, kernels: Tensor, causal: bool) -> Tensor:
    """Initialize a chain, whose convolutions must pass their input on themselves."""
    first = kernels[0, 0].clone()
    if config.init == "graded":
        kernels *= _grades(kernels)
    else:
        draw = _averages if config.init == "ema" else _decaying_mixtures
        first = draw(first, causal)
        kernels *= FAR_SCALE if config.init == "decay" else 0.0
    kernels[..., _center(config.kernel_size, causal)] += 1.0
    kernels[0, 0] = first
    return kernels


def _center(kernel_size: int, causal: bool) -> int:
    """Return the tap of lag zero."""
    return 0 if causal else (kernel_size - 1) // 2


def _grades(kernels: Tensor) -> Tensor:
    return (GRADE ** torch.arange(kernels.shape[0], device=kernels.device)).to(kernels.dtype).view(-1, 1, 1, 1)


def _decaying_mixtures(like: Tensor, causal: bool) -> Tensor:
    """Return random mixtures of decaying exponentials, of unit norm."""
    lags = (torch.arange(like.shape[-1], device=like.device) - _center(like.shape[-1], causal)).abs()
    amplitudes = torch.randn(*like.shape[:-1], MIXED, 1, device=like.device)
    decays = torch.rand(*like.shape[:-1], MIXED, 1, device=like.device)
    kernels = (amplitudes * decays**lags).sum(-2)
    return (kernels / kernels.norm(dim=-1, keepdim=True)).to(like.dtype)


def _averages(like: Tensor, causal: bool) -> Tensor:
    """Return the first lags of the kernel of an EMA that is initialized as in MEGA."""
    width, size = like.shape
    center = _center(size, causal)
    with like.device:
        ema = EMA(width, EMAConfig(), causal)
    taps = ema_kernel(ema.delta, ema.alpha, ema.beta, ema.gamma, size - center).to(like.dtype)
    kernels = torch.zeros_like(like)
    kernels[:, center:] += taps[0]
    if not causal:
        kernels[:, : center + 1] += taps[1, :, : center + 1].flip(-1)
    return kernels


def _series(config: TCNConfig, like: Tensor, causal: bool) -> Tensor:
    """Return kernels whose chain is `a q^l` at lag `l`: the digits of a lag, to the base of the factor, are its taps.

    Bidirectional kernels are one-sided: those of even channels see the past, those of odd channels the future.
    """
    depth, convolutions, width, size = like.shape
    factor, center = config.dilation_factor, _center(size, causal)
    sides = torch.ones(width) if causal else 1.0 - 2.0 * (torch.arange(width) % 2)
    digits = (torch.arange(size) - center) * sides.unsqueeze(-1)
    decay = (0.5 + 0.5 * torch.rand(width)).unsqueeze(-1).double()
    amplitude = torch.randn(width).unsqueeze(-1) * (1.0 - decay**2).sqrt()
    kernels = torch.zeros(depth, convolutions, width, size, dtype=torch.float64)
    # Further convolutions of a block start as the identity.
    kernels[:, 1:, :, center] = 1.0
    for block in range(depth):
        powers = (decay ** (factor**block)) ** digits.clamp(min=0)
        kernels[block, 0] = torch.where((digits >= 0) & (digits < factor), powers, 0.0)
    kernels[0, 0] *= amplitude
    return kernels.to(like)
