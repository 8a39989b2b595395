"""Training: recipes, runs, checkpoints, evaluation, reports and sweeps."""

from tcnca.training.checkpoints import Checkpoints, Progress
from tcnca.training.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from tcnca.training.evaluate import Score, evaluate
from tcnca.training.optimizer import build_optimizer, parameter_groups, set_rate
from tcnca.training.processes import Processes, processes
from tcnca.training.recipe import Recipe, load_recipe
from tcnca.training.run import Result, Run
from tcnca.training.schedule import scheduled_lr
from tcnca.training.watching import Watch

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Checkpoints",
    "DataConfig",
    "EvalConfig",
    "OptimizerConfig",
    "Processes",
    "Progress",
    "Recipe",
    "Result",
    "Run",
    "RuntimeConfig",
    "ScheduleConfig",
    "Score",
    "Watch",
    "build_optimizer",
    "evaluate",
    "load_recipe",
    "parameter_groups",
    "processes",
    "scheduled_lr",
    "set_rate",
]
