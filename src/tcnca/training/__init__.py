"""Training: recipes, the trainer, checkpoints, evaluation, reports and sweeps."""

from tcnca.training.checkpoint import CheckpointManager, TrainState
from tcnca.training.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from tcnca.training.distributed import DistContext, dist_context
from tcnca.training.evaluate import Score, evaluate, evaluate_run
from tcnca.training.logger import Logger, read_log
from tcnca.training.optimizer import build_optimizers, parameter_groups, scheduled_lr, set_lr
from tcnca.training.recipe import Recipe, load_recipe
from tcnca.training.report import Result
from tcnca.training.trainer import Trainer

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "CheckpointManager",
    "DataConfig",
    "DistContext",
    "EvalConfig",
    "Logger",
    "OptimizerConfig",
    "Recipe",
    "Result",
    "RuntimeConfig",
    "ScheduleConfig",
    "Score",
    "TrainState",
    "Trainer",
    "build_optimizers",
    "dist_context",
    "evaluate",
    "evaluate_run",
    "load_recipe",
    "parameter_groups",
    "read_log",
    "scheduled_lr",
    "set_lr",
]
