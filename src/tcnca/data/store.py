"""Sets on disk: plain .npy files that are mapped into memory, and a manifest that makes them a set.

A set is written beside its place and moved there when it is whole, so whatever has a manifest is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import filelock
import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column, Columns, Ragged, count
from tcnca.errors import DataError
from tcnca.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
_HEADER = 128


class Dataset:
    """A prepared set. `splits[name]` are the columns of a split, mapped from disk or in memory."""

    def __init__(
        self, name: str, manifest: Mapping[str, Any], splits: Mapping[str, Columns], folder: Path | None = None
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.splits = splits
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the files again, instead of being sent what they hold.
        if self.folder is not None:
            return Dataset.open, (self.folder,)
        return Dataset, (self.name, self.manifest, self.splits)

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Map the set in `folder` into memory."""
        manifest = read_manifest(folder)
        splits: dict[str, dict[str, Column]] = {}
        try:
            for split, columns in manifest["splits"].items():
                splits[split] = {name: _column(folder, manifest["files"], f"{split}.{name}") for name in columns}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{folder / MANIFEST}: does not say what the set holds ({error!r}); prepare the set again with --force"
            ) from error
        return cls(folder.name, manifest, splits, folder.absolute())

    @property
    def digest(self) -> str:
        """Differs between sets that differ, for a run to know that it goes on with the data it began with."""
        files = {name: about["values_sha256"] for name, about in self.manifest.get("files", {}).items()}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest() if files else ""

    def columns(self, split: str) -> Columns:
        """The columns of a split."""
        if split not in self.splits:
            raise DataError(f"{self.name}: has no split {split!r}, it has {', '.join(self.splits)}")
        return self.splits[split]

    def example(self, split: str, index: int) -> dict[str, Any]:
        """Example `index` of a split: for each column its value."""
        columns = self.columns(split)
        total = count(columns)
        if not 0 <= index < total:
            raise DataError(f"{self.name}: {split} has no example {index}, allowed is 0 to {total - 1}")
        return {name: column[index] for name, column in columns.items()}


def checksum(column: Column) -> dict[str, str]:
    """What the manifest says of the values of a column, for one that is not stored."""
    digest = hashlib.sha256()
    for values in (column.values, column.offsets) if isinstance(column, Ragged) else (column,):
        digest.update(f"{values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return {"values_sha256": digest.hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """What is known of the set in `folder`; a DataError if there is none or it is of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: no prepared set is there; `tcnca data prepare` makes one") from None
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the set again with --force") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise DataError(
            f"{path}: has format {found!r}, this version of tcnca reads {FORMAT}; prepare the set again with --force"
        )
    return manifest


def _column(folder: Path, files: Mapping[str, Any], name: str) -> Column:
    values, offsets = _map(folder, files, f"{name}.npy"), f"{name}.offsets.npy"
    return Ragged(values, _map(folder, files, offsets)) if offsets in files else values


def _map(folder: Path, files: Mapping[str, Any], name: str) -> NDArray[Any]:
    path = folder / name
    about = files[name]
    expected = about["bytes"]
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise DataError(f"{path}: {state}, the manifest says {expected:,} bytes; prepare the set again with --force")
    # A file without values cannot be mapped.
    try:
        values = np.asarray(np.load(path, mmap_mode="r" if expected > _HEADER else None))
        damaged = values.dtype != np.dtype(about["dtype"]) or list(values.shape) != about["shape"]
    except Exception:
        # NumPy parses the header as Python, and a damaged one fails in ways that differ from version to version.
        damaged = True
    if damaged:
        raise DataError(f"{path}: its first {_HEADER} bytes are damaged; prepare the set again with --force")
    return values


