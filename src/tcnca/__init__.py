"""TCNCA and its relatives: models for very long sequences, O(L) in their length, that stream."""

from tcnca import data
from tcnca.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    StateError,
    TcncaError,
    VocabularyError,
)
from tcnca.generation import generate, stream
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    ModelOutput,
    ModelState,
    PairHeadConfig,
    Preset,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
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
    "ClassifierHeadConfig",
    "ConfigError",
    "DataError",
    "EMAConfig",
    "InputError",
    "LanguageModelHeadConfig",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "PairHeadConfig",
    "Preset",
    "RegressionHeadConfig",
    "SequenceModel",
    "StateError",
    "TCNConfig",
    "TcncaError",
    "TokenInputConfig",
    "ValueInputConfig",
    "VocabularyError",
    "__version__",
    "build",
    "data",
    "generate",
    "load",
    "load_mega_checkpoint",
    "preset",
    "presets",
    "save",
    "stream",
]
