"""The TCN's kernels, emulated on the CPU, against the naive version in float64."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.ops import tcn, zero_padding
from tcnca.ops.tcn.cuda import smem, tensor_core, tensor_core_pair
from tests.comparison import assert_close
from tests.ops import tcn_cases
from tests.ops.emulator import compile_kernels, emulated, needs_compiler
from tests.ops.tcn_cases import BF16, DROPOUT_CASES, FP16, FP32, KERNEL_CASES, assert_exact, assert_same_dropout

pytestmark = needs_compiler

Case = partial(tcn_cases.Case, shape=(2, 150, 16), dtype=BF16)
# A part of KERNEL_CASES takes long to emulate.
CASES = {
    "tensor cores": Case(shape=(2, 131, 24), kernel_size=17, factor=4, depth=2, bias=True, lengths=(131, 41)),
    "tensor cores, omega": Case(shape=(2, 131, 40), kernel_size=9, depth=2, omega=True, lengths=(131, 41)),
    "tensor cores, bidirectional": Case(causal=False, kernel_size=12, dtype=FP16, residual=False, activation="relu"),
    "tensor cores, long kernel": Case(
        shape=(2, 131, 40), kernel_size=31, depth=2, bias=True, omega=True, lengths=(131, 97)
    ),
    "registers": Case(shape=(2, 90, 6), causal=False, bias=True, lengths=(90, 7), activation="gelu"),
    "registers, float32": Case(omega=True, dtype=FP32, kernel_size=33, depth=1, activation="gelu_tanh"),
    "shared memory": Case(shape=(1, 150, 8), kernel_size=9, bias=True, omega=True, lengths=(140,)),
}


def _slow(cases: dict[str, tcn_cases.Case]) -> list[Any]:
    return [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in cases.items()]


@pytest.fixture(autouse=True)
def _long_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the gradients of long kernels on the tensor cores too."""
    monkeypatch.setattr(tensor_core, "MAX_BACKWARD", 9)


@pytest.fixture
def launched() -> Iterator[list[str]]:
    with emulated() as names:
        yield names


