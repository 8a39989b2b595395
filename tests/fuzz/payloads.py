"""Files that attack: pickles that run code, archives that unpack to gigabytes, aliases that expand without end."""

from __future__ import annotations

import builtins
import bz2
import gzip
import importlib
import io
import lzma
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

MARKER = "tcnca_fuzz_marker"
"""File that every payload tries to create, and module that it tries to import."""
_PIECE = 2**24
_PIECES = 160
"""Bombs unpack to so many pieces of zeros: 2.5 GiB."""

_CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (os.system, (f"touch {MARKER}",)),
    (builtins.exec, (f"open('{MARKER}', 'w')",)),
    (builtins.eval, (f"open('{MARKER}', 'w')",)),
    (builtins.open, (MARKER, "w")),
    (subprocess.Popen, (["touch", MARKER],)),
    (importlib.import_module, (MARKER,)),
    (os.mkdir, (MARKER,)),
]


class _Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _CALLS[self.number % len(_CALLS)]


def payload(number: int) -> Any:
    """Return an object whose pickle runs code."""
    return _Payload(number)


def pickled(number: int) -> bytes:
    """Return a pickle that runs code, alone or inside plain values."""
    value = payload(number)
    return pickle.dumps([value, {"step": value}, value][number % 3], protocol=(2, 4, 5)[number % 3])


def object_array(number: int) -> bytes:
    """Return an .npy of objects, whose values are pickled."""
    file = io.BytesIO()
    np.save(file, np.array([payload(number), 1], dtype=object), allow_pickle=True)
    return file.getvalue()


def npy(descr: Any, shape: Any, data: bytes = b"", fortran: Any = False, version: bytes = b"\x01\x00") -> bytes:
    """Return an .npy whose header says anything at all."""
    header = f"{{'descr': {descr!r}, 'fortran_order': {fortran!r}, 'shape': {shape!r}, }}".encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


def gzip_bomb() -> bytes:
    """Return a .gz of many members."""
    return gzip.compress(bytes(_PIECE), 9) * _PIECES


def tar_bomb(name: str) -> bytes:
    """Return a .tar.gz with one file of gigabytes."""
    entry = tarfile.TarInfo(name)
    entry.size = _PIECE * _PIECES
    return gzip.compress(entry.tobuf()) + gzip_bomb()


def bzip2_bomb() -> bytes:
    """Return a .bz2 of many streams."""
    return bz2.compress(bytes(_PIECE)) * _PIECES


def xz_bomb() -> bytes:
    """Return an .xz of many streams."""
    return lzma.compress(bytes(_PIECE), preset=0) * _PIECES


def xz_dictionary() -> bytes:
    """Return a short .xz that asks for a dictionary of 4 GiB."""
    data = bytearray(lzma.compress(b"text " * 100))
    size = (data[12] + 1) * 4  # of the header of the first block, which ends with its CRC32
    place = data.index(b"\x21\x01", 12, 12 + size) + 2
    data[place] = 40
    data[12 + size - 4 : 12 + size] = struct.pack("<I", zlib.crc32(data[12 : 12 + size - 4]))
    return bytes(data)


def deflated_zeros() -> bytes:
    """Return a raw deflate stream of 2.5 GiB, composed of one block many times."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(_PIECE)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * _PIECES + packer.flush(zlib.Z_FINISH)


def zip_bomb(name: str, start: bytes = b"") -> bytes:
    """Return a zip with one member that unpacks to `start` and gigabytes of zeros."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH) + deflated_zeros()
    return raw_zip(name, data, len(start) + _PIECE * _PIECES, 8)


def raw_zip(name: str, data: bytes, size: int, method: int, flags: int = 0) -> bytes:
    """Return a zip with one member, whose header says anything at all."""
    encoded = name.encode()
    common = struct.pack("<HHHHIIIHH", flags, method, 0, 33, 0, len(data), min(size, 2**32 - 1), len(encoded), 0)
    local = b"PK\x03\x04" + struct.pack("<H", 20) + common + encoded + data
    central = b"PK\x01\x02" + struct.pack("<HH", 20, 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + encoded
    return local + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def repacked(data: bytes, method: int, rename: Callable[[str], str] = lambda name: name) -> bytes:
    """Return the members of a zip with another compression, or under other names."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w", method) as after:
        for entry in before.infolist():
            after.writestr(rename(entry.filename), before.read(entry))
    return file.getvalue()


def hostile_tar(name: str, data: bytes, packing: str = "w:gz") -> bytes:
    """Return a tar of links, devices, a sparse file and names that point outside, besides one file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=packing) as archive:  # type: ignore[call-overload]
        kinds = {
            "link": tarfile.SYMTYPE,
            "hard": tarfile.LNKTYPE,
            "fifo": tarfile.FIFOTYPE,
            "device": tarfile.CHRTYPE,
            "sparse": tarfile.GNUTYPE_SPARSE,
        }
        for folder in ("", "../outside/", "/tmp/"):
            for kind, value in kinds.items():
                entry = tarfile.TarInfo(f"{folder}{kind}/{name}")
                entry.type, entry.linkname = value, "../outside/secret.txt"
                archive.addfile(entry)
            entry = tarfile.TarInfo(f"{folder}{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


_ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
ALIAS_BOMB = f"data:\n custom:\n  {_ALIASES}about: *a11\n"
YAML_TEXTS = [
    ALIAS_BOMB,
    f"model:\n  {_ALIASES}",
    "about: &a [*a]\n",
    "about: &a {b: 1}\nmodel:\n  <<: *a\n",
    "model: &m {<<: [*m, *m]}\n",
    f"about: !!python/object/apply:os.system ['touch {MARKER}']\n",
    f"about: !!python/object/new:os.system ['touch {MARKER}']\n",
    f"about: !!python/name:{MARKER}.x\n",
    "about: !!binary '%%%'\n",
    "about: !!int x\n",
    "about: !!timestamp 2001-13-45\n",
    "about: !!set {a, b}\n",
    "about: !!omap [a: 1]\n",
    "about: 2001-13-45\n",
    "about: 0x_\n",
    "about: 0b_\n",
    "about: 1:99:99\n",
    "? [a, b]\n: 1\n",
    "? {a: b}\n: 1\n",
    "1: 2\n",
    "null: 1\n",
    "- a\n- b\n",
    "text\n",
    "",
    "about: " + "[" * 20_000 + "]" * 20_000 + "\n",
    "about: " + "{a: " * 5_000 + "1" + "}" * 5_000 + "\n",
    "about: \ud800\n",
    "about: 'a\0b'\n",
    "--- a\n--- b\n",
    "%YAML 9.9\n---\na: 1\n",
    "about: " + "9" * 5_000 + "\n",
    "extends: ../../../../../../../../etc/passwd.yaml\n",
    "extends: /dev/zero\n",
    "extends: recipe.yaml\n",
    "extends: [a]\n",
    "about: a\nabout: b\n",
]
"""Texts of YAML that are no recipes."""
