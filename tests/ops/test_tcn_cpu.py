"""The TCN's fast path for the CPU, against the naive version in float64."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tcnca.errors import KernelError
from tcnca.ops import ACTIVATIONS, TCNState, initial_tcn_state, tcn
from tcnca.ops.tcn import api, cpu
from tcnca.ops.tcn.naive import TCNCall
from tests.comparison import assert_close
from tests.ops.tcn_cases import Case, exact


def _results(case: Case, leaves: list[Tensor], backend: str) -> list[Tensor]:
    """Return the output, the state if there is one, and the gradients of all leaves through both."""
    y, state = case.call(leaves, backend, return_state=case.causal)
    parts = [y] if state is None else [y, *state.buffers]
    grads = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(part) for part in parts]
    pairs = [pair for pair in zip(parts, grads, strict=True) if pair[0].requires_grad]  # not a ring without slots
    gradients = torch.autograd.grad([part for part, _ in pairs], leaves, [grad for _, grad in pairs])
    assert [part.dtype for part in gradients] == [part.dtype for part in leaves]
    return [part.detach() for part in (*parts, *gradients)]


def _assert_right(case: Case) -> None:
    leaves = case.leaves()
    found, expected = _results(case, leaves, "cpu"), _results(case, exact(leaves), "naive")
    for number, (part, truth) in enumerate(zip(found, expected, strict=True)):
        assert_close(part, truth, f"part {number} of {case}")
    assert_close(case.call(leaves, "cpu")[0].detach(), expected[0], f"output without a state of {case}")
    if not case.causal:
        return
    with torch.no_grad():
        _, state = case.call(exact(leaves), "naive", return_state=True)
        assert state is not None
        y, after = case.call(leaves, "cpu", return_state=True, state=state.to(case.dtype))
        y_exact, after_exact = case.call(exact(leaves), "naive", return_state=True, state=state)
    assert after is not None
    assert after_exact is not None
    for part, truth in zip((y, *after.buffers), (y_exact, *after_exact.buffers), strict=True):
        assert_close(part, truth, f"continued {case}")


CASES = {
    "one token": Case(shape=(1, 1, 8)),
    "odd everything": Case(shape=(3, 101, 7), kernel_size=17, depth=4, factor=5),
    "bias and lengths": Case(bias=True, lengths=(100, 41)),
    "empty rows": Case(bias=True, lengths=(0, 0)),
    "bidirectional": Case(causal=False, kernel_size=17, bias=True, lengths=(7, 100)),
    "even and bidirectional": Case(causal=False, kernel_size=4),
    "dilation beyond time": Case(shape=(2, 20, 8), factor=50),
    "dilation beyond time, rows at two positions": Case(shape=(2, 20, 8), factor=25, bias=True, lengths=(20, 7)),
    "ring that ends within a tap": Case(shape=(2, 20, 8), factor=25, bias=True),
    "bidirectional dilation beyond time": Case(shape=(2, 20, 8), factor=50, causal=False),
    "no skip": Case(residual=False, activation="none"),
    "kernel of one": Case(kernel_size=1, bias=True),
    "kernel of 64": Case(kernel_size=64, depth=2, causal=False, lengths=(30, 100)),
    "one channel": Case(shape=(2, 100, 1), bias=True),
    "one block": Case(depth=1),
    "many sequences": Case(shape=(300, 10, 16)),
    "two convolutions": Case(convolutions=2, bias=True, lengths=(100, 5)),
    "five convolutions": Case(convolutions=5, depth=2),
    "five convolutions, bidirectional, no skip": Case(convolutions=5, depth=2, causal=False, residual=False),
    "factor of one": Case(factor=1, depth=6),
    "float64": Case(dtype=torch.float64, bias=True, convolutions=2),
    "longer than a slab": Case(shape=(1, 40000, 40), kernel_size=17, factor=4, bias=True),
    "no sequences": Case(shape=(0, 5, 8), bias=True),
    "omega": Case(omega=True, bias=True, lengths=(100, 41)),
    "omega, bidirectional": Case(omega=True, causal=False, convolutions=2, activation="none", residual=False),
    "omega, no sequences": Case(shape=(0, 5, 8), omega=True),
} | {name: Case(activation=name, bias=True) for name in ACTIVATIONS}


@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_are_those_of_float64(name: str) -> None:
    _assert_right(CASES[name])


@pytest.mark.parametrize("seed", range(16))
def test_any_slabs_give_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(cpu, "SLAB", draw.choice([100, 2000, 1 << 20]))
    monkeypatch.setattr(cpu, "MIN_CHANNELS", draw.choice([3, 32]))
    shape = (draw.randint(1, 3), draw.choice([1, 2, 7, 33, 65, 128]), draw.choice([1, 3, 16, 20, 40]))
    _assert_right(
        Case(
            shape=shape,
            kernel_size=draw.choice([1, 2, 3, 5, 17, 40]),
            factor=draw.choice([1, 2, 3, 5, 50]),
            convolutions=draw.randint(1, 3),
            bias=draw.random() < 0.5,
            omega=seed % 2 == 0,
            activation=draw.choice(ACTIVATIONS),
            residual=draw.random() < 0.5,
            causal=draw.random() < 0.6,
            lengths=tuple(draw.randint(0, shape[1]) for _ in range(shape[0])) if draw.random() < 0.5 else None,
        )
    )


@pytest.mark.parametrize("lengths", [None, (3, 7)], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_gradcheck(causal: bool, lengths: tuple[int, ...] | None) -> None:
    case = Case(shape=(2, 7, 2), kernel_size=3, factor=2, convolutions=2, bias=True, dtype=torch.float64)
    case = dataclasses.replace(case, causal=causal, lengths=lengths, omega=True)
    assert torch.autograd.gradcheck(lambda *leaves: case.call([*leaves], "cpu")[0], case.leaves())


def test_gradients_are_the_same_under_activation_checkpointing() -> None:
    case = Case(bias=True, lengths=(100, 41))
    leaves = case.leaves()
    y, again = case.call(leaves, "cpu")[0], checkpoint(lambda: case.call(leaves, "cpu")[0], use_reentrant=False)
    for found, expected in zip(*(torch.autograd.grad(each.sum(), leaves) for each in (again, y)), strict=True):
        assert torch.equal(found, expected)


def test_gradients_have_gradients() -> None:
    case = Case(shape=(1, 6, 2), kernel_size=2, factor=2, depth=2, bias=True, dtype=torch.float64)

    def last_buffer(*leaves: Tensor) -> Tensor:
        _, state = case.call([*leaves], "cpu", return_state=True)
        assert state is not None
        return state.buffers[1]

    assert torch.autograd.gradgradcheck(lambda *leaves: case.call([*leaves], "cpu")[0], case.leaves())
    assert torch.autograd.gradgradcheck(last_buffer, case.leaves())


def test_layout_does_not_matter() -> None:
    case = Case(shape=(3, 100, 16), bias=True)
    leaves = [leaf.detach() for leaf in case.leaves()]
    transposed = [leaf.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for leaf in leaves]
    spaced = [leaf.new_empty(*leaf.shape[:-1], 2 * leaf.shape[-1])[..., ::2].copy_(leaf) for leaf in leaves]
    expected = _results(case, [leaf.requires_grad_() for leaf in leaves], "cpu")
    for strided in (transposed, [leaf.requires_grad_() for leaf in spaced]):
        assert not any(leaf.is_contiguous() for leaf in strided)
        for part, truth in zip(_results(case, strided, "cpu"), expected, strict=True):
            assert_close(part, truth)


def test_gradients_of_the_output_may_have_any_layout() -> None:
    case = Case()
    leaves = case.leaves()
    y, _ = case.call(leaves, "cpu")
    row = torch.randn(2, 1, 16)
    for dy in (row.expand(y.shape), torch.randn(2, 16, 100).transpose(1, 2), row[:, :, :1].expand(y.shape)):
        found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        expected = torch.autograd.grad(y, leaves, dy.contiguous(), retain_graph=True)
        for part, truth in zip(found, expected, strict=True):
            assert_close(part, truth)


def test_padding_is_that_of_the_naive_version() -> None:
    case = Case(lengths=(100, 41), bias=True)
    leaves = [leaf.detach() for leaf in case.leaves()]
    assert_close(case.call(leaves, "cpu")[0], case.call(leaves, "naive")[0])
    leaves[0][1, 41:] = torch.nan
    y, state = case.call(leaves, "cpu", return_state=True)
    expected, _ = case.call(leaves, "naive")
    assert torch.equal(y.isnan(), expected.isnan())
    assert state is not None
    assert all(bool(buffer.isfinite().all()) for buffer in state.buffers)


def test_calls_give_the_same_bits_in_all_threads_and_inference_mode() -> None:
    case = Case(shape=(2, 3000, 48), kernel_size=17, factor=5, bias=True)
    leaves = case.leaves()
    expected = _results(case, leaves, "cpu")
    with torch.inference_mode():
        assert torch.equal(case.call(leaves, "cpu")[0], expected[0])
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        found[number] = _results(case, leaves, "cpu")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    work(3)
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(*pair) for one in found.values() for pair in zip(one, expected, strict=True))


def test_opcheck() -> None:
    x, weight, bias, omega = Case(bias=True, omega=True, shape=(2, 20, 4)).leaves()
    operator = torch.ops.tcnca.tcn_cpu.default
    torch.library.opcheck(operator, (x, weight, bias, torch.tensor([20, 7]), omega, 1, 3, "silu", True, True))
    torch.library.opcheck(operator, (x, weight, None, None, None, 2, 3, "gelu", False, False))


def test_compiles_into_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    _, weight, bias = Case(bias=True).leaves()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(x: Tensor, weight: Tensor, bias: Tensor, backend: Any = "auto") -> tuple[Tensor, TCNState | None]:
        return tcn(x, weight, 3, bias=bias, return_state=True, backend=backend)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    frames = set[int]()
    for time in (100, 31, 57, 5000):
        leaves = (torch.randn(2, time, 16, requires_grad=True), weight, bias)
        results = []
        for y, state in (compiled(*leaves), call(*leaves, backend="naive")):
            assert state is not None
            gradients = torch.autograd.grad(y.sum() + state.buffers[1].sum(), leaves)
            results.append((y, *state.buffers, *gradients))
        for part, truth in zip(*results, strict=True):
            assert_close(part, truth)
        frames.add(counter.frame_count)
    # Dynamo may start again once, before the first call, but not for another length.
    assert len(frames) == 1
    assert any("tcn_cpu" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


@torch.no_grad()
def test_continues_in_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FAST_HERE", True)
    torch._dynamo.reset()
    _, weight, bias = Case(bias=True).leaves()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def call(x: Tensor, state: TCNState) -> Tensor:
        return tcn(x, weight, 3, bias=bias, state=state)[0]

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    _, state = tcn(torch.randn(2, 9, 16), weight, 3, bias=bias, return_state=True)
    assert state is not None
    for time in (50, 100, 128, 300):
        x = torch.randn(2, time, 16)
        assert_close(compiled(x, state), call(x, state))
    assert counter.frame_count == 1


_PEAK = """
import resource, sys, torch
from tcnca.ops import tcn
torch.set_num_threads(1)
x = torch.randn(8, 1 << 14, 64, requires_grad=True)
weight = torch.randn(6, 1, 64, 17, requires_grad=True)
slope = torch.randn_like(x)
for time in (64, None):  # without what the library itself loads
    y, _ = tcn(x[:, :time], weight, 8, backend="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if time else before
    torch.autograd.grad(y, (x, weight), slope[:, :time])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (x.numel() * 4))
