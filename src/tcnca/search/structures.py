"""Structures of a TCN: which ones cover a length, and which of several are Pareto-optimal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import ConfigError
from tcnca.layers.structure import Structure
from tcnca.layers.tcn import MAX_RECEPTIVE_FIELD, smallest_factor

KERNEL_SIZES = (3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 21, 25, 33, 41, 49, 65)
CONVOLUTIONS = (1, 2)
MAX_DEPTH = 32
"""Blocks. Factor 2 covers any length that a TCN can have with fewer."""


def overrides(structure: Structure) -> list[str]:
    """Return the changes to a recipe that `tcnca train` takes."""
    return [f"model.mixer.{name}={value}" for name, value in dataclasses.asdict(structure).items()]


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
                factor = smallest_factor(length, kernel_size, depth, per_block, least=1 if depth == 1 else 2)
                if factor is None or factor == last:
                    continue
                structure = Structure(kernel_size, factor, depth, per_block)
                if structure.receptive_field > MAX_RECEPTIVE_FIELD:
                    continue
                last = factor
                found.append(structure)
                if partial and not structure.gapless:
                    found.append(dataclasses.replace(structure, dilation_factor=structure.digits))
                if factor <= 2:
                    break
    if not found:
        sizes = f"{max(kernel_sizes)} taps and {max_depth} blocks"
        raise ConfigError(
            f"--length: expected a length that a TCN of at most {sizes} covers, got {length:,}; allow more with "
            f"--kernel-sizes or --max-depth"
        )
    return found


def pareto_front(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the rows of `[rows, objectives]` that no other row dominates; less is better everywhere.

    A row dominates another if it is nowhere worse and somewhere better, so equal rows are all kept.
    """
    no_worse = (costs[:, None] <= costs[None]).all(-1)
    better = (costs[:, None] < costs[None]).any(-1)
    front: NDArray[np.bool_] = np.logical_not(np.any(no_worse & better, axis=0))
    return front
