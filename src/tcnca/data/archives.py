"""Read published files in whatever way they are packed, without writing to disk.

Names inside an archive are never used as paths, so they cannot point outside of it.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from tcnca.errors import DataError

Compression = Literal["gz", "xz", "bz2", "zip"]

RETRY = "download it again, or accept it as it is with --unverified"
"""Advice for a file that is not the published one."""
MAX_LINE = 1 << 26

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gz",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bz2",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
}
_SUFFIXES = ("", ".gz", ".xz", ".bz2", ".zip")
_CHUNK = 1 << 16
_BUFFER = 1 << 18
_ESCAPED = {b"\\": b"\\", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_NO_CHECKSUM = "none"


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


class _NamedReader(io.RawIOBase):
    """A file whose errors contain its name."""

    def __init__(self, inner: IO[bytes], name: str) -> None:
        self._inner = inner
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with archive_errors(self._name):
            data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


def _named(inner: IO[bytes], name: str) -> BinaryIO:
    return io.BufferedReader(_NamedReader(inner, name), _BUFFER)


def compression(path: Path) -> Compression | None:
    """Detect the compression of a file from its first bytes; None if it is not compressed."""
    with archive_errors(path), path.open("rb") as file:
        start = file.read(6)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def _is_regular(info: zipfile.ZipInfo) -> bool:
    return not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)


def _only_member(path: Path) -> IO[bytes]:
    # An open member stays readable after the archive is closed.
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if _is_regular(info)]
        if len(files) != 1:
            raise DataError(f"{path}: expected one file in the archive, got {len(files)}; unpack it and give one file")
        return archive.open(files[0])


_OPENERS: dict[Compression | None, Callable[[Path], Any]] = {
    None: lambda path: path.open("rb"),
    "gz": gzip.open,
    "xz": lzma.open,
    "bz2": bz2.open,
    "zip": _only_member,
}


def open_decompressed(path: Path) -> BinaryIO:
    """Open a plain or compressed file for reading its content. A zip must contain exactly one file."""
    kind = compression(path)
    with archive_errors(path):
        inner = _OPENERS[kind](path)
    return _named(inner, str(path))


def iter_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Iterate over the regular files of a folder, or of a tar or zip archive; links and devices are skipped.

    Read each file before advancing to the next one.
    """
    if path.is_dir():
        return _folder_members(path)
    return _zip_members(path) if compression(path) == "zip" else _tar_members(path)


def _folder_members(folder: Path) -> Iterator[tuple[str, BinaryIO]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with archive_errors(path):
                file = path.open("rb")
            with _named(file, str(path)) as reader:
                yield path.relative_to(folder).as_posix(), reader


def _zip_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    with archive_errors(path), zipfile.ZipFile(path) as archive:
        for info in filter(_is_regular, archive.infolist()):
            with _named(archive.open(info), f"{path}: {info.filename}") as reader:
                yield info.filename, reader


def _tar_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    with open_decompressed(path) as file, archive_errors(path), tarfile.open(fileobj=file, mode="r|") as archive:
        for info in archive:
            inner = archive.extractfile(info) if info.isreg() and not info.issparse() else None
            if inner is not None:
                with _named(inner, f"{path}: {info.name}") as reader:
                    yield info.name, reader


def read_limited(reader: BinaryIO, name: str | Path, limit: int) -> bytes:
    """Read all of `reader`, at most `limit` bytes: a small archive can expand to more than fits in memory."""
    data = bytearray()
    while chunk := reader.read(_CHUNK):
        data += chunk
        if len(data) > limit:
            raise DataError(f"{name}: expected at most {limit:,} bytes, got more; check that it is the right file")
    return bytes(data)


def find_file(folder: Path, name: str) -> Path | None:
    """Find the file `name` in `folder`, plain or with the suffix of a compression."""
    return next((path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)


def check_exists(origin: Path) -> None:
    """Raise a DataError if there is nothing at the path."""
    if not origin.exists():
        raise DataError(f"{origin}: no such file or folder; check the path")


def read_tsv(reader: BinaryIO, name: str | Path, columns: int) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the location (file and line, for messages) and the columns of each line.

    Columns are separated by tabs, nothing is quoted, and only a newline ends a line.
    """
    number = 0
    while line := reader.readline(MAX_LINE):
        number += 1
        where = f"{name}, line {number:,}"
        if len(line) == MAX_LINE:
            raise DataError(f"{where}: expected at most {MAX_LINE:,} bytes, got more; check that it is the right file")
        values = line.removesuffix(b"\n").split(b"\t")
        if len(values) != columns:
            raise DataError(f"{where}: expected {columns} columns, got {len(values)}; download the file again")
        yield where, values
    if number == 0:
        raise DataError(f"{name}: the file is empty; download it again")


def unescape(text: bytes, where: str) -> bytes:
    r"""Replace the escapes `\\`, `\n`, `\r` and `\t` in a column."""
    if b"\\" not in text:
        return text

    def replace(escape: re.Match[bytes]) -> bytes:
        if escape[1] not in _ESCAPED:
            found = escape[0].decode(errors="replace")
            raise DataError(rf"{where}: expected the escapes \\, \n, \r or \t, got {found!r}; download the file again")
        return _ESCAPED[escape[1]]

    return re.sub(rb"\\(.?)", replace, text, flags=re.DOTALL)


def parse_binary_label(label: bytes, where: str) -> int:
    """Convert the label 0 or 1 of a line."""
    if label not in (b"0", b"0.0", b"1", b"1.0"):
        raise DataError(
            f"{where}: expected the label 0 or 1, got {label.decode(errors='replace')!r}; download it again"
        )
    return int(label[:1])


def save_checksum(path: Path, checksum: str) -> None:
    """Store the checksum that the host stated for a file in a file next to it."""
    _checksum_file(path).write_text(f"{checksum or _NO_CHECKSUM}\n", encoding="utf-8")


def load_checksum(path: Path) -> str | None:
    """Load the stored checksum: empty if the host stated none, None if nothing was stored."""
    file = _checksum_file(path)
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if text == _NO_CHECKSUM:
        return ""
    return text if re.fullmatch("sha256:[0-9a-f]{64}", text) else None


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.checksum")
