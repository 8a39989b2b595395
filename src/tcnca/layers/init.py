"""How the kernels of a TCN start, `[depth, convolutions, width, kernel_size]` (see `TCNConfig.init`).

All starts but `normal` have in common that far taps carry little at first: random ones would pour noise from far tokens
into every position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tcnca.layers.ema import EMA, EMAConfig
from tcnca.ops import ema_kernel

if TYPE_CHECKING:
    from tcnca.layers.tcn import TCNConfig

FAR_SCALE = 0.1
GRADE = 0.3
MIXED = 4


@torch.no_grad()
def draw_kernels(config: TCNConfig, like: Tensor, causal: bool) -> Tensor:
    """New kernels of the shape, type and device of `like`."""
    if config.init == "series":
        return _series(config, like, causal)
    kernels = nn.init.normal_(torch.empty_like(like), std=config.kernel_size**-0.5)
    if config.init == "normal":
        return kernels
    return _of_blocks(config, kernels, causal) if config.block == "residual" else _of_chain(config, kernels, causal)


def _of_blocks(config: TCNConfig, kernels: Tensor, causal: bool) -> Tensor:
    """Of residual blocks, which let their input through beside their convolutions."""
    if config.init == "graded":
        return kernels * _grades(kernels)
    kernels[0] = _decaying_mixtures(kernels[0], causal)
    kernels[1:] *= FAR_SCALE
    if config.init == "ema":
        kernels[0, 0] = _averages(kernels[0, 0], causal)
    if config.init != "decay":
        # With nothing in all convolutions of a block, none would have a gradient.
        kernels[1:, -1] = 0.0
    return kernels


def _of_chain(config: TCNConfig, kernels: Tensor, causal: bool) -> Tensor:
    """Of a chain, whose convolutions themselves let their input through."""
    first = kernels[0, 0].clone()
    if config.init == "graded":
        kernels *= _grades(kernels)
    else:
        draw = _averages if config.init == "ema" else _decaying_mixtures
        first = draw(first, causal)
        kernels *= FAR_SCALE if config.init == "decay" else 0.0
    kernels[..., _center(config.kernel_size, causal)] += 1.0
    kernels[0, 0] = first
    return kernels


def _center(kernel_size: int, causal: bool) -> int:
    """The tap of lag zero."""
    return 0 if causal else (kernel_size - 1) // 2


def _grades(kernels: Tensor) -> Tensor:
    return (GRADE ** torch.arange(kernels.shape[0], device=kernels.device)).to(kernels.dtype).view(-1, 1, 1, 1)


def _decaying_mixtures(like: Tensor, causal: bool) -> Tensor:
    """Random mixtures of decaying exponentials, of unit norm."""
    lags = (torch.arange(like.shape[-1], device=like.device) - _center(like.shape[-1], causal)).abs()
    amplitudes = torch.randn(*like.shape[:-1], MIXED, 1, device=like.device)
    decays = torch.rand(*like.shape[:-1], MIXED, 1, device=like.device)
    kernels = (amplitudes * decays**lags).sum(-2)
    return (kernels / kernels.norm(dim=-1, keepdim=True)).to(like.dtype)


def _averages(like: Tensor, causal: bool) -> Tensor:
    """As many lags of the kernel of an EMA, as MEGA draws it, as there are taps."""
    width, size = like.shape
    center = _center(size, causal)
    with like.device:
        ema = EMA(width, EMAConfig(), causal)
    taps = ema_kernel(ema.delta, ema.alpha, ema.beta, ema.gamma, size - center).to(like.dtype)
    kernels = torch.zeros_like(like)
    kernels[:, center:] += taps[0]
    if not causal:
        kernels[:, : center + 1] += taps[1, :, : center + 1].flip(-1)
    return kernels


def _series(config: TCNConfig, like: Tensor, causal: bool) -> Tensor:
    """Kernels whose chain is `a q^l` at lag `l`: the digits of a lag, to the base of the factor, are its taps.

    A kernel in the middle looks to one side: of even channels into the past, of odd ones into the future.
    """
    depth, convolutions, width, size = like.shape
    factor, center = config.dilation_factor, _center(size, causal)
    sides = torch.ones(width) if causal else 1.0 - 2.0 * (torch.arange(width) % 2)
    digits = (torch.arange(size) - center) * sides.unsqueeze(-1)
    decay = (0.5 + 0.5 * torch.rand(width)).unsqueeze(-1).double()
    amplitude = torch.randn(width).unsqueeze(-1) * (1.0 - decay**2).sqrt()
    kernels = torch.zeros(depth, convolutions, width, size, dtype=torch.float64)
    # Further convolutions of a block begin as nothing at all.
    kernels[:, 1:, :, center] = 1.0
    for block in range(depth):
        powers = (decay ** (factor**block)) ** digits.clamp(min=0)
        kernels[block, 0] = torch.where((digits >= 0) & (digits < factor), powers, 0.0)
    kernels[0, 0] *= amplitude
    return kernels.to(like)
