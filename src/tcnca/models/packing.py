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
from tcnca.ops import check_lengths, check_values

Lengths = Tensor | Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch are.

    lengths: `[rows]`, valid tokens of each row, or None if there is no padding.
    order: `[batch, time]`, for masks: the times of each row's valid tokens, then the others.
    starts: `[documents + 1]`, for packed documents: where each begins.
    max_length: for packed documents: number of tokens of the padded rows.
    """

    lengths: Tensor | None = None
    order: Tensor | None = None
    starts: Tensor | None = None
    max_length: int = 0

    def rows(self, x: Tensor) -> Tensor:
        """Arrange `x` (`[batch, time, …]`) in right-padded rows."""
        if self.order is not None:
            return x.gather(1, _expand(self.order, x))
        if self.starts is not None:
            index = self.starts[:-1].unsqueeze(1) + torch.arange(self.max_length, device=x.device)
            return x[0, index.clamp(max=x.shape[1] - 1)]
        return x

    def restore(self, rows: Tensor, time: int) -> Tensor:
        """Arrange `rows` (`[rows, time, …]`) as the `time` tokens were."""
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
    if lengths is not None:
        return Packing(_lengths(x, lengths, f"lengths{suffix}"))
    if attention_mask is not None:
        return _masked(x, attention_mask, f"attention_mask{suffix}")
    return Packing() if cu_seqlens is None else _packed(x, cu_seqlens, max_seqlen)


def _lengths(x: Tensor, lengths: Lengths, name: str) -> Tensor:
    lengths = torch.as_tensor(lengths)
    check_lengths(lengths, x.shape[0], x.shape[1], name)
    lengths = lengths.to(x.device).long()
    if lengths.device.type != "cpu":
        check_values(
            (lengths >= 0) & (lengths <= x.shape[1]), f"{name}: expected values from 0 to {x.shape[1]}", lengths
        )
    return lengths


def _masked(x: Tensor, mask: Tensor, name: str) -> Packing:
    mask = torch.as_tensor(mask)
    if mask.shape != x.shape[:2]:
        raise InputError(f"{name}: expected shape {list(x.shape[:2])}, true for valid tokens, got {list(mask.shape)}")
    if mask.is_floating_point() or mask.is_complex():
        raise InputError(f"{name}: expected booleans, or 1 for valid tokens and 0, got {mask.dtype}")
    if mask.dtype != torch.bool:
        check_values((mask == 0) | (mask == 1), f"{name}: expected 1 for valid tokens and 0", mask)
    mask = mask.to(device=x.device, dtype=torch.bool)
    order = torch.argsort(~mask, dim=1, stable=True)
    return Packing(mask.sum(1), order=order)


def _packed(x: Tensor, cu_seqlens: Lengths, max_seqlen: int | None) -> Packing:
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
        (lengths >= 0).all() & (starts[0] == 0) & (starts[-1] == x.shape[1]),
        f"cu_seqlens: expected values that rise from 0 to {x.shape[1]}, the number of tokens",
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


def _expand(index: Tensor, x: Tensor) -> Tensor:
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
