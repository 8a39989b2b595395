"""Kernels compiled when they are first needed, kept on disk, and launched on PyTorch's current stream.

The compiler is NVRTC, a library that comes with PyTorch's own dependencies: no compiler need be installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tcnca.errors import KernelError

OPTIONS = ("--std=c++17",)
ADVICE = "TCNCA_KERNELS=plain in the environment does without kernels"
Grid = tuple[int, int, int]


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

    def launch(self, stream: int, grid: Grid, block: Grid, job: Sequence[int], together: bool = False) -> None:
        """Start the kernel; `together` makes sure that all of its blocks run at once."""
        values = (ctypes.c_int64 * len(job))(*job)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(values))
        address = ctypes.addressof(pointers)
        if together:
            _check(self._launch_together(self._function, *grid, *block, self._memory, stream, address))
        else:
            _check(self._launch(self._function, *grid, *block, self._memory, stream, address, 0))


def stream_of(x: torch.Tensor) -> int:
    """The stream that work on `x` goes to now."""
    return torch.cuda.current_stream(x.device).cuda_stream


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
    (module,) = _check(driver.cuModuleLoadData(image))
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
