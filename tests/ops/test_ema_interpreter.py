"""The EMA's fused scan in Triton's interpreter, which runs its kernels on the CPU.

Triton decides when it defines kernels whether they are interpreted, so all tests here run in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops import ema
from tests.comparison import assert_close
from tests.ops.ema_cases import Case, assert_right, some
from tests.ops.interpreter import INSIDE, interpret, not_interpreted, with_interpreter

inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that another test of this file starts")

# As small as the interpreter is slow, yet with more than one segment, group and tile, and multiples of none.
CASES = [
    Case(1, 1, 1, 1, state=True, final=True),
    Case(2, 1, 3, 2),
    Case(3, 11, 3, 4, lengths=True, state=True, final=True, strided=True),
    Case(2, 9, 2, 3, directions=2, lengths=True, expanded=True),
    Case(1, 5, 5, 2, dtype=torch.bfloat16, strided=True),
    Case(2, 8, 2, 17, final=True, lengths=True),
    Case(1, 6, 2, 2, directions=2, dtype=torch.float16),
]


@pytest.mark.slow
@not_interpreted
@with_interpreter
def test_everything_below_passes_in_the_interpreter() -> None:
    interpret("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INSIDE:
        return
    from tcnca.ops.ema.scan import plan

    groups = {"STEPS": 4, "ENDS_GROUP": 4, "OUTPUTS_GROUP": 4, "WEIGHTS_GROUP": 2}
    for name, value in {"TILE": 4, "SHORTEST": 4, "CHAINS": 2, **groups}.items():
        monkeypatch.setattr(plan, name, value)


@inside
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_state_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cpu")


@inside
def test_padding_may_hold_anything() -> None:
    x, *parameters = some("cpu", (2, 6, 2), *[(2, 2, 2)] * 4)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    expected, _ = ema(x, *parameters, backend="fused", lengths=lengths)
    x[1, 3:] = float("nan")
    y, _ = ema(x.requires_grad_(), *parameters, backend="fused", lengths=lengths)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not gradient[1, 3:].any()
    assert gradient[1, :3].isfinite().all()


@inside
def test_autocast_leaves_the_precision_alone() -> None:
    x, *parameters = some("cpu", (1, 5, 2), *[(1, 2, 2)] * 4)
    expected, _ = ema(x, *parameters, backend="fused")
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = ema(x, *parameters, backend="fused")
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)


@inside
def test_a_gradient_of_the_state_alone() -> None:
    x, *parameters = (part.requires_grad_() for part in some("cpu", (2, 5, 2), *[(1, 2, 2)] * 4))
    exact = [part.detach().double().requires_grad_() for part in (x, *parameters)]
    _, state = ema(x, *parameters, backend="fused", return_state=True)
    _, other = ema(*exact, backend="fft", return_state=True)
    assert state is not None
    assert other is not None
    ours = torch.autograd.grad(state.hidden.square().sum(), [x, *parameters[:3]])
    theirs = torch.autograd.grad(other.hidden.square().sum(), exact[:4])
    for mine, expected in zip(ours, theirs, strict=True):
        assert_close(mine, expected)


@inside
def test_no_tokens_and_no_rows() -> None:
    x, *parameters = (part.requires_grad_() for part in some("cpu", (0, 5, 2), *[(1, 2, 2)] * 4))
    y, state = ema(x, *parameters, backend="fused", return_state=True)
    assert y.shape == x.shape
    assert state is not None
    assert state.hidden.shape == (0, 2, 2)
    for gradient in torch.autograd.grad(y.sum(), [x, *parameters]):
        assert not gradient.any()


@inside
def test_second_derivatives_are_refused_not_wrong() -> None:
    x, *parameters = (part.requires_grad_() for part in some("cpu", (1, 5, 2), *[(1, 2, 2)] * 4))
    y, _ = ema(x, *parameters, backend="fused")
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=r"gradients of the EMA's gradients.*backend='fft'"):
        gradient.square().sum().backward()


@inside
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "from state to state"])
def test_the_operators_are_registered_well(streams: bool) -> None:
    from tcnca.ops.ema.scan import operator as registered

    assert registered is not None
    leaves: list[Tensor] = [part.requires_grad_() for part in some("cpu", (2, 3, 2), *[(1, 2, 3)] * 4, (2, 3, 2))]
    *most, hidden = leaves
    given = (*most, hidden, torch.tensor([3, 1]), True) if streams else (*most, None, None, False)
    torch.library.opcheck(torch.ops.tcnca.ema_scan.default, given)


@inside
def test_auto_compiles_into_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcnca.ops.ema import plain
    from tcnca.ops.triton_kernels import machine

    # What is asked of a GPU is asked, and the answer is that of one.
    monkeypatch.setattr(machine, "_unable", lambda device: None)
    monkeypatch.setattr(machine, "_lacking", lambda: None)
    monkeypatch.setattr(plain, "worth_it", lambda x: machine.worth_it(x.device.index or 0, "the EMA"))
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    parameters = [part.requires_grad_() for part in some("cpu", *[(1, 3, 2)] * 4)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda x: ema(x.sin(), *parameters, return_state=True),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for time in (5, 9, 6):
        x = torch.randn(2, time, 3, requires_grad=True)
        y, state = run(x)
        expected, other = ema(x.sin(), *parameters, backend="fused", return_state=True)
        assert torch.equal(y, expected)
        assert torch.equal(state.hidden, other.hidden)  # type: ignore[union-attr]
        ours, theirs = (torch.autograd.grad(part.sum(), [x, *parameters]) for part in (y, expected))
        for mine, same in zip(ours, theirs, strict=True):
            assert_close(mine, same)
    assert counter.frame_count == 1
