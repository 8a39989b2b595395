"""One layer of a model: a mixer over time, attention inside chunks, a feed-forward net.

`GatedBlock` combines mixer and attention with gates, as in MEGA and TCNCA; `ResidualBlock` with residual connections,
as in TCNCA-simple, without attention as in TCN-MLP and EMA-MLP, and without a mixer as in the Transformer.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from tcnca.config import Config, Probability, Range, Width
from tcnca.errors import ConfigError
from tcnca.layers.attention import AttentionConfig, ChunkedAttention
from tcnca.layers.linear import WEIGHT_STD, Dropout, Linear, init_normal
from tcnca.layers.mixer import MixerConfig
from tcnca.layers.norm import NormKind, make_norm
from tcnca.layers.tcn import TCNConfig
from tcnca.ops import Activation, AttentionState, State, activation


@dataclasses.dataclass(frozen=True)
class LayerState(State):
    """The states of a layer's mixer and attention; None for a part that the layer does not have."""

    mixer: State | None
    attention: AttentionState | None


class LayerConfig(Config):
    """The structure of a layer."""

    d_model: Width = 128
    """Channels of the sequence between layers (the paper's d)."""
    d_ff: Annotated[int, Range(0, 2**24)] = 256
    """Hidden width of the feed-forward net; 0 for none."""
    mixer: MixerConfig | None = TCNConfig()
    """What mixes over time before the attention."""
    attention: AttentionConfig | None = AttentionConfig()
    """Attention inside chunks."""
    gated: bool = True
    """Whether mixer and attention are combined by MEGA's gates, or by residual connections."""
    causal: bool = True
    """Whether a token sees only the past. Only causal models stream."""
    activation: Activation = "silu"
    """Non-linearity of values, candidates and feed-forward networks."""
    norm: NormKind = "layer"
    """Normalization of every layer."""
    prenorm: bool = True
    """Whether to normalize the input of a part, or its sum with the residual."""
    dropout: Probability = 0.0
    """Dropout of embeddings, of mixers' outputs and of everything added to the residual."""
    value_dropout: Probability = 0.0
    """Dropout of the attention's values."""
    ff_dropout: Probability = 0.0
    """Dropout inside the feed-forward networks."""
    feature_dropout: bool = False
    """Whether dropout inside the layers drops whole channels of a sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gated and self.attention is None:
            raise ConfigError("gated: expected False without attention, got True; MEGA's gates need attention")
        if self.attention is not None:
            self.attention.check_causal(self.causal)


class GatedBlock(nn.Module):
    """MEGA's gated attention (its section 3), with any mixer.

    One projection of `X' = drop(mixer(X̂))` gives the output gate `u`, the shared representation `ζ` of queries
    and keys, the reset gate `r` and the candidate `h`; the values are computed from `X̂`. The result is
    `X + u ⊙ (H - X)`.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        assert config.attention is not None
        attention, width = config.attention, config.d_model
        self.prenorm = config.prenorm
        self.activation = activation(config.activation)
        self.norm = make_norm(config.norm, width)
        self.mixer = None if config.mixer is None else config.mixer.build(width, config.causal)
        self.values = Linear(width, attention.d_value)
        self.gates = Linear(width, (width, attention.d_key, attention.d_value, width))
        self.output = Linear(attention.d_value, width)
        self.gamma = nn.Parameter(torch.empty(2, attention.d_key))
        self.beta = nn.Parameter(torch.empty(2, attention.d_key))
        self.attention = ChunkedAttention(attention, config.causal)
        self.dropout = Dropout(config.dropout, config.feature_dropout)
        self.value_dropout = Dropout(config.value_dropout, config.feature_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the transforms of queries and keys."""
        init_normal(self.gamma, WEIGHT_STD)
        nn.init.zeros_(self.beta)

    def forward(
        self, x: Tensor, lengths: Tensor | None, state: LayerState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, LayerState | None]:
        """Map `[batch, time, d_model]` to the same shape, and return the new state or None."""
        options: dict[str, Any] = {"lengths": lengths, "return_state": return_state, "inplace": inplace}
        normed = self.norm(x, lengths) if self.prenorm else x
        values = self.activation(self.values(normed))
        mixed, mixer_state = _run(self.mixer, normed, state=state and state.mixer, **options)
        u, zeta, r, h = self.gates.split(self.dropout(mixed))
        u = torch.sigmoid(u)
        zeta, r = nn.functional.silu(zeta), nn.functional.silu(r)
        attended, attention_state = _run(
            self.attention,
            zeta * self.gamma[0] + self.beta[0],
            zeta * self.gamma[1] + self.beta[1],
            self.value_dropout(values),
            state=state and state.attention,
            **options,
        )
        h = self.dropout(self.activation(h + self.output(attended * r)))
        x = x + u * (h - x)
        x = x if self.prenorm else self.norm(x, lengths)
        return x, LayerState(mixer_state, attention_state) if return_state else None


class ResidualBlock(nn.Module):
    """Mixer, then attention if there is any, each with a norm and a residual connection."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        width, attention = config.d_model, config.attention
        self.prenorm = config.prenorm
        self.mixer = None if config.mixer is None else config.mixer.build(width, config.causal)
        self.mixer_norm = None if config.mixer is None else make_norm(config.norm, width)
        self.attention = ChunkedAttention(attention, config.causal) if attention is not None else None
        if attention is not None:
            self.attention_norm = make_norm(config.norm, width)
            self.projection = Linear(width, (attention.d_key, attention.d_key, attention.d_value))
            self.output = Linear(attention.d_value, width)
            self.value_dropout = Dropout(config.value_dropout, config.feature_dropout)
        self.dropout = Dropout(config.dropout, config.feature_dropout)

    def forward(
        self, x: Tensor, lengths: Tensor | None, state: LayerState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, LayerState | None]:
        """Map `[batch, time, d_model]` to the same shape, and return the new state or None."""
        options: dict[str, Any] = {"lengths": lengths, "return_state": return_state, "inplace": inplace}
        mixer_state: State | None = None
        attention_state: Any = None
        if self.mixer_norm is not None:
            normed = self.mixer_norm(x, lengths) if self.prenorm else x
            mixed, mixer_state = _run(self.mixer, normed, state=state and state.mixer, **options)
            x = x + self.dropout(mixed)
            x = x if self.prenorm else self.mixer_norm(x, lengths)
        if self.attention is not None:
            normed = self.attention_norm(x, lengths) if self.prenorm else x
            q, k, v = self.projection.split(normed)
            attended, attention_state = _run(
                self.attention, q, k, self.value_dropout(v), state=state and state.attention, **options
            )
            x = x + self.dropout(self.output(attended))
            x = x if self.prenorm else self.attention_norm(x, lengths)
        return x, LayerState(mixer_state, attention_state) if return_state else None


def _run(part: nn.Module | None, *inputs: Tensor, return_state: bool, **options: Any) -> tuple[Tensor, Any]:
    """Call a mixer or attention; the output and its new state or None. Without a part the input is the output."""
    if part is None:
        return inputs[0], None
    result = part(*inputs, return_state=return_state, **options)
    return result if return_state else (result, None)


class FeedForward(nn.Module):
    """`x + drop(W₂ drop_h(act(W₁ norm(x))))`; post-norm: `norm(x + drop(W₂ drop_h(act(W₁ x))))`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.prenorm = config.prenorm
        self.activation = activation(config.activation)
        self.norm = make_norm(config.norm, config.d_model)
        self.up = Linear(config.d_model, config.d_ff)
        self.down = Linear(config.d_ff, config.d_model)
        self.hidden_dropout = Dropout(config.ff_dropout, config.feature_dropout)
        self.dropout = Dropout(config.dropout, config.feature_dropout)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Map `[batch, time, d_model]` to the same shape; `lengths` (`[batch]`) are the valid tokens of each row."""
        h = self.norm(x, lengths) if self.prenorm else x
        h = self.hidden_dropout(self.activation(self.up(h)))
        x = x + self.dropout(self.down(h))
        return x if self.prenorm else self.norm(x, lengths)


class Layer(nn.Module):
    """One layer: a block that mixes over time, then a feed-forward net."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.block: GatedBlock | ResidualBlock = GatedBlock(config) if config.gated else ResidualBlock(config)
        self.feed_forward = FeedForward(config) if config.d_ff else None

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        state: LayerState | None = None,
        return_state: bool = False,
        inplace: bool = False,
    ) -> tuple[Tensor, LayerState | None]:
        """Map `[batch, time, d_model]` to the same shape, and return the new state or None.

        The arguments are those of `Mixer.forward`.
        """
        x, new = self.block(x, lengths, state, return_state, inplace)
        return x if self.feed_forward is None else self.feed_forward(x, lengths), new

    def initial_state(self, batch: int) -> LayerState:
        """Return the state before the first token."""
        mixer, attention = self.block.mixer, self.block.attention
        attention_state = None
        if attention is not None:
            some = next(self.parameters())
            attention_state = attention.initial_state(batch, some.device, some.dtype)
        return LayerState(None if mixer is None else mixer.initial_state(batch), attention_state)

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token of a sequence of `length`, on average."""
        linears = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        parts = (self.block.mixer, self.block.attention)
        return linears + sum(part.macs(length) for part in parts if part is not None)
