"""EnWik8: the first 100 million bytes of the English Wikipedia of 2006, predicted byte by byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tcnca.data.archives import RETRY, check_exists, open_decompressed
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.schema import Content
from tcnca.data.tasks import LanguageTask
from tcnca.errors import DataError

SIZE = 100_000_000
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"

_CHUNK = 1 << 20
_MIN_SIZE = 20
"""With fewer bytes a split would be empty."""


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the file, plain or compressed, or a folder that has it: 90 % train, 5 % validation, 5 % test."""
    path = _find(origin)
    data = _read(path, None if unverified else SIZE)
    verified = _check(path, data, unverified)
    stream = np.frombuffer(data, np.uint8)
    train, validation, test = np.split(stream, [len(data) * 90 // 100, len(data) * 95 // 100])
    return Content(
        kind="language",
        splits={"train": [{"bytes": train}], "validation": [{"bytes": validation}], "test": [{"bytes": test}]},
        origin=path.resolve().name,
        verified=verified,
        metadata={"symbols": [value for value in range(256) if value in data]},
    )


def _find(origin: Path) -> Path:
    check_exists(origin)
    if origin.is_file():
        return origin
    # Skip the files of an unfinished download.
    found = sorted(path for path in origin.glob("enwik8*") if path.is_file() and ".part" not in path.suffixes)
    if not found:
        raise DataError(
            f"{origin}: expected a file enwik8, enwik8.zip, enwik8.gz or enwik8.xz, got none; give the file"
        )
    return found[0]


def _read(path: Path, size: int | None) -> bytes:
    """Read the content of the file, at most `size + 1` bytes, which is enough to see that it is too long."""
    data = bytearray()
    with open_decompressed(path) as reader:
        while chunk := reader.read(_CHUNK if size is None else min(_CHUNK, size + 1 - len(data))):
            data += chunk
    return bytes(data)


def _check(path: Path, data: bytes, unverified: bool) -> bool:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found == MD5:
        return True
    if not unverified:
        if len(data) != SIZE:
            count = f"{len(data):,}" if len(data) < SIZE else "more"
            raise DataError(f"{path}: expected {SIZE:,} bytes, got {count}; {RETRY}")
        raise DataError(f"{path}: expected the md5 checksum {MD5}, got {found}; {RETRY}")
    if len(data) < _MIN_SIZE:
        raise DataError(f"{path}: expected at least {_MIN_SIZE} bytes for three splits, got {len(data)}; add more text")
    return False


ENWIK8 = DatasetSpec(
    name="enwik8",
    title="EnWik8",
    description="predict the next byte of Wikipedia",
    source="mattmahoney.net, 36 MB",
    sizes={"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000},
    disk_bytes=100_000_000,
    task=LanguageTask,
    read=read,
    accepted_files="the file enwik8, plain or compressed (.gz, .xz, .zip), or a folder that has it",
    downloads=(
        Download(
            url="http://mattmahoney.net/dc/enwik8.zip",
            filename="enwik8.zip",
            checksum="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            size=36_445_475,
        ),
    ),
)
