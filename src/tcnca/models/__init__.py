"""Models: stacks of layers with an input and a head, their configurations, presets and files."""

from tcnca.models.heads import (
    ClassifierHeadConfig,
    HeadConfig,
    LanguageModelHeadConfig,
    PairHeadConfig,
    RegressionHeadConfig,
)
from tcnca.models.inputs import InputConfig, TokenInputConfig, ValueInputConfig
from tcnca.models.mega import load_mega_checkpoint
from tcnca.models.model import ModelConfig, ModelOutput, ModelState, SequenceModel, Summary, summarize
from tcnca.models.packing import Lengths
from tcnca.models.prediction import Predictions, evaluating
from tcnca.models.preprocessing import Preprocessing
from tcnca.models.presets import Preset, build, preset, presets
from tcnca.models.serialization import load, save

__all__ = [
    "ClassifierHeadConfig",
    "HeadConfig",
    "InputConfig",
    "LanguageModelHeadConfig",
    "Lengths",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "PairHeadConfig",
    "Predictions",
    "Preprocessing",
    "Preset",
    "RegressionHeadConfig",
    "SequenceModel",
    "Summary",
    "TokenInputConfig",
    "ValueInputConfig",
    "build",
    "evaluating",
    "load",
    "load_mega_checkpoint",
    "preset",
    "presets",
    "save",
    "summarize",
]
