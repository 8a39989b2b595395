"""Training: recipes, optimisers and schedules."""

from tcnca.training.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    OptimiserConfig,
    ScheduleConfig,
)
from tcnca.training.optimiser import build_optimiser, parameter_groups, set_rate
from tcnca.training.recipe import Recipe, load_recipe, recipes
from tcnca.training.schedule import learning_rate

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "OptimiserConfig",
    "Recipe",
    "ScheduleConfig",
    "build_optimiser",
    "learning_rate",
    "load_recipe",
    "parameter_groups",
    "recipes",
    "set_rate",
]
