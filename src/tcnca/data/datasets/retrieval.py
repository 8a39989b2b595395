"""Retrieval of Long-Range Arena: does one paper of the ACL Anthology cite the other?"""

from functools import partial

from tcnca.data.datasets.definition import Entry
from tcnca.data.sources import aan
from tcnca.data.tasks import PairTask

RETRIEVAL = Entry(
    name="retrieval",
    title="Retrieval (Long-Range Arena)",
    about="tell whether two papers (ACL Anthology) are related, at most 4000 bytes each",
    source="a public copy of LRA's files",
    sizes={"train": 147_086, "validation": 18_090, "test": 17_437},
    disk=1_500_000_000,
    task=partial(PairTask, max_length=4000),
    read=aan.read,
    forms="Long-Range Arena's release, or a folder with new_aan_pairs.train.tsv, .eval.tsv and .test.tsv",
    downloads=aan.DOWNLOADS,
)
