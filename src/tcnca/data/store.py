"""Data sets on disk: .npy files that are memory-mapped, and a manifest.

A data set is written to a temporary folder and moved into place when it is complete, so a folder with a manifest is
always complete. A data set may come from a shared folder, so nothing that its files say is believed: `Dataset.open`
checks all of it, except the values of the inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tcnca.data.manifest import FORMAT, MANIFEST, PREPARE_AGAIN, Manifest, check_columns, check_manifest, read_manifest
from tcnca.data.npy import array_errors, map_array
from tcnca.data.schema import Column, Columns, Ragged, check_offsets, num_examples
from tcnca.errors import ConfigError, DataError, shown
from tcnca.files import disk_errors
from tcnca.version import __version__


class Dataset:
    """A prepared data set. `splits[name]` holds the columns of a split, memory-mapped or in memory."""

    def __init__(
        self, name: str, manifest: Mapping[str, Any], splits: Mapping[str, Columns], folder: Path | None = None
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.splits = splits
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the files again instead of receiving a copy of their content.
        if self.folder is not None:
            return Dataset.open, (self.folder,)
        return Dataset, (self.name, self.manifest, self.splits)

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Memory-map the data set in `folder`; raise a DataError unless it is what its manifest says."""
        manifest = read_manifest(folder)
        try:
            found = check_manifest(manifest)
            splits: dict[str, Columns] = {
                split: _map_split(folder, found, split, names) for split, names in found.splits.items()
            }
            check_columns(found, splits)
        except ConfigError as error:
            raise DataError(f"{folder / MANIFEST}: {error}; {PREPARE_AGAIN}") from error
        return cls(folder.name, manifest, splits, folder.absolute())

    @property
    def digest(self) -> str:
        """Hash of all values, so that a resumed run can check that its data is unchanged."""
        files = {name: file["values_sha256"] for name, file in self.manifest.get("files", {}).items()}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest() if files else ""

    def columns(self, split: str) -> Columns:
        """Return the columns of a split."""
        if split not in self.splits:
            raise DataError(f"split: expected one of {', '.join(self.splits)} for {self.name}, got {split!r}")
        return self.splits[split]

    def example(self, split: str, index: int) -> dict[str, Any]:
        """Return example `index` of a split as a value per column."""
        columns = self.columns(split)
        total = num_examples(columns)
        if not 0 <= index < total:
            raise DataError(f"index: expected 0 to {total - 1} for {split} of {self.name}, got {index}")
        return {name: column[index] for name, column in columns.items()}


