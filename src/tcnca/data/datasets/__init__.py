"""The registry of data sets. A new data set is a file in this folder and a line in `_SPECS`.

Data sets defined elsewhere are added with `register_dataset`.
"""

from __future__ import annotations

import re

from tcnca.config import check_choice
from tcnca.data.datasets.acl_citations import ACL_CITATIONS
from tcnca.data.datasets.enwik8 import ENWIK8
from tcnca.data.datasets.image import IMAGE
from tcnca.data.datasets.listops import LISTOPS
from tcnca.data.datasets.pathfinder import PATHFINDER, PATHX
from tcnca.data.datasets.recall import RECALL_DATASETS, recall_dataset
from tcnca.data.datasets.retrieval import RETRIEVAL
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.datasets.text import TEXT
from tcnca.errors import ConfigError

__all__ = [
    "DatasetSpec",
    "Download",
    "canonical_name",
    "get_dataset",
    "is_dataset",
    "list_datasets",
    "register_dataset",
]

_SPECS = (
    ENWIK8,
    LISTOPS,
    TEXT,
    RETRIEVAL,
    IMAGE,
    PATHFINDER,
    PATHX,
    *RECALL_DATASETS,
    ACL_CITATIONS,
)
_BY_NAME = {spec.name: spec for spec in _SPECS}
# At most seven digits, so that any name of a folder is parsed at once.
_RECALL = re.compile(r"recall(?:-([0-9]{1,7}))?(?:-([0-9]{1,7}))?")


def list_datasets() -> tuple[DatasetSpec, ...]:
    """Return all data sets in the order of the paper."""
    return tuple(_BY_NAME.values())


def register_dataset(spec: DatasetSpec) -> None:
    """Add a data set to the registry."""
    if is_dataset(spec.name):
        raise ConfigError(f"name: expected one that is not registered, got {spec.name!r}")
    _BY_NAME[spec.name] = spec


def is_dataset(name: str) -> bool:
    """Return whether the registry has a data set of this name."""
    return name in _BY_NAME or _RECALL.fullmatch(name) is not None


def get_dataset(name: str) -> DatasetSpec:
    """Return the data set `name`; `recall-LENGTH-VOCAB_SIZE` for any length and vocabulary, `recall` for 64 and 10."""
    if name not in _BY_NAME and (match := _RECALL.fullmatch(name)):
        return recall_dataset(*(int(number) for number in match.groups() if number is not None))
    check_choice("dataset", name, _BY_NAME)
    return _BY_NAME[name]


def canonical_name(name: str) -> str:
    """Return the name under which a data set is stored: `recall` is `recall-64-10`."""
    return get_dataset(name).name if is_dataset(name) else name
