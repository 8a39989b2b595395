"""Expressions of ListOps are well formed, have the value of their label, and follow the published distribution."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.datasets.listops import SYMBOLS, ListOps
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import Ragged
from tcnca.errors import ConfigError

SMALL = ListOps(shortest=20, longest=60, depth=4)
SAMPLES = 5000

# What the key of `test_examples_of_a_key_never_change` gives.
GOLDEN = ["[MED [MED 3 4 3 ] 4 ]", "[MAX 6 2 5 0 ]", "[SM [SM 4 6 3 ] 7 6 ]", "[SM [MIN 2 1 7 3 ] 8 ]"]


@dataclasses.dataclass(frozen=True)
class Node:
    """What a parser finds out about an expression."""

    value: int
    depth: int
    operators: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


def evaluate(operator: str, values: list[int]) -> int:
    if operator == "[MED":
        # Twice the median is whole, so halving it rounds down exactly.
        ordered = sorted(values)
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2
    return {"[MIN": min(values), "[MAX": max(values), "[SM": sum(values) % 10}[operator]


def parse(tokens: list[str]) -> Node:
    """By recursive descent; fails unless the tokens are one expression."""

    def descend(begin: int) -> tuple[Node, int]:
        if tokens[begin].isdigit():
            return Node(int(tokens[begin]), 1), begin + 1
        operator, place = tokens[begin], begin + 1
        assert operator in ("[MIN", "[MAX", "[MED", "[SM")
        arguments = list[Node]()
        while tokens[place] != "]":
            argument, place = descend(place)
            arguments.append(argument)
        node = Node(
            value=evaluate(operator, [argument.value for argument in arguments]),
            depth=1 + max(argument.depth for argument in arguments),
            operators=(operator, *(name for argument in arguments for name in argument.operators)),
            counts=(len(arguments), *(number for argument in arguments for number in argument.counts)),
        )
        return node, place + 1

    node, end = descend(0)
    assert end == len(tokens)
    return node


def expressions(generator: ListOps, count: int, seed: int = 0) -> tuple[list[list[str]], NDArray[np.int64]]:
    made = generator.examples(CounterRNG("test", seed), count)
    tokens, labels = made["tokens"], made["labels"]
    assert isinstance(tokens, Ragged)
    assert isinstance(labels, np.ndarray)
    assert tokens.values.dtype == np.uint8
    assert labels.dtype == np.int64
    assert len(tokens) == len(labels) == count
    return [[SYMBOLS[token] for token in tokens[index]] for index in range(count)], labels


@functools.cache
def published() -> tuple[list[list[str]], NDArray[np.int64]]:
    return expressions(ListOps(), 400)


def test_labels_are_the_values() -> None:
    texts, labels = published()
    assert [parse(text).value for text in texts] == labels.tolist()


@pytest.mark.parametrize(("depth", "arguments"), [(2, 7), (3, 2), (4, 3), (6, 2)])
def test_labels_are_the_values_of_small_trees(depth: int, arguments: int) -> None:
    generator = ListOps(shortest=3, longest=40, depth=depth, arguments=arguments)
    texts, labels = expressions(generator, 300)
    nodes = [parse(text) for text in texts]
    assert [node.value for node in nodes] == labels.tolist()
    assert max(node.depth for node in nodes) == depth
    assert {number for node in nodes for number in node.counts} == set(range(2, arguments + 1))


@pytest.mark.parametrize("count", [2, 6, 10])
def test_median_of_an_even_number_rounds_down(count: int) -> None:
    """Of expressions that are nothing but one median."""
    generator = ListOps(shortest=count + 1, longest=count + 3, depth=2)
    texts, labels = expressions(generator, 400)
    found = [(text, int(label)) for text, label in zip(texts, labels, strict=True) if text[0] == "[MED"]
    halves = 0
    for text, label in found:
        digits = [int(token) for token in text[1:-1]]
        assert len(digits) == count
        assert label == int(np.floor(np.median(digits)))
        halves += np.median(digits) != label
    assert halves > 10


def test_depth_arguments_and_symbols_are_the_published_ones() -> None:
    texts, _ = published()
    nodes = [parse(text) for text in texts]
    assert max(node.depth for node in nodes) == 10
    assert all(500 < len(text) < 2000 for text in texts)
    assert {number for node in nodes for number in node.counts} == set(range(2, 11))
    assert {token for text in texts for token in text} == set(SYMBOLS)


def test_examples_of_a_key_never_change() -> None:
    """If they have to, the version of the generator is raised with this expression."""
    texts, labels = expressions(ListOps(shortest=3, longest=12, depth=3, arguments=4), 4, seed=1)
    assert ListOps.version == 1
    assert [" ".join(text) for text in texts] == GOLDEN
    assert labels.tolist() == [parse(text.split()).value for text in GOLDEN]


def reference(
    seed: int, count: int, *, chance: float = 0.25, fewest: int = 2, most: int = 10, depth: int = 4
) -> list[list[str]]:
    """Expressions of `SMALL`, drawn one by one as the definition says."""
    source = random.Random(seed)

    def grow(level: int) -> list[str]:
        if level == depth or source.random() >= chance:
            return [str(source.randrange(10))]
        name = source.choice(["[MIN", "[MAX", "[MED", "[SM"])
        arguments = [grow(level + 1) for _ in range(source.randint(fewest, most))]
        return [name, *(token for argument in arguments for token in argument), "]"]

    kept = list[list[str]]()
    while len(kept) < count:
        tokens = grow(1)
        if 20 < len(tokens) < 60:
            kept.append(tokens)
    return kept


def difference(one: list[int], other: list[int]) -> float:
    """Chi-square, per degree of freedom, of two samples of the same distribution; rare values are put together."""
    counts = [collections.Counter(one), collections.Counter(other)]
    common = sorted(value for value in {*one, *other} if counts[0][value] + counts[1][value] >= 20)
    table = np.array([[count[value] for value in common] for count in counts], float)
    table = np.column_stack([table, [len(one), len(other)] - table.sum(axis=1)])
    table = table[:, table.sum(axis=0) > 0]
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / (table.shape[1] - 1))


def properties(texts: list[list[str]]) -> dict[str, list[int]]:
    """All that the definition determines the distribution of."""
    nodes = [parse(text) for text in texts]
    tokens = [SYMBOLS.index(token) for text in texts for token in text]
    return {
        "lengths": [len(text) for text in texts],
        "values": [node.value for node in nodes],
        "depths": [node.depth for node in nodes],
        "operators": [len(node.operators) for node in nodes],
        "roots": [SYMBOLS.index(text[0]) for text in texts],
        "arguments of roots": [node.counts[0] for node in nodes],
        "arguments": [number for node in nodes for number in node.counts],
        "digits": [token for token in tokens if token < 10],
        "names": [token for token in tokens if 10 <= token < 14],
    }


@functools.cache
def sample() -> dict[str, list[int]]:
    return properties(expressions(SMALL, SAMPLES)[0])


def differences(texts: list[list[str]]) -> dict[str, float]:
    """How far the sample is from another."""
    other = properties(texts)
    return {name: difference(found, other[name]) for name, found in sample().items()}


# Above what chance does with samples of this size.
APART = 4.0


def test_distribution_is_that_of_the_definition() -> None:
    found = differences(reference(0, SAMPLES))
    assert max(found.values()) < APART, found


MISTAKES = {
    "fewer arguments": {"most": 9},
    "more operators": {"chance": 0.3},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_another_distribution_would_be_noticed(mistake: str) -> None:
    found = differences(reference(0, SAMPLES, **MISTAKES[mistake]))  # type: ignore[arg-type]
    assert max(found.values()) > 2 * APART, found


IMPOSSIBLE = [{"depth": 1}, {"depth": 0}, {"arguments": 1}, {"shortest": 600, "longest": 601}, {"longest": 400}]


@pytest.mark.parametrize("bounds", IMPOSSIBLE, ids=str)
def test_bounds_that_no_expression_can_meet_are_refused(bounds: dict[str, int]) -> None:
    """Otherwise it would look for one for ever."""
    with pytest.raises(ConfigError, match="|".join(bounds)):
        ListOps(**bounds)
