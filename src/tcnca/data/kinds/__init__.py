"""The kinds of tasks: how a set of each kind becomes batches, a loss and a metric."""

from tcnca.data.kinds.examples import ClassificationTask, PairTask, RegressionTask
from tcnca.data.kinds.forecast import ForecastTask
from tcnca.data.kinds.language import LanguageTask
from tcnca.data.kinds.recall import RecallTask
from tcnca.data.kinds.task import Metric, Task

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
