"""Pathfinder and Path-X of Long-Range Arena: are two dots joined by a dashed curve?"""

from tcnca.data.datasets.definition import Entry
from tcnca.data.generators.pathfinder import PATHFINDER as _SMALL
from tcnca.data.generators.pathfinder import PATHX as _LARGE
from tcnca.data.tasks import ClassificationTask

_SIZES = {"train": 160_000, "validation": 20_000, "test": 20_000}
_FACTS = {"class_names": ["apart", "joined"], "mean": 0.5, "deviation": 0.5}

PATHFINDER = Entry(
    name="pathfinder",
    title="Pathfinder (Long-Range Arena)",
    about="tell whether two dots are joined by a dashed curve, 32×32 pixels in a row",
    source="made here",
    sizes=_SIZES,
    disk=206_000_000,
    task=ClassificationTask,
    facts=_FACTS,
    generator=_SMALL,
)

PATHX = Entry(
    name="pathx",
    title="Path-X (Long-Range Arena)",
    about="the same, 128×128 pixels in a row",
    source="made here",
    sizes=_SIZES,
    disk=3_280_000_000,
    task=ClassificationTask,
    facts=_FACTS,
    generator=_LARGE,
    shard=250,
)
