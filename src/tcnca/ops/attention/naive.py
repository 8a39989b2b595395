"""Chunked attention in PyTorch's own operators: whole sequences, and sequences that continue from a state.

Features of queries, keys and values are those of all heads, one head after the other. Heads are apart in `attend` only.

Queries see the keys of their own chunk `[0, C), [C, 2C), …` and no others. The state holds the keys and values of the
unfinished chunk: one slot for each place in it, so that a token is written where its position says and nothing moves.
With full attention the whole past is one chunk and the cache grows. Rows may be at different positions: each has its
own fill, the number of valid slots.

A position bias is a vector of `2 · max_length - 1` values: index `key - query + max_length - 1` holds that offset's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.activations import laplace, relu2
from tcnca.ops.checks import is_traced
from tcnca.ops.dropout import dropout as drop
from tcnca.ops.padding import advance, length_mask, take_time, zero_padding
from tcnca.ops.ring import common_position, is_host_readable
from tcnca.ops.state import State

AttentionActivation = Literal["softmax", "relu2", "laplace"]
ATTENTION_ACTIVATIONS: tuple[str, ...] = get_args(AttentionActivation)
ROTARY_BASE = 10000.0
_QUERY_BLOCK = 256
"""Queries of a causal call that attend together on a CPU."""
_MAX_GRID = 65_535
"""Rows times heads of one call of PyTorch's fused attention on a GPU, whose grids have no more blocks."""


