"""Talk to the CUDA driver: load machine code, launch kernels on PyTorch's streams, capture graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.dispatch import DRIVER_LIBRARY, HINT, INTERPRETED

DEFAULT_SHARED_MEMORY = 48 * 1024  # bytes that a kernel may have without asking
INTERPRETER_SHARED_MEMORY = 227 * 1024

# Values of the driver's enumerations.
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
PROGRAMMATIC_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROGRAMMATIC_CAPABILITY = (9, 0)
"""Compute capability from which a kernel can start before the one before it ends."""

Grid = tuple[int, int, int]


@functools.cache
def library() -> Any:
    """Return the driver's library, with the argument types that ctypes would convert wrongly."""
    found = ctypes.CDLL(DRIVER_LIBRARY)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    found.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    found.cuLaunchCooperativeKernel.argtypes = [pointer, *[number] * 7, pointer, pointer]
    found.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
    found.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    found.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    found.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    found.cuFuncSetCacheConfig.argtypes = [pointer, ctypes.c_int]
    found.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    found.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = [pointer, pointer, ctypes.c_int, ctypes.c_size_t]
    found.cuGetErrorName.argtypes = [ctypes.c_int, pointer]
    return found


def check(error: int, action: str) -> None:
    """Raise an error with the driver's name of an error code, unless it is 0."""
    if error:
        name = ctypes.c_char_p()
        library().cuGetErrorName(error, ctypes.byref(name))
        raise KernelError(
            f"CUDA driver: cannot {action}: {(name.value or b'unknown error').decode()} ({error}); {HINT}"
        )


class Function:
    """A kernel loaded on the current device.

    Args:
        image: the module's machine code.
        name: the kernel's name in the module.
        shared_memory: bytes of dynamic shared memory that a launch may have.
        prefer_shared: whether to give the kernel as much as possible of the memory that the level-1 cache shares.
    """

    def __init__(self, image: bytes, name: str, shared_memory: int = 0, prefer_shared: bool = False) -> None:
        self.name, self.shared_memory = name, shared_memory
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with relaxed_capture():
            check(library().cuModuleLoadData(ctypes.byref(module), image), f"load the kernel {name}")
        found = library().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        check(found, f"find the kernel {name}")
        self.handle = int(function.value or 0)
        if shared_memory > DEFAULT_SHARED_MEMORY:
            action = f"give the kernel {name} {shared_memory} bytes of shared memory"
            if prefer_shared:
                check(library().cuFuncSetCacheConfig(function, PREFER_SHARED), action)
            check(library().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, shared_memory), action)

    def resident_blocks(self, threads: int) -> int:
        """Return how many blocks of `threads` threads fit on one multiprocessor at a time."""
        value = ctypes.c_int()
        error = library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(value), ctypes.c_void_p(self.handle), threads, self.shared_memory
        )
        check(error, f"describe the kernel {self.name}")
        return value.value


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Launch:
    """A kernel launch of which only the addresses are left to be given. Several threads may use it at once.

    The kernel takes `num_addresses` addresses, then `numbers`: each as an argument, fractions as float32; or, with
    `as_struct`, all in one structure whose fields have 8 bytes, fractions as float64.

    Args:
        function: the kernel.
        grid, block: number of blocks, and threads in a block.
        num_addresses: number of addresses.
        numbers: the other values.
        as_struct: how the kernel takes its arguments, see above.
        shared_memory: bytes of dynamic shared memory, if less than the function's.
        cooperative: whether all blocks have to run at the same time.
        programmatic: whether the kernel may start before the one before it on the stream ends, for which it waits
            itself.
    """

    def __init__(
        self,
        function: Function,
        grid: Grid,
        block: Grid,
        num_addresses: int,
        numbers: tuple[int | float, ...],
        *,
        as_struct: bool = False,
        shared_memory: int | None = None,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        words = [0] * num_addresses + [_word(number, "<d" if as_struct else "<f") for number in numbers]
        self._slots: Any = (ctypes.c_int64 * len(words))(*words)
        first = ctypes.addressof(self._slots)
        starts = [first] if as_struct else [first + 8 * i for i in range(len(words))]
        self._arguments = (ctypes.c_void_p * len(starts))(*starts)
        memory = function.shared_memory if shared_memory is None else shared_memory
        # Converted once: conversion takes half of a launch's time.
        fixed = [ctypes.c_uint(number) for number in (*grid, *block, memory)]
        start = library().cuLaunchCooperativeKernel if cooperative else library().cuLaunchKernel
        self._start = functools.partial(start, ctypes.c_void_p(function.handle), *fixed)
        self._rest = (ctypes.c_void_p(ctypes.addressof(self._arguments)), *(() if cooperative else (None,)))
        if programmatic:
            self._start = functools.partial(self._start_programmatic, function.handle, grid, block, memory)
        self._lock = threading.Lock()
        self._name = function.name

    @staticmethod
    def _start_programmatic(
        function: int, grid: Grid, block: Grid, memory: int, stream: int, arguments: Any, extra: Any
    ) -> int:
        attribute = _Attribute(PROGRAMMATIC_LAUNCH, 0, (ctypes.c_int * 16)(1))
        config = _Config(grid, block, memory, stream, ctypes.pointer(attribute), 1)
        return library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), arguments, extra)

    def __call__(self, stream: int, *addresses: int) -> None:
        """Launch the kernel on a stream of the current device."""
        # The driver has copied the arguments when it returns; until then no other thread may write its own.
        with self._lock:
            self._slots[: len(addresses)] = addresses
            error = self._start(stream, *self._rest)
        if error:
            check(error, f"launch the kernel {self._name}")


