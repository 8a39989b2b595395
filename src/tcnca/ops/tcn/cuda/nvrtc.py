"""Compile kernels with NVRTC when they are first needed, and keep the machine code on disk.

NVRTC is a library among PyTorch's own dependencies, so no compiler has to be installed.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from tcnca.errors import KernelError
from tcnca.ops import cache, driver
from tcnca.ops.dispatch import HINT

OPTIONS = ("--std=c++17",)


class Source(NamedTuple):
    """CUDA files of this package, one after the other, and the macros they are compiled with."""

    files: tuple[str, ...]
    macros: tuple[tuple[str, int], ...]

    def text(self) -> str:
        """Return the whole source."""
        macros = "".join(f"#define {name} {value}\n" for name, value in self.macros)
        return macros + "\n".join(_read(name) for name in self.files)


def _read(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


_LOCK = threading.Lock()
_LOADED: dict[tuple[Source, str, int], driver.Function] = {}


def load(source: Source, name: str, shared_memory: int, device: int) -> driver.Function:
    """Return the kernel `name` of a source, compiled at most once and loaded at most once per device."""
    key = (source, name, device)
    found = _LOADED.get(key)
    if found is None:
        with _LOCK, torch.cuda.device(device):
            found = _LOADED.get(key)
            if found is None:
                major, minor = torch.cuda.get_device_capability(device)
                image = cubin(source.text(), f"sm_{major}{minor}")
                found = _LOADED[key] = driver.Function(image, name, shared_memory)
    return found


def resident_blocks(function: driver.Function, threads: int, device: int) -> int:
    """Return how many blocks of `threads` threads the device runs at a time."""
    return function.resident_blocks(threads) * torch.cuda.get_device_properties(device).multi_processor_count


def cubin(text: str, architecture: str) -> bytes:
    """Return the machine code of a source, read from disk if an earlier run has compiled it."""
    version = "{}.{}".format(*_call("nvrtcVersion"))
    key = hashlib.sha256("\0".join((text, architecture, version, *OPTIONS)).encode()).hexdigest()
    path = cache.cache_folder() / "kernels" / f"{key[:32]}.cubin"
    image = cache.load(path)
    if image is None:
        image = compile_source(text, architecture)
        cache.store(path, image)
    return image


def compile_source(text: str, architecture: str) -> bytes:
    """Compile a source to machine code for an architecture, for example `sm_90`."""
    (program,) = _call("nvrtcCreateProgram", text.encode(), b"tcnca.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
    (result,) = _nvrtc().nvrtcCompileProgram(program, len(options), options)
    if int(result) != 0:
        (size,) = _call("nvrtcGetProgramLogSize", program)
        log = b" " * size
        _call("nvrtcGetProgramLog", program, log)
        raise KernelError(
            f"NVRTC: cannot compile a kernel for {architecture}; {HINT}; the log: {log.decode(errors='replace')}"
        )
    (size,) = _call("nvrtcGetCUBINSize", program)
    image = b" " * size
    _call("nvrtcGetCUBIN", program, image)
    _call("nvrtcDestroyProgram", program)
    return image


@functools.cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of NVRTC, and return its results without the error code."""
    error, *results = getattr(_nvrtc(), name)(*arguments)
    if int(error) != 0:
        raise KernelError(f"NVRTC: {name} failed with {error!r}; {HINT}")
    return tuple(results)
