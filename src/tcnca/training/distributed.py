"""One process or several: the process group, and the model wrapped for it. The model itself knows nothing of either."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tcnca.errors import ConfigError, PeerError
from tcnca.models import SequenceModel
from tcnca.ops import ContextParallel
from tcnca.ops.cache import cache_folder, private_folder
from tcnca.signals import handle_signals
from tcnca.training.config import ParallelConfig, RuntimeConfig

_MAX_COMPILED_SHAPES = 64
"""Shapes for which a layer is compiled; it runs eagerly for any others."""
_CHEAP_MEMORY_BUDGET = 0.9
"""Share of the activations that PyTorch may keep, so that only cheap ones are recomputed."""
_LAST_BARRIER: list[dist.Work] = []
"""Keeps the last collective alive. If the thread of the process group were the last to hold it, releasing it would need
Python's lock, for which a DDP model that is being freed while it holds the lock waits forever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistContext:
    """The rank of this process, the number of processes, and the device of this one."""

    rank: int = 0
    """Rank of this process."""
    world_size: int = 1
    """Number of processes."""
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    """Device of this process."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the maximum over all processes."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the values of all processes, by rank."""
        if self.world_size == 1:
            return values[None]
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(gathered, values)
        return torch.stack(gathered)

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any process, so that all processes act alike."""
        return bool(self.all_reduce_max(torch.tensor(float(condition))))

    def broadcast(self, values: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the main process."""
        if self.world_size > 1:
            for value in values:
                dist.broadcast(value, 0)

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()

    def _all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values, op)
        return values


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str | None) -> None:
    """Raise a ConfigError unless `device` is None or available here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected cpu, since no GPU was found, got cuda")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device: expected cpu, since no GPU of Apple was found, got mps")
    if device not in (None, "cpu", "cuda", "mps"):
        hint = "; a GPU is called cuda, that of Apple mps" if device == "gpu" else ""
        raise ConfigError(f"--device: expected cpu, cuda or mps, got {device}{hint}")


@contextlib.contextmanager
def dist_context(device: str | None = None) -> Iterator[DistContext]:
    """Join the process group if `torchrun` started this process, and leave it at the end.

    Args:
        device: `cpu`, `cuda` or `mps`; None for an NVIDIA GPU if there is one.
    """
    check_device(device)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "mps" and world_size > 1:
        raise ConfigError(f"--device: expected cpu or cuda for {world_size} processes, got mps")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world_size == 1:
        yield DistContext(device=place)
        return
    try:
        # This waits for the others, which may have failed: torchrun then ends this process with SIGTERM, while Python's
        # handlers cannot run.
        with handle_signals([signal.SIGTERM], signal.SIG_DFL):
            # Host tensors are reduced by gloo, without waiting for the GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
        yield DistContext(rank=rank, world_size=world_size, device=place)
        # Leave together: a process that leaves while another still communicates may block forever.
        last = dist.barrier(async_op=True)
        if last is not None:
            last.wait()
            _LAST_BARRIER.append(last)
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise PeerError(
                "another process of the run has ended, or cannot be reached; its message says why. This process, rank "
                f"{rank} of {world_size}, ends too"
            ) from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def should_compile(runtime: RuntimeConfig, device: torch.device) -> bool:
    """Return whether layers are compiled on a device."""
    return runtime.compile is True or (runtime.compile == "gpu" and device.type == "cuda")


def preload_compiler() -> None:
    """Import the compiler and start its processes in the background, as both take seconds.

    Compiled code is kept for later runs, unless the user has chosen a folder: PyTorch keeps it with temporary files.
    """
    with contextlib.suppress(OSError, RuntimeError):  # there may be no home, or none to write to
        folder = cache_folder() / "inductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private_folder(folder):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    threading.Thread(target=_start_compiler, daemon=True).start()


def _start_compiler() -> None:
    with contextlib.suppress(Exception):  # not part of PyTorch's public interface, and only saves time
        # The processes first: they import PyTorch themselves meanwhile.
        importlib.import_module("torch._inductor.async_compile").maybe_warm_pool()
        importlib.import_module("torch._inductor.compile_fx")
        # Digests of the sources of PyTorch and Triton, which name the files of compiled code.
        importlib.import_module("torch._inductor.codecache").torch_key()
        importlib.import_module("torch._inductor.runtime.triton_compat").triton_key()


def parallelize(
    model: SequenceModel, runtime: RuntimeConfig, context: DistContext, *, dynamic: bool = False
) -> nn.Module:
    """Apply activation checkpointing, compilation and DDP or FSDP2. Returns the module to call in training.

    `dynamic` compiles code once for batches of any shape, instead of once for each shape.
    """
    if runtime.activation_checkpointing is True:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if should_compile(runtime, context.device):
        torch._dynamo.config.recompile_limit = _MAX_COMPILED_SHAPES
        # Global settings, which an earlier run in this process may have changed.
        torch._functorch.config.activation_memory_budget = (
            _CHEAP_MEMORY_BUDGET if runtime.activation_checkpointing == "cheap" else 1.0
        )
        # Layer by layer, as equal layers share the code.
        for layer in model.layers:
            if dynamic:
                layer.forward = _DynamicForward(layer.forward)
            else:
                layer.compile(dynamic=False)
    if context.world_size > 1 and runtime.parallel.strategy == "fsdp":
        mesh = init_device_mesh(context.device.type, (context.world_size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if context.world_size > 1 and runtime.parallel.strategy == "ddp":
        return DistributedDataParallel(model)
    return model


def make_context(parallel: ParallelConfig, dist: DistContext) -> ContextParallel | None:
    """Return the processes that share the rows of this one; None if it has rows of its own.

    Processes of one context have consecutive ranks, so that most of what they exchange stays on a machine.
    """
    processes, context = dist.world_size, parallel.context
    if processes == 1:
        return None
    data = parallel.data or processes // context
    if data * context != processes:
        raise ConfigError(
            f"runtime.parallel: expected data times context to be {processes}, the number of processes, got "
            f"{parallel.data or 'any number'} times {context}; start as many with torchrun, or change one of them"
        )
    if context == 1:
        return None
    return ContextParallel(init_device_mesh(dist.device.type, (data, context), mesh_dim_names=("data", "context")))


class _DynamicForward:
    """The `forward` of a layer, compiled for any number of rows and time steps; all other sizes are fixed."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._compiled = forward, torch.compile(forward, dynamic=False)

    def __call__(self, x: Tensor, *, lengths: Tensor | None = None, **options: Any) -> Any:
        torch._dynamo.maybe_mark_dynamic(x, (0, 1))
        if lengths is not None:
            torch._dynamo.maybe_mark_dynamic(lengths, 0)
        return self._compiled(x, lengths=lengths, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the layer calls its own `forward`, and is not compiled, as with `nn.Module.compile`.
        return functools.partial, (self._forward,)


@contextlib.contextmanager
def gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Exchange gradients in the backward pass only if `enabled`, which is the last micro-batch of a step."""
    if isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    yield
