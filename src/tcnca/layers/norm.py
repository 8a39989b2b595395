"""Normalisations. All take `[batch, time, channels]` and `lengths`: padding never enters a statistic."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.ops import length_mask

NormKind = Literal["layer", "scale", "rms", "batch", "sync_batch"]
NORM_KINDS: tuple[str, ...] = get_args(NormKind)
EPS = 1e-5


def make_norm(kind: str, width: int, affine: bool = True) -> nn.Module:
    """The normalisation called `kind` (one of `NORM_KINDS`) over `width` channels, with or without learned scales."""
    if kind == "layer":
        return LayerNorm(width, affine)
    if kind in ("scale", "rms"):
        return RMSNorm(width if kind == "rms" else 1, affine)
    return BatchNorm(width, affine, synchronised=kind == "sync_batch")


class LayerNorm(nn.LayerNorm):
    """Mean 0 and variance 1 over the channels of each token."""

    def __init__(self, width: int, affine: bool = True) -> None:
        super().__init__(width, eps=EPS, elementwise_affine=affine)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalise `x` (`[batch, time, channels]`); `lengths` makes no difference here."""
        return super().forward(x)


class RMSNorm(nn.Module):
    """Mean square 1 over the channels of each token, times a learned scale a channel, or one for all (ScaleNorm)."""

    def __init__(self, scales: int, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(scales)) if affine else None

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalise `x` (`[batch, time, channels]`); `lengths` makes no difference here."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = precise if self.weight is None else precise * self.weight
        return (scaled * torch.rsqrt(precise.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


class BatchNorm(nn.Module):
    """Mean 0 and variance 1 of each channel over batch and time, of real tokens only.

    In training the statistics are those of the batch; in evaluation, the running means of training.
    Note that in training they also look at later tokens of a causal model.
    `synchronised` takes them over all processes of the default group.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int, affine: bool = True, synchronised: bool = False, momentum: float = 0.1) -> None:
        super().__init__()
        self.synchronised = synchronised
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalise `x` (`[batch, time, channels]`), of which each row's first `lengths` tokens are real."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            mean, var = self._batch_statistics(precise, lengths)
        else:
            mean, var = self.running_mean, self.running_var
        y = (precise - mean) * torch.rsqrt(var + EPS)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)

    def _batch_statistics(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        if lengths is None:
            count = x.new_tensor(float(x.shape[0] * x.shape[1]))
        else:
            real = length_mask(lengths, x.shape[1]).unsqueeze(-1)
            x = x.masked_fill(~real, 0.0)
            count = lengths.sum().to(x.dtype)
        total, count = self._over_processes(x.sum((0, 1)), count)
        mean = total / count.clamp(min=1.0)
        deviation = x - mean if lengths is None else (x - mean).masked_fill(~real, 0.0)
        squares, _ = self._over_processes(deviation.square().sum((0, 1)), count.detach().new_zeros(()))
        var = squares / count.clamp(min=1.0)
        with torch.no_grad():
            unbiased = squares / (count - 1.0).clamp(min=1.0)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        return mean, var

    def _over_processes(self, values: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if not (self.synchronised and dist.is_available() and dist.is_initialized()):
            return values, count
        from torch.distributed.nn.functional import all_reduce  # differentiable, unlike dist.all_reduce

        joined = all_reduce(torch.cat([values, count.reshape(1)]))
        return joined[:-1], joined[-1]


def weight_norm(weight: Tensor, scale: Tensor) -> Tensor:
    """`weight` (`[…, channels, kernel_size]`) with each kernel's length set to `scale` (`[…, channels]`)."""
    return F.normalize(weight, dim=-1) * scale.unsqueeze(-1)
