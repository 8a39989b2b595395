"""What every mixer promises, stated once: its gradients, and its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.layers import Mixer
from tests.comparison import assert_close


def assert_gradients(module: Mixer) -> None:
    """Compare the gradients by inputs and parameters, with padding, to finite differences; `module` is in float64."""
    lengths = torch.tensor([5, 3])
    x = torch.randn(2, 5, module.d_model, dtype=torch.float64, requires_grad=True)
    parameters = dict(module.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        y = torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), x, {"lengths": lengths})
        return torch.where((torch.arange(5) < lengths.unsqueeze(1)).unsqueeze(-1), y, 0.0)

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


def assert_compiles(module: Mixer, **options: Any) -> None:
    """Compare a compiled module, its graph in one piece, to the module: outputs and gradients."""
    torch.compiler.reset()
    x, results = torch.randn(2, 10, module.d_model, dtype=torch.float64), []
    for run in (torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False), module):
        y = run(x, lengths=torch.tensor([10, 4]), **options)
        y = y[0] if isinstance(y, tuple) else y
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), list(module.parameters()))))
    torch.compiler.reset()
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
