"""Attention's kernels: when they run, what they compute in Triton's interpreter, and PyTorch's rules for operators."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.errors import InputError, KernelError
from tcnca.ops import ATTENTION_ACTIVATIONS, attend, chunked_attention, initial_attention_state, zero_padding
from tcnca.ops.attention.choice import WIDEST, why_not
from tcnca.ops.attention.triton import tiles
from tests.comparison import assert_close
from tests.ops.interpreter import interpret, not_interpreted, with_interpreter

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
GRADIENTS = ("scores_gradient", "rows_gradient")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call; tokens, width and width of the values."""

    shape: tuple[int, int, int, int] = (2, 75, 20, 40)
    chunk_size: int | None = 30
    causal: bool = True
    activation: str = "softmax"
    bias: bool = True
    beyond: int = 2
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = FULL
    strided: bool = False

    def real(self, device: str) -> Tensor | None:
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
            reach = min(self.chunk_size or time, time) + self.beyond
            leaves.append(torch.randn(2 * reach - 1, device=device))
        return [leaf.detach().requires_grad_() for leaf in leaves]

    def run(self, leaves: list[Tensor], slope: Tensor, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        """The output where tokens are real, and every gradient."""
        q, k, v, *bias = leaves
        lengths = self.real(str(q.device))
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "causal": self.causal, "activation": self.activation}
        out = zero_padding(run(q, k, v, bias=bias[0] if bias else None, lengths=lengths, **options), lengths)
        gradients = torch.autograd.grad(out, leaves, slope.to(out.dtype))
        names = ("to q", "to k", "to v", "to bias")
        return {"out": out} | dict(zip(names, gradients, strict=False))


def by_kernels(*arguments: Any, **options: Any) -> Tensor:
    return chunked_attention(*arguments, backend="triton", **options)[0]


def in_plain(*arguments: Any, **options: Any) -> Tensor:
    return chunked_attention(*arguments, backend="plain", **options)[0]


def assert_right(case: Case, device: str) -> None:
    """The kernels against float64 in plain PyTorch, and on a GPU, where programs race, against themselves."""
    leaves = case.leaves(device)
    slope = torch.randn(*case.shape[:2], case.shape[3], device=device)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = case.run(exact, slope, in_plain)
    actual = case.run(leaves, slope, by_kernels)
    again = case.run(leaves, slope, by_kernels) if device == "cuda" else actual
    for name, value in actual.items():
        assert_close(value, expected[name], name, case.dtype)
        assert torch.equal(again[name], value), name


# No multiples of any tile; several blocks, slices and parts; a single block; rows that are full, empty and in between.
def small_cases(function: str) -> list[Case]:
    # Any three of four settings in all combinations; where there is no normalizer, any two of three.
    several = [
        Case(
            activation=function,
            causal=causal,
            lengths=lengths,
            chunk_size=chunk,
            bias=causal ^ (lengths is None) ^ large,
        )
        for causal in (True, False)
        for lengths in (None, (75, 31))
        for chunk, large in ((70, True), (16, False))
    ]
    if function != "softmax":
        return several[::2]
    return [
        *several,
        Case(shape=(9, 1, 3, 2), chunk_size=7, beyond=6),
        Case(shape=(3, 50, 16, 33), chunk_size=None, lengths=(50, 0, 17)),
        Case(shape=(2, 40, 32, 16), chunk_size=100, beyond=60, causal=False),
        Case(shape=(2, 50, 16, 70), chunk_size=45, dtype=HALF, strided=True),
    ]


def use_small_tiles() -> None:
    """As small as the interpreter is slow."""
    for table in (tiles.HALF, tiles.HALF_NARROW, tiles.FULL):
        for kernel in table:
            table[kernel] = tiles.Tile(32, 16, 16 if kernel == "scores_gradient" else 32, warps=4, stages=1)
    # Two blocks of keys of the largest chunk, of three.
    tiles.SLAB = 2 * 2 * 4 * 32 * 96
    tiles.BIAS = 16


