"""The feed-forward net of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from tcnca.layers.dropout import Dropout
from tcnca.layers.linear import Linear
from tcnca.layers.norm import make_norm
from tcnca.ops import activation


class FeedForward(nn.Module):
    """`x + drop(W₂ drop_h(act(W₁ norm(x))))`; post-norm: `norm(x + drop(W₂ drop_h(act(W₁ x))))`."""

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        function: str = "silu",
        norm: str = "layer",
        prenorm: bool = True,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        feature_dropout: bool = False,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.function = activation(function)
        self.norm = make_norm(norm, d_model)
        self.up = Linear(d_model, hidden)
        self.down = Linear(hidden, d_model)
        self.hidden_dropout = Dropout(hidden_dropout, feature_dropout)
        self.dropout = Dropout(dropout, feature_dropout)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """`[batch, time, d_model]` to the same; `lengths` (`[batch]`) says what is padding."""
        h = self.norm(x, lengths) if self.prenorm else x
        h = self.hidden_dropout(self.function(self.up(h)))
        x = x + self.dropout(self.down(h))
        return x if self.prenorm else self.norm(x, lengths)
