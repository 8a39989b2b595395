"""Linear maps, dropout and the feed-forward net of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.layers.norm import make_norm
from tcnca.ops import activation, dropout

WEIGHT_STD = 0.02


class Linear(nn.Linear):
    """A linear map with weights initialized N(0, 0.02) and biases 0, as in MEGA."""

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        nn.init.normal_(self.weight, std=WEIGHT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def split(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """Return the result split into parts of these widths."""
        if not torch.is_grad_enabled():
            return self(x).split(widths, -1)
        # The backward of one product would first concatenate the gradients of its parts, which takes longer than
        # several smaller products.
        biases: Sequence[Tensor | None] = [None] * len(widths) if self.bias is None else self.bias.split(widths)
        return [F.linear(x, weight, bias) for weight, bias in zip(self.weight.split(widths), biases, strict=True)]


class Dropout(nn.Module):
    """Dropout on `[batch, time, channels]`: of single values, or with `feature` of whole channels of a sequence."""

    def __init__(self, probability: float, feature: bool = False) -> None:
        super().__init__()
        self.probability = probability
        self.feature = feature

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of `x` in training mode; return `x` itself in evaluation mode."""
        if not self.training or self.probability == 0.0:
            return x
        if self.feature:
            return x * dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.probability)
        return dropout(x, self.probability)

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"{self.probability}, feature={self.feature}"


class FeedForward(nn.Module):
    """`x + drop(W₂ drop_h(act(W₁ norm(x))))`; post-norm: `norm(x + drop(W₂ drop_h(act(W₁ x))))`."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation_name: str = "silu",
        norm: str = "layer",
        prenorm: bool = True,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        feature_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.activation = activation(activation_name)
        self.norm = make_norm(norm, d_model)
        self.up = Linear(d_model, d_ff)
        self.down = Linear(d_ff, d_model)
        self.hidden_dropout = Dropout(hidden_dropout, feature_dropout)
        self.dropout = Dropout(dropout, feature_dropout)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Map `[batch, time, d_model]` to the same shape; `lengths` (`[batch]`) are the valid tokens of each row."""
        h = self.norm(x, lengths) if self.prenorm else x
        h = self.hidden_dropout(self.activation(self.up(h)))
        x = x + self.dropout(self.down(h))
        return x if self.prenorm else self.norm(x, lengths)
