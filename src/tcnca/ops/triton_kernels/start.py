"""Triton's kernels, compiled when they are first needed and started through the CUDA driver.

Triton's own launcher has to be built by a C compiler on the user's machine, and takes longer in Python than many of
these kernels run. Its compiler of kernels needs neither, and keeps machine code on disk.

A kernel's arguments are its tensors, then its numbers, then its compile-time constants, in capitals. Whole numbers have
32 bits, except strides, whose names hold `by_`; others are float32.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tcnca.errors import KernelError
from tcnca.ops.driver import ensure_context as enter
from tcnca.ops.kernels import ADVICE, INTERPRETED

KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Bytes that one thread loads or copies at once, if it is known that they start at a multiple of as many.
ALIGNMENT = 16
# Addresses of working memory that Triton appends to the arguments; these kernels ask for none.
SPARE = 4
# What a kernel may have of shared memory without asking.
USUAL_MEMORY = 48 * 1024
MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Build(NamedTuple):
    """All that a kernel's machine code depends on: never values, so that no length compiles anything anew."""

    kernel: Any
    types: tuple[str, ...]
    """Of tensors and numbers, as Triton names them."""
    constants: tuple[tuple[str, object], ...]
    warps: int
    stages: int
    multiple: int | None


def build(
    kernel: Any,
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, object],
    warps: int,
    stages: int = 3,
    multiple: int | None = None,
) -> Build:
    """How a kernel is compiled for tensors of such types and such numbers.

    Args:
        kernel: a function of `triton.jit`.
        dtypes: types of the tensors.
        numbers: the numbers, of which the types count.
        constants: what is compiled in.
        warps: groups of 32 threads that run one program.
        stages: steps of a loop around products of matrices whose loads are on their way together.
        multiple: what every stride is a multiple of, if also every tensor starts at a multiple of `ALIGNMENT`.
    """
    names = [name for name in kernel.arg_names if name not in constants][len(dtypes) :]
    types = [f"*{KINDS[dtype]}" for dtype in dtypes]
    types += [_type(name, number) for name, number in zip(names, numbers, strict=True)]
    return Build(kernel, tuple(types), tuple(constants.items()), warps, stages, multiple)


def _type(name: str, number: int | float) -> str:
    return "fp32" if isinstance(number, float) else "i64" if "by_" in name else "i32"


class Launch:
    """A kernel with its grid and its numbers; what is left to give are its tensors. See `build`."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        dtypes: tuple[torch.dtype, ...],
        numbers: tuple[int | float, ...],
        constants: dict[str, object],
        warps: int,
        device: int | None,
        stages: int = 3,
        multiple: int | None = None,
    ) -> None:
        self._kernel, self._grid = kernel, (*grid, 1)
        self._numbers, self._constants = numbers, constants
        if device is None or INTERPRETED:
            return
        made = build(kernel, dtypes, numbers, constants, warps, stages, multiple)
        function, threads, memory = loaded(made, device)
        # 8 bytes each: of 32 bits the kernel reads the lower half.
        self._slots = (ctypes.c_int64 * (len(dtypes) + len(numbers) + SPARE))(*[0] * len(dtypes), *map(_bits, numbers))
        first, size = ctypes.addressof(self._slots), ctypes.sizeof(ctypes.c_int64)
        self._addresses = (ctypes.c_void_p * len(self._slots))(*(first + size * i for i in range(len(self._slots))))
        # Converted once, as that takes half of a call's time.
        fixed = [ctypes.c_uint(number) for number in (*self._grid, threads, 1, 1, memory)]
        self._start = functools.partial(driver().cuLaunchKernel, ctypes.c_void_p(function), *fixed)
        self._given = ctypes.c_void_p(ctypes.addressof(self._addresses))
        self._lock = threading.Lock()

    def __call__(self, stream: int, *tensors: Tensor) -> None:
        """Start the kernel on a stream of the current device."""
        if 0 in self._grid:
            return
        if INTERPRETED:
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
            return
        pointers: list[Any] = [tensor.data_ptr() for tensor in tensors]
        # The driver copies the arguments while another thread may be about to write its own.
        with self._lock:
            self._slots[: len(pointers)] = pointers
            error = self._start(stream, self._given, None)
        if error:
            raise KernelError(f"the CUDA driver could not start the kernel {self._kernel.__name__}: {_named(error)}")


def packed(x: Tensor) -> Tensor:
    """`x`, or a copy, so that it has no gaps and starts at a multiple of `ALIGNMENT`."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function` the current stream of its first tensor's device, which it finds current."""

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any) -> Any:
        device = first.device.index
        if INTERPRETED or device is None:
            return function(0, first, *rest)
        enter(device)
        if device == torch.cuda.current_device():
            return function(torch._C._cuda_getCurrentRawStream(device), first, *rest)
        with torch.cuda.device(device):
            return function(torch._C._cuda_getCurrentRawStream(device), first, *rest)

    return run


