"""The inputs of a model: tokens or real values to channels."""

from __future__ import annotations

import abc
import math
from typing import Annotated

import torch
from torch import Tensor, nn

from tcnca.config import Config, NonNegativeInt, Probability, Range, Width
from tcnca.errors import ConfigError, InputError, VocabularyError
from tcnca.layers import ParamOptions, check_features, make_norm
from tcnca.layers.linear import init_normal
from tcnca.models.preprocessing import Preprocessing, Standardization
from tcnca.ops import (
    NGramState,
    check_tensor,
    check_values,
    dropout,
    hash_ngrams,
    initial_ngram_state,
    next_ngram_state,
)

_BUCKETS = 2**14
_NGRAM_DROPOUT = 0.5


class InputConfig(Config, abc.ABC):
    """Base of the inputs' configurations."""

    norm: bool = False
    """Whether embeddings are normalized."""

    @abc.abstractmethod
    def build(self, d_model: int, norm: str, preprocessing: Preprocessing) -> Embedding:
        """Return a new module; `norm` is the model's kind of normalization."""


class TokenInputConfig(InputConfig, kind="tokens"):
    """Tokens `[batch, time]`, whole numbers below `vocab_size`."""

    vocab_size: Width = 256
    """Number of tokens."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by √d_model."""
    pad_token_id: NonNegativeInt | None = None
    """Token that means padding: it is masked where neither lengths nor a mask are given."""
    ngram_sizes: tuple[Annotated[int, Range(2, 32)], ...] = ()
    """Numbers of tokens of n-grams that have embeddings, such as `[2, 3, 4]`: at each token, those of the n-grams that
    end there are added to its own. See docs/fast-training.md."""
    ngram_buckets: Width = _BUCKETS
    """Rows of the table of embeddings of each size. A hash assigns n-grams to them; some share a row."""
    ngram_dropout: Probability = _NGRAM_DROPOUT
    """Probability with which the embedding of an n-gram is left out in training. Without it, models memorize texts that
    they read more than once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.ngram_sizes) != sorted(set(self.ngram_sizes)):
            raise ConfigError(f"ngram_sizes: expected increasing numbers, got {list(self.ngram_sizes)}")
        for name, default in (("ngram_buckets", _BUCKETS), ("ngram_dropout", _NGRAM_DROPOUT)):
            if getattr(self, name) != default and not self.ngram_sizes:
                raise ConfigError(f"{name}: expected ngram_sizes, such as [2, 3, 4], got none")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(f"pad_token_id: expected a token below {self.vocab_size}, got {self.pad_token_id}")

    def build(self, d_model: int, norm: str, preprocessing: Preprocessing) -> TokenEmbedding:
        """Return a new `TokenEmbedding`."""
        for name in ("byte_map", "symbols"):
            known = getattr(preprocessing, name)
            if known is not None and len(known) > self.vocab_size:
                raise ConfigError(
                    f"preprocessing.{name}: expected at most vocab_size {self.vocab_size} entries, got "
                    f"{len(known)}; set vocab_size={len(known)}"
                )
        return TokenEmbedding(self, d_model, norm)


class ValueInputConfig(InputConfig, kind="values"):
    """Real-valued sequences `[batch, time, features]`, or `[batch, time]` if there is one feature."""

    features: Width = 1
    """Values at each time."""

    def build(self, d_model: int, norm: str, preprocessing: Preprocessing) -> ValueEmbedding:
        """Return a new `ValueEmbedding`."""
        return ValueEmbedding(self, d_model, norm, preprocessing)


class Embedding(nn.Module, abc.ABC):
    """Base of the inputs: maps tokens or values to `[batch, time, d_model]`."""

    weight: nn.Parameter
    pad_token_id: int | None = None
    past: int = 0
    """Earlier tokens that the embedding of one depends on."""
    signature: str = ""
    """What two models must share for one to continue from a state of the other; empty if the input has no state."""

    @abc.abstractmethod
    def forward(self, x: Tensor, lengths: Tensor | None, state: NGramState | None = None) -> Tensor:
        """Map `x` to `[batch, time, d_model]`."""

    def initial_state(self, batch: int) -> NGramState | None:
        """Return the state before the first token; None if the input has none."""
        return None

    def next_state(self, x: Tensor, lengths: Tensor | None, state: NGramState | None) -> NGramState | None:
        """Return the state after `x`; None if the input has none."""
        return None

    @abc.abstractmethod
    def check_shape(self, name: str, x: Tensor) -> None:
        """Raise an InputError unless shape and dtype of `x` fit."""

    def check_values(self, name: str, x: Tensor) -> None:
        """Raise an InputError unless all values of `x` fit; padding has been set to zero."""


class TokenEmbedding(Embedding):
    """Tokens `[batch, time]` to `[batch, time, d_model]`."""

    def __init__(self, config: TokenInputConfig, d_model: int, norm: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, d_model))
        self.scale = math.sqrt(d_model) if config.scale_embeddings else 1.0
        self.norm = make_norm(norm, d_model) if config.norm else None
        self.pad_token_id = config.pad_token_id
        self.ngram_sizes, self.ngram_buckets = config.ngram_sizes, config.ngram_buckets
        self.ngram_dropout = config.ngram_dropout
        self.ngram_weight: nn.Parameter | None = None
        if self.ngram_sizes:
            self.ngram_weight = nn.Parameter(torch.empty(len(self.ngram_sizes) * self.ngram_buckets, d_model))
            self.past = max(self.ngram_sizes) - 1
            self.signature = f"n-grams of {', '.join(map(str, self.ngram_sizes))} tokens"
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the embeddings, N(0, 1 / d_model); those of the padding and of n-grams are 0."""
        init_normal(self.weight, self.weight.shape[1] ** -0.5)
        if self.ngram_weight is not None:
            nn.init.zeros_(self.ngram_weight)
        if self.pad_token_id is not None:
            nn.init.zeros_(self.weight[self.pad_token_id])

    def check_shape(self, name: str, x: Tensor) -> None:
        """Raise an InputError unless `x` is a tensor of tokens, `[batch, time]`."""
        check_tensor(name, x)
        if x.dim() != 2 or x.shape[1] < 1:
            raise InputError(f"{name}: expected shape [batch, time] with at least 1 token, got {list(x.shape)}")
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise InputError(f"{name}: expected tokens, a tensor of whole numbers, got {x.dtype}")

    def check_values(self, name: str, x: Tensor) -> None:
        """Raise a VocabularyError unless all tokens of `x` are in the vocabulary."""
        vocab_size = self.weight.shape[0]
        check_values(
            (x >= 0) & (x < vocab_size),
            f"{name}: expected tokens of the vocabulary, 0 to {vocab_size - 1}",
            x,
            VocabularyError,
        )

    def param_options(self) -> dict[str, ParamOptions]:
        """Put the embeddings of n-grams into their own group, whose factor is in the recipe."""
        return {"ngram_weight": ParamOptions("ngrams")}

    def initial_state(self, batch: int) -> NGramState | None:
        """Return the state before the first token; None without n-grams."""
        return initial_ngram_state(batch, self.ngram_sizes, self.weight.device) if self.ngram_sizes else None

    def next_state(self, x: Tensor, lengths: Tensor | None, state: NGramState | None) -> NGramState | None:
        """Return the last tokens; None without n-grams."""
        return next_ngram_state(x, self.ngram_sizes, lengths, state) if self.ngram_sizes else None

    def forward(self, x: Tensor, lengths: Tensor | None, state: NGramState | None = None) -> Tensor:
        """Map tokens `[batch, time]` (int64) to `[batch, time, d_model]`."""
        embedded = nn.functional.embedding(x, self.weight)
        if self.ngram_weight is not None:
            rows = hash_ngrams(x, self.ngram_sizes, self.ngram_buckets, state)
            ngrams = nn.functional.embedding(rows, self.ngram_weight)
            if self.training and self.ngram_dropout:
                ngrams = ngrams * dropout(ngrams.new_ones(rows.shape), self.ngram_dropout).unsqueeze(-1)
            embedded = embedded + ngrams.sum(-2)
        embedded = embedded * self.scale
        return embedded if self.norm is None else self.norm(embedded, lengths)


