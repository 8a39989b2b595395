"""How a backend is selected, what a machine needs for kernels, and how kernels are compiled, loaded and launched."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.errors import ConfigError, InputError, KernelError
from tcnca.ops import dispatch, driver
from tcnca.ops.dispatch import Candidate, select_backend
from tests.ops.interpreter import not_interpreted

BRAIN, FULL = torch.bfloat16, torch.float32
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def select(requested: str, size: int = 10, device: torch.device = CPU) -> str:
    """An operator with two fast backends: one for odd sizes, and one that takes all sizes and gains from 5 on."""
    candidates: tuple[Candidate[int], ...] = (
        Candidate("odd", None, lambda size: None if size % 2 else f"size: expected an odd one, got {size}", bool),
        Candidate("gpu", "triton", lambda size: None, lambda size: size >= 5),
    )
    return select_backend("the operator", requested, device, size, candidates, ("naive", "slow"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pretended GPU with all that kernels need."""
    monkeypatch.setattr(dispatch, "device_reason", lambda index: None)
    monkeypatch.setattr(dispatch, "missing", lambda compiler: None)
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    dispatch._warn_once.cache_clear()
    return monkeypatch


def test_auto_takes_the_first_backend_that_can_run_and_gains(machine: pytest.MonkeyPatch) -> None:
    assert [select("auto", size, CUDA) for size in (3, 4, 6)] == ["odd", "naive", "gpu"]
    assert [select("auto", size, CPU) for size in (3, 6)] == ["odd", "naive"]


@not_interpreted
def test_a_named_backend_runs_or_says_why_it_cannot(machine: pytest.MonkeyPatch) -> None:
    assert [select(name, 3, CUDA) for name in ("naive", "slow", "odd", "gpu")] == ["naive", "slow", "odd", "gpu"]
    with pytest.raises(KernelError, match=r"backend: 'odd' cannot run this call of the operator; size.*got 4.*'naive'"):
        select("odd", 4)
    with pytest.raises(KernelError, match=r"'gpu' cannot run.*device: expected a CUDA device, got the CPU"):
        select("gpu")
    with pytest.raises(KernelError, match=r"'gpu' cannot run.*device: expected a CUDA device, got mps"):
        select("gpu", device=torch.device("mps"))
    with pytest.raises(InputError, match="backend: expected one of auto, naive, slow, odd, gpu, got 'fast'"):
        select("fast")