"""


def test_memory_is_that_of_the_results_and_one_slab() -> None:
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    # The outputs of six blocks would be more than six times x; the results are twice x, and a slab is an eighth of it.
    assert float(done.stdout) < 4


def test_auto_leaves_small_and_unsupported_calls_to_the_naive_version(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(call: TCNCall) -> tuple[Tensor, TCNState | None]:
        calls.append(call.x.numel())
        return cpu.run(call)

    monkeypatch.setitem(api._RUN, "cpu", counted)
    monkeypatch.setattr(cpu, "FAST_HERE", True)
    weight = torch.randn(2, 1, 64, 3)
    large, small = torch.randn(1, 512, 64), torch.randn(1, 256, 64)
    tcn(large, weight, 2)
    assert calls == [large.numel()]
    tcn(small, weight, 2)
    tcn(large.double(), weight.double(), 2)
    tcn(large, weight, 2, dropout=0.5)
    monkeypatch.setenv("TCNCA_KERNELS", "off")
    tcn(large, weight, 2)
    assert len(calls) == 1
    tcn(small, weight, 2, backend="cpu")
    assert len(calls) == 2


@torch.no_grad()
def test_folds_no_ring_of_which_few_inputs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding a ring of many rows takes many times as long as the taps that a few tokens need."""
    folded: list[int] = []
    fold = cpu._fold

    def noted(x: Tensor, *args: int) -> Tensor:
        folded.append(x.shape[1])
        return fold(x, *args)

    x, weight = torch.randn(2, 9, 64), torch.randn(3, 1, 64, 3)
    _, state = tcn(x, weight, 4, return_state=True)
    monkeypatch.setattr(cpu, "_fold", noted)
    for time, sizes in ((1, []), (4, [2 + 4]), (9, [2 + 9, 8 + 9])):
        folded.clear()
        tcn(x[:, :time], weight, 4, state=state, backend="cpu")
        assert folded == sizes