def run_small_cases(*functions: str) -> None:
    torch.manual_seed(0)
    use_small_tiles()
    for case in [case for function in functions for case in small_cases(function)]:
        try:
            assert_right(case, "cpu")
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def run_dropout(function: str) -> None:
    """Values that are the unit vectors show the weights, and so which ones were dropped."""
    torch.manual_seed(0)
    use_small_tiles()
    case = Case(shape=(2, 64, 16, 64), chunk_size=64, activation=function, causal=False)
    leaves, slope = case.leaves("cpu"), torch.randn(2, 64, 64)
    leaves[2] = torch.eye(64).repeat(2, 1, 1).requires_grad_()

    def dropped(*arguments: Any, **options: Any) -> Tensor:
        torch.manual_seed(1)
        return by_kernels(*arguments, dropout=0.3, **options)

    actual = case.run(leaves, slope, dropped)
    whole = case.run(leaves, slope, by_kernels)["out"]
    # Where a weight is zero without dropout nobody knows, and nothing depends on it.
    factors = torch.where((actual["out"] == 0) & (whole != 0), 0.0, 1 / 0.7)
    kept = (factors[whole != 0] != 0).double().mean()
    assert abs(float(kept) - 0.7) < 0.02

    def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        unit = torch.eye(64, dtype=torch.float64).expand(2, -1, -1)
        return (in_plain(q, k, unit, **options) * factors.double()) @ v

    expected = case.run([leaf.detach().double().requires_grad_() for leaf in leaves], slope, exact)
    for name, value in actual.items():
        assert_close(value, expected[name], name)
    torch.manual_seed(2)
    q, k, v, bias = leaves
    other = by_kernels(q, k, v, bias=bias, chunk_size=64, causal=False, activation=function, dropout=0.3)
    assert not torch.equal(other, actual["out"])


def run_small_gradients() -> None:
    """Gradients as small as a mean over many tokens leaves them come through fp16 as in plain PyTorch, or nearly so:
    those of scores are here close to its smallest number, and plain PyTorch adds them up for the bias in float32.
    """
    torch.manual_seed(0)
    use_small_tiles()
    for function in ATTENTION_ACTIVATIONS:
        case = Case(shape=(1, 256, 16, 16), chunk_size=None, dtype=HALF, activation=function)
        leaves, slope = case.leaves("cpu"), 1e-4 * torch.randn(1, 256, 16)
        exact = case.run([leaf.detach().double().requires_grad_() for leaf in leaves], slope, in_plain)
        plain, ours = (case.run(leaves, slope, way) for way in (in_plain, by_kernels))
        for name, expected in exact.items():
            errors = [float((found[name].double() - expected).norm() / expected.norm()) for found in (ours, plain)]
            assert errors[0] <= max(1.5 * errors[1], 5e-3), (function, name, errors)


def run_operator_rules() -> None:
    """`opcheck`, a state, and second derivatives, which are refused."""
    torch.manual_seed(0)
    use_small_tiles()
    case = Case(shape=(2, 20, 4, 6), chunk_size=9, lengths=(20, 11))
    q, k, v, bias = (leaf.detach().nan_to_num().requires_grad_() for leaf in case.leaves("cpu"))
    for function in ("softmax", "laplace"):
        arguments = (q, k, v, bias, case.real("cpu"), None, 9, True, function, 0.0)
        torch.library.opcheck(torch.ops.tcnca.chunked_attention.default, arguments)
    options: dict[str, Any] = {"chunk_size": 9, "bias": bias, "lengths": case.real("cpu"), "return_state": True}
    states = [chunked_attention(q, k, v, backend=backend, **options)[1] for backend in ("triton", "plain")]
    for ours, theirs in zip(*(state.tensors().values() for state in states if state is not None), strict=True):
        assert torch.equal(ours, theirs)
    (gradient,) = torch.autograd.grad(by_kernels(q, k, v, chunk_size=9).sum(), q, create_graph=True)
    with pytest.raises(KernelError, match="TCNCA_KERNELS=plain"):
        gradient.sum().backward()


