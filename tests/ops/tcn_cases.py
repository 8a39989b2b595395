"""Calls of the TCN with which its backends are compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tcnca.ops import TCNState, tcn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, int, int] = (2, 100, 16)
    kernel_size: int = 5
    factor: int = 3
    depth: int = 3
    convolutions: int = 1
    bias: bool = False
    activation: str = "silu"
    residual: bool = True
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    strided: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def valid(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor(self.lengths, device=self.device)

    def leaves(self) -> list[Tensor]:
        """Return x, the kernels and the biases, if there are any."""
        batch, time, channels = self.shape
        room = (batch, time + 3, channels + 16) if self.strided else self.shape
        x = torch.randn(room, device=self.device).to(self.dtype)
        x = x[:, 2 : time + 2, 8 : channels + 8] if self.strided else x
        many = (self.depth, self.convolutions, channels)
        weight = torch.randn(*many, self.kernel_size, device=self.device) / self.kernel_size**0.5
        parts = [x, weight, torch.randn(*many, device=self.device)] if self.bias else [x, weight]
        return [part.to(self.dtype).detach().requires_grad_() for part in parts]

    def call(self, leaves: list[Tensor], backend: str, **options: Any) -> tuple[Tensor, TCNState | None]:
        names = ("activation", "residual", "causal")
        options |= {name: getattr(self, name) for name in names} | {"lengths": self.valid(), "backend": backend}
        return tcn(leaves[0], leaves[1], self.factor, bias=leaves[2] if self.bias else None, **options)


def exact(leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves in float64."""
    return [leaf.detach().double().requires_grad_() for leaf in leaves]