def _use(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave small calls to other kernels than those in shared memory, unless these are meant."""
    if family != "shared":
        monkeypatch.setattr(smem, "forward_fits", lambda call: False)
        monkeypatch.setattr(smem, "backward_fits", lambda call: False)


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_exact(name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    family = name.split()[0].rstrip(",")
    _use(family, monkeypatch)
    assert_exact(CASES[name])
    prefix = {"tensor": "tensor_core", "registers": "registers", "shared": "smem"}[family]
    assert set(launched) - {"sum_partials"} == {f"{prefix}_forward", f"{prefix}_backward"}


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("omega", [False, True], ids=["plain", "omega"])
@pytest.mark.parametrize("case", _slow(KERNEL_CASES))
def test_outputs_and_gradients_are_those_of_float64(case: tcn_cases.Case, omega: bool) -> None:
    assert_exact(dataclasses.replace(case, omega=omega))


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kernel_size", [1, 2, 9, 16, 17, 18, 31, 33])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_tensor_cores_are_exact(
    kernel_size: int, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use("tensor", monkeypatch)
    case = Case(shape=(2, 231, 16), kernel_size=kernel_size, depth=2, causal=causal, dtype=dtype)
    assert_exact(dataclasses.replace(case, bias=kernel_size % 3 != 0, residual=kernel_size % 2 == 1))


PAIRS = {
    "whole chains": Case(shape=(2, 131, 40), kernel_size=5, depth=4, bias=True, omega=True, lengths=(131, 41)),
    "segments": Case(shape=(1, 777, 8), kernel_size=17, factor=2, depth=2, residual=False, activation="none"),
    "bidirectional": Case(shape=(2, 131, 16), kernel_size=17, causal=False, depth=2, bias=True, lengths=(131, 60)),
    "bidirectional segments": Case(shape=(1, 700, 40), kernel_size=9, factor=2, causal=False, depth=4, omega=True),
    "bidirectional, even": Case(shape=(2, 300, 16), kernel_size=4, factor=5, causal=False, depth=2, dtype=FP16),
    "short chains": Case(shape=(2, 50, 16), kernel_size=9, factor=60, depth=4, strided=True),
    "one tap": Case(shape=(2, 300, 16), kernel_size=1, factor=3, depth=2, dtype=FP16, lengths=(0, 300)),
    "many sequences": Case(shape=(3, 400, 72), kernel_size=9, factor=4, depth=6, dtype=FP16, omega=True, bias=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at > 1 else ()) for at, name in enumerate(PAIRS)]
)
def test_pairs_of_blocks_are_exact(name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _use("tensor", monkeypatch)
    monkeypatch.setattr(tensor_core_pair, "ENABLED", True)
    if "segments" in name or name == "many sequences":
        monkeypatch.setattr(tensor_core_pair, "MAX_ROWS", 256)
    case = PAIRS[name]
    assert_exact(case)
    assert launched.count("tensor_core_pair") == case.depth  # twice half of the blocks
    assert "tensor_core_forward" not in launched
    with torch.no_grad():
        leaves = case.leaves()
        expected, _ = case.call([leaf.double() for leaf in leaves], "naive")
        assert_close(zero_padding(case.call(leaves, "cuda")[0], case.valid()), zero_padding(expected, case.valid()))


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("kernel_size", [2, 9, 17])
@pytest.mark.parametrize("omega", [False, True], ids=["plain", "omega"])
def test_the_gradients_of_long_kernels_suit_short_ones(
    kernel_size: int, omega: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use("tensor", monkeypatch)
    monkeypatch.setattr(tensor_core, "MAX_SHORT_BACKWARD", 1)
    monkeypatch.setattr(tensor_core, "long_depth", lambda block, memory: 2)
    assert_exact(Case(shape=(2, 231, 40), kernel_size=kernel_size, depth=2, omega=omega, residual=kernel_size == 9))


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(shape=(2, 60, 24), depth=2, bias=True), id="tensor cores"),
        pytest.param(Case(shape=(2, 60, 24), depth=2, bias=True, omega=True), id="tensor cores, omega"),
        *_slow(DROPOUT_CASES),
    ],
)
def test_forward_and_backward_drop_the_same(case: tcn_cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.shape[0] > 1:
        _use("tensor", monkeypatch)
    assert_same_dropout(case)


@pytest.mark.slow
def test_pairs_of_blocks_drop_the_same(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _use("tensor", monkeypatch)
    monkeypatch.setattr(tensor_core_pair, "ENABLED", True)
    assert_same_dropout(Case(shape=(2, 500, 40), kernel_size=9, factor=5, depth=2, bias=True))
    assert "tensor_core_pair" in launched


@pytest.mark.usefixtures("launched")
def test_pieces_equal_one_call() -> None:
    case = Case(shape=(2, 100, 6), depth=2, bias=True)
    x, weight, bias = (leaf.detach() for leaf in case.leaves())
    expected, _ = tcn(x.double(), weight.double(), 3, bias=bias.double(), backend="naive")
    state, pieces = None, []
    for part in x.split([30, 41, 29], 1):
        y, state = tcn(part, weight, 3, bias=bias, state=state, return_state=True, backend="cuda")
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), expected)


def _run(body: str, numbers: Tensor, threads: int = 64, shared: int = 1024) -> str:
    """Run a kernel on one block of threads, and return the emulator's message."""
    source = f"""#define DTYPE 1
    // A kernel with one argument.
    struct Args {{ float* numbers; }};
    extern "C" __global__ void kernel(const Args args) {{
        extern __shared__ __align__(128) char shared[];
        float* own = reinterpret_cast<float*>(shared);
        {body}
    }}"""
    launch: Any = ctypes.CDLL(compile_kernels(source).decode()).launch_kernel
    launch.restype = ctypes.c_char_p
    address = ctypes.c_int64(numbers.data_ptr())
    message = launch(ctypes.byref(address), (ctypes.c_uint * 8)(1, 1, 1, threads, 1, 1, shared, 0))
    return "" if message is None else message.decode()


SUM_OF_NEIGHBORS = "own[threadIdx.x] = threadIdx.x; {} args.numbers[threadIdx.x] = own[threadIdx.x ^ 33];"
COPY = """asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
    ::"r"(16 * threadIdx.x), "l"(args.numbers), "r"(16) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory"); {} args.numbers[threadIdx.x] = own[4 * threadIdx.x];"""


def test_the_emulator_finds_faults() -> None:
    """Missing barriers and waits, writes beyond shared memory, and threads that wait for ever."""
    numbers = torch.zeros(64)
    assert _run(SUM_OF_NEIGHBORS.format("__syncthreads();"), numbers) == ""
    assert numbers.tolist() == [float(i ^ 33) for i in range(64)]
    assert _run(SUM_OF_NEIGHBORS.format(""), numbers) == ""
    assert numbers.isnan().any()
    numbers.fill_(3.0)
    assert _run(COPY.format('asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");'), numbers) == ""
    assert numbers.tolist() == [3.0] * 64
    assert _run(COPY.format(""), numbers) == ""
    assert numbers.isnan().all()
    assert "beyond the end of shared memory" in _run("own[threadIdx.x] = 1.0f;", numbers, shared=128)
    assert "a thread ended while its warp" in _run("if (threadIdx.x) __syncwarp();", numbers)
    load = 'asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(own));'
    assert "deadlock" in _run(f"unsigned n; do {load} while (n);", numbers, threads=1)
