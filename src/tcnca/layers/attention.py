"""Chunked attention as a module, which owns the position bias."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnca.config import Config, Fraction, Probability, TokenCount, Width
from tcnca.errors import ConfigError, InputError
from tcnca.layers.linear import WEIGHT_STD, init_normal
from tcnca.layers.norm import rms_norm
from tcnca.ops import (
    AttentionActivation,
    AttentionState,
    ContextParallel,
    advance,
    current_context,
    initial_attention_state,
    offset_bias,
    required_max_length,
    rotary_bias,
    rotate_heads,
    shift_keys,
    split_heads,
    zero_padding,
)
from tcnca.ops.attention.api import run_attention
from tcnca.ops.attention.naive import AttentionCall, bias_max_length, line_up, required_slots
from tcnca.ops.checks import check_state
from tcnca.ops.context import not_compiled
from tcnca.ops.ring import push_ring, unroll_ring

Position = Literal["none", "simple", "rotary", "rope"]
QK_EPS = 1e-10
"""Far below the mean square of queries and keys at the start of training, which can be 1e-7."""


class AttentionConfig(Config, kind="chunked"):
    """Attention inside chunks."""

    num_heads: Width = 1
    """Heads, each with an equal part of `d_key` and `d_value`. Several need `rope` or no positions."""
    d_key: Width = 64
    """Width of queries and keys of all heads (the paper's z)."""
    d_value: Width = 128
    """Width of values of all heads (the paper's v)."""
    chunk_size: TokenCount | None = 128
    """Tokens in a chunk (the paper's C); None for attention over the whole sequence."""
    memory: bool = False
    """Whether a chunk also sees the keys and values of the chunk before it, as in Transformer-XL. No gradient flows
    into them. Causal only; needs `rope` or no positions."""
    activation: AttentionActivation = "softmax"
    """Function that turns scores into weights."""
    position: Position = "simple"
    """`simple`: a learned bias for each offset. `rotary`: MEGA's rotary bias. `rope`: true rotary embeddings
    on queries and keys. `none`."""
    rope_fraction: Fraction = 1.0
    """Fraction of the features of each head that `rope` rotates. The others compare tokens wherever they are."""
    max_length: TokenCount | None = None
    """Tokens that a `simple` bias covers; by default those of a chunk. Required without chunks."""
    qk_norm: bool = False
    """Whether to normalize queries and keys of each head to a mean square of 1, with a learned scale of its scores."""
    shift_keys: bool = False
    """Whether each token has the key of the token before it: a query that matches finds what came next."""
    dropout: Probability = 0.0
    """Dropout of attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("d_key", "d_value"):
            width = getattr(self, name)
            if width % self.num_heads:
                raise ConfigError(
                    f"num_heads: expected a divisor of {name}, the width of all heads, {width}, got {self.num_heads}"
                )
        if (self.num_heads > 1 or self.memory) and self.position in ("simple", "rotary"):
            parts = "memory" if self.memory else "several heads"
            raise ConfigError(
                f"position: expected 'rope' or 'none' with {parts}, got {self.position!r}, a bias of one head and chunk"
            )
        if self.memory and self.chunk_size is None:
            raise ConfigError("memory: expected False without chunks, got True; set chunk_size")
        head = self.d_key // self.num_heads
        if self.position in ("rotary", "rope") and head % 2:
            each = "" if self.num_heads == 1 else f" for each of {self.num_heads} heads"
            raise ConfigError(
                f"d_key: expected an even number{each} for position {self.position!r}, which rotates pairs, got {head}"
            )
        if self.position == "rope" and not self.rope_width:
            raise ConfigError(
                f"rope_fraction: expected a pair of the {head} features or more, such as {2 / head:.2g}, "
                f"got {self.rope_fraction}; position='none' rotates none"
            )
        if self.position == "simple" and (self.chunk_size or 0) > self.reach:
            raise ConfigError(
                f"chunk_size: expected at most {self.reach}, the length of the simple position bias, got "
                f"{self.chunk_size}; set attention.max_length before training, or use rotary or rope positions, which "
                f"have no limit"
            )

    def check_causal(self, causal: bool) -> None:
        """Raise a ConfigError if a layer cannot be bidirectional."""
        if self.memory and not causal:
            raise ConfigError("memory: expected False for bidirectional attention, got True")

    @property
    def rope_width(self) -> int:
        """Features of each head that are rotated."""
        return 2 * round(self.rope_fraction * self.d_key / self.num_heads / 2) if self.position == "rope" else 0

    @property
    def reach(self) -> int:
        """Tokens that a `simple` bias covers."""
        reach = self.chunk_size if self.max_length is None else self.max_length
        if reach is None:
            raise ConfigError("max_length: expected an integer for a simple position bias without chunks, got None")
        return reach


class ChunkedAttention(nn.Module):
    """Attention inside chunks, for given queries, keys and values.

    Instead of a configuration, its fields can be passed: `ChunkedAttention(d_key=32, d_value=64)`.
    """

    def __init__(self, config: AttentionConfig | None = None, causal: bool = True, **fields: Any) -> None:
        super().__init__()
        self.config = config = AttentionConfig.of(config, fields)
        config.check_causal(causal)
        self.causal = causal
        if config.position == "simple":
            self.bias = nn.Parameter(torch.empty(2 * config.reach - 1))
        elif config.position == "rotary":
            self.alpha = nn.Parameter(torch.empty(config.d_key))
            self.beta = nn.Parameter(torch.empty(config.d_key))
        self.qk_scale = nn.Parameter(torch.empty(config.num_heads)) if config.qk_norm else None
        self.reset_parameters()

    @property
    def chunk_size(self) -> int | None:
        """Tokens in a chunk; None for attention over the whole sequence."""
        return self.config.chunk_size

    def reset_parameters(self) -> None:
        """Initialize the position parameters, and the scale of the scores to 1."""
        for parameter in self.parameters():
            init_normal(parameter, WEIGHT_STD)
        if self.qk_scale is not None:
            nn.init.ones_(self.qk_scale)

    def set_chunk_size(self, chunk_size: int | None) -> None:
        """Change the chunk size; a simple bias must cover it."""
        reach = self.config.reach if self.config.position == "simple" else self.config.max_length
        self.config = dataclasses.replace(self.config, chunk_size=chunk_size, max_length=reach)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        state: AttentionState | None = None,
        return_state: bool | None = None,
        inplace: bool = False,
    ) -> Tensor | tuple[Tensor, AttentionState]:
        """Attend inside chunks.

        Args:
            q: queries, `[batch, time, d_key]`.
            k: keys, `[batch, time, d_key]`.
            v: values, `[batch, time, d_value]`.
            lengths: `[batch]`, valid tokens of each row; the rest is padding.
            state: the state that the previous call returned; None at the start of the sequence. Causal only.
            return_state: whether to return the new state; by default if `state` is given.
            inplace: whether the memory of `state` may be reused. `state` must not be used again.

        Returns:
            `[batch, time, d_value]`, or a tuple of it and the new state.
        """
        return_state = state is not None if return_state is None else return_state
        context = current_context()
        if self.qk_scale is not None:
            q, k = self._normalize(q, self.qk_scale), self._normalize(k, None)
        last_key: Tensor | None = None
        if self.config.shift_keys:
            if state is not None:
                check_state("last_key", state.last_key, [k.shape[0], k.shape[2]])
            before = None if state is None else state.last_key
            if context is not None:
                before, k = context.previous(k, before)
            k, last_key = shift_keys(k, before, lengths)
        if self.config.position == "rope" and not self.config.memory:
            positions = torch.arange(q.shape[1], device=q.device)
            if context is not None:
                positions = positions + context.rank * q.shape[1]
            if state is not None:
                positions = state.position.unsqueeze(1) + positions
            # Only differences inside a chunk matter, and small angles are more precise.
            positions = positions if self.chunk_size is None else positions % self.chunk_size
            q, k = (rotate_heads(x, positions, self.config.num_heads, self.config.rope_width) for x in (q, k))
        call = AttentionCall(
            q=q,
            k=k,
            v=v,
            chunk_size=self.chunk_size,
            causal=self.causal,
            activation=self.config.activation,
            dropout=self.config.dropout if self.training else 0.0,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
            num_heads=self.config.num_heads,
            memory=self.config.memory,
            rope_width=self.config.rope_width if self.config.memory else 0,
        )
        y, new = self._attend(call) if context is None else self._attend_part(context, call)
        if not return_state:
            return y
        assert new is not None
        if last_key is not None:
            if context is not None:
                last_key = context.pick(last_key, context.last_rank(lengths, last_key, q.shape[1]))
            new = dataclasses.replace(new, last_key=last_key.to(new.keys.dtype))
        return y, new

    def _attend(self, call: AttentionCall) -> tuple[Tensor, AttentionState | None]:
        """Attend with the bias of this many tokens."""
        bias = self._bias(call.q.shape[1], call.lengths, call.state, call.return_state)
        return run_attention(dataclasses.replace(call, bias=bias))

    @not_compiled
    def _attend_part(self, context: ContextParallel, call: AttentionCall) -> tuple[Tensor, AttentionState | None]:
        """Attend in a part of a sequence. Nothing is exchanged if all parts consist of whole chunks."""
        size, lengths, time = call.chunk_size, call.lengths, call.q.shape[1]
        q, k, v = (zero_padding(part, lengths) for part in (call.q, call.k, call.v))
        call = dataclasses.replace(call, q=q, k=k, v=v, inplace=False)
        if size is None:
            return self._attend_to_all(context, call)
        if call.state is not None:
            before, k, v = self._state_before(context, call.state, k, v)
            y, new = self._attend(dataclasses.replace(call, k=k, v=v, state=before))
            return y, None if new is None else context.final_state(new, lengths, time)

        def window(rank: int) -> tuple[int, int]:
            begin, end = rank * time // size * size, (rank + 1) * time
            if self.config.memory:
                begin = max(begin - size, 0)
                # The state has the slots of two chunks: begin with an even one.
                begin -= begin % (2 * size) if call.return_state else 0
            return begin, end if self.causal else -(-end // size) * size

        windows, left = [window(rank) for rank in range(context.size)], 0
        if not context.aligned(windows, time):
            extended, left = context.fetch(_join(q, k, v), windows)
            valid = context.extended_lengths(lengths, time, left, extended.shape[1])
            q, k, v = _split(extended, q, k, v)
            call = dataclasses.replace(call, q=q, k=k, v=v, lengths=valid)
        y, new = self._attend(call)
        y = y[:, left : left + time]
        if new is None:
            return y, None
        new = dataclasses.replace(new, position=new.position + context.rank * time - left)
        return y, context.final_state(new, lengths, time)

    def _state_before(
        self, context: ContextParallel, state: AttentionState, k: Tensor, v: Tensor
    ) -> tuple[AttentionState, Tensor, Tensor]:
        """Return the state before this part, given that before the sequence, and the keys and values of the part."""
        slots, caches = state.keys.shape[1], (state.keys, state.values)
        extended, left = context.extend(_join(k, v), slots)
        if left < slots:
            past = _join(*(unroll_ring(cache, state.position) for cache in caches))
            extended, left = torch.cat([past.to(extended.dtype), extended], 1), left + slots
        position = state.position + context.rank * k.shape[1]
        keys, values = (
            push_ring(torch.zeros_like(cache), position - slots, part, None)
            for cache, part in zip(caches, _split(extended[:, left - slots : left], k, v), strict=True)
        )
        k, v = _split(extended[:, left:], k, v)
        return AttentionState(keys, values, position), k, v

    def _attend_to_all(self, context: ContextParallel, call: AttentionCall) -> tuple[Tensor, AttentionState | None]:
        """Attend without chunks: every process gets the keys and values of all."""
        q, lengths, state = call.q, call.lengths, call.state
        total, device = context.size * q.shape[1], q.device
        k, v = _split(context.unshard(_join(call.k, call.v)), call.k, call.v)
        whole = None if lengths is None else context.whole_lengths(lengths)
        fill = torch.zeros(q.shape[0], dtype=torch.long, device=device) if state is None else state.position
        end = advance(fill, total, whole)
        bias = self._bias(total, whole, state, call.return_state)
        cached = 0 if state is None else state.keys.shape[1]
        slots = required_slots(cached, end, total, whole, None if bias is None else bias_max_length(bias))
        if state is None:
            k, v = k.to(q.dtype)[:, :slots], v.to(q.dtype)[:, :slots]
        else:
            k, v = line_up(state.keys, k, fill, slots), line_up(state.values, v, fill, slots)
        query = fill.unsqueeze(1) + context.rank * q.shape[1] + torch.arange(q.shape[1], device=device)
        key = torch.arange(slots, device=device)
        mask = key < end.view(-1, 1, 1)
        mask = mask & (key <= query.unsqueeze(-1)) if self.causal else mask
        y = call.attend(q.to(k.dtype), k, v, None if bias is None else offset_bias(bias, query, key), mask)
        return y, AttentionState(k, v, end) if call.return_state else None

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> AttentionState:
        """Return the state before the first token."""
        c = self.config
        slots = 2 * c.chunk_size if c.memory and c.chunk_size is not None else c.chunk_size
        state = initial_attention_state(batch, c.d_key, c.d_value, slots, device, dtype)
        return dataclasses.replace(state, last_key=state.keys.new_zeros(batch, c.d_key)) if c.shift_keys else state

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token of a sequence of `length`, on average."""
        chunk = min(self.chunk_size or length, length)
        keys = (chunk + 1) // 2 if self.causal else chunk
        # All tokens but those of the first chunk see the one before.
        keys += (length - chunk) * chunk // length if self.config.memory else 0
        return keys * (self.config.d_key + self.config.d_value)

    @property
    def signature(self) -> str:
        """What two attentions must share for one to continue from a state of the other."""
        c = self.config
        options = "".join(f", {name}" for name in ("qk_norm", "shift_keys", "memory") if getattr(c, name))
        options += f", num_heads={c.num_heads}" if c.num_heads > 1 else ""
        options += f", rope_width={c.rope_width}" if 0 < c.rope_width < c.d_key // c.num_heads else ""
        return (
            f"ChunkedAttention(chunk_size={c.chunk_size}, d_key={c.d_key}, d_value={c.d_value}, "
            f"activation={c.activation}, position={c.position}{options})"
        )

    def _normalize(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Normalize the features of each head; `scale` is `[num_heads]`."""
        if self.config.num_heads == 1:
            return rms_norm(x, scale, QK_EPS)
        heads = split_heads(x, self.config.num_heads)
        return rms_norm(heads, None if scale is None else scale.unsqueeze(-1), QK_EPS).flatten(-2)

    def _bias(
        self, time: int, lengths: Tensor | None, state: AttentionState | None, return_state: bool
    ) -> Tensor | None:
        if self.config.position not in ("simple", "rotary"):
            return None
        limit = self.config.reach if self.config.position == "simple" else None
        reach = required_max_length(time, self.chunk_size, lengths, state, return_state, limit)
        if limit is None:
            return rotary_bias(self.alpha, self.beta, reach)
        if reach > limit:
            raise InputError(
                f"x: expected at most {limit} tokens, including those of earlier calls, got {reach}; the simple "
                f"position bias reaches no further (attention.max_length)"
            )
        return self.bias

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"{self.config}, causal={self.causal}"


def _join(*parts: Tensor) -> Tensor:
    """Return the features of all parts side by side, in a dtype that holds them all."""
    return torch.cat(parts, -1)


def _split(joined: Tensor, *like: Tensor) -> list[Tensor]:
    """Return what `_join` joined, with the widths and dtypes of `like`."""
    parts = joined.split([each.shape[-1] for each in like], -1)
    return [part.to(each.dtype) for part, each in zip(parts, like, strict=True)]
