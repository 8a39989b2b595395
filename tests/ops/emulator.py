"""Run the TCN's CUDA kernels on the CPU: their unchanged sources, compiled by the machine's C++ compiler.

`emulated` replaces the CUDA driver's library and NVRTC below the code that plans and launches the kernels, so that this
code runs too. Every tensor that a kernel gets is a copy between guards of NaN, which no kernel may change.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tcnca.ops import driver
from tcnca.ops.dispatch import Candidate
from tcnca.ops.tcn import api
from tcnca.ops.tcn.cuda import nvrtc, operator, tensor_core

HEADER = Path(__file__).with_name("emulator.h")
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off")
MULTIPROCESSORS = 3
SHARED_MEMORY = 227 * 1024
GUARD = 1 << 16  # bytes before and after every tensor

needs_compiler = pytest.mark.skipif(COMPILER is None or os.name != "posix", reason="needs g++ on a POSIX system")


def translate(text: str) -> str:
    """Return a CUDA source as C++: with calls instead of `asm`, and a function that launches each kernel."""
    parts, end = [], 0
    for found in re.finditer(r"\basm(?: volatile)?\(", text):
        parts.append(text[end : found.start()])
        end = _closing(text, found.end())
        parts.append(_instruction(text[found.end() : end - 1]))
    text = "".join((*parts, text[end:]))
    text = re.sub(r"extern __shared__ [^;]*?(\w+)\[\];", r"char* \1 = emulator::dynamic_shared();", text)
    text = re.sub(r"__shared__ (\w+) (\w+)((?:\[[^\]]*\])+);", r'auto& \2 = emulator::static_shared<\1\3>("\2");', text)
    text = re.sub(r'extern "C" __global__ void ([^{;]*?)(\w+)\(const (\w+) args\)', _launcher, text)
    macros = text.index("//")  # the first comment is that of the first file
    return f"{text[:macros]}{HEADER.read_text('utf-8')}{text[macros:]}"


def _launcher(kernel: re.Match[str]) -> str:
    """Return the head of a kernel, with a function before it that launches the kernel."""
    attributes, name, arguments = kernel.groups()
    cluster = re.search(r"__cluster_dims__\((\w+)", attributes)
    head = f"void {name}(const {arguments} args)"
    return (
        f'{head}; extern "C" const char* launch_{name}(void* args, const unsigned* sizes) {{ '
        f"return emulator::launch([](void* own) {{ {name}(*({arguments}*)own); }}, args, sizes, "
        f"{cluster[1] if cluster else 1}); }} {head}"
    )


def _closing(text: str, start: int) -> int:
    """Return the place after the parenthesis that closes the one before `start`."""
    depth, quoted = 1, False
    for place in range(start, len(text)):
        quoted ^= text[place] == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise AssertionError("asm: expected a closing parenthesis, got none")


def _instruction(statement: str) -> str:
    """Return a call for the inside of an `asm` statement: template, outputs, inputs, clobbers."""
    fields = [""]
    for piece in re.split(r'("[^"]*"|:)', statement):
        if piece == ":":
            fields.append("")
        else:
            fields[-1] += piece
    template, operands = "".join(re.findall(r'"([^"]*)"', fields[0])), []
    for field in fields[1:3]:
        for found in re.finditer(r'"[^"]*"\(', field):
            operands.append(field[found.end() : _closing(field, found.end()) - 1])
    half = re.search(r"cvt\.f32\.f16 %0, (\w);}", template)
    name = f"cvt_f32_f16_{half[1]}" if half else re.sub(r"\W", "_", re.split(r"[ ;%]", template)[0]).strip("_")
    return f"ptx::{name or 'nothing'}({', '.join(operands)})"


def compile_kernels(text: str, architecture: str = "") -> bytes:
    """Return the path of a library with the kernels of a source; those of earlier runs are found again."""
    source = translate(text)
    key = hashlib.sha256("\0".join((source, *OPTIONS)).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"tcnca-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=folder) as file:
            file.write(source)
            file.flush()
            built = Path(file.name).with_suffix(".so")
            done = subprocess.run(
                [str(COMPILER), *OPTIONS, file.name, "-o", str(built), "-lm"], capture_output=True, text=True
            )
            assert done.returncode == 0, f"g++ cannot compile the kernels: {done.stderr[:4000]}"
            built.replace(path)
    return str(path).encode()


class _Guarded:
    """A copy of a tensor's memory, with NaN around it."""

    def __init__(self, tensor: Tensor) -> None:
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.tensor, self.num_bytes = tensor, span * tensor.element_size()
        self.memory = (ctypes.c_ubyte * (self.num_bytes + 2 * GUARD + 512))()
        ctypes.memset(self.memory, 0xFF, len(self.memory))
        start = ctypes.addressof(self.memory) + GUARD
        self.address = start + (tensor.data_ptr() - start) % 256
        ctypes.memmove(self.address, tensor.data_ptr(), self.num_bytes)

    def copy_back(self) -> None:
        before = self.address - ctypes.addressof(self.memory)
        outside = bytes(self.memory)[:before] + bytes(self.memory)[before + self.num_bytes :]
        assert outside.count(0xFF) == len(outside), "a kernel wrote outside of its tensors"
        ctypes.memmove(self.tensor.data_ptr(), self.address, self.num_bytes)


