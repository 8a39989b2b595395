"""Data and tasks: EnWik8, Long-Range Arena, associative recall, and files of your own."""

from tcnca.data.batch import IGNORE, Batch
from tcnca.data.custom import CustomOptions
from tcnca.data.datasets import Entry, entries, entry
from tcnca.data.load import load_task
from tcnca.data.prepare import Prepared, data_folder, prepare
from tcnca.data.store import Dataset
from tcnca.data.summary import SplitSummary, summarize_data
from tcnca.data.tasks import Task

__all__ = [
    "IGNORE",
    "Batch",
    "CustomOptions",
    "Dataset",
    "Entry",
    "Prepared",
    "SplitSummary",
    "Task",
    "data_folder",
    "entries",
    "entry",
    "load_task",
    "prepare",
    "summarize_data",
]
