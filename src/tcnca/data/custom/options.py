"""Options for the user's own files, and the splits of their data.

Splits that are given are kept. The others follow one rule for all formats:

- nothing given, or training only: validation and test are taken from the training data;
- training and test: validation is taken from the training data;
- training and validation: there is no test split.

A split takes the fraction of the options, rounded, but at least one example. Streams (bytes, or one long series) are
cut: training first, then validation, then test. Examples are drawn, see `draw_splits`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from tcnca.config import Config, closest
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS, Column, Columns, Kind, take
from tcnca.errors import ConfigError, DataError, shown

Part = TypeVar("Part")

TABLE_OPTIONS = ("text", "second", "label", "split")
ARRAY_OPTIONS = ("values", "labels", "targets", "lengths")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""Accepted names of splits."""

_MIN_EXAMPLES = 3
# Each element of a stream is predicted from those before it, so a single one is not enough.
_MIN_STREAM = 2
_MAX_CLASSES = 100
_MAX_NAMES = 20
"""Names that a message lists."""
_MAX_LISTED = 8
"""Columns that are listed one by one."""
# At most 18 digits, so that parsing is always cheap.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class CustomOptions(Config):
    """How to read the user's own files; everything that is not given is inferred from the files."""

    kind: Kind | None = None
    """What a model does with the data. None: tables are classified (as pairs if they hold pairs), or used for a
    regression if `targets` are given, arrays are used according to their names, and every other file is bytes for a
    language model."""
    text: str | None = None
    """Column of a table with the text; the first text of a pair."""
    second: str | None = None
    """Column of a table with the second text of a pair."""
    label: str | None = None
    """Column of a table with the class."""
    values: str | None = None
    """Array with the sequences, or columns of a table, separated by commas: the features of a series, or the time
    steps of the sequences."""
    labels: str | None = None
    """Array with the class of each sequence."""
    targets: str | None = None
    """Array with the real values to predict from each sequence, or columns of a table, separated by commas."""
    lengths: str | None = None
    """Array with the length of each sequence, if they are padded to the longest."""
    split: str | None = None
    """Column of a table that says train, validation or test."""
    validation: float = 0.05
    """Fraction of the data for validation, if no validation split is given."""
    test: float = 0.05
    """Fraction of the data for testing, if no test split is given."""
    seed: int = 0
    """Seed for drawing the examples of validation and test."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < min(self.validation, self.test) < self.validation + self.test < 1:
            raise ConfigError(
                f"validation, test: expected fractions above 0 with a sum below 1, to leave examples for training, got "
                f"{self.validation} and {self.test}"
            )


def with_recipe_keys(error: DataError) -> DataError:
    """Return the error with recipe keys, such as `data.custom.text=…`, in place of options of `tcnca data prepare`."""
    names = "|".join(field.name for field in dataclasses.fields(CustomOptions))
    option = rf"(?<!\S)--({names})\b(?: ({'|'.join(get_args(Kind))}|'[^']*')(?!\w))?"
    return DataError(re.sub(option, lambda found: f"data.custom.{found[1]}={found[2] or '…'}", str(error)))


def refuse_options(options: CustomOptions, names: Collection[str], path: Path, form: str) -> None:
    """Raise a DataError if one of the options `names`, which do not apply to this format, is set."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise DataError(f"{path}: --{name} {value!r} does not apply to {form}; remove it")


def list_names(names: Sequence[str]) -> str:
    """Return names in quotes, separated by commas; long ones, of a table without a header, and long lists are cut."""
    listed = ", ".join(repr(name if len(name) <= 40 else f"{name[:40]}…") for name in names[:_MAX_NAMES]) or "none"
    return listed if len(names) <= _MAX_NAMES else f"{listed} and {len(names) - _MAX_NAMES:,} more"


def describe_columns(manifest: Mapping[str, Any]) -> str:
    """Return which columns of a table of numbers are used; nothing for other data."""
    values, unused = manifest.get("value_columns", ()), manifest.get("unused_columns", ())
    if not values:
        return ""
    targets = [*manifest.get("columns", {}).values(), *manifest.get("target_columns", ())]
    listed = {"values": values, "label" if manifest["kind"] == "classification" else "targets": targets}
    used = "; ".join(f"{what}: {_list_columns(names)}" for what, names in listed.items() if names)
    header = "; the first line, 0, 1, …, was read as names" if manifest.get("numbers_as_names") else ""
    return f"columns of {used}" + (f"; not used: {_list_columns(unused)}" if unused else "") + header


