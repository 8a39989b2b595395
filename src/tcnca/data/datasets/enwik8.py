"""EnWik8: the first 100 million bytes of the English Wikipedia of 2006, predicted byte by byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tcnca.data.archives import RETRY, find_file, open_decompressed, read_all
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.schema import SPLITS, Content
from tcnca.data.tasks import LanguageTask
from tcnca.errors import DataError

SIZE = 100_000_000
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"

_MIN_SIZE = 20
"""With fewer bytes a split would be empty."""


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the file, plain or compressed, or a folder that has it: 90 % train, 5 % validation, 5 % test."""
    path = origin if origin.is_file() else find_file(origin, "enwik8")
    if path is None:
        raise DataError(
            f"{origin}: expected a file enwik8, enwik8.zip, enwik8.gz or enwik8.xz, got none; give the file"
        )
    with open_decompressed(path) as reader:
        data = read_all(reader, path)
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if not unverified and len(data) != SIZE:
        raise DataError(f"{path}: expected {SIZE:,} bytes, got {len(data):,}; {RETRY}")
    if not unverified and found != MD5:
        raise DataError(f"{path}: expected the md5 checksum {MD5}, got {found}; {RETRY}")
    if len(data) < _MIN_SIZE:
        raise DataError(f"{path}: expected at least {_MIN_SIZE} bytes for three splits, got {len(data)}; add more text")
    stream = np.frombuffer(data, np.uint8)
    parts = np.split(stream, [len(data) * 90 // 100, len(data) * 95 // 100])
    return Content(
        kind="language",
        splits={split: [{"bytes": part}] for split, part in zip(SPLITS, parts, strict=True)},
        origin=path.resolve().name,
        verified=found == MD5,
        metadata={"symbols": np.unique(stream).tolist()},
    )


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
