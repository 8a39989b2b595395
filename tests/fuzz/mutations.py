"""Damage files: their bytes, their values, and what kind of file they are. Every choice is drawn from a seed."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.fuzz import payloads

Rng = random.Random
OUTSIDE = "outside"
"""Folder next to that of the case, in which nothing may change."""

# Texts that `json.dumps` cannot write. A value refers to one by its number.
_RAW = [
    "1e400",
    "-1e400",
    "NaN",
    "-Infinity",
    "9" * 5_000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 20_000 + "1" + "}" * 20_000,
    '"\\ud800"',
    "[" * 1_500 + "]" * 1_500,
]
_ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**15, 2**31, 2**32 + 1, 2**63, -(2**63), 2**64),
    *(10**6, 10**9, 10**12, 10**30, "", "x", "x" * 100_000, "ä→😀", "a\0b", "../outside/secret.txt", "/etc/passwd"),
    *("nan", "1e3", "None", [], {}, [None], [[]], {"": None}, [0] * 1_000, list(range(5)), {"a": {"b": {"c": 1}}}),
    *(f"@raw{number}@" for number in range(len(_RAW))),
]


def odd(rng: Rng) -> Any:
    """Return a value that hardly any place expects."""
    return copy.deepcopy(rng.choice(_ODD))


def to_json(value: Any) -> str:
    """Return the JSON of a value that may refer to raw texts."""
    return _with_raw(json.dumps(value))


def to_yaml(value: Any) -> str:
    """Return the YAML of a value that may refer to raw texts."""
    return _with_raw(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _with_raw(text: str) -> str:
    for number, raw in enumerate(_RAW):
        for quote in "'\"":
            text = text.replace(f"{quote}@raw{number}@{quote}", raw)
    return text


def _paths(value: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values inside a value, itself included."""
    found = [start]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _paths(inner, (*start, key))
    return found


def damage_value(rng: Rng, value: Any) -> Any:
    """Return a copy of a nested value with one place changed, removed, renamed, added or wrapped."""
    value = copy.deepcopy(value)
    path = rng.choice(_paths(value))
    if not path:
        return rng.choice(
            [odd(rng), [value], {"a": value}, {**value, "extra": odd(rng)} if isinstance(value, dict) else 1]
        )
    place = value
    for key in path[:-1]:
        place = place[key]
    key, old = path[-1], place[path[-1]]
    action = rng.randrange(8)
    if action == 0:
        del place[key]
    elif action == 1 and isinstance(place, dict):
        place[rng.choice(["extra", "", "a.b", "__class__", "ä", f"{key} "])] = place.pop(key)
    elif action == 2 and isinstance(place, list):
        place *= 300
    elif action == 3:
        place[key] = rng.choice([[old], {"value": old}, str(old)])
    elif action == 4 and isinstance(old, int | float):
        place[key] = rng.choice([-old, old + 1, old * 10**6, old * 10**18, old / 2 if abs(old) < 1e9 else 0])
    elif action == 5 and isinstance(old, str) and old[:1] in ("[", "{"):
        place[key] = _damage_json_text(rng, old)
    elif action == 6 and isinstance(place, dict):
        other = rng.choice(list(place))
        place[key], place[other] = place[other], place[key]
    else:
        place[key] = odd(rng)
    return value


def _damage_json_text(rng: Rng, text: str) -> str:
    try:
        return to_json(damage_value(rng, json.loads(text)))
    except (ValueError, RecursionError):
        return text[: rng.randrange(len(text))]


# Bytes. Places are fractions of the length, so that a file of slightly different length is damaged alike.


