"""Citations in a small collection of ACL papers: a stand-in in the format of Retrieval, not Long-Range Arena's data."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tcnca.data.archives import find_file, open_decompressed, read_tsv
from tcnca.data.datasets.retrieval import CLASS_NAMES, MAX_LENGTH
from tcnca.data.datasets.spec import DatasetSpec
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import SPLITS, Columns, Content, Ragged
from tcnca.data.tasks import PairTask
from tcnca.errors import DataError

PAPERS, EDGES = "acl_papers_fulltext.tsv", "acl_citation_edges.tsv"

_NAME = "acl-citations"
_MAX_LINES = 200_000
"""Papers and citations are read into memory, so there may not be any number of them."""

Pair = tuple[int, int]


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read a folder with `acl_papers_fulltext.tsv` and `acl_citation_edges.tsv`, plain or compressed.

    Papers, not pairs, are split: 60 % train, 20 % validation, 20 % test. Two papers of a split are related if one cites
    the other; equally many pairs without a citation are drawn as unrelated. No pair occurs twice, in either order.
    Texts are the bytes of the file, backslashes included, truncated to 4,000. This data set was never published, so it
    is never `verified`.
    """
    papers = _read_papers(_find(origin, PAPERS))
    # Sorted by name, so that the splits do not depend on the order of the file.
    texts = [papers[name] for name in sorted(papers)]
    places = {name: place for place, name in enumerate(sorted(papers))}
    edges = _read_edges(_find(origin, EDGES), places)
    order = CounterRNG(_NAME, "split").permutation(len(texts))
    cuts = [len(texts) * 60 // 100, len(texts) * 80 // 100]
    parts = dict(zip(SPLITS, np.split(order, cuts), strict=True))
    return Content(
        kind="pairs",
        splits={split: [_columns(origin, split, members, edges, texts)] for split, members in parts.items()},
        origin=origin.resolve().name,
        verified=False,
        metadata={"class_names": list(CLASS_NAMES)},
    )


def _find(origin: Path, name: str) -> Path:
    path = find_file(origin, name)
    if path is None:
        raise DataError(
            f"{origin / name}: no such file, plain or compressed; give the folder with {PAPERS} and {EDGES}"
        )
    return path


def _read_papers(path: Path) -> dict[bytes, bytes]:
    papers: dict[bytes, bytes] = {}
    with open_decompressed(path) as reader:
        for where, (name, text) in read_tsv(reader, path, 2):
            if name in papers:
                raise DataError(f"{where}: {name.decode(errors='replace')!r} occurs twice; remove one of the lines")
            papers[name] = text[:MAX_LENGTH]
            _check_count(len(papers), where)
    return papers


def _read_edges(path: Path, places: dict[bytes, int]) -> list[Pair]:
    """Return the citing and the cited paper of each citation, once where two papers cite each other."""
    edges: dict[frozenset[int], Pair] = {}
    with open_decompressed(path) as reader:
        for where, names in read_tsv(reader, path, 2):
            for name in names:
                if name not in places:
                    found = name.decode(errors="replace")
                    raise DataError(f"{where}: expected papers of {PAPERS}, got {found!r}; remove the line")
            citing, cited = (places[name] for name in names)
            if citing != cited:
                edges.setdefault(frozenset((citing, cited)), (citing, cited))
                _check_count(len(edges), where)
    return sorted(edges.values())


def _check_count(count: int, where: str) -> None:
    if count > _MAX_LINES:
        raise DataError(f"{where}: expected at most {_MAX_LINES:,} papers and citations, got more; remove some")


def _columns(origin: Path, split: str, members: NDArray[np.int64], edges: list[Pair], texts: list[bytes]) -> Columns:
    inside = set(members.tolist())
    related = [(citing, cited) for citing, cited in edges if citing in inside and cited in inside]
    if not related:
        raise DataError(f"{origin}: no citation between two papers of {split}; add papers or citations")
    free = len(members) * (len(members) - 1) // 2 - len(related)
    if free < len(related):
        raise DataError(
            f"{origin}: expected at least {len(related):,} pairs of papers without a citation in {split}, as many as "
            f"with one, got {free:,}; add papers"
        )
    pairs = related + _unrelated(split, members, related)
    order = CounterRNG(_NAME, split, "order").permutation(len(pairs))
    labels = np.repeat(np.array([1, 0], np.int64), len(related))
    # The citing paper is almost always the newer one; in a fixed position its age alone would reveal the label.
    swapped = CounterRNG(_NAME, split, "turned").integers(0, 2, len(pairs))
    return {
        "first": Ragged.from_bytes(texts[pairs[index][swapped[index]]] for index in order),
        "second": Ragged.from_bytes(texts[pairs[index][1 - swapped[index]]] for index in order),
        "labels": labels[order],
    }


def _unrelated(split: str, members: NDArray[np.int64], related: list[Pair]) -> list[Pair]:
    """Draw equally many pairs without a citation."""
    rng = CounterRNG(_NAME, split, "unrelated")
    taken = {frozenset(pair) for pair in related}
    pairs: list[Pair] = []
    while len(pairs) < len(related):
        for first, second in members[rng.integers(0, len(members), len(related), 2)].tolist():
            if first != second and frozenset((first, second)) not in taken and len(pairs) < len(related):
                taken.add(frozenset((first, second)))
                pairs.append((first, second))
    return pairs


ACL_CITATIONS = DatasetSpec(
    name=_NAME,
    title="ACL citations (a small stand-in for Retrieval, not LRA's)",
    description="decide whether one of two papers cites the other, at most 4000 bytes each; split by paper",
    source="a local folder",
    sizes={},
    disk_bytes=40_000_000,
    task=partial(PairTask, max_length=MAX_LENGTH),
    read=read,
    accepted_files=f"a folder with {PAPERS} and {EDGES}, plain or compressed",
)
