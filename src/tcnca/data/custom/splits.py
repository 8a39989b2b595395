"""Training, validation and test, where the user's files leave some of them open.

What is given is kept as it is. The rest follows one rule, for every form of data:

- nothing given, or training alone: validation and test are taken from it;
- training and test: validation is taken from training;
- training and validation: there is no test split.

A split is taken from training with the share of the options, rounded, but never left empty. Streams (bytes, one long
series) are cut: training first, then validation, then test. Examples are drawn, see `draw`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, take
from tcnca.data.custom.options import CustomOptions
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS
from tcnca.errors import DataError

Part = TypeVar("Part")

WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""What splits are called."""

_FEWEST_EXAMPLES = 3
# Of a stream, each element is predicted from those before it: a single one asks nothing.
_SHORTEST_STREAM = 2


def missing(given: Collection[str], options: CustomOptions, path: Path) -> dict[str, float]:
    """The splits to take from training, each with its share, by the rule of this module."""
    if "train" not in given:
        raise DataError(f"{path}: has {' and '.join(given)} but nothing to train on; add a split called train")
    if "validation" in given:
        return {}
    shares = {"validation": options.validation}
    return shares if "test" in given else {**shares, "test": options.test}


def cut(total: int, shares: Mapping[str, float], path: Path, unit: str) -> dict[str, tuple[int, int]]:
    """Where each split of a stream begins and ends: training first, then those of `shares` in their order."""
    least = _SHORTEST_STREAM * (1 + len(shares))
    if total < least:
        splits = " and ".join(("train", *shares))
        raise DataError(f"{path}: has {total} {unit}, at least {least} are needed for {splits}; add more")
    ranges: dict[str, tuple[int, int]] = {}
    end, left = total, len(shares)
    for split, share in reversed(list(shares.items())):
        size = max(_SHORTEST_STREAM, _rounded(share * total))
        begin = max(end - size, _SHORTEST_STREAM * left)
        ranges[split] = (begin, end)
        end, left = begin, left - 1
    return {"train": (0, end), **dict(reversed(ranges.items()))}


def complete(parts: Mapping[str, Columns], options: CustomOptions, path: Path) -> dict[str, Columns]:
    """The splits given, and those still missing, drawn from training."""
    shares = missing(parts, options, path)
    whole = dict(parts)
    if shares:
        train = parts["train"]
        labels = np.asarray(train["labels"]) if "labels" in train else None
        chosen = draw(digests(train), shares, options.seed, path, labels)
        whole |= {split: take(train, indices) for split, indices in chosen.items()}
    return in_order(whole)


def in_order(splits: Mapping[str, Part]) -> dict[str, Part]:
    """Training first, then validation, then test."""
    return {split: splits[split] for split in SPLITS if split in splits}


def digests(columns: Columns) -> list[bytes]:
    """For each example a digest of what a model gets to see of it."""
    seen: list[Column] = [column for name, column in columns.items() if name not in ("labels", "targets")]
    found = []
    for index in range(len(seen[0])):
        digest = hashlib.sha256()
        for column in seen:
            example = np.ascontiguousarray(column[index])
            # The shape keeps ("ab", "c") apart from ("a", "bc").
            digest.update(repr(example.shape).encode())
            digest.update(example.tobytes())
        found.append(digest.digest())
    return found


def draw(
    inputs: Sequence[bytes],
    shares: Mapping[str, float],
    seed: int,
    path: Path,
    labels: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[np.int64]]:
    """Draw the splits of `shares` from examples, leaving the others for training.

    The outcome depends on the seed and on what the examples are, not on their order. Examples with the same input
    always stay together. With labels, each class gives its share, rounded, and keeps at least one input in training;
    one with fewer than three different inputs stays there whole.

    Args:
        inputs: of each example, bytes that are equal where the inputs are.
        shares: of the splits to draw.
        seed: names the drawing.
        path: what to name in an error.
        labels: class of each example.

    Returns:
        The examples of each split, training included, in their old order.
    """
    groups: dict[bytes, list[int]] = {}
    for index, key in enumerate(inputs):
        groups.setdefault(key, []).append(index)
    wanted = " and ".join(shares)
    if len(groups) < _FEWEST_EXAMPLES:
        raise DataError(
            f"{path}: has {len(groups)} different examples, at least {_FEWEST_EXAMPLES} are needed to draw {wanted} "
            "from; add examples, or give the splits yourself"
        )
    keys = sorted(groups)
    members = [groups[keys[place]] for place in CounterRNG(seed, "custom").permutation(len(keys))]
    strata = None if labels is None else [tuple(sorted({int(labels[i]) for i in group})) for group in members]
    splits = fill([len(group) for group in members], shares, strata)
    if splits is None:
        raise DataError(
            f"{path}: no class has {_FEWEST_EXAMPLES} different examples to draw {wanted} from; "
            "add examples, or give the splits yourself"
        )
    drawn: dict[str, list[int]] = {split: [] for split in ("train", *shares)}
    for split, group in zip(splits, members, strict=True):
        drawn[split] += group
    return {split: np.sort(np.asarray(indices, np.int64)) for split, indices in drawn.items()}


def fill(
    sizes: Sequence[int], shares: Mapping[str, float], strata: Sequence[tuple[int, ...]] | None = None
) -> list[str] | None:
    """The split of each of several items, handed out in their order; None where every stratum is too small.

    Each stratum gives each split its share of the sum of its sizes, or as much less as whole items demand, and keeps
    its first item for training. No split stays empty.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(sizes)):
        places.setdefault(strata[place] if strata else (), []).append(place)
    eligible = [places[stratum] for stratum in sorted(places) if len(places[stratum]) >= _FEWEST_EXAMPLES]
    if not eligible:
        return None
    total = sum(sizes[place] for stratum in eligible for place in stratum)
    shares = {split: max(share, 1 / total) for split, share in shares.items()}
    splits = ["train"] * len(sizes)
    filled = dict.fromkeys(shares, 0)
    passed = 0
    for stratum in eligible:
        size = sum(sizes[place] for place in stratum)
        passed += size
        # Rounding the running sum, not each stratum, makes the whole come out right as well. What large items left
        # unfilled is made up for by the strata after, but none of them gives more than an item above its share.
        most = size // len(stratum) - 1
        room = {
            split: min(_rounded(share * passed) - filled[split], math.ceil(share * size) + most)
            for split, share in shares.items()
        }
        for place in stratum[1:]:
            fitting = [split for split in shares if sizes[place] <= room[split]]
            if fitting:
                split = max(fitting, key=lambda name: room[name] / shares[name])
                splits[place] = split
                room[split] -= sizes[place]
                filled[split] += sizes[place]
    _leave_none_empty(splits, sizes, shares, [place for stratum in eligible for place in stratum[1:]])
    return splits


def _leave_none_empty(splits: list[str], sizes: Sequence[int], names: Collection[str], free: Sequence[int]) -> None:
    """Give a split without items the smallest of the `free` ones that can be spared, from training if possible."""
    for split in names:
        counts = Counter(splits)
        if not counts[split]:
            spare = [place for place in free if splits[place] == "train" or counts[splits[place]] > 1]
            splits[min(spare, key=lambda place: (splits[place] != "train", sizes[place]))] = split


def _rounded(value: float) -> int:
    """Half up, so that rounding running sums never skips."""
    return math.floor(value + 0.5)
