"""Arrangement of the tokens of a batch: from lengths, masks or packed documents to right-padded rows, and back.

The layers know only rows that start with their first valid token and are padded on the right. In these, every valid
token has the position, the chunk and the neighbors that it would have alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.ops import ContextParallel, check_lengths, check_values, current_context
from tcnca.ops.ring import is_host_readable

Lengths = Tensor | Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch are.

    lengths: `[rows]`, valid tokens of each row, or None if there is no padding.
    order: `[batch, time]`, for masks: the times of each row's valid tokens, then the others.
    starts: `[documents + 1]`, for packed documents: where each begins.
    max_length: for packed documents: number of tokens of the padded rows.
    routes: for a sequence that is divided over processes: where the tokens of each slot of the rows of all processes
        are, and where the slot of each of their tokens is.
    """

    lengths: Tensor | None = None
    order: Tensor | None = None
    starts: Tensor | None = None
    max_length: int = 0
    routes: tuple[Tensor, Tensor] | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Arrange `x` (`[batch, time, …]`) in right-padded rows."""
        if self.routes is not None:
            assert self.lengths is not None
            return _route(x, self.routes[0], len(self.lengths))
        if self.order is not None:
            return x.gather(1, _expand(self.order, x))
        if self.starts is not None:
            index = self.starts[:-1].unsqueeze(1) + torch.arange(self.max_length, device=x.device)
            return x[0, index.clamp(max=x.shape[1] - 1)]
        return x

    def restore(self, rows: Tensor, time: int) -> Tensor:
        """Arrange `rows` (`[rows, time, …]`) as the `time` tokens were."""
        if self.routes is not None:
            return _route(rows, self.routes[1], self.routes[1].shape[1] // time)
        if self.order is not None:
            return torch.zeros_like(rows).scatter(1, _expand(self.order, rows), rows)
        if self.starts is not None:
            token = torch.arange(time, device=rows.device)
            document = torch.searchsorted(self.starts[1:].contiguous(), token, right=True)
            return rows[document, token - self.starts[document]].unsqueeze(0)
        return rows


def make_packing(
    x: Tensor,
    lengths: Lengths | None,
    attention_mask: Tensor | None,
    cu_seqlens: Lengths | None,
    max_seqlen: int | None,
    suffix: str = "",
) -> Packing:
    """Return the packing of `x` (`[batch, time, …]`), described by at most one of the arguments.

    `suffix` is appended to their names in messages: the second document's are `lengths2` and `attention_mask2`.
    """
    described = {f"lengths{suffix}": lengths, f"attention_mask{suffix}": attention_mask, "cu_seqlens": cu_seqlens}
    given = [name for name, value in described.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{', '.join(given)}: expected at most one of them, got {len(given)}")
    if max_seqlen is not None and cu_seqlens is None:
        raise InputError(f"max_seqlen: expected None without cu_seqlens, got {max_seqlen}")
    context = current_context()
    parts = 1 if context is None else context.size
    if lengths is not None:
        whole = _lengths(x, lengths, f"lengths{suffix}", parts * x.shape[1])
        if context is not None:
            return Packing(context.local_lengths(whole, x.shape[1]))
        return Packing() if _all(whole == x.shape[1]) else Packing(whole)
    if attention_mask is not None:
        packing = _masked(x, attention_mask, f"attention_mask{suffix}", context)
    elif cu_seqlens is not None:
        packing = _packed(x, cu_seqlens, max_seqlen, parts * x.shape[1])
    else:
        return Packing()
    return packing if context is None else _divided(packing, context, *x.shape[:2])


def _all(valid: Tensor) -> bool:
    """Return whether all tokens are known to be valid; layers are faster without lengths."""
    return is_host_readable(valid) and bool(valid.all())


def _lengths(x: Tensor, lengths: Lengths, name: str, time: int) -> Tensor:
    lengths = torch.as_tensor(lengths)
    check_lengths(lengths, x.shape[0], time, name)
    lengths = lengths.to(x.device).long()
    if lengths.device.type != "cpu":
        check_values((lengths >= 0) & (lengths <= time), f"{name}: expected values from 0 to {time}", lengths)
    return lengths


def _masked(x: Tensor, mask: Tensor, name: str, context: ContextParallel | None) -> Packing:
    mask = torch.as_tensor(mask)
    if mask.shape != x.shape[:2]:
        raise InputError(f"{name}: expected shape {list(x.shape[:2])}, true for valid tokens, got {list(mask.shape)}")
    if mask.is_floating_point() or mask.is_complex():
        raise InputError(f"{name}: expected booleans, or 1 for valid tokens and 0, got {mask.dtype}")
    if mask.dtype != torch.bool:
        check_values((mask == 0) | (mask == 1), f"{name}: expected 1 for valid tokens and 0", mask)
    mask = mask.to(device=x.device, dtype=torch.bool)
    if context is not None:
        mask = context.unshard(mask)
    elif _all(mask):
        return Packing()
    order = torch.argsort(~mask, dim=1, stable=True)
    return Packing(mask.sum(1), order=order)


def _packed(x: Tensor, cu_seqlens: Lengths, max_seqlen: int | None, time: int) -> Packing:
    starts = torch.as_tensor(cu_seqlens, device=x.device)
    if x.shape[0] != 1:
        raise InputError(
            f"x: expected a batch of 1 with cu_seqlens, which packs documents in one row, got {x.shape[0]}"
        )
    if starts.dim() != 1 or starts.shape[0] < 2 or starts.is_floating_point():
        raise InputError(
            f"cu_seqlens: expected whole numbers of shape [documents + 1], got {list(starts.shape)} of {starts.dtype}"
        )
    starts = starts.long()
    lengths = starts.diff()
    check_values(
        (lengths >= 0).all() & (starts[0] == 0) & (starts[-1] == time),
        f"cu_seqlens: expected values that rise from 0 to {time}, the number of tokens",
        starts,
    )
    if max_seqlen is None and torch.compiler.is_compiling():
        raise InputError(
            "max_seqlen: expected a whole number, which a compiled graph cannot read from the device, got None"
        )
    # Reading it from the device synchronizes.
    max_length = int(lengths.max()) if max_seqlen is None else max_seqlen
    if max_seqlen is not None:
        check_values(lengths <= max_length, f"max_seqlen: expected documents of at most {max_seqlen} tokens", lengths)
    return Packing(lengths, starts=starts, max_length=max(max_length, 1))


def _divided(packing: Packing, context: ContextParallel, batch: int, time: int) -> Packing:
    """Return the packing of the part of this process, `[batch, time]` tokens, given that of the whole sequence.

    The rows are divided over the processes as well: every token travels to where its row continues, and its output
    back. Tokens are numbered process by process, and so are the slots of the rows.
    """
    assert packing.lengths is not None
    lengths = packing.lengths.cpu().unsqueeze(1)
    longest = packing.max_length if packing.order is None else context.size * time
    width = -(-longest // context.size)
    place = torch.arange(context.size * width)
    if packing.order is not None:
        row, token = torch.arange(batch).unsqueeze(1), packing.order.cpu()
    else:
        assert packing.starts is not None
        row, token = torch.zeros(1, 1, dtype=torch.long), packing.starts[:-1].cpu().unsqueeze(1) + place
    source = (token // time * batch + row) * time + token % time
    source = torch.where(place < lengths, source, -1).unflatten(1, (context.size, width))
    source = source.transpose(0, 1).flatten(1)
    target = torch.full((context.size, batch * time), -1)
    target.view(-1)[source[source >= 0]] = (source.flatten() >= 0).nonzero()[:, 0]
    return Packing(context.local_lengths(packing.lengths, width), routes=(source, target))


def _route(x: Tensor, source: Tensor, rows: int) -> Tensor:
    """Return `[rows, time, …]` of the tokens, or slots, of all processes, of which this one has `x`."""
    context = current_context()
    assert context is not None
    return context.route(x.flatten(0, 1), source).unflatten(0, (rows, -1))


def _expand(index: Tensor, x: Tensor) -> Tensor:
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
