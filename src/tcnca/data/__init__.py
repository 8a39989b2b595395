"""Data sets and tasks: EnWik8, Long-Range Arena, associative recall, and your own files."""

from tcnca.data.batch import IGNORE, Batch
from tcnca.data.custom import CustomOptions
from tcnca.data.datasets import DatasetSpec, get_dataset, list_datasets, register_dataset
from tcnca.data.load import load_task
from tcnca.data.prepare import Prepared, data_folder, prepare_dataset
from tcnca.data.show import SplitSummary, summarize_data
from tcnca.data.store import Dataset
from tcnca.data.tasks import Task

__all__ = [
    "IGNORE",
    "Batch",
    "CustomOptions",
    "Dataset",
    "DatasetSpec",
    "Prepared",
    "SplitSummary",
    "Task",
    "data_folder",
    "get_dataset",
    "list_datasets",
    "load_task",
    "prepare_dataset",
    "register_dataset",
    "summarize_data",
]
