"""Ring buffers: the last `size` inputs of a sequence, where the input at time `t` is in slot `t mod size`.

A step writes one slot and reads the slots it needs; the buffer is never shifted. Each sequence of a batch has its own
time, so sequences of different lengths share one buffer. Slots that were never written are zeros, like left padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.ops.checks import is_traced
from tcnca.ops.dispatch import transform_reason
from tcnca.ops.padding import length_mask, take_time


def read_ring(buffer: Tensor, position: Tensor, ages: Tensor) -> Tensor:
    """Return the inputs of `ages` steps ago, `[batch, any, channels]`; `ages` is `[any]`, from 1 to `size`.

    `buffer` is `[batch, size, channels]`, `position` (`[batch]`) is the number of inputs seen so far.
    """
    return take_time(buffer, (position.unsqueeze(1) - ages) % buffer.shape[1])


def ring_views(buffer: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the slots of `count` times from `start` on: two views of the buffer, where it ends and begins again."""
    begin = start % buffer.shape[1]
    return buffer[:, begin : begin + count], buffer[:, : max(begin + count - buffer.shape[1], 0)]


def unroll_ring(buffer: Tensor, position: Tensor) -> Tensor:
    """Return the whole buffer from the oldest input to the newest, `[batch, size, channels]`."""
    size = buffer.shape[1]
    if size == 0:
        return buffer
    if (seen := common_position(position)) is not None:
        return torch.cat(ring_views(buffer, seen, size), 1)
    return read_ring(buffer, position, torch.arange(size, 0, -1, device=buffer.device))


def extend_ring(buffer: Tensor, position: Tensor, x: Tensor) -> Tensor:
    """Return the whole buffer from the oldest input to the newest, and then `x`, `[batch, size + time, channels]`."""
    seen = common_position(position) if buffer.shape[1] else None
    past = (unroll_ring(buffer, position),) if seen is None else ring_views(buffer, seen, buffer.shape[1])
    return torch.cat([*past, x], 1)


def push_ring(buffer: Tensor, position: Tensor, x: Tensor, lengths: Tensor | None, inplace: bool = False) -> Tensor:
    """Return the buffer after the inputs `x` (`[batch, time, channels]`), whose first `lengths` in each row are valid.

    With `inplace` the given buffer is written to where that saves a copy.
    """
    size, time = buffer.shape[1], x.shape[1]
    if size == 0:
        return buffer
    x = x.to(buffer.dtype)
    if lengths is None and (seen := common_position(position)) is not None:
        return _write_slice(buffer if inplace else buffer.clone(), seen + max(time - size, 0), x[:, -size:])
    if inplace and time <= size:
        return _write_slots(buffer, position, x, lengths)
    end = position + time if lengths is None else position + lengths
    slots = torch.arange(size, device=buffer.device)
    newest = (end - 1).unsqueeze(1)
    held = newest - (newest - slots) % size
    source = held - position.unsqueeze(1)
    fresh = take_time(x, source.clamp(0, time - 1))
    return torch.where((source >= 0).unsqueeze(-1), fresh, buffer)


def common_position(position: Tensor) -> int | None:
    """Return the position of all rows; None if they differ or the host cannot read them."""
    if not is_host_readable(position):
        return None
    positions = set(position.tolist())
    return positions.pop() if len(positions) == 1 else None


def is_host_readable(position: Tensor) -> bool:
    """Return whether there are positions that can be read without waiting for a GPU or breaking a graph."""
    known = position.device.type == "cpu" and not is_traced(position) and transform_reason() is None
    return known and len(position) > 0


def _write_slice(buffer: Tensor, position: int, x: Tensor) -> Tensor:
    """Write inputs from `position` on, at most as many as there are slots, into the buffer."""
    start = position % buffer.shape[1]
    before = min(buffer.shape[1] - start, x.shape[1])  # the end of the buffer
    buffer[:, start : start + before] = x[:, :before]
    buffer[:, : x.shape[1] - before] = x[:, before:]
    return buffer


def _write_slots(buffer: Tensor, position: Tensor, x: Tensor, lengths: Tensor | None) -> Tensor:
    time = x.shape[1]
    slots = (position.unsqueeze(1) + torch.arange(time, device=x.device)) % buffer.shape[1]
    if lengths is not None:
        x = torch.where(length_mask(lengths, time).unsqueeze(-1), x, take_time(buffer, slots))
    return buffer.scatter_(1, slots.unsqueeze(-1).expand_as(x), x)
