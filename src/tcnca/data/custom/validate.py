"""Files that are no text, and hardly meant to be learned byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tcnca.data.custom.arrays import ARRAYS
from tcnca.data.custom.folders import explained
from tcnca.errors import DataError

_PACKED = (".gz", ".xz", ".bz2", ".zip", ".zst", ".7z")
# A bzip2 file goes on with the mark of its first block, or of its end if it is empty; "BZh" alone may begin a text.
_BZIP2 = tuple(b"BZh%d" % level + mark for level in range(1, 10) for mark in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"))
_MARKS = (
    b"\x1f\x8b\x08",  # gzip
    b"\xfd7zXZ\x00",
    b"PK\x03\x04",  # zip
    b"\x28\xb5\x2f\xfd",  # Zstandard
    b"7z\xbc\xaf\x27\x1c",
    *_BZIP2,
)
_LONGEST_MARK = max(map(len, _MARKS))


def refuse_foreign(files: Sequence[Path]) -> None:
    """Refuse packed files, by their endings or first bytes, and data that is JSON throughout."""
    for file in files:
        if _packed(file):
            raise DataError(f"{file}: is packed; unpack it first, or --kind language to learn the packed bytes")
    # Among other files, such as those of a program, JSON is as good a text as they are.
    if all(file.suffix.lower() == ".json" for file in files):
        raise DataError(f"{files[0]}: is JSON; save one object a line as .jsonl, or --kind language to learn its bytes")


def _packed(file: Path) -> bool:
    suffix = file.suffix.lower()
    # A .npz is an archive, but one that is read as it is.
    if suffix in ARRAYS:
        return False
    if suffix in _PACKED:
        return True
    with explained(file), file.open("rb") as opened:
        return opened.read(_LONGEST_MARK).startswith(_MARKS)
