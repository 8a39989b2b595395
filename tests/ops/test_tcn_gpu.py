"""The TCN's kernels on a GPU, against the naive version in float64."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops import tcn, zero_padding
from tcnca.ops.driver import capture_graph
from tcnca.ops.tcn.cuda import operator, tensor_core, tensor_core_pair
from tests.comparison import assert_close
from tests.ops import tcn_cases
from tests.ops.tcn_cases import (
    BF16,
    DROPOUT_CASES,
    FP16,
    FP32,
    KERNEL_CASES,
    assert_exact,
    assert_same_dropout,
    exact,
    outputs_and_gradients,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _new_plans() -> Iterator[None]:
    """Forget plans before and after each test, for some tests change what they depend on."""
    plans = (operator.forward_plan, operator.backward_plan, operator.recomputes)
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


# 16-bit numbers with channels in multiples of 8 go to the tensor cores, others to the registers.
Case = partial(tcn_cases.Case, shape=(2, 300, 16), dtype=BF16, device="cuda")


@pytest.mark.parametrize("groups", [3, 9], ids=["default", "long kernels"])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_outputs_and_gradients_are_those_of_float64(name: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core, "MAX_BACKWARD", groups)
    assert_exact(dataclasses.replace(KERNEL_CASES[name], device="cuda"))


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_input_times_omega_is_added(name: str) -> None:
    assert_exact(dataclasses.replace(KERNEL_CASES[name], device="cuda", omega=True))


@pytest.mark.parametrize("omega", [False, True], ids=["plain", "omega"])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_pairs_of_blocks_are_exact(name: str, omega: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core_pair, "ENABLED", True)
    depth = KERNEL_CASES[name].depth // 2 * 2
    assert_exact(dataclasses.replace(KERNEL_CASES[name], device="cuda", omega=omega, depth=max(depth, 2)))


@pytest.mark.parametrize(("depth", "omega"), [(3, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", [name for name, case in KERNEL_CASES.items() if case.kernel_size <= 17])
def test_the_gradients_of_long_kernels_suit_short_ones(
    name: str, depth: int, omega: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_core, "MAX_SHORT_BACKWARD", 1)
    monkeypatch.setattr(tensor_core, "long_depth", lambda block, memory: depth)
    assert_exact(dataclasses.replace(KERNEL_CASES[name], device="cuda", omega=omega))


@pytest.mark.parametrize("omega", [False, True], ids=["plain", "omega"])
@pytest.mark.parametrize("name", DROPOUT_CASES)
def test_forward_and_backward_drop_the_same(name: str, omega: bool) -> None:
    assert_same_dropout(dataclasses.replace(DROPOUT_CASES[name], device="cuda", omega=omega))


@pytest.mark.parametrize("convolutions", [1, 2])
def test_dropout_follows_pytorchs_seed(convolutions: int) -> None:
    case = Case(shape=(2, 999, 64), kernel_size=17, convolutions=convolutions, residual=False)
    x, weight = case.leaves()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        y, _ = tcn(x, weight, 3, residual=False, dropout=0.25, backend="cuda")
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (x, weight))])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    # Near the start, where some taps are before the first token, all others may see dropped values; 17 taps never do.
    begin = (case.kernel_size - 1) * case.factor ** (case.depth - 1)
    zeros, others = (results[place][0][:, begin:] == 0 for place in (0, 2))
    for found, share in ((zeros, 0.25), (zeros & others, 0.25**2)):
        assert abs(float(found.double().mean()) - share) < 5 * (share * (1 - share) / found.numel()) ** 0.5


def test_norms_between_convolutions() -> None:
    case = Case(shape=(2, 500, 64), bias=True, dtype=FP32, convolutions=2, lengths=(500, 77))
    leaves = case.leaves()
    truths = exact(leaves)
    results = []
    for (x, weight, bias), backend in ((leaves, "cuda"), (truths, "naive")):
        options: dict[str, Any] = {"lengths": case.valid(), "backend": backend}
        y, _ = tcn(x, weight, 3, bias=bias, norm_fn=lambda h, number: F.layer_norm(h, (64,)) * (number + 1), **options)
        y = zero_padding(y, case.valid())
        results.append([y, *torch.autograd.grad(y.square().mean(), (x, weight, bias))])
    for ours, truth in zip(*results, strict=True):
        assert_close(ours, truth)


@pytest.mark.parametrize("shape", [(2, 300, 16), (1, 300, 16)], ids=str)
def test_gradients_of_the_output_may_have_any_layout(shape: tuple[int, int, int]) -> None:
    case = Case(shape=shape)
    leaves, batch = case.leaves(), shape[0]
    row = torch.randn(batch, 1, 16, device="cuda").to(case.dtype)
    transposed = torch.randn(batch, 16, 300, device="cuda").to(case.dtype).transpose(1, 2)
    shifted = torch.randn(batch, 300, 17, device="cuda").to(case.dtype)[..., 1:]
    for dy in (row.expand(shape), transposed, row[:, :, :1].expand(shape), shifted):
        results = (outputs_and_gradients(case, leaves, each, "cuda") for each in (dy, dy.contiguous()))
        for part, other in zip(*results, strict=True):
            assert_close(part, other)


def test_padding_may_be_nan() -> None:
    case = Case(lengths=(300, 41), bias=True, omega=True)
    x, *parameters = case.leaves()
    changed = x.detach().clone()
    changed[1, 41:] = float("nan")
    results = [case.call([part, *parameters], "cuda")[0] for part in (x, changed)]
    assert torch.equal(*results)
    for gradients in zip(*(torch.autograd.grad(y.sum(), parameters) for y in results), strict=True):
        assert torch.equal(*gradients)
        assert torch.isfinite(gradients[1]).all()


@pytest.mark.parametrize(
    ("dtype", "convolutions", "inplace"),
    [(FP32, 1, True), (FP32, 2, False), (BF16, 1, False), (BF16, 2, True)],
    ids=str,
)
def test_pieces_equal_one_call(dtype: torch.dtype, convolutions: int, inplace: bool) -> None:
    case = Case(dtype=dtype, convolutions=convolutions, bias=True)
    x, weight, bias = (leaf.detach() for leaf in case.leaves())
    expected, _ = tcn(x.double(), weight.double(), 3, bias=bias.double())
    state, pieces = None, []
    for size, part in zip(sizes := [200, 1, 1, 37, 1, 60], x.split(sizes, 1), strict=True):
        options: dict[str, Any] = {"inplace": inplace and state is not None, "backend": "auto" if size == 1 else "cuda"}
        y, state = tcn(part, weight, 3, bias=bias, state=state, return_state=True, **options)
        pieces.append(y)
    assert state is not None
    assert state.position.tolist() == [300, 300]
    assert all(buffer.dtype == dtype for buffer in state.buffers)
    assert_close(torch.cat(pieces, 1), expected)


def test_gradients_flow_through_the_state() -> None:
    case = Case(dtype=FP32, bias=True, lengths=(300, 120))
    leaves = case.leaves()
    truths = exact(leaves)
    results = []
    for x, weight, bias in (leaves, truths):
        _, state = tcn(x, weight, 3, bias=bias, lengths=case.valid(), return_state=True)
        assert state is not None
        parts = torch.stack([buffer.square().sum() for buffer in state.buffers])
        results.append(torch.autograd.grad(parts.sum(), (x, weight), allow_unused=False))
    for ours, truth in zip(*results, strict=True):
        assert_close(ours, truth)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_theirs(dtype: torch.dtype) -> None:
    case = Case(dtype=FP32, bias=True, omega=True)
    leaves = case.leaves()
    truths = exact(leaves)
    with torch.autocast("cuda", dtype):
        y, state = case.call(leaves, "cuda", return_state=True)
        fused, _ = case.call(leaves, "cuda")
    truth, _ = case.call(truths, "naive")
    assert state is not None
    assert y.dtype == fused.dtype == dtype
    assert all(buffer.dtype == FP32 for buffer in state.buffers)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(fused, leaves, dy)
    for part, other in zip(gradients, torch.autograd.grad(truth, truths, dy.double()), strict=True):
        assert part.dtype == FP32
        assert_close(part, other, dtype=dtype)
    assert_close(y, truth)
    assert_close(fused, truth)


def test_second_derivatives_are_refused() -> None:
    x, weight = Case().leaves()
    y, _ = tcn(x, weight, 3, backend="cuda")
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(KernelError, match="TCNCA_KERNELS=off"):
        dx.float().sum().backward()


def test_opcheck() -> None:
    case = Case(bias=True, omega=True, lengths=(300, 41))
    x, weight, bias, omega = case.leaves()
    seed = torch.tensor([7], device="cuda")
    for dropout, seeds in ((0.0, None), (0.3, seed)):
        settings = (1, 3, "silu", True, True, dropout, True)
        torch.library.opcheck(
            torch.ops.tcnca.tcn_blocks.default, (x, weight, bias, case.valid(), seeds, omega, *settings)
        )


def test_compiled_calls_are_one_graph_and_drop_anew() -> None:
    x, weight = Case(shape=(1, 300, 16)).leaves()

    def call(x: Tensor, weight: Tensor, dropout: float) -> Tensor:
        return tcn(x, weight, 3, dropout=dropout, backend="cuda")[0]

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True)
    ours, eager = compiled(x, weight, 0.0), call(x, weight, 0.0)
    dy = torch.randn_like(ours)
    grads = (torch.autograd.grad(y, (x, weight), dy) for y in (ours, eager))
    assert_close(ours, eager)
    for part, other in zip(*grads, strict=True):
        assert_close(part, other)
    assert not torch.equal(compiled(x, weight, 0.5), compiled(x, weight, 0.5))


def test_a_new_thread_can_launch_kernels() -> None:
    x, weight = (leaf.detach() for leaf in Case().leaves())
    expected, _ = tcn(x, weight, 3, backend="cuda")
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(tcn(x, weight, 3, backend="cuda")[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_graphs_replay_bit_exactly() -> None:
    x, weight = (leaf.detach() for leaf in Case().leaves())
    expected, _ = tcn(x, weight, 3, backend="cuda")
    torch.cuda.synchronize()
    with capture_graph() as graph:
        y, _ = tcn(x, weight, 3, backend="cuda")
    for _ in range(2):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
