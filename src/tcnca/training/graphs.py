"""CUDA graphs of training: the kernels of a forward and a backward pass are launched as one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from tcnca.data import Batch
from tcnca.ops.driver import capture_graph
from tcnca.training.config import RuntimeConfig
from tcnca.training.distributed import DistContext

_EAGER_CALLS = 2
"""Calls with a shape before it is captured: they compile and load its code, and show that it comes up again."""
_MAX_GRAPHS = 32
"""Shapes that are captured; others run eagerly."""


class _CapturedStep(NamedTuple):
    """A graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    weight: Tensor
    """That of the batch, which varies between batches of one shape."""
    loss: Tensor


def should_capture(runtime: RuntimeConfig, context: DistContext) -> bool:
    """Return whether training replays CUDA graphs: on a GPU, without other processes."""
    return runtime.cuda_graphs and context.device.type == "cuda" and context.world_size == 1


class TrainingGraphs:
    """Replays a function of a batch, which adds to the gradients and returns the loss, as a CUDA graph.

    There is one graph for each shape of a batch that comes up repeatedly. Graphs draw their random numbers from the
    default generator, as eager calls do, and add to the memory that gradients have when they are captured: between
    steps, set gradients to zero and not to None.

    Args:
        step: the function. It must not read values from the device, nor return a tensor with a gradient.
        device: the device to copy batches to.
        warn: is called with a text if a graph cannot be captured; from then on everything runs eagerly.
    """

    def __init__(self, step: Callable[[Batch], Tensor], device: torch.device, warn: Callable[[str], None]) -> None:
        self._step, self._device, self._warn = step, device, warn
        # Graphs run one after the other, so that each can use the memory of the others.
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, _CapturedStep] = {}
        self._calls: Counter[Hashable] = Counter()
        self._max_graphs = _MAX_GRAPHS

    def __call__(self, batch: Batch) -> Tensor:
        """Run the step on a batch in host memory, and return the loss, which the next call overwrites."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Eager calls, too: PyTorch cannot capture the gradients of leaves that were last used on another stream.
        with torch.cuda.stream(self._stream):
            loss = self._run(batch)
        current.wait_stream(self._stream)
        return loss

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def _run(self, batch: Batch) -> Tensor:
        key = batch.signature()
        captured = self._graphs.get(key)
        if captured is None and self._calls[key] >= _EAGER_CALLS and len(self._graphs) < self._max_graphs:
            captured = self._capture(key, batch)
        if captured is None:
            self._calls[key] += 1
            return self._step(batch.to(self._device, non_blocking=True))
        captured.batch.copy_(batch)
        captured.weight.fill_(batch.weight)
        captured.graph.replay()
        return captured.loss

    def _capture(self, key: Hashable, batch: Batch) -> _CapturedStep | None:
        weight = torch.full((), float(batch.weight), device=self._device)
        held = dataclasses.replace(batch.to(self._device), weight=weight)
        try:
            # Another thread loads batches meanwhile, and may allocate memory.
            with capture_graph(self._stream, self._pool, error_mode="thread_local") as graph:
                loss = self._step(held)
        except Exception as error:
            # Graphs that were captured before no longer follow `torch.manual_seed`.
            self._graphs.clear()
            self._max_graphs = 0
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._warn(f"warning: training continues as with cuda_graphs=false, as no graph can be captured: {reason}")
            return None
        return self._graphs.setdefault(key, _CapturedStep(graph, held, weight, loss))
