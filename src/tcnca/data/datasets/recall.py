"""Associative recall: key-value pairs, then a key whose value the model names.

The first half of the vocabulary are keys, the second half values. Each sequence draws its own map from keys to values,
then `length / 2` random keys, each followed by its value, then one of those keys again: `a 2 c 4 b 3 a`, answer 2.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from tcnca.data.datasets.spec import DatasetSpec
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import Column
from tcnca.data.tasks import RecallTask
from tcnca.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """Generator of sequences of `length + 1` tokens."""

    version: ClassVar[int] = 1

    length: int = 64
    """Tokens before the query, two per pair."""
    vocab_size: int = 10
    """Number of keys and values together."""

    def __post_init__(self) -> None:
        if self.length < 2 or self.length % 2:
            raise ConfigError(f"length: expected an even number of at least 2, got {self.length}")
        if not 4 <= self.vocab_size <= 256 or self.vocab_size % 2:
            raise ConfigError(f"vocab_size: expected an even number from 4 to 256, got {self.vocab_size}")

    def __repr__(self) -> str:
        # Part of the seed: this text keeps the examples of version 1.
        return f"Recall(length={self.length}, vocabulary={self.vocab_size})"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the tokens: letters for keys and numbers for values."""
        half = self.vocab_size // 2
        letters = "abcdefghijklmnopqrstuvwxyz"
        keys = letters if half <= len(letters) else [f"k{key}" for key in range(half)]
        return (*keys[:half], *(str(value) for value in range(1, half + 1)))

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate `count` sequences: `tokens`, uint8 `[count, length + 1]`, and `labels`, the values asked for."""
        half = self.vocab_size // 2
        values = rng.integers(half, self.vocab_size, count, half)
        keys = rng.integers(0, half, count, self.length // 2)
        # The query is one of the keys that occur, all equally likely: the one with the largest random number.
        row = np.arange(count)
        occurs = np.zeros((count, half), bool)
        occurs[row[:, None], keys] = True
        query = np.where(occurs, rng.uniform(count, half), -1.0).argmax(axis=1)
        tokens = np.empty((count, self.length + 1), np.uint8)
        tokens[:, :-1:2] = keys
        tokens[:, 1::2] = values[row[:, None], keys]
        tokens[:, -1] = query
        return {"tokens": tokens, "labels": values[row, query]}


def recall_dataset(length: int = 64, vocab_size: int = 10) -> DatasetSpec:
    """Return the data set of a length and a vocabulary."""
    generator = Recall(length=length, vocab_size=vocab_size)
    sizes = {"train": 5_000, "validation": 500, "test": 500}
    return DatasetSpec(
        name=f"recall-{length}-{vocab_size}",
        title=f"Associative recall, length {length}, vocab_size {vocab_size}",
        description="name the value that followed a key",
        source="generated",
        sizes=sizes,
        disk_bytes=sum(sizes.values()) * (length + 9),
        task=RecallTask,
        metadata={"symbols": list(generator.symbols), "class_names": list(generator.symbols)},
        generator=generator,
    )


RECALL_DATASETS = tuple(recall_dataset(length, size) for size in (10, 20) for length in (64, 1024, 4096, 8192))
