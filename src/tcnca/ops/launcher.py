"""Compile Triton kernels when they are first needed, and launch them through the CUDA driver.

Triton's own launcher needs a C compiler on the user's machine, and takes longer in Python than many of these kernels
run. Its kernel compiler needs neither, and caches machine code on disk.

A kernel's arguments are its tensors, then its numbers, then its compile-time constants, in capitals. Integers have 32
bits, except strides, whose names contain `by_`; other numbers are float32.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tcnca.errors import KernelError
from tcnca.ops import cache, driver
from tcnca.ops.dispatch import HINT, INTERPRETED

TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
# Bytes that one thread loads or copies at once, if they are known to start at a multiple of this number.
ALIGNMENT = 16
# Addresses of scratch memory that Triton appends to the arguments; these kernels use none.
SCRATCH_ARGUMENTS = 4


class Build(NamedTuple):
    """All that a kernel's machine code depends on: never values, so that no sequence length compiles anything anew."""

    kernel: Any
    types: tuple[str, ...]
    """Types of the tensors and numbers, as Triton names them."""
    constants: tuple[tuple[str, object], ...]
    num_warps: int
    num_stages: int
    stride_divisor: int | None


class Launch:
    """A kernel launch of which only the tensors are left to be given.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: number of programs.
        dtypes: dtypes of the tensors.
        numbers: the other arguments.
        constants: compile-time constants.
        device: index of the CUDA device; None in the interpreter.
        num_warps: groups of 32 threads that run one program.
        num_stages: iterations of a loop around matrix products whose loads are in flight together.
        stride_divisor: a divisor of every stride, if every tensor starts at a multiple of `ALIGNMENT`.
        programmatic: whether the kernel waits itself for the one before it, see `driver.Launch`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        dtypes: tuple[torch.dtype, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, object],
        *,
        device: int | None,
        num_warps: int,
        num_stages: int = 3,
        stride_divisor: int | None = None,
        programmatic: bool = False,
    ) -> None:
        self._kernel, self._grid = kernel, (*grid, 1)
        self._numbers, self._constants = numbers, constants
        if device is None or INTERPRETED:
            return
        names = [name for name in kernel.arg_names if name not in constants][len(dtypes) :]
        types = [f"*{TYPE_NAMES[dtype]}" for dtype in dtypes]
        types += [_number_type(name, number) for name, number in zip(names, numbers, strict=True)]
        build = Build(kernel, tuple(types), tuple(constants.items()), num_warps, num_stages, stride_divisor)
        function = load_kernel(build, device)
        arguments = (*numbers, *[0] * SCRATCH_ARGUMENTS)
        block = (32 * num_warps, 1, 1)
        self._launch = driver.Launch(function, self._grid, block, len(dtypes), arguments, programmatic=programmatic)

    def __call__(self, stream: int, *tensors: Tensor) -> None:
        """Launch the kernel on a stream of the current device."""
        if 0 in self._grid:
            return
        if INTERPRETED:
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
        else:
            self._launch(stream, *[tensor.data_ptr() for tensor in tensors])


def _number_type(name: str, number: int | float) -> str:
    return "fp32" if isinstance(number, float) else "i64" if "by_" in name else "i32"


def multiprocessors(device: int | None) -> int:
    """Return the number of multiprocessors of a CUDA device, or 1 in the interpreter for None."""
    return 1 if device is None else int(torch.cuda.get_device_properties(device).multi_processor_count)


def aligned(x: Tensor) -> Tensor:
    """Return `x`, or a copy, contiguous and starting at a multiple of `ALIGNMENT`."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


@functools.cache
def load_kernel(build: Build, device: int) -> driver.Function:
    """Load a kernel on a device, which need not be the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    compiled = compile_kernel(build, 10 * major + minor)
    name, shared_memory = str(compiled.metadata.name), int(compiled.metadata.shared)
    with torch.cuda.device(device):
        return driver.Function(compiled.asm["cubin"], name, shared_memory, prefer_shared=True)


def compile_kernel(build: Build, capability: int) -> Any:
    """Return what Triton makes of a kernel."""
    name, constants = build.kernel.__name__, dict(build.constants)
    types = iter(build.types)
    signature = {name: "constexpr" if name in constants else next(types) for name in build.kernel.arg_names}
    source = ASTSource(build.kernel, signature, constexprs=constants, attrs=_divisors(signature, build.stride_divisor))
    compile_source = functools.partial(
        triton.compile,
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": build.num_warps, "num_stages": build.num_stages},
    )
    try:
        compiled = compile_source()
        if not _cached_privately(compiled):
            with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
                triton.knobs.cache.dir = folder
                compiled = compile_source()
    except Exception as error:  # its stages raise errors of many types
        raise KernelError(f"Triton: cannot compile the kernel {name}; {HINT}; Triton reports: {error}") from error
    scratch = [getattr(compiled.metadata, size, 0) for size in ("global_scratch_size", "profile_scratch_size")]
    if any(scratch):
        raise KernelError(
            f"Triton: expected no scratch memory for the kernel {name}, got {scratch} bytes with version "
            f"{triton.__version__}; {HINT}"
        )
    return compiled


def _cached_privately(compiled: Any) -> bool:
    """Return whether nobody else can have changed the files that Triton has read the machine code from."""
    paths = [Path(path) for path in compiled.metadata_group.values()]
    folders = [Path(triton.knobs.cache.dir), *{path.parent for path in paths}]
    return all(map(cache.private_folder, folders)) and all(cache.is_private(path.lstat()) for path in paths)


def _divisors(signature: dict[str, str], stride_divisor: int | None) -> dict[tuple[int], list[list[object]]]:
    """Return, by an argument's index, what Triton may assume to divide it."""
    if stride_divisor is None:
        return {}
    found = [ALIGNMENT if kind[0] == "*" else stride_divisor if kind == "i64" else 1 for kind in signature.values()]
    return {(index,): [["tt.divisibility", number]] for index, number in enumerate(found) if number > 1}
