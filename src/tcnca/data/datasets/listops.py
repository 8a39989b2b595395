"""ListOps of Long-Range Arena: the value of a nested expression of operators and digits."""

from tcnca.data.datasets.definition import Entry
from tcnca.data.generators.listops import SYMBOLS, ListOps
from tcnca.data.tasks import ClassificationTask

LISTOPS = Entry(
    name="listops",
    title="ListOps (Long-Range Arena)",
    about="find the value of a nested expression, 500 to 2000 tokens",
    source="made here",
    sizes={"train": 96_000, "validation": 2_000, "test": 2_000},
    disk=105_000_000,
    task=ClassificationTask,
    facts={"symbols": list(SYMBOLS), "class_names": [str(digit) for digit in range(10)]},
    generator=ListOps(),
)
