"""Pairs of papers of the ACL Anthology, related or not: Long-Range Arena's Retrieval."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tcnca.data.columns import Columns, Ragged
from tcnca.data.schema import Content
from tcnca.data.sources.archives import CURE, check_exists, find_file, members, open_plain
from tcnca.data.sources.published import Download, noted_checksum
from tcnca.data.sources.tables import rows
from tcnca.errors import DataError

# Of Long-Range Arena's splits and ours.
_NAMES = {"train": "train", "validation": "eval", "test": "test"}
FILES = {split: f"new_aan_pairs.{name}.tsv" for split, name in _NAMES.items()}
# Long-Range Arena's own address no longer gives the files out; this is a copy, at a revision that stays as it is.
_ADDRESS = (
    "https://huggingface.co/datasets/OpenNLPLab/lra/resolve/6cb133c44f406da743661488df9e977b87d98775/data/aan/{name}"
)
DOWNLOADS: tuple[Download, ...] = tuple(
    Download(url=_ADDRESS.format(name=name), filename=name, checksum=None, size=None) for name in FILES.values()
)
COUNTS = {"train": 147_086, "validation": 18_090, "test": 17_437}
CLASSES = ("unrelated", "related")
LONGEST = 4000
"""Bytes that are kept of a text: no model of Long-Range Arena reads more."""

_ARCHIVES = ("lra_release.gz", "lra_release.tar.gz", "lra_release.tar", "lra_release.zip")
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
_PART = 4096


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read Long-Range Arena's release, its folder or archive, or a folder with its three files, plain or compressed.

    Texts are bytes as they stand in the file, cut after 4,000. The files are large, so they are read while the parts of
    a split are asked for, and whatever is wrong in them comes up then. No checksum was ever published: what is checked
    is the number of pairs, and with `unverified` nothing is. Only files that were fetched, and have the checksum that
    their host stated then, are called verified.
    """
    check_exists(origin)
    files = _find(origin)
    checked = all(_as_noted(path, unverified) for path in files.values())
    return Content(
        kind="pairs",
        splits={split: _Pairs(path, split, None if unverified else COUNTS[split]) for split, path in files.items()},
        origin=origin.resolve().name,
        verified=checked and not unverified,
        facts={"class_names": list(CLASSES)},
    )


def _find(origin: Path) -> dict[str, Path]:
    """For each split its file, or the archive that has it."""
    if origin.is_file():
        if any(origin.name.startswith(name) for name in FILES.values()):
            raise DataError(f"{origin}: is one of three files; give the folder with all of them")
        return dict.fromkeys(FILES, origin)
    folders = [origin, *sorted(path for path in origin.rglob("*") if path.is_dir())]
    files = {}
    for split, name in FILES.items():
        found = [path for folder in folders if (path := find_file(folder, name))]
        if found:
            files[split] = found[0]
    if not files:
        for name in _ARCHIVES:
            if (origin / name).is_file():
                return dict.fromkeys(FILES, origin / name)
    missing = [name for split, name in FILES.items() if split not in files]
    if missing:
        raise DataError(
            f"{origin}: has no {', '.join(missing)}, plain or compressed, in any folder; fetch what is missing"
        )
    return files


def _as_noted(path: Path, unverified: bool) -> bool:
    """Whether a file has the checksum that its host stated when it was fetched."""
    noted = noted_checksum(path)
    if not noted or unverified:
        return False
    with path.open("rb") as file:
        found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if found != noted:
        raise DataError(f"{path}: has the checksum {found}, its host stated {noted}; {CURE}")
    return True


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """The parts of a split. Each time they are asked for, the file is read anew."""

    path: Path
    split: str
    expected: int | None

    def __iter__(self) -> Iterator[Columns]:
        with _opened(self.path, FILES[self.split]) as (reader, name):
            pairs = map(_pair, rows(reader, name, 5))
            found = 0
            while part := list(itertools.islice(pairs, _PART)):
                found += len(part)
                yield _columns(part)
        if self.expected is not None and found != self.expected:
            raise DataError(f"{name}: has {found:,} pairs, the published file has {self.expected:,}; {CURE}")


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[BinaryIO, str]]:
    """The file `name`, which is at `path` or in the archive there."""
    if path.name.startswith(name):
        with open_plain(path) as reader:
            yield reader, str(path)
        return
    for member, reader in members(path):
        if member.rpartition("/")[2] == name:
            yield reader, f"{path}: {member}"
            return
    raise DataError(f"{path}: has no {name} in it; give Long-Range Arena's release, or a folder with its three files")


def _pair(row: tuple[str, list[bytes]]) -> tuple[int, bytes, bytes]:
    where, (label, _, _, first, second) = row
    if label not in _LABELS:
        found = label.decode(errors="replace")
        raise DataError(f"{where}: has the label {found!r}, allowed are 0 and 1; fetch the file again")
    return _LABELS[label], first[:LONGEST], second[:LONGEST]


def _columns(part: list[tuple[int, bytes, bytes]]) -> Columns:
    return {
        "first": Ragged.of_bytes(first for _, first, _ in part),
        "second": Ragged.of_bytes(second for _, _, second in part),
        "labels": np.array([label for label, _, _ in part], np.int64),
    }
