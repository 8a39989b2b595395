"""Diagonal state-space models of whole sequences: the recurrences, oracle of all other forms, and the kernel.

Decays are given by their complex logarithms. With two directions the second looks into the future, and both see the
present.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Powers are products of coarse and fine ones, which take less memory than one for each lag and state.
BLOCK = 64
EXACT = torch.complex128
"""Dtype of decays. Their rounding grows with the number of tokens: that of float32 shows after hundreds."""


def ssm_recurrent(x: Tensor, log_decay: Tensor, weight: Tensor) -> Tensor:
    """Run `h ← exp(log_decay) h + x`, `y = Re Σ_n weight h` over `x` (`[batch, time, channels]`), token by token."""
    y = _recurrence(x, log_decay[0], weight[0])
    if log_decay.shape[0] == 2:
        y = y + _recurrence(x.flip(1), log_decay[1], weight[1]).flip(1)
    return y


def _recurrence(x: Tensor, log_decay: Tensor, weight: Tensor) -> Tensor:
    decay = torch.exp(log_decay.to(EXACT))
    hidden = torch.zeros_like(decay)
    outputs = []
    for now in x.unbind(1):
        hidden = decay * hidden + now.unsqueeze(-1)
        outputs.append((weight * hidden).sum(-1).real)
    return torch.stack(outputs, 1).to(x.dtype)


def scan_recurrent(v: Tensor, log_decay: Tensor) -> Tensor:
    """Return all `h ← exp(log_decay) h + v` over `v` (`[batch, time, states]`), token by token."""
    decay = torch.exp(log_decay.to(EXACT))
    hidden = torch.zeros_like(decay)
    outputs = []
    for now in v.unbind(1):
        hidden = decay * hidden + now
        outputs.append(hidden)
    return torch.stack(outputs, 1).to(v.dtype)


def ssm_kernel(log_decay: Tensor, weight: Tensor, length: int) -> Tensor:
    """Return the kernel `Re Σ_n weight exp(lag · log_decay)` for lags below `length`.

    As `[directions, channels, length]`, of parameters `[directions, channels, d_state]`.
    """
    kernel = sum_exponentials(weight.flatten(0, 1).unsqueeze(1), log_decay.flatten(0, 1), length)
    return kernel.view(*weight.shape[:2], length)


def sum_exponentials(weight: Tensor, log_decay: Tensor, length: int) -> Tensor:
    """Return `Re Σ_n weight exp(lag · log_decay)` for lags below `length`, as `[channels, rows, length]`.

    `weight` is `[channels, rows, d_state]`, `log_decay` is `[channels, d_state]`; both are real, or both complex.
    """
    coarse, fine = split_powers(log_decay, length)
    coarse = weight.unsqueeze(2) * coarse.mT.unsqueeze(1)
    if not coarse.is_complex():
        return torch.bmm(coarse.flatten(1, 2), fine).view(*weight.shape[:2], -1)[..., :length]
    # The real part of a complex product, as one real product.
    left = torch.cat((coarse.real, coarse.imag), -1).flatten(1, 2)
    y = torch.bmm(left, torch.cat((fine.real, -fine.imag), 1))
    return y.view(*weight.shape[:2], -1)[..., :length]


def decayed_sum(x: Tensor, log_decay: Tensor) -> Tensor:
    """Return `Σ_t exp((time - 1 - t) · log_decay) x[t]`, the hidden states after `x`, as `[batch, channels, d_state]`.

    `x` is `[batch, time, channels]`, `log_decay` is `[channels, d_state]`; both are real or complex.
    """
    batch, time, channels = x.shape
    coarse, fine = split_powers(log_decay, time)
    count, block = coarse.shape[-1], fine.shape[-1]
    # The last token first, in whole blocks.
    latest = F.pad(x.flip(1), (0, 0, 0, count * block - time)).permute(2, 0, 1).reshape(channels, batch * count, block)
    if fine.is_complex() and not x.is_complex():
        # A product of real and complex numbers, as a real one.
        parts = torch.bmm(latest, torch.cat((fine.real, fine.imag), 1).mT).view(channels, batch, count, 2, -1)
        blocks = torch.complex(*parts.unbind(3))
    else:
        blocks = torch.bmm(latest, fine.mT).view(channels, batch, count, -1)
    return (blocks * coarse.mT.unsqueeze(1)).sum(2).transpose(0, 1)


def split_powers(log_decay: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return factors of the decay to all powers below `length`, and some more.

    As `[channels, d_state, blocks]` and `[channels, d_state, BLOCK]`: a power is the product of that of the first token
    of its block and that of its place in the block. There are always more powers than `length`. When compiling there is
    one more block, since `torch.compile` makes a graph of its own for a dimension of size 1.
    """
    exact = log_decay.to(EXACT if log_decay.is_complex() else torch.float64).unsqueeze(-1)
    count = length // BLOCK + (2 if torch.compiler.is_compiling() else 1)
    blocks, places = (torch.arange(size, device=log_decay.device) for size in (count, BLOCK))
    coarse, fine = (torch.exp(exact * lags).to(log_decay.dtype) for lags in (blocks * BLOCK, places))
    return coarse, fine
