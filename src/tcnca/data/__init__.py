"""Data and tasks: EnWik8, Long-Range Arena, associative recall, and files of your own."""

from tcnca.data.batch import IGNORE, Batch
from tcnca.data.kinds import Task
from tcnca.data.opening import task
from tcnca.data.own import OwnOptions
from tcnca.data.preparing import Prepared, data_folder, prepare
from tcnca.data.store import DataSet
from tcnca.data.summary import SplitSummary, summarize_data
from tcnca.data.tasks import Entry, entries, entry

__all__ = [
    "IGNORE",
    "Batch",
    "DataSet",
    "Entry",
    "OwnOptions",
    "Prepared",
    "SplitSummary",
    "Task",
    "data_folder",
    "entries",
    "entry",
    "prepare",
    "summarize_data",
    "task",
]