def inside(call: str) -> None:
    interpret("-c", f"import tests.ops.test_attention_fused as t\nt.{call}")


@pytest.mark.slow
@with_interpreter
@pytest.mark.parametrize("functions", [("softmax",), ("relu2", "laplace")], ids=str)
def test_output_and_gradients_are_right(functions: tuple[str, ...]) -> None:
    inside(f"run_small_cases(*{functions!r})")


@pytest.mark.slow
@with_interpreter
def test_dropout_is_the_same_in_every_kernel() -> None:
    inside("run_dropout('softmax')\nt.run_dropout('laplace')")


@pytest.mark.slow
@with_interpreter
def test_small_gradients_in_half_precision() -> None:
    inside("run_small_gradients()")


@pytest.mark.slow
@with_interpreter
def test_the_operator_keeps_pytorchs_rules() -> None:
    inside("run_operator_rules()")


@not_interpreted
def test_on_a_cpu_auto_is_plain_to_the_bit() -> None:
    q, k, v = (torch.randn(2, 9, size) for size in (3, 3, 5))
    out, _ = chunked_attention(q, k, v, chunk_size=4)
    assert torch.equal(out, in_plain(q, k, v, chunk_size=4))
    first = attend(q[:, :4], k[:, :4], v[:, :4], mask=torch.ones(4, 4).tril().bool())
    assert_close(out[:, :4], first)


@not_interpreted
def test_derivatives_that_the_kernels_lack_are_plain() -> None:
    q, reasons = torch.randn(2, 9, 3), []

    def loss(x: Tensor) -> Tensor:
        reasons.append(why_not(x, x, x))
        return chunked_attention(x, x, x, chunk_size=4)[0].sum()

    torch.func.grad(loss)(q)
    torch.func.jvp(loss, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(q, q))
    assert len(reasons) == 3
    assert all(reason is not None and "torch.func" in reason for reason in reasons), reasons


@not_interpreted
def test_the_operator_has_no_kernel_for_a_cpu() -> None:
    q = torch.randn(2, 9, 3)
    with pytest.raises(NotImplementedError, match=r"tcnca::chunked_attention.*CPU"):
        torch.ops.tcnca.chunked_attention.default(q, q, q, None, None, None, 4, True, "softmax", 0.0)


@not_interpreted
def test_triton_is_refused_on_a_cpu() -> None:
    q = torch.randn(2, 9, 3)
    with pytest.raises(KernelError, match=r"backend: got 'triton', which cannot run this;.*CUDA device.*'plain'"):
        chunked_attention(q, q, q, chunk_size=4, backend="triton")
    with pytest.raises(InputError, match="backend: got 'cuda', allowed are auto, plain, triton"):
        chunked_attention(q, q, q, chunk_size=4, backend="cuda")  # type: ignore[arg-type]


def _fake(*shape: int, dtype: torch.dtype = BRAIN) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_reasons_against_kernels_are_named() -> None:
    with torch._subclasses.FakeTensorMode():
        q, v = _fake(2, 9, 16), _fake(2, 9, 64)
        state = initial_attention_state(2, 16, 64, 4, device="cuda", dtype=BRAIN)
        wide = _fake(2, 9, WIDEST + 1)
        found = [
            why_not(q, q, v, lengths=torch.empty(2, dtype=torch.long)),
            why_not(q.double(), q.double(), v.double()),
            why_not(q.float(), q.float(), v),
            why_not(q, q, v, state=state),
            why_not(wide, wide, v),
            why_not(q.to("meta"), q.to("meta"), v.to("meta")),
        ]
    words = ["another device", "dtype: got another", "except under autocast", "state", "width: got 129", "on meta"]
    for reason, word in zip(found, words, strict=True):
        assert reason is not None
        assert word in reason


