"""Right padding: operators and layers take `lengths`, the number of valid tokens at the start of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def length_mask(lengths: Tensor, time: int) -> Tensor:
    """Return `[batch, time]`, true for valid tokens. `lengths` is `[batch]`."""
    return torch.arange(time, device=lengths.device) < lengths.unsqueeze(1)


def kernel_lengths(lengths: Tensor | None) -> Tensor | None:
    """Return lengths as Triton's kernels read them: contiguous, of 64 bits."""
    return None if lengths is None else lengths.long().contiguous()


def zero_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return `x` (`[batch, time, channels]`) with zeros in the padding, even in place of NaN."""
    if lengths is None:
        return x
    return x.masked_fill(~length_mask(lengths, x.shape[1]).unsqueeze(-1), 0.0)


def take_time(x: Tensor, index: Tensor) -> Tensor:
    """Return `x` (`[batch, time, channels]`) at the times `index` (`[batch, any]`) of each sequence, all in range."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # On a CPU it is faster to copy all channels of a time at once.
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1) * x.shape[1] + index
        return x.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, x.shape[2])
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def roll_time(x: Tensor, shift: int, lengths: Tensor | None) -> Tensor:
    """Return `x` (`[batch, time, channels]`) rotated by `shift` steps, each row inside its first `lengths` tokens.

    What leaves the valid part at one end enters it at the other. Padding has copies of valid tokens.
    """
    if shift == 0:
        return x
    if lengths is None:
        return x.roll(shift, 1)
    source = torch.arange(x.shape[1], device=x.device) - shift
    return take_time(x, source % lengths.clamp(min=1).unsqueeze(1))


def align_right(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return `x` (`[batch, time, channels]`) with the valid tokens of each row at its end, and zeros before them."""
    if lengths is None:
        return x
    time = x.shape[1]
    source = torch.arange(time, device=x.device) - (time - lengths).unsqueeze(1)
    return take_time(x, source.clamp(min=0)).masked_fill((source < 0).unsqueeze(-1), 0.0)


def advance(position: Tensor, time: int, lengths: Tensor | None, inplace: bool = False) -> Tensor:
    """Return the number of tokens seen (`[batch]`) after `time` more, of which `lengths` are valid."""
    step = time if lengths is None else lengths.to(position)
    return position.add_(step) if inplace else position + step
