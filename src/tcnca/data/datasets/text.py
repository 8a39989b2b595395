"""Text of Long-Range Arena: classify a movie review of IMDB, read byte by byte, as negative or positive."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tcnca.data.archives import (
    DOWNLOAD_AGAIN,
    find_file,
    iter_members,
    open_decompressed,
    parse_binary_label,
    read_all,
    read_tsv,
)
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.schema import Columns, Content, Ragged
from tcnca.data.tasks import ClassificationTask
from tcnca.errors import DataError

COUNT = 25_000
# sha256 of the sorted sha256 digests of the reviews, each of the label as a byte followed by the text.
DIGESTS = {
    "train": "3097e9b024e8f5ed8fae1ab619539b572ac826527a1384a733184ae9004bf2e3",
    "test": "5a189b02b1226af78699c996af3035ae9bad804aa86f8fae65cbe2e8b3d94543",
}

_MAX_REVIEW = 2**20
_MAX_BYTES = 2**28
"""The reviews are read into memory, so their sizes, with a thousand bytes for each of them, are limited."""
_ARCHIVE = "aclImdb_v1.tar.gz"
_FOLDER = "aclImdb"
_CLASSES = {"neg": 0, "pos": 1}
_MEMBER = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/[^/]+\.txt")
_ESCAPED = {b"\\": b"\\", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the archive, its folder, or a folder with `imdb_train.tsv` and `imdb_test.tsv`, plain or compressed.

    The order of the reviews is the same for all of them and mixes the classes. Reviews are stored completely, as UTF-8
    with `\\n` as line ending. There is no validation split.
    """
    reviews: dict[str, list[tuple[int, bytes]]] = {"train": [], "test": []}
    left = _MAX_BYTES
    for split, label, text in _reviews(origin):
        left -= len(text) + 1000
        if left < 0:
            raise DataError(f"{origin}: expected {2 * COUNT:,} reviews, got far more; prepare them under another name")
        reviews[split].append((label, text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")))
    splits: dict[str, list[Columns]] = {}
    verified = True
    for split, examples in reviews.items():
        keyed = sorted((hashlib.sha256(bytes([label]) + text).digest(), label, text) for label, text in examples)
        verified &= _check(origin, split, [key for key, _, _ in keyed], unverified)
        labels = np.array([label for _, label, _ in keyed], np.int64)
        splits[split] = [{"tokens": Ragged.from_bytes(text for _, _, text in keyed), "labels": labels}]
    return Content(
        kind="classification",
        splits=splits,
        origin=origin.resolve().name,
        verified=verified,
        metadata={"class_names": ["negative", "positive"]},
    )


def _reviews(origin: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield split, label and text of each review, in the order of the files."""
    if any(find_file(origin, f"imdb_{split}.tsv") for split in DIGESTS):
        yield from _from_tables(origin)
        return
    path = next((path for name in (_FOLDER, _ARCHIVE) if (path := origin / name).exists()), origin)
    for name, reader in iter_members(path):
        if match := _MEMBER.fullmatch(name):
            yield match[1], _CLASSES[match[2]], read_all(reader, f"{path}: {name}", _MAX_REVIEW)


def _from_tables(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for split in DIGESTS:
        path = find_file(folder, f"imdb_{split}.tsv")
        if path is None:
            raise DataError(f"{folder / f'imdb_{split}.tsv'}: no such file, plain or compressed; add it to the folder")
        with open_decompressed(path) as reader:
            for where, (label, text) in read_tsv(reader, path, 2):
                yield split, parse_binary_label(label, where), _unescape(text, where)


def _unescape(text: bytes, where: str) -> bytes:
    r"""Replace the escapes `\\`, `\n`, `\r` and `\t`."""

    def replace(escape: re.Match[bytes]) -> bytes:
        if escape[1] not in _ESCAPED:
            found = escape[0].decode(errors="replace")
            raise DataError(rf"{where}: expected the escapes \\, \n, \r or \t, got {found!r}; download the file again")
        return _ESCAPED[escape[1]]

    return re.sub(rb"\\(.?)", replace, text, flags=re.DOTALL)


def _check(origin: Path, split: str, keys: list[bytes], unverified: bool) -> bool:
    """Return whether the reviews, given by their sorted digests, are the published ones."""
    if not keys:
        raise DataError(f"{origin}: no reviews in {split}; give {_ARCHIVE}, or the folder {_FOLDER} in it")
    found = hashlib.sha256(b"".join(keys)).hexdigest()
    if found == DIGESTS[split]:
        return True
    if not unverified:
        if len(keys) != COUNT:
            raise DataError(f"{origin}: expected {COUNT:,} reviews in {split}, got {len(keys):,}; {DOWNLOAD_AGAIN}")
        raise DataError(f"{origin}: expected the checksum {DIGESTS[split]} of {split}, got {found}; {DOWNLOAD_AGAIN}")
    return False


TEXT = DatasetSpec(
    name="text",
    title="Text (Long-Range Arena)",
    description="classify movie reviews (IMDB) as negative or positive, at most 4000 bytes",
    source="ai.stanford.edu, 84 MB",
    sizes={"train": COUNT, "test": COUNT},
    disk_bytes=66_000_000,
    task=partial(ClassificationTask, max_length=4000),
    read=read,
    accepted_files=f"{_ARCHIVE}, its folder, or a folder with imdb_train.tsv and imdb_test.tsv, plain or compressed",
    downloads=(
        Download(
            url=f"https://ai.stanford.edu/~amaas/data/sentiment/{_ARCHIVE}",
            filename=_ARCHIVE,
            checksum="sha256:c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
            size=84_125_825,
        ),
    ),
)
