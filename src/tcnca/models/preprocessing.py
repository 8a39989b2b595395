"""What a model must know about its data to answer on raw inputs: normalization, class names, byte map, task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from tcnca.errors import ConfigError, InputError, VocabularyError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
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
    byte_map: tuple[int, ...] | None = None
    """Byte of each token, for models of bytes."""
    symbols: tuple[str, ...] | None = None
    """Symbol of each token, for models of words separated by spaces, such as ListOps."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "task" and value is not None:
                plain = value.tolist() if hasattr(value, "tolist") else value
                object.__setattr__(self, field.name, tuple(plain) if isinstance(plain, list | tuple) else (plain,))
        for what in ("input", "target"):
            mean, std = getattr(self, f"{what}_mean"), getattr(self, f"{what}_std")
            if (mean is None) != (std is None) or (mean is not None and len(mean) != len(std)):
                raise ConfigError(f"{what}_mean, {what}_std: expected both, of the same length, got {mean} and {std}")
            if mean is not None and not all(math.isfinite(value) for value in mean):
                raise ConfigError(f"{what}_mean: expected finite numbers, got {mean}")
            if std is not None and not all(math.isfinite(value) and value > 0 for value in std):
                raise ConfigError(f"{what}_std: expected finite numbers above 0, got {std}")
        if self.byte_map is not None:
            known = set(range(256))
            if len(set(self.byte_map)) < len(self.byte_map) or not known.issuperset(self.byte_map):
                raise ConfigError(f"byte_map: expected different numbers from 0 to 255, got {self.byte_map}")
            if self.symbols is not None:
                raise ConfigError("symbols: expected None together with byte_map, got both")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; fields that are None are left out."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in names:
                raise ConfigError(f"preprocessing.{name}: no such field, expected one of {', '.join(sorted(names))}")
        return cls(**values)

    def encode(self, text: str | bytes) -> Tensor:
        """Return the tokens `[time]` of a text; a `str` is encoded as UTF-8."""
        if self.symbols is not None:
            words = (text.decode() if isinstance(text, bytes) else text).split()
            return torch.tensor([_token(self.symbols, word) for word in words], dtype=torch.long)
        data = text.encode() if isinstance(text, str) else text
        tokens = {byte: token for token, byte in enumerate(self._bytes())}
        unknown = sorted(set(data) - tokens.keys())
        if unknown:
            raise VocabularyError(
                f"text: expected bytes that occur in the training data, got {bytes(unknown)!r}, which have no token"
            )
        return torch.tensor([tokens[byte] for byte in data], dtype=torch.long)

    def decode(self, tokens: Tensor) -> bytes:
        """Return the text of tokens `[time]` or `[1, time]`."""
        if tokens.numel() != tokens.shape[-1]:
            raise InputError(f"tokens: expected one sequence, [time] or [1, time], got shape {list(tokens.shape)}")
        known = len(self.symbols if self.symbols is not None else self._bytes())
        values = tokens.flatten().tolist()
        if not all(0 <= token < known for token in values):
            raise VocabularyError(f"tokens: expected 0 to {known - 1}, the tokens that stand for text, got {values}")
        if self.symbols is not None:
            return " ".join(self.symbols[token] for token in values).encode()
        return bytes(self._bytes()[token] for token in values)

    def _bytes(self) -> tuple[int, ...]:
        if self.byte_map is None:
            raise InputError("text: expected a model of text, got one that was saved without a byte map")
        return self.byte_map


def _token(symbols: tuple[str, ...], word: str) -> int:
    if word not in symbols:
        raise VocabularyError(f"text: expected words out of {' '.join(symbols)}, separated by spaces, got {word!r}")
    return symbols.index(word)


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
        for name, values in self._values.items():
            self.register_buffer(name, torch.empty(len(values), dtype=torch.float32))
        self.reset_parameters()

    @classmethod
    def of(cls, preprocessing: Preprocessing, what: str, features: int) -> Self | None:
        """Return the standardization of the `input` or the `target`; None if its statistics are not known."""
        mean, std = getattr(preprocessing, f"{what}_mean"), getattr(preprocessing, f"{what}_std")
        if mean is None:
            return None
        if len(mean) != features:
            raise ConfigError(
                f"preprocessing.{what}_mean: expected {features} numbers, as the model has features, got {len(mean)}"
            )
        return cls(mean, std)

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
