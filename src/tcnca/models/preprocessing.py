"""What a model must know about its data to answer on raw inputs: normalization, class names, byte map, task."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from tcnca.config import Config, PositiveInt, Range
from tcnca.errors import ConfigError, InputError, VocabularyError, shown

Role = Literal["text", "second", "label", "values", "lengths", "labels", "targets"]
"""What a column of a table (`text`, `second`, `label`) or an array (the others) is used for."""
ADD_BYTE_MAP = (
    "if its tokens are bytes, load it in Python, set model.preprocessing = "
    "tcnca.Preprocessing(byte_map=tuple(range(256))), the byte of each token, and save it with tcnca.save"
)
"""Advice for a model without a byte map."""


class Preprocessing(Config):
    """Facts about the training data. They are saved with the model, and the model applies them.

    A task yields raw inputs and raw targets. The model computes `(x - input_mean) / input_std` on real-valued inputs,
    and a regression head returns `y * target_std + target_mean`: both are in the units of the data. A loss on
    standardized targets is therefore `((output - target) / target_std)²`.
    """

    task: str = ""
    """Kind of the task: `classification`, `pairs`, `regression`, `forecast`, `language` or `recall`."""
    input_mean: tuple[float, ...] | None = None
    """Mean of each input feature, in the units in which the task yields inputs."""
    input_std: tuple[float, ...] | None = None
    """Standard deviation of each input feature."""
    target_mean: tuple[float, ...] | None = None
    """Mean of each output of a regression or forecast."""
    target_std: tuple[float, ...] | None = None
    """Standard deviation of each output."""
    class_names: tuple[str, ...] | None = None
    """Name of each class."""
    byte_map: tuple[Annotated[int, Range(0, 255)], ...] | None = None
    """Byte of each token, for models of bytes."""
    symbols: tuple[str, ...] | None = None
    """Symbol of each token, for models of words separated by spaces, such as ListOps."""
    columns: dict[Role, str] = dataclasses.field(default_factory=dict)
    """Names of the columns or arrays of the training data, by their role."""
    value_columns: tuple[str, ...] | None = None
    """Columns of a table of numbers: the features of a series, or the time steps of sequences in rows."""
    target_columns: tuple[str, ...] | None = None
    """Columns with the values to predict from sequences in rows."""
    max_length: PositiveInt | None = None
    """Tokens or time steps to which sequences were cut."""
    image_size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width of images, whose pixels in rows are the sequence. The model takes bytes divided by 255."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("input", "target"):
            mean, std = getattr(self, f"{what}_mean"), getattr(self, f"{what}_std")
            if len(mean or ()) != len(std or ()):
                raise ConfigError(
                    f"{what}_mean, {what}_std: expected both, of the same length, got {shown(mean)} and {shown(std)}"
                )
            if min(std or (1,)) <= 0:
                raise ConfigError(f"{what}_std: expected numbers above 0, got {shown(std)}")
        if self.byte_map is not None and len(set(self.byte_map)) < len(self.byte_map):
            raise ConfigError(f"byte_map: expected different numbers, got {shown(self.byte_map)}")
        if self.byte_map is not None and self.symbols is not None:
            raise ConfigError("symbols: expected None together with byte_map, got both")

    def encode(self, text: str | bytes) -> Tensor:
        """Return the tokens `[time]` of a text; a `str` is encoded as UTF-8."""
        data, known = to_bytes(text, "text"), self._vocabulary()
        if self.symbols is None:
            return self.encode_bytes(data).long()
        words = {word: token for token, word in enumerate(known)}
        for word in (pieces := data.decode(errors="backslashreplace").split()):
            if word not in words:
                raise VocabularyError(f"text: expected words out of {' '.join(known)} between spaces, got {word!r}")
        return torch.tensor([words[word] for word in pieces], dtype=torch.long)

    def encode_bytes(self, data: bytes, offset: int = 0) -> Tensor:
        """Return the tokens `[time]` of bytes as int16; `offset` is their place in a longer text, for errors."""
        if self.byte_map is None:
            raise InputError(
                f"model: expected a model of bytes, got one that was saved without a byte map; {ADD_BYTE_MAP}"
            )
        table = np.full(256, -1, np.int16)
        table[list(self.byte_map)] = np.arange(len(self.byte_map))
        tokens = table[np.frombuffer(data, np.uint8)]
        places = np.flatnonzero(tokens < 0)
        if len(places):
            unknown = bytes(sorted({data[place] for place in places}))
            raise VocabularyError(
                f"text: expected the {len(self.byte_map)} bytes that occur in the training data, got {unknown!r}, the "
                f"first of them at offset {offset + int(places[0]):,}; remove them"
            )
        return torch.from_numpy(tokens)

    def decode(self, tokens: Tensor) -> bytes:
        """Return the text of tokens `[time]` or `[1, time]`."""
        if tokens.numel() != tokens.shape[-1]:
            raise InputError(f"tokens: expected one sequence, [time] or [1, time], got shape {list(tokens.shape)}")
        known, values = self._vocabulary(), tokens.flatten().tolist()
        if not all(0 <= token < len(known) for token in values):
            raise VocabularyError(f"tokens: expected 0 to {len(known) - 1}, the tokens of the text, got {values}")
        pieces = [known[token] for token in values]
        return bytes(pieces) if self.symbols is None else " ".join(pieces).encode()

    def _vocabulary(self) -> tuple[Any, ...]:
        """Return the byte or the word of each token."""
        known = self.byte_map if self.symbols is None else self.symbols
        if known is None:
            raise InputError(
                f"text: expected a model of text, got one that was saved without a byte map; {ADD_BYTE_MAP}"
            )
        return known


def to_bytes(text: Any, name: str) -> bytes:
    """Return a text as UTF-8, and bytes as they are; raise an InputError that names `name` for anything else."""
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    if not isinstance(text, str):
        raise InputError(f"{name}: expected a text, got {shown(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}: expected valid Unicode, got the unpaired surrogate {text[error.start]!a}; remove it"
        ) from error


class Standardization(nn.Module):
    """Map values of the data's units to mean 0 and standard deviation 1, and back.

    The statistics stay in float32 at least when the model is moved to half precision: raw values are often large
    compared with how they vary.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self._values = {"mean": mean, "std": std}
        for name in self._values:
            self.register_buffer(name, torch.empty(len(mean), dtype=torch.float32))
        self.reset_parameters()

    @classmethod
    def of(cls, preprocessing: Preprocessing, what: str, features: int) -> Self | None:
        """Return the standardization of the `input` or the `target`; None if its statistics are not known."""
        mean, std = getattr(preprocessing, f"{what}_mean"), getattr(preprocessing, f"{what}_std")
        if mean is not None and len(mean) != features:
            raise ConfigError(f"preprocessing.{what}_mean: expected one of each feature, {features}, got {len(mean)}")
        return None if mean is None else cls(mean, std)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set mean and standard deviation to those that the module was built with."""
        for name, values in self._values.items():
            buffer = getattr(self, name)
            if not buffer.is_meta:
                buffer.copy_(torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Standardize `x` (`[…, features]`), in float32 at least."""
        return (x.to(torch.promote_types(x.dtype, self.mean.dtype)) - self.mean) / self.std

    def inverse(self, y: Tensor) -> Tensor:
        """Bring standardized values `[…, features]` back to the units of the data, in float32 at least."""
        return y.to(torch.promote_types(y.dtype, self.mean.dtype)) * self.std + self.mean

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = torch.promote_types(moved.dtype, torch.float32) != moved.dtype
            return tensor.to(moved.device) if narrow else moved

        return super()._apply(wide, recurse)
