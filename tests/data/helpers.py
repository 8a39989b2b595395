"""Small data sets, and small files in every format of the published data sets."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.schema import Column, Columns, Content, Ragged, concatenate
from tcnca.data.store import Dataset, DatasetWriter
from tcnca.errors import DataError

PACKINGS = ("", ".gz", ".xz", ".bz2", ".zip")
TARS = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2")

Files = dict[str, bytes]


def ragged(sequences: Sequence[NDArray[Any]], dtype: Any = None) -> Ragged:
    """Join arrays that agree in all but their first dimension."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    return Ragged.from_lengths(np.concatenate(sequences, dtype=dtype) if sequences else np.zeros(0, dtype), lengths)


def packed(data: bytes, packing: str) -> bytes:
    """Compress `data`; the compression is given by its suffix."""
    if packing == ".zip":
        return zipped({"inside": data})
    packers: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".bz2": bz2.compress,
    }
    return packers[packing](data)


def zipped(files: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(files: Files, packing: str = "") -> bytes:
    """Build a tar archive with folders and files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for folder in sorted({name.rpartition("/")[0] for name in files} - {""}):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed(buffer.getvalue(), packing)


def write(folder: Path, files: Files) -> Path:
    """Write files and their folders."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def split(content: Content, name: str) -> dict[str, Column]:
    """Concatenate the parts of a split."""
    return concatenate(list(content.splits[name]))


def texts(column: Column) -> list[bytes]:
    """Return the sequences of a column of bytes."""
    assert isinstance(column, Ragged)
    assert column.values.dtype == np.uint8
    return [column[place].tobytes() for place in range(len(column))]


def assert_same_content(got: Content, expected: Content) -> None:
    assert got.splits.keys() == expected.splits.keys()
    assert (got.kind, got.metadata) == (expected.kind, expected.metadata)
    for name in expected.splits:
        assert_same_columns(split(got, name), split(expected, name))


def assert_refused(path: Path, message: str, options: CustomOptions | None = None) -> None:
    """Read a data set; the error begins with its path, followed by what matches `message`."""
    with pytest.raises(DataError) as caught:
        read_custom(path, options or CustomOptions())
    assert str(caught.value).startswith(str(path))
    assert re.search(message, str(caught.value).removeprefix(str(path))), str(caught.value)


def assert_same_columns(got: Columns, expected: Columns) -> None:
    assert got.keys() == expected.keys()
    for name, column in expected.items():
        other = got[name]
        if isinstance(column, Ragged):
            assert texts(other) == texts(column), name
        else:
            assert isinstance(other, np.ndarray)
            assert other.dtype == column.dtype, name
            np.testing.assert_array_equal(other, column)


def python2_batch(pixels: NDArray[np.uint8], labels: list[int]) -> bytes:
    """Return a batch of CIFAR-10 as Python 2 pickled it: strings and pixels are bytes."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(len(pixels)) + number(pixels.shape[1]) + b"\x86"
    array = empty + b"(" + number(1) + shape + kind + b"\x89" + string(pixels.tobytes()) + b"tb"
    entries = string(b"batch_label") + string(b"a batch") + string(b"data") + array
    entries += string(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + entries + b"u."


def write_dataset(folder: Path, splits: Mapping[str, Iterable[Columns]], **metadata: Any) -> Dataset:
    with DatasetWriter(folder) as writer:
        for split, parts in splits.items():
            for columns in parts:
                writer.append(split, columns)
        writer.commit(metadata)
    return Dataset.open(folder)


def small_dataset(folder: Path, label: int = 1) -> Dataset:
    """A data set with a plain and a ragged column."""
    tokens = Ragged.from_bytes([b"abc", b"", b"defgh"])
    columns: Columns = {"tokens": tokens, "labels": np.arange(3) + label}
    return write_dataset(folder, {"train": [columns]}, kind="classification", class_names=list("abcde"))


def siblings(folder: Path) -> list[str]:
    """Other entries in the folder of a data set."""
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)
