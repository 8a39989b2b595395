"""Arrays are read as NumPy reads them, and damaged or malicious files are refused before memory is used."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data import npy
from tcnca.data.custom import read_custom
from tcnca.errors import DataError
from tests.data.helpers import written


def packed_npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def described(shape: object, descr: object = "<f4", order: object = False) -> str:
    return f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}"


def saved(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def packed_npz(path: Path, method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


VALUES = np.random.default_rng(0).normal(size=(40, 9)).astype(np.float32)
LABELS = np.arange(40) % 2


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24, dtype=">i2").reshape(4, 6)),
        np.array(["a", "bcd"]),
        np.array(5, np.uint8),
        np.zeros((3, 0), np.float32),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path, array: NDArray[Any]) -> None:
    path = written(tmp_path / "a.npy", saved(array))
    with path.open("rb") as file:
        found = npy.read_array(file, path.stat().st_size)
    for each in (found, npy.map_array(path)):
        assert each.dtype == array.dtype
        np.testing.assert_array_equal(each, array)


@pytest.mark.parametrize("version", [2, 3])
def test_later_versions_of_the_format(tmp_path: Path, version: int) -> None:
    data = packed_npy(described((40, 9)), VALUES.tobytes(), version)
    np.testing.assert_array_equal(npy.map_array(written(tmp_path / "a.npy", data)), VALUES)


BAD = {
    "empty": b"",
    "magic only": b"\x93NUMPY",
    "pickle": pickle.dumps([1]),
    "version": packed_npy(described((3,)), bytes(12), 9),
    "long header": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{",
    "parentheses": packed_npy("(" * 9000),
    "nested": packed_npy(described((3,), "x").replace("'x'", "(" * 2000 + ")" * 2000)),
    "minus signs": packed_npy(described("-" * 9000 + "1")),
    "not a dictionary": packed_npy("{[]: 1}"),
    "many digits": packed_npy(described("9" * 9000)),
    "huge shape": packed_npy(described((2**40,))),
    "overflowing shape": packed_npy(described((2**62, 4))),
    "overflowing empty shape": packed_npy(described((2**62, 4, 0))),
    "negative shape": packed_npy(described((-5,)), bytes(20)),
    "booleans as shape": packed_npy(described((True, True)), bytes(4)),
    "dimensions": packed_npy(described((1,) * 60), bytes(4)),
    "objects": packed_npy(described((3,), "|O"), pickle.dumps([1, 2, 3])),
    "objects inside": packed_npy(described((1,), [("a", "|O")]), bytes(8)),
    "no size": packed_npy(described((2**60,), "|S0")),
    "dtype": packed_npy(described((3,), ("<f4", (10**5, 10**5)))),
    "cut": saved(VALUES)[:-1],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_array_is_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "a.npy", BAD[name])
    with pytest.raises(DataError):
        npy.map_array(path)
    with pytest.raises(DataError, match=r"a\.npy, array 'values': cannot be read \(.*np\.save"):
        read_custom(path)
    packed_npz(tmp_path / "a.npz", values=BAD[name], labels=saved(LABELS))
    with pytest.raises(DataError, match=r"a\.npz, array 'values': cannot be read \(.*np\.save"):
        read_custom(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_damaged_archive_is_refused(tmp_path: Path, method: int) -> None:
    path = packed_npz(tmp_path / "a.npz", method, values=saved(VALUES), labels=saved(LABELS))
    whole = path.read_bytes()
    assert read_custom(path).kind == "classification"
    random = np.random.default_rng(method)
    refused = 0
    for _ in range(50):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 2):
            data[place] ^= 0xFF
        try:
            read_custom(written(path, bytes(data)))
        except DataError:
            refused += 1
    assert refused > 40


def test_member_that_is_not_as_large_as_stated(tmp_path: Path) -> None:
    path = packed_npz(tmp_path / "a.npz", values=packed_npy(described((2**30 - 64,))), labels=saved(LABELS))
    data = bytearray(path.read_bytes())
    size = data.index(b"PK\x01\x02") + 24
    data[size : size + 4] = struct.pack("<I", 2**32 - 2)
    with pytest.raises(DataError, match="array 'values': cannot be read"):
        read_custom(written(path, bytes(data)))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_array_that_is_there_twice(tmp_path: Path) -> None:
    path = packed_npz(tmp_path / "a.npz", values=saved(VALUES))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("values.npy", saved(VALUES))
    with pytest.raises(DataError, match="expected different names of arrays, got 'values' twice"):
        read_custom(path)


def test_array_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "available_memory", lambda: 10**9)
    header = packed_npy(described((10**9,)))
    path = written(tmp_path / "a.npy", header)
    os.truncate(path, len(header) + 4 * 10**9)
    with pytest.raises(DataError, match=r"needs about 16\.0 GB of memory, 1\.0 GB are available"):
        read_custom(path)


def test_available_memory() -> None:
    assert 10**6 < npy.available_memory() < 2**63


def test_impossible_characters_in_labels(tmp_path: Path) -> None:
    labels = packed_npy(described((40,), "<U1"), b"\xff\xff\xff\x7f" * 40)
    path = packed_npz(tmp_path / "a.npz", values=saved(VALUES), labels=labels)
    with pytest.raises(DataError, match="array 'labels': cannot be read"):
        read_custom(path)


def test_compressed_array_that_grows_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "_MIN_UNPACKED", 2**20)
    one_hot = np.eye(256, dtype=np.float32)[np.random.default_rng(0).integers(0, 256, (40, 64))]
    np.savez_compressed(tmp_path / "one_hot.npz", values=one_hot, labels=LABELS)
    assert read_custom(tmp_path / "one_hot.npz").kind == "classification"
    np.savez_compressed(tmp_path / "bomb.npz", values=np.zeros_like(one_hot), labels=LABELS)
    with pytest.raises(DataError, match=r"'values': .*expected at most 1,0.* bytes when unpacked, got 2,62.*savez"):
        read_custom(tmp_path / "bomb.npz")
