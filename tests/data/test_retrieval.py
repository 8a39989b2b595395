"""Long-Range Arena's pairs of papers, read line by line from every format."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tcnca.data.archives import checksum_file
from tcnca.data.datasets import retrieval
from tcnca.data.schema import Content
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

PLACES = {"train": "train", "validation": "eval", "test": "test"}
LONG = b"b'" + bytes(range(33, 127)) * 60 + b"'"
PAIRS = {
    "train": [
        (b"1.0", b'"quoted', LONG),
        (b"0.0", "U+0085 \u0085 and\r".encode(), b"\\n stays"),
        (b"0", b"", b"c"),
        (b"1", b"d", b"x"),
        (b"1", LONG[1:], b'say "hello'),
    ],
    "validation": [(b"0.0", b"e", b"f"), (b"1.0", b"g", b"h")],
    "test": [(b"1", b"i", b"j")],
}


def table(name: str) -> bytes:
    lines = (b"\t".join([label, b"P01", b"P02", first, second]) for label, first, second in PAIRS[name])
    return b"\n".join(lines) + b"\n"


def files(prefix: str = "", packing: str = "") -> Files:
    return {
        f"{prefix}new_aan_pairs.{place}.tsv{packing}": packed(table(name), packing) for name, place in PLACES.items()
    }


def consumed(content: Content) -> Content:
    for parts in content.splits.values():
        for _ in parts:
            pass
    return content


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny files be the published ones."""
    monkeypatch.setattr(retrieval, "COUNTS", {name: len(pairs) for name, pairs in PAIRS.items()})


@pytest.mark.usefixtures("published")
def test_pairs_are_read(tmp_path: Path) -> None:
    content = retrieval.read(write(tmp_path, files()))
    # The counts agree, but there is no checksum that says the texts do.
    assert (content.kind, content.verified) == ("pairs", False)
    assert content.metadata == {"class_names": ["unrelated", "related"]}
    for name, pairs in PAIRS.items():
        columns = split(content, name)
        labels = np.asarray(columns["labels"])
        assert labels.dtype == np.int64
        assert labels.tolist() == [int(float(label)) for label, _, _ in pairs]
        assert texts(columns["first"]) == [first[:4000] for _, first, _ in pairs]
        assert texts(columns["second"]) == [second[:4000] for _, _, second in pairs]
        assert max(map(len, texts(columns["first"]))) <= 4000


@pytest.mark.usefixtures("published")
def test_every_format_gives_the_same_pairs(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", files())
    forms = [write(tmp_path / f"packed{packing}", files(packing=packing)) for packing in PACKINGS]
    forms += [write(tmp_path / "release", files("lra_release/lra_release/tsv_data/"))]
    inside = files("lra_release/tsv_data/") | {"lra_release/listops/basic.tsv": b"other"}
    forms += [written(tmp_path / f"one{ending}", tarred(inside, ending.removeprefix(".tar"))) for ending in TARS]
    forms += [written(tmp_path / "one.zip", zipped(inside))]
    forms += [written(tmp_path / "fetched" / "lra_release.gz", tarred(inside, ".gz")).parent]
    for form in forms:
        assert_same_content(retrieval.read(form), retrieval.read(plain))


def test_other_counts_need_unverified(tmp_path: Path) -> None:
    folder = write(tmp_path, files())
    with pytest.raises(DataError, match=r"train\.tsv: expected 147,086 pairs, got 5; .*--unverified"):
        consumed(retrieval.read(folder))
    assert not consumed(retrieval.read(folder, unverified=True)).verified


@pytest.mark.usefixtures("published")
def test_only_files_with_the_checksum_of_their_host_are_verified(tmp_path: Path) -> None:
    folder = write(tmp_path, files())
    for name in retrieval.FILES.values():
        checksum = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        checksum_file(folder / name).write_text(f"sha256:{checksum}")
    assert consumed(retrieval.read(folder)).verified
    assert not retrieval.read(folder, unverified=True).verified
    stated = checksum_file(folder / retrieval.FILES["validation"])
    stated.unlink()
    assert not retrieval.read(folder).verified
    stated.write_text(f"sha256:{'0' * 64}")
    with pytest.raises(
        DataError, match=r"eval\.tsv: expected the checksum sha256:0{64}, as stated by its host, got sha256:"
    ):
        retrieval.read(folder)
    assert not retrieval.read(folder, unverified=True).verified


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"2\ta\tb\tc\td", "line 3: expected the label 0 or 1, got '2'"),
        (b"label\ta\tb\tc\td", "line 3: expected the label 0 or 1, got 'label'"),
        (b"1\ta\tb\tc", "line 3: expected 5 columns, got 4"),
        (b"1\ta\tb\tc\td\te", "line 3: expected 5 columns, got 6"),
        (b"", "line 3: expected 5 columns, got 1"),
    ],
)
def test_damaged_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    folder = write(tmp_path, files())
    (folder / "new_aan_pairs.eval.tsv").write_bytes(table("validation") + line + b"\n")
    with pytest.raises(DataError, match=rf"new_aan_pairs\.eval\.tsv, {message}"):
        consumed(retrieval.read(folder, unverified=True))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", files())
    (folder / "new_aan_pairs.test.tsv").write_bytes(b"")
    with pytest.raises(DataError, match=r"new_aan_pairs\.test\.tsv: the file is empty"):
        consumed(retrieval.read(folder, unverified=True))
    (folder / "new_aan_pairs.test.tsv").unlink()
    with pytest.raises(DataError, match=r"files: new_aan_pairs\.test\.tsv not found, plain or compressed"):
        retrieval.read(folder, unverified=True)
    with pytest.raises(DataError, match="got one of the files; give the folder"):
        retrieval.read(folder / "new_aan_pairs.train.tsv")
    path = written(tmp_path / "other.tar.gz", tarred({"new_aan_pairs.train.tsv": table("train")}, ".gz"))
    with pytest.raises(DataError, match=r"other\.tar\.gz: new_aan_pairs\.eval\.tsv not found in it"):
        consumed(retrieval.read(path, unverified=True))
