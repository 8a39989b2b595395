"""The CUDA C of the TCN's kernels for one choice of everything that is fixed when compiling."""

from __future__ import annotations

import dataclasses
from importlib.resources import files

import torch

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
NONLINEARITIES = {"none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
LARGEST_KERNEL = 64
MOST_LAYERS = 12  # blocks of one launch
LAYER_BYTES = 256  # what the backward kernel on the tensor cores notes about a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """What distinguishes one compiled block `x + nonlinearity(convolution(x))` from another.

    Lengths, batches, dilations, strides and channels are arguments of the compiled kernels.
    """

    kernel_size: int
    dtype: str = "bfloat16"
    bias: bool = False
    nonlinearity: str = "silu"
    residual: bool = True
    causal: bool = True
    lengths: bool = False
    dropout: bool = False

    @property
    def ahead(self) -> int:
        """How many dilations the kernel looks into the future."""
        return 0 if self.causal else (self.kernel_size - 1) // 2

    @property
    def before(self) -> int:
        """Blocks of eight steps that an output needs before its own."""
        return -(-(self.kernel_size - 1 - self.ahead) // 8)

    @property
    def after(self) -> int:
        """Blocks of eight steps that an output needs after its own."""
        return -(-self.ahead // 8)

    @property
    def blocks(self) -> int:
        """Blocks of eight steps that an output needs."""
        return self.before + self.after + 1

    def defines(self) -> dict[str, int]:
        """The macros that all kernels of this block share."""
        return {
            "K": self.kernel_size,
            "DTYPE": DTYPES[self.dtype],
            "BIAS": int(self.bias),
            "ACTIVATION": NONLINEARITIES[self.nonlinearity],
            "RESIDUAL": int(self.residual),
            "AHEAD": self.ahead,
            "LENGTHS": int(self.lengths),
            "DROPOUT": int(self.dropout),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingForward:
    """How the forward kernel with a ring of registers is laid out.

    vector: neighboring channels of a thread; the number of channels and all strides must be multiples of it.
    past: the dtype of a state's ring buffer; None starts the sequence with zeros.
    """

    vector: int
    past: str | None = None

    def text(self, block: Block) -> str:
        """The whole source: `ring_forward`."""
        past = {"STATE": int(self.past is not None), "PAST": DTYPES[self.past or "float32"]}
        defines = block.defines() | {"VECTOR": self.vector} | past
        return _compose(defines, "machine.cuh", "pointwise.cuh", "ring.cuh", "ring_forward.cu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingBackward:
    """How the backward kernel with rings of registers is laid out."""

    vector: int

    def text(self, block: Block) -> str:
        """The whole source: `ring_backward` and `add_up`."""
        slots, unroll = ring_depth(block.kernel_size)
        # Rings and sums of long kernels leave no registers for the kernels themselves.
        shared = int(block.kernel_size > 32)
        defines = block.defines() | {"VECTOR": self.vector, "SLOTS": slots, "UNROLL": unroll, "SHARED_KERNELS": shared}
        return _compose(defines, "machine.cuh", "pointwise.cuh", "ring.cuh", "ring_backward.cu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileForward:
    """How the forward kernel on the tensor cores is laid out.

    warps: of a block, each with eight channels.
    stages: blocks of eight steps in shared memory, one in use and the others on their way.
    resident: blocks that a multiprocessor should hold; bounds the registers.
    unrolled: whether a turn of the loop is as many steps as there are blocks in registers, which then need not move, or
        one, which takes less code.
    """

    warps: int = 8
    stages: int = 3
    resident: int = 2
    unrolled: bool = False

    def memory(self, block: Block) -> int:
        """Bytes of shared memory."""
        return self.stages * _block_bytes(self.warps) + 32 * self.warps

    def text(self, block: Block) -> str:
        """The whole source: `tile_forward`."""
        defines = block.defines() | {
            "LAYERS": MOST_LAYERS,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
            "TURNS": block.blocks if self.unrolled else 1,
        }
        return _compose(defines, "machine.cuh", "pointwise.cuh", "tile.cuh", "tile_forward.cu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileBackward:
    """How the backward kernel on the tensor cores is laid out.

    deep: blocks of eight steps on their way to shared memory.
    warps, resident, unrolled: as in `TileForward`.
    """

    warps: int = 8
    deep: int = 3
    resident: int = 1
    unrolled: bool = False

    def memory(self, block: Block) -> int:
        """Bytes of shared memory."""
        rings = (2 * self.deep + block.before + 2) * _block_bytes(self.warps)
        tables = self.warps * 2 * (2 * block.blocks + block.residual) * 32 * 16
        kernels = 32 * self.warps * (block.kernel_size + 1)
        return rings + tables + kernels + LAYER_BYTES

    def text(self, block: Block) -> str:
        """The whole source: `tile_backward`."""
        defines = block.defines() | {
            "LAYERS": MOST_LAYERS,
            "WARPS": self.warps,
            "DEEP": self.deep,
            "RESIDENT": self.resident,
            "TURNS": block.blocks if self.unrolled else 1,
            "LAYER_BYTES": LAYER_BYTES,
        }
        return _compose(
            defines, "machine.cuh", "pointwise.cuh", "tile.cuh", "feeder.cuh", "sums.cuh", "tile_backward.cu"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeForward:
    """How the forward kernel is laid out that has a whole sequence in shared memory."""

    threads: int = 512

    def memory(self, block: Block, time: int, depth: int) -> int:
        """Bytes of shared memory."""
        return 4 * (2 * time + depth * (block.kernel_size + 1))

    def text(self, block: Block) -> str:
        """The whole source: `whole_forward`."""
        defines = block.defines() | {"THREADS": self.threads}
        return _compose(defines, "machine.cuh", "pointwise.cuh", "cluster.cuh", "whole.cuh", "whole_forward.cu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeBackward:
    """How the backward kernel is laid out that has a whole sequence in shared memory."""

    threads: int = 512

    def memory(self, block: Block, time: int, depth: int) -> int:
        """Bytes of shared memory."""
        return 4 * ((depth + 2) * time + (depth + self.threads // 32) * (block.kernel_size + 1))

    def text(self, block: Block) -> str:
        """The whole source: `whole_backward`."""
        defines = block.defines() | {"THREADS": self.threads}
        return _compose(defines, "machine.cuh", "pointwise.cuh", "cluster.cuh", "whole.cuh", "whole_backward.cu")


def ring_depth(kernel_size: int) -> tuple[int, int]:
    """Slots of the backward rings, and steps of one turn of the loop; as many for short kernels."""
    return (kernel_size, kernel_size) if kernel_size <= 20 else (kernel_size + 3, 4)


def _block_bytes(warps: int) -> int:
    return 16 * 8 * 16 * warps


def _compose(defines: dict[str, int], *names: str) -> str:
    folder = files(__package__)
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return macros + "\n".join((folder / name).read_text("utf-8") for name in names)
