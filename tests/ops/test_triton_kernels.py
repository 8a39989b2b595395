"""What kernels in Triton share: whether a machine can run them, what Triton makes of them, and how they are started."""

from __future__ import annotations

import ctypes
import importlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnca.errors import ConfigError, KernelError
from tcnca.ops import kernels
from tests.ops.interpreter import not_interpreted

BRAIN, FULL = torch.bfloat16, torch.float32


class Machine:
    """A pretended GPU: answers of the module that asks for the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unable: str | None = None, lacking: str | None = None) -> None:
        self.module = importlib.import_module("tcnca.ops.triton_kernels.machine")
        monkeypatch.setattr(self.module, "_unable", lambda device: unable)
        monkeypatch.setattr(self.module, "_lacking", lambda: lacking)
        kernels.warn.cache_clear()


def test_a_gpu_with_triton_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch).module
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    assert machine.worth_it(0, "the EMA")
    assert machine.why_not_here(0) is None


def test_one_switch_turns_all_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch).module
    monkeypatch.setenv("TCNCA_KERNELS", "plain")
    assert not machine.worth_it(0, "attention")
    # Who asks for the kernels by name gets them.
    assert machine.why_not_here(0) is None
    monkeypatch.setenv("TCNCA_KERNELS", "slow")
    with pytest.raises(ConfigError, match=r"TCNCA_KERNELS: got 'slow'.*allowed are auto, plain"):
        machine.worth_it(0, "attention")


def test_an_old_gpu_is_left_alone_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, unable="device: got an old one").module
    assert not machine.worth_it(0, "the EMA")
    assert machine.why_not_here(0) == "device: got an old one"


def test_what_is_to_be_installed_is_said_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lacking="Triton: is not installed").module
    for what in ("the EMA", "attention"):
        with pytest.warns(
            RuntimeWarning, match=rf"Triton: is not installed\. Until then {what} runs in plain.*TCNCA_KERNELS=plain"
        ):
            assert not machine.worth_it(0, what)
        assert not machine.worth_it(0, what)
    assert machine.why_not_here(0) == "Triton: is not installed"


@not_interpreted
def test_a_cpu_is_not_enough() -> None:
    machine = importlib.import_module("tcnca.ops.triton_kernels.machine")
    assert machine.why_not_here(None) == "device: got a CPU, allowed is a CUDA device"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("tcnca.ops.triton_kernels.start")
    caches = [getattr(importlib.import_module(f"tcnca.ops.{name}.plan"), way) for name, way in PLANS]
    for cache in (module.loaded, *caches):
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


PLANS = [(name, way) for name in ("ema.scan", "attention.triton") for way in ("forward", "backward")]


def plan_ema(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    plan: Any = importlib.import_module("tcnca.ops.ema.scan.plan")
    monkeypatch.setattr(plan, "_processors", lambda device: 132)
    # What is unrolled takes long to compile, and changes no argument.
    for name in ("ENDS_GROUP", "OUTPUTS_GROUP", "WEIGHTS_GROUP"):
        monkeypatch.setattr(plan, name, 1)
    dtype, initial = (FULL, FULL) if streams else (BRAIN, None)
    call = plan.Call((2, 300, 40), 1, 4, dtype, (FULL,) * 4, initial, streams, streams, 0)
    plan.forward(call, (300 * 40, 40, 1))
    plan.backward(call, (300 * 40, 40, 1), (0, 0, 0), dtype)


def plan_attention(monkeypatch: pytest.MonkeyPatch, options: bool, gap: int = 0) -> None:
    plan: Any = importlib.import_module("tcnca.ops.attention.triton.plan")
    monkeypatch.setattr(plan, "memory_of", lambda device: 99 * 1024)
    lengths, dropout = (torch.int32, 0.1) if options else (None, 0.0)
    strides = (32 + gap, 32, 64)
    call = plan.Call(2, 300, 32, 64, strides, BRAIN, 120, lengths, 64, True, "softmax", dropout, 0)
    plan.forward(call)
    plan.backward(call, 64, True)


def compiled(start: Any, monkeypatch: pytest.MonkeyPatch, capability: int) -> dict[str, Any]:
    """By kernel, how it was built and what Triton made of it, filled while plans are made."""
    found = {}

    def load(made: Any, device: int) -> tuple[int, int, int]:
        machine_code = start.compiled(made, capability)
        found[made.kernel.__name__] = (made, machine_code)
        return 0, 32 * made.warps, machine_code.metadata.shared

    monkeypatch.setattr(start, "loaded", load)
    monkeypatch.setattr(start, "driver", Driver)
    return found


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "options"), [(90, False), (80, True)])
def test_machine_code_takes_the_arguments_that_it_is_given(
    start: Any, monkeypatch: pytest.MonkeyPatch, capability: int, options: bool
) -> None:
    found = compiled(start, monkeypatch, capability)
    plan_ema(monkeypatch, options)
    plan_attention(monkeypatch, options)
    scans = ["carry", "ends", "outputs", "prepare", "reduce", "weights"]
    assert sorted(found) == sorted(
        [*scans, "attended", "bias_gradient", "row_sums", "rows_gradient", "scores_gradient"]
    )
    for made, machine_code in found.values():
        (entry,) = re.findall(r"\.entry\s+\w+\(([^)]*)\)", machine_code.asm["ptx"])
        sizes = [int(bits) for bits in re.findall(r"\.param \.[bfsu](\d+)", entry)]
        known = [32 if kind in ("i32", "fp32") else 64 for kind in made.types]
        # Triton's own follow: addresses of memory that is not asked for.
        assert sizes[: len(known)] == known
        assert all(size == 64 for size in sizes[len(known) :])
        assert len(sizes) - len(known) <= start.SPARE


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("gap", "wide"), [(0, True), (8, True), (4, False)])
def test_aligned_rows_are_copied_16_bytes_at_a_time(
    start: Any, monkeypatch: pytest.MonkeyPatch, gap: int, wide: bool
) -> None:
    found = compiled(start, monkeypatch, 90)
    plan: Any = importlib.import_module("tcnca.ops.attention.triton.plan")
    monkeypatch.setattr(plan, "backward", lambda *given: None)
    plan_attention(monkeypatch, options=False, gap=gap)
    made, machine_code = found["attended"]
    assert made.multiple == (8 if wide else 1)
    assert bool(re.search(r"cp\.async.*0x10", machine_code.asm["ptx"])) == wide


class Driver:
    """A pretended driver that keeps what it was asked to start."""

    started: list[tuple[Any, ...]]

    def __init__(self) -> None:
        Driver.started = []

    def cuLaunchKernel(self, *given: Any) -> int:  # noqa: N802
        """Read the arguments as a kernel would."""
        *fixed, stream, addresses, extra = given
        pointers = ctypes.cast(addresses, ctypes.POINTER(ctypes.c_void_p))
        values = [ctypes.c_int64.from_address(pointers[i] or 0).value for i in range(9)]
        Driver.started.append(([part.value for part in fixed], stream, values, extra))
        return 0


class Kernel:
    """A pretended kernel."""

    __name__ = "pretended"

    def __init__(self, *names: str) -> None:
        self.arg_names = list(names)


@not_interpreted
def test_a_launch_hands_over_addresses_and_numbers(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(made: Any, device: int) -> tuple[int, int, int]:
        asked.append(made)
        return 77, 64, 1000

    monkeypatch.setattr(start, "loaded", load)
    monkeypatch.setattr(start, "driver", Driver)
    kernel = Kernel("x", "y", "x_by_row", "time", "scale", "HIDDEN")
    launch = start.Launch(kernel, (5, 2), (FULL, BRAIN), (2**40, -3, 0.7), {"HIDDEN": 4}, 2, 0, stages=2)
    assert asked == [(kernel, ("*fp32", "*bf16", "i64", "i32", "fp32"), (("HIDDEN", 4),), 2, 2, None)]
    first, second, third = torch.zeros(3), torch.zeros(2).bfloat16(), torch.zeros(3)
    launch(11, first, second)
    launch(12, third, second)
    handle = [77, 5, 2, 1, 64, 1, 1, 1000]
    (bits,) = struct.unpack("<i", struct.pack("<f", 0.7))
    numbers = [2**40, -3, bits, 0, 0, 0, 0]
    assert Driver.started == [
        (handle, 11, [first.data_ptr(), second.data_ptr(), *numbers], None),
        (handle, 12, [third.data_ptr(), second.data_ptr(), *numbers], None),
    ]


@not_interpreted
def test_nothing_is_started_for_no_work(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "loaded", lambda *given: (77, 64, 1000))
    monkeypatch.setattr(start, "driver", Driver)
    start.Launch(Kernel("x"), (0, 2), (FULL,), (), {}, 2, 0)(0, torch.zeros(0))
    assert Driver.started == []


class Loader:
    """A pretended driver that loads; the same everywhere."""

    seen: list[Any]
    mode = 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        Loader.mode, mode._obj.value = mode._obj.value, Loader.mode
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        if Loader.mode != 2:
            return 900  # as while a graph is captured
        Loader.seen.append(image[:4])
        module._obj.value = 5
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        Loader.seen.append((module.value, name))
        function._obj.value = 6
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        Loader.seen.append((function.value, attribute, value))
        return 0 if value <= 200_000 else 1

    def cuGetErrorName(self, error: int, name: Any) -> None:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def loading(start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    Loader.seen = []
    monkeypatch.setattr(start, "driver", Loader)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return start


def prepared(start: Any, block: int = 128) -> Any:
    kernels: Any = importlib.import_module("tcnca.ops.ema.scan.kernels")
    return start.build(kernels.prepare, (FULL,) * 5, (7,), {"HIDDEN": 4, "SCALE": 0.5, "BLOCK": block}, 4)


@not_interpreted
def test_machine_code_is_loaded_once(loading: Any) -> None:
    for _ in range(2):
        assert loading.loaded(prepared(loading), 0) == (6, 128, 0)
    assert Loader.seen == [b"\x7fELF", (5, b"prepare")]
    assert Loader.mode == 0


@not_interpreted
def test_much_shared_memory_is_asked_for(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        name, num_warps, shared = "attended", 8, 100_000

    class Code:
        asm, metadata = {"cubin": b"\x7fELF"}, Metadata

    monkeypatch.setattr(loading, "compiled", lambda made, capability: Code)
    assert loading.loaded(prepared(loading), 0) == (6, 256, 100_000)
    assert Loader.seen[-1] == (6, 8, 100_000)
    loading.loaded.cache_clear()
    Metadata.shared = 300_000
    with pytest.raises(KernelError, match=r"prepare, 300000 bytes of shared memory: CUDA_ERROR_INVALID_VALUE \(1\)"):
        loading.loaded(prepared(loading), 0)


@not_interpreted
def test_a_launch_that_fails_says_why(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def cuLaunchKernel(self, *given: Any) -> int:  # noqa: N802
            return 700

        def cuGetErrorName(self, error: int, name: Any) -> None:  # noqa: N802
            name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"

    monkeypatch.setattr(start, "loaded", lambda *given: (77, 64, 0))
    monkeypatch.setattr(start, "driver", Broken)
    launch = start.Launch(Kernel("x"), (1, 1), (FULL,), (), {}, 1, 0)
    with pytest.raises(KernelError, match=r"pretended: CUDA_ERROR_ILLEGAL_ADDRESS \(700\); TCNCA_KERNELS=plain"):
        launch(0, torch.zeros(1))


@not_interpreted
def test_a_kernel_that_triton_refuses_says_so(start: Any) -> None:
    with pytest.raises(KernelError, match=r"Triton could not compile the kernel prepare; TCNCA_KERNELS=plain"):
        start.compiled(prepared(start, block=3), 90)


def test_what_does_not_start_at_16_bytes_is_copied(start: Any) -> None:
    launch: Any = importlib.import_module("tcnca.ops.attention.triton.launch")
    room = torch.randn(2, 6, 40)
    for part in (room, room[..., 4:]):
        assert launch.rows(part) is part
    odd = room[..., 2:10]
    for copied in (launch.rows(odd), start.packed(odd), launch.rows(room.flatten()[1:17].view(1, 2, 8))):
        assert copied.data_ptr() % 16 == 0
        assert copied.is_contiguous()
    assert torch.equal(launch.rows(odd), odd)
    # Contiguous already, and yet not where it should be.
    late = torch.randn(9)[1:]
    assert torch.equal(start.packed(late), late)
    assert start.packed(late).data_ptr() % 16 == 0


def test_a_chunk_of_any_number_is_one_chunk() -> None:
    """Numbers of kernels have 32 bits; sizes beyond the sequence say no more than its length does."""
    plan: Any = importlib.import_module("tcnca.ops.attention.triton.plan")
    for chunk in (300, 2**31, 2**32, 2**63 - 1):
        call = plan.Call(2, 300, 32, 64, (32, 32, 64), BRAIN, None, None, chunk, True, "softmax", 0.0, None)
        assert plan._numbers(call)["size"] == 300
        assert call.chunks == 1