def test_one_switch_turns_all_kernels_off_unless_they_are_named(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("TCNCA_KERNELS", "off")
    assert [select(name, 9, CUDA) for name in ("auto", "odd", "gpu")] == ["naive", "odd", "gpu"]
    machine.setenv("TCNCA_KERNELS", "plain")
    with pytest.raises(ConfigError, match="TCNCA_KERNELS: expected auto or off in the environment, got 'plain'"):
        select("auto")


def test_an_old_gpu_runs_pytorch_silently(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(dispatch, "device_reason", lambda index: "device: too old")
    assert select("auto", 6, CUDA) == "naive"
    with pytest.raises(KernelError, match="device: too old"):
        select("gpu", 6, CUDA)


def test_a_missing_package_is_reported_once_for_each_operator(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(dispatch, "missing", lambda compiler: f"{compiler}: not installed")
    for op in ("the EMA", "attention"):
        with pytest.warns(RuntimeWarning, match=rf"triton: not installed\. Until then {op} runs.*TCNCA_KERNELS=off"):
            assert not dispatch.should_use("triton", CUDA, op)
        assert not dispatch.should_use("triton", CUDA, op)
    assert dispatch.unsupported_reason("triton", CUDA) == "triton: not installed"


def test_a_device_without_an_nvidia_gpu_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.device_reason.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5) if index else (8, 0))
    assert dispatch.device_reason(0) is None
    assert dispatch.device_reason(1) == "device: expected compute capability 8.0 or higher, got T4 with 7.5"
    dispatch.device_reason.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert dispatch.device_reason(0) == "device: expected an NVIDIA GPU, PyTorch finds none"
    dispatch.device_reason.cache_clear()


def test_a_gpu_of_amd_runs_pytorch_with_one_message(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.version, "hip", "6.4")
    with pytest.warns(RuntimeWarning, match=r"expected an NVIDIA GPU.*got one of AMD.*TCNCA_KERNELS=off"):
        assert select("auto", 6, CUDA) == "naive"
    assert not dispatch.should_use("nvrtc", CUDA, "another operator")  # a second warning would be an error
    machine.undo()
    machine.setattr(torch.version, "hip", "6.4")
    dispatch.device_reason.cache_clear()
    with pytest.raises(KernelError, match=r"'gpu' cannot run.*got one of AMD.*Use 'auto' or 'naive'"):
        select("gpu", 6, CUDA)
    dispatch.device_reason.cache_clear()


def test_transforms_are_noticed() -> None:
    reasons: list[Any] = []

    def loss(x: Tensor) -> Tensor:
        reasons.append(dispatch.transform_reason())
        return x.sum()

    x = torch.randn(3)
    loss(x)
    torch.func.grad(loss)(x)
    torch.func.jvp(loss, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(x, x))
    assert reasons[0] is None
    assert all("torch.func" in reason for reason in reasons[1:]), reasons


def test_selection_compiles_into_the_graph(machine: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Tensor:
        return x + 1 if select("auto", x.shape[0], x.device) == "odd" else x - 1

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert [float(compiled(torch.zeros(size))[0]) for size in (3, 4, 6)] == [1.0, -1.0, -1.0]


class Driver:
    """A pretended driver that keeps what it is asked to do."""

    def __init__(self, launch_error: int = 0) -> None:
        self.calls: list[Any] = []
        self.mode, self.launch_error, self.as_struct = 0, launch_error, True

    def launched(self, kind: str, fixed: tuple[Any, ...], stream: int, arguments: Any) -> int:
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        addresses = [(pointers[0] or 0) + 8 * i for i in range(4)] if self.as_struct else pointers[:4]
        words = [ctypes.c_int64.from_address(address or 0).value for address in addresses]
        self.calls.append((kind, [part.value for part in fixed], stream, words))
        return self.launch_error

    def cuLaunchKernel(self, *given: Any) -> int:  # noqa: N802
        assert given[-1] is None
        return self.launched("plain", given[:8], *given[8:10])

    def cuLaunchCooperativeKernel(self, *given: Any) -> int:  # noqa: N802
        return self.launched("cooperative", given[:8], *given[8:])

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        if self.mode != 2:
            return 900  # as while a graph is captured
        self.calls.append(image[:4])
        module._obj.value = 5
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        self.calls.append((module.value, name))
        function._obj.value = 6
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:  # noqa: N802
        self.calls.append("prefer shared")
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self.calls.append((function.value, attribute, value))
        return 0 if value <= 200_000 else 1

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, value: Any, function: Any, *given: int) -> int:  # noqa: N802
        value._obj.value = sum(given)
        return 0

    def cuGetErrorName(self, error: int, name: Any) -> None:  # noqa: N802
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}[error]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(driver, "library", lambda: found)
    return found


def test_a_function_is_loaded_even_while_a_graph_is_captured(pretended: Driver) -> None:
    function = driver.Function(b"\x7fELF...", "scan")
    assert pretended.calls == [b"\x7fELF", (5, b"scan")]
    assert (function.handle, pretended.mode) == (6, 0)
    assert function.resident_blocks(128) == 128


def test_much_shared_memory_is_asked_for(pretended: Driver) -> None:
    driver.Function(b"\x7fELF", "scan", 100_000)
    assert pretended.calls[2:] == [(6, 8, 100_000)]
    driver.Function(b"\x7fELF", "scan", 100_000, prefer_shared=True)
    assert pretended.calls[5:] == ["prefer shared", (6, 8, 100_000)]
    with pytest.raises(KernelError, match=r"scan 300000 bytes of shared memory: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.Function(b"\x7fELF", "scan", 300_000)


@pytest.mark.parametrize("as_struct", [False, True], ids=["arguments", "structure"])
@pytest.mark.parametrize("cooperative", [False, True], ids=["plain", "cooperative"])
def test_a_launch_passes_addresses_and_numbers(pretended: Driver, as_struct: bool, cooperative: bool) -> None:
    function, pretended.as_struct = driver.Function(b"\x7fELF", "scan", 1000), as_struct
    pretended.calls.clear()
    launch = driver.Launch(function, (5, 2, 1), (64, 1, 1), 2, (-3, 0.7), as_struct=as_struct, cooperative=cooperative)
    launch(11, 1000, 2000)
    launch(12, 3000, 4000)
    packed, size = (struct.pack("<d", 0.7), "<q") if as_struct else (struct.pack("<f", 0.7), "<i")
    numbers = [-3, struct.unpack(size, packed)[0]]
    kind = "cooperative" if cooperative else "plain"
    assert pretended.calls == [
        (kind, [6, 5, 2, 1, 64, 1, 1, 1000], 11, [1000, 2000, *numbers]),
        (kind, [6, 5, 2, 1, 64, 1, 1, 1000], 12, [3000, 4000, *numbers]),
    ]


def test_a_launch_that_fails_says_why(pretended: Driver) -> None:
    launch = driver.Launch(driver.Function(b"\x7fELF", "scan"), (1, 1, 1), (32, 1, 1), 1, ())
    pretended.launch_error = 700
    with pytest.raises(
        KernelError, match=r"launch the kernel scan: CUDA_ERROR_ILLEGAL_ADDRESS \(700\); set TCNCA_KERNELS=off"
    ):
        launch(0, 0)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pretended: Driver) -> Iterator[Any]:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = importlib.import_module("tcnca.ops.launcher")
    plans = [importlib.import_module(f"tcnca.ops.{name}.triton_launch") for name in ("ema", "attention")]
    caches = [
        module.load_kernel,
        *(getattr(plan, name) for plan in plans for name in ("forward_plan", "backward_plan")),
    ]
    for cache in caches:
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


