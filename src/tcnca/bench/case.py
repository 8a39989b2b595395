"""What is measured: a candidate at one size, with its float64 oracle and its minimal cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tcnca.bench.roofline import Cost
from tcnca.bench.timing import Phases

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, on which device and for how long. None selects the default of the suite."""

    device: torch.device
    """Device to measure on."""
    dtype: torch.dtype
    """Dtype of the tensors in `ops`, and of autocast in the other suites, where weights stay in float32."""
    lengths: tuple[int, ...] | None = None
    """Sequence lengths in tokens."""
    batches: tuple[int, ...] | None = None
    """Batch sizes."""
    channels: int = 64
    """Channels of the operators."""
    kernel_size: int = 17
    """Kernel size of the TCN."""
    depth: int = 4
    """Number of blocks of the TCN."""
    num_layers: int | None = None
    """Layers of the models."""
    compile: bool = False
    """Whether to measure compiled layers and models as well."""
    only: tuple[str, ...] = ()
    """Candidates to measure, by name or part of the name; empty for all."""
    seconds: float = 0.2
    """Time to spend on each candidate at each size, for eager mode and again for CUDA graphs."""
    repeat: int = 10
    """Minimum number of runs."""


class Workload(NamedTuple):
    """A candidate that is ready to run.

    run: computes the output, or the loss of a training step.
    leaves: tensors that need gradients; empty if there is no backward pass.
    optimizer_step: follows the backward pass of a training step; gradients are in the `grad` of the leaves.
    infer: the forward pass without autograd.
    """

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()
    optimizer_step: Callable[[], None] | None = None
    infer: Callable[[], Tensor] | None = None

    def phases(self) -> list[Phases]:
        """Return groups of phases to time. Within a group, each phase uses what the previous one computed."""
        output: list[Tensor] = []
        groups: list[Phases] = []
        if (infer := self.infer) is not None:
            groups.append({"inference": lambda: _discard(infer())})

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


def _discard(_: Tensor) -> None:
    """Free a result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A candidate at one size."""

    suite: str
    """Suite that it belongs to."""
    name: str
    """Name of the candidate."""
    label: str
    """Name in tables and plots."""
    description: str
    """What it computes."""
    sizes: Mapping[str, int | str]
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
