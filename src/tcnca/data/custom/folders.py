"""Which files a folder holds, and which of them are named as splits."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from tcnca.data.schema import SPLITS
from tcnca.errors import DataError

_BEGINNINGS = {"train": "train", "val": "validation", "dev": "validation", "test": "test"}


def files_under(path: Path, suffixes: Collection[str] | None = None) -> list[Path]:
    """The visible files in a folder and its folders, by name, only those with one of `suffixes`; or the file itself."""
    if path.is_file():
        return [path] if suffixes is None or path.suffix.lower() in suffixes else []
    found = (file for file in path.rglob("*") if file.is_file())
    visible = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    chosen = [file for file in visible if suffixes is None or file.suffix.lower() in suffixes]
    return sorted(chosen, key=lambda file: file.relative_to(path).as_posix())


def split_files(folder: Path, suffixes: Collection[str] | None = None) -> tuple[dict[str, list[Path]], list[Path]]:
    """The files of each split that entries of a folder are named after, and the entries that are named otherwise."""
    found: dict[str, list[Path]] = {}
    others = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        files = [] if entry.name.startswith(".") else files_under(entry, suffixes)
        split = next((split for begin, split in _BEGINNINGS.items() if entry.name.lower().startswith(begin)), None)
        if files and split is None:
            others.append(entry)
        elif files and split is not None:
            found.setdefault(split, []).extend(files)
    return {split: found[split] for split in SPLITS if split in found}, others


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say of the system's errors which file they are about."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); may you read it?") from error


def stray(entry: Path, cure: str) -> DataError:
    """The error of an entry that belongs to no split, next to others that do."""
    return DataError(f"{entry}: belongs to no split; begin its name with train, valid or test, or move it away; {cure}")
