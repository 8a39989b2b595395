"""Attention's kernels: when they are selected, what they compute in Triton's interpreter, and how they are planned."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.errors import InputError, KernelError
from tcnca.ops import ATTENTION_ACTIVATIONS, attend, chunked_attention, initial_attention_state, zero_padding
from tests.comparison import assert_close, relative_error
from tests.ops.interpreter import interpreted, not_interpreted

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call; its shape is batch, tokens, width of keys and width of values."""

    shape: tuple[int, int, int, int] = (2, 75, 20, 40)
    chunk_size: int | None = 30
    causal: bool = True
    activation: str = "softmax"
    bias: bool = True
    beyond: int = 2
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = FULL
    strided: bool = False
    num_heads: int = 1

    def valid(self, device: str) -> Tensor | None:
        return None if self.lengths is None else torch.tensor(self.lengths, device=device)

    def leaves(self, device: str) -> list[Tensor]:
        """Queries, keys, values and the bias, if there is one. The padding holds NaN."""
        batch, time, width, values = self.shape
        leaves = []
        for size in (width, width, values):
            room = (batch, time + 3, size + 24) if self.strided else (batch, time, size)
            part = torch.randn(room, device=device)
            part = part[:, 2 : time + 2, 16 : size + 16] if self.strided else part
            if self.lengths is not None:
                spoilt = torch.arange(time, device=device) >= torch.tensor(self.lengths, device=device).unsqueeze(1)
                part.masked_fill_(spoilt.unsqueeze(-1), float("nan"))
            leaves.append(part.to(self.dtype))
        if self.bias:
            max_length = min(self.chunk_size or time, time) + self.beyond
            leaves.append(torch.randn(2 * max_length - 1, device=device))
        return [leaf.detach().requires_grad_() for leaf in leaves]

    def run(self, leaves: list[Tensor], slope: Tensor, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The output where tokens are valid, and every gradient."""
        q, k, v, *bias = leaves
        lengths = self.valid(str(q.device))
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "causal": self.causal, "activation": self.activation}
        options["num_heads"] = self.num_heads
        out = zero_padding(run(q, k, v, bias=bias[0] if bias else None, lengths=lengths, **options), lengths)
        gradients = torch.autograd.grad(out, leaves, slope.to(out.dtype))
        names = ("to q", "to k", "to v", "to bias")
        return {"out": out} | dict(zip(names, gradients, strict=False))


def run_triton(*arguments: Any, **options: Any) -> Tensor:
    return chunked_attention(*arguments, backend="triton", **options)[0]


def run_naive(*arguments: Any, **options: Any) -> Tensor:
    return chunked_attention(*arguments, backend="naive", **options)[0]


def assert_right(case: Case, device: str) -> None:
    """The kernels against the naive version in float64, and on a GPU, where programs race, against themselves."""
    leaves = case.leaves(device)
    slope = torch.randn(*case.shape[:2], case.shape[3], device=device)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = case.run(exact, slope, run_naive)
    actual = case.run(leaves, slope, run_triton)
    again = case.run(leaves, slope, run_triton) if device == "cuda" else actual
    for name, value in actual.items():
        assert_close(value, expected[name], name, case.dtype)
        assert torch.equal(again[name], value), name


def launch_module() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tcnca.ops.attention.triton_launch")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as small as the interpreter is slow."""
    plan = launch_module()
    for name in ("HALF", "HALF_NARROW", "FULL"):
        table = {
            kernel: plan.Tile(32, 16, 16 if kernel == "scores_gradient" else 32, num_warps=4, num_stages=1)
            for kernel in plan.FULL
        }
        monkeypatch.setattr(plan, name, table)
    # Two blocks of keys of the largest chunk, of three.
    monkeypatch.setattr(plan, "SLAB_BYTES", 2 * 2 * 4 * 32 * 96)
    monkeypatch.setattr(plan, "BIAS_TILE", 16)


small = pytest.mark.usefixtures("_small")

# No multiples of any tile; several blocks, slices and slabs; a single block; rows that are full, empty and in between.
CASES = [
    Case(lengths=(75, 31), chunk_size=70),
    Case(causal=False, chunk_size=16, bias=False),
    Case(activation="laplace", lengths=(75, 31), chunk_size=16),
    Case(activation="relu2", chunk_size=16),
    Case(shape=(9, 1, 3, 2), chunk_size=7, beyond=6),
    Case(shape=(2, 40, 24, 34), lengths=(31, 40), chunk_size=16, bias=False, num_heads=2),
]
MORE_CASES = [
    Case(chunk_size=70, bias=False),
    Case(lengths=(75, 31), chunk_size=16, bias=False),
    Case(causal=False, lengths=(75, 31), chunk_size=70, bias=False),
    Case(causal=False, lengths=(75, 31), chunk_size=16),
    Case(activation="laplace", chunk_size=70, bias=False),
    Case(activation="relu2", causal=False, chunk_size=70),
    Case(activation="relu2", lengths=(75, 31), chunk_size=70, bias=False),
    Case(activation="laplace", causal=False, lengths=(75, 31), chunk_size=70),
    Case(shape=(3, 50, 16, 33), chunk_size=None, lengths=(50, 0, 17)),
    Case(shape=(2, 40, 32, 16), chunk_size=100, beyond=60, causal=False),
    Case(shape=(2, 50, 16, 70), chunk_size=45, dtype=HALF, strided=True),
]


@interpreted
@small
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_output_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cpu")


@interpreted
@small
@pytest.mark.parametrize("activation", ["softmax", pytest.param("laplace", marks=pytest.mark.slow)])
def test_dropout_is_the_same_in_every_kernel(activation: str) -> None:
    """Values that are the unit vectors show the weights, and so which ones were dropped."""
    case = Case(shape=(1, 64, 16, 64), chunk_size=64, activation=activation, causal=False)
    leaves, slope = case.leaves("cpu"), torch.randn(1, 64, 64)
    leaves[2] = torch.eye(64).unsqueeze(0).requires_grad_()

    def dropped(*arguments: Any, **options: Any) -> Tensor:
        torch.manual_seed(1)
        return run_triton(*arguments, dropout=0.3, **options)

    actual = case.run(leaves, slope, dropped)
    whole = case.run(leaves, slope, run_triton)["out"]
    # Where a weight is zero without dropout, nothing depends on whether it was dropped.
    factors = torch.where((actual["out"] == 0) & (whole != 0), 0.0, 1 / 0.7)
    kept = (factors[whole != 0] != 0).double().mean()
    assert abs(float(kept) - 0.7) < 0.02

    def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        unit = torch.eye(64, dtype=torch.float64).unsqueeze(0)
        return (run_naive(q, k, unit, **options) * factors.double()) @ v

    expected = case.run([leaf.detach().double().requires_grad_() for leaf in leaves], slope, exact)
    for name, value in actual.items():
        assert_close(value, expected[name], name)
    torch.manual_seed(2)
    q, k, v, bias = leaves
    other = run_triton(q, k, v, bias=bias, chunk_size=64, causal=False, activation=activation, dropout=0.3)
    assert not torch.equal(other, actual["out"])


@interpreted
@small
@pytest.mark.slow
@pytest.mark.parametrize("activation", ATTENTION_ACTIVATIONS)
def test_small_gradients_in_half_precision(activation: str) -> None:
    """Gradients as small as a mean over many tokens leaves them are as right in fp16 as in PyTorch, or nearly so: those
    of scores are here close to its smallest number, and the naive version adds them up for the bias in float32.
    """
    case = Case(shape=(1, 256, 16, 16), chunk_size=None, dtype=HALF, activation=activation)
    leaves, slope = case.leaves("cpu"), 1e-4 * torch.randn(1, 256, 16)
    exact = case.run([leaf.detach().double().requires_grad_() for leaf in leaves], slope, run_naive)
    naive, ours = (case.run(leaves, slope, way) for way in (run_naive, run_triton))
    for name, expected in exact.items():
        errors = [relative_error(found[name], expected) for found in (ours, naive)]
        assert errors[0] <= max(1.5 * errors[1], 5e-3), (name, errors)


@interpreted
@small
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["softmax", "laplace"])
def test_opcheck(activation: str) -> None:
    case = Case(shape=(2, 20, 4, 6), chunk_size=9, lengths=(20, 11))
    q, k, v, bias = (leaf.detach().nan_to_num().requires_grad_() for leaf in case.leaves("cpu"))
    arguments = (q, k, v, bias, case.valid("cpu"), None, 9, True, activation, 0.0)
    torch.library.opcheck(torch.ops.tcnca.chunked_attention.default, arguments)


