"""Watch a growing log: score its lines as they come, and find unusual ones."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import re
import select
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import torch
from torch import Tensor

from tcnca.errors import DataError, InputError, StateError, shown
from tcnca.files import atomic_path, check_regular
from tcnca.inference.scoring import Place, check_bytes, score_bytes
from tcnca.inference.streaming import Stream, StreamState
from tcnca.models import SequenceModel
from tcnca.ops import State
from tcnca.ops.state import MAX_POSITION

_PIECE = 2**16
"""Bytes that are read at once. Longer lines are divided into parts, which are scored like lines."""
_END = 1024
"""Bytes at each end of what was read of a file, by which it is recognized."""
_ROTATED = re.compile(r"[.-]\d[\d._-]*")
"""What rotation adds to the name of a file: a number, or a date."""
_WARM_UP = 100
"""Lines before the first that can be unusual, since it is not known yet what is usual."""
_MEMORY = 1000
"""Lines over which scores are averaged."""


class Piece(NamedTuple):
    """Lines of a log.

    data: the lines, each with its newline; the last part of a file may have none.
    offset: where they begin, in bytes from the start of the file.
    line: number of the first line, from 1.
    """

    data: bytes
    offset: int
    line: int


@dataclasses.dataclass(frozen=True)
class TailState(State):
    """Where the reading of a file is.

    path: absolute path of the file that is watched; what is read may have been renamed.
    offset, line: `[1]`, of the next line.
    head, last: number and digest of the first bytes, and of the last bytes before the offset.
    inode: device and inode.
    """

    path: str
    offset: Tensor
    line: Tensor
    head: str
    last: str
    inode: str


class FileTail:
    """Reads the lines of a growing file as they are completed, like `tail -F`.

    After the file was truncated, reading starts at its beginning. If another file takes its name, the rest of the old
    one is read first, and then rotated files (`log.1`, `log-20261116`) that were changed after it.

    Args:
        path: a file, which need not exist yet.
        state: where to continue, also if the file is missing and comes back. A file that was renamed or copied since
            then is found by its content, if its name still begins with that of `path`.

    Attributes:
        ended: whether there will be no more lines.
        line: number of the next line, from 1.
        continues: whether the file of `state` was found.
    """

    ended = False

    def __init__(self, path: Path, state: TailState | None = None) -> None:
        if state is not None:
            _check("tail.offset", state.offset, torch.int64, 0, MAX_POSITION)
            _check("tail.line", state.line, torch.int64, 1, MAX_POSITION)
        self.path = path
        self._file: BinaryIO | None = None
        self._pending: TailState | None = None  # of a file that is missing
        self._head, self._last = b"", b""
        self._continue(state)
        self.continues = self._file is not None

    def state(self) -> TailState:
        """Return where the reading is."""
        if self._pending is not None:
            return self._pending
        return TailState(
            path=os.path.abspath(self.path),
            offset=torch.tensor([self._offset]),
            line=torch.tensor([self.line]),
            head=_describe(self._head),
            last=_describe(self._last),
            inode="" if self._file is None else _inode(self._file),
        )

    def read(self) -> Piece | None:
        """Return the next lines; None if there are none yet."""
        if self._file is None and self._pending is not None and self.path.exists():
            self._continue(self._pending)
        if self._file is None:
            self._switch(_open(self.path))
        if self._file is None:
            return None
        replaced = self._replaced()  # before the last bytes are read
        data = _read_at(self._file, self._offset, _PIECE)
        if _ends(self._file, self._offset) != (self._head, self._last):
            self._continue(self.state())  # the rest may be in a copy
            return self.read()
        data = data[: _end_of_lines(data, replaced)]
        if data:
            piece = Piece(data, self._offset, self.line)
            self._offset += len(data)
            self.line += data.count(b"\n")
            self._head, self._last = (self._head + data)[:_END], (self._last + data)[-_END:]
            return piece
        if not replaced:
            return None
        self._switch(self._following())
        return self.read()

    def close(self) -> None:
        """Close the file, which the next `read` would open at its beginning."""
        self._switch(None)

    def _replaced(self) -> bool:
        """Whether the path names another file, and something was written to it: the old one is complete."""
        assert self._file is not None
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        return found.st_size > 0 and not os.path.samestat(found, os.fstat(self._file.fileno()))

    def _following(self) -> BinaryIO | None:
        """Return the first rotated file that was changed after the current one, open; None if there is none."""
        assert self._file is not None
        state, changed = self.state(), os.fstat(self._file.fileno()).st_mtime_ns
        newer: list[tuple[int, Path]] = []
        for other, added in _siblings(self.path).items():
            with contextlib.suppress(OSError):
                found = other.stat()
                if _ROTATED.fullmatch(added) and found.st_size and found.st_mtime_ns > changed:
                    newer.append((found.st_mtime_ns, other))
        for _, other in sorted(newer):
            file = _try_open(other)
            if file is not None and not _is_of(file, state):  # not a copy of what was read
                return file
            if file is not None:
                file.close()
        return None

    def _continue(self, state: TailState | None) -> None:
        """Go on in the file of a state; if there is none, at the beginning of the path as soon as it exists."""
        found = None if state is None else _find(self.path, state)
        if state is None or found is None:
            self._switch(None)
            self._pending = state
        else:
            self._switch(found, int(state.offset), int(state.line))

    def _switch(self, file: BinaryIO | None, offset: int = 0, line: int = 1) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._offset, self.line = file, offset, line
        self._head, self._last = (b"", b"") if file is None else _ends(file, offset)
        if file is not None:
            self._pending = None


class PipeTail:
    """Reads the lines of a pipe as they are completed; see `FileTail`."""

    def __init__(self, file: BinaryIO) -> None:
        if os.name == "nt":
            raise InputError(
                "log: expected a file, since pipes cannot be watched on Windows, got a pipe; write it to a file, and "
                "watch that"
            )
        self._file, self._rest, self._offset, self._line, self.ended = file, b"", 0, 1, False

    def read(self) -> Piece | None:
        """Return the next lines; None if there are none yet."""
        if self.ended or not select.select([self._file], [], [], 0)[0]:
            return None
        new = os.read(self._file.fileno(), _PIECE)
        self.ended = not new
        data = self._rest + new
        end = _end_of_lines(data, self.ended)
        piece, self._rest = Piece(data[:end], self._offset, self._line), data[end:]
        self._offset += end
        self._line += piece.data.count(b"\n")
        return piece if piece.data else None


def _end_of_lines(data: bytes, last: bool) -> int:
    """Return where the complete lines of data end; if `last`, or if it is long, its only line is complete."""
    return data.rfind(b"\n") + 1 or (len(data) if last or len(data) >= _PIECE else 0)


def _open(path: Path) -> BinaryIO | None:
    """Return the open file; None if there is none."""
    try:
        check_regular(path)
        return path.open("rb", buffering=0)  # what is appended to the file is seen
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file, or - for a pipe") from error


def _try_open(path: Path) -> BinaryIO | None:
    """Return the open file; None if it cannot be read: it may be that of another user."""
    with contextlib.suppress(DataError):
        return _open(path)
    return None


def _siblings(path: Path) -> dict[Path, str]:
    """Return the files whose names begin with that of a file, or of the file that it links to, and what follows it."""
    found: dict[Path, str] = {}
    for base in (path, path.resolve()) if path.is_symlink() else (path,):
        with contextlib.suppress(OSError):
            for each in sorted(base.parent.iterdir()):
                if each.name.startswith(base.name) and each != base:
                    found[each] = each.name.removeprefix(base.name)
    return found


def _find(path: Path, state: TailState) -> BinaryIO | None:
    """Return the file that a state is of, open; None if there is none."""
    found: BinaryIO | None = None
    for candidate in (path, *_siblings(path)):
        file = _try_open(candidate)
        if file is None:
            continue
        same = _inode(file) == state.inode
        # If nothing was read yet, the content of any file fits.
        if _is_of(file, state) and (same or (found is None and int(state.offset))):
            found, file = file, found
        if file is not None:
            file.close()
        if same and found is not None:
            break
    return found


def _is_of(file: BinaryIO, state: TailState) -> bool:
    """Whether a file has the content that a state is of, up to its offset."""
    head, last = _ends(file, int(state.offset))
    return (_describe(head), _describe(last)) == (state.head, state.last)


def _ends(file: BinaryIO, offset: int) -> tuple[bytes, bytes]:
    """Return the first and the last bytes before an offset; fewer, if the file is shorter."""
    count = min(offset, _END)
    return _read_at(file, 0, count), _read_at(file, offset - count, count)


def _read_at(file: BinaryIO, offset: int, count: int) -> bytes:
    # Not `os.pread`, which Windows does not have.
    file.seek(offset)
    return file.read(count)


def _inode(file: BinaryIO) -> str:
    status = os.fstat(file.fileno())
    return f"{status.st_dev}:{status.st_ino}"


def _describe(data: bytes) -> str:
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}"


def _check(name: str, tensor: Tensor, dtype: torch.dtype, least: int, most: int, *shape: int) -> None:
    """Raise a StateError unless a tensor from a file has this dtype, shape `[1, *shape]` and values in a range."""
    if tensor.dtype != dtype or tensor.shape != (1, *shape) or not bool(((tensor >= least) & (tensor <= most)).all()):
        expected = f"{dtype} of shape {[1, *shape]} from {least} to {most}"
        raise StateError(f"{name}: expected {expected}, got {shown(tensor.tolist())}")


@dataclasses.dataclass(frozen=True)
class WatchState(State):
    """Where a watch is.

    stream: of the model.
    tail: of the file; None for a pipe.
    usual: `[1, 3]`, in float64: number of lines, mean and variance of their scores.
    """

    _format: ClassVar[str] = "tcnca-watch-2"

    stream: StreamState
    tail: TailState | None
    usual: Tensor


class UnusualLine(NamedTuple):
    """A line whose bits per byte are at least a limit."""

    place: Place
    limit: float


class LogWatch:
    """Scores the lines of a log as they come: the bits per byte of each, given all lines before it.

    A line is unusual if its score is at least `threshold`, or by default `z_score` standard deviations above the mean
    of the last thousand lines or so. Unusual lines change mean and deviation as if they were at the limit. Memory does
    not grow with the log.

    Args:
        model: a language model of bytes.
        tail: the log.
        threshold: bits per byte.
        z_score: standard deviations, without a threshold.
        state: where to continue; `tail` continues at its own state.
    """

    def __init__(
        self,
        model: SequenceModel,
        tail: FileTail | PipeTail,
        *,
        threshold: float | None = None,
        z_score: float = 4.0,
        state: WatchState | None = None,
    ) -> None:
        attention = model.config.attention
        if attention is not None and attention.chunk_size is None:
            raise InputError(
                "attention.chunk_size: expected chunks, since the memory of full attention grows with the log, got None"
            )
        check_bytes(model)
        self.tail, self.threshold, self.z_score = tail, threshold, z_score
        self._stream = Stream(model, None if state is None else state.stream)
        self._count = self._mean = self._variance = 0.0
        if state is not None:
            _check("usual", state.usual, torch.float64, 0, MAX_POSITION, 3)
            self._count, self._mean, self._variance = state.usual[0].tolist()

    @property
    def position(self) -> int:
        """Bytes that the model has read."""
        return self._stream.position

    def read(self) -> list[UnusualLine] | None:
        """Score the next lines, and return unusual ones; None if there are no new lines."""
        piece = self.tail.read()
        if piece is None:
            return None
        bits, begin, found = score_bytes(self._stream, piece.data), 0, []
        for number, line in enumerate(io.BytesIO(piece.data), piece.line):
            total = float(bits[begin : begin + len(line)].sum())
            usual = self._usual_limit()
            limit = usual if self.threshold is None else self.threshold
            if total / len(line) >= limit:
                place = Place(total, piece.offset + begin, number, len(line), line.rstrip(b"\r\n"))
                found.append(UnusualLine(place, limit))
            self._learn(min(total / len(line), usual))
            begin += len(line)
        return found

    def state(self) -> WatchState:
        """Return where the watch is, as a copy."""
        usual = torch.tensor([[self._count, self._mean, self._variance]], dtype=torch.float64)
        return WatchState(self._stream.state(), self.tail.state() if isinstance(self.tail, FileTail) else None, usual)

    def save(self, path: Path) -> None:
        """Write the watch to a safetensors file, completely or not at all."""
        with atomic_path(path) as temporary:
            self.state().save(temporary)

    def _usual_limit(self) -> float:
        # Lines that are all alike would have almost no deviation.
        deviation = max(math.sqrt(self._variance), self._mean / 10)
        return math.inf if self._count < _WARM_UP else self._mean + self.z_score * deviation

    def _learn(self, score: float) -> None:
        """Update mean and variance, which forget older lines."""
        self._count += 1
        weight, change = 1 / min(self._count, _MEMORY), score - self._mean
        self._mean += weight * change
        self._variance = (1 - weight) * (self._variance + weight * change**2)
