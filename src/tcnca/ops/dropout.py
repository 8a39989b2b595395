"""Dropout, which compiled code decides by hashing places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = 24
_PLACES = 2**31


def dropout(x: Tensor, probability: float) -> Tensor:
    """Zero in place of each value of `x` with a `probability`, and the others scaled up so that means stay."""
    if torch.compiler.is_compiling() and x.numel() < _PLACES:
        # A generator's numbers must be kept for the backward pass, and cost more than most of what surrounds them;
        # hashes are a few instructions that are done again.
        seeds = torch.randint(-_PLACES, _PLACES, (2,), dtype=torch.int32, device=x.device)
        return hashed_dropout(x, probability, seeds)
    return F.dropout(x, probability)


def hashed_dropout(x: Tensor, probability: float, seeds: Tensor) -> Tensor:
    """Dropout of `x` that is a function of two `seeds` (`[2]`, int32) alone."""
    places = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    # With one seed only, all masks would be windows of the same sequence.
    mixed = _mixed(_mixed(places + seeds[0]) ^ seeds[1])
    kept = (mixed & (2**_BITS - 1)) >= round(probability * 2**_BITS)
    # Of a probability of 1 nothing is left to be scaled.
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    return torch.where(kept, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))


def _mixed(x: Tensor) -> Tensor:
    """Each 32-bit number to another, in which each bit depends on each: shifts that fill with zeros, odd factors."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
