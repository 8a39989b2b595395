"""The form of the data is found out from the files, and what does not fit it is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.schema import Kind
from tcnca.errors import DataError

TABLE = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(8))


def _make(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix in (".npy", ".npz"):
        arrays = {"values": np.arange(40.0).reshape(20, 2), "labels": np.arange(20) % 2}
        np.savez(path, **arrays) if path.suffix == ".npz" else np.save(path, arrays["values"])  # type: ignore[arg-type]
    else:
        path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv", "classification"),
        ("a.npz", "classification"),
        ("a.npy", "forecast"),
        ("a.txt", "language"),
        ("a", "language"),
        ("a.py", "language"),
    ],
)
def test_kind_of_a_file(tmp_path: Path, name: str, kind: Kind) -> None:
    assert read_custom(_make(tmp_path, name)).kind == kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["train.csv", "test.csv"], "classification"),
        (["train.npz", "test.npz"], "classification"),
        (["train.txt", "test.csv"], "language"),
        (["a.csv", "b.txt"], "language"),
        (["package.json", "main.js"], "language"),
    ],
)
def test_kind_of_a_folder(tmp_path: Path, names: list[str], kind: Kind) -> None:
    for name in names:
        _make(tmp_path, name)
    assert read_custom(tmp_path).kind == kind


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a.npz", "pairs", r"needs tables \(.csv.*\); for what is there, allowed is classification, regression, fore"),
        ("a.csv", "regression", r"needs arrays \(.npy, .npz\); for what is there, allowed is classification, pairs, l"),
        ("a.csv", "forecast", r"--kind forecast needs arrays"),
        ("a.txt", "classification", r"needs tables \(.*\) or arrays \(.*\); for what is there, allowed is language"),
    ],
)
def test_kinds_that_do_not_fit(tmp_path: Path, name: str, kind: Kind, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_custom(_make(tmp_path, name), CustomOptions(kind=kind))


def test_tables_beside_arrays(tmp_path: Path) -> None:
    for name in ("train.csv", "test.npz"):
        _make(tmp_path, name)
    with pytest.raises(DataError, match="holds both tables and arrays; move one of them away"):
        read_custom(tmp_path, CustomOptions(kind="classification"))


IN_A_RECIPE = r" \(in a recipe: data\.custom\.kind=language\)$"
PACKED = "is packed; unpack it first, or --kind language to learn the packed bytes" + IN_A_RECIPE


@pytest.mark.parametrize("kind", [None, "classification"])
@pytest.mark.parametrize("name", ["a.csv.gz", "b.jsonl.xz", "app.log.GZ", "a.bz2", "a.zip", "a.zst", "a.7z"])
def test_packed_files_are_known_by_their_endings(tmp_path: Path, name: str, kind: Kind | None) -> None:
    path = _make(tmp_path, name)
    with pytest.raises(DataError, match=f"{name}: {PACKED}"):
        read_custom(path, CustomOptions(kind=kind))
    assert read_custom(path, CustomOptions(kind="language")).kind == "language"


def _zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", content)
    return packed.getvalue()


@pytest.mark.parametrize("name", ["app.log", "app.csv", "app"])
@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(TABLE.encode()),
        lzma.compress(TABLE.encode()),
        bz2.compress(TABLE.encode()),
        bz2.compress(b"", 1),
        _zipped(TABLE.encode()),
        bytes.fromhex("28b52ffd2005290000") + b"hello",
        bytes.fromhex("377abcaf271c0004") + bytes(24),
    ],
    ids=["gzip", "xz", "bzip2", "empty bzip2", "zip", "zstd", "7z"],
)
def test_packed_files_are_known_by_their_first_bytes(tmp_path: Path, name: str, packed: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(packed)
    with pytest.raises(DataError, match=f"{name}: {PACKED}"):
        read_custom(path)
    content = read_custom(path, CustomOptions(kind="language"))
    assert b"".join(np.asarray(p["bytes"]).tobytes() for parts in content.splits.values() for p in parts) == packed


def test_a_packed_file_in_a_folder(tmp_path: Path) -> None:
    for name in ("a.txt", "deep/b.log.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        _make(tmp_path, name)
    with pytest.raises(DataError, match=rf"b\.log\.gz: {PACKED}"):
        read_custom(tmp_path)
    assert read_custom(tmp_path, CustomOptions(kind="language")).kind == "language"


@pytest.mark.parametrize("text", ["BZh9 is how it begins.", "PK for short", "7z is a packer"])
def test_texts_that_only_look_packed(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert read_custom(tmp_path / "a.txt").kind == "language"


@pytest.mark.parametrize("kind", [None, "classification"])
@pytest.mark.parametrize("names", [["a.json"], ["A.JSON"], ["train.json", "test.json"]])
def test_json_is_not_mistaken_for_text(tmp_path: Path, names: list[str], kind: Kind | None) -> None:
    for name in names:
        (tmp_path / name).write_text('[{"text": "a", "label": 1}, {"text": "b", "label": 2}]')
    path = tmp_path / names[0] if len(names) == 1 else tmp_path
    message = r"(?i)\.json: is JSON; save one object a line as \.jsonl, or --kind language to learn its bytes"
    with pytest.raises(DataError, match=message + IN_A_RECIPE):
        read_custom(path, CustomOptions(kind=kind))
    assert read_custom(path, CustomOptions(kind="language")).kind == "language"


@pytest.mark.parametrize("option", ["text", "second", "label", "split", "values", "labels", "targets", "lengths"])
def test_options_that_mean_nothing_for_bytes(tmp_path: Path, option: str) -> None:
    chosen: dict[str, Any] = {option: "name"}
    with pytest.raises(DataError, match=f"--{option} 'name' means nothing for bytes .*; leave it out"):
        read_custom(_make(tmp_path, "a.txt"), CustomOptions(**chosen))
