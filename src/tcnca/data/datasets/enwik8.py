"""EnWik8: the first 100 million bytes of an English Wikipedia of 2006, to be predicted byte by byte."""

from tcnca.data.datasets.definition import Entry
from tcnca.data.sources import enwik8
from tcnca.data.tasks import LanguageTask

ENWIK8 = Entry(
    name="enwik8",
    title="EnWik8",
    about="predict the next byte of Wikipedia",
    source="mattmahoney.net, 36 MB",
    sizes={"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000},
    disk=100_000_000,
    task=LanguageTask,
    read=enwik8.read,
    forms="the file enwik8, plain or packed (.gz, .xz, .zip), or a folder that has it",
    downloads=enwik8.DOWNLOADS,
)
