"""Training: recipes, runs, checkpoints, evaluation, reports and sweeps."""

from tcnca.training.checkpoints import Checkpoints, Progress
from tcnca.training.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    OptimiserConfig,
    ScheduleConfig,
)
from tcnca.training.evaluate import Score, evaluate
from tcnca.training.optimiser import build_optimiser, parameter_groups, set_rate
from tcnca.training.processes import Processes, processes
from tcnca.training.recipe import Recipe, load_recipe, recipes
from tcnca.training.run import Result, Run
from tcnca.training.schedule import learning_rate
from tcnca.training.watching import Watch

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Checkpoints",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "OptimiserConfig",
    "Processes",
    "Progress",
    "Recipe",
    "Result",
    "Run",
    "ScheduleConfig",
    "Score",
    "Watch",
    "build_optimiser",
    "evaluate",
    "learning_rate",
    "load_recipe",
    "parameter_groups",
    "processes",
    "recipes",
    "set_rate",
]
