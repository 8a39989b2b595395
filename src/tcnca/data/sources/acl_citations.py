"""Pairs of papers of the ACL Anthology, one citing the other or not: small, in the form of Retrieval, not its data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Columns, Ragged
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import Content
from tcnca.data.sources.aan import CLASSES, LONGEST
from tcnca.data.sources.archives import check_exists, find_file, open_plain
from tcnca.data.sources.published import Download
from tcnca.data.sources.tables import rows
from tcnca.errors import DataError

DOWNLOADS: tuple[Download, ...] = ()
PAPERS, EDGES = "acl_papers_fulltext.tsv", "acl_citation_edges.tsv"

_NAME = "acl-citations"

Pair = tuple[int, int]


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read a folder with `acl_papers_fulltext.tsv` and `acl_citation_edges.tsv`, plain or compressed.

    Papers, not pairs, are split: 60 % train, 20 % validation, 20 % test. Related are two papers of a split of which one
    cites the other; as many pairs of a split without a citation are drawn as unrelated. No pair comes twice, turned
    round or not. Texts are taken as they stand, backslashes too, and cut after 4,000 bytes. No such set was ever
    published, so it is never `verified`.
    """
    check_exists(origin)
    papers = _read_papers(_find(origin, PAPERS))
    # By name, so that the split does not depend on the order of the file.
    texts = [papers[name] for name in sorted(papers)]
    places = {name: place for place, name in enumerate(sorted(papers))}
    edges = _read_edges(_find(origin, EDGES), places)
    order = CounterRNG(_NAME, "split").permutation(len(texts))
    cuts = [len(texts) * 60 // 100, len(texts) * 80 // 100]
    parts = dict(zip(("train", "validation", "test"), np.split(order, cuts), strict=True))
    return Content(
        kind="pairs",
        splits={split: [_columns(origin, split, members, edges, texts)] for split, members in parts.items()},
        origin=origin.resolve().name,
        verified=False,
        facts={"class_names": list(CLASSES)},
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
    with open_plain(path) as reader:
        for where, (name, text) in rows(reader, path, 2):
            if name in papers:
                raise DataError(f"{where}: {name.decode(errors='replace')!r} is there already; remove one of them")
            papers[name] = text[:LONGEST]
    return papers


def _read_edges(path: Path, places: dict[bytes, int]) -> list[Pair]:
    """Citing and cited paper of each citation, once where two papers cite each other."""
    edges: dict[frozenset[int], Pair] = {}
    with open_plain(path) as reader:
        for where, names in rows(reader, path, 2):
            for name in names:
                if name not in places:
                    found = name.decode(errors="replace")
                    raise DataError(
                        f"{where}: names the paper {found!r}, which {PAPERS} does not have; remove the line"
                    )
            citing, cited = (places[name] for name in names)
            if citing != cited:
                edges.setdefault(frozenset((citing, cited)), (citing, cited))
    # By name again.
    return sorted(edges.values())


def _columns(origin: Path, split: str, members: NDArray[np.int64], edges: list[Pair], texts: list[bytes]) -> Columns:
    inside = set(members.tolist())
    related = [(citing, cited) for citing, cited in edges if citing in inside and cited in inside]
    if not related:
        raise DataError(f"{origin}: has no citation between two papers of {split}; more papers or citations are needed")
    free = len(members) * (len(members) - 1) // 2 - len(related)
    if free < len(related):
        raise DataError(
            f"{origin}: has {len(related):,} citations between papers of {split}, and {free:,} pairs without one, "
            "which must be as many; more papers are needed"
        )
    pairs = related + _unrelated(split, members, related)
    order = CounterRNG(_NAME, split, "order").permutation(len(pairs))
    labels = np.repeat(np.array([1, 0], np.int64), len(related))
    # Who cites is nearly always the younger paper: were it always the first, its age alone would tell.
    turned = CounterRNG(_NAME, split, "turned").integers(0, 2, len(pairs))
    return {
        "first": Ragged.of_bytes(texts[pairs[place][turned[place]]] for place in order),
        "second": Ragged.of_bytes(texts[pairs[place][1 - turned[place]]] for place in order),
        "labels": labels[order],
    }


def _unrelated(split: str, members: NDArray[np.int64], related: list[Pair]) -> list[Pair]:
    """As many pairs without a citation."""
    draw = CounterRNG(_NAME, split, "unrelated")
    taken = {frozenset(pair) for pair in related}
    pairs: list[Pair] = []
    while len(pairs) < len(related):
        for first, second in members[draw.integers(0, len(members), len(related), 2)].tolist():
            if first != second and frozenset((first, second)) not in taken and len(pairs) < len(related):
                taken.add(frozenset((first, second)))
                pairs.append((first, second))
    return pairs