def _word(number: int | float, fraction: str) -> int:
    """Return the bits of a number as a kernel reads them: of 32 bits it reads the lower half."""
    return int.from_bytes(struct.pack(fraction, number), "little") if isinstance(number, float) else int(number)


def current_stream(device: int) -> int:
    """Return the handle of the stream that a device's work goes to now."""
    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def max_shared_memory(device: int | None) -> int:
    """Return the bytes of shared memory that a block can have on a CUDA device, or in Triton's interpreter for None."""
    if device is None:
        return INTERPRETER_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


_THREAD = threading.local()


def ensure_context(device: int) -> None:
    """Make the device's context current for the driver: a thread has none until PyTorch has worked in it."""
    entered: set[int] = _THREAD.__dict__.setdefault("entered", set())
    if device not in entered:
        torch.zeros(1, device=f"cuda:{device}")
        entered.add(device)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function(stream, first, *rest)` with the first tensor's device current, and its current stream."""

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any) -> Any:
        device = first.device.index
        if INTERPRETED or device is None:
            return function(0, first, *rest)
        if device == torch.cuda.current_device():
            ensure_context(device)
            return function(current_stream(device), first, *rest)
        with torch.cuda.device(device):
            ensure_context(device)
            return function(current_stream(device), first, *rest)

    return run


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread what the driver forbids while a graph is captured, for the first call may be part of one."""
    mode = ctypes.c_int(CAPTURE_RELAXED)
    # The driver returns the previous mode, which the second call sets again.
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextlib.contextmanager
def capture_graph(
    stream: torch.cuda.Stream | None = None, pool: Any = None, error_mode: str = "global"
) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the work of the `with` block as a CUDA graph; a failure leaves PyTorch as it was before.

    A backward pass can be captured if no forward pass that is still alive used its leaves on another stream. After a
    failure `torch.manual_seed` does not reach graphs that were captured before.

    Args:
        stream: the stream to capture on; None is a new one.
        pool: the memory pool of the graph; None is a new one.
        error_mode: `capture_error_mode` of `torch.cuda.graph`.
    """
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    rng_state = generator.clone_state()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
            yield graph
    except BaseException:
        torch.cuda.set_stream(before)
        with contextlib.suppress(RuntimeError):  # the capture may have ended all the same
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        # The generator's state waits for the end of the capture, and cannot be used until it is replaced.
        generator.graphsafe_set_state(rng_state)
        raise
