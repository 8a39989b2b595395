"""ListOps: nested lists of operators and digits, whose value is to be found.

The definition is Long-Range Arena's: a node is a digit with probability 3/4, or an operator (least, greatest, median
or sum modulo 10) with 2 to 10 arguments; at depth 10 every node is a digit; expressions are kept if they have more
than 500 and fewer than 2000 tokens. `[MAX` is one token, so is `]`.

Trees are grown level by level, many at once, in two passes: most trees are far too short or too long, so the first
pass only draws their shapes, and the second fills in operators and digits, positions and values of those kept.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column, Ragged, join, take
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, END = range(10, 15)

Shape = list[NDArray[np.int64]]
"""For each level its nodes' numbers of arguments, 0 for a digit. The arguments of a level's operators are, one after
the other, the nodes of the next level."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOps:
    """A generator of expressions."""

    version: ClassVar[int] = 1

    shortest: int = 500
    """Expressions have more tokens than this."""
    longest: int = 2000
    """Expressions have fewer tokens than this."""
    depth: int = 10
    """Greatest depth of a tree, that of a lone digit being 1."""
    arguments: int = 10
    """Greatest number of arguments."""

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise ConfigError(f"depth: got {self.depth}, allowed is at least 2: an operator and its arguments")
        if self.arguments < 2:
            raise ConfigError(f"arguments: got {self.arguments}, allowed is at least 2")
        if self.longest < max(self.shortest, 3) + 2:
            raise ConfigError(
                f"longest: got {self.longest}, allowed is at least {max(self.shortest, 3) + 2}, so that an expression "
                f"of more than {self.shortest} tokens fits"
            )

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """Exactly `count` expressions: `tokens`, numbers of `SYMBOLS`, and `labels`, their values."""
        parts, missing = [_fill(draw, [np.zeros(0, np.int64)])], count
        while missing > 0:
            # About one tree in three is kept.
            part = _fill(draw, self._shapes(draw, min(4 * missing + 16, 4096)))
            parts.append(take(part, np.arange(min(missing, len(part["labels"])))))
            missing -= len(parts[-1]["labels"])
        return join(parts)

    def _shapes(self, draw: CounterRNG, trees: int) -> Shape:
        """The shapes, out of `trees` random ones, that have an allowed length.

        Roots are operators: a lone digit would be too short. A tree is given up as soon as it is known to be too long.
        """
        shape: Shape = []
        owners: list[NDArray[np.int64]] = []
        owner = np.arange(trees)
        tokens = np.zeros(trees, np.int64)
        for level in range(self.depth):
            operator = np.zeros(len(owner), bool) if level == self.depth - 1 else _quarter(draw, len(owner))
            if level == 0 and self.depth > 1:
                operator[:] = True
            arguments = np.zeros(len(owner), np.int64)
            arguments[operator] = draw.integers(2, self.arguments + 1, int(operator.sum()))
            shape.append(arguments)
            owners.append(owner)
            tokens += np.bincount(owner, 1 + operator, trees).astype(np.int64)
            pending = np.bincount(owner, arguments, trees).astype(np.int64)
            tokens[tokens + pending >= self.longest] = self.longest
            growing = (tokens < self.longest)[owner] & operator
            # What a tree that is given up still has to grow is left out, and the tree itself below.
            owner = np.repeat(owner[growing], arguments[growing])
            if not len(owner):
                break
        kept = (tokens > self.shortest) & (tokens < self.longest)
        return [arguments[kept[owner]] for arguments, owner in zip(shape, owners, strict=True)]


def _quarter(draw: CounterRNG, count: int) -> NDArray[np.bool_]:
    """True with probability 1/4, from 16 bits each."""
    bits = draw.raw(-(-count // 4)).astype("<u8").view("<u2")
    return bits[:count] < 2**14


def _fill(draw: CounterRNG, shape: Shape) -> dict[str, Column]:
    """Expressions of the given shapes with random operators and digits, and their values."""
    symbols = [
        np.where(arguments > 0, draw.integers(MIN, END, len(arguments)), draw.integers(0, 10, len(arguments)))
        for arguments in shape
    ]
    sizes = _bottom_up(shape)
    begins = np.cumsum(sizes[0]) - sizes[0]
    tokens = np.full(int(sizes[0].sum()), END, np.uint8)
    begin = begins
    for level, arguments in enumerate(shape):
        tokens[begin] = symbols[level]
        if level + 1 < len(shape):
            # Arguments follow each other from the place after their operator.
            following = sizes[level + 1]
            before = np.cumsum(following) - following
            operator = arguments > 0
            first = np.cumsum(arguments[operator]) - arguments[operator]
            begin = before + np.repeat(begin[operator] + 1 - before[first], arguments[operator])
    offsets = np.append(begins, len(tokens))
    return {"tokens": Ragged(tokens, offsets), "labels": _values(shape, symbols)}


def _bottom_up(shape: Shape) -> list[NDArray[np.int64]]:
    """For each level its nodes' numbers of tokens: a digit has one, an operator two and those of its arguments."""
    sizes = [np.ones(len(arguments), np.int64) for arguments in shape]
    for level in range(len(shape) - 2, -1, -1):
        arguments = shape[level]
        operator = arguments > 0
        if operator.any():
            first = np.cumsum(arguments[operator]) - arguments[operator]
            sizes[level][operator] = 2 + np.add.reduceat(sizes[level + 1], first)
    return sizes


def _values(shape: Shape, symbols: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The values of the roots."""
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
    """Medians of runs of `counts` values; that of an even number is the middle of two, rounded down."""
    if not len(first):
        return np.zeros(0, np.int64)
    column = np.arange(counts.max())
    inside = column < counts[:, None]
    runs = np.where(inside, values[np.minimum(first[:, None] + column, len(values) - 1)], 10)
    runs.sort(axis=1)
    row = np.arange(len(first))
    return (runs[row, (counts - 1) // 2] + runs[row, counts // 2]) // 2
