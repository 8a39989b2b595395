"""The Triton kernels of state-space models: when they are selected, and what they compute in Triton's interpreter."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tcnca.errors import KernelError
from tcnca.ops import SSMState, diagonal_scan, dispatch, ssm
from tests.comparison import assert_close
from tests.ops.interpreter import INTERPRETED, interpreted, not_interpreted
from tests.ops.properties import in_pieces
from tests.ops.ssm_cases import Case, assert_right, some_scan, some_ssm


@not_interpreted
def test_on_a_cpu_triton_is_refused() -> None:
    given, scanned = some_ssm("cpu", 2, 9, 3, 4), some_scan("cpu", 2, 9, 3)
    assert torch.equal(ssm(*given)[0], ssm(*given, backend="chunked")[0])
    assert torch.equal(diagonal_scan(*scanned)[0], diagonal_scan(*scanned, backend="scan")[0])
    with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*x: expected a CUDA.*'auto' or 'chunked'"):
        ssm(*given, backend="triton")
    with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*v: expected a CUDA.*'auto' or 'scan'"):
        diagonal_scan(*scanned, backend="triton")


def reason(x: Tensor, log_decay: Tensor, **options: Any) -> str | None:
    api: Any = importlib.import_module("tcnca.ops.ssm.api")
    usual = {"weight": log_decay, "lengths": None, "state": None, "return_state": False, "inplace": False}
    call = api.SSMCall(x, log_decay, **usual | options)
    candidates = api.SCAN_CANDIDATES if call.weight is None else api.SSM_CANDIDATES
    return candidates[0].unsupported_reason(call)


def test_unsupported_reasons_are_named() -> None:
    with torch._subclasses.FakeTensorMode():
        kinds: dict[str, Any] = {"device": "cuda", "dtype": torch.complex64}
        x, log_decay = torch.empty(2, 9, 3, device="cuda"), torch.empty(1, 3, 4, **kinds)
        v, decay = torch.empty(2, 9, 3, **kinds), torch.empty(3, **kinds)
        hidden = torch.empty(2, 3, 4, 2, device="cuda", dtype=torch.float64)
        found = [
            reason(x, log_decay),
            reason(v, decay, weight=None),
            reason(x.double(), log_decay),
            reason(x, log_decay.to(torch.complex128)),
            reason(x, log_decay, state=SSMState(hidden, torch.empty(2, device="cuda"))),
            reason(x, log_decay, lengths=torch.empty(2)),
            reason(x, torch.empty(1, 3, 65, **kinds)),
            reason(v.to(torch.complex128), decay, weight=None),
        ]
    words = [*["got torch.float64"] * 3, "device: .*got cpu", "at most 64", "got torch.float64"]
    assert found[:2] == [None, None]
    for text, word in zip(found[2:], words, strict=True):
        assert text is not None
        assert re.search(word, text), text


@not_interpreted
@pytest.mark.parametrize(
    ("sizes", "segments", "length"),
    [((8, 131072, 512), 16, 128), ((8, 8192, 512), 16, 8), ((1, 8192, 64), 32, 4), ((256, 100, 9), 1, 2)],
    ids=str,
)
def test_time_is_cut_into_as_many_segments_as_fit(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], segments: int, length: int
) -> None:
    pytest.importorskip("triton")
    plan: Any = importlib.import_module("tcnca.ops.ssm.triton_launch")
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132)
    assert plan.cut_blocks(*sizes, plan.HALF_CONFIG, 0) == (segments, length)
    count, tokens = plan.cut_tokens(*sizes, 0)
    assert (count - 1) * tokens < sizes[1] <= count * tokens
    assert tokens % plan.GROUP == tokens % plan.GRADIENT_GROUP == 0


# What follows runs in the interpreter.
@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        return
    builder: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    multiply = builder.create_dot
    # The interpreter multiplies the bits of bfloat16 as integers.
    monkeypatch.setattr(
        builder, "create_dot", lambda self, a, b, *rest: multiply(self, _widened(a), _widened(b), *rest)
    )


def _widened(handle: Any) -> Any:
    import numpy
    import triton.language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return type(handle)((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make programs so small that few numbers have several blocks, segments and tiles."""
    plan: Any = importlib.import_module("tcnca.ops.ssm.triton_launch")
    for name in ("HALF_CONFIG", "FULL_CONFIG", "LEAN_CONFIG"):
        monkeypatch.setattr(plan, name, getattr(plan, name)._replace(block=16, rows=16))
    sizes = {"MIN_TOKENS": 16, "CHANNELS": 4, "SSM_CARRY": (2, 4), "SCAN_CARRY": (2, 4)}
    scan = {"TILE": 4, "MIN_SEGMENT": 4, "GROUP": 4, "GRADIENT_GROUP": 2}
    for name, value in (sizes | scan).items():
        monkeypatch.setattr(plan, name, value)
    _forget_plans()
    yield
    _forget_plans()


