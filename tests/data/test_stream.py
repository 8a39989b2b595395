"""A stream is a function of seed and place, and never shows what validation or test splits hold."""

from __future__ import annotations

import hashlib
import itertools
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, Ragged, count
from tcnca.data.generators.generator import Generator, Stream, fingerprints, shares, split_of
from tcnca.data.generators.listops import ListOps
from tcnca.data.generators.recall import Recall
from tcnca.data.generators.shards import Plan, make_in_memory
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS

SIZES = {"train": 40, "validation": 10, "test": 10}
TINY = Recall(length=4, vocab_size=6)
LISTS = ListOps(shortest=20, longest=60, depth=4)
GENERATORS: dict[str, Generator] = {"arrays": TINY, "sequences": LISTS}
BLOCK = 8
END = 50

each_generator = pytest.mark.parametrize("name", GENERATORS)


def stream(generator: Generator, block: int = BLOCK) -> Stream:
    return Stream(generator, shares(SIZES), block)


def listed(columns: Columns) -> list[tuple[tuple[int, ...], int]]:
    """Examples as pairs of tokens and label."""
    tokens, labels = columns["tokens"], columns["labels"]
    return [(tuple(tokens[index].tolist()), int(labels[index])) for index in range(count(columns))]


def inputs(columns: Columns) -> set[tuple[int, ...]]:
    return {tokens for tokens, _ in listed(columns)}


def every_input() -> set[tuple[int, ...]]:
    """All sequences that `TINY` can make."""
    pairs = [(key, value) for key in range(3) for value in range(3, 6)]
    return {
        (*one, *other, asked[0])
        for one, other in itertools.product(pairs, pairs)
        for asked in (one, other)
        if one[0] != other[0] or one[1] == other[1]
    }


@each_generator
@given(data=st.data())
def test_any_order_and_split_of_calls_gives_the_same(name: str, data: st.DataObject) -> None:
    whole = listed(stream(GENERATORS[name]).take(5, 0, END))
    used = stream(GENERATORS[name])
    for _ in range(6):
        begin = data.draw(st.integers(0, END - 1))
        end = data.draw(st.integers(begin + 1, END))
        assert listed(used.take(5, begin, end)) == whole[begin:end]
        if data.draw(st.booleans()):
            used.take(6, begin, end)


@each_generator
@pytest.mark.parametrize("step", [1, 3, 8, 13])
def test_batches_one_after_the_other_are_the_stream(name: str, step: int) -> None:
    used = stream(GENERATORS[name])
    found = [pair for begin in range(0, 39, step) for pair in listed(used.take(2, begin, begin + step))]
    assert found == listed(stream(GENERATORS[name]).take(2, 0, len(found)))


@pytest.mark.parametrize("place", [0, 5, 8, 16])
def test_no_examples_can_be_taken(place: int) -> None:
    assert listed(stream(TINY).take(0, place, place)) == []


def test_places_far_away_are_made_at_once() -> None:
    far = 10**15
    assert listed(stream(TINY).take(0, far, far + 3)) == listed(stream(TINY).take(0, far - 9, far + 9))[9:12]


def test_seeds_differ() -> None:
    streams = [listed(stream(LISTS).take(seed, 0, 40)) for seed in range(4)]
    for one, other in itertools.combinations(streams, 2):
        assert not set(one) & set(other)


def test_blocks_differ() -> None:
    found = listed(stream(LISTS).take(0, 0, 20 * BLOCK))
    assert len(set(found)) == 20 * BLOCK


def test_stream_is_not_the_set_of_its_seed() -> None:
    plan = Plan(generator=LISTS, seed=0, sizes=SIZES, share=shares(SIZES), shard=BLOCK)
    assert not set(listed(make_in_memory(plan)["train"])) & set(listed(stream(LISTS).take(0, 0, 100)))


def test_changing_what_was_taken_changes_nothing() -> None:
    used = stream(TINY)
    before = listed(used.take(0, 0, 5))
    for column in used.take(0, 0, 5).values():
        assert isinstance(column, np.ndarray)
        column[:] = 0
    assert listed(used.take(0, 0, 5)) == before


