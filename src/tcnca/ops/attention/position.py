"""Positions in attention: a bias for every offset between key and query, or a rotation of both.

A bias is a vector of `2 · reach - 1` values: place `key - query + reach - 1` holds that offset's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ROTARY_BASE = 10000.0


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn the pairs of `x` (`[…, time, width]`), one of each half, by their positions (`[…, time]`)."""
    half = x.shape[-1] // 2
    precise = torch.promote_types(x.dtype, torch.float32)
    order = torch.arange(half, device=x.device, dtype=precise)
    angles = positions.to(precise).unsqueeze(-1) * torch.exp(order * (-math.log(ROTARY_BASE) / half))
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def rotary_bias(alpha: Tensor, beta: Tensor, reach: int) -> Tensor:
    """MEGA's rotary bias `⟨R_m α, R_n β⟩` of query `m` and key `n`, by `n - m` alone: `[2 · reach - 1]`."""
    offsets = torch.arange(1 - reach, reach, device=alpha.device)
    return (alpha * rotate(beta.expand(2 * reach - 1, -1), offsets)).sum(-1)


def chunk_bias(bias: Tensor, size: int) -> Tensor:
    """`bias` (`[2 · reach - 1]`) between the tokens of one chunk, `[size, size]` by query and key."""
    reach = (bias.shape[0] + 1) // 2
    # Repeated with a period one longer than a row, each row shows the values one place further on. Looking them up
    # would give the same, but the gradient of a look-up is added up value by value.
    period = F.pad(bias[reach - size : reach + size - 1], (0, 1))
    rows = period.expand(size, -1).reshape(-1)[: size * (2 * size - 1)].view(size, 2 * size - 1)
    return rows[:, size - 1 :]


def offset_bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Look up `bias` (`[2 · reach - 1]`) for query positions `[…, queries]` and key positions `[…, keys]`."""
    reach = (bias.shape[0] + 1) // 2
    offsets = key.unsqueeze(-2) - query.unsqueeze(-1)
    # A pair of another chunk lies out of reach; it is masked, so any value will do.
    return bias[(offsets + reach - 1).clamp(0, bias.shape[0] - 1)]