class Kernel:
    """A pretended kernel."""

    __name__ = "pretended"

    def __init__(self, *names: str) -> None:
        self.arg_names = list(names)


@not_interpreted
def test_a_kernel_is_loaded_on_the_device_that_is_named(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, pretended: Driver
) -> None:
    """A module belongs to the device that is current when it is loaded."""
    current = [0]

    @contextlib.contextmanager
    def enter(device: int) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def load(*_: Any, **__: Any) -> int:
        return current[-1]

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(driver, "Function", load)
    metadata = SimpleNamespace(name="pretended", shared=0)
    monkeypatch.setattr(launcher, "compile_kernel", lambda *_: SimpleNamespace(metadata=metadata, asm={"cubin": b""}))
    build = launcher.Build(Kernel("x"), ("*fp32",), (), 4, 3, None)
    assert [launcher.load_kernel(build, device) for device in (1, 0, 1)] == [1, 0, 1]
    assert current == [0]


@not_interpreted
def test_arguments_get_the_types_of_their_names(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, pretended: Driver
) -> None:
    asked: list[Any] = []

    def load(build: Any, device: int) -> driver.Function:
        asked.append(build)
        return driver.Function(b"\x7fELF", "pretended", 1000)

    monkeypatch.setattr(launcher, "load_kernel", load)
    kernel = Kernel("x", "y", "x_by_row", "time", "scale", "HIDDEN")
    launch = launcher.Launch(
        kernel, (5, 2), (FULL, BRAIN), (2**40, -3, 0.7), {"HIDDEN": 4}, device=0, num_warps=2, num_stages=2
    )
    assert asked == [(kernel, ("*fp32", "*bf16", "i64", "i32", "fp32"), (("HIDDEN", 4),), 2, 2, None)]
    x, y, pretended.as_struct = torch.zeros(3), torch.zeros(2).bfloat16(), False
    launch(11, x, y)
    expected = ("plain", [6, 5, 2, 1, 64, 1, 1, 1000], 11, [x.data_ptr(), y.data_ptr(), 2**40, -3])
    assert pretended.calls[-1] == expected
    # Nothing is launched for an empty grid.
    launcher.Launch(Kernel("x"), (0, 2), (FULL,), (), {}, device=0, num_warps=2)(0, torch.zeros(0))
    assert pretended.calls[-1] != expected
    assert sum(call[0] == "plain" for call in pretended.calls) == 1


def prepare(launcher: Any, block: int = 128) -> Any:
    kernels: Any = importlib.import_module("tcnca.ops.ema.triton_kernels")
    constants = (("HIDDEN", 4), ("SCALE", 0.5), ("BLOCK", block))
    return launcher.Build(kernels.prepare, ("*fp32",) * 5 + ("i32",), constants, 4, 3, None)


@not_interpreted
def test_a_kernel_that_triton_cannot_compile_is_named(launcher: Any) -> None:
    with pytest.raises(KernelError, match=r"Triton: cannot compile the kernel prepare; set TCNCA_KERNELS=off"):
        launcher.compile_kernel(prepare(launcher, block=3), 90)


