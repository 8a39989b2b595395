"""Read published files in whatever way they are packed, without writing to disk.

Names inside an archive are never used as paths, so they cannot point outside of it.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tcnca.errors import DataError

Compression = Literal["gz", "xz", "bz2", "zip"]

RETRY = "download it again, or accept it as it is with --unverified"
"""Advice for a file that is not the published one."""

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b\x08": "gz",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    # A text can start with "BZh", so include the marker of the first block, or of the end of an empty file.
    **{b"BZh%d" % n + mark: "bz2" for n in range(1, 10) for mark in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")},
}
_SUFFIXES = ("", ".gz", ".xz", ".bz2", ".zip")


@contextlib.contextmanager
def archive_errors(name: str | Path) -> Iterator[None]:
    """Convert the errors of the decompressors into a `DataError` about `name`."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror}); check the path") from error
    except (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"{name}: is truncated, damaged or not an archive ({error}); download it again") from error
    except (RuntimeError, NotImplementedError) as error:
        # zipfile raises these for encrypted files and unknown compression methods.
        raise DataError(f"{name}: cannot be unpacked ({error}); unpack it yourself and give its content") from error


def compression(path: Path) -> Compression | None:
    """Detect the compression of a file from its first bytes; None if it is not compressed."""
    with archive_errors(path), path.open("rb") as file:
        start = file.read(10)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def _regular_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    regular = (0, stat.S_IFREG)
    return [i for i in archive.infolist() if not i.is_dir() and stat.S_IFMT(i.external_attr >> 16) in regular]


def _open_only_member(path: Path) -> Any:
    # An open member stays readable after the archive is closed.
    with zipfile.ZipFile(path) as archive:
        files = _regular_files(archive)
        if len(files) != 1:
            raise DataError(f"{path}: expected one file in the archive, got {len(files)}; unpack it and give one file")
        return archive.open(files[0])


_OPENERS: dict[Compression | None, Callable[[Path], Any]] = {
    None: lambda path: path.open("rb"),
    "gz": gzip.open,
    "xz": lzma.open,
    "bz2": bz2.open,
    "zip": _open_only_member,
}


def open_decompressed(path: Path) -> BinaryIO:
    """Open a plain or compressed file for reading its content. A zip must contain exactly one file."""
    kind = compression(path)
    with archive_errors(path):
        return _OPENERS[kind](path)


def read_all(reader: BinaryIO, name: str | Path) -> bytes:
    """Return the content of an open file or member."""
    with archive_errors(name):
        return reader.read()


def iter_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Iterate over the regular files of a folder, or of a tar or zip archive; links and devices are skipped.

    Read each file with `read_all` or `read_tsv` before advancing to the next one.
    """
    with archive_errors(path):
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file() and not file.is_symlink():
                    with archive_errors(file), file.open("rb") as reader:
                        yield file.relative_to(path).as_posix(), reader
        elif compression(path) == "zip":
            with zipfile.ZipFile(path) as archive:
                for entry in _regular_files(archive):
                    with archive.open(entry) as member:
                        yield entry.filename, member  # type: ignore[misc]
        else:
            with open_decompressed(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                for info in tar:
                    inner = tar.extractfile(info) if info.isreg() and not info.issparse() else None
                    if inner is not None:
                        yield info.name, inner  # type: ignore[misc]


def find_file(folder: Path, name: str) -> Path | None:
    """Find the file `name` in `folder`, plain or with the suffix of a compression."""
    return next((path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)


def read_tsv(reader: BinaryIO, name: str | Path, columns: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the location (file and line, for messages) and the columns of each line.

    Columns are separated by tabs, nothing is quoted, and only a newline ends a line.
    """
    number = 0
    with archive_errors(name):
        for number, line in enumerate(reader, 1):
            where = f"{name}, line {number:,}"
            values = line.removesuffix(b"\n").split(b"\t")
            if len(values) != columns:
                raise DataError(f"{where}: expected {columns} columns, got {len(values)}; download the file again")
            yield where, values
    if number == 0:
        raise DataError(f"{name}: the file is empty; download it again")


def parse_binary_label(label: bytes, where: str) -> int:
    """Convert the label 0 or 1 of a line."""
    if label not in (b"0", b"0.0", b"1", b"1.0"):
        raise DataError(
            f"{where}: expected the label 0 or 1, got {label.decode(errors='replace')!r}; download it again"
        )
    return int(label[:1])


def checksum_file(path: Path) -> Path:
    """Return the file next to a download that holds the checksum which the host stated for it, if it stated one."""
    return path.with_name(f"{path.name}.checksum")