class ValueEmbedding(Embedding):
    """Real values `[batch, time, features]` to `[batch, time, d_model]`: a vector for each feature, plus a bias.

    With statistics of the data, values are standardized first, so that the model takes raw values.
    """

    def __init__(self, config: ValueInputConfig, d_model: int, norm: str, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.features, d_model))
        self.bias = nn.Parameter(torch.empty(d_model))
        self.norm = make_norm(norm, d_model) if config.norm else None
        self.standardize = Standardization.of(preprocessing, "input", config.features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the vectors, N(0, 1 / features), and biases, N(0, 0.1)."""
        init_normal(self.weight, self.weight.shape[0] ** -0.5)
        init_normal(self.bias, 0.1)

    def check_shape(self, name: str, x: Tensor) -> None:
        """Raise an InputError unless `x` is a tensor of real values in the dtype of the model."""
        check_tensor(name, x)
        features = self.weight.shape[0]
        # Raw values may be large compared with how they vary: a model in half precision takes them in float32.
        half = self.weight.dtype in (torch.float16, torch.bfloat16)
        raw = half and self.standardize is not None and x.dtype == torch.float32
        wide = x.unsqueeze(-1) if x.dim() == 2 and features == 1 else x
        check_features(name, wide, features, None if raw else self.weight)

    def forward(self, x: Tensor, lengths: Tensor | None, state: NGramState | None = None) -> Tensor:
        """Map `[batch, time]` or `[batch, time, features]` to `[batch, time, d_model]`."""
        x = x if x.dim() == 3 else x.unsqueeze(-1)
        x = x if self.standardize is None else self.standardize(x)
        embedded = x.to(self.weight.dtype) @ self.weight + self.bias
        return embedded if self.norm is None else self.norm(embedded, lengths)
