"""Right padding: every operator below the models takes `lengths`, the number of real tokens a row starts with."""

from __future__ import annotations

import torch
from torch import Tensor


def length_mask(lengths: Tensor, time: int) -> Tensor:
    """`[batch, time]`, true where a token is real. `lengths` is `[batch]`."""
    return torch.arange(time, device=lengths.device) < lengths.unsqueeze(1)


def zero_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """`x` (`[batch, time, channels]`) with zeros, never NaN, in the padding."""
    if lengths is None:
        return x
    return x.masked_fill(~length_mask(lengths, x.shape[1]).unsqueeze(-1), 0.0)


def take_time(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` (`[batch, time, channels]`) at the times `index` (`[batch, any]`), for each sequence its own."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def advance(position: Tensor, time: int, lengths: Tensor | None, inplace: bool = False) -> Tensor:
    """The number of tokens seen (`[batch]`) after `time` more, of which `lengths` are real."""
    step = time if lengths is None else lengths.to(position)
    return position.add_(step) if inplace else position + step
