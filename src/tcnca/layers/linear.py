"""Linear maps as MEGA starts them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHT_STD = 0.02


class Linear(nn.Linear):
    """A linear map with weights N(0, 0.02) and biases 0 at the start."""

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=WEIGHT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def parts(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """The result in parts of these widths."""
        if not torch.is_grad_enabled():
            return self(x).split(widths, -1)
        # Gradients of parts that come from one product are joined before they go back through it, which takes longer
        # than several smaller products.
        biases: Sequence[Tensor | None] = [None] * len(widths) if self.bias is None else self.bias.split(widths)
        return [F.linear(x, weight, bias) for weight, bias in zip(self.weight.split(widths), biases, strict=True)]
