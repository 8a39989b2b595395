"""Lines of columns with tabs between them. Nothing is quoted, and a line ends at a newline alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tcnca.errors import DataError

LONGEST_LINE = 1 << 26

_ESCAPED = {b"\\": b"\\", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def rows(reader: BinaryIO, name: str | Path, columns: int) -> Iterator[tuple[str, list[bytes]]]:
    """Each line's columns, and where it stands, for messages: file and line."""
    number = 0
    while line := reader.readline(LONGEST_LINE):
        number += 1
        where = f"{name}, line {number:,}"
        if len(line) == LONGEST_LINE:
            raise DataError(f"{where}: is longer than {LONGEST_LINE:,} bytes; is it the right file?")
        values = line.removesuffix(b"\n").split(b"\t")
        if len(values) != columns:
            raise DataError(f"{where}: has {len(values)} columns, expected are {columns}; fetch the file again")
        yield where, values
    if number == 0:
        raise DataError(f"{name}: is empty; fetch it again")


def unescape(text: bytes, where: str) -> bytes:
    r"""Undo the escapes of a text that stands in one column: `\\`, `\n`, `\r` and `\t`."""
    if b"\\" not in text:
        return text

    def plain(escape: re.Match[bytes]) -> bytes:
        if escape[1] not in _ESCAPED:
            found = escape[0].decode(errors="replace")
            raise DataError(rf"{where}: has the escape {found!r}, allowed are \\, \n, \r and \t; fetch the file again")
        return _ESCAPED[escape[1]]

    return re.sub(rb"\\(.?)", plain, text, flags=re.DOTALL)