class _Library:
    """What `tcnca.ops.driver` calls of the CUDA driver's library; `launched` has the names of the kernels that ran."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self._functions: list[tuple[str, Any]] = []
        self._modules: list[Any] = []
        self._tensors: list[_Guarded] = []

    def address(self, tensor: Tensor | None) -> int:
        """Return the address of a guarded copy, which every launch copies back."""
        if tensor is None or tensor.numel() == 0:
            return 0
        self._tensors.append(_Guarded(tensor))
        return self._tensors[-1].address

    def forget_tensors(self) -> None:
        self._tensors.clear()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        self._modules.append(ctypes.CDLL(image.decode()))
        module._obj.value = len(self._modules)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        launch = getattr(self._modules[module.value - 1], f"launch_{name.decode()}")
        launch.restype, launch.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_void_p]
        self._functions.append((name.decode(), launch))
        function._obj.value = len(self._functions)
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        assert value <= SHARED_MEMORY
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, value: Any, *_: Any) -> int:  # noqa: N802
        value._obj.value = 1
        return 0

    def cuLaunchCooperativeKernel(self, *arguments: Any) -> int:  # noqa: N802
        return self._launch(True, *arguments)

    def cuLaunchKernel(self, *arguments: Any) -> int:  # noqa: N802
        return self._launch(False, *arguments)

    def _launch(self, cooperative: bool, function: Any, *rest: Any) -> int:
        sizes, arguments = [size.value for size in rest[:7]], rest[8]
        name, launch = self._functions[function.value - 1]
        self.launched.append(name)
        args = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        message = launch(args, (ctypes.c_uint * 8)(*sizes, int(cooperative)))
        assert message is None, f"{name}: {message.decode()}"
        for tensor in self._tensors:
            tensor.copy_back()
        return 0


@contextlib.contextmanager
def emulated() -> Iterator[list[str]]:
    """Run `backend="cuda"` of the TCN on CPU tensors, and yield the names of the launched kernels."""
    library = _Library()
    implementations = torch.library.Library("tcnca", "IMPL")
    for name, function in (
        ("tcn_blocks", operator._forward),
        ("tcn_blocks_backward", operator._backward),
        ("tcn_block_from_state", operator._from_state),
    ):

        def run(*arguments: Any, function: Any = function) -> Any:
            library.forget_tensors()
            return function(0, *arguments)

        implementations.impl(name, run, "CPU")
    plans = (operator.forward_plan, operator.backward_plan, operator.recomputes, operator.state_plan)
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=SHARED_MEMORY,
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (driver, "library", lambda: library),
            (nvrtc, "cubin", compile_kernels),
            (nvrtc, "_LOADED", {}),
            (operator, "_address", library.address),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "get_device_capability", lambda device: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device: properties),
            (api, "_CANDIDATES", (Candidate("cuda", None, lambda call: None),)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        counters = {None: torch.zeros(tensor_core.NUM_COUNTERS, 32, dtype=torch.int32)}
        stack.enter_context(mock.patch.object(tensor_core, "_counters", counters))
        for plan in plans:
            plan.cache_clear()
            stack.callback(plan.cache_clear)
        # New tensors start as NaN.
        torch._C._set_deterministic_algorithms(True)
        stack.callback(torch._C._set_deterministic_algorithms, deterministic)
        stack.callback(implementations._destroy)
        yield library.launched
        assert not counters[None].any(), "a kernel left its counters changed"
