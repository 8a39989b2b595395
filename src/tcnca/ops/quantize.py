"""Weights in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix `[out, in]` as int8, and the float32 scale of each row, `[out]`.

    The scales are exact in bfloat16, since some kernels take them in that type. What `dequantize_rows` returns is
    quantized to the same numbers again.
    """
    rows = weight.detach().float()
    scale = (rows.abs().amax(1) / _LARGEST).bfloat16().float()
    scale = torch.where(scale > 0, scale, 1.0)
    return (rows / scale.unsqueeze(1)).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale


def dequantize_rows(levels: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 matrix `[out, in]` of int8 numbers and the scale of each row, `[out]`."""
    return levels.float() * scale.float().unsqueeze(1)