@interpreted
@small
def test_the_state_is_that_of_the_naive_version_and_second_derivatives_are_refused() -> None:
    case = Case(shape=(2, 20, 4, 6), chunk_size=9, lengths=(20, 11))
    q, k, v, bias = (leaf.detach().nan_to_num().requires_grad_() for leaf in case.leaves("cpu"))
    options: dict[str, Any] = {"chunk_size": 9, "bias": bias, "lengths": case.valid("cpu"), "return_state": True}
    states = [chunked_attention(q, k, v, backend=backend, **options)[1] for backend in ("triton", "naive")]
    for ours, theirs in zip(*(state.tensors().values() for state in states if state is not None), strict=True):
        assert torch.equal(ours, theirs)
    (gradient,) = torch.autograd.grad(run_triton(q, k, v, chunk_size=9).sum(), q, create_graph=True)
    with pytest.raises(KernelError, match=r"first derivatives only.*backend='naive'.*TCNCA_KERNELS=off"):
        gradient.sum().backward()


def assert_continuing_is_right(device: str, dtype: torch.dtype, activation: str) -> None:
    """Continue two rows at different places of their chunks, also in steps, and compare with one call."""
    case = Case(shape=(2, 75, 20, 40), chunk_size=30, activation=activation, dtype=dtype)
    q, k, v, bias = case.leaves(device)
    options: dict[str, Any] = {"chunk_size": 30, "bias": bias, "activation": activation, "return_state": True}
    whole, _ = chunked_attention(q, k, v, backend="naive", **options)
    read = torch.tensor([22, 5], device=device)
    index = torch.arange(53, device=device) + read.unsqueeze(1)
    rest = [part.gather(1, index.unsqueeze(-1).expand(-1, -1, part.shape[2])) for part in (q, k, v)]
    expected = whole.gather(1, index.unsqueeze(-1).expand(-1, -1, 40))
    gradients, states = [], []
    for backend in ("triton", "naive"):
        _, state = chunked_attention(q[:, :22], k[:, :22], v[:, :22], lengths=read, backend=backend, **options)
        out, after = chunked_attention(*rest, state=state, backend=backend, **options)
        assert_close(out, expected, backend)
        assert after is not None
        states.append(after.tensors())
        gradients.append(torch.autograd.grad(out.square().sum(), [*rest, bias], retain_graph=True))
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs)


