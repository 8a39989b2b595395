"""Which array of a file is what."""

from __future__ import annotations

import contextlib
import dataclasses
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.custom.columns import listed, unknown
from tcnca.data.custom.options import CustomOptions
from tcnca.data.custom.splits import WORDS
from tcnca.data.schema import Kind
from tcnca.errors import DataError

_VALUES = ("values", "x", "X", "data", "sequences", "inputs")


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a file, or of one of its splits: by what each is called within the split, its name in the file."""

    path: Path
    names: Mapping[str, str]

    @classmethod
    def of(cls, path: Path) -> Arrays:
        """All arrays of a .npz; a .npy holds values and nothing else."""
        if path.suffix.lower() == ".npy":
            return cls(path, {"values": "values"})
        # NumPy leaves a file open that it opens itself and finds damaged.
        with _explained(path), path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ValueError("it is a .npy by its content")
            return cls(path, {name: name for name in loaded.files})

    def read(self, called: str) -> Named:
        """One of the arrays."""
        if called not in self.names:
            raise unknown(called, "array", list(self.names), self.path)
        name = self.names[called]
        with _explained(self.path, f", array {name!r}"), self.path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return Named(self.path, name, np.asarray(loaded if self.path.suffix.lower() == ".npy" else loaded[name]))


@dataclasses.dataclass(frozen=True)
class Named:
    """An array, and how to name it in an error."""

    path: Path
    name: str
    array: NDArray[Any]

    def __str__(self) -> str:
        return f"{self.path}: array {self.name!r}"

    def place(self, *index: int) -> str:
        """For people, where an element is."""
        return f"{self.path}: {self.name}[{', '.join(str(i) for i in index)}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picked:
    """The arrays that matter."""

    kind: Kind
    values: Named
    lengths: Named | None
    aim: Named | None
    """Labels or targets."""

    @property
    def arrays(self) -> list[Named]:
        """All of them."""
        return [named for named in (self.values, self.lengths, self.aim) if named is not None]

    @property
    def series(self) -> bool:
        """Whether the values are one long series."""
        return self.values.path.suffix.lower() == ".npy" and self.values.array.ndim in (1, 2)


@contextlib.contextmanager
def _explained(path: Path, which: str = "") -> Iterator[None]:
    """Say of NumPy's and zip's errors which file they are about."""
    try:
        yield
    except (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}{which}: cannot be read ({error}); write it again with np.save or np.savez, with arrays of "
            "numbers or strings, not of objects"
        ) from error


def splits_of(arrays: Arrays, options: CustomOptions) -> dict[str, Arrays]:
    """The arrays of each split, where `train_values`, `values_test` or the like name them; else all as training."""
    groups: dict[str, dict[str, str]] = {}
    for name in arrays.names:
        split, called = _parted(name)
        group = groups.setdefault(split, {})
        if split and called in group:
            raise DataError(f"{arrays.path}: arrays {group[called]!r} and {name!r} mean the same; remove one of them")
        group[called] = name
    known = _VALUES if options.values is None else (options.values,)
    if not any(name in groups.get("train", {}) for name in known):
        return {"train": arrays}
    return {split: Arrays(arrays.path, names) for split, names in groups.items() if split}


def _parted(name: str) -> tuple[str, str]:
    """The split that a name speaks of, or nothing, and the rest of the name."""
    head, _, tail = name.partition("_")
    if tail and head.lower() in WORDS:
        return WORDS[head.lower()], tail
    head, _, tail = name.rpartition("_")
    if head and tail.lower() in WORDS:
        return WORDS[tail.lower()], head
    return "", name


def pick(arrays: Arrays, options: CustomOptions) -> Picked:
    """What the options say, and where they say nothing, what the arrays' names do."""
    kind, aim = _aim(arrays, options)
    called = options.lengths or ("lengths" if "lengths" in arrays.names else None)
    return Picked(
        kind=kind,
        values=arrays.read(options.values or _values(arrays)),
        lengths=None if called is None else arrays.read(called),
        aim=aim,
    )


def check_left(files: Collection[Arrays], picked: Mapping[str, Picked], options: CustomOptions) -> None:
    """Refuse arrays that were not picked, unless the options settle what is to be predicted."""
    if any(option is not None for option in (options.kind, options.labels, options.targets)):
        return
    used = {(named.path, named.name) for one in picked.values() for named in one.arrays}
    for arrays in files:
        left = [name for name in arrays.names.values() if (arrays.path, name) not in used]
        if left:
            raise DataError(
                f"{arrays.path}: the role of {listed(left)} is not known; name the class of each sequence with "
                "--labels, the numbers to predict from each with --targets, or the length of each with --lengths, "
                f"or --kind {picked['train'].kind} to leave out what is not needed"
            )


def _values(arrays: Arrays) -> str:
    found = [name for name in _VALUES if name in arrays.names]
    if len(found) == 1:
        return found[0]
    state = f"arrays {listed(found)} could each be" if found else "no array is obviously"
    raise DataError(
        f"{arrays.path}: {state} the values, there are {listed(list(arrays.names))}; say which with --values"
    )


def _aim(arrays: Arrays, options: CustomOptions) -> tuple[Kind, Named | None]:
    """What there is to do, and the array that says how well."""
    if options.labels is not None and options.targets is not None:
        raise DataError(f"{arrays.path}: --labels and --targets are both given; leave one of them out")
    kind: Kind | None = options.kind
    for option, meant in (("labels", "classification"), ("targets", "regression")):
        value = getattr(options, option)
        if value is not None and kind not in (None, meant):
            raise DataError(
                f"{arrays.path}: --{option} {value!r} means {meant}, --kind says {kind}; leave one of them out"
            )
    labels, targets, y = (name if name in arrays.names else None for name in ("labels", "targets", "y"))
    if options.labels is not None or kind == "classification":
        return "classification", _wanted(arrays, options.labels or labels or y, "labels")
    if options.targets is not None or kind == "regression":
        return "regression", _wanted(arrays, options.targets or targets or y, "targets")
    if kind == "forecast" or not (labels or targets or y):
        return "forecast", None
    if labels and targets:
        raise DataError(f"{arrays.path}: has both labels and targets; say --kind classification or --kind regression")
    aim = arrays.read(labels or targets or "y")
    real = targets is not None or (labels is None and aim.array.dtype.kind == "f")
    return "regression" if real else "classification", aim


def _wanted(arrays: Arrays, called: str | None, option: str) -> Named:
    if called is None:
        raise DataError(
            f"{arrays.path}: no array is obviously the {option}, there are {listed(list(arrays.names))}; "
            f"say which with --{option}, or leave --kind out"
        )
    return arrays.read(called)