class SetWriter:
    """Writes a set part by part: `with SetWriter(folder) as writer: writer.append("train", columns) ...`.

    Nothing appears in `folder` before `finish`; what it held before is replaced then. If the block is left without
    `finish`, what was written is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._beside = folder.with_name(f".{folder.name}.partial")
        self._files: dict[str, _NpyWriter] = {}
        self._lengths: dict[str, list[NDArray[np.int64]]] = {}
        self._splits: dict[str, dict[str, str]] = {}

    def __enter__(self) -> SetWriter:
        with explained(self.folder):
            restore_folder(self.folder)
            shutil.rmtree(self._beside, ignore_errors=True)
            self._beside.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.abandon()
        shutil.rmtree(self._beside, ignore_errors=True)

    def append(self, split: str, columns: Columns) -> None:
        """Add examples to a split."""
        with explained(self.folder):
            form = {name: "sequences" if isinstance(column, Ragged) else "values" for name, column in columns.items()}
            expected = self._splits.setdefault(split, form)
            lengths = {name: len(column) for name, column in columns.items()}
            if form != expected or len(set(lengths.values())) > 1:
                raise DataError(
                    f"{self.folder}: got a part of {split} with {form} of {lengths} examples, expected are equally "
                    f"many of {expected}"
                )
            for name, column in columns.items():
                values = column.values if isinstance(column, Ragged) else column
                self._file(f"{split}.{name}.npy", values).append(values)
                if isinstance(column, Ragged):
                    self._lengths.setdefault(f"{split}.{name}.offsets.npy", []).append(column.lengths)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write the manifest, with `facts` in it, and move the set into its place."""
        with explained(self.folder):
            for name, lengths in self._lengths.items():
                offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
                self._file(name, offsets).append(offsets)
            files = {name: file.close() for name, file in self._files.items()}
            splits = {split: list(form) for split, form in self._splits.items()}
            manifest = {"format": FORMAT, "tcnca": __version__, **facts, "splits": splits, "files": files}
            with (self._beside / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            replace_folder(self._beside, self.folder)

    def _file(self, name: str, like: NDArray[Any]) -> _NpyWriter:
        if name not in self._files:
            self._files[name] = _NpyWriter(self._beside / name, like.dtype, like.shape[1:])
        return self._files[name]


class _NpyWriter:
    """An .npy file that grows; its header, which says how long it is, is written when it is closed.

    Plain writes, not a memory map: on a full disk they raise an error where a map would kill the process.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], row: tuple[int, ...]) -> None:
        self.dtype, self.row, self.rows = dtype, row, 0
        self.digest = hashlib.sha256()
        self.file: BinaryIO = path.open("wb")
        self.file.write(bytes(_HEADER))

    def append(self, values: NDArray[Any]) -> None:
        if values.dtype != self.dtype or values.shape[1:] != self.row:
            raise DataError(
                f"{self.file.name}: got a part of {values.dtype} {values.shape[1:]} after {self.dtype} {self.row}"
            )
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self.file.write(data)
        self.digest.update(data)
        self.rows += len(values)

    def close(self) -> dict[str, Any]:
        shape = (self.rows, *self.row)
        text = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape})
        header = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.encode().ljust(_HEADER - 11) + b"\n"
        self.file.seek(0)
        self.file.write(header)
        self.file.flush()
        os.fsync(self.file.fileno())
        size = self.file.seek(0, os.SEEK_END)
        self.file.close()
        return {"bytes": size, "dtype": str(self.dtype), "shape": shape, "values_sha256": self.digest.hexdigest()}

    def abandon(self) -> None:
        # What is still buffered may not fit on the disk either; it is not wanted any more.
        with contextlib.suppress(OSError):
            self.file.close()


@contextlib.contextmanager
def alone(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Be the only process that writes `folder`; `waiting` is called if another one does, and must be waited for.

    The lock ends with the process that holds it, however that ends.
    """
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    with explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def restore_folder(folder: Path) -> None:
    """Put back what `replace_folder` had moved away when it was killed."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Move a folder into its place, over what may be there."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the errors of a disk into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{folder}: the disk is full; free some space or choose another place with --out, then run the same "
                f"command again (nothing incomplete was left there)"
            ) from error
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another place with --out") from error


def check_space(folder: Path, needed: int) -> None:
    """A DataError if the disk that will hold `folder` has less than `needed` bytes left."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DataError(
            f"{folder}: needs about {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB left; free some space, "
            f"choose another place with --out or a smaller --size"
        )
