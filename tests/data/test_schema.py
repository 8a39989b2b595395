"""Columns behave like lists of lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcnca.data.schema import Column, Ragged, concatenate, head, num_examples, take
from tests.data.helpers import ragged

NUMBERS = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=5), max_size=7)


def integers(sequences: list[list[int]]) -> Ragged:
    return ragged([np.array(sequence, np.int64) for sequence in sequences], np.int64)


def listed(column: Column) -> list[Any]:
    """Convert to lists, after a check that the offsets of a Ragged fit its values."""
    if isinstance(column, Ragged):
        assert column.offsets.dtype == np.int64
        assert (column.offsets[0], column.offsets[-1]) == (0, len(column.values))
        assert (column.lengths >= 0).all()
    return [np.asarray(column[index]).tolist() for index in range(len(column))]


@given(NUMBERS)
def test_ragged_is_a_list_of_lists(sequences: list[list[int]]) -> None:
    column = integers(sequences)
    assert listed(column) == sequences
    assert column.lengths.tolist() == [len(sequence) for sequence in sequences]
    for index in range(-len(sequences), 0):
        assert column[index].tolist() == sequences[index]
    with pytest.raises(IndexError):
        column[len(sequences)]


@given(st.lists(st.binary(max_size=6), max_size=7))
def test_byte_strings(texts: list[bytes]) -> None:
    column = Ragged.from_bytes(iter(texts))
    assert column.values.dtype == np.uint8
    assert [bytes(text) for text in listed(column)] == texts


@given(NUMBERS, st.data())
def test_take(sequences: list[list[int]], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=9) if sequences else st.just([]))
    labels = np.arange(len(sequences)) * 10
    taken = take({"tokens": integers(sequences), "labels": labels}, np.array(indices, np.int64))
    assert listed(taken["tokens"]) == [sequences[index] for index in indices]
    assert listed(taken["labels"]) == [10 * index for index in indices]


def test_take_keeps_features_and_copies() -> None:
    column = ragged([np.full((length, 2), length, np.float32) for length in (3, 0, 1)])
    taken = column.take(np.array([2, 0, 2]))
    assert listed(taken) == [[[1, 1]], [[3, 3]] * 3, [[1, 1]]]
    taken.values[:] = 7
    assert listed(column) == [[[3, 3]] * 3, [], [[1, 1]]]


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_concatenate(parts: list[list[list[int]]]) -> None:
    joined = concatenate([{"tokens": integers(part), "labels": np.arange(len(part))} for part in parts])
    assert listed(joined["tokens"]) == [sequence for part in parts for sequence in part]
    assert listed(joined["labels"]) == [index for part in parts for index in range(len(part))]
    assert num_examples(joined) == sum(len(part) for part in parts)


@given(NUMBERS, st.data())
def test_head_is_a_view(sequences: list[list[int]], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(sequences)))
    column, labels = integers(sequences), np.arange(len(sequences))
    first = head({"tokens": column, "labels": labels}, count)
    assert listed(first["tokens"]) == sequences[:count]
    assert listed(first["labels"]) == list(range(count))
    tokens = first["tokens"]
    assert isinstance(tokens, Ragged)
    assert np.shares_memory(tokens.values, column.values) or not tokens.values.size
