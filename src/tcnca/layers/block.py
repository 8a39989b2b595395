"""One layer of a stack: a mixer over time, attention inside chunks, a feed-forward net.

`GatedBlock` joins mixer and attention as MEGA and TCNCA do, with gates; `ResidualBlock` as TCNCA-simple
does, with plain residual connections, and without attention as TCN-MLP and EMA-MLP.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tcnca.layers.attention import AttentionConfig, ChunkedAttention
from tcnca.layers.dropout import Dropout
from tcnca.layers.ema import EMA, EMAConfig
from tcnca.layers.feed_forward import FeedForward
from tcnca.layers.linear import WEIGHT_STD, Linear
from tcnca.layers.norm import make_norm
from tcnca.layers.tcn import TCN, TCNConfig
from tcnca.ops import AttentionState, EMAState, State, TCNState, activation

Mixer = TCNConfig | EMAConfig
MixerState = TCNState | EMAState


@dataclasses.dataclass(frozen=True)
class LayerState(State):
    """The states of a layer's parts; None for a part that the layer does not have."""

    mixer: MixerState | None
    attention: AttentionState | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What the layers of a stack have in common."""

    d_model: int
    causal: bool
    mixer: Mixer | None
    attention: AttentionConfig | None
    gated: bool
    d_ff: int
    activation: str
    norm: str
    prenorm: bool
    dropout: float
    value_dropout: float
    ff_dropout: float
    feature_dropout: bool


def make_mixer(config: Mixer | None, width: int, causal: bool) -> TCN | EMA | None:
    """The module for a mixer's configuration."""
    if isinstance(config, TCNConfig):
        return TCN(width, config, causal)
    return EMA(width, config, causal) if isinstance(config, EMAConfig) else None


class GatedBlock(nn.Module):
    """MEGA's gated attention (its section 3), on any mixer.

    `X' = drop(mixer(X̂))` gives by one projection the output gate `u`, the shared representation `ζ` of queries
    and keys, the reset gate `r` and the candidate `h`; the values come from `X̂` itself. Result: `X + u ⊙ (H - X)`.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        assert config.attention is not None
        attention, width = config.attention, config.d_model
        self.widths = (width, attention.d_key, attention.d_value, width)
        self.prenorm = config.prenorm
        self.function = activation(config.activation)
        self.norm = make_norm(config.norm, width)
        self.mixer = make_mixer(config.mixer, width, config.causal)
        self.values = Linear(width, attention.d_value)
        self.gates = Linear(width, sum(self.widths))
        self.output = Linear(attention.d_value, width)
        self.gamma = nn.Parameter(torch.empty(2, attention.d_key))
        self.beta = nn.Parameter(torch.empty(2, attention.d_key))
        self.attention = ChunkedAttention(attention, config.causal)
        self.dropout = Dropout(config.dropout, config.feature_dropout)
        self.value_dropout = Dropout(config.value_dropout, config.feature_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new transforms of queries and keys."""
        nn.init.normal_(self.gamma, std=WEIGHT_STD)
        nn.init.zeros_(self.beta)

    def forward(
        self, x: Tensor, lengths: Tensor | None, state: LayerState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, LayerState | None]:
        """`[batch, time, d_model]` to the same, and the new state or None."""
        normed = self.norm(x, lengths) if self.prenorm else x
        values = self.function(self.values(normed))
        mixed, mixer_state = _mix(self.mixer, normed, lengths, state, return_state, inplace)
        u, zeta, r, h = self.gates.parts(self.dropout(mixed), self.widths)
        u = torch.sigmoid(u)
        zeta, r = nn.functional.silu(zeta), nn.functional.silu(r)
        attended, attention_state = self.attention(
            zeta * self.gamma[0] + self.beta[0],
            zeta * self.gamma[1] + self.beta[1],
            self.value_dropout(values),
            lengths=lengths,
            state=None if state is None else state.attention,
            return_state=return_state,
            inplace=inplace,
        )
        h = self.dropout(self.function(h + self.output(attended * r)))
        x = x + u * (h - x)
        x = x if self.prenorm else self.norm(x, lengths)
        return x, LayerState(mixer_state, attention_state) if return_state else None