def _list_columns(names: Sequence[str]) -> str:
    if len(names) <= _MAX_LISTED:
        return list_names(names)
    return f"{len(names):,} from {list_names(names[:1])} to {list_names(names[-1:])}"


def unknown_name(name: str, what: str, names: Sequence[str], path: Path, *more: str) -> DataError:
    """Return the error of a column or array that does not exist, or of several."""
    close = [found for each in (name, *more) if (found := closest(each, names))]
    hint = f"did you mean {' and '.join(map(repr, close))}? " if close else ""
    expected = f"{what}s among" if more else f"one of the {what}s"
    return DataError(f"{path}: {hint}expected {expected} {list_names(names)}, got {list_names([name, *more])}")


def find_classes(labels: Sequence[str], path: Path) -> list[str]:
    """Return the distinct labels of the training data, sorted numerically if all are integers, else as text."""
    distinct = set(labels)
    if len(distinct) > max(_MAX_CLASSES, len(labels) / 2) and all(NUMBER.fullmatch(label) for label in distinct):
        raise DataError(
            f"{path}: expected classes, got {len(distinct):,} different numbers in {len(labels):,} examples, for "
            f"example {shown(min(distinct))[1:-1]}; for a regression from sequences of numbers, name the values to "
            "predict with --targets"
        )
    if len(distinct) < 2:
        raise DataError(
            f"{path}: expected at least two classes, got only {shown(min(distinct))}; add examples of another"
        )
    for label in distinct:
        # It could not be printed.
        if any("\ud800" <= character <= "\udfff" for character in label):
            raise DataError(f"{path}: expected labels of valid Unicode, got {shown(label)}; correct it")
    if all(_INTEGER.fullmatch(label) for label in distinct):
        return sorted(distinct, key=lambda label: (int(label), label))
    return sorted(distinct)


def encode_labels(labels: Sequence[str], classes: Sequence[str], place: Callable[[int], str]) -> NDArray[np.int64]:
    """Return the class index of each label; `place` returns the location of a label for messages."""
    indices = {name: index for index, name in enumerate(classes)}
    for position, label in enumerate(labels):
        if label not in indices:
            raise DataError(
                f"{place(position)}: expected a label of the training split, got {shown(label)}; correct it, or add "
                "examples of it to training"
            )
    return np.fromiter((indices[label] for label in labels), np.int64, len(labels))


def missing_splits(given: Collection[str], options: CustomOptions, path: Path) -> dict[str, float]:
    """Return the splits to take from the training data and their fractions."""
    if "train" not in given:
        raise DataError(f"{path}: expected a training split, got only {' and '.join(given)}; add a split named train")
    if "validation" in given:
        return {}
    fractions = {"validation": options.validation}
    return fractions if "test" in given else {**fractions, "test": options.test}


def cut_stream(total: int, fractions: Mapping[str, float], path: Path, unit: str) -> dict[str, tuple[int, int]]:
    """Return begin and end of each split of a stream: training first, then those of `fractions` in order."""
    least = _MIN_STREAM * (1 + len(fractions))
    if total < least:
        splits = " and ".join(("train", *fractions))
        raise DataError(f"{path}: expected at least {least} {unit} for {splits}, got {total}; add more data")
    ranges: dict[str, tuple[int, int]] = {}
    end, left = total, len(fractions)
    for split, fraction in reversed(list(fractions.items())):
        size = max(_MIN_STREAM, _round(fraction * total))
        begin = max(end - size, _MIN_STREAM * left)
        ranges[split] = (begin, end)
        end, left = begin, left - 1
    return {"train": (0, end), **dict(reversed(ranges.items()))}


def complete_splits(parts: Mapping[str, Columns], options: CustomOptions, path: Path) -> dict[str, Columns]:
    """Return the given splits and the missing ones, which are drawn from the training data."""
    fractions = missing_splits(parts, options, path)
    splits = dict(parts)
    if fractions:
        train = parts["train"]
        labels = np.asarray(train["labels"]) if "labels" in train else None
        advice = ", or name values to predict with --targets" if "values" in train else ""
        chosen = draw_splits(input_digests(train), fractions, options.seed, path, labels, advice)
        splits |= {split: take(train, indices) for split, indices in chosen.items()}
    return in_order(splits)


def in_order(splits: Mapping[str, Part]) -> dict[str, Part]:
    """Sort splits: training, validation, test."""
    return {split: splits[split] for split in SPLITS if split in splits}


