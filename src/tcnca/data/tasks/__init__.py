"""The kinds of tasks: how a set of each kind becomes batches, a loss and a metric."""

from tcnca.data.tasks.examples import ClassificationTask, PairTask, RegressionTask
from tcnca.data.tasks.forecast import ForecastTask
from tcnca.data.tasks.language import LanguageTask
from tcnca.data.tasks.recall import RecallTask
from tcnca.data.tasks.task import Metric, Task

__all__ = [
    "ClassificationTask",
    "ForecastTask",
    "LanguageTask",
    "Metric",
    "PairTask",
    "RecallTask",
    "RegressionTask",
    "Task",
]
