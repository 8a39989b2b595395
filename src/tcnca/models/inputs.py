"""The entrance of a model: tokens or real numbers to channels."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from tcnca.config import Config, NonNegativeInt, PositiveInt
from tcnca.errors import ConfigError, InputError, VocabularyError
from tcnca.layers import make_norm
from tcnca.ops import check_tensor, check_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenInputConfig(Config, kind="tokens"):
    """Tokens `[batch, time]`, whole numbers below `vocab_size`."""

    vocab_size: PositiveInt = 256
    """Number of symbols."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by √d_model."""
    norm: bool = False
    """Whether embeddings are normalized."""
    pad_token_id: NonNegativeInt | None = None
    """A symbol that means padding: where neither lengths nor a mask are given, such tokens are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(f"pad_token_id: expected a token below {self.vocab_size}, got {self.pad_token_id}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueInputConfig(Config, kind="values"):
    """Real-valued sequences `[batch, time, features]`, or `[batch, time]` if there is one feature."""

    features: PositiveInt = 1
    """Numbers at each time."""
    norm: bool = False
    """Whether embeddings are normalized."""


class TokenEmbedding(nn.Module):
    """`[batch, time]` of tokens (int64) to `[batch, time, d_model]`."""

    def __init__(self, config: TokenInputConfig, width: int, norm: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, width))
        self.scale = math.sqrt(width) if config.scale_embeddings else 1.0
        self.norm = make_norm(norm, width) if config.norm else None
        self.pad_token_id = config.pad_token_id
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new embeddings, N(0, 1 / width); that of the padding is 0."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.pad_token_id is not None:
            nn.init.zeros_(self.weight[self.pad_token_id])

    def check_shape(self, name: str, x: Tensor) -> None:
        """Raise an error unless `x` is of a shape and type that can be embedded."""
        check_tensor(name, x)
        if x.dim() != 2 or x.shape[1] < 1:
            raise InputError(f"{name}: got shape {list(x.shape)}, allowed is [batch, time] with 1 or more tokens")
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise InputError(f"{name}: got {x.dtype}, allowed are whole numbers: this model reads tokens")

    def check_tokens(self, name: str, x: Tensor) -> None:
        """Raise an error unless all tokens of `x` are in the vocabulary."""
        vocabulary = self.weight.shape[0]
        check_values(
            (x >= 0) & (x < vocabulary),
            f"{name}: got a token outside the vocabulary, allowed are 0 to {vocabulary - 1}",
            x,
            VocabularyError,
        )

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """`[batch, time]` of tokens (int64) to `[batch, time, d_model]`; `lengths` (`[batch]`) says what is padding."""
        embedded = nn.functional.embedding(x, self.weight) * self.scale
        return embedded if self.norm is None else self.norm(embedded, lengths)


class ValueEmbedding(nn.Module):
    """`[batch, time, features]` of real numbers to `[batch, time, d_model]`: a learned vector a feature, plus a bias."""

    def __init__(self, config: ValueInputConfig, width: int, norm: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.features, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.norm = make_norm(norm, width) if config.norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors, N(0, 1 / features), and biases, N(0, 0.1)."""
        nn.init.normal_(self.weight, std=self.weight.shape[0] ** -0.5)
        nn.init.normal_(self.bias, std=0.1)

    def check_shape(self, name: str, x: Tensor) -> None:
        """Raise an error unless `x` is of a shape and type that can be embedded."""
        check_tensor(name, x)
        features = self.weight.shape[0]
        fits = x.dim() == 3 and x.shape[2] == features
        if not (fits or (x.dim() == 2 and features == 1)) or x.shape[1] < 1:
            allowed = "[batch, time] or [batch, time, 1]" if features == 1 else f"[batch, time, {features}]"
            raise InputError(f"{name}: got shape {list(x.shape)}, allowed is {allowed} with 1 or more times")
        if not x.is_floating_point():
            raise InputError(f"{name}: got {x.dtype}, allowed are floating-point numbers: this model reads real values")

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """`[batch, time]` or `[batch, time, features]` to `[batch, time, d_model]`; `lengths` says what is padding."""
        x = x if x.dim() == 3 else x.unsqueeze(-1)
        embedded = x.to(self.weight.dtype) @ self.weight + self.bias
        return embedded if self.norm is None else self.norm(embedded, lengths)


Input = TokenInputConfig | ValueInputConfig
