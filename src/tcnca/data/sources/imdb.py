"""IMDB's large set of movie reviews, negative and positive: Long-Range Arena's Text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tcnca.data.columns import Columns, Ragged
from tcnca.data.schema import Content
from tcnca.data.sources.archives import CURE, check_exists, find_file, members, open_plain, read_all
from tcnca.data.sources.published import Download
from tcnca.data.sources.tables import rows, unescape
from tcnca.errors import DataError

DOWNLOADS: tuple[Download, ...] = (
    Download(
        url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        filename="aclImdb_v1.tar.gz",
        checksum="md5:7c2ac02c03563afcf9b574c7e56c153a",
        size=84_125_825,
    ),
)
COUNT = 25_000
# sha256 of the sorted sha256 sums of the reviews, each of the label as a byte and the text.
DIGESTS = {
    "train": "3097e9b024e8f5ed8fae1ab619539b572ac826527a1384a733184ae9004bf2e3",
    "test": "5a189b02b1226af78699c996af3035ae9bad804aa86f8fae65cbe2e8b3d94543",
}

_FOLDER = "aclImdb"
_CLASSES = {"neg": 0, "pos": 1}
_LABELS = {b"0": 0, b"1": 1}
_MEMBER = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/[^/]+\.txt")
_LONGEST = 1 << 24

Reviews = dict[str, list[tuple[int, bytes]]]


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the archive, its folder, or a folder with `imdb_train.tsv` and `imdb_test.tsv`, plain or compressed.

    Whichever it is, the reviews come in the same order, which mixes the classes. Each is kept whole, as UTF-8 with
    `\\n` for every end of a line. There is no validation split.
    """
    check_exists(origin)
    reviews: Reviews = {"train": [], "test": []}
    for split, label, text in _reviews(origin):
        reviews[split].append((label, text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")))
    splits: dict[str, list[Columns]] = {}
    verified = True
    for split, examples in reviews.items():
        keyed = sorted((hashlib.sha256(bytes([label]) + text).digest(), label, text) for label, text in examples)
        verified &= _check(origin, split, [key for key, _, _ in keyed], unverified)
        labels = np.array([label for _, label, _ in keyed], np.int64)
        splits[split] = [{"tokens": Ragged.of_bytes(text for _, _, text in keyed), "labels": labels}]
    return Content(
        kind="classification",
        splits=splits,
        origin=origin.resolve().name,
        verified=verified,
        facts={"class_names": ["negative", "positive"]},
    )


def _reviews(origin: Path) -> Iterator[tuple[str, int, bytes]]:
    """Split, label and text of each review, in the order of the files."""
    if origin.is_file():
        return _from_archive(origin)
    if any(find_file(origin, f"imdb_{split}.tsv") for split in DIGESTS):
        return _from_tables(origin)
    folder = origin / _FOLDER if (origin / _FOLDER).is_dir() else origin
    if (folder / "train").is_dir() or (folder / "test").is_dir():
        return _from_folder(folder)
    archive = origin / DOWNLOADS[0].filename
    if archive.is_file():
        return _from_archive(archive)
    raise DataError(
        f"{origin}: has neither the folders train and test, nor imdb_train.tsv and imdb_test.tsv, nor {archive.name}; "
        f"give the archive, or the folder {_FOLDER} that is in it"
    )


def _from_archive(archive: Path) -> Iterator[tuple[str, int, bytes]]:
    for name, reader in members(archive):
        if place := _MEMBER.fullmatch(name):
            yield place[1], _CLASSES[place[2]], read_all(reader, f"{archive}: {name}", _LONGEST)


def _from_folder(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for split in DIGESTS:
        for name, label in _CLASSES.items():
            place = folder / split / name
            if not place.is_dir():
                raise DataError(f"{place}: no such folder; {folder.name} is not whole, unpack it again")
            for file, reader in members(place):
                if file.endswith(".txt"):
                    yield split, label, read_all(reader, place / file, _LONGEST)


def _from_tables(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for split in DIGESTS:
        path = find_file(folder, f"imdb_{split}.tsv")
        if path is None:
            raise DataError(
                f"{folder / f'imdb_{split}.tsv'}: no such file, plain or compressed; put it beside the other"
            )
        with open_plain(path) as reader:
            for where, (label, text) in rows(reader, path, 2):
                if label not in _LABELS:
                    found = label.decode(errors="replace")
                    raise DataError(f"{where}: has the label {found!r}, allowed are 0 and 1; fetch the file again")
                yield split, _LABELS[label], unescape(text, where)


def _check(origin: Path, split: str, keys: list[bytes], unverified: bool) -> bool:
    """Whether the reviews, by their sorted checksums, are the published ones."""
    if not keys:
        raise DataError(f"{origin}: has no reviews in {split}; give the archive, or the folder {_FOLDER} that is in it")
    found = hashlib.sha256(b"".join(keys)).hexdigest()
    if found == DIGESTS[split]:
        return True
    if not unverified:
        if len(keys) != COUNT:
            raise DataError(f"{origin}: has {len(keys):,} reviews in {split}, the published set has {COUNT:,}; {CURE}")
        raise DataError(
            f"{origin}: the reviews in {split} have the checksum {found}, the published ones have {DIGESTS[split]}; "
            f"{CURE}"
        )
    return False
