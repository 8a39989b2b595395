"""Reading files and archives in whatever way they are packed, without writing anything to disk.

No name out of an archive is ever used as a path, so none can lead anywhere.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from tcnca.errors import DataError

Compression = Literal["gz", "xz", "bz2", "zip"]

CURE = "fetch it again, or use it as it is with --unverified"

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
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
# What zipfile says of a password, and of a method that it does not know.
_FOREIGN = (RuntimeError, NotImplementedError)


@contextlib.contextmanager
def damage_reported(name: str | Path) -> Iterator[None]:
    """Turn whatever the unpackers raise into a `DataError` about `name`."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{name}: cannot be opened ({error.strerror}); is this the right path?") from error
    except _DAMAGE as error:
        raise DataError(f"{name}: is cut short, damaged or of another kind ({error}); fetch it again") from error
    except _FOREIGN as error:
        raise DataError(f"{name}: cannot be unpacked ({error}); unpack it by hand and give what was in it") from error


class _Reported(io.RawIOBase):
    """A file that names itself in its errors."""

    def __init__(self, inner: IO[bytes], name: str) -> None:
        self._inner = inner
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with damage_reported(self._name):
            data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


def _reported(inner: IO[bytes], name: str) -> BinaryIO:
    return io.BufferedReader(_Reported(inner, name), _BUFFER)


def compression(path: Path) -> Compression | None:
    """How a file is compressed, by its first bytes; None if it is not."""
    with damage_reported(path), path.open("rb") as file:
        start = file.read(6)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def _is_regular(info: zipfile.ZipInfo) -> bool:
    return not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)


def _only_member(path: Path) -> IO[bytes]:
    # Closing the archive leaves a member that is open readable.
    with zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if _is_regular(info)]
        if len(files) != 1:
            raise DataError(f"{path}: holds {len(files)} files, expected is one; unpack it and give the right one")
        return archive.open(files[0])


_OPENERS: dict[Compression | None, Callable[[Path], Any]] = {
    None: lambda path: path.open("rb"),
    "gz": gzip.open,
    "xz": lzma.open,
    "bz2": bz2.open,
    "zip": _only_member,
}


def open_plain(path: Path) -> BinaryIO:
    """Open a file that is plain or compressed, to read what it holds. A zip must hold one file alone."""
    kind = compression(path)
    with damage_reported(path):
        inner = _OPENERS[kind](path)
    return _reported(inner, str(path))


def members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    """The regular files of a folder, or of a tar or zip archive, with their names; links and devices are passed over.

    Each is to be read before the next one is asked for.
    """
    if path.is_dir():
        return _folder_members(path)
    if compression(path) == "zip":
        return _zip_members(path)
    return _tar_members(path)


def _folder_members(folder: Path) -> Iterator[tuple[str, BinaryIO]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with damage_reported(path):
                file = path.open("rb")
            with _reported(file, str(path)) as reader:
                yield path.relative_to(folder).as_posix(), reader


def _zip_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    with damage_reported(path), zipfile.ZipFile(path) as archive:
        for info in filter(_is_regular, archive.infolist()):
            with _reported(archive.open(info), f"{path}: {info.filename}") as reader:
                yield info.filename, reader


def _tar_members(path: Path) -> Iterator[tuple[str, BinaryIO]]:
    with open_plain(path) as file, damage_reported(path), tarfile.open(fileobj=file, mode="r|") as archive:
        for info in archive:
            inner = archive.extractfile(info) if info.isreg() and not info.issparse() else None
            if inner is not None:
                with _reported(inner, f"{path}: {info.name}") as reader:
                    yield info.name, reader


def read_all(reader: BinaryIO, name: str | Path, limit: int) -> bytes:
    """All that `reader` holds, no more than `limit` bytes: a small file can unpack to more than fits anywhere."""
    data = bytearray()
    while chunk := reader.read(_CHUNK):
        data += chunk
        if len(data) > limit:
            raise DataError(f"{name}: holds more than the {limit:,} bytes that are allowed; is it the right file?")
    return bytes(data)


def find_file(folder: Path, name: str) -> Path | None:
    """The file `name` in `folder`, plain or with the ending of a compression; None if there is none."""
    return next((path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)


def check_exists(origin: Path) -> None:
    """Refuse a path at which there is nothing."""
    if not origin.exists():
        raise DataError(f"{origin}: no such file or folder; is this the right path?")
