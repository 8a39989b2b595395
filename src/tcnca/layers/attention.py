"""Chunked attention as a module: it owns the position bias."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tcnca.errors import InputError
from tcnca.layers.config import AttentionConfig, check_at_least, check_reach
from tcnca.ops import (
    AttentionState,
    chunked_attention,
    initial_attention_state,
    needed_reach,
    rotary_bias,
    rotate,
)


class ChunkedAttention(nn.Module):
    """Attention of one head inside chunks, between queries, keys and values made elsewhere."""

    def __init__(self, config: AttentionConfig, causal: bool = True) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        if config.position == "simple":
            self.bias = nn.Parameter(torch.empty(2 * config.reach - 1))
        elif config.position == "rotary":
            self.alpha = nn.Parameter(torch.empty(config.key_width))
            self.beta = nn.Parameter(torch.empty(config.key_width))
        self.reset_parameters()

    @property
    def chunk(self) -> int | None:
        """Tokens in a chunk; None for attention over everything."""
        return self.config.chunk

    def reset_parameters(self) -> None:
        """Draw new position parameters."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def set_chunk(self, chunk: int | None) -> None:
        """Attend in chunks of another size from now on; a simple bias must reach that far."""
        if chunk is not None:
            check_at_least("chunk", chunk, 1)
        reach = self.config.max_length
        if self.config.position == "simple":
            reach = self.config.reach
            check_reach("chunk", chunk, reach)
        self.config = dataclasses.replace(self.config, chunk=chunk, max_length=reach)

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
        """`q`, `k` `[batch, time, key_width]` and `v` `[batch, time, value_width]` to `[batch, time, value_width]`.

        The other arguments are those of `tcnca.ops.chunked_attention`.
        """
        if self.config.position == "rope":
            positions = torch.arange(q.shape[1], device=q.device)
            if state is not None:
                positions = state.position.unsqueeze(1) + positions
            # Only differences inside a chunk matter, and small angles are exact.
            positions = positions if self.chunk is None else positions % self.chunk
            q, k = rotate(q, positions), rotate(k, positions)
        return chunked_attention(
            q,
            k,
            v,
            chunk=self.chunk,
            causal=self.causal,
            function=self.config.function,
            bias=self._bias(q.shape[1], lengths, state, return_state),
            dropout=self.config.dropout if self.training else 0.0,
            lengths=lengths,
            state=state,
            return_state=return_state,
            inplace=inplace,
        )

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> AttentionState:
        """The state before the first token."""
        return initial_attention_state(batch, self.config.key_width, self.config.value_width, self.chunk, device, dtype)

    def macs(self, length: int) -> int:
        """Multiplications and additions for one token of a sequence of `length`, counted in pairs, on average."""
        chunk = min(self.chunk or length, length)
        keys = (chunk + 1) // 2 if self.causal else chunk
        return keys * (self.config.key_width + self.config.value_width)

    def _bias(
        self, time: int, lengths: Tensor | None, state: AttentionState | None, return_state: bool
    ) -> Tensor | None:
        if self.config.position not in ("simple", "rotary"):
            return None
        limit = self.config.reach if self.config.position == "simple" else None
        reach = needed_reach(time, self.chunk, lengths, state, return_state, limit)
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
        return f"chunk={self.chunk}, function={c.function}, position={c.position}, causal={self.causal}"
