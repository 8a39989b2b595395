"""Structures of a TCN: which ones cover a length, which lags they reach, and which of several are Pareto-optimal."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tcnca.errors import ConfigError
from tcnca.layers import TCNConfig
from tcnca.layers.tcn import MAX_RECEPTIVE_FIELD
from tcnca.ops import receptive_field

KERNEL_SIZES = (3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 21, 25, 33, 41, 49, 65)
CONVOLUTIONS = (1, 2)
MAX_DEPTH = 32
"""Blocks. Factor 2 covers any length that a TCN can have with fewer."""


@dataclasses.dataclass(frozen=True, order=True)
class Structure:
    """The four numbers that fix the connections of a TCN: the paper's K, f, D and B."""

    kernel_size: int
    dilation_factor: int
    depth: int
    convolutions: int = 1

    @property
    def receptive_field(self) -> int:
        """Number of inputs from the first to the last one that an output depends on."""
        return receptive_field(self.kernel_size, self.dilation_factor, self.depth, self.convolutions)

    @property
    def gapless(self) -> bool:
        """Whether every lag inside the receptive field is reached.

        With `m = convolutions · (kernel_size - 1)`, the lags are the numbers whose digits to the base of the dilation
        factor are 0 to `m`. Consecutive blocks leave no gap if and only if the factor is at most `m + 1`.
        """
        return self.depth == 1 or self.kernel_size == 1 or self.dilation_factor <= self._digits

    @property
    def _digits(self) -> int:
        return self.convolutions * (self.kernel_size - 1) + 1

    def count_lags(self, length: int, causal: bool = True) -> int:
        """Return how many lags of a window of `length` some path of taps reaches.

        The window is `0 … length - 1` for a causal TCN, and centered at 0 for a bidirectional one. Skip connections
        do not change the number, since every kernel has a tap of lag 0.
        """
        if causal:
            return self._count_below(length)
        # Bidirectional taps are the causal ones, moved by as much as the blocks see of the future.
        future = (self.kernel_size - 1) // 2 * self.convolutions * _powers(self.dilation_factor, self.depth)
        start = future - (length - 1) // 2
        return self._count_below(start + length) - self._count_below(start)

    def _count_below(self, bound: int) -> int:
        """Return the number of causal lags below `bound`."""
        if bound <= 0 or self.gapless:
            return max(0, min(bound, self.receptive_field))
        # The digits of a lag are unique. Go down from the largest dilation: with a smaller digit there, every
        # combination of the other digits stays below the bound.
        count = 0
        for block in reversed(range(self.depth)):
            digit, bound = divmod(bound, self.dilation_factor**block)
            if digit >= self._digits:
                return count + self._digits ** (block + 1)
            count += digit * self._digits**block
        return count

    def config(self, base: TCNConfig) -> TCNConfig:
        """Return `base` with this structure."""
        return dataclasses.replace(base, **dataclasses.asdict(self))

    def parameters(self, base: TCNConfig, channels: int) -> int:
        """Return the number of parameters of a TCN."""
        with torch.device("meta"):
            tcn = self.config(base).build(channels)
        return sum(parameter.numel() for parameter in tcn.parameters())

    def state_values(self, channels: int) -> int:
        """Return the values in the streaming state of one sequence."""
        return channels * (self.receptive_field - 1)

    def overrides(self) -> list[str]:
        """Return the changes to a recipe that `tcnca train` takes."""
        return [f"model.mixer.{name}={value}" for name, value in dataclasses.asdict(self).items()]

    def __str__(self) -> str:
        numbers = (self.kernel_size, self.dilation_factor, self.depth, self.convolutions)
        return " ".join(f"{name}={number}" for name, number in zip("KfDB", numbers, strict=True))


def _powers(factor: int, depth: int) -> int:
    """Return `1 + factor + … + factor^(depth - 1)`."""
    return sum(factor**block for block in range(depth))


def enumerate_structures(
    length: int,
    *,
    kernel_sizes: Sequence[int] = KERNEL_SIZES,
    convolutions: Sequence[int] = CONVOLUTIONS,
    max_depth: int = MAX_DEPTH,
    partial: bool = False,
) -> list[Structure]:
    """Return the structures whose receptive field is at least `length`.

    Each kernel size, depth and number of convolutions has the smallest dilation factor that covers. A deeper TCN with
    the factor of a shallower one is left out: its last block would look beyond the length.

    Args:
        length: tokens to cover.
        kernel_sizes: kernel sizes to try.
        convolutions: numbers of convolutions in a block to try.
        max_depth: largest number of blocks.
        partial: also return, where the smallest factor leaves gaps, the TCN with the largest factor that leaves none,
            which covers less than `length`.
    """
    found = []
    for kernel_size in kernel_sizes:
        for per_block in convolutions:
            last = None
            for depth in range(1, max_depth + 1):
                factor = _smallest_factor(length, kernel_size, depth, per_block)
                if factor is None or factor == last:
                    continue
                last = factor
                structure = Structure(kernel_size, factor, depth, per_block)
                found.append(structure)
                if partial and not structure.gapless:
                    found.append(dataclasses.replace(structure, dilation_factor=structure._digits))
                if factor <= 2:
                    break
    if not found:
        sizes = f"{max(kernel_sizes)} taps and {max_depth} blocks"
        raise ConfigError(
            f"--length: expected a length that a TCN of at most {sizes} covers, got {length:,}; allow more with "
            f"--kernel-sizes or --max-depth"
        )
    return found


def _smallest_factor(length: int, kernel_size: int, depth: int, convolutions: int) -> int | None:
    """Return the smallest dilation factor of at least 2 that covers a length, 1 for one block; None without one."""
    if depth == 1:
        return 1 if receptive_field(kernel_size, 1, 1, convolutions) >= length else None
    factors = range(2, max(length, 2) + 1)
    place = bisect.bisect_left(
        factors, length, key=lambda factor: receptive_field(kernel_size, factor, depth, convolutions)
    )
    if place == len(factors) or receptive_field(kernel_size, factors[place], depth, convolutions) > MAX_RECEPTIVE_FIELD:
        return None
    return factors[place]


def pareto_front(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the rows of `[rows, objectives]` that no other row dominates; less is better everywhere.

    A row dominates another if it is nowhere worse and somewhere better, so equal rows are all kept.
    """
    no_worse = (costs[:, None] <= costs[None]).all(-1)
    better = (costs[:, None] < costs[None]).any(-1)
    front: NDArray[np.bool_] = np.logical_not(np.any(no_worse & better, axis=0))
    return front