@functools.cache
def loaded(made: Build, device: int) -> tuple[int, int, int]:
    """A kernel on the current device, which has this number: its handle, its threads and its shared memory."""
    major, minor = torch.cuda.get_device_capability(device)
    machine_code = compiled(made, 10 * major + minor)
    image, memory = machine_code.asm["cubin"], int(machine_code.metadata.shared)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with _beside_captures():
        _check(driver().cuModuleLoadData(ctypes.byref(module), image), made)
    name = str(machine_code.metadata.name).encode()
    _check(driver().cuModuleGetFunction(ctypes.byref(function), module, name), made)
    if memory > USUAL_MEMORY:
        _check(driver().cuFuncSetCacheConfig(function, PREFER_SHARED), made)
        _check(driver().cuFuncSetAttribute(function, MOST_SHARED, memory), made, f", {memory} bytes of shared memory")
    return int(function.value or 0), 32 * int(machine_code.metadata.num_warps), memory


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Let this thread do what the driver forbids while a graph is captured, for a first call may be part of one."""
    mode = ctypes.c_int(RELAXED)
    # Gives back the mode that was, for the second call to set again.
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def compiled(made: Build, capability: int) -> Any:
    """What Triton makes of a kernel."""
    name, constants = made.kernel.__name__, dict(made.constants)
    given = iter(made.types)
    signature = {name: "constexpr" if name in constants else next(given) for name in made.kernel.arg_names}
    try:
        found = triton.compile(
            ASTSource(made.kernel, signature, constexprs=constants, attrs=_known(signature, made.multiple)),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": made.warps, "num_stages": made.stages},
        )
    except Exception as error:  # whatever its stages raise
        raise KernelError(f"Triton could not compile the kernel {name}; {ADVICE}; it said: {error}") from error
    scratch = [getattr(found.metadata, size, 0) for size in ("global_scratch_size", "profile_scratch_size")]
    if any(scratch):
        raise KernelError(
            f"kernel {name}: Triton {triton.__version__} wants {scratch} bytes of scratch memory, allowed are none; "
            f"{ADVICE}"
        )
    return found


def _known(signature: dict[str, str], multiple: int | None) -> dict[tuple[int], list[list[object]]]:
    """By an argument's place, what Triton may take it to be a multiple of."""
    if multiple is None:
        return {}
    found = [ALIGNMENT if kind[0] == "*" else multiple if kind == "i64" else 1 for kind in signature.values()]
    return {(place,): [["tt.divisibility", number]] for place, number in enumerate(found) if number > 1}


def _bits(number: int | float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little") if isinstance(number, float) else number


@functools.cache
def driver() -> Any:
    """The CUDA driver's library, which is where a GPU works at all."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    library.cuFuncSetCacheConfig.argtypes = [pointer, ctypes.c_int]
    library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.cuGetErrorName.argtypes = [ctypes.c_int, pointer]
    return library


def _named(error: int) -> str:
    name = ctypes.c_char_p()
    driver().cuGetErrorName(error, ctypes.byref(name))
    return f"{(name.value or b'error').decode()} ({error}); {ADVICE}"


def _check(error: int, made: Build, more: str = "") -> None:
    if error:
        raise KernelError(f"the CUDA driver could not load the kernel {made.kernel.__name__}{more}: {_named(error)}")