@dataclasses.dataclass(frozen=True)
class AttentionState(State):
    """Keys and values of the unfinished chunk.

    Attributes:
        keys: `[batch, slots, d_key]`; slot `j` holds place `j` of the chunk. There are as many slots as the chunk has
            tokens; for full attention at least as many as the longest row has. With memory there are the slots of two
            chunks, and time `t` is in slot `t mod slots`.
        values: `[batch, slots, d_value]`.
        position: `[batch]`, tokens seen so far.
        last_key: `[batch, d_key]`, the key of the last token before it is rotated, if keys are shifted; else None.
    """

    _rings: ClassVar[frozenset[str]] = frozenset({"keys", "values"})

    keys: Tensor
    values: Tensor
    position: Tensor
    last_key: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of `chunked_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    chunk_size: int | None
    causal: bool
    activation: str
    bias: Tensor | None = None
    dropout: float = 0.0
    lengths: Tensor | None = None
    state: AttentionState | None = None
    return_state: bool = False
    inplace: bool = False
    num_heads: int = 1
    memory: bool = False
    rope_width: int = 0
    fused: bool = False
    """Whether `scaled_dot_product_attention` runs what it can."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Call `attend` for each head, with this call's activation and dropout.

        `valid` (`[…, 1, keys]`) is false for keys of the padding, which is at the right. With `causal`, query `i` of
        `n` sees all but the last `n - 1 - i` keys.
        """
        on_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
        apart = self.num_heads > 1 or self.fused
        if apart:
            q, k, v = (split_heads(part, self.num_heads).transpose(-2, -3) for part in (q, k, v))
            mask, valid = (None if part is None else part.unsqueeze(-3) for part in (mask, valid))
        if self.fused and mask is None:
            out = fused_attend(q, k, v, valid=valid, causal=causal, dropout=self.dropout)
        elif causal and on_cpu and q.shape[-2] > _QUERY_BLOCK:
            out = self._attend_in_blocks(q, k, v, bias, valid)
        else:
            mask = _causal_mask(q, k) if causal else mask
            if valid is not None:
                mask = valid if mask is None else valid & mask
            out = attend(q, k, v, activation=self.activation, bias=bias, mask=mask, dropout=self.dropout)
        return out.transpose(-2, -3).flatten(-2) if apart else out

    def _attend_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, valid: Tensor | None) -> Tensor:
        """Attend causally in blocks of queries, each to the keys that it can see.

        That is half of the work, in tensors that fit into caches.
        """
        k, v = _move_to_keys(k, v)
        queries, outputs = q.shape[-2], []
        for first in range(0, queries, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, queries)
            seen = k.shape[-2] - queries + last
            block, keys, values = q[..., first:last, :], k[..., :seen, :], v[..., :seen, :]
            mask = _causal_mask(block, keys)
            mask = mask if valid is None else valid[..., :seen] & mask
            block_bias = None if bias is None else bias[..., first:last, :seen]
            outputs.append(_attend(block, keys, values, self.activation, block_bias, mask, self.dropout))
        return torch.cat(outputs, -2)


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Return which keys the last queries of a sequence see, `[queries, keys]`."""
    key = torch.arange(k.shape[-2], device=q.device)
    return key <= key[k.shape[-2] - q.shape[-2] :].unsqueeze(1)


def initial_attention_state(
    batch: int,
    d_key: int,
    d_value: int,
    chunk_size: int | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionState:
    """Return the state before the first token."""
    slots = 0 if chunk_size is None else chunk_size
    return AttentionState(
        torch.zeros(batch, slots, d_key, device=device, dtype=dtype),
        torch.zeros(batch, slots, d_value, device=device, dtype=dtype),
        torch.zeros(batch, dtype=torch.long, device=device),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    activation: str = "softmax",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `weights(q kᵀ) v`.

    `softmax` scales the scores by `d_key^-½`; `relu2` and `laplace` divide them by the number of visible keys.
    A query that sees no key gets zeros. With a mask, an output has the same bits whatever the keys and values are that
    its query does not see, infinity and NaN included; one that sees an infinity or NaN is NaN.

    Args:
        q: `[…, queries, d_key]`.
        k: `[…, keys, d_key]`.
        v: `[…, keys, d_value]`.
        bias: added to the scores, broadcast to `[…, queries, keys]`.
        mask: true where a query may look, broadcast to `[…, queries, keys]`.
        dropout: probability of dropping a weight.

    Returns:
        `[…, queries, d_value]`.
    """
    if mask is not None:
        k, v = _move_to_keys(k, v)
    return _attend(q, k, v, activation, bias, mask, dropout)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, activation: str, bias: Tensor | None, mask: Tensor | None, dropout: float
) -> Tensor:
    """Compute `attend`; with a mask, values are finite."""
    if activation == "softmax":
        weights = _softmax_weights(q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2), bias, mask)
    else:
        visible = k.shape[-2] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        scores = q @ k.transpose(-1, -2) / visible
        scores = scores if bias is None else scores + bias
        weights = relu2(scores) if activation == "relu2" else laplace(scores)
        weights = weights if mask is None else weights.masked_fill(~mask, 0.0)
    if dropout > 0.0:
        weights = drop(weights, dropout)
    return weights.to(v.dtype) @ v


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return `x` (`[…, features]`) as `[…, heads, features of a head]`."""
    return x.unflatten(-1, (num_heads, -1))


def fused_attend(q: Tensor, k: Tensor, v: Tensor, *, valid: Tensor | None, causal: bool, dropout: float) -> Tensor:
    """Compute `attend` with the softmax by PyTorch's fused kernels, which keep no matrix of weights in memory.

    Takes `[…, heads, time, features]` and the other arguments of `AttentionCall.attend`, of which `valid` has no effect
    if causal: what is at the right of the valid keys is not seen anyway. Keys of the padding must be finite. A query
    that sees no key gets any output.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    mask = None
    if causal:
        # On a GPU infinity and NaN may reach earlier tokens, as in the other kernels.
        k, v = _move_to_keys(k, v) if q.device.type == "cpu" else (k, v)
        # The kernels align the first query with the first key.
        q = q if queries == keys else F.pad(q, (0, 0, keys - queries, 0))
    elif valid is not None:
        # Where no key is visible the kernels would give NaN.
        mask = valid | ~valid.any(-1, keepdim=True)
        mask = mask.expand(*q.shape[:-3], 1, 1, keys).flatten(0, -4)
    lead = q.shape[:-3]
    q, k, v = (part.flatten(0, -4) for part in (q, k, v))
    run = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout, is_causal=causal)
    rows = _MAX_GRID // q.shape[1]
    if q.device.type != "cuda" or len(q) <= rows:
        out = run(q, k, v, mask)
    else:
        parts = [slice(begin, begin + rows) for begin in range(0, len(q), rows)]
        out = torch.cat([run(q[part], k[part], v[part], None if mask is None else mask[part]) for part in parts])
    return out.unflatten(0, lead)[..., out.shape[-2] - queries :, :]


def _move_to_keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Move infinity and NaN from the values to the keys: a mask replaces their scores, but a weight of 0 keeps NaN."""
    # 0, or NaN where a value is not finite.
    flaw = (v.detach() * 0.0).sum(-1, keepdim=True)
    return k + flaw.to(k.dtype), torch.where(flaw == 0.0, v, 0.0)


def _softmax_weights(scores: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    scores = scores if bias is None else scores + bias
    precise = torch.promote_types(scores.dtype, torch.float32)
    if mask is None:
        return F.softmax(scores, -1, dtype=precise)
    # Where nothing is visible every score would be -inf and the softmax NaN.
    some = mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~mask & some, float("-inf"))
    return F.softmax(scores, -1, dtype=precise) * some


def rotate(x: Tensor, positions: Tensor, width: int | None = None) -> Tensor:
    """Rotate the pairs of `x` (`[…, time, features]`) by their positions (`[…, time]`, or what broadcasts to that).

    A pair is one value of each half of the first `width` features, by default of all. The others stay as they are.
    """
    width = x.shape[-1] if width is None else width
    precise = torch.promote_types(x.dtype, torch.float32)
    # Compiled with what uses them, sines and cosines take the compiler ten seconds. Exported programs have PyTorch's
    # operators only: they are not traced by Dynamo, unless `torch.export` is strict. (With PyTorch 2.11, `is_exporting`
    # cannot tell, as it is true whenever Dynamo traces.)
    table = _rotation_table if torch.compiler.is_dynamo_compiling() else rotation_table
    sine, cosine = (each.to(x.dtype) for each in table(positions, width // 2, precise))
    first, second, rest = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1)


def rotate_heads(x: Tensor, positions: Tensor, num_heads: int, width: int) -> Tensor:
    """Rotate the first `width` features of each head of `x` (`[…, time, features]`); see `rotate`."""
    if num_heads == 1:
        return rotate(x, positions, width)
    return rotate(split_heads(x, num_heads), positions.unsqueeze(-1), width).flatten(-2)


def rotation_table(positions: Tensor, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sines and cosines of the angles by which pairs are rotated, `[…, pairs]` each."""
    order = torch.arange(pairs, device=positions.device, dtype=dtype)
    angles = positions.to(dtype).unsqueeze(-1) * torch.exp(order * (-math.log(ROTARY_BASE) / pairs))
    return angles.sin(), angles.cos()


_rotation_table = torch.library.custom_op("tcnca::rotation_table", rotation_table, mutates_args=())


@_rotation_table.register_fake
def _(positions: Tensor, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    table = positions.new_empty(*positions.shape, pairs, dtype=dtype)
    return table, torch.empty_like(table)


def shift_keys(k: Tensor, last_key: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give each token of `k` (`[batch, time, d_key]`) the key of the token before it.

    `last_key` (`[batch, d_key]`) comes before the first token; None for zeros, at the start of a sequence. Also returns
    the key of the last valid token, `[batch, d_key]`.
    """
    last_key = k.new_zeros(k.shape[0], k.shape[2]) if last_key is None else last_key
    both = torch.cat([last_key.to(k.dtype).unsqueeze(1), k], 1)
    last = both[:, -1].clone() if lengths is None else take_time(both, lengths.unsqueeze(1)).squeeze(1)
    return both[:, :-1], last


def rotary_bias(alpha: Tensor, beta: Tensor, max_length: int) -> Tensor:
    """Return MEGA's rotary bias `⟨R_m α, R_n β⟩` of query `m` and key `n`, by `n - m`: `[2 · max_length - 1]`."""
    offsets = torch.arange(1 - max_length, max_length, device=alpha.device)
    return (alpha * rotate(beta.expand(2 * max_length - 1, -1), offsets)).sum(-1)


def bias_max_length(bias: Tensor) -> int:
    """Return the number of tokens that a position bias covers."""
    return (bias.shape[0] + 1) // 2


def chunk_bias(bias: Tensor, size: int) -> Tensor:
    """Return a position bias between the tokens of one chunk, `[size, size]` by query and key."""
    middle = bias_max_length(bias)
    # Repeated with a period one longer than a row, each row shows the values shifted by one. An index would give the
    # same, but its gradient is summed value by value.
    period = F.pad(bias[middle - size : middle + size - 1], (0, 1))
    rows = period.expand(size, -1).reshape(-1)[: size * (2 * size - 1)].view(size, 2 * size - 1)
    return rows[:, size - 1 :]


def offset_bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Look up a position bias for query positions `[…, queries]` and key positions `[…, keys]`."""
    offsets = key.unsqueeze(-2) - query.unsqueeze(-1)
    # Pairs of different chunks may be out of range; they are masked, so their value does not matter.
    return bias[(offsets + bias_max_length(bias) - 1).clamp(0, bias.shape[0] - 1)]


def naive_attention(call: AttentionCall) -> tuple[Tensor, AttentionState | None]:
    """Run a call; see `chunked_attention`."""
    # Weights of zero do not stop a NaN in the padding.
    q, k, v = (zero_padding(part, call.lengths) for part in (call.q, call.k, call.v))
    if call.state is not None:
        fill = _aligned_fill(call, call.state)
        if fill is not None:
            out, new = _continue_aligned(call, call.state, fill, q, k, v)
            return out, new if call.return_state else None
        few = call.chunk_size is None or q.shape[1] <= call.chunk_size
        out, new = continue_attention(call, call.state, q, k, v, _over_all_slots if few else _chunk_by_chunk)
        return out, new if call.return_state else None
    out = _from_start(call, q, k, v)
    return out, first_state(call, q, k, v) if call.return_state else None


def first_state(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
    """Return the state after the first tokens of a sequence, whose padding is zero."""
    # One dtype for both: under autocast values may be narrower than queries and keys.
    k, v = k.to(q.dtype), v.to(q.dtype)
    position = torch.zeros(k.shape[0], dtype=torch.long, device=k.device)
    end = advance(position, k.shape[1], call.lengths)
    if call.chunk_size is None:
        slots = required_slots(0, end, k.shape[1], call.lengths)
        # Copied: views would keep the memory of a whole projection, and change with it.
        k, v = (part[:, :slots].clone(memory_format=torch.contiguous_format) for part in (k, v))
        return AttentionState(k, v, end)
    if call.lengths is None and not torch.compiler.is_compiling():
        return AttentionState(_cache_of_end(k, call.chunk_size), _cache_of_end(v, call.chunk_size), end)
    return AttentionState(_last_chunk(k, end, call.chunk_size), _last_chunk(v, end, call.chunk_size), end)


def required_slots(cached: int, end: Tensor, time: int, lengths: Tensor | None, max_length: int | None = None) -> int:
    """Return the slots that full attention needs after `time` more tokens, when rows hold `end` (`[batch]`) tokens.

    With padding, or beyond the `max_length` of a bias, the number is read from the device, so that the cache does not
    grow by slots that no row fills; a compiled graph cannot read it and makes room for all.
    """
    most = cached + time
    known = lengths is None and (max_length is None or most <= max_length)
    return most if known or is_traced(end) else int(end.max())


def _from_start(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in sequences from their start, padded at the right to a multiple of the chunk and cropped again."""
    time, lengths = q.shape[1], call.lengths
    size = time if call.chunk_size is None else min(call.chunk_size, time)
    chunks = (time + size - 1) // size
    missing = chunks * size - time
    # A program that is exported for any length must not ask whether one is a multiple of the chunk.
    any_length = isinstance(time, torch.SymInt)
    if any_length or missing:
        q, k, v = (F.pad(part, (0, 0, 0, missing)) for part in (q, k, v))
        if lengths is None:
            lengths = torch.full((q.shape[0],), time, device=q.device)
    valid = None
    if lengths is not None:
        valid = length_mask(lengths, chunks * size).unflatten(1, (chunks, size)).unsqueeze(2)
    q, k, v = (part.unflatten(1, (chunks, size)) for part in (q, k, v))
    bias = None if call.bias is None else chunk_bias(call.bias, size)
    out = call.attend(q, k, v, bias, valid=valid, causal=call.causal).flatten(1, 2)
    return crop(out, time)


def crop(out: Tensor, time: int) -> Tensor:
    """Return the first `time` tokens of `out` (`[batch, tokens, features]`)."""
    # A program that is exported for any length must not ask whether these are all.
    any_length = isinstance(time, torch.SymInt)
    return out.index_select(1, torch.arange(time, device=out.device)) if any_length else out[:, :time]


def continue_attention(
    call: AttentionCall,
    state: AttentionState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, AttentionState]:
    """Attend causally from the next tokens, and return the state after them.

    `run` attends from queries to the keys and values of all slots: those of the state, then the new ones. It also takes
    how many slots of each row were filled before, and how many after the call.
    """
    time, chunk_size, lengths = q.shape[1], call.chunk_size, call.lengths
    fill = state.position if chunk_size is None else state.position % chunk_size
    if time == 1 and chunk_size is not None:
        slot = fill.unsqueeze(1)
        keys, values = _write(state.keys, slot, k, call.inplace), _write(state.values, slot, v, call.inplace)
        common = common_position(fill)
        filled = _filled_slots(fill, chunk_size) if common is None else common + 1
        places = torch.arange(filled, device=q.device)
        bias = None if call.bias is None else offset_bias(call.bias, slot, places)
        # Rows at one position see all slots that are filled.
        mask = (places <= slot).unsqueeze(1) if common is None else None
        out = call.attend(q, keys[:, :filled], values[:, :filled], bias, mask)
    else:
        end = advance(fill, time, lengths)
        if chunk_size is None:
            max_length = None if call.bias is None else bias_max_length(call.bias)
            slots = required_slots(state.keys.shape[1], end, time, lengths, max_length)
        else:
            slots = (int(fill.max()) if is_host_readable(fill) else chunk_size - 1) + time
            slots += -slots % chunk_size if time > chunk_size else 0
        lined_k, lined_v = line_up(state.keys, k, fill, slots), line_up(state.values, v, fill, slots)
        out = run(call, q, lined_k, lined_v, fill, end)
        keys, values = _last_chunk(lined_k, end, chunk_size), _last_chunk(lined_v, end, chunk_size)
    return out, AttentionState(keys, values, advance(state.position, time, lengths, call.inplace))


def _aligned_fill(call: AttentionCall, state: AttentionState) -> int | None:
    """Return the filled slots of all rows before a call; None if they differ or are not known.

    Also None for a single token of a chunk, for which `continue_attention` writes one slot of the cache.
    """
    if call.lengths is not None or (call.q.shape[1] == 1 and call.chunk_size is not None):
        return None
    return common_position(state.position if call.chunk_size is None else state.position % call.chunk_size)


def _continue_aligned(
    call: AttentionCall, state: AttentionState, fill: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, AttentionState]:
    """Attend from the next tokens of rows that all have `fill` filled slots: no queries or keys but those needed."""
    time, chunk_size = q.shape[1], call.chunk_size
    first = time if chunk_size is None else min(time, chunk_size - fill)  # tokens of the unfinished chunk
    k, v = k.to(state.keys.dtype), v.to(state.values.dtype)
    keys = torch.cat([state.keys[:, :fill], k[:, :first]], 1)
    values = torch.cat([state.values[:, :fill], v[:, :first]], 1)
    bias = None if call.bias is None else _last_rows(call.bias, first, fill + first)
    # The fused kernels also compute the outputs of all earlier keys. A single query sees all keys.
    causal = first > 1
    few = dataclasses.replace(call, fused=False) if causal and fill > 2 * first else call
    out = few.attend(q[:, :first], keys, values, bias, causal=causal)
    if first < time:
        q, k, v = (part[:, first:] for part in (q, k, v))
        out = torch.cat([out, _from_start(call, q, k, v)], 1)
    position = advance(state.position, time, None, call.inplace)
    if chunk_size is None:
        return out, AttentionState(keys, values, position)
    keys, values = (_cache_of_end(part, chunk_size) for part in ((keys, values) if first == time else (k, v)))
    return out, AttentionState(keys, values, position)


def _last_rows(bias: Tensor, queries: int, keys: int) -> Tensor:
    """Return a position bias between the last queries and all keys of a chunk so far, `[queries, keys]`."""
    middle = bias_max_length(bias)
    return bias[middle - keys : middle - 1 + queries].unfold(0, keys, 1).flip(0)


def _cache_of_end(x: Tensor, chunk_size: int) -> Tensor:
    """Return the cache after whole chunks and an unfinished one, `x` (`[batch, time, features]`)."""
    filled = x.shape[1] % chunk_size
    return F.pad(x[:, x.shape[1] - filled :], (0, 0, 0, chunk_size - filled))


def _filled_slots(fill: Tensor, chunk_size: int) -> int:
    """Return how many slots a step has to read: all of them, unless the number can be read."""
    return int(fill.max()) + 1 if is_host_readable(fill) else chunk_size


def _write(cache: Tensor, slot: Tensor, new: Tensor, inplace: bool) -> Tensor:
    # A row of length 0 is written too: its slot is not valid yet, and its next token overwrites it.
    index, new = slot.unsqueeze(-1).expand_as(new), new.to(cache.dtype)
    return cache.scatter_(1, index, new) if inplace else cache.scatter(1, index, new)


def line_up(cache: Tensor, new: Tensor, fill: Tensor, slots: int) -> Tensor:
    """Return each row's `fill` cached entries, then its new ones, `[batch, slots, channels]`; the rest is arbitrary."""
    both = torch.cat([cache, new.to(cache.dtype)], 1)
    place = torch.arange(slots, device=new.device)
    fill = fill.unsqueeze(1)
    index = torch.where(place < fill, place, place - fill + cache.shape[1])
    return take_time(both, index.clamp(max=both.shape[1] - 1))


def _last_chunk(lined: Tensor, end: Tensor, chunk_size: int | None) -> Tensor:
    """Return the chunk that holds slot `end`, the first one not written yet: the cache of the next call."""
    if chunk_size is None:
        return lined
    start = (end // chunk_size * chunk_size).unsqueeze(1)
    index = start + torch.arange(chunk_size, device=lined.device)
    return take_time(lined, index.clamp(max=lined.shape[1] - 1))


def _over_all_slots(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, fill: Tensor, end: Tensor) -> Tensor:
    """Attend from a few queries to all slots: cheap while there are fewer queries than a chunk has tokens."""
    query = fill.unsqueeze(1) + torch.arange(q.shape[1], device=q.device)
    key = torch.arange(k.shape[1], device=q.device)
    mask = (key <= query.unsqueeze(-1)) & (key < end.view(-1, 1, 1))
    if call.chunk_size is not None:
        mask = mask & (key // call.chunk_size == query.unsqueeze(-1) // call.chunk_size)
    return call.attend(q, k, v, None if call.bias is None else offset_bias(call.bias, query, key), mask)


def queries_in_slots(q: Tensor, fill: Tensor, slots: int) -> Tensor:
    """Put queries into the slots of their keys, `[batch, slots, d_key]`; the rest is arbitrary."""
    place = torch.arange(slots, device=q.device) - fill.unsqueeze(1)
    return take_time(q, place.clamp(0, q.shape[1] - 1))


def outputs_of_queries(out: Tensor, fill: Tensor, time: int) -> Tensor:
    """Return the outputs `[batch, time, d_value]` of the queries that were put into slots."""
    return take_time(out, fill.unsqueeze(1) + torch.arange(time, device=out.device))


def _chunk_by_chunk(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, fill: Tensor, end: Tensor) -> Tensor:
    """Attend from many queries: put them into the slots of their chunks as well, and attend chunk by chunk."""
    assert call.chunk_size is not None
    slots = torch.arange(k.shape[1], device=q.device)
    lined_q = queries_in_slots(q, fill, k.shape[1])
    valid = (slots < end.unsqueeze(1)).unflatten(1, (-1, call.chunk_size)).unsqueeze(2)
    bias = None if call.bias is None else chunk_bias(call.bias, call.chunk_size)
    lined = [part.unflatten(1, (-1, call.chunk_size)) for part in (lined_q, k, v)]
    out = call.attend(lined[0], lined[1], lined[2], bias, valid=valid, causal=True).flatten(1, 2)
    return outputs_of_queries(out, fill, q.shape[1])
