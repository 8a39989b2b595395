"""Dropout; compiled code computes its mask by hashing indices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = 24
_MAX_INDEX = 2**31


def dropout(x: Tensor, probability: float) -> Tensor:
    """Set each value of `x` to zero with a `probability`, and scale the others up to keep the mean."""
    if torch.compiler.is_compiling() and x.numel() < _MAX_INDEX:
        # The mask of a generator would have to be stored for the backward pass, and costs more than most operations
        # around it; a hash takes a few instructions and is recomputed.
        seeds = torch.randint(-_MAX_INDEX, _MAX_INDEX, (2,), dtype=torch.int32, device=x.device)
        return hashed_dropout(x, probability, seeds)
    return F.dropout(x, probability)


def hashed_dropout(x: Tensor, probability: float, seeds: Tensor) -> Tensor:
    """Apply dropout with a mask that is a function of two `seeds` (`[2]`, int32)."""
    indices = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    # With one seed only, all masks would be windows of the same sequence.
    hashed = _hash(_hash(indices + seeds[0]) ^ seeds[1])
    kept = (hashed & (2**_BITS - 1)) >= round(probability * 2**_BITS)
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    return torch.where(kept, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))


def _hash(x: Tensor) -> Tensor:
    """Map 32-bit integers one to one, such that every bit depends on every bit (logical shifts, odd factors)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
