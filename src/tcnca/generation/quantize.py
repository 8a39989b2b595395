"""Weights in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix `[out, in]` as int8, and the float32 factor of each row, `[out]`.

    The largest magnitude of a row becomes 127.
    """
    rows = weight.detach().float()
    scale = rows.abs().amax(1) / _LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    return (rows / scale.unsqueeze(1)).round().to(torch.int8), scale
