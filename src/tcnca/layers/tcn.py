"""The TCN as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tcnca.layers.config import TCNConfig
from tcnca.layers.dropout import Dropout
from tcnca.layers.norm import fold, make_norm, weight_norm
from tcnca.ops import TCNState, activation, initial_tcn_state, tcn

FAR_SCALE = 0.1
DECAYS = 4


class TCN(nn.Module):
    """A TCN with its own kernels for each of `width` channels."""

    def __init__(self, width: int, config: TCNConfig, causal: bool = True) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        shape = (config.depth, config.convolutions, width)
        self.weight = nn.Parameter(torch.empty(*shape, config.kernel_size))
        self.bias = nn.Parameter(torch.empty(*shape)) if config.bias else None
        self.scale = nn.Parameter(torch.empty(*shape)) if config.norm == "weight" else None
        normalised = config.norm not in ("none", "weight")
        convolutions = range(config.depth * config.convolutions)
        self.norms = nn.ModuleList(make_norm(config.norm, width) for _ in convolutions if normalised)
        self.dropout = Dropout(config.dropout)
        self.gain = nn.Parameter(torch.empty(*shape)) if config.block == "chain" else None
        self.omega = nn.Parameter(torch.empty(width)) if config.block != "residual" else None
        self.function = activation(config.activation)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new kernels (see `TCNConfig.init`)."""
        nn.init.normal_(self.weight, std=self.config.kernel_size**-0.5)
        if self.config.init == "decay":
            # Far taps with random weights would pour noise from far tokens into every position.
            self.weight[1:] *= FAR_SCALE
            self.weight[0] = self._decaying_mixtures(self.weight[0])
        if self.config.init == "series":
            self.weight.copy_(self._series())
        for zero in (self.bias, self.gain):
            if zero is not None:
                nn.init.zeros_(zero)
        if self.omega is not None:
            nn.init.normal_(self.omega)
        if self.scale is not None:
            self.scale.copy_(self.weight.norm(dim=-1))

    def _decaying_mixtures(self, like: Tensor) -> Tensor:
        centre = 0 if self.causal else (self.config.kernel_size - 1) // 2
        lags = (torch.arange(self.config.kernel_size, device=like.device) - centre).abs()
        amplitudes = torch.randn(*like.shape[:-1], DECAYS, 1, device=like.device)
        decays = torch.rand(*like.shape[:-1], DECAYS, 1, device=like.device)
        kernels = (amplitudes * decays**lags).sum(-2)
        return (kernels / kernels.norm(dim=-1, keepdim=True)).to(like.dtype)

    def _series(self) -> Tensor:
        """Kernels whose chain is `a q^l` at lag `l`: the digits of a lag, to the base of the factor, are its taps.

        A kernel in the middle looks to one side: of even channels into the past, of odd ones into the future.
        """
        size, factor = self.config.kernel_size, self.config.dilation_factor
        depth, convolutions, width = self.weight.shape[:3]
        centre = 0 if self.causal else (size - 1) // 2
        lags = torch.arange(size) - centre
        sides = torch.ones(width) if self.causal else 1.0 - 2.0 * (torch.arange(width) % 2)
        digits = lags * sides.unsqueeze(-1)
        decay = (0.5 + 0.5 * torch.rand(width)).unsqueeze(-1).double()
        amplitude = torch.randn(width).unsqueeze(-1) * (1.0 - decay**2).sqrt()
        kernels = torch.zeros(depth, convolutions, width, size, dtype=torch.float64)
        # Further convolutions of a block begin as nothing at all.
        kernels[:, 1:, :, centre] = 1.0
        for block in range(depth):
            powers = (decay ** (factor**block)) ** digits.clamp(min=0)
            kernels[block, 0] = torch.where((digits >= 0) & (digits < factor), powers, 0.0)
        kernels[0, 0] *= amplitude
        return kernels.to(self.weight)

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
        """`[batch, time, width]` to the same; the arguments are those of `tcnca.ops.tcn`."""
        weight = self.weight if self.scale is None else weight_norm(self.weight, self.scale)
        folded = fold(weight, self.bias, [*self.norms])
        weight, bias = (weight, self.bias) if folded is None else folded
        separate = len(self.norms) > 0 and folded is None
        chain, bent = self.omega is not None, self.gain is not None

        def normalise(h: Tensor, number: int) -> Tensor:
            h = self.norms[number](h, lengths) if separate else h
            return self._bent(h, number) if bent else h

        y, new = tcn(
            x,
            weight,
            self.config.dilation_factor,
            bias=bias,
            nonlinearity="none" if chain else self.config.activation,
            residual=not chain,
            normalise=normalise if separate or bent else None,
            dropout=self.dropout.probability if self.dropout.training else 0.0,
            causal=self.causal,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )
        return y if self.omega is None else self.function(y + self.omega * x), new

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
