"""Linear maps as MEGA starts them."""

from __future__ import annotations

from torch import nn

WEIGHT_STD = 0.02


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear map with weights N(0, 0.02) and biases 0."""
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.normal_(layer.weight, std=WEIGHT_STD)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