def _forget_plans() -> None:
    plan: Any = importlib.import_module("tcnca.ops.ssm.triton_launch")
    for cached in (plan.ssm_plan, plan.weights_launches, plan.scan_plan):
        cached.cache_clear()


in_small_programs = pytest.mark.usefixtures("small")


# As small as the interpreter is slow, yet with more than one segment, block and tile, and multiples of none.
CASES = [
    Case("ssm", 3, 70, 3, 4, lengths=True, state=True, final=True, strided=True),
    Case("ssm", 2, 37, 5, 3, directions=2, lengths=True, expanded=True),
    Case("ssm", 1, 150, 1, 2, state=True, slow=True),
    Case("scan", 3, 19, 5, lengths=True, state=True, final=True, strided=True),
    Case("scan", 2, 13, 3, directions=2, lengths=True, expanded=True),
    Case("scan", 1, 150, 2, state=True, slow=True),
]
MORE_CASES = [
    Case("ssm", 1, 1, 1, 1),
    Case("ssm", 17, 33, 2, 17, dtype=torch.bfloat16, final=True),
    Case("ssm", 2, 40, 4, 2, directions=2, dtype=torch.bfloat16),
    Case("ssm", 2, 33, 2, 3, dtype=torch.float16, lengths=True, state=True, strided=True),
    Case("scan", 2, 2, 9, final=True),
    Case("scan", 1, 8, 4, directions=2),
]


@interpreted
@in_small_programs
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_output_state_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cpu")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_of_the_usual_size_are_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = importlib.import_module("tcnca.ops.ssm.triton_launch")
    # The interpreter scans number by number.
    monkeypatch.setattr(plan, "SSM_CARRY", (2, 2))
    # Nine blocks of 32 tokens, or five of 64.
    assert_right(Case("ssm", 2, 270, 1, 2, dtype=dtype), "cpu")


@interpreted
@pytest.mark.slow
def test_programs_of_gpus_with_less_shared_memory_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = importlib.import_module("tcnca.ops.ssm.triton_launch")
    monkeypatch.setattr(plan, "max_shared_memory", lambda device: 99 * 1024)
    monkeypatch.setattr(plan, "SSM_CARRY", (2, 2))
    _forget_plans()
    assert_right(Case("ssm", 2, 70, 1, 33, dtype=torch.bfloat16), "cpu")
    _forget_plans()


@interpreted
@pytest.mark.slow
def test_scans_of_the_usual_size_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("tcnca.ops.ssm.triton_launch"), "SCAN_CARRY", (2, 16))
    assert_right(Case("scan", 2, 270, 33, state=True), "cpu")


@interpreted
@in_small_programs
def test_pieces_equal_one_call() -> None:
    x, *parameters = some_ssm("cpu", 2, 40, 1, 2)
    v, log_decay = some_scan("cpu", 2, 40, 2)
    runs = (partial(_run_ssm, parameters=parameters), x), (partial(_run_scan, log_decay=log_decay), v)
    for run, whole in runs:
        expected, last = run(whole, backend="recurrent", return_state=True)
        found, state = in_pieces(partial(run, backend="triton"), [whole], [3, 1, 17, 19])
        assert last is not None
        assert_close(_pairs(found), _pairs(expected))
        assert_close(state.tensors()["hidden"], last.hidden)


def _run_ssm(x: Tensor, parameters: list[Tensor], **options: Any) -> tuple[Tensor, SSMState | None]:
    return ssm(x, *parameters, **options)


def _run_scan(v: Tensor, log_decay: Tensor, **options: Any) -> tuple[Tensor, SSMState | None]:
    return diagonal_scan(v, log_decay, **options)