def plan_ema(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    plan: Any = importlib.import_module("tcnca.ops.ema.triton_launch")
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132)
    # What is unrolled takes long to compile, and changes no argument.
    for name in ("ENDS_GROUP", "OUTPUTS_GROUP", "WEIGHTS_GROUP"):
        monkeypatch.setattr(plan, name, 1)
    dtype, initial = (FULL, FULL) if streams else (BRAIN, None)
    skip = (FULL, True, True) if streams else (None, False, False)
    signature = plan.Signature((2, 300, 40), 1, 4, dtype, (FULL,) * 4, initial, streams, streams, *skip, 0)
    plan.forward_plan(signature, (300 * 40, 40, 1))
    plan.backward_plan(signature, (300 * 40, 40, 1), (0, 0, 0), dtype)


def plan_attention(monkeypatch: pytest.MonkeyPatch, options: bool, gap: int = 0, backward: bool = True) -> None:
    plan: Any = importlib.import_module("tcnca.ops.attention.triton_launch")
    monkeypatch.setattr(plan, "max_shared_memory", lambda device: 99 * 1024)
    lengths, dropout = (torch.int32, 0.1) if options else (None, 0.0)
    strides = (32 + gap, 32, 64)
    signature = plan.Signature(2, 300, 32, 64, strides, BRAIN, 120, lengths, 64, True, "softmax", dropout, 0)
    plan.forward_plan(signature)
    if backward:
        plan.backward_plan(signature, 64, True)


def compiled(launcher: Any, monkeypatch: pytest.MonkeyPatch, capability: int) -> dict[str, Any]:
    """By kernel, how it was built and what Triton made of it, filled while plans are made."""
    found = {}

    def load(build: Any, device: int) -> driver.Function:
        machine_code = launcher.compile_kernel(build, capability)
        found[build.kernel.__name__] = (build, machine_code)
        return driver.Function(b"\x7fELF", build.kernel.__name__)

    monkeypatch.setattr(launcher, "load_kernel", load)
    return found


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "options"), [(90, False), (80, True)])
def test_machine_code_takes_the_arguments_that_it_is_given(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, capability: int, options: bool
) -> None:
    found = compiled(launcher, monkeypatch, capability)
    plan_ema(monkeypatch, options)
    plan_attention(monkeypatch, options)
    scans = {"carry", "ends", "outputs", "prepare", "reduce", "weights"}
    assert set(found) == scans | {"attended", "bias_gradient", "row_sums", "rows_gradient", "scores_gradient"}
    for build, machine_code in found.values():
        (entry,) = re.findall(r"\.entry\s+\w+\(([^)]*)\)", machine_code.asm["ptx"])
        sizes = [int(bits) for bits in re.findall(r"\.param \.[bfsu](\d+)", entry)]
        known = [32 if kind in ("i32", "fp32") else 64 for kind in build.types]
        # Triton's own follow: addresses of memory that is not asked for.
        assert sizes[: len(known)] == known
        assert all(size == 64 for size in sizes[len(known) :])
        assert len(sizes) - len(known) <= launcher.SCRATCH_ARGUMENTS


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("gap", "wide"), [(8, True), (4, False)])
def test_aligned_rows_are_copied_16_bytes_at_a_time(
    launcher: Any, monkeypatch: pytest.MonkeyPatch, gap: int, wide: bool
) -> None:
    found = compiled(launcher, monkeypatch, 90)
    plan_attention(monkeypatch, options=False, gap=gap, backward=False)
    build, machine_code = found["attended"]
    assert build.stride_divisor == (8 if wide else 1)
    assert bool(re.search(r"cp\.async.*0x10", machine_code.asm["ptx"])) == wide


def test_what_does_not_start_at_16_bytes_is_copied(launcher: Any) -> None:
    rows: Any = importlib.import_module("tcnca.ops.attention.triton_launch").regular_rows
    room = torch.randn(2, 6, 40)
    for part in (room, room[..., 4:]):
        assert rows(part) is part
    odd = room[..., 2:10]
    for copied in (rows(odd), launcher.aligned(odd), rows(room.flatten()[1:17].view(1, 2, 8))):
        assert copied.data_ptr() % 16 == 0
        assert copied.is_contiguous()
    assert torch.equal(rows(odd), odd)
    # Contiguous already, but not aligned.
    late = torch.randn(9)[1:]
    assert torch.equal(launcher.aligned(late), late)
    assert launcher.aligned(late).data_ptr() % 16 == 0
