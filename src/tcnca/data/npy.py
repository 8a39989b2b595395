"""NumPy's files, read without trusting them: sizes are checked before memory is allocated, and nothing is unpickled."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import DataError, shown

SAVE_AGAIN = "save it again with np.save or np.savez, as arrays of numbers or strings, not of objects"
"""Advice for an array that cannot be read."""

_MAGIC = b"\x93NUMPY"
# Width of the length of the header, by version.
_LENGTHS = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
_MAX_HEADER = 10_000
"""Bytes of a header, as in NumPy."""
_MAX_DIMENSIONS = 32
_BLOCK = 2**24
_MAX_RATIO = 400
"""Size of a compressed array over that in the file, for arrays above `_MIN_UNPACKED` bytes. Zeros have 1,000, one-hot
vectors of 256 values 300."""
_MIN_UNPACKED = 2**28


@dataclasses.dataclass(frozen=True)
class Header:
    """What the header of an .npy says, and where the values begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def array_errors(name: object, remedy: str) -> Iterator[None]:
    """Convert errors in reading an array into a DataError that names it and says what to do."""
    try:
        yield
    # NumPy, zipfile and the decompressors raise errors of many types for damaged files.
    except Exception as error:
        raise DataError(f"{name}: cannot be read ({str(error)[:200] or type(error).__name__}); {remedy}") from error


def read_header(file: IO[bytes], size: int) -> Header:
    """Read the header of an .npy of `size` bytes; raise a DataError unless the values that it describes are there."""
    start = file.read(len(_MAGIC) + 2)
    width = _LENGTHS.get(start[len(_MAGIC) :], 0)
    length = int.from_bytes(file.read(width), "little")
    if not start.startswith(_MAGIC) or not 0 < length <= _MAX_HEADER:
        raise DataError("is not an .npy file, or its header is damaged")
    try:
        # NumPy parses the header as Python, so the errors of a damaged one differ between versions. The versions of the
        # format differ only in the width of the length and in the encoding of names, which are not used.
        header = io.BytesIO(length.to_bytes(2, "little") + file.read(length))
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    except Exception as error:
        raise DataError("the header is damaged") from error
    if dtype.hasobject or not dtype.itemsize:
        raise DataError(f"expected an array of numbers or strings, got {dtype}")
    # Dimensions of 0 do not make others small: an array of shape (2**62, 4, 0) cannot be created.
    elements = math.prod(max(length, 1) for length in shape)
    if (
        any(type(length) is not int or length < 0 for length in shape)
        or len(shape) > _MAX_DIMENSIONS
        or elements * dtype.itemsize > sys.maxsize
    ):
        raise DataError("the header is damaged, its shape is impossible")
    found = Header(dtype, shape, fortran_order, len(start) + width + length)
    if found.nbytes > size - found.offset:
        raise DataError(
            f"expected {found.nbytes:,} bytes for {dtype} of shape {shape}, got {max(size - found.offset, 0):,}"
        )
    return found


def read_array(file: IO[bytes], size: int, copies: int = 1) -> NDArray[Any]:
    """Read an .npy of `size` bytes into memory, of which `copies` times as much is needed."""
    header = read_header(file, size)
    check_memory(copies * header.nbytes)
    values = np.empty(math.prod(header.shape), header.dtype)
    _fill(file, values)
    return values.reshape(header.shape, order="F" if header.fortran_order else "C")


def _fill(file: IO[bytes], values: NDArray[Any]) -> None:
    """Read the bytes of a contiguous array from a file."""
    view, filled = values.reshape(-1).view(np.uint8).data, 0
    while filled < len(view) and (count := file.readinto(view[filled : filled + _BLOCK])):  # type: ignore[attr-defined]
        filled += count
    if filled < len(view):
        raise DataError(f"expected {len(view):,} bytes of values, got {filled:,}")


def map_array(path: Path) -> NDArray[Any]:
    """Memory-map an .npy, read-only."""
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size)
    order: Any = "F" if header.fortran_order else "C"
    if not header.nbytes:
        # An empty array cannot be memory-mapped.
        return np.empty(header.shape, header.dtype, order)
    return np.asarray(np.memmap(path, header.dtype, "r", header.offset, header.shape, order))


class ArrayReader:
    """Reads an .npy, or an array of an .npz, from its first row to its last in bounded memory.

    Args:
        path: the file.
        archive: the open .npz; None for an .npy.
        name: the array of the .npz, and for messages.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile | None, name: str) -> None:
        self.path, self.name = path, name
        self._array: NDArray[Any] | None = None
        self._file: IO[bytes] | None = None
        self._next = 0
        with array_errors(self, SAVE_AGAIN):
            self._open(archive)

    def __str__(self) -> str:
        return f"{self.path}: array {shown(self.name)}"

    def _open(self, archive: zipfile.ZipFile | None) -> None:
        self.dtype: np.dtype[Any]
        self.shape: tuple[int, ...]
        if archive is None:
            self._array = map_array(self.path)
            self.dtype, self.shape = self._array.dtype, self._array.shape
            return
        member = list_arrays(archive)[self.name]
        _check_unpacked(member)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(archive.open(member))
            header = read_header(file, member.file_size)
            # Stays open if the header is valid.
            stack.pop_all()
        self._file = file
        self.dtype, self.shape = header.dtype, header.shape
        if header.fortran_order and len(header.shape) > 1:
            # Its first row ends at the end of the file.
            self._array = read_member(archive, member)

    def read(self, count: int) -> NDArray[Any]:
        """Return the next `count` rows."""
        begin, self._next = self._next, self._next + count
        if self._array is not None:
            return self._array[begin : self._next]
        assert self._file is not None
        with array_errors(self, SAVE_AGAIN):
            rows = np.empty((count, *self.shape[1:]), self.dtype)
            _fill(self._file, rows)
        return rows

    def close(self) -> None:
        """Close the array; the archive stays open."""
        if self._file is not None:
            self._file.close()


def list_arrays(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an .npz by the names of their arrays."""
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in found:
            raise DataError(f"expected different names of arrays, got {name[:100]!r} twice")
        found[name] = member
    if not found:
        raise DataError("expected arrays, got none")
    return found


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, copies: int = 1) -> NDArray[Any]:
    """Read an array of an .npz."""
    _check_unpacked(member)
    with archive.open(member) as file:
        return read_array(file, member.file_size, copies)


def _check_unpacked(member: zipfile.ZipInfo) -> None:
    """Raise a DataError for an array that is too large for its compressed size."""
    limit = max(_MIN_UNPACKED, _MAX_RATIO * member.compress_size)
    if member.file_size > limit:
        raise DataError(
            f"expected at most {limit:,} bytes when unpacked, got {member.file_size:,}, as in a decompression bomb; if "
            "it is not one, save it with np.savez, which does not compress"
        )


def check_memory(needed: int) -> None:
    """Raise a DataError if fewer than `needed` bytes of memory are available."""
    available = available_memory()
    if needed > available:
        raise DataError(
            f"it needs about {needed / 1e9:,.1f} GB of memory, {available / 1e9:,.1f} GB are available: use less data"
        )


def available_memory() -> int:
    """Return the bytes of memory that are available, with regard to the limit of a container."""
    found = [sys.maxsize]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        # Not Linux; Windows does not have the function.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        found += [int(limit)] if limit.isdigit() else []
    except OSError:
        pass
    return min(found)
