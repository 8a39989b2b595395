"""Dropout of single values, or of whole channels of a sequence."""

from __future__ import annotations

from torch import Tensor, nn

from tcnca.ops import dropout


class Dropout(nn.Module):
    """Dropout on `[batch, time, channels]`.

    With `feature`, a channel is kept or dropped for all times of a sequence together.
    """

    def __init__(self, probability: float, feature: bool = False) -> None:
        super().__init__()
        self.probability = probability
        self.feature = feature

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of `x` in training; in evaluation `x` itself."""
        if not self.training or self.probability == 0.0:
            return x
        if self.feature:
            return x * dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.probability)
        return dropout(x, self.probability)

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.probability}, feature={self.feature}"