@interpreted
@small
def test_continuing_is_right_in_the_interpreter() -> None:
    assert_continuing_is_right("cpu", FULL, "softmax")


@not_interpreted
def test_on_a_cpu_auto_is_naive_to_the_bit_and_triton_is_refused() -> None:
    q, k, v = (torch.randn(2, 9, size) for size in (3, 3, 5))
    out, _ = chunked_attention(q, k, v, chunk_size=4)
    assert torch.equal(out, run_naive(q, k, v, chunk_size=4))
    first = attend(q[:, :4], k[:, :4], v[:, :4], mask=torch.ones(4, 4).tril().bool())
    assert_close(out[:, :4], first)
    with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*expected a CUDA device.*'naive'"):
        run_triton(q, k, v, chunk_size=4)
    with pytest.raises(InputError, match="backend: expected one of auto, naive, sdpa, triton, got 'cuda'"):
        chunked_attention(q, k, v, chunk_size=4, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"tcnca::chunked_attention.*CPU"):
        torch.ops.tcnca.chunked_attention.default(q, k, v, None, None, None, 4, True, "softmax", 0.0)


def reason(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    api: Any = importlib.import_module("tcnca.ops.attention.api")
    naive: Any = importlib.import_module("tcnca.ops.attention.naive")
    optional = {"bias": None, "lengths": None, "state": None, **options}
    settings = {"chunk_size": 4, "causal": True, "activation": "softmax", "dropout": 0.0}
    call = naive.AttentionCall(q, k, v, return_state=False, inplace=False, **(settings | optional))
    (triton,) = (candidate for candidate in api.CANDIDATES if candidate.name == "triton")
    return triton.unsupported_reason(call)


def _fake(*shape: int, dtype: torch.dtype = BRAIN) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_unsupported_reasons_are_named() -> None:
    with torch._subclasses.FakeTensorMode():
        q, v, wide = _fake(2, 9, 16), _fake(2, 9, 64), _fake(2, 9, 129)
        state = initial_attention_state(2, 16, 64, 4, device="cuda", dtype=BRAIN)
        found = [
            reason(q, q, v, lengths=torch.empty(2, dtype=torch.long)),
            reason(q.double(), q.double(), v.double()),
            reason(q.float(), q.float(), v),
            reason(q, q, v, state=state, chunk_size=None),
            reason(wide, wide, v),
            reason(q.to("meta"), q.to("meta"), v.to("meta")),
        ]
        assert reason(q, q, v) is None
        assert reason(q, q, v, state=state) is None
    words = [
        "got cpu",
        "got torch.float64",
        "except under autocast",
        "chunk_size: expected chunks",
        "got 129",
        "on meta",
    ]
    for text, word in zip(found, words, strict=True):
        assert text is not None
        assert word in text


def test_tiles_fit_the_widths_and_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = launch_module()

    def tile(kernel: str, width: int, d_value: int, chunk_size: int, columns: int | None = None, **options: Any) -> Any:
        settings = {"dtype": BRAIN, "memory": plan.LARGE_SHARED_MEMORY, **options}
        monkeypatch.setattr(plan, "max_shared_memory", lambda device: settings["memory"])
        strides = (width, width, d_value)
        signature = plan.Signature(
            1, 9, width, d_value, strides, settings["dtype"], None, None, chunk_size, True, "softmax", 0.0, None
        )
        return signature.tile(kernel, columns)

    wide = tile("attended", 128, 1024, 2048)
    assert (wide.rows, wide.columns) == (64, 256)
    small = tile("attended", 32, 64, 30)
    assert (small.rows, small.others, small.columns) == (32, 32, 64)
    # Three slices of 128 hold 320 columns with less to spare than two of 256.
    assert tile("rows_gradient", 96, 320, 128).columns == 128
    assert tile("attended", 128, 1024, 0) == wide
    assert tile("attended", 128, 1024, 2048, memory=99 * 1024).columns == 128
    memories = (plan.LARGE_SHARED_MEMORY, 99 * 1024)
    for d_value, chunk, dtype, memory in itertools.product(
        (32, 256, 257, 1024), (0, 20, 2048), (BRAIN, FULL), memories
    ):
        options = {"columns": 64, "dtype": dtype, "memory": memory}
        scores, rows = (tile(name, 64, d_value, chunk, **options) for name in ("scores_gradient", "rows_gradient"))
        assert scores.rows == rows.rows
        assert rows.rows % rows.others == 0


@pytest.mark.parametrize(("most", "count"), [(1, 35), (30_000, 20), (210_000, 3), (10**9, 1)])
def test_slabs_hold_every_block_of_every_chunk_once(monkeypatch: pytest.MonkeyPatch, most: int, count: int) -> None:
    plan = launch_module()
    monkeypatch.setattr(plan, "SLAB_BYTES", most)
    found = plan.slabs(5, 7, 16, 4)
    covered = [
        (group, block)
        for slab in found
        for group in range(slab.group, slab.group + slab.groups)
        for block in range(slab.block, slab.block + slab.blocks)
    ]
    assert sorted(covered) == list(itertools.product(range(5), range(7)))
    largest = max(2 * 4 * slab.groups * slab.blocks * 16 * 7 * 16 for slab in found)
    assert largest <= most or all(slab.groups == slab.blocks == 1 for slab in found)
    assert len(found) == count


def test_slabs_of_nothing_and_of_very_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = launch_module()
    assert plan.slabs(0, 3, 16, 4) == plan.slabs(3, 0, 16, 4) == []
    monkeypatch.setattr(plan, "SLAB_BYTES", 2**40)
    # The limit of a grid's second dimension.
    assert [slab.groups for slab in plan.slabs(70_000, 1, 16, 2)] == [65_535, 4_465]


def test_a_chunk_of_any_size_is_one_chunk() -> None:
    """Numbers of kernels have 32 bits; sizes beyond the sequence say no more than its length does."""
    plan = launch_module()
    for chunk in (300, 2**31, 2**32, 2**63 - 1):
        call = plan.Signature(2, 300, 32, 64, (32, 32, 64), BRAIN, None, None, chunk, True, "softmax", 0.0, None)
        assert plan._numbers(call)["size"] == 300
        assert call.chunks == 1
