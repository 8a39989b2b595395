"""From any way to write down a batch of sequences to the one that the layers know, and back.

The layers know rows that start with their first real token, padded at the right. Left padding, masks and
packed documents are brought into that form here, so that every real token has the position, the chunk
and the neighbors it would have alone.
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
from tcnca.ops import check_lengths, check_values

Lengths = Tensor | Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the tokens of a batch stand.

    lengths: `[rows]`, real tokens of each row, or None if there is no padding.
    order: `[batch, time]`, for masks: the times of each row's real tokens, then the others.
    starts: `[documents + 1]`, for packed documents: where each begins.
    longest: for packed documents: the number of tokens to make room for in each row.
    """

    lengths: Tensor | None = None
    order: Tensor | None = None
    starts: Tensor | None = None
    longest: int = 0

    def rows(self, x: Tensor) -> Tensor:
        """Bring `x` (`[batch, time, …]`) into right-padded rows."""
        if self.order is not None:
            return x.gather(1, _expand(self.order, x))
        if self.starts is not None:
            index = self.starts[:-1].unsqueeze(1) + torch.arange(self.longest, device=x.device)
            return x[0, index.clamp(max=x.shape[1] - 1)]
        return x

    def restore(self, rows: Tensor, time: int) -> Tensor:
        """Bring `rows` (`[rows, time, …]`) back to where the `time` tokens stood."""
        if self.order is not None:
            return torch.zeros_like(rows).scatter(1, _expand(self.order, rows), rows)
        if self.starts is not None:
            token = torch.arange(time, device=rows.device)
            document = torch.searchsorted(self.starts[1:].contiguous(), token, right=True)
            return rows[document, token - self.starts[document]].unsqueeze(0)
        return rows


def make_layout(
    x: Tensor,
    lengths: Lengths | None,
    attention_mask: Tensor | None,
    cu_seqlens: Lengths | None,
    max_seqlen: int | None,
    suffix: str = "",
) -> Layout:
    """The layout of `x` (`[batch, time, …]`), described by at most one of `lengths`, `mask` and `cu_seqlens`.

    `suffix` follows their names in messages: the second document's are `lengths2` and `mask2`.
    """
    described = {f"lengths{suffix}": lengths, f"mask{suffix}": attention_mask, "cu_seqlens": cu_seqlens}
    given = [name for name, value in described.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: got several, allowed is one of lengths, mask and cu_seqlens")
    if max_seqlen is not None and cu_seqlens is None:
        raise InputError("max_seqlen: got one without cu_seqlens, allowed is None")
    if lengths is not None:
        return Layout(_lengths(x, lengths, f"lengths{suffix}"))
    if attention_mask is not None:
        return _masked(x, attention_mask, f"mask{suffix}")
    return Layout() if cu_seqlens is None else _packed(x, cu_seqlens, max_seqlen)


def _lengths(x: Tensor, lengths: Lengths, name: str) -> Tensor:
    lengths = torch.as_tensor(lengths)
    check_lengths(lengths, x.shape[0], x.shape[1], name)
    lengths = lengths.to(x.device).long()
    if lengths.device.type != "cpu":
        check_values((lengths >= 0) & (lengths <= x.shape[1]), f"{name}: allowed are 0 to {x.shape[1]}", lengths)
    return lengths


def _masked(x: Tensor, mask: Tensor, name: str) -> Layout:
    mask = torch.as_tensor(mask)
    if mask.shape != x.shape[:2]:
        raise InputError(f"{name}: got shape {list(mask.shape)}, allowed is {list(x.shape[:2])}, true for real tokens")
    if mask.is_floating_point() or mask.is_complex():
        raise InputError(f"{name}: got {mask.dtype}, allowed are true for real tokens and false, or 1 and 0")
    if mask.dtype != torch.bool:
        check_values((mask == 0) | (mask == 1), f"{name}: allowed are 1 for real tokens and 0", mask)
    mask = mask.to(device=x.device, dtype=torch.bool)
    order = torch.argsort(~mask, dim=1, stable=True)
    return Layout(mask.sum(1), order=order)


def _packed(x: Tensor, cu_seqlens: Lengths, max_seqlen: int | None) -> Layout:
    starts = torch.as_tensor(cu_seqlens, device=x.device)
    if x.shape[0] != 1:
        raise InputError(f"x: got a batch of {x.shape[0]}, allowed is 1 with cu_seqlens: all documents lie in one row")
    if starts.dim() != 1 or starts.shape[0] < 2 or starts.is_floating_point():
        raise InputError(
            f"cu_seqlens: got shape {list(starts.shape)} of {starts.dtype}, allowed is [documents + 1], whole numbers"
        )
    starts = starts.long()
    lengths = starts.diff()
    check_values(
        (lengths >= 0).all() & (starts[0] == 0) & (starts[-1] == x.shape[1]),
        f"cu_seqlens: got values that do not rise from 0 to {x.shape[1]}, the number of tokens",
        starts,
    )
    if max_seqlen is None and torch.compiler.is_compiling():
        raise InputError(
            "max_seqlen: got None, allowed is a whole number: a compiled graph cannot read it off the device"
        )
    # Without it the longest document has to be read off the device.
    longest = int(lengths.max()) if max_seqlen is None else max_seqlen
    if max_seqlen is not None:
        check_values(
            lengths <= longest, f"max_seqlen: got {max_seqlen}, allowed is at least the longest document", lengths
        )
    return Layout(lengths, starts=starts, longest=max(longest, 1))


def _expand(index: Tensor, x: Tensor) -> Tensor:
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
