"""The exit of a model: features to logits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tcnca.config import Config, PositiveInt, Probability
from tcnca.errors import ConfigError
from tcnca.layers import Dropout
from tcnca.ops import Activation, State, activation, advance, take_time, zero_padding

Pooling = Literal["mean", "last", "first", "none"]
Combination = Literal["concat", "features"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelHeadConfig(Config, kind="language-model"):
    """Logits of the next token at every time, `[batch, time, vocab_size]`."""

    tie_embeddings: bool = True
    """Whether the output matrix is the embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PooledHead(Config):
    pooling: Pooling = "mean"
    """What represents a sequence: the mean of its features, the last or the first; `none` keeps every time."""
    hidden: PositiveInt | None = None
    """Width of a hidden layer; None for no hidden layer."""
    hidden_layers: PositiveInt = 1
    """Number of hidden layers of that width."""
    activation: Activation = "gelu"
    """Non-linearity of the hidden layers."""
    dropout: Probability = 0.0
    """Dropout before the non-linearity of the hidden layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is None and self.hidden_layers != 1:
            raise ConfigError(f"hidden_layers: expected head.hidden, their width, as well, got {self.hidden_layers}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierHeadConfig(_PooledHead, kind="classifier"):
    """Logits of the classes, `[batch, num_classes]` (with pooling `none`, `[batch, time, num_classes]`)."""

    num_classes: PositiveInt = 2
    """Number of classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionHeadConfig(_PooledHead, kind="regression"):
    """Predicted values, `[batch, outputs]` (with pooling `none`, `[batch, time, outputs]`)."""

    outputs: PositiveInt = 1
    """Number of values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairHeadConfig(_PooledHead, kind="pair"):
    """Logits of the classes of two documents, `[batch, num_classes]`."""

    num_classes: PositiveInt = 2
    """Number of classes."""
    combination: Combination = "concat"
    """`concat`: [second; first], as MEGA has it. `features`: [u; v; u·v; u−v] for first u and second v."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling == "none":
            raise ConfigError("pooling: expected mean, last or first for a pair, got 'none'")


Head = LanguageModelHeadConfig | ClassifierHeadConfig | RegressionHeadConfig | PairHeadConfig


@dataclasses.dataclass(frozen=True)
class PoolState(State):
    """What pooling remembers of a stream.

    summary: `[batch, width]`: the sum of the features so far, the last or the first of them.
    position: `[batch]`, tokens seen so far.
    """

    _sums: ClassVar[frozenset[str]] = frozenset({"summary"})

    summary: Tensor
    position: Tensor


class VocabularyHead(nn.Module):
    """`[batch, time, d_model]` to `[batch, time, vocab_size]`, with a matrix of its own or the embedding's."""

    def __init__(self, config: LanguageModelHeadConfig, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = None if config.tie_embeddings else nn.Parameter(torch.empty(vocab_size, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a new matrix, N(0, 1 / width), if it is the head's own."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, features: Tensor, embedding: Tensor) -> Tensor:
        """`[…, width]` to the logits of the next token, `[…, vocabulary]`; `embedding` is `[vocabulary, width]`."""
        return nn.functional.linear(features, embedding if self.weight is None else self.weight)


class HeadLinear(nn.Linear):
    """A linear map with Xavier's uniform weights and biases 0 at the start."""

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class PooledHead(nn.Module):
    """Features, pooled over time or not, through hidden layers to classes or values."""

    def __init__(self, config: ClassifierHeadConfig | RegressionHeadConfig | PairHeadConfig, width: int) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.combination = config.combination if isinstance(config, PairHeadConfig) else None
        inputs = width * {None: 1, "concat": 2, "features": 4}[self.combination]
        self.function = activation(config.activation)
        self.dropout = Dropout(config.dropout)
        self.hidden = nn.ModuleList()
        for _ in range(config.hidden_layers if config.hidden is not None else 0):
            assert config.hidden is not None
            self.hidden.append(HeadLinear(inputs, config.hidden))
            inputs = config.hidden
        regression = isinstance(config, RegressionHeadConfig)
        outputs = config.outputs if isinstance(config, RegressionHeadConfig) else config.num_classes
        self.output = HeadLinear(inputs, outputs, bias=regression)

    def pool(
        self, features: Tensor, lengths: Tensor | None, state: PoolState | None, return_state: bool
    ) -> tuple[Tensor, PoolState | None]:
        """`[batch, time, d_model]` to one vector a sequence, `[batch, width]`, going on from `state`."""
        if self.pooling == "none":
            return features, None
        if state is None:
            state = self.initial_state(features.shape[0], features)
        summary = self._summarize(features, lengths, state)
        position = advance(state.position, features.shape[1], lengths)
        pooled = summary
        if self.pooling == "mean":
            pooled = summary / position.clamp(min=1).unsqueeze(1)
        return pooled.to(features.dtype), PoolState(summary, position) if return_state else None

    def _summarize(self, features: Tensor, lengths: Tensor | None, state: PoolState) -> Tensor:
        if self.pooling == "mean":
            return state.summary + zero_padding(features, lengths).sum(1, dtype=state.summary.dtype)
        if self.pooling == "last":
            end = features.shape[1] if lengths is None else lengths
            place = torch.zeros_like(state.position) + end - 1
        else:
            place = torch.zeros_like(state.position)
        picked = take_time(features, place.clamp(min=0).unsqueeze(1)).squeeze(1).to(state.summary.dtype)
        fresh = torch.ones_like(state.position, dtype=torch.bool) if lengths is None else lengths > 0
        fresh = fresh & (state.position == 0) if self.pooling == "first" else fresh
        return torch.where(fresh.unsqueeze(1), picked, state.summary)

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """The vectors of two documents, `[batch, width]` each, as one: `[batch, 2 · width]` or `[batch, 4 · width]`."""
        if self.combination == "concat":
            return torch.cat([second, first], -1)
        return torch.cat([first, second, first * second, first - second], -1)

    def forward(self, pooled: Tensor) -> Tensor:
        """`[…, inputs]` to the logits or values `[…, outputs]`; inputs are width, or what `combine` gives."""
        for layer in self.hidden:
            pooled = self.function(self.dropout(layer(pooled)))
        return self.output(pooled)

    def initial_state(self, batch: int, like: Tensor) -> PoolState:
        """The state before the first token, for features such as `like`."""
        precise = torch.promote_types(like.dtype, torch.float32)
        summary = torch.zeros(batch, like.shape[-1], device=like.device, dtype=precise)
        return PoolState(summary, torch.zeros(batch, dtype=torch.long, device=like.device))
