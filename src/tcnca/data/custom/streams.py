"""Bytes for a language model: any file, or a folder of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tcnca.data.columns import Columns
from tcnca.data.custom.folders import explained, files_under, split_files, stray
from tcnca.data.custom.options import OF_ARRAYS, OF_TABLES, CustomOptions, refuse
from tcnca.data.custom.splits import cut, fill, in_order, missing
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import Content
from tcnca.errors import DataError

PART = 16 * 2**20
"""Most bytes of a part."""

# Fewer files are too coarse to make up splits of about the right size.
_MANY_FILES = 10


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A stretch of a file."""

    path: Path
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Pieces of files one after the other, handed over in parts, and read only then."""

    pieces: Sequence[_Piece]

    def __iter__(self) -> Iterator[Columns]:
        part = bytearray()
        for piece in self.pieces:
            with explained(piece.path), piece.path.open("rb") as file:
                file.seek(piece.begin)
                left = piece.size
                while left:
                    read = file.read(min(left, PART - len(part)))
                    if not read:
                        raise DataError(f"{piece.path}: has become shorter while it was read; read it again")
                    part += read
                    left -= len(read)
                    if len(part) == PART:
                        yield {"bytes": np.frombuffer(part, np.uint8)}
                        part = bytearray()
        if part:
            yield {"bytes": np.frombuffer(part, np.uint8)}

    def between(self, begin: int, end: int) -> _Stream:
        """The bytes from `begin` up to, not including, `end`."""
        pieces, start = [], 0
        for piece in self.pieces:
            low, high = max(begin - start, 0), min(end - start, piece.size)
            if low < high:
                pieces.append(_Piece(piece.path, piece.begin + low, piece.begin + high))
            start += piece.size
        return _Stream(pieces)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(piece.size for piece in self.pieces)


def read_bytes(origin: Path, options: CustomOptions) -> Content:
    """Read a file, or the visible files of a folder, as bytes.

    A folder with entries named train*, and valid*, val*, dev* or test*, has its splits given. In any other, whole files
    are drawn for validation and test; but if there are fewer than ten, they are joined in the order of their names and
    cut as if they were a single file. Nothing is put between files, and archives are not unpacked.
    """
    refuse(options, (*OF_TABLES, *OF_ARRAYS), origin, "bytes of a language model")
    given, others = split_files(origin) if origin.is_dir() else ({}, [])
    if others and "train" in given and len(given) > 1:
        raise stray(others[0], "if the files are tables or arrays, say which with --kind")
    if others or not given:
        files = _stream(files_under(origin)).pieces
        if len(files) >= _MANY_FILES:
            return _content(origin, _drawn(origin, files, options))
        given = {"train": [piece.path for piece in files]}
    streams = {split: _stream(files) for split, files in given.items()}
    for split, stream in streams.items():
        if not stream.size:
            where = f" for {split}" if len(streams) > 1 else ""
            raise DataError(f"{origin}: holds no bytes{where}; a language model needs some to learn from")
    shares = missing(streams, options, origin)
    whole = streams["train"]
    ranges = cut(whole.size, shares, origin, "bytes")
    return _content(origin, {**streams, **{split: whole.between(*ends) for split, ends in ranges.items()}})


def _stream(files: Sequence[Path]) -> _Stream:
    """Whole files; empty ones are left out."""
    pieces = [_Piece(file, 0, file.stat().st_size) for file in files]
    return _Stream([piece for piece in pieces if piece.size])


def _drawn(folder: Path, files: Sequence[_Piece], options: CustomOptions) -> dict[str, _Stream]:
    """Whole files for each split, so that none is torn apart."""

    def place(piece: _Piece) -> tuple[int, str]:
        name = piece.path.relative_to(folder).as_posix()
        return int(CounterRNG(options.seed, "custom", name).raw(1)[0]), name

    files = sorted(files, key=place)
    shares = {"validation": options.validation, "test": options.test}
    splits = fill([piece.size for piece in files], shares)
    assert splits is not None  # there are at least ten
    chosen: dict[str, list[Path]] = {split: [] for split in ("train", *shares)}
    for split, piece in zip(splits, files, strict=True):
        chosen[split].append(piece.path)
    return {split: _stream(sorted(paths)) for split, paths in chosen.items()}


def _content(origin: Path, streams: Mapping[str, _Stream]) -> Content:
    return Content(kind="language", splits=in_order(streams), origin=origin.resolve().name, verified=False)
