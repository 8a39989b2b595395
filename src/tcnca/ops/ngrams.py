"""Hashes of n-grams: a row of a table for the last tokens at each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tcnca.ops.context import current_context
from tcnca.ops.padding import take_time
from tcnca.ops.state import State

# Products of a token and a factor, which is below the prime, fit 64 bits.
HASH_PRIME = 2**31 - 1
HASH_BASE = 630_360_016


@dataclasses.dataclass(frozen=True)
class NGramState(State):
    """The tokens that n-grams of later tokens reach.

    Attributes:
        tokens: `[batch, max(sizes) - 1]`, the last tokens. They are stored plus one, since 0 means that there was none.
    """

    _replaced: ClassVar[bool] = True
    tokens: Tensor


def initial_ngram_state(batch: int, sizes: Sequence[int], device: torch.device | None = None) -> NGramState:
    """Return the state before the first token."""
    return NGramState(torch.zeros(batch, max(sizes) - 1, dtype=torch.long, device=device))


def hash_factors(sizes: Sequence[int]) -> list[int]:
    """Return by what a hash multiplies the last token, the one before it, and so on."""
    return [pow(HASH_BASE, lag + 1, HASH_PRIME) for lag in range(max(sizes))]


def hash_ngrams(tokens: Tensor, sizes: Sequence[int], buckets: int, state: NGramState | None = None) -> Tensor:
    """Return the rows of a table that belong to the n-grams which end at each token, `[batch, time, len(sizes)]`.

    With `x` the tokens plus one, and 0 before the first token, the row of an n-gram of `n` tokens at time `t` is
    `(Σ_i x[t - i] · a^(i + 1) mod p) mod buckets`, `i` from 0 to `n - 1`. Different n-grams can share a row.

    Args:
        tokens: `[batch, time]`, int64, 0 or more.
        sizes: numbers of tokens of the n-grams, in increasing order.
        buckets: rows for each size. Those of the first size come first.
        state: the state after the preceding tokens; None at the start of the sequence.
    """
    time, past = tokens.shape[1], max(sizes) - 1
    x = _with_past(tokens, past, state)
    rows: list[Tensor] = []
    total = torch.zeros_like(tokens)
    for lag, factor in enumerate(hash_factors(sizes)):
        total = (total + x[:, past - lag : past - lag + time] * factor) % HASH_PRIME
        if lag + 1 in sizes:
            rows.append(total % buckets + len(rows) * buckets)
    return torch.stack(rows, -1)


def next_ngram_state(
    tokens: Tensor, sizes: Sequence[int], lengths: Tensor | None = None, state: NGramState | None = None
) -> NGramState:
    """Return the state after tokens `[batch, time]`, of which `lengths` (`[batch]`) are valid, the rest is padding."""
    time, past, context = tokens.shape[1], max(sizes) - 1, current_context()
    x = _with_past(tokens, past, state)
    last = x[:, time:].clone()
    if lengths is not None:
        index = lengths.unsqueeze(1) + torch.arange(past, device=x.device)
        last = take_time(x.unsqueeze(-1), index).squeeze(-1)
    if context is not None:
        last = context.pick(last, context.last_rank(lengths, last, time))
    return NGramState(last)


def _with_past(tokens: Tensor, past: int, state: NGramState | None) -> Tensor:
    """Return the tokens plus one, after the `past` tokens before them: `[batch, past + time]`."""
    x, context = tokens + 1, current_context()
    before = tokens.new_zeros(tokens.shape[0], past) if state is None else state.tokens
    if context is not None:
        extended, left = context.extend(x, past)
        before = torch.cat([before, extended[:, :left]], 1)[:, -past:]
    return torch.cat([before, x], 1)
