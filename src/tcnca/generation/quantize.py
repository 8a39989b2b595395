"""Weights of 8 bits: symmetric, with one scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127
"""Largest magnitude of a quantized weight."""


@torch.no_grad()
def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 weights `[outputs, inputs]` and float32 scales `[outputs]`, whose product is near `weight`.

    The scales are numbers of bfloat16, so that kernels which take them in that type read them exactly.
    """
    largest = weight.detach().float().abs().amax(1)
    # A row of zeros has any scale.
    scale = torch.where(largest > 0, largest / LEVELS, 1.0).bfloat16().float()
    levels = (weight.detach().float() / scale.unsqueeze(1)).round().clamp(-LEVELS, LEVELS)
    return levels.to(torch.int8), scale
