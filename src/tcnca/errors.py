"""The errors that the library raises. Each message names the field, what is expected and what it got."""


class TcncaError(ValueError):
    """Base of every error raised on purpose by this library."""


class ConfigError(TcncaError):
    """A configuration that cannot be built."""


class InputError(TcncaError):
    """A tensor of the wrong shape, type or value."""


class VocabularyError(InputError, IndexError):
    """A token outside the vocabulary."""


class StateError(TcncaError):
    """A streaming state that does not belong to this model, batch or call."""


class CheckpointError(TcncaError):
    """A checkpoint that cannot be read, or holds what this library cannot honor."""


class DataError(TcncaError):
    """Data that is missing, damaged or not of the form it should have. Names the file and what to do."""


class TrainingError(TcncaError):
    """A run that cannot go on. Says at which step, and what can be done."""


class KernelError(TcncaError):
    """A kernel that cannot be compiled, loaded or started. Says what can be done."""
