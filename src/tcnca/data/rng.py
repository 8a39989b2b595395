"""Random numbers that are a pure function of a key, the same on every machine and with every version of NumPy.

NumPy promises that the raw bits of its bit generators never change, but not what its `Generator` makes of them; so the
few distributions that data needs are made from the bits here.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


class CounterRNG:
    """A stream of random numbers named by a key: `CounterRNG(seed, "listops", shard)`."""

    def __init__(self, *key: int | str) -> None:
        # NumPy's numbers are written differently from version to version.
        plain = tuple(part if isinstance(part, str) else int(part) for part in key)
        digest = hashlib.sha256(repr(plain).encode()).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def raw(self, count: int) -> NDArray[np.uint64]:
        """Whole numbers of 64 random bits."""
        return self._bits.random_raw(count)

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Numbers in [0, 1)."""
        bits = self.raw(int(np.prod(shape, dtype=np.int64)))
        return ((bits >> np.uint64(11)) * np.float64(2.0**-53)).reshape(shape)

    def integers(self, low: int, high: int, *shape: int) -> NDArray[np.int64]:
        """Whole numbers from `low` up to, not including, `high`."""
        return low + (self.uniform(*shape) * (high - low)).astype(np.int64)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """The numbers below `count` in random order."""
        return np.argsort(self.raw(count), kind="stable")
