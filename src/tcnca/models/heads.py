"""The heads of a model: features to logits or values."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tcnca.config import Config, LayerCount, Probability, Width
from tcnca.errors import ConfigError
from tcnca.layers import Dropout
from tcnca.layers.linear import init_normal
from tcnca.models.inputs import InputConfig, TokenInputConfig
from tcnca.models.packing import Packing
from tcnca.models.preprocessing import Preprocessing, Standardization
from tcnca.ops import Activation, State, activation, advance, current_context, take_time, zero_padding
from tcnca.ops.checks import has_float64

Pooling = Literal["mean", "last", "first", "none"]
Combination = Literal["concat", "features"]


class HeadConfig(Config, abc.ABC):
    """Base of the heads' configurations."""

    documents: ClassVar[int] = 1
    """Number of sequences that the model reads for one output."""
    generates: ClassVar[bool] = False
    """Whether the outputs are logits of the next token."""

    def check_model(self, input: InputConfig, causal: bool) -> None:
        """Raise a ConfigError if a model with this input and direction cannot have this head."""

    @abc.abstractmethod
    def build(self, d_model: int, input: InputConfig, preprocessing: Preprocessing) -> Head:
        """Return a new module."""


class LanguageModelHeadConfig(HeadConfig, kind="language-model"):
    """Logits of the next token at every time, `[batch, time, vocab_size]`."""

    generates: ClassVar[bool] = True

    tie_embeddings: bool = True
    """Whether the output matrix is the embedding."""

    def check_model(self, input: InputConfig, causal: bool) -> None:
        """Raise a ConfigError unless the model is causal and reads tokens."""
        if not isinstance(input, TokenInputConfig):
            raise ConfigError(
                f"head: expected a TokenInputConfig as input of a language model, got a {type(input).__name__}"
            )
        if not causal:
            raise ConfigError(
                "causal: expected True for a language model, got False; a bidirectional model sees its targets"
            )

    def build(self, d_model: int, input: InputConfig, preprocessing: Preprocessing) -> LanguageModelHead:
        """Return a new `LanguageModelHead`."""
        assert isinstance(input, TokenInputConfig)
        return LanguageModelHead(self, input.vocab_size, d_model)


class PooledHeadConfig(HeadConfig):
    """Base of the heads that pool the features of a sequence."""

    pooling: Pooling = "mean"
    """What represents a sequence: the mean of its features, the last or the first; `none` keeps every time."""
    hidden: Width | None = None
    """Width of a hidden layer; None for no hidden layer."""
    hidden_layers: LayerCount = 1
    """Number of hidden layers of that width."""
    activation: Activation = "gelu"
    """Non-linearity of the hidden layers."""
    dropout: Probability = 0.0
    """Dropout before the non-linearity of the hidden layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is None and self.hidden_layers != 1:
            raise ConfigError(f"hidden_layers: expected head.hidden, their width, as well, got {self.hidden_layers}")


class ClassifierHeadConfig(PooledHeadConfig, kind="classifier"):
    """Logits of the classes, `[batch, num_classes]` (with pooling `none`, `[batch, time, num_classes]`)."""

    num_classes: Width = 2
    """Number of classes."""

    def build(self, d_model: int, input: InputConfig, preprocessing: Preprocessing) -> PooledHead:
        """Return a new `PooledHead`."""
        _check_classes(preprocessing, self.num_classes)
        return PooledHead(self, d_model, self.num_classes)


class RegressionHeadConfig(PooledHeadConfig, kind="regression"):
    """Predicted values, `[batch, outputs]` (with pooling `none`, `[batch, time, outputs]`)."""

    outputs: Width = 1
    """Number of values."""

    def build(self, d_model: int, input: InputConfig, preprocessing: Preprocessing) -> RegressionHead:
        """Return a new `RegressionHead`."""
        return RegressionHead(self, d_model, preprocessing)


class PairHeadConfig(PooledHeadConfig, kind="pair"):
    """Logits of the classes of two documents, `[batch, num_classes]`."""

    documents: ClassVar[int] = 2

    num_classes: Width = 2
    """Number of classes."""
    combination: Combination = "concat"
    """`concat`: [second; first], as in MEGA. `features`: [u; v; u·v; u−v] for first u and second v."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling == "none":
            raise ConfigError("pooling: expected mean, last or first for pairs of documents, got 'none'")

    def build(self, d_model: int, input: InputConfig, preprocessing: Preprocessing) -> PairHead:
        """Return a new `PairHead`."""
        _check_classes(preprocessing, self.num_classes)
        return PairHead(self, d_model)