def test_stream_shows_all_that_is_not_held_out_and_nothing_else() -> None:
    made = [
        make_in_memory(Plan(generator=TINY, seed=seed, sizes=SIZES, share=shares(SIZES), shard=50)) for seed in range(5)
    ]
    held = set().union(*(inputs(splits[split]) for splits in made for split in ("validation", "test")))
    trained = set().union(*(inputs(splits["train"]) for splits in made))
    assert len(every_input()) == 117
    assert 20 < len(held) < 60
    for seed in range(3):
        shown = inputs(stream(TINY).take(seed, 0, 3000))
        assert not shown & held
        assert shown >= trained
    tokens = np.array(sorted(every_input()), np.uint8)
    allowed = tokens[split_of(fingerprints({"tokens": tokens}), shares(SIZES)) == 0]
    assert shown == set(map(tuple, allowed.tolist()))


def test_labels_are_shared_as_without_holding_out() -> None:
    shown = stream(LISTS, 500).take(0, 0, 8000)["labels"]
    drawn = LISTS.examples(CounterRNG("labels"), 8000)["labels"]
    counts = np.array([[np.count_nonzero(labels == value) for value in range(10)] for labels in (shown, drawn)])
    # Chi-square of two samples of equal size; 27.9 is exceeded once in a thousand times.
    assert float((np.diff(counts, axis=0) ** 2 / counts.sum(axis=0)).sum()) < 27.9


def hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 3, 2), (0, 4), (3, 0)], ids=str)
def test_fingerprint_is_a_hash_of_the_input_alone(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    for labels in (np.zeros(len(values)), np.ones(len(values))):
        found = fingerprints({"pixels": values, "labels": labels})
        assert found.dtype == np.uint64
        assert found.tolist() == [hashed(value.tobytes()) for value in values]
    np.testing.assert_array_equal(fingerprints({"pixels": np.asfortranarray(values)}), fingerprints({"pixels": values}))


def test_fingerprint_of_sequences_is_that_of_their_bytes() -> None:
    texts = [b"abc", b"", b"abcd", b"abc"]
    assert fingerprints({"tokens": Ragged.of_bytes(texts)}).tolist() == [hashed(text) for text in texts]


def test_small_splits_get_a_tenth_more_than_their_share() -> None:
    found = shares({"train": 80, "validation": 15, "test": 5})
    assert found["validation"] == pytest.approx(0.165)
    assert found["test"] == pytest.approx(0.055)
    assert sum(found.values()) == pytest.approx(1)
    assert list(found) == list(SPLITS)


def test_splits_are_as_large_as_their_shares() -> None:
    share = {"train": 0.7, "validation": 0.2, "test": 0.1}
    found = np.bincount(split_of(CounterRNG("prints").raw(100_000), share), minlength=3) / 100_000
    assert np.abs(found - list(share.values())).max() < 0.006


@pytest.mark.parametrize(("bits", "split"), [(0, 0), (2**62, 0), (2**63, 1), (2**63 + 2**62, 2), (2**64 - 1, 2)])
def test_splits_begin_where_those_before_end(bits: int, split: int) -> None:
    share = {"train": 0.5, "validation": 0.25, "test": 0.25}
    assert split_of(np.array([bits], np.uint64), share).tolist() == [split]


class Rare:
    """A generator whose examples are nearly all of one kind, so that blocks need many attempts."""

    version: ClassVar[int] = 1

    def __repr__(self) -> str:
        return "Rare()"

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """Mostly the same number, which is held out."""
        numbers: NDArray[np.int64] = np.where(draw.uniform(count) < 0.97, self.held, draw.integers(0, 1000, count))
        return {"tokens": numbers[:, None], "labels": numbers}

    @property
    def held(self) -> int:
        """A number that belongs to the test split."""
        numbers = np.arange(1000)[:, None]
        return int(np.flatnonzero(split_of(fingerprints({"tokens": numbers}), shares(SIZES)) == 2)[0])


def test_blocks_are_full_even_if_nearly_all_is_held_out() -> None:
    found = stream(Rare()).take(0, 0, 3 * BLOCK)
    assert count(found) == 3 * BLOCK
    assert Rare().held not in [label for _, label in listed(found)]
