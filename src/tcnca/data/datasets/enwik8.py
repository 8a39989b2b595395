"""EnWik8: the first 100 million bytes of the English Wikipedia of 2006, predicted byte by byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tcnca.data.archives import DOWNLOAD_AGAIN, find_file, open_decompressed, read_all
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.schema import SPLITS, Content
from tcnca.data.tasks import LanguageTask
from tcnca.errors import DataError

SIZE = 100_000_000
SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"

_MAX_SIZE = 2 * SIZE
"""The file is read into memory, so another one may not have any size."""
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
        data = read_all(reader, path, _MAX_SIZE)
    found = hashlib.sha256(data).hexdigest()
    if not unverified and len(data) != SIZE:
        raise DataError(f"{path}: expected {SIZE:,} bytes, got {len(data):,}; {DOWNLOAD_AGAIN}")
    if not unverified and found != SHA256:
        raise DataError(f"{path}: expected the sha256 checksum {SHA256}, got {found}; {DOWNLOAD_AGAIN}")
    if len(data) < _MIN_SIZE:
        raise DataError(f"{path}: expected at least {_MIN_SIZE} bytes for three splits, got {len(data)}; add more text")
    stream = np.frombuffer(data, np.uint8)
    parts = np.split(stream, [len(data) * 90 // 100, len(data) * 95 // 100])
    return Content(
        kind="language",
        splits={split: [{"bytes": part}] for split, part in zip(SPLITS, parts, strict=True)},
        origin=path.resolve().name,
        verified=found == SHA256,
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
            url="https://mattmahoney.net/dc/enwik8.zip",
            filename="enwik8.zip",
            checksum="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            size=36_445_475,
        ),
    ),
)
