"""Find the user's files, and read any file, or a folder of them, as bytes for a language model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tcnca.data.custom.options import (
    ARRAY_OPTIONS,
    TABLE_OPTIONS,
    CustomOptions,
    assign_items,
    cut_stream,
    in_order,
    missing_splits,
    refuse_options,
)
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS, Columns, Content
from tcnca.errors import DataError

PART = 16 * 2**20
"""Maximum number of bytes of a part."""

_PREFIXES = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}
# Fewer files are too coarse for splits of about the right size.
_MIN_FILES = 10


def list_files(path: Path, suffixes: Collection[str] | None = None) -> list[Path]:
    """List the visible files of a folder and its subfolders by name, only those with one of `suffixes`."""
    if path.is_file():
        return [path] if suffixes is None or path.suffix.lower() in suffixes else []
    found = (file for file in path.rglob("*") if file.is_file())
    visible = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    chosen = [file for file in visible if suffixes is None or file.suffix.lower() in suffixes]
    return sorted(chosen, key=lambda file: file.relative_to(path).as_posix())


def split_files(folder: Path, suffixes: Collection[str] | None = None) -> tuple[dict[str, list[Path]], list[Path]]:
    """Return the files of each split, from the names of the entries of a folder, and the other entries."""
    found: dict[str, list[Path]] = {}
    others = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        files = [] if entry.name.startswith(".") else list_files(entry, suffixes)
        split = next((split for prefix, split in _PREFIXES.items() if entry.name.lower().startswith(prefix)), None)
        if files and split is None:
            others.append(entry)
        elif files and split is not None:
            found.setdefault(split, []).extend(files)
    return in_order(found), others


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def unassigned_file(entry: Path, advice: str) -> DataError:
    """Return the error of an entry that belongs to no split, next to others that do."""
    return DataError(f"{entry}: expected a name that starts with train, valid or test; rename or move it, {advice}")


@dataclasses.dataclass(frozen=True)
class _FileRanges:
    """Concatenated ranges of files (path, begin, end), read lazily in parts."""

    pieces: Sequence[tuple[Path, int, int]]

    @classmethod
    def from_files(cls, files: Sequence[Path]) -> _FileRanges:
        return cls([(file, 0, size) for file in files if (size := file.stat().st_size)])

    def __iter__(self) -> Iterator[Columns]:
        for path, begin, end in self.pieces:
            for start in range(begin, end, PART):
                size = min(PART, end - start)
                with read_errors(path):
                    part = np.fromfile(path, np.uint8, size, offset=start)
                if len(part) < size:
                    raise DataError(f"{path}: became shorter while it was read; run the command again")
                yield {"bytes": part}

    def between(self, begin: int, end: int) -> _FileRanges:
        """Return the bytes from `begin` (inclusive) to `end` (exclusive)."""
        pieces, start = [], 0
        for path, first, last in self.pieces:
            low, high = max(begin - start, 0), min(end - start, last - first)
            if low < high:
                pieces.append((path, first + low, first + high))
            start += last - first
        return _FileRanges(pieces)

    @property
    def size(self) -> int:
        return sum(end - begin for _, begin, end in self.pieces)


def read_bytes(origin: Path, options: CustomOptions) -> Content:
    """Read a file, or the visible files of a folder, as bytes.

    A folder with entries named train*, and valid*, val*, dev* or test*, has its splits given. In any other folder,
    whole files are drawn for validation and test; fewer than ten files are concatenated in the order of their names and
    cut like a single file. Nothing is inserted between files, and archives are not unpacked.
    """
    refuse_options(options, (*TABLE_OPTIONS, *ARRAY_OPTIONS), origin, "bytes of a language model")
    given, others = split_files(origin) if origin.is_dir() else ({}, [])
    if others and "train" in given and len(given) > 1:
        raise unassigned_file(others[0], "or give --kind if the files are tables or arrays")
    if others or not given:
        files = [path for path, _, _ in _FileRanges.from_files(list_files(origin)).pieces]
        if len(files) >= _MIN_FILES:
            return _content(origin, _draw_files(origin, files, options))
        given = {"train": files}
    streams = {split: _FileRanges.from_files(files) for split, files in given.items()}
    for split, stream in streams.items():
        if not stream.size:
            where = f" for {split}" if len(streams) > 1 else ""
            raise DataError(f"{origin}: expected files that are not empty{where}; add text")
    fractions = missing_splits(streams, options, origin)
    train = streams["train"]
    ranges = cut_stream(train.size, fractions, origin, "bytes")
    return _content(origin, {**streams, **{split: train.between(*ends) for split, ends in ranges.items()}})


def _draw_files(folder: Path, files: Sequence[Path], options: CustomOptions) -> dict[str, _FileRanges]:
    """Draw whole files for each split."""

    def order(path: Path) -> tuple[int, str]:
        name = path.relative_to(folder).as_posix()
        return int(CounterRNG(options.seed, "own", name).raw(1)[0]), name

    files = sorted(files, key=order)
    fractions = {"validation": options.validation, "test": options.test}
    splits = assign_items([path.stat().st_size for path in files], fractions)
    assert splits is not None  # there are at least ten
    return {
        split: _FileRanges.from_files(sorted(path for path, found in zip(files, splits, strict=True) if found == split))
        for split in SPLITS
    }


def _content(origin: Path, streams: Mapping[str, _FileRanges]) -> Content:
    return Content(kind="language", splits=in_order(streams), origin=origin.resolve().name, verified=False)
