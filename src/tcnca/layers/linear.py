"""Linear maps, dropout and the output of state-space layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.ops import dropout

WEIGHT_STD = 0.02


def init_normal(parameter: Tensor, std: float) -> None:
    """Initialize N(0, std²); nothing on the `meta` device, where PyTorch would import its compiler, for seconds."""
    if not parameter.is_meta:
        nn.init.normal_(parameter, std=std)


class Linear(nn.Linear):
    """A linear map with weights initialized N(0, 0.02) and biases 0, as in MEGA.

    Args:
        in_features: width of the input.
        out_features: width of the output, or of the parts of several stacked maps.
    """

    def __init__(self, in_features: int, out_features: int | Sequence[int]) -> None:
        self.parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        super().__init__(in_features, sum(self.parts))

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        init_normal(self.weight, WEIGHT_STD)
        nn.init.zeros_(self.bias)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return the results of the stacked maps."""
        widths = list(self.parts)
        if not torch.is_grad_enabled():
            return self(x).split(widths, -1)
        # The backward of one product would first concatenate the gradients of its parts, which takes longer than
        # several smaller products.
        weights, biases = self.weight.split(widths), self.bias.split(widths)
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


class Dropout(nn.Module):
    """Dropout on `[batch, time, channels]`: of single values, or with `feature` of whole channels of a sequence."""

    def __init__(self, probability: float, feature: bool = False) -> None:
        super().__init__()
        self.probability = probability
        self.feature = feature

    def forward(self, x: Tensor) -> Tensor:
        """Drop values of `x` in training mode; return `x` itself in evaluation mode."""
        if not self.training or self.probability == 0.0:
            return x
        if self.feature:
            return x * dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.probability)
        return dropout(x, self.probability)

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"{self.probability}, feature={self.feature}"


class GLUOutput(nn.Module):
    """`GLU(W dropout(gelu(x)) + b)`: what follows the convolution of a layer in the code of S4, mixing the channels.

    With `self_gated`, `x ⊙ σ(W dropout(gelu(x)) + b)`, as in S5.
    """

    def __init__(self, d_model: int, dropout: float, self_gated: bool = False) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.linear = Linear(d_model, d_model if self_gated else (d_model, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, time, d_model]` to the same shape."""
        *values, gates = self.linear.split(self.dropout(F.gelu(x)))
        return (values[0] if values else x) * torch.sigmoid(gates)
