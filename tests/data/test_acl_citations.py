"""Splits share no papers, and every label follows from the citations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tcnca.data.datasets import acl_citations
from tcnca.data.schema import Content
from tcnca.errors import DataError
from tests.data.helpers import PACKINGS, Files, assert_same_content, packed, split, texts, write

COUNT = 40
PAPERS = [(b"P%02d" % place, rb"the paper %02d of (s\np)\np " % place) for place in range(COUNT)]
# A ring and its chords, some in both directions and one twice.
EDGES = [(place, (place + step) % COUNT) for place in range(COUNT) for step in (1, 2, 3, 5, 7)]
EDGES += [(place + 1, place) for place in range(COUNT - 1)] + [(0, 1)]


def files(packing: str = "", papers: Iterable[tuple[bytes, bytes]] = PAPERS) -> Files:
    edges = b"".join(b"P%02d\tP%02d\n" % edge for edge in EDGES)
    table = b"".join(b"%s\t%s\n" % paper for paper in papers)
    return {
        f"acl_papers_fulltext.tsv{packing}": packed(table, packing),
        f"acl_citation_edges.tsv{packing}": packed(edges, packing),
    }


def pairs(content: Content, name: str) -> list[tuple[int, int, int]]:
    """Numbers of the papers, and label."""
    columns = split(content, name)
    first, second = ([int(text.split()[2]) for text in texts(columns[side])] for side in ("first", "second"))
    return list(zip(first, second, np.asarray(columns["labels"]).tolist(), strict=True))


def test_labels_follow_from_the_citations(tmp_path: Path) -> None:
    content = acl_citations.read(write(tmp_path, files()))
    assert (content.kind, content.verified) == ("pairs", False)
    assert content.metadata == {"class_names": ["unrelated", "related"]}
    linked = {frozenset(edge) for edge in EDGES}
    for name in ("train", "validation", "test"):
        found = pairs(content, name)
        assert all(first != second for first, second, _ in found)
        assert all((frozenset((first, second)) in linked) == bool(label) for first, second, label in found)
        assert len({frozenset(pair[:2]) for pair in found}) == len(found)
        labels = [label for _, _, label in found]
        assert sum(labels) * 2 == len(labels)
    # Which of two papers comes first must not tell: papers mostly cite older ones.
    citing = [(first, second) in EDGES for first, second, label in pairs(content, "train") if label]
    assert 0.25 < sum(citing) / len(citing) < 0.75
    labels = [label for _, _, label in pairs(content, "train")]
    assert labels != sorted(labels)
    assert labels != sorted(labels, reverse=True)


def test_splits_share_no_papers_and_keep_their_citations(tmp_path: Path) -> None:
    content = acl_citations.read(write(tmp_path, files()))
    papers = {name: {paper for pair in pairs(content, name) for paper in pair[:2]} for name in content.splits}
    assert sum(map(len, papers.values())) == len(set().union(*papers.values())) <= COUNT
    assert len(papers["train"]) == 24
    assert max(len(papers["validation"]), len(papers["test"])) <= 8
    for name, inside in papers.items():
        expected = {frozenset(edge) for edge in EDGES if set(edge) <= inside}
        assert {frozenset(pair[:2]) for pair in pairs(content, name) if pair[2]} == expected


def test_compression_and_order_do_not_matter(tmp_path: Path) -> None:
    expected = acl_citations.read(write(tmp_path / "plain", files()))
    for packing in PACKINGS[1:]:
        assert_same_content(acl_citations.read(write(tmp_path / packing[1:], files(packing))), expected)
    assert_same_content(acl_citations.read(write(tmp_path / "turned", files(papers=PAPERS[::-1]))), expected)


@pytest.mark.parametrize("name", ["acl_papers_fulltext.tsv", "acl_citation_edges.tsv"])
def test_missing_and_empty_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, files())
    (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name}: the file is empty"):
        acl_citations.read(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: no such file, plain or compressed"):
        acl_citations.read(folder)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("acl_papers_fulltext.tsv", b"P99", "line 41: expected 2 columns, got 1"),
        ("acl_papers_fulltext.tsv", b"P07\tagain", "line 41: 'P07' occurs twice"),
        ("acl_citation_edges.tsv", b"P01\tP02\tP03", "line 241: expected 2 columns, got 3"),
        ("acl_citation_edges.tsv", b"P01\tX99", "line 241: expected papers of acl_papers_fulltext.tsv, got 'X99'"),
    ],
)
def test_damaged_line_is_named(tmp_path: Path, name: str, line: bytes, message: str) -> None:
    folder = write(tmp_path, files())
    (folder / name).write_bytes((folder / name).read_bytes() + line + b"\n")
    with pytest.raises(DataError, match=rf"{name}, {message}"):
        acl_citations.read(folder)


def test_too_many_citations_are_refused(tmp_path: Path) -> None:
    names = [b"%02d" % place for place in range(10)]
    folder = write(
        tmp_path,
        {
            "acl_papers_fulltext.tsv": b"".join(b"%s\ttext\n" % name for name in names),
            "acl_citation_edges.tsv": b"".join(b"%s\t%s\n" % (a, b) for a in names for b in names if a != b),
        },
    )
    with pytest.raises(
        DataError, match="expected at least 15 pairs of papers without a citation in train, as many as with one, got 0"
    ):
        acl_citations.read(folder)
