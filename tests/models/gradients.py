"""Gradients of a model's parameters, by name, and how to compare them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.comparison import TOLERANCE, assert_close


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """The gradient of `loss` by every parameter of `module`, zero where it plays no part."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for name, parameter, gradient in zip(names, parameters, found, strict=True)
    }


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail unless each pair is equal as `assert_close` has it.

    A gradient that vanishes by symmetry, as that of a bias before a batch norm does, is the rounding error
    of others: beside all of them together it has to be zero, and has no direction of its own to compare.
    """
    assert actual.keys() == expected.keys()
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        vanishes = bool(gradient.norm() <= TOLERANCE[gradient.dtype] * whole)
        scale = whole if vanishes else 1.0
        wanted = torch.zeros_like(gradient) if vanishes else gradient
        assert_close(actual[name] / scale, wanted, f"gradient of {name}")
