"""ListOps of Long-Range Arena: compute the value of a nested expression of operators and digits.

The definition is Long-Range Arena's: a node is a digit with probability 3/4, or an operator (minimum, maximum, median
or sum modulo 10) with 2 to 10 arguments; at depth 10 every node is a digit; expressions are kept if they have more
than 500 and fewer than 2000 tokens. `[MAX` is one token, and so is `]`.

Trees are grown level by level, many at once, in two passes. Most trees are far too short or too long, so the first
pass draws only their shapes, and the second one fills in operators, digits, positions and values of those kept.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tcnca.config import check_at_least
from tcnca.data.datasets.spec import DatasetSpec
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import Column, Ragged, concatenate, take
from tcnca.data.tasks import ClassificationTask

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, END = range(10, 15)

Shape = list[NDArray[np.int64]]
"""For each level the number of arguments of its nodes, 0 for a digit. The arguments of the operators of a level are, in
order, the nodes of the next level."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOps:
    """Generator of expressions. Its repr is part of the seed, so do not rename the fields."""

    version: ClassVar[int] = 1

    shortest: int = 500
    """Expressions have more tokens than this."""
    longest: int = 2000
    """Expressions have fewer tokens than this."""
    depth: int = 10
    """Maximum depth of a tree; a single digit has depth 1."""
    arguments: int = 10
    """Maximum number of arguments."""

    def __post_init__(self) -> None:
        check_at_least("depth", self.depth, 2)
        check_at_least("arguments", self.arguments, 2)
        # The shortest expression has four tokens, and the next ones two more.
        check_at_least("longest", self.longest, max(self.shortest, 3) + 2)

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate `count` expressions: `tokens`, indices of `SYMBOLS`, and `labels`, their values."""
        parts, missing = [_fill(rng, [np.zeros(0, np.int64)])], count
        while missing > 0:
            # About one tree in three is kept.
            part = _fill(rng, self._shapes(rng, min(4 * missing + 16, 4096)))
            parts.append(take(part, np.arange(min(missing, len(part["labels"])))))
            missing -= len(parts[-1]["labels"])
        return concatenate(parts)

    def _shapes(self, rng: CounterRNG, trees: int) -> Shape:
        """Draw the shapes of `trees` trees and keep those of an allowed length.

        Roots are operators: a single digit would be too short. A tree is dropped as soon as it is known to be too long.
        """
        shape: Shape = []
        owners: list[NDArray[np.int64]] = []
        owner = np.arange(trees)
        tokens = np.zeros(trees, np.int64)
        for level in range(self.depth):
            operator = np.zeros(len(owner), bool) if level == self.depth - 1 else _quarter(rng, len(owner))
            if level == 0:
                operator[:] = True
            arguments = np.zeros(len(owner), np.int64)
            arguments[operator] = rng.integers(2, self.arguments + 1, int(operator.sum()))
            shape.append(arguments)
            owners.append(owner)
            tokens += np.bincount(owner, 1 + operator, trees).astype(np.int64)
            pending = np.bincount(owner, arguments, trees).astype(np.int64)
            tokens[tokens + pending >= self.longest] = self.longest
            growing = (tokens < self.longest)[owner] & operator
            # A dropped tree stops growing here; the levels that it already has are removed below.
            owner = np.repeat(owner[growing], arguments[growing])
            if not len(owner):
                break
        kept = (tokens > self.shortest) & (tokens < self.longest)
        return [arguments[kept[owner]] for arguments, owner in zip(shape, owners, strict=True)]


def _quarter(rng: CounterRNG, count: int) -> NDArray[np.bool_]:
    """Draw booleans that are true with probability 1/4, from 16 bits each."""
    bits = rng.raw(-(-count // 4)).astype("<u8").view("<u2")
    return bits[:count] < 2**14


def _fill(rng: CounterRNG, shape: Shape) -> dict[str, Column]:
    """Fill the shapes with random operators and digits, and compute the values."""
    symbols = [
        np.where(arguments > 0, rng.integers(MIN, END, len(arguments)), rng.integers(0, 10, len(arguments)))
        for arguments in shape
    ]
    sizes = _token_counts(shape)
    begins = np.cumsum(sizes[0]) - sizes[0]
    tokens = np.full(int(sizes[0].sum()), END, np.uint8)
    begin = begins
    for level, arguments in enumerate(shape):
        tokens[begin] = symbols[level]
        if level + 1 < len(shape):
            # Arguments follow their operator, one after the other.
            following = sizes[level + 1]
            before = np.cumsum(following) - following
            operator = arguments > 0
            first = np.cumsum(arguments[operator]) - arguments[operator]
            begin = before + np.repeat(begin[operator] + 1 - before[first], arguments[operator])
    offsets = np.append(begins, len(tokens))
    return {"tokens": Ragged(tokens, offsets), "labels": _values(shape, symbols)}


def _token_counts(shape: Shape) -> list[NDArray[np.int64]]:
    """Count the tokens of each node, level by level: 1 for a digit, 2 plus those of the arguments for an operator."""
    sizes = [np.ones(len(arguments), np.int64) for arguments in shape]
    for level in range(len(shape) - 2, -1, -1):
        arguments = shape[level]
        operator = arguments > 0
        if operator.any():
            first = np.cumsum(arguments[operator]) - arguments[operator]
            sizes[level][operator] = 2 + np.add.reduceat(sizes[level + 1], first)
    return sizes


def _values(shape: Shape, symbols: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Compute the values of the roots."""
    values = symbols[-1]
    for level in range(len(shape) - 2, -1, -1):
        arguments, symbol = shape[level], symbols[level]
        operator = arguments > 0
        result = symbol.copy()
        if operator.any():
            counts, symbol = arguments[operator], symbol[operator]
            first = np.cumsum(counts) - counts
            computed = np.add.reduceat(values, first) % 10
            for name, function in ((MIN, np.minimum), (MAX, np.maximum)):
                computed = np.where(symbol == name, function.reduceat(values, first), computed)
            chosen = np.flatnonzero(symbol == MED)
            computed[chosen] = _medians(values, first[chosen], counts[chosen])
            result[operator] = computed
        values = result
    return values


def _medians(values: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute medians of runs of `counts` values; for an even count the mean of the middle two, rounded down."""
    if not len(first):
        return np.zeros(0, np.int64)
    column = np.arange(counts.max())
    inside = column < counts[:, None]
    runs = np.where(inside, values[np.minimum(first[:, None] + column, len(values) - 1)], 10)
    runs.sort(axis=1)
    row = np.arange(len(first))
    return (runs[row, (counts - 1) // 2] + runs[row, counts // 2]) // 2


LISTOPS = DatasetSpec(
    name="listops",
    title="ListOps (Long-Range Arena)",
    description="compute the value of a nested expression, 500 to 2000 tokens",
    source="generated",
    sizes={"train": 96_000, "validation": 2_000, "test": 2_000},
    disk_bytes=105_000_000,
    task=ClassificationTask,
    metadata={"symbols": list(SYMBOLS), "class_names": [str(digit) for digit in range(10)]},
    generator=ListOps(),
)
