"""Associative recall: pairs of keys and values, then a key whose value is to be named.

The first half of the vocabulary are keys, the second half values. Each sequence draws its own map from keys to values,
then `length / 2` random keys, each followed by its value, then one of those keys once more: `a 2 c 4 b 3 a`, answer 2.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from tcnca.data.columns import Column
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """A generator of sequences of `length + 1` tokens."""

    version: ClassVar[int] = 1

    length: int = 64
    """Tokens before the question, two for each pair."""
    vocab_size: int = 10
    """Keys and values together."""

    def __post_init__(self) -> None:
        if self.length < 2 or self.length % 2:
            raise ConfigError(f"length: got {self.length}, allowed are even numbers from 2: a key and a value a pair")
        if not 4 <= self.vocab_size <= 256 or self.vocab_size % 2:
            raise ConfigError(f"vocabulary: got {self.vocab_size}, allowed are even numbers from 4 to 256")

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the tokens: letters for keys and numbers for values."""
        half = self.vocab_size // 2
        letters = "abcdefghijklmnopqrstuvwxyz"
        keys = letters if half <= len(letters) else [f"k{key}" for key in range(half)]
        return (*keys[:half], *(str(value) for value in range(1, half + 1)))

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """`count` sequences: `tokens`, uint8 `[count, length + 1]`, and `labels`, the values asked for."""
        half = self.vocab_size // 2
        values = draw.integers(half, self.vocab_size, count, half)
        keys = draw.integers(0, half, count, self.length // 2)
        # One of the keys that occur, each as likely as the others: the occurring key of the largest random number.
        row = np.arange(count)
        occurs = np.zeros((count, half), bool)
        occurs[row[:, None], keys] = True
        asked = np.where(occurs, draw.uniform(count, half), -1.0).argmax(axis=1)
        tokens = np.empty((count, self.length + 1), np.uint8)
        tokens[:, :-1:2] = keys
        tokens[:, 1::2] = values[row[:, None], keys]
        tokens[:, -1] = asked
        return {"tokens": tokens, "labels": values[row, asked]}
