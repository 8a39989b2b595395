"""Every format gives the same reviews in the same order."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tcnca.data.datasets import text as imdb
from tcnca.errors import DataError
from tests.data.helpers import (
    PACKINGS,
    TARS,
    Files,
    assert_same_content,
    packed,
    split,
    tarred,
    texts,
    write,
    written,
    zipped,
)

ODD = "An\u0085odd\tone, with a \\backslash,\\n no line feed\nand a real one\n".encode()
REVIEWS = {
    "train": [(0, b"Dull."), (0, ODD), (0, b"Dull."), (1, b"Bright."), (1, "Größer\r\nals\rje".encode()), (1, b"Yes")],
    "test": [(0, b"No."), (0, b"Never again"), (1, b"Again!"), (1, b"A film.")],
}
NORMAL = {
    name: [(label, text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")) for label, text in reviews]
    for name, reviews in REVIEWS.items()
}
ESCAPES = ((b"\\", b"\\\\"), (b"\n", b"\\n"), (b"\r", b"\\r"), (b"\t", b"\\t"))


def files(prefix: str = "") -> Files:
    """As in the archive, with the other things that are in it."""
    reviews = {
        f"{prefix}{name}/{('neg', 'pos')[label]}/{99 - place}_{label}.txt": text
        for name, examples in REVIEWS.items()
        for place, (label, text) in enumerate(examples)
    }
    others = ("README", "imdb.vocab", "train/labeledBow.feat", "train/urls_neg.txt", "train/unsup/0_0.txt")
    return reviews | {f"{prefix}{name}": b"something else" for name in others}


def tables(packing: str = "") -> Files:
    return {f"imdb_{name}.tsv{packing}": packed(table(name), packing) for name in REVIEWS}


def table(name: str) -> bytes:
    lines = []
    for label, text in REVIEWS[name]:
        for plain, escaped in ESCAPES:
            text = text.replace(plain, escaped)
        lines.append(b"%d\t%s\n" % (label, text))
    return b"".join(lines)


def digest(name: str) -> str:
    sums = sorted(hashlib.sha256(bytes([label]) + text).digest() for label, text in NORMAL[name])
    return hashlib.sha256(b"".join(sums)).hexdigest()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny reviews be the published ones."""
    monkeypatch.setattr(imdb, "DIGESTS", {name: digest(name) for name in REVIEWS})


@pytest.mark.usefixtures("published")
def test_reviews_are_complete_and_mixed(tmp_path: Path) -> None:
    content = imdb.read(write(tmp_path, files()))
    assert (content.kind, content.verified) == ("classification", True)
    assert content.metadata == {"class_names": ["negative", "positive"]}
    assert list(content.splits) == ["train", "test"]
    for name, reviews in NORMAL.items():
        columns = split(content, name)
        labels = np.asarray(columns["labels"])
        assert labels.dtype == np.int64
        got = list(zip(labels.tolist(), texts(columns["tokens"]), strict=True))
        assert got == sorted(reviews, key=lambda review: hashlib.sha256(bytes([review[0]]) + review[1]).digest())
    assert (
        sorted(np.asarray(split(content, "train")["labels"]).tolist())
        != np.asarray(split(content, "train")["labels"]).tolist()
    )


@pytest.mark.usefixtures("published")
def test_every_format_gives_the_same_reviews(tmp_path: Path) -> None:
    expected = imdb.read(write(tmp_path / "given" / "aclImdb", files()))
    forms = [tmp_path / "given"]
    forms += [write(tmp_path / f"tables{packing}", tables(packing)) for packing in PACKINGS]
    forms += [
        written(tmp_path / f"one{ending}", tarred(files("aclImdb/"), ending.removeprefix(".tar"))) for ending in TARS
    ]
    forms += [written(tmp_path / "one.zip", zipped(files("aclImdb/")))]
    forms += [written(tmp_path / "fetched" / "aclImdb_v1.tar.gz", tarred(files("aclImdb/"), ".gz")).parent]
    for form in forms:
        content = imdb.read(form)
        assert content.verified, form
        assert_same_content(content, expected)


def test_other_reviews_need_unverified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "reviews", files())
    message = r"reviews: expected 25,000 reviews in train, got 6; download it again, or .*--unverified"
    with pytest.raises(DataError, match=message):
        imdb.read(folder)
    monkeypatch.setattr(imdb, "COUNT", 6)
    message = rf"expected the checksum 3097e9b0\w+ of train, got {digest('train')}"
    with pytest.raises(DataError, match=message):
        imdb.read(folder)
    assert not imdb.read(folder, unverified=True).verified


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"2\ttext", r"line 2: expected the label 0 or 1, got '2'"),
        (b"0 text", r"line 2: expected 2 columns, got 1"),
        (b"0\ttext\tmore", r"line 2: expected 2 columns, got 3"),
        (b"", r"line 2: expected 2 columns, got 1"),
        (b"0\ta \\x b", r"line 2: expected the escapes .*, got '\\\\x'"),
        (b"0\tends in \\", r"line 2: expected the escapes .*, got '\\\\'"),
    ],
    ids=["label", "no tab", "two tabs", "blank", "escape", "half an escape"],
)
def test_damaged_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    folder = write(tmp_path, tables())
    (folder / "imdb_test.tsv").write_bytes(b"1\tfine\n" + line + b"\n0\tfine\n")
    with pytest.raises(DataError, match=rf"imdb_test\.tsv, {message}"):
        imdb.read(folder, unverified=True)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no reviews in train; give aclImdb_v1"):
        imdb.read(write(tmp_path / "other", {"train/neg.txt": b""}))
    folder = write(tmp_path / "tables", tables())
    (folder / "imdb_test.tsv").write_bytes(b"")
    with pytest.raises(DataError, match=r"imdb_test\.tsv: the file is empty"):
        imdb.read(folder, unverified=True)
    (folder / "imdb_test.tsv").unlink()
    with pytest.raises(DataError, match=r"imdb_test\.tsv: no such file"):
        imdb.read(folder, unverified=True)
    path = written(tmp_path / "wrong.tar.gz", tarred({"other.txt": b""}, ".gz"))
    with pytest.raises(DataError, match=r"wrong\.tar\.gz: no reviews in train"):
        imdb.read(path, unverified=True)
