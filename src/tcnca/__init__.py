"""TCNCA and its relatives: models for very long sequences, O(L) in their length, that stream."""

from tcnca.errors import CheckpointError, ConfigError, InputError, StateError, TcncaError, VocabularyError
from tcnca.generation import generate, stream
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models import (
    ClassifierHead,
    LanguageModelHead,
    ModelConfig,
    ModelOutput,
    ModelState,
    Optimisation,
    PairHead,
    Preset,
    RegressionHead,
    SequenceModel,
    TokenInput,
    ValueInput,
    build,
    load,
    load_mega_checkpoint,
    preset,
    presets,
    save,
)
from tcnca.version import __version__

__all__ = [
    "AttentionConfig",
    "CheckpointError",
    "ClassifierHead",
    "ConfigError",
    "EMAConfig",
    "InputError",
    "LanguageModelHead",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "Optimisation",
    "PairHead",
    "Preset",
    "RegressionHead",
    "SequenceModel",
    "StateError",
    "TCNConfig",
    "TcncaError",
    "TokenInput",
    "ValueInput",
    "VocabularyError",
    "__version__",
    "build",
    "generate",
    "load",
    "load_mega_checkpoint",
    "preset",
    "presets",
    "save",
    "stream",
]
