"""Models: stacks of layers with an input and a head, their configurations, presets and checkpoints."""

from tcnca.models.checkpoint import load, save
from tcnca.models.config import ModelConfig
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig, PairHeadConfig, RegressionHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.layout import Lengths
from tcnca.models.mega_checkpoint import load_mega_checkpoint
from tcnca.models.model import ModelOutput, ModelState, SequenceModel
from tcnca.models.presets import Preset, build, preset, presets
from tcnca.models.summary import Summary, summarize

__all__ = [
    "ClassifierHeadConfig",
    "LanguageModelHeadConfig",
    "Lengths",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "PairHeadConfig",
    "Preset",
    "RegressionHeadConfig",
    "SequenceModel",
    "Summary",
    "TokenInputConfig",
    "ValueInputConfig",
    "build",
    "load",
    "load_mega_checkpoint",
    "preset",
    "presets",
    "save",
    "summarize",
]
