"""Attention of one head between given queries, keys and values."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.activations import laplace, relu2
from tcnca.ops.dropout import dropout as drop

AttentionActivation = Literal["softmax", "relu2", "laplace"]
ATTENTION_ACTIVATIONS: tuple[str, ...] = get_args(AttentionActivation)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    activation: str = "softmax",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`weights(q kᵀ) v`.

    `softmax` scales the scores by `width^-½`; `relu2` and `laplace` divide them by the number of visible keys.
    A query that sees nothing gets zeros.

    Args:
        q: `[…, queries, width]`.
        k: `[…, keys, width]`.
        v: `[…, keys, d_value]`.
        bias: added to the scores, broadcast to `[…, queries, keys]`.
        mask: true where a query may look, broadcast to `[…, queries, keys]`.
        dropout: probability of dropping a weight.

    Returns:
        `[…, queries, d_value]`.
    """
    if activation == "softmax":
        weights = _softmax_weights(q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2), bias, mask)
    else:
        visible = k.shape[-2] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        scores = q @ k.transpose(-1, -2) / visible
        scores = scores if bias is None else scores + bias
        weights = relu2(scores) if activation == "relu2" else laplace(scores)
        weights = weights if mask is None else weights * mask
    if dropout > 0.0:
        weights = drop(weights, dropout)
    return weights.to(v.dtype) @ v


def _softmax_weights(scores: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    scores = scores if bias is None else scores + bias
    precise = torch.promote_types(scores.dtype, torch.float32)
    if mask is None:
        return F.softmax(scores, -1, dtype=precise)
    # Where nothing is visible every score would be -inf and the softmax NaN.
    some = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask & some, float("-inf"))
    return F.softmax(scores, -1, dtype=precise) * some
