"""Initialization of the kernels of a TCN, `[depth, convolutions, width, kernel_size]` (see `TCNConfig.init`).

All but `normal` give far taps little weight: random ones would add noise from far tokens to every position.
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
"""Scale of the random kernels of later blocks."""
GRADE = 0.3
"""Scale of a block relative to the previous one."""
MIXED = 4
"""Exponentials in a mixture."""


@torch.no_grad()
def initial_kernels(config: TCNConfig, like: Tensor, causal: bool) -> Tensor:
    """Return new kernels of the shape, dtype and device of `like`."""
    if config.init == "series":
        return _series(config, like, causal)
    kernels = nn.init.normal_(torch.empty_like(like), std=config.kernel_size**-0.5)
    if config.init == "normal":
        return kernels
    init = _init_residual if config.block == "residual" else _init_chain
    return init(config, kernels, causal)


def _init_residual(config: TCNConfig, kernels: Tensor, causal: bool) -> Tensor:
    """Initialize residual blocks, whose skip connections pass their input on."""
    if config.init == "graded":
        return kernels * _grades(kernels)
    kernels[0] = _decaying_mixtures(kernels[0], causal)
    kernels[1:] *= FAR_SCALE
    if config.init == "ema":
        kernels[0, 0] = _averages(kernels[0, 0], causal)
    if config.init != "decay":
        # With zeros in all convolutions of a block, none would have a gradient.
        kernels[1:, -1] = 0.0
    return kernels


def _init_chain(config: TCNConfig, kernels: Tensor, causal: bool) -> Tensor:
    """Initialize a chain, whose convolutions must pass their input on themselves."""
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
    """Return the tap of lag zero."""
    return 0 if causal else (kernel_size - 1) // 2


def _grades(kernels: Tensor) -> Tensor:
    return (GRADE ** torch.arange(kernels.shape[0], device=kernels.device)).to(kernels.dtype).view(-1, 1, 1, 1)


def _decaying_mixtures(like: Tensor, causal: bool) -> Tensor:
    """Return random mixtures of decaying exponentials, of unit norm."""
    lags = (torch.arange(like.shape[-1], device=like.device) - _center(like.shape[-1], causal)).abs()
    amplitudes = torch.randn(*like.shape[:-1], MIXED, 1, device=like.device)
    decays = torch.rand(*like.shape[:-1], MIXED, 1, device=like.device)
    kernels = (amplitudes * decays**lags).sum(-2)
    return (kernels / kernels.norm(dim=-1, keepdim=True)).to(like.dtype)


def _averages(like: Tensor, causal: bool) -> Tensor:
    """Return the first lags of the kernel of an EMA that is initialized as in MEGA."""
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
    """Return kernels whose chain is `a q^l` at lag `l`: the digits of a lag, to the base of the factor, are its taps.

    Bidirectional kernels are one-sided: those of even channels see the past, those of odd channels the future.
    """
    depth, convolutions, width, size = like.shape
    factor, center = config.dilation_factor, _center(size, causal)
    sides = torch.ones(width) if causal else 1.0 - 2.0 * (torch.arange(width) % 2)
    digits = (torch.arange(size) - center) * sides.unsqueeze(-1)
    decay = (0.5 + 0.5 * torch.rand(width)).unsqueeze(-1).double()
    amplitude = torch.randn(width).unsqueeze(-1) * (1.0 - decay**2).sqrt()
    kernels = torch.zeros(depth, convolutions, width, size, dtype=torch.float64)
    # Further convolutions of a block start as the identity.
    kernels[:, 1:, :, center] = 1.0
    for block in range(depth):
        powers = (decay ** (factor**block)) ** digits.clamp(min=0)
        kernels[block, 0] = torch.where((digits >= 0) & (digits < factor), powers, 0.0)
    kernels[0, 0] *= amplitude
    return kernels.to(like)
