"""The Triton scan of the EMA: when it is selected, and what it computes in Triton's interpreter."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tcnca import ConfigError, EMAConfig
from tcnca.errors import KernelError
from tcnca.ops import EMAState, dispatch, ema
from tests.comparison import assert_close
from tests.ops.ema_cases import Case, assert_right, some
from tests.ops.interpreter import INTERPRETED, interpreted, not_interpreted


def test_a_truncated_configuration_refuses_triton() -> None:
    with pytest.raises(ConfigError, match=r"backend: expected .* with truncation 3, got 'triton'"):
        EMAConfig(backend="triton", truncation=3)


@not_interpreted
def test_on_a_cpu_auto_is_chunked_and_triton_is_refused() -> None:
    arguments = some("cpu", (2, 9, 3), *[(1, 3, 4)] * 4)
    assert torch.equal(ema(*arguments)[0], ema(*arguments, backend="chunked")[0])
    with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*x: expected a CUDA.*'auto' or 'chunked'"):
        ema(*arguments, backend="triton")


def reason(x: Tensor, parameter: Tensor, **options: Any) -> str | None:
    api: Any = importlib.import_module("tcnca.ops.ema.api")
    usual = {"omega": None, "truncation": None, "lengths": None, "state": None}
    call = api.EMACall(x, (parameter,) * 4, activation="none", return_state=False, inplace=False, **usual | options)
    return api.CANDIDATES[0].unsupported_reason(call)


def test_unsupported_reasons_are_named() -> None:
    with torch._subclasses.FakeTensorMode():
        x, parameter = torch.empty(2, 9, 3, device="cuda"), torch.empty(1, 3, 4, device="cuda")
        hidden = torch.empty(2, 3, 4, device="cuda", dtype=torch.float64)
        found = [
            reason(x, parameter),
            reason(x, parameter, truncation=3),
            reason(x.double(), parameter),
            reason(x, parameter, state=EMAState(hidden, None, torch.empty(2, device="cuda"))),
            reason(x, parameter, omega=torch.empty(3, device="cuda", dtype=torch.float64)),
            reason(x, parameter, lengths=torch.empty(2)),
            reason(x, torch.empty(1, 3, 65, device="cuda")),
        ]
    words = ["truncation: ", *["got torch.float64"] * 3, "device: .*got cpu", "at most 64"]
    assert found[0] is None
    for text, word in zip(found[1:], words, strict=True):
        assert text is not None
        assert re.search(word, text), text


@not_interpreted
def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys\nsys.modules['triton'] = None\nimport torch\nfrom tcnca.ops import chunked_attention, ema\n"
        "ema(torch.randn(1, 4, 2), *[torch.randn(1, 2, 3)] * 4)\n"
        "chunked_attention(*[torch.randn(1, 4, 2)] * 3, chunk_size=2)\n"
        "assert not [name for name in sys.modules if name.endswith('triton_launch')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shape", "length", "segments"),
    [
        ((8, 8192, 64), 128, 65),
        ((1, 131072, 64), 128, 1025),
        ((64, 131072, 1024), 1024, 129),
        ((1, 1, 1), 128, 1),
    ],
    ids=str,
)
@not_interpreted
def test_time_is_cut_into_as_many_segments_as_fit(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], length: int, segments: int
) -> None:
    pytest.importorskip("triton")
    plan: Any = importlib.import_module("tcnca.ops.ema.triton_launch")
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132)
    full = torch.float32
    signature = plan.Signature(shape, 1, 16, torch.bfloat16, (full,) * 4, None, False, False, full, True, True, 0)
    cut = plan.cut(signature)
    assert (cut.length, cut.segments) == (length, segments)


# What follows runs in the interpreter.
@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        return
    plan: Any = importlib.import_module("tcnca.ops.ema.triton_launch")
    groups = {"STEPS": 4, "ENDS_GROUP": 4, "OUTPUTS_GROUP": 4, "WEIGHTS_GROUP": 2}
    for name, value in {"TILE": 4, "MIN_SEGMENT": 4, "CHAINS": 2, **groups}.items():
        monkeypatch.setattr(plan, name, value)


# As small as the interpreter is slow, yet with more than one segment, group and tile, and multiples of none.
CASES = [
    Case(3, 11, 3, 4, lengths=True, state=True, final=True, strided=True),
    Case(3, 11, 3, 4, lengths=True, state=True, final=True, omega=True, silu=True, strided=True),
    Case(2, 9, 2, 3, directions=2, lengths=True, expanded=True),
    Case(3, 9, 5, 3, directions=2, lengths=True, omega=True, silu=True, expanded=True),
    Case(2, 7, 5, 2, omega=True, silu=True, dtype=torch.bfloat16),
]
MORE_CASES = [
    Case(1, 1, 1, 1, state=True, final=True),
    Case(1, 1, 1, 1, omega=True, silu=True),
    Case(2, 1, 3, 2),
    Case(1, 5, 5, 2, dtype=torch.bfloat16, strided=True),
    Case(2, 8, 2, 17, final=True, lengths=True),
    Case(3, 8, 5, 17, lengths=True, omega=True, silu=True),
    Case(3, 9, 5, 3, lengths=True, omega=True),
    Case(2, 9, 5, 3, silu=True, strided=True),
    Case(1, 6, 2, 2, directions=2, dtype=torch.float16),
    Case(3, 10, 5, 17, directions=2, lengths=True, omega=True, silu=True, dtype=torch.float16, strided=True),
    Case(3, 9, 5, 3, lengths=True, state=True, final=True, omega=True, dtype=torch.bfloat16),
    Case(3, 9, 5, 3, lengths=True, state=True, final=True, omega=True, silu=True, dtype=torch.bfloat16, expanded=True),
]


@interpreted
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_output_state_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cpu")


@interpreted
def test_padding_may_hold_anything_and_autocast_changes_nothing() -> None:
    x, *parameters, omega = some("cpu", (2, 6, 2), *[(2, 2, 2)] * 4, (2,))
    options: dict[str, Any] = {"backend": "triton", "lengths": torch.tensor([6, 3], dtype=torch.int32)}
    both = (options, options | {"omega": omega, "activation": "silu"})
    expected, with_skip = (ema(x, *parameters, **each)[0] for each in both)
    x[1, 3:] = float("nan")
    with torch.autocast("cpu", torch.bfloat16):
        y, other = (ema(x.requires_grad_(), *parameters, **each)[0] for each in both)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not gradient[1, 3:].any()
    assert gradient[1, :3].isfinite().all()
    # Through a skip connection, padding reaches its own outputs and no others.
    assert torch.equal(other[0], with_skip[0])
    assert torch.equal(other[1, :3], with_skip[1, :3])
    assert other[1, 3:].isnan().all()


@interpreted
@pytest.mark.slow
def test_a_gradient_of_the_state_alone() -> None:
    x, *parameters = (part.requires_grad_() for part in some("cpu", (2, 5, 2), *[(1, 2, 2)] * 4))
    exact = [part.detach().double().requires_grad_() for part in (x, *parameters)]
    _, state = ema(x, *parameters, backend="triton", return_state=True)
    _, other = ema(*exact, backend="fft", return_state=True)
    assert state is not None
    assert other is not None
    ours = torch.autograd.grad(state.hidden.square().sum(), [x, *parameters[:3]])
    theirs = torch.autograd.grad(other.hidden.square().sum(), exact[:4])
    for mine, expected in zip(ours, theirs, strict=True):
        assert_close(mine, expected)


@interpreted
def test_no_rows() -> None:
    x, *parameters, omega = (part.requires_grad_() for part in some("cpu", (0, 5, 2), *[(1, 2, 2)] * 4, (2,)))
    y, state = ema(x, *parameters, omega=omega, activation="silu", backend="triton", return_state=True)
    assert y.shape == x.shape
    assert state is not None
    assert state.hidden.shape == (0, 2, 2)
    for gradient in torch.autograd.grad(y.sum(), [x, *parameters, omega]):
        assert not gradient.any()


@interpreted
def test_second_derivatives_are_refused() -> None:
    x, *parameters = (part.requires_grad_() for part in some("cpu", (1, 5, 2), *[(1, 2, 2)] * 4))
    y, _ = ema(x, *parameters, backend="triton")
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=r"expected first derivatives only.*backend='chunked'"):
        gradient.square().sum().backward()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True], ids=["from the start", "from state to state"])
def test_opcheck(streams: bool) -> None:
    sizes = ((2, 3, 2), *[(1, 2, 3)] * 4, (2, 3, 2), (2,))
    *most, hidden, omega = (part.requires_grad_() for part in some("cpu", *sizes))
    rest = (hidden, torch.tensor([3, 1]), omega, True, True, True) if streams else (*[None] * 3, *[False] * 3)
    torch.library.opcheck(torch.ops.tcnca.ema_scan.default, (*most, *rest))


@interpreted
def test_gradients_need_what_was_kept() -> None:
    inputs = [part.requires_grad_() for part in some("cpu", (1, 3, 2), *[(1, 2, 3)] * 4)]
    y, *_ = torch.ops.tcnca.ema_scan.default(*inputs, None, None, None, True, False, False)
    with pytest.raises(KernelError, match=r"ema_scan: expected keep=True where gradients are required"):
        y.sum().backward()


@interpreted
@pytest.mark.slow
def test_auto_compiles_into_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    # The answers are those of a machine with a GPU.
    monkeypatch.setattr(dispatch, "device_reason", lambda index: None)
    monkeypatch.setattr(dispatch, "missing", lambda compiler: None)
    monkeypatch.setattr(dispatch, "should_use", lambda compiler, device, op: True)
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    *parameters, omega = (part.requires_grad_() for part in some("cpu", *[(1, 3, 2)] * 4, (3,)))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {"omega": omega, "activation": "silu", "return_state": True}
    run = torch.compile(lambda x: ema(x.sin(), *parameters, **options), fullgraph=True, dynamic=True, backend=counter)
    for time in (5, 9, 6):
        x = torch.randn(2, time, 3, requires_grad=True)
        y, state = run(x)
        expected, other = ema(x.sin(), *parameters, backend="triton", **options)
        assert torch.equal(y, expected)
        assert torch.equal(state.hidden, other.hidden)  # type: ignore[union-attr]
        ours, theirs = (torch.autograd.grad(part.sum(), [x, *parameters, omega]) for part in (y, expected))
        for mine, same in zip(ours, theirs, strict=True):
            assert_close(mine, same)
    assert counter.frame_count == 1
