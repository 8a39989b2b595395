"""Citations among a small collection of ACL papers, in the form of Retrieval. Not Long-Range Arena's set."""

from functools import partial

from tcnca.data.datasets.definition import Entry
from tcnca.data.sources import acl_citations
from tcnca.data.tasks import PairTask

ACL_CITATIONS = Entry(
    name="acl-citations",
    title="ACL citations (a small stand-in for Retrieval, not LRA's)",
    about="tell whether one of two papers cites the other, at most 4000 bytes each; split by paper",
    source="a folder of yours",
    sizes={},
    disk=40_000_000,
    task=partial(PairTask, max_length=4000),
    read=acl_citations.read,
    forms="a folder with acl_papers_fulltext.tsv and acl_citation_edges.tsv, plain or packed",
)
