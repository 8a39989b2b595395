"""Read published files in whatever way they are packed, without writing to disk.

Names inside an archive are never used as paths, so they cannot point outside of it. What a file unpacks to is limited,
since a few megabytes of zeros can unpack to any size.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tcnca.errors import DataError, shown

Compression = Literal["gz", "xz", "bz2", "zip"]

DOWNLOAD_AGAIN = "download it again, or accept it as it is with --unverified"
"""Advice for a file that is not the published one."""

_MAX_RATIO = 50
"""Bytes that a byte of a compressed file may unpack to. EnWik8 has 4, IMDB 5, and very repetitive text about 20."""
_MIN_UNPACKED = 2**26
"""Bytes that any compressed file may unpack to."""
_MEMBER_BYTES = 400
"""Bytes of an archive for each of its members, in addition to `_MIN_MEMBERS`. IMDB has 840."""
_MIN_MEMBERS = 10_000
_BLOCK = 2**20
_MAX_TAR_HEADER = 2**20
"""Bytes of a long name, or of other additions to the header of a member."""
MAX_LINE = 2**25
"""Bytes of a line of a table."""

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
    except DataError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror}); check the path") from error
    except (RuntimeError, NotImplementedError) as error:
        # zipfile raises these for encrypted files and unknown compression methods.
        raise DataError(f"{name}: cannot be unpacked ({error}); unpack it yourself and give its content") from error
    except Exception as error:
        # tarfile, zipfile and the decompressors raise errors of many types for damaged files.
        reason = str(error)[:200] or type(error).__name__
        raise DataError(f"{name}: is truncated, damaged or not an archive ({reason}); download it again") from error


def check_source(path: Path) -> None:
    """Raise a DataError for what is neither a file nor a folder: reading a pipe or a device may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: expected a file or a folder, got a pipe or a device; save the data to a file")


def compression(path: Path) -> Compression | None:
    """Detect the compression of a file from its first bytes; None if it is not compressed."""
    with archive_errors(path):
        check_source(path)
        with path.open("rb") as file:
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


class _LimitedReader(io.RawIOBase):
    """Reads a decompressor, and raises a DataError when it has given more than `limit` bytes."""

    def __init__(self, reader: Any, path: Path, limit: int) -> None:
        self._reader, self._path, self._limit, self._count = reader, path, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # A decompressor needs as much memory again as it is asked for.
        count: int = self._reader.readinto(memoryview(buffer)[:_BLOCK])
        self._count += count
        if self._count > self._limit:
            raise _too_large(self._path, self._limit)
        return count

    def close(self) -> None:
        self._reader.close()
        super().close()


def _max_unpacked(path: Path) -> int:
    """Return how many bytes a compressed file may unpack to."""
    return max(_MIN_UNPACKED, _MAX_RATIO * path.stat().st_size)


def _too_large(path: Path, limit: int) -> DataError:
    return DataError(
        f"{path}: expected at most {limit:,} bytes when unpacked, {_MAX_RATIO} times its size, got more; it may be a "
        "decompression bomb, else unpack it yourself and give its content"
    )


def open_decompressed(path: Path) -> BinaryIO:
    """Open a plain or compressed file for reading its content. A zip must contain exactly one file."""
    kind = compression(path)
    with archive_errors(path):
        reader = _OPENERS[kind](path)
        return reader if kind is None else io.BufferedReader(_LimitedReader(reader, path, _max_unpacked(path)), 2**17)


def read_all(reader: BinaryIO, name: str | Path, limit: int) -> bytes:
    """Return the content of an open file or member; raise a DataError if it has more than `limit` bytes."""
    with archive_errors(name):
        data = reader.read(limit + 1)
    if len(data) > limit:
        raise DataError(
            f"{name}: expected at most {limit:,} bytes, got more; prepare other data under a name of your own"
        )
    return data


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
            yield from _zip_members(path)
        else:
            yield from _tar_members(path)


def _zip_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    left = limit = _max_unpacked(path)
    with zipfile.ZipFile(path) as archive:
        for entry in _regular_files(archive):
            # zipfile reads no more than this, even if the member contains more.
            left -= entry.file_size
            if left < 0:
                raise _too_large(path, limit)
            with archive.open(entry) as member:
                yield entry.filename, member  # type: ignore[misc]


class _TarMember(tarfile.TarInfo):
    """A member of a tar archive. Its name, unlike its content, is read into memory at once."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type not in tarfile.REGULAR_TYPES and self.size > _MAX_TAR_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]


def _tar_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    size = path.stat().st_size
    limit = size if compression(path) is None else _max_unpacked(path)
    most, number = _MIN_MEMBERS + size // _MEMBER_BYTES, 0
    with open_decompressed(path) as stream, tarfile.open(fileobj=stream, mode="r|", tarinfo=_TarMember) as tar:
        while (info := tar.next()) is not None:
            number += 1
            if number > most:
                raise DataError(
                    f"{path}: expected at most {most:,} members, one in {_MEMBER_BYTES} bytes, got more; unpack it "
                    "yourself and give its content"
                )
            # tarfile would skip a member of any size, block by block, even after the end of the file.
            if not 0 <= info.size <= limit:
                raise tarfile.ReadError(f"a member of {info.size:,} bytes")
            # tarfile keeps all members.
            tar.members.clear()  # type: ignore[attr-defined]
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
        while line := reader.readline(MAX_LINE):
            number += 1
            where = f"{name}, line {number:,}"
            if len(line) == MAX_LINE:
                raise DataError(f"{where}: expected fewer than {MAX_LINE:,} bytes, got more; download the file again")
            values = line.removesuffix(b"\n").split(b"\t")
            if len(values) != columns:
                raise DataError(f"{where}: expected {columns} columns, got {len(values)}; download the file again")
            yield where, values
    if number == 0:
        raise DataError(f"{name}: the file is empty; download it again")


def parse_binary_label(label: bytes, where: str) -> int:
    """Convert the label 0 or 1 of a line."""
    if label not in (b"0", b"0.0", b"1", b"1.0"):
        found = shown(label.decode(errors="replace"))
        raise DataError(f"{where}: expected the label 0 or 1, got {found}; download it again")
    return int(label[:1])


def checksum_file(path: Path) -> Path:
    """Return the file next to a download that holds the checksum which the host stated for it, if it stated one."""
    return path.with_name(f"{path.name}.checksum")


def file_sha256(path: Path) -> str:
    """Return the checksum `sha256:...` of a file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def read_checksum(path: Path) -> str | None:
    """Return the checksum `sha256:...` that the host stated for a download; None if there is none."""
    file = checksum_file(path)
    if not file.is_file():
        return None
    with file.open("rb") as reader:
        stated = reader.read(100).decode("ascii", "replace")
    return stated if re.fullmatch("sha256:[0-9a-f]{64}", stated) else None
