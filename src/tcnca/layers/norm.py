"""Normalizations. All take `[batch, time, channels]` and `lengths`: padding is excluded from every statistic."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.ops import current_context, zero_padding
from tcnca.ops.context import sum_over_processes

NormKind = Literal["layer", "scale", "rms", "batch", "sync_batch", "none"]
NORM_KINDS: tuple[str, ...] = get_args(NormKind)
EPS = 1e-5


def make_norm(kind: str, width: int, affine: bool = True) -> nn.Module:
    """Build the normalization called `kind` (one of `NORM_KINDS`), with or without learned scales."""
    if kind == "none":
        return Identity()
    if kind == "layer":
        return LayerNorm(width, affine)
    if kind in ("scale", "rms"):
        return RMSNorm(width if kind == "rms" else 1, affine)
    return BatchNorm(width, affine, synchronized=kind == "sync_batch")


class Identity(nn.Module):
    """No normalization."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return `x`."""
        return x


class LayerNorm(nn.LayerNorm):
    """Mean 0 and variance 1 over the channels of each token."""

    def __init__(self, width: int, affine: bool = True) -> None:
        super().__init__(width, eps=EPS, elementwise_affine=affine)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalize `x` (`[batch, time, channels]`); `lengths` has no effect."""
        return super().forward(x)


def rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Normalize `x` to a mean square of 1 over its last dimension, times `scale`; computed in float32 or better."""
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = precise if scale is None else precise * scale
    return (scaled * torch.rsqrt(precise.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """Mean square 1 over the channels of each token, times learned scales of channels, or one scale (ScaleNorm)."""

    def __init__(self, scales: int, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(scales)) if affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all scales to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalize `x` (`[batch, time, channels]`); `lengths` has no effect."""
        return rms_norm(x, self.weight, EPS)


class BatchNorm(nn.Module):
    """Mean 0 and variance 1 of each channel over batch and time, of valid tokens only.

    In training mode the statistics are those of the batch, which include later tokens of a causal model; in
    evaluation mode they are the running means of training.
    `synchronized` computes them over all processes of the default group, otherwise they are those of this process, and
    of the others that hold parts of the same sequences (`ContextParallel`).
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int, affine: bool = True, synchronized: bool = False, momentum: float = 0.1) -> None:
        super().__init__()
        self.synchronized = synchronized
        self.momentum = momentum
        self.weight = nn.Parameter(torch.empty(width)) if affine else None
        self.bias = nn.Parameter(torch.empty(width)) if affine else None
        self.register_buffer("running_mean", torch.empty(width))
        self.register_buffer("running_var", torch.empty(width))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set scales to 1, shifts to 0 and the running statistics to their initial values."""
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalize `x` (`[batch, time, channels]`); the first `lengths` tokens of each row are valid."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            precise = zero_padding(precise, lengths)
            mean, var = self._batch_statistics(precise, lengths)
        else:
            mean, var = self.running_mean, self.running_var
        y = (precise - mean) * torch.rsqrt(var + EPS)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)

    def _batch_statistics(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the valid tokens of `x`, whose padding is zero."""
        if lengths is None:
            count = torch.full((), x.shape[0] * x.shape[1], device=x.device, dtype=x.dtype)
        else:
            count = lengths.sum().to(x.dtype)
        total, count = self._over_processes(x.sum((0, 1)), count)
        mean = total / count.clamp(min=1.0)
        deviation = zero_padding(x - mean, lengths)
        squares, _ = self._over_processes(deviation.square().sum((0, 1)), torch.zeros_like(count))
        var = squares / count.clamp(min=1.0)
        with torch.no_grad():
            unbiased = squares / (count - 1.0).clamp(min=1.0)
            # A batch of padding only leaves the running statistics unchanged.
            momentum = self.momentum * (count > 0).to(self.running_mean.dtype)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
            self.num_batches_tracked.add_(1)
        return mean, var

    def _over_processes(self, values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        context = current_context()
        synchronized = self.synchronized and dist.is_available() and dist.is_initialized()
        if not synchronized and context is None:
            return values, count
        # A sequence that is divided over processes has the statistics of the whole.
        group = None if synchronized or context is None else context.group
        joined = sum_over_processes(torch.cat([values, count.reshape(1)]), group)
        return joined[:-1], joined[-1]


def weight_norm(weight: Tensor, scale: Tensor) -> Tensor:
    """Return `weight` (`[…, channels, kernel_size]`) with the norm of each kernel set to `scale` (`[…, channels]`)."""
    return F.normalize(weight, dim=-1) * scale.unsqueeze(-1)