def _check_classes(preprocessing: Preprocessing, num_classes: int) -> None:
    names = preprocessing.class_names
    if names is not None and len(names) > num_classes:
        raise ConfigError(
            f"head.num_classes: expected at least {len(names)}, the classes of the data, got {num_classes}"
        )


@dataclasses.dataclass(frozen=True)
class PoolState(State):
    """The state of pooling.

    Attributes:
        summary: `[batch, d_model]`: the sum of the features so far, the last or the first of them; in float64, if the
            device has it, since a sum in float32 stops growing after some ten million values.
        position: `[batch]`, tokens seen so far.
    """

    _sums: ClassVar[frozenset[str]] = frozenset({"summary"})
    _replaced: ClassVar[bool] = True

    summary: Tensor
    position: Tensor


class Head(nn.Module, abc.ABC):
    """Base of the heads. `pool` runs on the features of each document, `forward` on the result."""

    signature: str = "no pooling"
    """What two heads must share for one to continue from a state of the other."""

    def initial_state(self, batch: int, like: Tensor) -> PoolState | None:
        """Return the state before the first token, for features with the dtype of `like`; None if there is none."""
        return None

    def pool(
        self, features: Tensor, lengths: Tensor | None, state: PoolState | None, return_state: bool
    ) -> tuple[Tensor, PoolState | None]:
        """Summarize features `[batch, time, d_model]` over time, continuing from `state`."""
        return features, None

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Join the pooled features of two documents."""
        raise NotImplementedError

    @abc.abstractmethod
    def forward(self, pooled: Tensor, packing: Packing, time: int, embedding: Tensor) -> Tensor:
        """Return the outputs.

        Args:
            pooled: what `pool` or `combine` returned.
            packing: how the rows were arranged; heads with an output at every time restore the `time` tokens.
            embedding: weight of the input, `[vocab_size, d_model]`, for tied matrices.
        """

    @abc.abstractmethod
    def macs(self, embedding: Tensor) -> int:
        """Return the multiply-accumulate operations for one token."""


class LanguageModelHead(Head):
    """Logits of the next token, with a separate matrix or the embedding's."""

    def __init__(self, config: LanguageModelHeadConfig, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = None if config.tie_embeddings else nn.Parameter(torch.empty(vocab_size, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the matrix, N(0, 1 / d_model), unless it is the embedding's."""
        if self.weight is not None:
            init_normal(self.weight, self.weight.shape[1] ** -0.5)

    def forward(self, pooled: Tensor, packing: Packing, time: int, embedding: Tensor) -> Tensor:
        """Return logits `[batch, time, vocab_size]`."""
        weight = embedding if self.weight is None else self.weight
        return nn.functional.linear(packing.restore(pooled, time), weight)

    def macs(self, embedding: Tensor) -> int:
        """Return the multiply-accumulate operations for one token."""
        return embedding.numel()


class HeadLinear(nn.Linear):
    """A linear map with Xavier-uniform weights times `scale`, and biases 0."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, scale: float = 1.0) -> None:
        self.scale = scale
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        if not self.weight.is_meta:
            nn.init.xavier_uniform_(self.weight, gain=self.scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


OUTPUT_SCALE = 0.1
"""Scale of the initial weights of the last layer: the first outputs are near 0, and the first loss near ln(classes)."""


class PooledHead(Head):
    """Features, pooled over time or not, through hidden layers to `outputs` classes or values."""

    def __init__(
        self, config: PooledHeadConfig, d_model: int, outputs: int, inputs: int | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.signature = f"pooling {config.pooling}"
        self.activation = activation(config.activation)
        self.dropout = Dropout(config.dropout)
        widths = [d_model if inputs is None else inputs]
        widths += [] if config.hidden is None else [config.hidden] * config.hidden_layers
        self.hidden = nn.ModuleList(HeadLinear(a, b) for a, b in itertools.pairwise(widths))
        self.output = HeadLinear(widths[-1], outputs, bias, OUTPUT_SCALE)

    def pool(
        self, features: Tensor, lengths: Tensor | None, state: PoolState | None, return_state: bool
    ) -> tuple[Tensor, PoolState | None]:
        """Summarize features `[batch, time, d_model]` as `[batch, d_model]`, continuing from `state`."""
        if self.pooling == "none":
            return features, None
        state = self.initial_state(features.shape[0], features) if state is None else state
        assert state is not None
        summary = self._summarize(features, lengths, state)
        time, context = features.shape[1], current_context()
        if context is not None:
            time, lengths = time * context.size, None if lengths is None else context.whole_lengths(lengths)
        position = advance(state.position, time, lengths)
        pooled = summary
        if self.pooling == "mean":
            pooled = summary / position.clamp(min=1).unsqueeze(1)
        return pooled.to(features.dtype), PoolState(summary, position) if return_state else None

    def _summarize(self, features: Tensor, lengths: Tensor | None, state: PoolState) -> Tensor:
        context = current_context()
        if self.pooling == "mean":
            # The sum of a call is short; that of the stream is in float64.
            precise = torch.promote_types(features.dtype, torch.float32)
            total = zero_padding(features, lengths).sum(1, dtype=precise)
            return state.summary + (total if context is None else context.sum(total))
        index = torch.zeros_like(state.position)
        if self.pooling == "last":
            index = index + (features.shape[1] if lengths is None else lengths) - 1
        picked = take_time(features, index.clamp(min=0).unsqueeze(1)).squeeze(1).to(state.summary.dtype)
        if context is not None:
            last = context.last_rank(lengths, features, features.shape[1])
            picked = context.pick(picked, last if self.pooling == "last" else torch.zeros_like(last))
            lengths = None if lengths is None else context.whole_lengths(lengths)
        fresh = torch.ones_like(state.position, dtype=torch.bool) if lengths is None else lengths > 0
        fresh = fresh & (state.position == 0) if self.pooling == "first" else fresh
        return torch.where(fresh.unsqueeze(1), picked, state.summary)

    def initial_state(self, batch: int, like: Tensor) -> PoolState | None:
        """Return the state before the first token, for features with the dtype of `like`; None without pooling."""
        if self.pooling == "none":
            return None
        precise = torch.float64 if has_float64(like.device) else torch.float32
        summary = torch.zeros(batch, like.shape[-1], device=like.device, dtype=precise)
        return PoolState(summary, torch.zeros(batch, dtype=torch.long, device=like.device))

    def forward(self, pooled: Tensor, packing: Packing, time: int, embedding: Tensor) -> Tensor:
        """Return logits or values `[batch, outputs]`; with pooling `none` `[batch, time, outputs]`."""
        outputs = self.project(pooled)
        if self.pooling == "none":
            outputs = packing.restore(zero_padding(outputs, packing.lengths), time)
        return outputs

    def project(self, pooled: Tensor) -> Tensor:
        """Map pooled features to logits or values."""
        for layer in self.hidden:
            pooled = self.activation(self.dropout(layer(pooled)))
        return self.output(pooled)

    def macs(self, embedding: Tensor) -> int:
        """Return the multiply-accumulate operations for one token; pooled heads run once for each sequence."""
        if self.pooling != "none":
            return 0
        return sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))


class RegressionHead(PooledHead):
    """Values in the units of the data, if the statistics of the targets are known; otherwise standardized ones."""

    def __init__(self, config: RegressionHeadConfig, d_model: int, preprocessing: Preprocessing) -> None:
        super().__init__(config, d_model, config.outputs, bias=True)
        self.standardize = Standardization.of(preprocessing, "target", config.outputs)

    def project(self, pooled: Tensor) -> Tensor:
        """Map pooled features to values."""
        values = super().project(pooled)
        return values if self.standardize is None else self.standardize.inverse(values)


class PairHead(PooledHead):
    """Logits of the classes of two documents."""

    def __init__(self, config: PairHeadConfig, d_model: int) -> None:
        super().__init__(config, d_model, config.num_classes, d_model * (2 if config.combination == "concat" else 4))
        self.combination = config.combination

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Join two documents, `[batch, d_model]` each, to `[batch, 2 · d_model]` or `[batch, 4 · d_model]`."""
        if self.combination == "concat":
            return torch.cat([second, first], -1)
        return torch.cat([first, second, first * second, first - second], -1)
