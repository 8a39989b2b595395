"""EnWik8 has the usual splits, and other files are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tcnca.data.datasets import enwik8
from tcnca.errors import DataError
from tests.data.helpers import PACKINGS, assert_same_content, packed, split, written

DATA = bytes(np.random.default_rng(0).integers(32, 127, 2000, dtype=np.uint8))


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny text be the published one."""
    monkeypatch.setattr(enwik8, "SIZE", len(DATA))
    monkeypatch.setattr(enwik8, "SHA256", hashlib.sha256(DATA).hexdigest())


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("packing", PACKINGS)
def test_plain_and_compressed_files_are_read(tmp_path: Path, packing: str) -> None:
    path = written(tmp_path / f"enwik8{packing}", packed(DATA, packing))
    content = enwik8.read(path)
    assert (content.kind, content.verified, content.origin) == ("language", True, path.name)
    parts = {name: split(content, name)["bytes"] for name in content.splits}
    assert {name: len(part) for name, part in parts.items()} == {"train": 1800, "validation": 100, "test": 100}
    assert b"".join(np.asarray(part).tobytes() for part in parts.values()) == DATA
    assert content.metadata == {"symbols": sorted(set(DATA))}
    assert_same_content(enwik8.read(tmp_path), content)


@pytest.mark.usefixtures("published")
def test_partial_download_is_ignored(tmp_path: Path) -> None:
    written(tmp_path / "enwik8.zip.part", b"PK")
    with pytest.raises(DataError, match="expected a file enwik8"):
        enwik8.read(tmp_path)
    written(tmp_path / "enwik8.zip", packed(DATA, ".zip"))
    assert enwik8.read(tmp_path).origin == "enwik8.zip"


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected 2,000 bytes, got 0"),
        (DATA[:-1], "expected 2,000 bytes, got 1,999"),
        (DATA + b"!", "expected 2,000 bytes, got 2,001"),
        (DATA[:-1] + b"\x00", "expected the sha256 checksum [0-9a-f]{64}, got [0-9a-f]{64}"),
    ],
    ids=["empty", "short", "long", "changed"],
)
def test_other_text_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = written(tmp_path / "text", data)
    with pytest.raises(
        DataError, match=rf"text: {message}; download it again, or accept it as it is with --unverified"
    ):
        enwik8.read(path)


@pytest.mark.parametrize("size", [20, 99, 1234])
def test_unverified_text_is_split_in_proportion(tmp_path: Path, size: int) -> None:
    content = enwik8.read(written(tmp_path / "text", DATA[:size]), unverified=True)
    assert not content.verified
    train, validation, test = (len(split(content, name)["bytes"]) for name in ("train", "validation", "test"))
    assert train + validation + test == size
    assert abs(train - 0.9 * size) < 1
    assert abs(validation - 0.05 * size) < 1
    assert test >= 1


def test_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a file enwik8"):
        enwik8.read(tmp_path)
