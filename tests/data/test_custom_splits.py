"""Drawn splits are disjoint, complete, of the right size, reproducible, and share no input."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcnca.data.custom import CustomOptions
from tcnca.data.custom.options import assign_items, cut_stream, draw_splits, missing_splits
from tcnca.errors import ConfigError, DataError

PATH = Path("set.csv")
SHARES = {"validation": 0.05, "test": 0.05}

shares = st.tuples(st.floats(0.01, 0.49), st.floats(0.01, 0.49)).map(
    lambda pair: {"validation": pair[0], "test": pair[1]}
)
# Few inputs and many examples, so that most occur more than once, some of them with contradicting labels.
examples = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=3, max_size=120)


def _inputs(numbers: list[int]) -> list[bytes]:
    return [f"input {number}".encode() for number in numbers]


def _different(count: int) -> list[bytes]:
    return _inputs(list(range(count)))


def _can_be_drawn(inputs: list[int], labels: list[int]) -> bool:
    """Whether three inputs or more have the same labels."""
    found = {
        number: frozenset(label for n, label in zip(inputs, labels, strict=True) if n == number) for number in inputs
    }
    return max(Counter(found.values()).values()) >= 3


@given(examples, shares, st.integers(0, 5))
def test_splits_are_disjoint_complete_and_share_no_input(
    rows: list[tuple[int, int]], wanted: dict[str, float], seed: int
) -> None:
    numbers, classes = [row[0] for row in rows], [row[1] for row in rows]
    inputs, labels = _inputs(numbers), np.array(classes)
    if not _can_be_drawn(numbers, classes):
        with pytest.raises(DataError, match="different examples"):
            draw_splits(inputs, wanted, seed, PATH, labels)
        return
    drawn = draw_splits(inputs, wanted, seed, PATH, labels)
    assert list(drawn) == ["train", "validation", "test"]
    assert sorted(np.concatenate(list(drawn.values()))) == list(range(len(rows)))
    assert all(len(indices) for indices in drawn.values())
    assert all((np.diff(indices) > 0).all() for indices in drawn.values())
    seen = [{numbers[index] for index in indices} for indices in drawn.values()]
    assert sum(len(some) for some in seen) == len(set(numbers))
    assert {classes[index] for index in drawn["train"]} == set(classes)


@given(examples, st.integers(0, 5))
def test_order_of_the_examples_does_not_matter(rows: list[tuple[int, int]], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    numbers = [row[0] for row in rows]
    if len(set(numbers)) < 3:
        return
    drawn = draw_splits(_inputs(numbers), SHARES, seed, PATH)
    again = draw_splits(_inputs([numbers[index] for index in order]), SHARES, seed, PATH)
    for split, indices in drawn.items():
        assert sorted(numbers[i] for i in indices) == sorted(numbers[order[i]] for i in again[split])


@given(st.integers(3, 400), shares, st.integers(0, 5))
def test_sizes_are_the_rounded_fractions(count: int, wanted: dict[str, float], seed: int) -> None:
    drawn = draw_splits(_different(count), wanted, seed, PATH)
    for split, share in wanted.items():
        exact = share * count
        # One input stays for training, and each split gets one.
        least = min(math.floor(exact), count - 2)
        assert max(1, least) <= len(drawn[split]) <= max(1, math.ceil(exact))
    if count >= 20:
        assert abs(len(drawn["validation"]) - wanted["validation"] * count) <= 0.5 + 1e-9


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 5))
def test_each_class_contributes_its_fraction(counts: list[int], seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    if max(counts) < 3:
        return
    drawn = draw_splits(_different(len(labels)), SHARES, seed, PATH, labels)
    total = sum(count for count in counts if count >= 3)
    for split, share in SHARES.items():
        assert len(drawn[split]) == max(1, math.floor(share * total + 0.5))
        for number, count in enumerate(counts):
            found = int((labels[drawn[split]] == number).sum())
            if count < 3:
                assert found == 0
            elif share * total >= 1:
                assert math.floor(share * count) <= found <= math.ceil(share * count)


def test_draw_never_changes() -> None:
    drawn = draw_splits(_different(60), SHARES, 0, PATH)
    assert {split: indices.tolist() for split, indices in drawn.items() if split != "train"} == {
        "validation": [2, 46, 51],
        "test": [0, 31, 48],
    }


def test_no_split_is_empty() -> None:
    assert Counter(assign_items([1000, 1000, 1000, 900], SHARES)) == {"train": 2, "validation": 1, "test": 1}
    # The quota of validation takes both items that training can spare, of which test then gets one.
    assert Counter(assign_items([3, 2, 2], {"validation": 0.6, "test": 0.15})) == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }


@given(st.integers(0, 500), shares)
def test_stream_is_cut_in_order(total: int, wanted: dict[str, float]) -> None:
    if total < 6:
        with pytest.raises(DataError, match=f"expected at least 6 steps for .*, got {total}"):
            cut_stream(total, wanted, PATH, "steps")
        return
    ranges = cut_stream(total, wanted, PATH, "steps")
    assert list(ranges) == ["train", "validation", "test"]
    ends = [0, *(end for _, end in ranges.values())]
    assert [begin for begin, _ in ranges.values()] == ends[:-1]
    assert ends[-1] == total
    assert all(end - begin >= 2 for begin, end in ranges.values())
    if total > 300:
        for split, share in wanted.items():
            assert abs(ranges[split][1] - ranges[split][0] - share * total) <= max(0.5 + 1e-9, 2 - share * total)


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (["train"], ["validation", "test"]),
        (["train", "test"], ["validation"]),
        (["train", "validation"], []),
        (["train", "validation", "test"], []),
    ],
)
def test_missing_splits(there: list[str], taken: list[str]) -> None:
    assert list(missing_splits(there, CustomOptions(), PATH)) == taken


@pytest.mark.parametrize(("validation", "test"), [(0.05, 0.0), (0.05, 1.0), (-0.1, 0.05), (0.5, 0.5)])
def test_invalid_fractions(validation: float, test: float) -> None:
    with pytest.raises(ConfigError, match=r"^validation, test: expected fractions above 0 with a sum below 1, .*, got"):
        CustomOptions(validation=validation, test=test)


def test_too_few_examples_and_no_training_split() -> None:
    with pytest.raises(DataError, match=r"set\.csv: expected at least 3 different examples to draw .*, got 2"):
        draw_splits([b"a", b"b", b"b", b"a"], SHARES, 0, PATH)
    with pytest.raises(DataError, match=r"set\.csv: expected a training split, got only validation and test"):
        missing_splits(["validation", "test"], CustomOptions(), PATH)