@pytest.mark.parametrize("function", ATTENTION_ACTIVATIONS)
def test_what_a_compiler_is_told_of_shapes(function: str) -> None:
    with torch._subclasses.FakeTensorMode():
        q, v, bias = _fake(2, 90, 16), _fake(2, 90, 64), _fake(2 * 30 - 1, dtype=FULL)
        settings = (30, True, function, 0.0)
        out, normalizer = torch.ops.tcnca.chunked_attention.default(q, q, v, bias, None, None, *settings)
        assert out.shape == v.shape
        assert out.dtype == BRAIN
        assert normalizer.shape == ((2, 90) if function == "softmax" else (0,))
        gradients = torch.ops.tcnca.chunked_attention_backward.default(
            v, out, normalizer, q, q, v, bias, None, None, *settings, True
        )
        assert [part.shape for part in gradients] == [q.shape, q.shape, v.shape, bias.shape]
        assert [part.dtype for part in gradients] == [BRAIN, BRAIN, BRAIN, FULL]


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys\nsys.modules['triton'] = None\nimport torch, tcnca\nfrom tcnca.ops import chunked_attention\n"
        "chunked_attention(*[torch.randn(1, 4, 2)] * 3, chunk_size=2)\n"
        "names = ('launch', 'forward', 'backward', 'shared', 'machine')\n"
        "assert not [name for name in names if f'tcnca.ops.attention.triton.{name}' in sys.modules]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_tiles_fit_the_widths_and_the_chunk() -> None:
    room = tiles.ROOM
    wide = tiles.tile_of("attended", 128, 1024, 2048, BRAIN, room)
    assert (wide.rows, wide.columns) == (64, 256)
    small = tiles.tile_of("attended", 32, 64, 30, BRAIN, room)
    assert (small.rows, small.others, small.columns) == (32, 32, 64)
    # Three slices of 128 hold 320 columns with less to spare than two of 256.
    assert tiles.tile_of("rows_gradient", 96, 320, 128, BRAIN, room).columns == 128
    assert tiles.tile_of("attended", 128, 1024, 0, BRAIN, room) == wide
    assert tiles.tile_of("attended", 128, 1024, 2048, BRAIN, 99 * 1024).columns == 128
    settings = itertools.product((32, 256, 257, 1024), (0, 20, 100, 2048), (BRAIN, FULL), (room, 99 * 1024))
    for values, chunk, dtype, memory in settings:
        scores, rows = (tiles.tile_of(name, 64, values, chunk, dtype, memory, 64) for name in GRADIENTS)
        assert scores.rows == rows.rows
        assert rows.rows % rows.others == 0


@pytest.mark.parametrize("most", [1, 30_000, 210_000, 10**9])
def test_slabs_hold_every_block_of_every_chunk_once_and_no_more_than_they_may(most: int) -> None:
    found = tiles.slabs(5, 7, 16, 4, most)
    covered = [
        (group, block)
        for slab in found
        for group in range(slab.group, slab.group + slab.groups)
        for block in range(slab.block, slab.block + slab.blocks)
    ]
    assert sorted(covered) == list(itertools.product(range(5), range(7)))
    largest = max(2 * 4 * slab.groups * slab.blocks * 16 * 7 * 16 for slab in found)
    assert largest <= most or all(slab.groups == slab.blocks == 1 for slab in found)
    assert len(found) == {1: 35, 30_000: 20, 210_000: 3, 10**9: 1}[most]


def test_slabs_of_nothing_and_of_very_many_chunks() -> None:
    assert tiles.slabs(0, 3, 16, 4, 100) == tiles.slabs(3, 0, 16, 4, 100) == []
    # A grid is no longer than that on its second side.
    assert [slab.groups for slab in tiles.slabs(70_000, 1, 16, 2, 2**40)] == [65_535, 4_465]