def input_digests(columns: Columns) -> list[bytes]:
    """Return a digest of the input of each example."""
    inputs: list[Column] = [column for name, column in columns.items() if name not in ("labels", "targets")]
    digests = []
    for index in range(len(inputs[0])):
        digest = hashlib.sha256()
        for column in inputs:
            example = np.ascontiguousarray(column[index])
            # The shape distinguishes ("ab", "c") from ("a", "bc").
            digest.update(repr(example.shape).encode())
            digest.update(example.tobytes())
        digests.append(digest.digest())
    return digests


def draw_splits(
    inputs: Sequence[bytes],
    fractions: Mapping[str, float],
    seed: int,
    path: Path,
    labels: NDArray[np.int64] | None = None,
    advice: str = "",
) -> dict[str, NDArray[np.int64]]:
    """Draw the splits of `fractions` from examples; the others stay in training.

    The result depends on the seed and on the examples, not on their order. Examples with the same input always stay
    together. With labels, each class contributes its fraction, rounded, and keeps at least one input in training; a
    class with fewer than three different inputs stays in training.

    `inputs` holds bytes for each example that are equal if and only if the inputs are; `advice` says what else to
    do if all classes have too few. Returns the indices of the examples of each split, including training, in their
    original order.
    """
    groups: dict[bytes, list[int]] = {}
    for index, key in enumerate(inputs):
        groups.setdefault(key, []).append(index)
    wanted = " and ".join(fractions)
    if len(groups) < _MIN_EXAMPLES:
        raise DataError(
            f"{path}: expected at least {_MIN_EXAMPLES} different examples to draw {wanted} from, got {len(groups)}; "
            "add examples, or give the splits yourself"
        )
    keys = sorted(groups)
    # The key of the random numbers is fixed: another one would move examples between splits.
    members = [groups[keys[index]] for index in CounterRNG(seed, "own").permutation(len(keys))]
    strata = None if labels is None else [tuple(sorted({int(labels[i]) for i in group})) for group in members]
    splits = assign_items([len(group) for group in members], fractions, strata)
    if splits is None:
        raise DataError(
            f"{path}: expected a class with at least {_MIN_EXAMPLES} different examples to draw {wanted} from, got "
            f"none; add examples, or give the splits yourself{advice}"
        )
    drawn: dict[str, list[int]] = {split: [] for split in ("train", *fractions)}
    for split, group in zip(splits, members, strict=True):
        drawn[split] += group
    return {split: np.sort(np.asarray(indices, np.int64)) for split, indices in drawn.items()}


def assign_items(
    sizes: Sequence[int], fractions: Mapping[str, float], strata: Sequence[tuple[int, ...]] | None = None
) -> list[str] | None:
    """Return the split of each item, assigned in order; None if every stratum is too small.

    Each stratum contributes its fraction of the sum of its sizes to each split, or less where the items are too large,
    and keeps its first item for training. No split stays empty.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for item in range(len(sizes)):
        members.setdefault(strata[item] if strata else (), []).append(item)
    eligible = [members[stratum] for stratum in sorted(members) if len(members[stratum]) >= _MIN_EXAMPLES]
    if not eligible:
        return None
    total = sum(sizes[item] for stratum in eligible for item in stratum)
    fractions = {split: max(fraction, 1 / total) for split, fraction in fractions.items()}
    splits = ["train"] * len(sizes)
    filled = dict.fromkeys(fractions, 0)
    passed = 0
    for stratum in eligible:
        size = sum(sizes[item] for item in stratum)
        passed += size
        # Rounding the running sum instead of each stratum makes the total come out right. What large items left open
        # is made up for by later strata, but none of them contributes more than one item above its fraction.
        most = size // len(stratum) - 1
        room = {
            split: min(_round(fraction * passed) - filled[split], math.ceil(fraction * size) + most)
            for split, fraction in fractions.items()
        }
        for item in stratum[1:]:
            fitting = [split for split in fractions if sizes[item] <= room[split]]
            if fitting:
                split = max(fitting, key=lambda name: room[name] / fractions[name])
                splits[item] = split
                room[split] -= sizes[item]
                filled[split] += sizes[item]
    _fill_empty(splits, sizes, fractions, [item for stratum in eligible for item in stratum[1:]])
    return splits


def _fill_empty(splits: list[str], sizes: Sequence[int], names: Collection[str], free: Sequence[int]) -> None:
    """Give each empty split the smallest of the `free` items that can be spared, from training if possible."""
    for split in names:
        counts = Counter(splits)
        if not counts[split]:
            spare = [item for item in free if splits[item] == "train" or counts[splits[item]] > 1]
            splits[min(spare, key=lambda item: (splits[item] != "train", sizes[item]))] = split


def _round(value: float) -> int:
    # Half up, so that rounded running sums never skip.
    return math.floor(value + 0.5)
