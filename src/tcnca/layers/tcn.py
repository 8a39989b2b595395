"""The TCN as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tcnca.layers.config import TCNConfig
from tcnca.layers.dropout import Dropout
from tcnca.layers.norm import fold, make_norm, weight_norm
from tcnca.layers.starts import draw_kernels
from tcnca.ops import TCNState, activation, initial_tcn_state, tcn


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
        normalized = config.norm not in ("none", "weight")
        convolutions = range(config.depth * config.convolutions)
        self.norms = nn.ModuleList(make_norm(config.norm, width) for _ in convolutions if normalized)
        self.dropout = Dropout(config.dropout)
        self.gain = nn.Parameter(torch.empty(*shape)) if config.block == "chain" else None
        self.omega = nn.Parameter(torch.empty(width)) if config.finish != "none" else None
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
        """`[batch, time, width]` to the same; the arguments are those of `tcnca.ops.tcn`."""
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
        return self.function(y) if self.config.finish == "activation" else y, new

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
