"""The answer of a sequence is the value that follows the query, and only the sequence determines it."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.datasets.recall import Recall
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

GENERATORS = [
    Recall(),
    Recall(length=2, vocab_size=4),
    Recall(length=4, vocab_size=6),
    Recall(length=6, vocab_size=256),
    Recall(length=300, vocab_size=20),
]

each_generator = pytest.mark.parametrize("generator", GENERATORS, ids=str)


def examples(generator: Recall, count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    made = generator.examples(CounterRNG("test", seed), count)
    tokens, labels = made["tokens"], made["labels"]
    assert isinstance(tokens, np.ndarray)
    assert isinstance(labels, np.ndarray)
    assert tokens.shape == (count, generator.length + 1)
    assert labels.shape == (count,)
    assert tokens.dtype == np.uint8
    assert labels.dtype == np.int64
    return tokens, labels


@each_generator
def test_answer_follows_the_key(generator: Recall) -> None:
    tokens, labels = examples(generator, 300)
    for sequence, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        *story, question = sequence
        last = max(place for place, token in enumerate(story) if token == question)
        assert story[last + 1] == label
        assert {story[place + 1] for place, token in enumerate(story) if token == question} == {label}


@each_generator
def test_keys_are_the_first_half_and_values_the_second(generator: Recall) -> None:
    tokens, labels = examples(generator, 300)
    half = generator.vocab_size // 2
    assert (tokens[:, ::2] < half).all()
    assert (tokens[:, 1::2] >= half).all()
    assert tokens.max() < generator.vocab_size
    assert labels.min() >= half
    assert labels.max() < generator.vocab_size


def test_keys_are_equally_likely_queries() -> None:
    """However often and wherever it occurs: a key seen three times in four pairs is asked half of the time."""
    tokens, _ = examples(Recall(length=8, vocab_size=4), 8000)
    often = asked = 0
    for sequence in tokens.tolist():
        occurrences = collections.Counter(sequence[:-1:2])
        if sorted(occurrences.values()) == [1, 3]:
            often += 1
            asked += occurrences[sequence[-1]] == 3
    assert often > 3000
    assert abs(asked / often - 0.5) < 3.5 * 0.5 / np.sqrt(often)


def test_invalid_lengths_and_vocabularies() -> None:
    for length in (-2, 0, 7):
        with pytest.raises(ConfigError, match=f"length: expected an even number of at least 2, got {length}"):
            Recall(length=length)
    for size in (2, 5, 258):
        with pytest.raises(ConfigError, match=f"vocab_size: expected an even number from 4 to 256, got {size}"):
            Recall(vocab_size=size)


@pytest.mark.parametrize("vocab_size", [4, 52, 54, 256])
def test_symbols_are_distinct(vocab_size: int) -> None:
    symbols = Recall(vocab_size=vocab_size).symbols
    assert len(set(symbols)) == len(symbols) == vocab_size
    assert all(symbol.isdigit() for symbol in symbols[vocab_size // 2 :])
    assert not any(symbol.isdigit() for symbol in symbols[: vocab_size // 2])
