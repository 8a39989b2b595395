"""The check of a candidate against its float64 oracle, before it is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tcnca.bench.case import Workload

# Largest ‖actual - expected‖ / ‖expected‖ of an operator. PyTorch may use TF32 in float32 convolutions.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Layers and models round after every operation, and gates and norms amplify it; a wrong result is off by about 1.
DEEP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def check_errors(candidate: Workload, oracle: Workload, *, joint_gradients: bool) -> dict[str, float]:
    """Return the relative errors of the output and, if there are leaves, of the gradients."""
    actual, expected = candidate.run(), oracle.run()
    errors = {"output": relative_error([actual], [expected])}
    if candidate.leaves:
        cotangent = torch.randn_like(expected)
        got, wanted = _gradients(candidate, actual, cotangent), _gradients(oracle, expected, cotangent)
        separate = (relative_error([mine], [exact]) for mine, exact in zip(got, wanted, strict=True))
        errors["gradients"] = relative_error(got, wanted) if joint_gradients else max(separate)
    return errors


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return `‖actual - expected‖ / ‖expected‖` of tensors taken as one vector, computed in float64.

    Infinite if shapes differ or values are not finite.
    """
    if any(mine.shape != exact.shape for mine, exact in zip(actual, expected, strict=True)):
        return float("inf")
    pairs = [(mine.detach().to(exact), exact.detach()) for mine, exact in zip(actual, expected, strict=True)]
    difference = sum(float((mine.double() - exact.double()).square().sum()) for mine, exact in pairs)
    size = sum(float(exact.double().square().sum()) for _, exact in pairs)
    error = (difference / size) ** 0.5 if size else difference**0.5
    return error if error < float("inf") else float("inf")


def _gradients(workload: Workload, output: Tensor, cotangent: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(output, workload.leaves, cotangent.to(output), allow_unused=True)
    pairs = zip(found, workload.leaves, strict=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in pairs]
