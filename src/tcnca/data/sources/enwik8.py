"""EnWik8: the first hundred million bytes of an English Wikipedia of 2006."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tcnca.data.schema import Content
from tcnca.data.sources.archives import CURE, check_exists, open_plain
from tcnca.data.sources.published import Download
from tcnca.errors import DataError

DOWNLOADS: tuple[Download, ...] = (
    Download(
        url="http://mattmahoney.net/dc/enwik8.zip",
        filename="enwik8.zip",
        checksum="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        size=36_445_475,
    ),
)
SIZE = 100_000_000
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"

_CHUNK = 1 << 20
# Fewer would leave a split without a byte.
_LEAST = 20


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
        facts={"symbols": [value for value in range(256) if value in data]},
    )


def _find(origin: Path) -> Path:
    check_exists(origin)
    if origin.is_file():
        return origin
    # A download that is under way leaves files of its own beside the one it makes.
    found = sorted(path for path in origin.glob("enwik8*") if path.is_file() and ".part" not in path.suffixes)
    if not found:
        raise DataError(f"{origin}: has no file enwik8, enwik8.zip, enwik8.gz or enwik8.xz; give the file itself")
    return found[0]


def _read(path: Path, size: int | None) -> bytes:
    """What the file holds; no more than a byte beyond `size`, for that is one too many already."""
    data = bytearray()
    with open_plain(path) as reader:
        while chunk := reader.read(_CHUNK if size is None else min(_CHUNK, size + 1 - len(data))):
            data += chunk
    return bytes(data)


def _check(path: Path, data: bytes, unverified: bool) -> bool:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found == MD5:
        return True
    if not unverified:
        if len(data) != SIZE:
            some = f"{len(data):,}" if len(data) < SIZE else f"more than {SIZE:,}"
            raise DataError(f"{path}: has {some} bytes, enwik8 has {SIZE:,}; {CURE}")
        raise DataError(f"{path}: has the md5 checksum {found}, enwik8 has {MD5}; {CURE}")
    if len(data) < _LEAST:
        raise DataError(f"{path}: has {len(data)} bytes, at least {_LEAST} are needed for three splits; use more text")
    return False
