"""Attention's kernels on a GPU, against the naive version in float64."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.ops import ATTENTION_ACTIVATIONS, chunked_attention, length_mask
from tcnca.ops.driver import capture_graph
from tests.comparison import assert_close
from tests.ops.test_attention_triton import (
    BRAIN,
    FULL,
    HALF,
    Case,
    assert_continuing_is_right,
    assert_right,
    run_naive,
    run_triton,
)

pytestmark = pytest.mark.gpu

CASES = [
    Case(shape=(2, 4096, 128, 1024), chunk_size=2048, dtype=BRAIN),
    Case(shape=(2, 4096, 128, 1024), chunk_size=2048, dtype=BRAIN, bias=False, lengths=(4096, 2500)),
    Case(shape=(2, 1500, 128, 2048), chunk_size=None, dtype=HALF),
    Case(shape=(3, 1000, 96, 320), chunk_size=384, dtype=HALF, strided=True, lengths=(1000, 0, 555)),
    Case(shape=(2, 300, 40, 72), chunk_size=77, dtype=BRAIN, strided=True),
    Case(shape=(2, 259, 33, 45), chunk_size=33, dtype=BRAIN),
    Case(shape=(5, 1, 16, 16), chunk_size=7, beyond=6, dtype=HALF),
    # Fewer numbers than threads.
    Case(shape=(3, 50, 16, 16), chunk_size=16, dtype=BRAIN, lengths=(50, 0, 33)),
    Case(shape=(3, 50, 16, 40), chunk_size=5, causal=False, dtype=HALF),
    Case(shape=(2, 2000, 64, 64), chunk_size=1000, dtype=BRAIN, lengths=(2000, 1111)),
    Case(shape=(2, 700, 64, 192), chunk_size=300, dtype=FULL, lengths=(700, 333)),
]
CASES += [
    dataclasses.replace(case, activation=activation)
    for activation in ATTENTION_ACTIVATIONS
    for case in (
        Case(shape=(4, 515, 64, 256), chunk_size=128, causal=False, dtype=BRAIN, lengths=(515, 0, 1, 300)),
        Case(shape=(4, 512, 96, 320), chunk_size=128, causal=False, dtype=HALF),
        Case(shape=(2, 5000, 32, 128), chunk_size=4096, causal=False, dtype=BRAIN),
        Case(shape=(2, 1300, 128, 512), chunk_size=512, dtype=BRAIN, bias=False),
        Case(shape=(2, 200, 16, 64), chunk_size=64, causal=False, dtype=FULL),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cuda")


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 400])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("activation", ATTENTION_ACTIVATIONS)
def test_slabs_add_up(
    activation: str, causal: bool, chunk_size: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = importlib.import_module("tcnca.ops.attention.triton_launch")
    # Two blocks of 128 keys of the longest chunk in memory at once.
    monkeypatch.setattr(plan, "SLAB_BYTES", 2 * 2 * 2 * 128 * 1536)
    plan.backward_plan.cache_clear()
    shape, lengths = (3, 1500, 64, 512), (1500, 0, 777)
    options: dict[str, Any] = {"activation": activation, "dtype": dtype, "lengths": lengths}
    assert_right(Case(shape=shape, chunk_size=chunk_size, causal=causal, **options), "cuda")
    assert plan.backward_plan.cache_info().currsize == 1
    device = torch.cuda.current_device()
    signature = plan.Signature(
        *shape, (64, 64, 512), dtype, None, None, chunk_size or 0, causal, activation, 0.0, device
    )
    assert len(plan.backward_plan(signature, 512, False).parts) > 2
    plan.backward_plan.cache_clear()


@pytest.mark.parametrize("chunk_size", [64, 300], ids=["one block", "several"])
def test_scratch_is_written_before_it_is_read(chunk_size: int) -> None:
    case = Case(shape=(3, 900, 64, 384), chunk_size=chunk_size, dtype=BRAIN, lengths=(900, 0, 400))
    leaves, slope = case.leaves("cuda"), torch.randn(3, 900, 384, device="cuda")
    expected = case.run(leaves, slope, run_triton)
    torch.cuda.synchronize()
    # What the allocator hands out next is what was just given back.
    sizes = [2**power for power in range(9, 27)]
    poison = [torch.full((size // 4,), float("nan"), device="cuda") for size in sizes for _ in range(4)]
    del poison
    again = case.run(leaves, slope, run_triton)
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def test_dropout_drops_the_same_in_both_directions() -> None:
    time = 512
    q, k = (torch.randn(2, time, 64, device="cuda", dtype=BRAIN) for _ in range(2))
    unit = torch.eye(time, device="cuda", dtype=BRAIN).repeat(2, 1, 1).requires_grad_()
    torch.manual_seed(3)
    weights = run_triton(q, k, unit, chunk_size=time, causal=False, dropout=0.25)
    plain = run_naive(q, k, unit, chunk_size=time, causal=False)
    kept = weights != 0
    assert abs(float(kept.double().mean()) - 0.75) < 0.01
    assert_close(weights, plain * kept / 0.75)
    slope = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, unit, slope)
    assert_close(gradient, weights.double().mT @ slope.double())


@pytest.mark.parametrize("activation", ATTENTION_ACTIVATIONS)
def test_continuing_is_right(activation: str) -> None:
    assert_continuing_is_right("cuda", torch.float32, activation)


def test_auto_takes_the_kernels_for_half_precision() -> None:
    q, k, v = (torch.randn(2, 200, size, device="cuda", dtype=BRAIN) for size in (64, 64, 256))
    auto, _ = chunked_attention(q, k, v, chunk_size=128)
    assert torch.equal(auto, run_triton(q, k, v, chunk_size=128))
    single, _ = chunked_attention(q.float(), k.float(), v.float(), chunk_size=128)
    assert torch.equal(single, run_naive(q.float(), k.float(), v.float(), chunk_size=128))


def test_autocast_computes_in_its_type_and_returns_gradients_in_theirs() -> None:
    leaves = [torch.randn(2, 300, size, device="cuda", requires_grad=True) for size in (64, 64, 256)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.autocast("cuda", BRAIN):
        out, state = chunked_attention(*leaves, chunk_size=128, return_state=True, backend="triton")
    truth = run_naive(*exact, chunk_size=128)
    assert out.dtype == BRAIN
    assert state is not None
    assert state.keys.dtype == FULL
    slope = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, slope)
    assert_close(out, truth)
    for part, other in zip(gradients, torch.autograd.grad(truth, exact, slope.double()), strict=True):
        assert part.dtype == FULL
        assert_close(part, other, dtype=BRAIN)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ATTENTION_ACTIVATIONS)
def test_a_compiled_call_is_not_compiled_again_for_another_length(activation: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out, _ = chunked_attention(q * 2, k, v, chunk_size=256, bias=bias, activation=activation, backend="triton")
        return out + 1

    torch.compiler.reset()
    compiled: Any = torch.compile(call, fullgraph=True, dynamic=True)
    bias = torch.randn(511, device="cuda", requires_grad=True)

    def check(time: int) -> None:
        leaves = [torch.randn(2, time, size, device="cuda", dtype=BRAIN, requires_grad=True) for size in (64, 64, 128)]
        q, k, v = leaves
        out, expected = compiled(q, k, v, bias), call(q, k, v, bias)
        assert_close(out, expected)
        slope = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(value, [*leaves, bias], slope) for value in (out, expected))
        for part, other in zip(ours, theirs, strict=True):
            assert_close(part, other, dtype=BRAIN)

    check(700)
    # A first call may be traced more than once, but no other length may compile anything.
    with torch.compiler.set_stance("fail_on_recompile"):
        for time in (701, 1024, 300):
            check(time)


def test_no_kernel_is_compiled_again_for_another_length() -> None:
    launcher: Any = importlib.import_module("tcnca.ops.launcher")

    def run(batch: int, time: int) -> None:
        case = Case(shape=(batch, time, 48, 200), chunk_size=256, dtype=BRAIN, beyond=256)
        case.run(case.leaves("cuda"), torch.randn(batch, time, 200, device="cuda"), run_triton)

    run(2, 600)
    before = launcher.load_kernel.cache_info().currsize
    for batch, time in ((2, 601), (1, 1), (3, 1024), (2, 5000)):
        run(batch, time)
    assert launcher.load_kernel.cache_info().currsize == before


def test_rows_that_are_not_aligned_are_right() -> None:
    case = Case(shape=(2, 300, 64, 128), chunk_size=128, dtype=BRAIN)
    leaves, slope = case.leaves("cuda"), torch.randn(2, 300, 128, device="cuda")
    expected = case.run(leaves, slope, run_triton)
    for begin, gap in ((1, 0), (0, 3), (3, 2)):
        # A row that starts anywhere, and rows that are an odd number apart.
        moved = []
        for leaf in leaves[:3]:
            room = leaf.new_zeros(2, 300, begin + leaf.shape[2] + gap)
            room[..., begin : begin + leaf.shape[2]] = leaf.detach()
            moved.append(room[..., begin : begin + leaf.shape[2]].requires_grad_())
        for name, value in case.run([*moved, leaves[3]], slope, run_triton).items():
            assert_close(value, expected[name], name, BRAIN)


def test_empty_batch() -> None:
    leaves = [torch.randn(0, 30, size, device="cuda", dtype=BRAIN, requires_grad=True) for size in (16, 16, 32)]
    out = run_triton(*leaves, chunk_size=16)
    assert out.shape == (0, 30, 32)
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape


def test_graphs_replay_bit_exactly() -> None:
    q, k, v = (torch.randn(2, 600, size, device="cuda", dtype=BRAIN) for size in (64, 64, 256))
    expected = run_triton(q, k, v, chunk_size=256)
    torch.cuda.synchronize()
    with capture_graph() as graph:
        out = run_triton(q, k, v, chunk_size=256)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_a_first_call_may_be_captured() -> None:
    launcher: Any = importlib.import_module("tcnca.ops.launcher")
    plan: Any = importlib.import_module("tcnca.ops.attention.triton_launch")
    case = Case(shape=(2, 600, 64, 256), chunk_size=256, dtype=BRAIN)
    leaves, slope = case.leaves("cuda"), torch.randn(2, 600, 256, device="cuda")
    expected = case.run(leaves, slope, run_triton)
    torch.cuda.synchronize()
    # PyTorch's own kernels are loaded; ours are loaded anew.
    for cache in (launcher.load_kernel, plan.forward_plan, plan.backward_plan):
        cache.cache_clear()
    # What `expected` holds ties its leaves to the stream that it ran on, and no other may wait for a capture.
    fresh = [leaf.detach().requires_grad_() for leaf in leaves]
    with capture_graph() as graph:
        captured = case.run(fresh, slope, run_triton)
    assert launcher.load_kernel.cache_info().currsize > 0, "the capture loaded no kernel"
    graph.replay()
    torch.cuda.synchronize()
    for name, value in expected.items():
        assert torch.equal(captured[name], value), name


@pytest.mark.parametrize("causal", [True, False])
def test_heads_of_more_rows_than_a_grid_has_blocks(causal: bool) -> None:
    q, k, v = torch.randn(3, 40_000, 8, 16, device="cuda", dtype=BRAIN).unbind(0)
    lengths = torch.randint(1, 9, (40_000,), device="cuda")
    options: dict[str, Any] = {"chunk_size": 4, "causal": causal, "num_heads": 2, "lengths": lengths}
    fused, _ = chunked_attention(q, k, v, backend="sdpa", **options)
    expected, _ = chunked_attention(q.float(), k.float(), v.float(), backend="naive", **options)
    valid = length_mask(lengths, 8)
    assert_close(fused[valid].float(), expected[valid], dtype=BRAIN)