def test_states_of_a_vectorized_map() -> None:
    x, weight = torch.randn(3, 2, 5, 4), torch.randn(2, 1, 4, 3)

    def last_inputs(x: Tensor) -> Tensor:
        state = tcn(x, weight, 4, return_state=True)[1]
        assert state is not None
        return state.buffers[1]

    assert_close(torch.vmap(last_inputs)(x), torch.stack([last_inputs(each) for each in x]))


def test_unsupported_reasons_are_named() -> None:
    x, weight = torch.randn(1, 9, 4), torch.randn(2, 1, 4, 3, requires_grad=True)
    options: list[tuple[dict[str, Any], str]] = [
        ({"norm_fn": lambda h, number: h}, "norm_fn: expected None, got one"),
        ({"dropout": 0.5}, "dropout: expected 0, got 0.5"),
        ({"state": initial_tcn_state(1, 4, 3, 2, 2)}, "state: expected None where gradients are computed, got one"),
    ]
    for more, words in options:
        with pytest.raises(KernelError, match=f"backend: 'cpu' cannot run .*; {words}.*Use 'auto' or 'naive'"):
            tcn(x, weight, 2, backend="cpu", **more)
    with pytest.raises(KernelError, match=r"dtype: expected float32 or float64, got torch\.bfloat16"):
        tcn(x.bfloat16(), weight.bfloat16(), 2, backend="cpu")
    with torch.autocast("cpu"), pytest.raises(KernelError, match="autocast: expected it off"):
        tcn(x, weight, 2, backend="cpu")
    with pytest.raises(KernelError, match="device: expected the CPU for all tensors, got meta"):
        tcn(x.to("meta"), weight.to("meta"), 2, backend="cpu")


