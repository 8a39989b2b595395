"""Kernels compiled when they are first needed, kept on disk, and launched on PyTorch's current stream.

The compiler is NVRTC, a library that comes with PyTorch's own dependencies: no compiler need be installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

import torch

from tcnca.errors import KernelError
from tcnca.ops.kernels import ADVICE

OPTIONS = ("--std=c++17",)
Grid = tuple[int, int, int]
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Layout(Protocol):
    """Something that writes a kernel's source."""

    def text(self, block: Any) -> str:
        """The whole source for one block."""
        ...


class Kernel:
    """A kernel on one device. Its one argument is a structure of whole numbers and addresses, 8 bytes each."""

    def __init__(self, function: Any, memory: int, threads: int, multiprocessors: int) -> None:
        driver = _bindings()[0]
        self._launch = driver.cuLaunchKernel
        self._launch_together = driver.cuLaunchCooperativeKernel
        self._function = function
        self._memory = memory
        if memory > 48 * 1024:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, limit, memory))
        self.registers = self._attribute("CU_FUNC_ATTRIBUTE_NUM_REGS")
        self.spilled = self._attribute("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")
        (resident,) = _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, memory))
        self.multiprocessors = multiprocessors
        self.slots = resident * multiprocessors

    def _attribute(self, name: str) -> int:
        driver = _bindings()[0]
        (value,) = _check(driver.cuFuncGetAttribute(getattr(driver.CUfunction_attribute, name), self._function))
        return int(value)

    def prepare(
        self,
        grid: Grid,
        block: Grid,
        addresses: int,
        rest: bytes,
        together: bool = False,
        memory: int | None = None,
    ) -> Launch:
        """A launch whose argument is so many addresses, given when it starts, and then `rest`.

        `together` makes sure that all of its blocks run at once; `memory` takes less than the kernel may have.
        """
        memory = self._memory if memory is None else memory
        start = self._launch_together if together else self._launch
        extra = () if together else (0,)
        return Launch(start, (self._function, *grid, *block, memory), addresses, rest, extra)


class Launch:
    """A kernel with all that does not change from call to call. Any number of threads may start it at once."""

    def __init__(self, start: Any, fixed: tuple[Any, ...], addresses: int, rest: bytes, extra: tuple[int, ...]) -> None:
        self._start, self._fixed, self._rest, self._extra = start, fixed, rest, extra
        self._pack = struct.Struct(f"{addresses}q").pack
        self._copy = (ctypes.c_char * (8 * addresses + len(rest))).from_buffer_copy

    def start(self, stream: int, *addresses: int) -> None:
        """Start the kernel on a stream."""
        # A copy for each call: the driver reads it while other threads prepare theirs.
        argument = self._copy(self._pack(*addresses) + self._rest)
        pointer = ctypes.c_void_p(ctypes.addressof(argument))
        _check(self._start(*self._fixed, stream, ctypes.addressof(pointer), *self._extra))


def packed(*values: float) -> bytes:
    """Whole numbers and fractions as a kernel's argument holds them, 8 bytes each."""
    return b"".join(struct.pack("d" if isinstance(value, float) else "q", value) for value in values)


# PyTorch's own compiler asks in this way: it makes no object of a stream.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_of(device: int) -> int:
    """The stream that a device's work goes to now."""
    return torch.cuda.current_stream(device).cuda_stream if _raw_stream is None else _raw_stream(device)


def most_memory(device: int) -> int:
    """Bytes of shared memory that a block can have; many chips have half of what the largest ones have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


_THREADS = threading.local()


def enter(device: int) -> None:
    """Make the device's context current for the driver's calls: a thread has none until PyTorch has worked in it."""
    entered: set[int] = _THREADS.__dict__.setdefault("entered", set())
    if device not in entered:
        torch.zeros(1, device=f"cuda:{device}")
        entered.add(device)


_LOCK = threading.Lock()
_LOADED: dict[tuple[Any, ...], Kernel] = {}


def load(layout: Layout, block: Any, name: str, threads: int, memory: int, device: int) -> Kernel:
    """The kernel `name` of a layout's source for `block`, compiled at most once and loaded at most once a device."""
    key = (layout, block, name, device)
    kernel = _LOADED.get(key)
    if kernel is None:
        with _LOCK, torch.cuda.device(device):
            kernel = _LOADED.get(key) or _load(layout.text(block), name, threads, memory, device)
            _LOADED[key] = kernel
    return kernel


def _load(text: str, name: str, threads: int, memory: int, device: int) -> Kernel:
    driver = _bindings()[0]
    properties = torch.cuda.get_device_properties(device)
    image = cubin(text, f"sm_{properties.major}{properties.minor}")
    # The driver forbids a thread to load while it captures a graph, of which a first call may be part.
    (mode,) = _check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode(_RELAXED)))
    try:
        (module,) = _check(driver.cuModuleLoadData(image))
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(mode))
    (function,) = _check(driver.cuModuleGetFunction(module, name.encode()))
    return Kernel(function, memory, threads, properties.multi_processor_count)


def cubin(text: str, architecture: str) -> bytes:
    """Machine code for a source, from disk where an earlier run has left it."""
    nvrtc = _bindings()[1]
    version = "{}.{}".format(*_check(nvrtc.nvrtcVersion()))
    key = hashlib.sha256("\0".join((text, architecture, version, *OPTIONS)).encode()).hexdigest()
    path = cache_folder() / f"{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        image = _compile(text, architecture)
        _keep(path, image)
        return image


def cache_folder() -> Path:
    """Where machine code is kept: `$TCNCA_CACHE`, or `~/.cache/tcnca`."""
    return Path(os.environ.get("TCNCA_CACHE") or Path.home() / ".cache" / "tcnca") / "kernels"


def _keep(path: Path, image: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved, so that another process never reads half a file.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, path)
    except OSError:
        return  # without a folder to write to, every process compiles for itself


def _compile(text: str, architecture: str) -> bytes:
    nvrtc = _bindings()[1]
    (program,) = _check(nvrtc.nvrtcCreateProgram(text.encode(), b"tcnca.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result) != 0:
        (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise KernelError(
            f"NVRTC could not compile a kernel for {architecture}; {ADVICE}; it said: {log.decode(errors='replace')}"
        )
    (size,) = _check(nvrtc.nvrtcGetCUBINSize(program))
    image = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, image))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return image


@functools.cache
def missing() -> str | None:
    """What of the packages that compile and start kernels is not there; None if nothing is."""
    try:
        _check(_bindings()[1].nvrtcVersion())
    except KernelError as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # the bindings look for the library when they first call it
        return f"NVRTC: cannot be loaded ({' '.join(str(error).split())}); `pip install cuda-bindings[all]` installs it"
    return None


@functools.cache
def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise KernelError(
            f"cuda.bindings: cannot be imported ({error}); PyTorch for CUDA brings it along, and "
            "`pip install cuda-bindings` installs it"
        ) from error
    return driver, nvrtc


def _check(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the driver or of NVRTC returned besides its error code."""
    if int(answer[0]) != 0:
        raise KernelError(f"a call of CUDA failed with {answer[0]!r}; {ADVICE}")
    return answer[1:]
