"""A model made ready for a run: recomputed, compiled, shared among processes. The model itself knows nothing of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tcnca.models import SequenceModel
from tcnca.training.config import RuntimeConfig
from tcnca.training.processes import Processes

_SHAPES = 64
"""For so many shapes a layer is compiled, and left as it is for others."""
_CHEAP = 0.9
"""The share of what PyTorch would keep for the backward pass that it may: only what is cheap is not kept then."""


def compiles(runtime: RuntimeConfig, device: torch.device) -> bool:
    """Whether layers are compiled on a device."""
    return runtime.compile is True or (runtime.compile == "gpu" and device.type == "cuda")


def parallelize(model: SequenceModel, runtime: RuntimeConfig, group: Processes) -> nn.Module:
    """What to call in training in place of `model`, whose parameters it trains."""
    if runtime.activation_checkpointing is True:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if compiles(runtime, group.device):
        torch._dynamo.config.recompile_limit = _SHAPES
        # Of the process, so a run before this one may have changed it.
        torch._functorch.config.activation_memory_budget = (
            _CHEAP if runtime.activation_checkpointing == "cheap" else 1.0
        )
        # Layer by layer: they are alike, so the code of one serves all. For each shape anew: code for shapes left
        # open is slower, and some of it cannot be generated at all.
        for layer in model.layers:
            layer.compile(dynamic=False)
    if group.world > 1 and runtime.parallel == "fsdp":
        mesh = init_device_mesh(group.device.type, (group.world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if group.world > 1 and runtime.parallel == "ddp":
        return DistributedDataParallel(model)
    return model


@contextlib.contextmanager
def synchronized(stepper: nn.Module, last: bool) -> Iterator[None]:
    """Let processes exchange gradients once an update, after its last piece."""
    if isinstance(stepper, DistributedDataParallel) and not last:
        with stepper.no_sync():
            yield
        return
    if isinstance(stepper, FSDPModule):
        stepper.set_requires_gradient_sync(last)
    yield
