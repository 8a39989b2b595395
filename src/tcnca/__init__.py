"""TCNCA and related models for very long sequences: linear in the length, with streaming states."""

import importlib
from typing import TYPE_CHECKING

from tcnca.version import __version__

# Imported on first use, by `__getattr__` below, so that the command line starts without PyTorch.
if TYPE_CHECKING:
    from tcnca import data
    from tcnca.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        ExportError,
        InputError,
        StateError,
        TcncaError,
        VocabularyError,
    )
    from tcnca.export import export_onnx
    from tcnca.generation import (
        Batcher,
        PrefixCache,
        generate,
        stream,
        stream_text,
        stream_texts,
    )
    from tcnca.inference import Stream, load, score
    from tcnca.layers import (
        CDIL,
        EMA,
        LRU,
        S4D,
        S5,
        TCN,
        AttentionConfig,
        CDILConfig,
        ChunkedAttention,
        EMAConfig,
        LRUConfig,
        S4DConfig,
        S5Config,
        SGConv,
        SGConvConfig,
        TCNConfig,
    )
    from tcnca.models import (
        ClassifierHeadConfig,
        LanguageModelHeadConfig,
        ModelConfig,
        ModelOutput,
        ModelState,
        PairHeadConfig,
        Predictions,
        Preprocessing,
        Preset,
        RegressionHeadConfig,
        SequenceModel,
        TokenInputConfig,
        ValueInputConfig,
        build,
        load_mega_checkpoint,
        preset,
        presets,
        save,
    )
    from tcnca.ops import ContextParallel

__all__ = [
    "CDIL",
    "EMA",
    "LRU",
    "S4D",
    "S5",
    "TCN",
    "AttentionConfig",
    "Batcher",
    "CDILConfig",
    "CheckpointError",
    "ChunkedAttention",
    "ClassifierHeadConfig",
    "ConfigError",
    "ContextParallel",
    "DataError",
    "EMAConfig",
    "ExportError",
    "InputError",
    "LRUConfig",
    "LanguageModelHeadConfig",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "PairHeadConfig",
    "Predictions",
    "PrefixCache",
    "Preprocessing",
    "Preset",
    "RegressionHeadConfig",
    "S4DConfig",
    "S5Config",
    "SGConv",
    "SGConvConfig",
    "SequenceModel",
    "StateError",
    "Stream",
    "TCNConfig",
    "TcncaError",
    "TokenInputConfig",
    "ValueInputConfig",
    "VocabularyError",
    "__version__",
    "build",
    "data",
    "export_onnx",
    "generate",
    "load",
    "load_mega_checkpoint",
    "preset",
    "presets",
    "save",
    "score",
    "stream",
    "stream_text",
    "stream_texts",
]

# Modules that public names come from, in the order in which they are searched.
_SOURCES = ("errors", "layers", "models", "generation", "inference", "export", "ops")
_MODULES = ("bench", "data", "export", "generation", "inference", "layers", "models", "ops", "recipes", "training")

# Hidden from type checkers, which would otherwise accept any attribute.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name in _MODULES:
            return importlib.import_module(f"tcnca.{name}")
        if name in __all__:
            # That of `models` reads the weights alone, not the recipe of a run.
            for source in ("inference",) if name == "load" else _SOURCES:
                module = importlib.import_module(f"tcnca.{source}")
                if hasattr(module, name):
                    # The next use finds it without this function.
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module 'tcnca' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__, *_MODULES})