def test_backward_under_autocast_keeps_its_dtypes() -> None:
    case = Case()
    leaves = case.leaves()
    y, _ = case.call(leaves, "cpu")
    expected = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    with torch.autocast("cpu"):
        found = torch.autograd.grad(y.square().sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_auto_leaves_transforms_and_forward_derivatives_to_the_naive_version() -> None:
    x, weight = torch.randn(1, 600, 64), torch.randn(2, 1, 64, 3)
    direction = torch.randn_like(x)

    def fast(value: Tensor) -> Tensor:
        return tcn(value, weight, 2)[0]

    def naive(value: Tensor) -> Tensor:
        return tcn(value, weight, 2, backend="naive")[0]

    for found, expected in zip(
        torch.func.jvp(fast, (x,), (direction,)), torch.func.jvp(naive, (x,), (direction,)), strict=True
    ):
        assert_close(found, expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fast(forward_ad.make_dual(x, direction))).tangent
    assert_close(tangent, torch.func.jvp(naive, (x,), (direction,))[1])
    assert_close(torch.func.grad(lambda value: fast(value).sum())(x), torch.func.grad(lambda v: naive(v).sum())(x))
    batches = torch.stack([x, direction])
    assert_close(torch.func.vmap(fast)(batches), torch.stack([naive(x), naive(direction)]))
    with pytest.raises(KernelError, match=r"torch\.func: expected no transform"):
        torch.func.vmap(lambda value: tcn(value, weight, 2, backend="cpu")[0])(batches)
