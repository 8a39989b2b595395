"""Linear maps as MEGA starts them."""

from __future__ import annotations

from torch import nn

WEIGHT_STD = 0.02


class Linear(nn.Linear):
    """A linear map with weights N(0, 0.02) and biases 0 at the start."""

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=WEIGHT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
