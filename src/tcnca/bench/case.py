"""What is measured: a candidate at one size, its minimal cost, and the check against its float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tcnca.bench.timing import Cost, Phases

Sizes = Mapping[str, int | str]

# Largest ‖actual - expected‖ / ‖expected‖ of an operator. PyTorch may use TF32 in float32 convolutions.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# Layers and models round after every operation, and gates and norms amplify it; a wrong result is off by about 1.
DEEP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, on which device and for how long. None selects the default of the suite."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of the tensors in `ops`, and of autocast in the other suites, where weights stay in float32."""
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    channels: int = 64
    kernel_size: int = 17
    depth: int = 4
    num_layers: int | None = None
    compile: bool = False
    """Whether to measure compiled layers and models as well."""
    only: tuple[str, ...] = ()
    """Candidates to measure, by name or part of the name; empty for all."""
    seconds: float = 0.2
    """Time to spend on each candidate at each size, for eager mode and again for CUDA graphs."""
    repeat: int = 10
    """Minimum number of runs."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


class Workload(NamedTuple):
    """A candidate that is ready to run.

    run: computes the output, or the loss of a training step.
    leaves: tensors that need gradients; empty if there is no backward pass.
    optimizer_step: follows the backward pass of a training step; gradients are in the `grad` of the leaves.
    infer: the forward pass without autograd.
    graphed_step: a whole training step as `runtime.cuda_graphs` launches it.
    """

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()
    optimizer_step: Callable[[], None] | None = None
    infer: Callable[[], Tensor] | None = None
    graphed_step: Callable[[], None] | None = None

    def phases(self) -> list[Phases]:
        """Return groups of phases to time. Within a group, each phase uses what the previous one computed."""
        output: list[Tensor] = []
        groups: list[Phases] = [] if self.infer is None else [{"inference": self.infer}]

        def forward() -> None:
            output[:] = [self.run()]

        def gradients() -> None:
            torch.autograd.grad(output.pop(), self.leaves, cotangent, allow_unused=True)

        if self.optimizer_step is not None:
            step = {"backward": lambda: output.pop().backward(), "optimizer": self.optimizer_step}
            groups.append({"forward": forward, **step})
        elif self.leaves:
            # Random instead of the gradient of a sum, an expanded scalar that some operators read faster.
            cotangent = torch.randn_like(self.run()).detach()
            groups.append({"forward": forward, "backward": gradients})
        else:
            groups.append({"forward": forward})
        return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A candidate at one size."""

    name: str
    label: str
    """Name in tables and plots."""
    sizes: Sizes
    """The size. Cases of equal sizes are compared."""
    tokens: int
    """Tokens in one run."""
    build: Callable[[], Workload]
    """Builds the workload to time."""
    build_check: Callable[[], tuple[Workload, Workload]]
    """Builds the candidate and its oracle at a size at which float64 is cheap, with leaves in the same order."""
    cost: Mapping[str, Cost]
    """Minimal cost of each phase."""
    tolerance: float
    """Largest relative error of output and gradients that counts as correct."""
    joint_gradients: bool = False
    """Whether to compare all gradients as one vector, as for models, instead of one by one."""
    isolated: bool = True
    """Whether to time each phase separately from cold caches, or as consecutive training steps."""
    graph: bool = True
    """Whether to time it as a CUDA graph as well; not what launches graphs itself."""

    def check_errors(self) -> dict[str, float]:
        """Return the relative errors of the output and, if there are leaves, of the gradients."""
        candidate, oracle = self.build_check()
        actual, expected = candidate.run(), oracle.run()
        errors = {"output": relative_error([actual], [expected])}
        if candidate.leaves:
            cotangent = torch.randn_like(expected)
            got, wanted = _gradients(candidate, actual, cotangent), _gradients(oracle, expected, cotangent)
            separate = (relative_error([mine], [exact]) for mine, exact in zip(got, wanted, strict=True))
            errors["gradients"] = relative_error(got, wanted) if self.joint_gradients else max(separate)
        return errors


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    max_grad_norm: float,
    on_gpu: bool,
    set_to_none: bool = True,
) -> None:
    """Clip the gradient and take a step, also while a CUDA graph is captured."""
    nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    for group in optimizer.param_groups:
        # PyTorch requires it during capture and warns about it otherwise.
        group["capturable"] = on_gpu and torch.cuda.is_current_stream_capturing()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


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
