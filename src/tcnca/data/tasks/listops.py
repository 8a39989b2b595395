"""ListOps of Long-Range Arena: the value of a nested expression of operators and digits."""

from tcnca.data.generators.listops import SYMBOLS, ListOps
from tcnca.data.kinds import ClassificationTask
from tcnca.data.tasks.definition import Entry

LISTOPS = Entry(
    name="listops",
    title="ListOps (Long-Range Arena)",
    about="find the value of a nested expression, 500 to 2000 tokens",
    source="made here",
    sizes={"train": 96_000, "validation": 2_000, "test": 2_000},
    disk=105_000_000,
    task=ClassificationTask,
    facts={"symbols": list(SYMBOLS), "classes": [str(digit) for digit in range(10)]},
    generator=ListOps(),
)
