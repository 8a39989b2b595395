"""Expressions of ListOps are well formed, have the value of their label, and follow the published distribution."""

from __future__ import annotations

import collections
import dataclasses
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


@pytest.mark.parametrize(("depth", "arguments"), [(2, 7), (3, 2), (4, 3), (6, 2)])
def test_labels_of_small_trees(depth: int, arguments: int) -> None:
    generator = ListOps(shortest=3, longest=40, depth=depth, arguments=arguments)
    texts, labels = expressions(generator, 300)
    nodes = [parse(text) for text in texts]
    assert [node.value for node in nodes] == labels.tolist()
    assert max(node.depth for node in nodes) == depth
    assert {number for node in nodes for number in node.counts} == set(range(2, arguments + 1))


def test_published_parameters() -> None:
    texts, labels = expressions(ListOps(), 400)
    nodes = [parse(text) for text in texts]
    assert [node.value for node in nodes] == labels.tolist()
    assert max(node.depth for node in nodes) == 10
    assert all(500 < len(text) < 2000 for text in texts)
    assert {number for node in nodes for number in node.counts} == set(range(2, 11))
    assert {token for text in texts for token in text} == set(SYMBOLS)


def reference(count: int) -> list[list[str]]:
    """Expressions of `SMALL`, drawn one by one according to the definition."""
    source = random.Random(0)

    def grow(level: int) -> list[str]:
        if level == 4 or source.random() >= 0.25:
            return [str(source.randrange(10))]
        name = source.choice(["[MIN", "[MAX", "[MED", "[SM"])
        arguments = [grow(level + 1) for _ in range(source.randint(2, 10))]
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


def test_distribution_follows_the_definition() -> None:
    found, expected = properties(expressions(SMALL, SAMPLES)[0]), properties(reference(SAMPLES))
    # Samples of this size differ by less; 9 arguments instead of 10, or 30 % operators, would give more than 8.
    differences = {name: difference(found[name], expected[name]) for name in found}
    assert max(differences.values()) < 4.0, differences


IMPOSSIBLE = [{"depth": 1}, {"depth": 0}, {"arguments": 1}, {"shortest": 600, "longest": 601}, {"longest": 400}]


@pytest.mark.parametrize("bounds", IMPOSSIBLE, ids=str)
def test_impossible_bounds_are_refused(bounds: dict[str, int]) -> None:
    """Otherwise it would look for one for ever."""
    with pytest.raises(ConfigError, match="|".join(bounds)):
        ListOps(**bounds)
