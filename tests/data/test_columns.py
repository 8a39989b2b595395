"""Columns do to sequences of different lengths what Python does to lists of lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcnca.data.columns import Column, Ragged, count, head, join, take

BYTES = st.lists(st.binary(max_size=6), max_size=7)
NUMBERS = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=5), max_size=7)


def ragged(sequences: list[list[int]]) -> Ragged:
    return Ragged.of([np.array(sequence, np.int64) for sequence in sequences], np.int64)


def listed(column: Column) -> list[Any]:
    return [np.asarray(column[index]).tolist() for index in range(len(column))]


def whole(column: Ragged) -> bool:
    """Whether the offsets are those of the values: from 0 to their number, never downwards."""
    ends = (column.offsets[0], column.offsets[-1])
    return column.offsets.dtype == np.int64 and ends == (0, len(column.values)) and bool((column.lengths >= 0).all())


def test_sequences_come_back() -> None:
    column = ragged([[1, 2, 3], [], [4], []])
    assert column.values.tolist() == [1, 2, 3, 4]
    assert column.offsets.tolist() == [0, 3, 3, 4, 4]
    assert column.lengths.tolist() == [3, 0, 1, 0]
    assert listed(column) == [[1, 2, 3], [], [4], []]


@given(NUMBERS)
def test_ragged_is_a_list_of_lists(sequences: list[list[int]]) -> None:
    column = ragged(sequences)
    assert whole(column)
    assert len(column) == len(sequences)
    assert listed(column) == sequences


@given(BYTES)
def test_byte_strings_become_bytes(texts: list[bytes]) -> None:
    column = Ragged.of_bytes(iter(texts))
    assert whole(column)
    assert column.values.dtype == np.uint8
    assert [column[index].tobytes() for index in range(len(column))] == texts


@given(st.lists(st.integers(0, 5), max_size=6))
def test_features_are_kept(lengths: list[int]) -> None:
    sequences = [np.full((length, 2, 3), index, np.float32) for index, length in enumerate(lengths)]
    column = Ragged.of(sequences)
    assert len(column) == len(lengths)
    for index, sequence in enumerate(sequences):
        np.testing.assert_array_equal(column[index], sequence)
        assert column[index].shape == sequence.shape


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_no_sequences_have_the_type_asked_for(dtype: Any) -> None:
    column = Ragged.of([], dtype)
    assert whole(column)
    assert len(column) == 0
    assert column.values.dtype == dtype
    assert column.lengths.tolist() == []


def test_type_asked_for_is_kept_where_all_are_empty() -> None:
    column = Ragged.of([np.zeros(0, np.uint8)] * 3, np.uint8)
    assert column.values.dtype == np.uint8
    assert listed(column) == [[], [], []]


@pytest.mark.parametrize("index", [4, 5, 100])
def test_sequence_beyond_the_last_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        ragged([[1, 2], [3], [], [4]])[index]


@pytest.mark.parametrize("index", [-1, -2, -4])
def test_negative_index_counts_from_the_end_as_in_a_list(index: int) -> None:
    sequences = [[1, 2], [3], [], [4]]
    assert ragged(sequences)[index].tolist() == sequences[index]


@given(NUMBERS, st.data())
def test_taking_is_choosing_from_a_list(sequences: list[list[int]], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=9) if sequences else st.just([]))
    labels = np.arange(len(sequences)) * 10
    taken = take({"tokens": ragged(sequences), "labels": labels}, np.array(indices, np.int64))
    tokens = taken["tokens"]
    assert isinstance(tokens, Ragged)
    assert whole(tokens)
    assert listed(tokens) == [sequences[index] for index in indices]
    assert listed(taken["labels"]) == [10 * index for index in indices]


def test_taking_keeps_features_and_copies() -> None:
    column = Ragged.of([np.full((length, 2), length, np.float32) for length in (3, 0, 1)])
    taken = column.take(np.array([2, 0, 2]))
    assert listed(taken) == [[[1, 1]], [[3, 3]] * 3, [[1, 1]]]
    taken.values[:] = 7
    assert listed(column) == [[[3, 3]] * 3, [], [[1, 1]]]


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_joining_is_adding_lists(parts: list[list[list[int]]]) -> None:
    joined = join([{"tokens": ragged(part), "labels": np.arange(len(part))} for part in parts])
    tokens = joined["tokens"]
    assert isinstance(tokens, Ragged)
    assert whole(tokens)
    assert listed(tokens) == [sequence for part in parts for sequence in part]
    assert listed(joined["labels"]) == [place for part in parts for place in range(len(part))]
    assert count(joined) == sum(len(part) for part in parts)


def test_joining_keeps_names_types_and_shapes() -> None:
    part: dict[str, Column] = {
        "pixels": np.ones((2, 3, 4), np.uint8),
        "values": Ragged.of([np.ones((5, 2), np.float32)] * 2),
    }
    joined = join([part, take(part, np.array([1])), take(part, np.arange(0))])
    values = joined["values"]
    assert list(joined) == ["pixels", "values"]
    assert isinstance(joined["pixels"], np.ndarray)
    assert joined["pixels"].shape == (3, 3, 4)
    assert joined["pixels"].dtype == np.uint8
    assert isinstance(values, Ragged)
    assert values.values.shape == (15, 2)
    assert values.values.dtype == np.float32


@given(NUMBERS, st.data())
def test_head_is_the_beginning_of_a_list(sequences: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.integers(0, len(sequences)))
    column = ragged(sequences)
    first = head({"tokens": column, "labels": np.arange(len(sequences))}, wanted)
    tokens = first["tokens"]
    assert isinstance(tokens, Ragged)
    assert whole(tokens)
    assert listed(tokens) == sequences[:wanted]
    assert listed(first["labels"]) == list(range(wanted))


def test_head_copies_nothing() -> None:
    column, labels = ragged([[1, 2], [3]]), np.arange(2)
    first = head({"tokens": column, "labels": labels}, 1)
    tokens, kept = first["tokens"], first["labels"]
    assert isinstance(tokens, Ragged)
    assert isinstance(kept, np.ndarray)
    assert np.shares_memory(tokens.values, column.values)
    assert np.shares_memory(kept, labels)


def test_count_is_that_of_examples_not_of_values() -> None:
    assert count({"tokens": ragged([[1, 2, 3], []])}) == 2
    assert count({"pixels": np.zeros((5, 2, 2))}) == 5
    assert count({"tokens": ragged([])}) == 0
