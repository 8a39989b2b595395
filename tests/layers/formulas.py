"""The layers of the paper as loops and formulas, which the modules are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.layers import EMA, TCN, ChunkedAttention, Mixer

EPS = 1e-5


def scramble(module: nn.Module) -> nn.Module:
    """Move every parameter and statistic of `module` far from its initial value, so that each of them matters."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + (0.5 if name.endswith(("var", "norm")) else -0.5))
    return module


def normalized(module: nn.Module, kind: str, x: Tensor) -> Tensor:
    """Return the norm called `kind` in evaluation mode, from its formula and the parameters of `module`."""
    if kind == "none":
        return x
    weight = cast(Tensor, module.weight)
    if kind in ("scale", "rms"):
        return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    bias = cast(Tensor, module.bias)
    if kind == "layer":
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    else:
        mean, variance = cast(Tensor, module.running_mean), cast(Tensor, module.running_var)
    return weight * (x - mean) / (variance + EPS).sqrt() + bias


def convolved(x: Tensor, weight: Tensor, dilation: int, causal: bool) -> Tensor:
    """`y[t] = Σ_j weight[:, j] x[t - j · dilation]`; not causal, the taps lie around `t`."""
    time, taps = x.shape[1], weight.shape[1]
    center = 0 if causal else (taps - 1) // 2
    y = torch.zeros_like(x)
    for t in range(time):
        for j in range(taps):
            source = t - (j - center) * dilation
            if 0 <= source < time:
                y[:, t] += weight[:, j] * x[:, source]
    return y


def tcn(module: TCN, x: Tensor) -> Tensor:
    """The blocks of `module`: convolution, norm, non-linearity and skip connection, or those of a chain."""
    config = module.config
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "relu": F.relu,
        "none": lambda h: h,
    }
    given = x
    for block in range(config.depth):
        h = x
        for inner in range(config.convolutions):
            weight = module.weight[block, inner]
            if module.scale is not None:
                weight = module.scale[block, inner].unsqueeze(-1) * weight / weight.norm(dim=-1, keepdim=True)
            h = convolved(h, weight, config.dilation_factor**block, module.causal)
            if module.bias is not None:
                h = h + module.bias[block, inner]
            if config.norm not in ("none", "weight"):
                h = normalized(module.norms[block * config.convolutions + inner], config.norm, h)
            bent = functions[config.activation](h)
            if module.gain is not None:
                h = h + module.gain[block, inner] * bent
            elif config.block == "residual":
                h = bent
        x = x + h if config.block == "residual" else h
    x = x if module.omega is None else x + module.omega * given
    return functions[config.activation](x) if config.output == "activation" else x


def ema(module: EMA, x: Tensor) -> Tensor:
    """`silu(Σ_l k[l] x[t - l] + ω x[t])`, or without SiLU, and the same over the future with the second parameters."""
    time, hidden = x.shape[1], module.config.d_state
    p = torch.sigmoid(module.delta)
    q = 1 - p * torch.sigmoid(module.alpha)
    y = x * module.omega
    for direction in range(p.shape[0]):
        for lag in range(min(time, module.config.truncation or time)):
            tap = (p * module.beta * q**lag * module.gamma)[direction].sum(-1) / math.sqrt(hidden)
            moved = F.pad(x, (0, 0, lag, 0))[:, :time] if direction == 0 else F.pad(x, (0, 0, 0, lag))[:, lag:]
            y = y + tap * moved
    return F.silu(y) if module.config.output == "activation" else y


def mixed(module: Mixer | None, x: Tensor) -> Tensor:
    """The mixer `module`, of any kind."""
    if isinstance(module, TCN):
        return tcn(module, x)
    return ema(module, x) if isinstance(module, EMA) else x


def turned(vector: Tensor, position: int) -> Tensor:
    """`vector` (`[…, width]`) with pair `i`, places `i` and `i + half`, turned by `position · 10000^(-i / half)`."""
    half = vector.shape[-1] // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=vector.dtype) / half)
    a, b = vector[..., :half], vector[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention(module: ChunkedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head by head, chunk by chunk and query by query, for whole sequences."""
    heads = zip(*(part.chunk(module.config.num_heads, -1) for part in (q, k, v)), strict=True)
    return torch.cat([_head(module, *parts) for parts in heads], -1)


def _head(module: ChunkedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    time = q.shape[1]
    chunk = module.chunk_size or time
    out = torch.zeros_like(v)
    for row in range(q.shape[0]):
        for m in range(time):
            start = max(m // chunk - module.config.memory, 0) * chunk
            end = m + 1 if module.causal else min(start + chunk, time)
            weights = _weights(module, q[row], k[row], m, range(start, end))
            out[row, m] = weights @ v[row, start:end]
    return out


def _weights(module: ChunkedAttention, q: Tensor, k: Tensor, m: int, visible: range) -> Tensor:
    position, function = module.config.position, module.config.activation
    scale = q.shape[-1] ** -0.5 if function == "softmax" else 1 / len(visible)
    scores = []
    for n in visible:
        query, key = q[m], k[n]
        if position == "rope":
            width = module.config.rope_width
            query, key = (torch.cat([turned(x[:width], at), x[width:]]) for x, at in ((query, m), (key, n)))
        score = query @ key * scale
        if position == "simple":
            score = score + module.bias[n - m + module.config.reach - 1]
        elif position == "rotary":
            score = score + turned(module.alpha, m) @ turned(module.beta, n)
        scores.append(score)
    together = torch.stack(scores)
    if function == "softmax":
        return together.exp() / together.exp().sum()
    if function == "relu2":
        return together.clamp(min=0).square()
    return 0.5 * (1 + torch.erf((together - 0.707107) / (0.282095 * math.sqrt(2))))
