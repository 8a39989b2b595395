"""Whether a contestant is right, before it is timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tcnca.bench.entry import Pair, Subject

# Greatest ‖actual - expected‖ / ‖expected‖ of an operator. PyTorch may multiply float32 in TF32 inside convolutions.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Layers and models round after every part, and gates and norms amplify it; what is wrong is wrong by about 1.
DEEP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def errors_of(pair: Pair, together: bool) -> dict[str, float]:
    """The relative errors of output and, where there are leaves, gradients; infinite where anything is not finite."""
    actual, expected = pair.subject.run(), pair.oracle.run()
    errors = {"output": relative_error([actual], [expected])}
    if pair.subject.leaves:
        cotangent = torch.randn_like(expected)
        got = _gradients(pair.subject, actual, cotangent)
        wanted = _gradients(pair.oracle, expected, cotangent)
        one_by_one = [relative_error([mine], [true]) for mine, true in zip(got, wanted, strict=True)]
        errors["gradients"] = relative_error(got, wanted) if together else max(one_by_one)
    return errors


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """`‖actual - expected‖ / ‖expected‖` of some tensors as one vector; infinite unless all is finite and of one shape.

    Returned in float64 whatever the tensors are, and computed where the expected ones are.
    """
    if any(mine.shape != true.shape for mine, true in zip(actual, expected, strict=True)):
        return float("inf")
    pairs = [(mine.detach().to(true), true.detach()) for mine, true in zip(actual, expected, strict=True)]
    difference = sum(float((mine.double() - true.double()).square().sum()) for mine, true in pairs)
    size = sum(float(true.double().square().sum()) for _, true in pairs)
    error = (difference / size) ** 0.5 if size else difference**0.5
    return error if error < float("inf") else float("inf")


def _gradients(subject: Subject, output: Tensor, cotangent: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(output, subject.leaves, cotangent.to(output), allow_unused=True)
    zipped = zip(found, subject.leaves, strict=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in zipped]
