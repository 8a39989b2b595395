"""Chunked attention as a module: it owns the position bias."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tcnca.config import Config, check_at_least, check_choice, check_probability
from tcnca.errors import ConfigError, InputError
from tcnca.ops import (
    ATTENTION_ACTIVATIONS,
    AttentionActivation,
    AttentionState,
    chunked_attention,
    initial_attention_state,
    required_max_length,
    rotary_bias,
    rotate,
)

Position = Literal["none", "simple", "rotary", "rope"]


def check_reach(name: str, chunk_size: int | None, reach: int) -> None:
    """Raise a ConfigError if a `simple` position bias is too short for the chunk."""
    if chunk_size is not None and chunk_size > reach:
        raise ConfigError(
            f"{name}: got {chunk_size}, allowed is at most {reach}, as far as the simple position bias reaches; "
            f"attention.max_length sets how far before training, and rotary and rope positions have no such limit"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Attention of one head inside chunks."""

    d_key: int = 64
    """Width of queries and keys (the paper's z)."""
    d_value: int = 128
    """Width of values (the paper's v)."""
    chunk_size: int | None = 128
    """Tokens in a chunk (the paper's C); None for attention over everything."""
    activation: AttentionActivation = "softmax"
    """Turns scores into weights."""
    position: Position = "simple"
    """`simple`: a learned bias for each offset. `rotary`: MEGA's rotary bias. `rope`: true rotary embeddings
    on queries and keys. `none`."""
    max_length: int | None = None
    """How many tokens a `simple` bias reaches over; by default the chunk. Needed without chunks."""
    dropout: float = 0.0
    """Dropout of attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("attention.d_key", self.d_key, 1)
        check_at_least("attention.d_value", self.d_value, 1)
        for name in ("chunk_size", "max_length"):
            if getattr(self, name) is not None:
                check_at_least(f"attention.{name}", getattr(self, name), 1)
        check_choice("attention.activation", self.activation, ATTENTION_ACTIVATIONS)
        check_choice("attention.position", self.position, get_args(Position))
        check_probability("attention.dropout", self.dropout)
        if self.position in ("rotary", "rope") and self.d_key % 2:
            raise ConfigError(
                f"attention.d_key: got {self.d_key}, allowed is an even number, as position "
                f"{self.position!r} turns pairs"
            )
        if self.position == "simple":
            check_reach("attention.chunk_size", self.chunk_size, self.reach)

    @property
    def reach(self) -> int:
        """How many tokens a `simple` bias reaches over."""
        reach = self.chunk_size if self.max_length is None else self.max_length
        if reach is None:
            raise ConfigError(
                "attention.max_length: got None, allowed is a whole number: a simple bias without chunks needs a length"
            )
        return reach


class ChunkedAttention(nn.Module):
    """Attention of one head inside chunks, between queries, keys and values made elsewhere."""

    def __init__(self, config: AttentionConfig, causal: bool = True) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        if config.position == "simple":
            self.bias = nn.Parameter(torch.empty(2 * config.reach - 1))
        elif config.position == "rotary":
            self.alpha = nn.Parameter(torch.empty(config.d_key))
            self.beta = nn.Parameter(torch.empty(config.d_key))
        self.reset_parameters()

    @property
    def chunk_size(self) -> int | None:
        """Tokens in a chunk; None for attention over everything."""
        return self.config.chunk_size

    def reset_parameters(self) -> None:
        """Draw new position parameters."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def set_chunk_size(self, chunk_size: int | None) -> None:
        """Attend in chunks of another size from now on; a simple bias must reach that far."""
        if chunk_size is not None:
            check_at_least("chunk_size", chunk_size, 1)
        reach = self.config.max_length
        if self.config.position == "simple":
            reach = self.config.reach
            check_reach("chunk_size", chunk_size, reach)
        self.config = dataclasses.replace(self.config, chunk_size=chunk_size, max_length=reach)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        state: AttentionState | None = None,
        return_state: bool = False,
        inplace: bool = False,
    ) -> tuple[Tensor, AttentionState | None]:
        """`q`, `k` `[batch, time, d_key]` and `v` `[batch, time, d_value]` to `[batch, time, d_value]`.

        The other arguments are those of `tcnca.ops.chunked_attention`.
        """
        if self.config.position == "rope":
            positions = torch.arange(q.shape[1], device=q.device)
            if state is not None:
                positions = state.position.unsqueeze(1) + positions
            # Only differences inside a chunk matter, and small angles are exact.
            positions = positions if self.chunk_size is None else positions % self.chunk_size
            q, k = rotate(q, positions), rotate(k, positions)
        return chunked_attention(
            q,
            k,
            v,
            chunk_size=self.chunk_size,
            causal=self.causal,
            activation=self.config.activation,
            bias=self._bias(q.shape[1], lengths, state, return_state),
            dropout=self.config.dropout if self.training else 0.0,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> AttentionState:
        """The state before the first token."""
        return initial_attention_state(batch, self.config.d_key, self.config.d_value, self.chunk_size, device, dtype)

    def macs(self, length: int) -> int:
        """Multiplications and additions for one token of a sequence of `length`, counted in pairs, on average."""
        chunk = min(self.chunk_size or length, length)
        keys = (chunk + 1) // 2 if self.causal else chunk
        return keys * (self.config.d_key + self.config.d_value)

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
                f"x: got {reach} tokens, those of earlier calls counted, allowed are at most {limit}, "
                f"as far as the simple position bias reaches (attention.max_length)"
            )
        return self.bias

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        c = self.config
        return f"chunk_size={self.chunk_size}, activation={c.activation}, position={c.position}, causal={self.causal}"