def checksum(column: Column) -> dict[str, str]:
    """Return the manifest entry of a column that is kept in memory only."""
    digest = hashlib.sha256()
    for values in (column.values, column.offsets) if isinstance(column, Ragged) else (column,):
        digest.update(f"{values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return {"values_sha256": digest.hexdigest()}


def _map_split(folder: Path, manifest: Manifest, split: str, names: Iterable[str]) -> dict[str, Column]:
    """Memory-map the columns of a split, and check that they have equally many examples."""
    columns: dict[str, Column] = {}
    for name in names:
        values, offsets = _map(folder, manifest, f"{split}.{name}.npy"), f"{split}.{name}.offsets.npy"
        columns[name] = values
        if offsets in manifest.files:
            mapped = _map(folder, manifest, offsets)
            with array_errors(folder / offsets, PREPARE_AGAIN):
                columns[name] = Ragged(values, check_offsets(mapped, values))
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ConfigError(f"splits.{split}: expected columns of equally many examples, got {shown(lengths)}")
    return columns


def _map(folder: Path, manifest: Manifest, name: str) -> NDArray[Any]:
    if name not in manifest.files:
        raise ConfigError(f"files: expected {name}, got none")
    path, entry = folder / name, manifest.files[name]
    found = path.stat().st_size if path.is_file() else None
    if found != entry.bytes:
        state = "no file" if found is None else f"{found:,} bytes"
        raise DataError(f"{path}: expected {entry.bytes:,} bytes, got {state}; {PREPARE_AGAIN}")
    with array_errors(path, PREPARE_AGAIN):
        values = map_array(path)
    if (str(values.dtype), list(values.shape)) != (entry.dtype, entry.shape) or not values.ndim:
        raise DataError(
            f"{path}: expected {shown(entry.dtype)} of shape {shown(entry.shape)}, got {values.dtype} of shape "
            f"{list(values.shape)}; {PREPARE_AGAIN}"
        )
    return values


class DatasetWriter:
    """Write a data set in parts: `with DatasetWriter(folder) as writer: writer.append("train", columns) ...`.

    `folder` is replaced in `commit`. If the block ends without it, everything that was written is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._files: dict[str, _NpyWriter] = {}
        self._lengths: dict[str, list[NDArray[np.int64]]] = {}
        self._splits: dict[str, dict[str, str]] = {}

    def __enter__(self) -> DatasetWriter:
        with disk_errors(self.folder):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            # Flushing the buffer can fail on a full disk; its content is not needed.
            with contextlib.suppress(OSError):
                file.file.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def append(self, split: str, columns: Columns) -> None:
        """Add examples to a split."""
        with disk_errors(self.folder):
            form = {name: "sequences" if isinstance(column, Ragged) else "values" for name, column in columns.items()}
            expected = self._splits.setdefault(split, form)
            lengths = {name: len(column) for name, column in columns.items()}
            if form != expected or len(set(lengths.values())) > 1:
                raise DataError(
                    f"{self.folder}: expected equally many examples of {expected} in {split}, got {form} of {lengths}"
                )
            for name, column in columns.items():
                values = column.values if isinstance(column, Ragged) else column
                self._file(f"{split}.{name}.npy", values).append(values)
                if isinstance(column, Ragged):
                    self._lengths.setdefault(f"{split}.{name}.offsets.npy", []).append(column.lengths)

    def commit(self, metadata: Mapping[str, Any]) -> None:
        """Write the manifest, including `metadata`, and move the data set into place."""
        with disk_errors(self.folder):
            for name, lengths in self._lengths.items():
                offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
                self._file(name, offsets).append(offsets)
            files = {name: file.close() for name, file in self._files.items()}
            splits = {split: list(form) for split, form in self._splits.items()}
            manifest = {"format": FORMAT, "tcnca": __version__, **metadata, "splits": splits, "files": files}
            with (self._partial / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            _replace_folder(self._partial, self.folder)

    def _file(self, name: str, like: NDArray[Any]) -> _NpyWriter:
        if name not in self._files:
            self._files[name] = _NpyWriter(self._partial / name, like.dtype, like.shape[1:])
        return self._files[name]


class _NpyWriter:
    """An .npy file that grows. NumPy leaves room in the header for the final length, which is written on close.

    Uses plain writes: on a full disk they raise an error, while writing to a memory map would kill the process.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], row: tuple[int, ...]) -> None:
        self.dtype, self.row, self.rows = dtype, row, 0
        self.digest = hashlib.sha256()
        self.file: BinaryIO = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.rows, *self.row)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, values: NDArray[Any]) -> None:
        if values.dtype != self.dtype or values.shape[1:] != self.row:
            raise DataError(
                f"{self.file.name}: expected rows of {self.dtype} {self.row}, got {values.dtype} {values.shape[1:]}"
            )
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self.file.write(data)
        self.digest.update(data)
        self.rows += len(values)

    def close(self) -> dict[str, Any]:
        size = self.file.tell()
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        shape = (self.rows, *self.row)
        return {"bytes": size, "dtype": str(self.dtype), "shape": shape, "values_sha256": self.digest.hexdigest()}


def _replace_folder(new: Path, folder: Path) -> None:
    """Move the folder `new` to `folder`. An existing one is moved away first, so that `folder` is always complete."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise a DataError if the disk of `folder` has fewer than `needed` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DataError(
            f"{folder}: expected about {needed / 1e9:.1f} GB of free space, got {free / 1e9:.1f} GB; free some space, "
            "choose another folder with --out or a smaller --size"
        )
