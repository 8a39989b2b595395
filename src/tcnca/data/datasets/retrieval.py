"""Retrieval of Long-Range Arena: decide whether two papers of the ACL Anthology are related."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tcnca.data.archives import (
    DOWNLOAD_AGAIN,
    file_sha256,
    find_file,
    iter_members,
    open_decompressed,
    parse_binary_label,
    read_checksum,
    read_tsv,
)
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.schema import Columns, Content, Ragged
from tcnca.data.tasks import PairTask
from tcnca.errors import DataError

FILES = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
COUNTS = {"train": 147_086, "validation": 18_090, "test": 17_437}
CLASS_NAMES = ("unrelated", "related")
MAX_LENGTH = 4000
"""Bytes that are kept of a text: no model of Long-Range Arena reads more."""

# Long-Range Arena's own address no longer serves the files. This is a copy at a fixed revision.
_URL = "https://huggingface.co/datasets/OpenNLPLab/lra/resolve/6cb133c44f406da743661488df9e977b87d98775/data/aan/"
_ARCHIVES = ("lra_release.gz", "lra_release.tar.gz", "lra_release.tar", "lra_release.zip")
_PART = 4096


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read Long-Range Arena's release, its folder or archive, or a folder with its three files, plain or compressed.

    Texts are the bytes of the file, truncated to 4,000. The files are large, so they are read, and their errors raised,
    while the parts of a split are iterated. No checksum was ever published: only the number of pairs is checked, and
    nothing with `unverified`. The data counts as verified only if the files were downloaded and have the checksum that
    the host stated.
    """
    files = _find(origin)
    return Content(
        kind="pairs",
        splits={
            split: _read_pairs(path, split, None if unverified else COUNTS[split]) for split, path in files.items()
        },
        origin=origin.resolve().name,
        verified=not unverified and all(_matches_host(path) for path in files.values()),
        metadata={"class_names": list(CLASS_NAMES)},
    )


def _find(origin: Path) -> dict[str, Path]:
    """Return the file of each split, or the archive that contains it."""
    if origin.is_file():
        if any(origin.name.startswith(name) for name in FILES.values()):
            raise DataError(f"{origin}: expected a folder with three files, got one of the files; give the folder")
        return dict.fromkeys(FILES, origin)
    folders = [origin, *sorted(path for path in origin.rglob("*") if path.is_dir())]
    found = {split: [path for each in folders if (path := find_file(each, name))] for split, name in FILES.items()}
    files = {split: paths[0] for split, paths in found.items() if paths}
    if not files:
        for name in _ARCHIVES:
            if (origin / name).is_file():
                return dict.fromkeys(FILES, origin / name)
    missing = [name for split, name in FILES.items() if split not in files]
    if missing:
        raise DataError(f"{origin}: {', '.join(missing)} not found, plain or compressed, in any folder; add the files")
    return files


def _matches_host(path: Path) -> bool:
    """Return whether a file has the checksum that its host stated for the download."""
    stated = read_checksum(path)
    if stated is None:
        return False
    if (found := file_sha256(path)) != stated:
        raise DataError(f"{path}: expected the checksum {stated}, as stated by its host, got {found}; {DOWNLOAD_AGAIN}")
    return True


def _read_pairs(path: Path, split: str, expected: int | None) -> Iterator[Columns]:
    """Yield the pairs of a split in parts."""
    found = 0
    with _open(path, FILES[split]) as (reader, name):
        # Cut each line before the next one is read: a part of whole lines might not fit into memory.
        rows = (
            (parse_binary_label(label, where), first[:MAX_LENGTH], second[:MAX_LENGTH])
            for where, (label, _, _, first, second) in read_tsv(reader, name, 5)
        )
        while part := list(itertools.islice(rows, _PART)):
            found += len(part)
            yield {
                "first": Ragged.from_bytes(first for _, first, _ in part),
                "second": Ragged.from_bytes(second for _, _, second in part),
                "labels": np.array([label for label, _, _ in part], np.int64),
            }
    if expected is not None and found != expected:
        raise DataError(f"{name}: expected {expected:,} pairs, got {found:,}; {DOWNLOAD_AGAIN}")


@contextlib.contextmanager
def _open(path: Path, name: str) -> Iterator[tuple[BinaryIO, str]]:
    """Open the file `name`, which is at `path` or in the archive there."""
    if path.name.startswith(name):
        with open_decompressed(path) as reader:
            yield reader, str(path)
        return
    for member, reader in iter_members(path):
        if member.rpartition("/")[2] == name:
            yield reader, f"{path}: {member}"
            return
    raise DataError(
        f"{path}: {name} not found in it; give Long-Range Arena's release, or a folder with its three files"
    )


RETRIEVAL = DatasetSpec(
    name="retrieval",
    title="Retrieval (Long-Range Arena)",
    description="decide whether two papers (ACL Anthology) are related, at most 4000 bytes each",
    source="a public copy of LRA's files",
    sizes=COUNTS,
    disk_bytes=1_500_000_000,
    task=partial(PairTask, max_length=MAX_LENGTH),
    read=read,
    accepted_files=f"Long-Range Arena's release, or a folder with {', '.join(FILES.values())}",
    downloads=tuple(Download(url=_URL + name, filename=name, checksum=None, size=None) for name in FILES.values()),
)