def damage_bytes(rng: Rng, data: bytes, others: Sequence[bytes] = ()) -> tuple[str, bytes]:
    """Return what was done, and the damaged bytes."""
    size = len(data)
    begin = int(rng.random() * size)
    end = min(size, begin + int(rng.choice([1, 4, 64, size * rng.random()])) + 1)
    action = rng.randrange(9)
    if action == 0:
        return f"cut after {begin} bytes", data[:begin]
    if action == 1:
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 3, 30])):
            if changed:
                changed[int(rng.random() * size)] ^= 1 << rng.randrange(8)
        return "flip bits", bytes(changed)
    if action == 2:
        return f"insert at {begin}", data[:begin] + rng.randbytes(rng.choice([1, 8, 1000])) + data[begin:]
    if action == 3:
        return f"delete {begin}:{end}", data[:begin] + data[end:]
    if action == 4:
        return f"repeat {begin}:{end}", data[:end] + data[begin:end] * rng.choice([1, 2, 100]) + data[end:]
    if action == 5:
        return "empty", b""
    if action == 6 and others:
        return "content of another file", rng.choice(list(others))
    if action == 7:
        return "other first bytes", rng.choice(
            [b"PK\x03\x04", b"\x80\x04", b"\x1f\x8b\x08", b"\x93NUMPY", b"\xff"]
        ) + data[4:]
    return f"overwrite {begin}:{end}", data[:begin] + rng.randbytes(end - begin) + data[end:]


# Formats.


_LARGE = 2**20
"""Bytes of a file that is a bomb already."""


def damage_content(rng: Rng, path: Path) -> str:
    """Damage what a file says, with its format intact; its bytes if the format is unknown."""
    damage = _FORMATS.get(path.suffix)
    if damage is None or not path.is_file() or path.stat().st_size > _LARGE:
        return ""
    try:
        return damage(rng, path)
    except Exception:
        return ""  # it was damaged before, so that parsers fail in any way


def _damage_json(rng: Rng, path: Path) -> str:
    value = json.loads(path.read_bytes())
    path.write_text(to_json(damage_value(rng, value)), encoding="utf-8", errors="surrogatepass")
    return "change a value"


