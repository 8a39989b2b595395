"""Chunked attention with memory, as in Transformer-XL: a chunk also sees the keys and values of the chunk before it.

No gradient flows into the memory: a key gets gradients from the queries of its own chunk only. The state is a ring
buffer of two chunks, the last finished one and the unfinished one. It holds keys before they are rotated: a key has one
position in its own chunk and another one in the memory of the next. Both are small however long the sequence is, and
small angles are precise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.attention.naive import (
    AttentionCall,
    AttentionState,
    crop,
    initial_attention_state,
    line_up,
    outputs_of_queries,
    queries_in_slots,
    rotate_heads,
)
from tcnca.ops.padding import advance, take_time, zero_padding
from tcnca.ops.ring import push_ring


def memory_attention(call: AttentionCall, chunk_size: int) -> tuple[Tensor, AttentionState | None]:
    """Run a causal call with `memory`; see `chunked_attention`."""
    # Weights of zero do not stop a NaN in the padding.
    q, k, v = (zero_padding(part, call.lengths) for part in (call.q, call.k, call.v))
    state, time = call.state, q.shape[1]
    if state is None:
        out = _from_start(call, chunk_size, q, k, v)
        if not call.return_state:
            return out, None
        # One dtype for both: under autocast values may be narrower than queries and keys.
        state = initial_attention_state(len(q), k.shape[2], v.shape[2], 2 * chunk_size, q.device, q.dtype)
    elif time == 1:
        return _step(call, chunk_size, state, q, k, v)
    elif time <= chunk_size and not any(part.requires_grad for part in (k, v, state.keys, state.values)):
        out = _over_all_slots(call, chunk_size, state, q, k, v)
    else:
        out = _chunk_by_chunk(call, chunk_size, state, q, k, v)
    return out, _push(call, state, k, v) if call.return_state else None


def _push(call: AttentionCall, state: AttentionState, k: Tensor, v: Tensor) -> AttentionState:
    """Return the state after the tokens of a call."""
    keys = push_ring(state.keys, state.position, k, call.lengths, call.inplace)
    values = push_ring(state.values, state.position, v, call.lengths, call.inplace)
    return AttentionState(keys, values, advance(state.position, k.shape[1], call.lengths, call.inplace))


def _rotate(call: AttentionCall, x: Tensor, positions: Tensor) -> Tensor:
    return rotate_heads(x, positions, call.num_heads, call.rope_width) if call.rope_width else x


def _from_start(call: AttentionCall, chunk_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in sequences from their start. Padding at the right needs no mask, since no earlier token sees it."""
    time = q.shape[1]
    # A program that is exported for any length must not ask how many chunks there are.
    any_length = isinstance(time, torch.SymInt)
    size = chunk_size if any_length else min(chunk_size, time)
    chunks = (time + size - 1) // size
    parts = (F.pad(part, (0, 0, 0, chunks * size - time)) for part in (q, k, v))
    q, k, v = (part.unflatten(1, (chunks, size)) for part in parts)
    run = _fused_chunks if call.fused and not any_length else _chunks
    return crop(run(call, q, k, v).flatten(1, 2), time)


def _chunks(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each chunk (`[batch, chunks, size, features]`) to the one before, zeros for the first, and itself."""
    chunks, size = q.shape[1:3]
    before = (F.pad(part, (0, 0, 0, 0, 1, 0))[:, :-1].detach() for part in (k, v))
    k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
    place, chunk = torch.arange(2 * size, device=q.device), torch.arange(chunks, device=q.device)
    mask = (place <= place[size:].unsqueeze(1)) & ((chunk.view(-1, 1, 1) > 0) | (place >= size))
    return call.attend(_rotate(call, q, place[size:]), _rotate(call, k, place), v, mask=mask)


def _fused_chunks(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `_chunks` without a mask: the first chunk by itself."""
    size = q.shape[2]
    place = torch.arange(2 * size, device=q.device)
    own = place[:size]
    out = call.attend(_rotate(call, q[:, :1], own), _rotate(call, k[:, :1], own), v[:, :1], causal=True)
    if q.shape[1] == 1:
        return out
    k, v = (torch.cat([part[:, :-1].detach(), part[:, 1:]], 2) for part in (k, v))
    rest = call.attend(_rotate(call, q[:, 1:], place[size:]), _rotate(call, k, place), v, causal=True)
    return torch.cat([out, rest], 1)


def _chunk_by_chunk(
    call: AttentionCall, chunk_size: int, state: AttentionState, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attend from many queries: put them into the slots of their keys, from the start of the memory on."""
    time, ring = q.shape[1], 2 * chunk_size
    start = (state.position // chunk_size - 1).clamp(min=0) * chunk_size
    fill = state.position - start
    slots = ring - 1 + time
    slots += -slots % chunk_size
    order = (start.unsqueeze(1) + torch.arange(ring, device=q.device)) % ring
    k = line_up(take_time(state.keys, order), k, fill, slots)
    v = line_up(take_time(state.values, order), v, fill, slots)
    out = _from_start(call, chunk_size, queries_in_slots(q, fill, slots).to(k.dtype), k, v)
    return outputs_of_queries(out, fill, time)


def _over_all_slots(
    call: AttentionCall, chunk_size: int, state: AttentionState, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attend from a few queries to all slots and the new keys. Gradients would flow into the memory."""
    query = state.position.unsqueeze(1) + torch.arange(q.shape[1], device=q.device)
    key = torch.cat([_held(state), query], 1)
    k, v = torch.cat([state.keys, k.to(state.keys.dtype)], 1), torch.cat([state.values, v.to(state.values.dtype)], 1)
    return _attend_by_position(call, chunk_size, q, k, v, query, key)


def _step(
    call: AttentionCall, chunk_size: int, state: AttentionState, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, AttentionState | None]:
    """Attend from one query. Its key overwrites one that no query sees any more."""
    query = state.position.unsqueeze(1) + 0  # a copy: calls with `inplace` write to the position
    new = _push(call, state, k, v)
    keys, values, key = new.keys, new.values, _held(new)
    if keys.requires_grad or values.requires_grad:
        own = (key >= query // chunk_size * chunk_size).unsqueeze(-1)
        keys, values = (torch.where(own, part, part.detach()) for part in (keys, values))
    return _attend_by_position(call, chunk_size, q, keys, values, query, key), new if call.return_state else None


def _held(state: AttentionState) -> Tensor:
    """Return the position of the key in each slot, `[batch, slots]`; negative if there is none."""
    size, last = state.keys.shape[1], state.position.unsqueeze(1) - 1
    return last - (last - torch.arange(size, device=last.device)) % size


def _attend_by_position(
    call: AttentionCall, chunk_size: int, q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """Attend from queries at the positions `query` (`[batch, queries]`) to keys at `key` (`[batch, keys]`)."""
    first = (query // chunk_size - 1) * chunk_size
    seen = key.unsqueeze(1)
    mask = (seen >= first.clamp(min=0).unsqueeze(-1)) & (seen <= query.unsqueeze(-1))
    start = first[:, :1]
    return call.attend(_rotate(call, q, query - start), _rotate(call, k, key - start), v, mask=mask)
