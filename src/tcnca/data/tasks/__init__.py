"""Tasks: how a data set of each kind becomes batches, a loss and a metric."""

from tcnca.data.tasks.base import Metric, Task
from tcnca.data.tasks.examples import ClassificationTask, PairTask, RecallTask, RegressionTask
from tcnca.data.tasks.forecast import ForecastTask
from tcnca.data.tasks.language import LanguageTask

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
