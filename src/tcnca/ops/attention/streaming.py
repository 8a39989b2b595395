"""Chunked attention that goes on from a state: the keys and values of the unfinished chunk.

The cache has one slot for each place in a chunk, so a token is written where its position says and
nothing moves. With full attention the whole past is one chunk and the cache grows. Rows may be at
different positions: each has its own fill, the number of valid slots.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tcnca.ops.attention.attend import attend
from tcnca.ops.attention.position import chunk_bias, offset_bias
from tcnca.ops.padding import advance, take_time
from tcnca.ops.state import State


@dataclasses.dataclass(frozen=True)
class AttentionState(State):
    """Keys and values of the chunk that is not finished yet.

    keys: `[batch, slots, width]`; slot `j` holds place `j` of the chunk. As many slots as the chunk has
        tokens; for full attention as many as the longest row has, or more.
    values: `[batch, slots, d_value]`.
    position: `[batch]`, tokens seen so far.
    """

    keys: Tensor
    values: Tensor
    position: Tensor


def initial_attention_state(
    batch: int,
    width: int,
    d_value: int,
    chunk_size: int | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionState:
    """The state before the first token."""
    slots = 0 if chunk_size is None else chunk_size
    return AttentionState(
        torch.zeros(batch, slots, width, device=device, dtype=dtype),
        torch.zeros(batch, slots, d_value, device=device, dtype=dtype),
        torch.zeros(batch, dtype=torch.long, device=device),
    )


def begin_attention_state(k: Tensor, v: Tensor, chunk_size: int | None, lengths: Tensor | None) -> AttentionState:
    """The state after the first tokens of a sequence, whose keys and values these are."""
    position = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
    end = advance(position, k.shape[1], lengths)
    slots = full_slots(0, end, k.shape[1], lengths) if chunk_size is None else None
    keys, values = (part[:, :slots] if chunk_size is None else _last_chunk(part, end, chunk_size) for part in (k, v))
    return AttentionState(keys, values, end)


def full_slots(cached: int, end: Tensor, time: int, lengths: Tensor | None, reach: int | None = None) -> int:
    """Slots that full attention needs after `time` more tokens, where rows then hold `end` (`[batch]`) tokens.

    With padding, or past the `reach` of a bias, the number is read off the device, lest the cache grow by slots that
    no row fills; a compiled graph cannot read it and makes room for all.
    """
    most = cached + time
    known = lengths is None and (reach is None or most <= reach)
    return most if known or torch.compiler.is_compiling() else int(end.max())


def continue_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int | None,
    function: str,
    bias: Tensor | None,
    dropout: float,
    lengths: Tensor | None,
    state: AttentionState,
    inplace: bool,
) -> tuple[Tensor, AttentionState]:
    """Causal attention of the next tokens, and the state after them. Arguments as in `chunked_attention`."""
    time = q.shape[1]
    fill = state.position if chunk_size is None else state.position % chunk_size
    if time == 1 and chunk_size is not None:
        out, keys, values = _one(q, k, v, fill, function, bias, dropout, state, inplace)
    else:
        end = advance(fill, time, lengths)
        if chunk_size is None:
            reach = None if bias is None else (bias.shape[0] + 1) // 2
            slots = full_slots(state.keys.shape[1], end, time, lengths, reach)
        else:
            slots = chunk_size - 1 + time
            slots += -slots % chunk_size if time > chunk_size else 0
        lined_k, lined_v = (_line_up(*pair, fill, slots) for pair in ((state.keys, k), (state.values, v)))
        attention = _window if chunk_size is None or time <= chunk_size else _chunks
        out = attention(q, lined_k, lined_v, fill, end, chunk_size, function, bias, dropout)
        keys, values = (_last_chunk(lined, end, chunk_size) for lined in (lined_k, lined_v))
    return out, AttentionState(keys, values, advance(state.position, time, lengths, inplace))


def _one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fill: Tensor,
    function: str,
    bias: Tensor | None,
    dropout: float,
    state: AttentionState,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token: write its key and value to its slot and look at the slots up to it."""
    slot = fill.unsqueeze(1)
    keys, values = (_write(cache, slot, new, inplace) for cache, new in ((state.keys, k), (state.values, v)))
    places = torch.arange(keys.shape[1], device=q.device)
    biases = None if bias is None else offset_bias(bias, slot, places)
    mask = (places <= slot).unsqueeze(1)
    out = attend(q, keys, values, activation=function, bias=biases, mask=mask, dropout=dropout)
    return out, keys, values


def _write(cache: Tensor, slot: Tensor, new: Tensor, inplace: bool) -> Tensor:
    # A row of length 0 is written too: its slot is not valid yet, and its next token overwrites it.
    index, new = slot.unsqueeze(-1).expand_as(new), new.to(cache.dtype)
    return cache.scatter_(1, index, new) if inplace else cache.scatter(1, index, new)


def _line_up(cache: Tensor, new: Tensor, fill: Tensor, slots: int) -> Tensor:
    """Each row's `fill` cached entries, then its new ones, `[batch, slots, channels]`; what follows is arbitrary."""
    both = torch.cat([cache, new.to(cache.dtype)], 1)
    place = torch.arange(slots, device=new.device)
    fill = fill.unsqueeze(1)
    index = torch.where(place < fill, place, place - fill + cache.shape[1])
    return take_time(both, index.clamp(max=both.shape[1] - 1))


def _last_chunk(lined: Tensor, end: Tensor, chunk_size: int | None) -> Tensor:
    """The chunk that holds slot `end`, the first one not written yet: the cache of the next call."""
    if chunk_size is None:
        return lined
    start = (end // chunk_size * chunk_size).unsqueeze(1)
    index = start + torch.arange(chunk_size, device=lined.device)
    return take_time(lined, index.clamp(max=lined.shape[1] - 1))


def _window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fill: Tensor,
    end: Tensor,
    chunk_size: int | None,
    function: str,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """A few queries against all slots: cheap while there are fewer queries than a chunk has tokens."""
    query = fill.unsqueeze(1) + torch.arange(q.shape[1], device=q.device)
    key = torch.arange(k.shape[1], device=q.device)
    mask = (key <= query.unsqueeze(-1)) & (key < end.view(-1, 1, 1))
    if chunk_size is not None:
        mask = mask & (key // chunk_size == query.unsqueeze(-1) // chunk_size)
    biases = None if bias is None else offset_bias(bias, query, key)
    return attend(q, k, v, activation=function, bias=biases, mask=mask, dropout=dropout)


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fill: Tensor,
    end: Tensor,
    chunk_size: int | None,
    function: str,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Many queries: put them into the slots of their chunks as well, and attend chunk by chunk."""
    assert chunk_size is not None
    slots = torch.arange(k.shape[1], device=q.device)
    lined_q = take_time(q, (slots - fill.unsqueeze(1)).clamp(0, q.shape[1] - 1))
    place = torch.arange(chunk_size, device=q.device)
    real = (slots < end.unsqueeze(1)).unflatten(1, (-1, chunk_size)).unsqueeze(2)
    mask = real & (place <= place.unsqueeze(1))
    biases = None if bias is None else chunk_bias(bias, chunk_size)
    lined = [part.unflatten(1, (-1, chunk_size)) for part in (lined_q, k, v)]
    out = attend(*lined, activation=function, bias=biases, mask=mask, dropout=dropout).flatten(1, 2)
    return take_time(out, fill.unsqueeze(1) + torch.arange(q.shape[1], device=q.device))