def _pairs(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


@interpreted
@in_small_programs
def test_padding_may_hold_anything_and_autocast_changes_nothing() -> None:
    x, *parameters = some_ssm("cpu", 2, 20, 2, 2, 2)
    v, log_decay = some_scan("cpu", 2, 9, 2)
    for run, given, length in (
        (partial(_run_ssm, parameters=parameters), x, 18),
        (partial(_run_scan, log_decay=log_decay), v, 3),
    ):
        lengths = torch.tensor([given.shape[1], length], dtype=torch.int32)
        expected, _ = run(given, backend="triton", lengths=lengths)
        given[1, length:] = float("nan")
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = run(given.requires_grad_(), backend="triton", lengths=lengths)
        assert torch.equal(y, expected)
        (gradient,) = torch.autograd.grad(_pairs(y).sum(), given)
        assert not gradient[1, length:].any()
        assert gradient[1, :length].isfinite().all()
        assert gradient[1, :length].any()


@interpreted
@in_small_programs
def test_conjugate_views() -> None:
    x, log_decay, weight = some_ssm("cpu", 1, 5, 1, 2)
    v, other = some_scan("cpu", 1, 5, 2)
    found = ssm(x, log_decay.conj(), weight.conj(), backend="triton")[0]
    assert torch.equal(found, ssm(x, log_decay.conj_physical(), weight.conj_physical(), backend="triton")[0])
    h = diagonal_scan(v.conj(), other.conj(), backend="triton")[0]
    assert torch.equal(h, diagonal_scan(v.conj_physical(), other.conj_physical(), backend="triton")[0])


@interpreted
@in_small_programs
def test_no_rows() -> None:
    x, *parameters = (part.requires_grad_() for part in some_ssm("cpu", 0, 5, 2, 2))
    v, log_decay = (part.requires_grad_() for part in some_scan("cpu", 0, 5, 2))
    y, _ = ssm(x, *parameters, backend="triton")
    h, _ = diagonal_scan(v, log_decay, backend="triton")
    assert (y.shape, h.shape) == (x.shape, v.shape)
    for gradient in torch.autograd.grad(y.sum() + h.real.sum(), [x, *parameters, v, log_decay]):
        assert not gradient.any()


@interpreted
@in_small_programs
def test_gradients_are_the_same_under_activation_checkpointing() -> None:
    given = [part.requires_grad_() for part in some_ssm("cpu", 1, 5, 1, 2)]
    scanned = [part.requires_grad_() for part in some_scan("cpu", 1, 5, 2)]
    for run, leaves in ((ssm, given), (diagonal_scan, scanned)):
        call: Any = partial(run, *leaves, backend="triton")
        y, again = call()[0], checkpoint(lambda call=call: call()[0], use_reentrant=False)
        for found, expected in zip(
            *(torch.autograd.grad(each.abs().sum(), leaves) for each in (again, y)), strict=True
        ):
            assert torch.equal(found, expected)


@interpreted
@in_small_programs
def test_second_derivatives_are_refused() -> None:
    x, *parameters = (part.requires_grad_() for part in some_ssm("cpu", 1, 5, 1, 2))
    v, log_decay = (part.requires_grad_() for part in some_scan("cpu", 1, 5, 2))
    y, h = ssm(x, *parameters, backend="triton")[0], diagonal_scan(v, log_decay, backend="triton")[0]
    for output, given, other in ((y, x, "chunked"), (h.real, v, "scan")):
        (gradient,) = torch.autograd.grad(output.sum(), given, create_graph=True)
        with pytest.raises(KernelError, match=rf"expected first derivatives only.*backend='{other}'"):
            gradient.abs().square().sum().backward()


@interpreted
@in_small_programs
@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["from the start", "from state to state"])
def test_opcheck(streams: bool) -> None:
    draw = torch.randn
    rest = (draw(2, 2, 3, 2, requires_grad=True), torch.tensor([3, 1])) if streams else (None, None)
    x, *parameters = (draw(size, requires_grad=True) for size in ((2, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)))
    torch.library.opcheck(torch.ops.tcnca.ssm.default, (x, *parameters, *rest))
    v, log_decay = (draw(size, requires_grad=True) for size in ((2, 3, 4, 2), (4, 2)))
    rest = (draw(2, 4, 2, requires_grad=True), torch.tensor([3, 1])) if streams else (None, None)
    torch.library.opcheck(torch.ops.tcnca.diagonal_scan.default, (v, log_decay, *rest, not streams))


@interpreted
@in_small_programs
@pytest.mark.slow
def test_auto_compiles_into_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    # The answers are those of a machine with a GPU.
    monkeypatch.setattr(dispatch, "device_reason", lambda index: None)
    monkeypatch.setattr(dispatch, "missing", lambda compiler: None)
    monkeypatch.setattr(dispatch, "should_use", lambda compiler, device, op: True)
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    _, log_decay, weight = (part.requires_grad_() for part in some_ssm("cpu", 1, 1, 2, 2))
    _, other = (part.requires_grad_() for part in some_scan("cpu", 1, 1, 2))

    def function(x: Tensor, backend: Any) -> Tensor:
        y, _ = ssm(x.sin(), log_decay, weight, backend=backend)
        h, _ = diagonal_scan(torch.complex(y, x), other, backend=backend)
        return h.real + h.imag

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(partial(function, backend="auto"), fullgraph=True, dynamic=True, backend=counter)
    leaves = [log_decay, weight, other]
    for time in (5, 19, 6):
        x = torch.randn(2, time, 2, requires_grad=True)
        y, expected = run(x), function(x, "triton")
        assert_close(y, expected)
        ours, theirs = (torch.autograd.grad(part.sum(), [x, *leaves]) for part in (y, expected))
        for mine, same in zip(ours, theirs, strict=True):
            assert_close(_pairs(mine), _pairs(same))
    assert counter.frame_count == 1