class ResidualBlock(nn.Module):
    """Mixer, then attention if there is any, each with a norm and a plain residual connection."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, attention = config.d_model, config.attention
        self.prenorm = config.prenorm
        self.mixer = make_mixer(config.mixer, width, config.causal)
        self.mixer_norm = make_norm(config.norm, width) if self.mixer is not None else None
        self.attention = ChunkedAttention(attention, config.causal) if attention is not None else None
        if attention is not None:
            self.widths = (attention.d_key, attention.d_key, attention.d_value)
            self.attention_norm = make_norm(config.norm, width)
            self.projection = Linear(width, sum(self.widths))
            self.output = Linear(attention.d_value, width)
            self.value_dropout = Dropout(config.value_dropout, config.feature_dropout)
        self.dropout = Dropout(config.dropout, config.feature_dropout)

    def forward(
        self, x: Tensor, lengths: Tensor | None, state: LayerState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, LayerState | None]:
        """`[batch, time, d_model]` to the same, and the new state or None."""
        mixer_state: MixerState | None = None
        attention_state: AttentionState | None = None
        if self.mixer_norm is not None:
            normed = self.mixer_norm(x, lengths) if self.prenorm else x
            mixed, mixer_state = _mix(self.mixer, normed, lengths, state, return_state, inplace)
            x = x + self.dropout(mixed)
            x = x if self.prenorm else self.mixer_norm(x, lengths)
        if self.attention is not None:
            normed = self.attention_norm(x, lengths) if self.prenorm else x
            q, k, v = self.projection.parts(normed, self.widths)
            attended, attention_state = self.attention(
                q,
                k,
                self.value_dropout(v),
                lengths=lengths,
                state=None if state is None else state.attention,
                return_state=return_state,
                inplace=inplace,
            )
            x = x + self.dropout(self.output(attended))
            x = x if self.prenorm else self.attention_norm(x, lengths)
        return x, LayerState(mixer_state, attention_state) if return_state else None


class Block(nn.Module):
    """One layer: mixing over time, then a feed-forward net."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.mixing: GatedBlock | ResidualBlock = GatedBlock(config) if config.gated else ResidualBlock(config)
        self.feed_forward = (
            FeedForward(
                config.d_model,
                config.d_ff,
                function=config.activation,
                norm=config.norm,
                prenorm=config.prenorm,
                dropout=config.dropout,
                hidden_dropout=config.ff_dropout,
                feature_dropout=config.feature_dropout,
            )
            if config.d_ff
            else None
        )

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        state: LayerState | None = None,
        return_state: bool = False,
        inplace: bool = False,
    ) -> tuple[Tensor, LayerState | None]:
        """`[batch, time, d_model]` to the same, and the new state or None.

        Args:
            lengths: `[batch]`, real tokens in each row; the rest is padding.
            state: what an earlier call returned; None is the start of the sequence. Causal only.
            return_state: also return the state after these tokens.
            inplace: the given state's memory may be reused; do not use that state again.
        """
        x, new = self.mixing(x, lengths, state, return_state, inplace)
        return x if self.feed_forward is None else self.feed_forward(x, lengths), new

    def initial_state(self, batch: int) -> LayerState:
        """The state before the first token."""
        mixer, attention = self.mixing.mixer, self.mixing.attention
        some = next(self.parameters())
        return LayerState(
            None if mixer is None else mixer.initial_state(batch),
            None if attention is None else attention.initial_state(batch, some.device, some.dtype),
        )

    def macs(self, length: int) -> int:
        """Multiplications and additions for one token of a sequence of `length`, counted in pairs."""
        linears = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        parts = (self.mixing.mixer, self.mixing.attention)
        return linears + sum(part.macs(length) for part in parts if part is not None)


def _mix(
    mixer: TCN | EMA | None,
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    return_state: bool,
    inplace: bool,
) -> tuple[Tensor, MixerState | None]:
    if mixer is None:
        return x, None
    before = None if state is None else state.mixer
    # The state's kind was checked against the model's when the call began.
    return mixer(x, lengths=lengths, state=before, return_state=return_state, inplace=inplace)
