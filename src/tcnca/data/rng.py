"""Random numbers that are a pure function of a key, identical on every machine and with every version of NumPy.

NumPy guarantees the raw bits of its bit generators across versions, but not the distributions of its `Generator`.
The few distributions that the data code needs are therefore computed from the raw bits here.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


class CounterRNG:
    """A stream of random numbers identified by a key, for example `CounterRNG(seed, "listops", shard)`."""

    def __init__(self, *key: int | str) -> None:
        # The repr of NumPy scalars differs between versions, so convert them to int.
        plain = tuple(part if isinstance(part, str) else int(part) for part in key)
        digest = hashlib.sha256(repr(plain).encode()).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def raw(self, count: int) -> NDArray[np.uint64]:
        """Return integers of 64 random bits."""
        return self._bits.random_raw(count)

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1)."""
        bits = self.raw(int(np.prod(shape, dtype=np.int64)))
        return ((bits >> np.uint64(11)) * np.float64(2.0**-53)).reshape(shape)

    def integers(self, low: int, high: int, *shape: int) -> NDArray[np.int64]:
        """Return integers from `low` (inclusive) to `high` (exclusive)."""
        return low + (self.uniform(*shape) * (high - low)).astype(np.int64)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Return a random permutation of `range(count)`."""
        return np.argsort(self.raw(count), kind="stable")