def _damage_lines(rng: Rng, path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    place = rng.randrange(len(lines))
    lines[place] = to_json(damage_value(rng, json.loads(lines[place])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return f"change a value in line {place + 1}"


def _damage_yaml(rng: Rng, path: Path) -> str:
    if rng.random() < 0.3:
        path.write_bytes(rng.choice(payloads.YAML_TEXTS).encode(errors="surrogatepass"))
        return "a text of YAML"
    text = path.read_text(encoding="utf-8")
    if "&" in text:
        return ""  # a bomb already
    value = yaml.safe_load(text)
    path.write_text(to_yaml(damage_value(rng, value)), encoding="utf-8", errors="surrogatepass")
    return "change a value"


def _damage_safetensors(rng: Rng, path: Path) -> str:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    action = rng.randrange(6)
    if action == 0:
        path.write_bytes(struct.pack("<Q", rng.choice([0, size - 1, size + 1, 2**31, 2**63, 2**64 - 1])) + data[8:])
        return "another size of the header"
    names = [name for name in header if name != "__metadata__"]
    if action == 1 and names:
        # A tensor of another type or shape whose bytes are there.
        entry = header[rng.choice(names)]
        begin, end = entry["data_offsets"]
        width = rng.choice([1, 2, 4, 8])
        kinds = {1: ["U8", "I8", "BOOL", "F8_E4M3"], 2: ["F16", "BF16", "I16"], 4: ["F32", "I32"], 8: ["F64", "I64"]}
        entry["dtype"], entry["shape"] = rng.choice(kinds[width]), [(end - begin) // width]
    elif action == 2 and names:
        entry = header[rng.choice(names)]
        entry["shape"] = rng.choice([[1, *entry["shape"]], entry["shape"][::-1], [0, 2**40], [2**32, 2**32], [-1]])
    else:
        header = damage_value(rng, header)
    text = to_json(header).encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return "change the header"


_DTYPES = ["<f4", "|u1", "<i8", "|O", "<f2", ">f8", "<c8", "<M8[s]", "|S0", "|S2147483647", "<U9", "|V8", "<f16", "|b1",
           [("a", "<f4"), ("b", "|O")], "<f4" * 50, "x", 7, None, ("<f4", (10**6, 10**6))]  # fmt: skip
_SHAPES: list[Any] = [(), (0,), (3,), (2, 3), (-1, 3), (10**12,), (2**62, 2**62), (0, 2**62), (2.5,), "x", None,
                      (True,), (1,) * 70, (2**63,), ([1],), (10**6, 0)]  # fmt: skip


def odd_array(rng: Rng) -> bytes:
    """Return an .npy with an odd header, or one that unpickles."""
    action = rng.randrange(4)
    if action == 0:
        return payloads.object_array(rng.randrange(20))
    if action == 1:
        shape = rng.choice([(), (0,), (4, 0), (0, 5), (7,), (3, 4), (2, 3, 4, 5)])
        kind = rng.choice(["<f4", "<f8", "|b1", "<c16", "<U3", "|S2", "<i8", "<u8", "<M8[D]"])
        file = io.BytesIO()
        np.save(file, np.zeros(shape, kind))
        return file.getvalue()
    data = bytes(rng.choice([0, 3, 48, 480]))
    descr, shape = rng.choice(_DTYPES), rng.choice(_SHAPES)
    version = rng.choice([b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"])
    return payloads.npy(descr, shape, data, rng.choice([False, True, "x"]), version)


def _damage_npy(rng: Rng, path: Path) -> str:
    path.write_bytes(odd_array(rng))
    return "another array"


def _damage_zip(rng: Rng, path: Path) -> str:
    before = path.read_bytes()
    action = rng.randrange(7)
    if action == 0:
        method = rng.choice([zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
        changed = bytearray(payloads.repacked(before, method))
        for _ in range(rng.choice([0, 1, 5])):
            changed[int(rng.random() * len(changed) * 0.8)] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
        return f"compressed with method {method}, with wrong bits"
    if action == 1:
        start = rng.choice(["../outside/", "/", "./", "a/", "a\0", "ä", "", "train_"])
        path.write_bytes(payloads.repacked(before, zipfile.ZIP_STORED, lambda name: start + name))
        return f"names that start with {start!r}"
    names = zipfile.ZipFile(io.BytesIO(before)).namelist()
    if action == 2:
        path.write_bytes(payloads.raw_zip(rng.choice(names), b"\x00" * 50, 2**31, rng.choice([0, 8, 14, 93, 99]), 1))
        return "encrypted, or of an unknown method"
    if action == 3:
        path.write_bytes(payloads.zip_bomb(rng.choice(names), payloads.npy("<f4", (2**29 + 2**26, 1))))
        return "a decompression bomb"
    chosen = rng.choice(names)
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(before)) as old, zipfile.ZipFile(file, "w") as new:
        for name in names:
            data = old.read(name)
            if name == chosen and action == 4:
                continue
            if name == chosen and name.endswith(".npy") and rng.random() < 0.7:
                data = odd_array(rng)
            elif name == chosen and name.endswith(".pkl") and rng.random() < 0.5:
                data = payloads.pickled(rng.randrange(30))
            elif name == chosen:
                data = damage_bytes(rng, data)[1]
            new.writestr(name, data)
    path.write_bytes(file.getvalue())
    return f"without {chosen}" if action == 4 else f"with another {chosen}"


def _damage_table(rng: Rng, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    action = rng.randrange(10)
    place = rng.randrange(len(lines))
    cells = lines[place].split(",")
    if action == 0:
        lines = [",".join(f"c{number}" for number in range(20_000)) + ",text,label\n", *lines[1:]]
    elif action == 1:
        lines[place] = '"' + lines[place]
    elif action == 2:
        lines[0] = lines[0].replace(
            "label", rng.choice(["text", "", "LABEL", "label,label", "\ufefflabel", "x" * 10**6])
        )
    elif action == 3:
        cells[rng.randrange(len(cells))] = rng.choice(["", "\0", "\ud800", "x" * 10**6, '"a\nb"', "=1+1", "ä" * 1000])
        lines[place] = ",".join(cells) + "\n"
    elif action == 4:
        lines = lines[: rng.choice([0, 1, 2, 3])]
    elif action == 5:
        lines = lines[:1] + lines[1:] * 20
    elif action == 6:
        lines = [line.replace(",", rng.choice([";", "\t", ",,", ", "])) for line in lines]
    elif action == 7:
        lines = [line.replace("\n", rng.choice(["\r", "\r\n", "\v", "\x85", "\u2028"])) for line in lines]
    elif action == 8:
        lines = ["\n" * 100_000, *lines]
    else:
        lines[place] = lines[place] * 3
    encoding = rng.choice(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32-be"])
    path.write_bytes("".join(lines).encode(encoding, "surrogatepass"))
    return f"change the table ({action}, {encoding})"


_FORMATS: dict[str, Callable[[Rng, Path], str]] = {
    ".json": _damage_json,
    ".jsonl": _damage_lines,
    ".yaml": _damage_yaml,
    ".safetensors": _damage_safetensors,
    ".npy": _damage_npy,
    ".npz": _damage_zip,
    ".zip": _damage_zip,
    ".pt": _damage_zip,
    ".csv": _damage_table,
}


# What kind of file it is.

LINKS = {
    "a file outside": f"{OUTSIDE}/secret.txt",
    "a folder outside": f"{OUTSIDE}/folder",
    "nothing": f"{OUTSIDE}/nothing",
    "zeros without end": "/dev/zero",
    "itself": "",
}


def replace_file(rng: Rng, path: Path) -> str:
    """Replace a file with a folder, a link, a FIFO, a pickle, or nothing."""
    action = rng.choice(["missing", "folder", "link", "link", "fifo", "pickle", "pickle", "random", "spaces"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if action == "folder":
        path.mkdir()
        (path / "file").write_bytes(b"1")
    elif action == "link":
        name = rng.choice(list(LINKS))
        link(path, name)
        return f"a link to {name}"
    elif action == "fifo":
        os.mkfifo(path)
    elif action == "pickle":
        number = rng.randrange(60)
        path.write_bytes(payloads.pickled(number))
        return f"pickle {number}"
    elif action == "random":
        path.write_bytes(rng.randbytes(rng.choice([1, 10, 1000])))
    elif action == "spaces":
        path.write_bytes(rng.choice([b" ", b"\n", b"\0", b"\xff"]) * rng.choice([1, 1000, 10**6]))
    return action


def link(path: Path, target: str) -> None:
    """Make a symbolic link to one of `LINKS`. The folder of the case is the working directory."""
    if target == "itself":
        path.symlink_to(path.name)
    else:
        path.symlink_to(Path(LINKS[target]) if LINKS[target].startswith("/") else Path.cwd().parent / LINKS[target])


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder, in an order that is the same everywhere."""
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.as_posix())


def damage(rng: Rng, path: Path, others: Sequence[Path] = ()) -> str:
    """Damage a file in a way that is drawn, and say how."""
    if path.is_symlink():
        return f"{path}: is a link already"
    kind = rng.choice(["content", "content", "content", "bytes", "bytes", "file"])
    done = ""
    if kind == "content":
        done = damage_content(rng, path)
    if kind == "file":
        done = replace_file(rng, path)
    if not done and path.is_file():
        contents = [other.read_bytes() for other in others if other.is_file()]
        done, data = damage_bytes(rng, path.read_bytes(), contents)
        path.write_bytes(data)
    return f"{path}: {done}"


def sign(base: Path, case: Path) -> None:
    """Write the digests and sizes of changed files where those of the original files are stated.

    Whoever changes a file can do so, too: a digest in the same folder protects from accidents, not from attacks.
    """
    new: dict[str, str] = {}
    for path in files_in(base):
        changed = case / path.relative_to(base)
        if changed.is_file() and not changed.is_symlink():
            before, after = path.read_bytes(), changed.read_bytes()
            if before != after:
                new[hashlib.sha256(before).hexdigest()] = hashlib.sha256(after).hexdigest()
    for path in files_in(case):
        if path.suffix != ".json" or path.is_symlink():
            continue
        data = path.read_bytes()
        for old, digest in new.items():
            data = data.replace(old.encode(), digest.encode())
        path.write_bytes(data)
        if path.name == "manifest.json":
            _sign_manifest(path)


def _sign_manifest(path: Path) -> None:
    try:
        manifest = json.loads(path.read_bytes())
        files = dict(manifest["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # it is damaged itself
    for name, entry in files.items():
        try:
            if not (path.parent / name).is_file():
                continue
            entry["bytes"] = (path.parent / name).stat().st_size
            with (path.parent / name).open("rb") as file:
                np.lib.format.read_magic(file)
                shape, _, kind = np.lib.format.read_array_header_1_0(file)
            entry["shape"], entry["dtype"] = list(shape), str(kind)
        except Exception:
            continue  # the array is damaged itself, and NumPy's errors are of any kind
    path.write_text(json.dumps(manifest), encoding="utf-8")
