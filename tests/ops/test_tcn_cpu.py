"""The TCN's fast path for the CPU, against plain PyTorch in float64."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tcnca.errors import ConfigError, KernelError
from tcnca.ops import ACTIVATIONS, TCNState, initial_tcn_state, tcn
from tcnca.ops.tcn.cpu import fold, memory, refold, run
from tcnca.ops.tcn.cpu.blocks import Blocks, blocks_of
from tcnca.ops.tcn.cpu.operator import tcn_cpu
from tcnca.ops.tcn.plain import plain_tcn
from tests.comparison import assert_close


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, int, int] = (2, 100, 16)
    kernel_size: int = 5
    factor: int = 3
    depth: int = 3
    convolutions: int = 1
    bias: bool = False
    nonlinearity: str = "silu"
    residual: bool = True
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32

    def leaves(self) -> list[Tensor]:
        """x, the kernels and the biases, if there are any."""
        many = (self.depth, self.convolutions, self.shape[2])
        weight = torch.randn(*many, self.kernel_size) / self.kernel_size**0.5
        parts = [torch.randn(self.shape), weight, *([torch.randn(many)] if self.bias else [])]
        return [part.to(self.dtype).requires_grad_() for part in parts]

    def call(self, leaves: list[Tensor], backend: str, return_state: bool = False) -> tuple[Tensor, TCNState | None]:
        return tcn(
            leaves[0],
            leaves[1],
            self.factor,
            bias=leaves[2] if self.bias else None,
            nonlinearity=self.nonlinearity,
            residual=self.residual,
            causal=self.causal,
            lengths=None if self.lengths is None else torch.tensor(self.lengths),
            return_state=return_state,
            backend=backend,  # type: ignore[arg-type]
        )

    def results(self, leaves: list[Tensor], backend: str) -> list[Tensor]:
        """The output, the state if there is one, and the gradients of all leaves through both."""
        y, state = self.call(leaves, backend, self.causal)
        parts = [y] if state is None else [y, *state.buffers]
        slopes = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(part) for part in parts]
        pairs = [pair for pair in zip(parts, slopes, strict=True) if pair[0].requires_grad]  # not a ring of no slots
        gradients = torch.autograd.grad([part for part, _ in pairs], leaves, [slope for _, slope in pairs])
        assert [part.dtype for part in gradients] == [part.dtype for part in leaves]
        return [part.detach() for part in (*parts, *gradients)]


def _assert_right(case: Case) -> None:
    leaves = case.leaves()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, expected = case.results(leaves, "cpu"), case.results(exact, "plain")
    for number, (part, truth) in enumerate(zip(found, expected, strict=True)):
        assert_close(part, truth, f"part {number} of {case}")
    assert_close(case.call(leaves, "cpu")[0].detach(), expected[0], f"output without a state of {case}")


CASES = {
    "one token": Case(shape=(1, 1, 8)),
    "odd everything": Case(shape=(3, 101, 7), kernel_size=17, depth=4, factor=5),
    "bias and lengths": Case(bias=True, lengths=(100, 41)),
    "empty rows": Case(bias=True, lengths=(0, 0)),
    "bidirectional": Case(causal=False, kernel_size=17, bias=True, lengths=(7, 100)),
    "even and bidirectional": Case(causal=False, kernel_size=4),
    "dilation beyond time": Case(shape=(2, 20, 8), factor=50),
    "bidirectional dilation beyond time": Case(shape=(2, 20, 8), factor=50, causal=False),
    "no skip": Case(residual=False, nonlinearity="none"),
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
    "longer than a piece": Case(shape=(1, 40000, 40), kernel_size=17, factor=4, depth=4, bias=True),
    "no sequences": Case(shape=(0, 5, 8), bias=True),
} | {name: Case(nonlinearity=name, bias=True) for name in ACTIVATIONS}


@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients_are_those_of_float64(name: str) -> None:
    _assert_right(CASES[name])


@pytest.mark.parametrize("seed", range(40))
def test_any_pieces_give_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(fold, "PIECE", draw.choice([60, 250, 1000]))
    monkeypatch.setattr(fold, "SLAB", draw.choice([100, 2000, 1 << 20]))
    shape = (draw.randint(1, 3), draw.choice([1, 2, 7, 33, 65, 128]), draw.choice([1, 3, 16, 20, 40]))
    _assert_right(
        Case(
            shape=shape,
            kernel_size=draw.choice([1, 2, 3, 5, 17, 40]),
            factor=draw.choice([1, 2, 3, 5, 50]),
            convolutions=draw.randint(1, 3),
            bias=draw.random() < 0.5,
            nonlinearity=draw.choice(ACTIVATIONS),
            residual=draw.random() < 0.5,
            causal=draw.random() < 0.6,
            lengths=tuple(draw.randint(0, shape[1]) for _ in range(shape[0])) if draw.random() < 0.5 else None,
        )
    )


REFOLDED = {
    "equal rows": Case(shape=(3, 96, 16), kernel_size=17, factor=2, bias=True),
    "rows of several lengths": Case(shape=(2, 330, 16), kernel_size=17, factor=7),
    "several slabs": Case(shape=(2, 1 << 12, 160), kernel_size=5, factor=8, depth=4),
    "two convolutions": Case(shape=(2, 100, 16), convolutions=2, depth=2, bias=True, nonlinearity="gelu"),
    "three convolutions, no skip": Case(shape=(2, 100, 16), convolutions=3, depth=2, residual=False),
    "dilations beyond time": Case(shape=(2, 48, 16), kernel_size=17, factor=7, depth=4),
}


@pytest.mark.parametrize("name", REFOLDED)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
def test_from_fold_to_fold(name: str, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = REFOLDED[name]
    leaves = [leaf.detach() for leaf in case.leaves()]
    if not dense:
        leaves[0] = leaves[0].transpose(1, 2).contiguous().transpose(1, 2)
    calls: list[torch.Size] = []
    compute = refold.forward

    def counted(blocks: Blocks, x: Tensor, y: Tensor, scratch: memory.Memory) -> None:
        calls.append(x.shape)
        scratch.inner.take(1 << 21).fill_(torch.nan)  # what was there before must not matter
        compute(blocks, x, y, scratch)

    monkeypatch.setattr(refold, "forward", counted)
    y, _ = case.call(leaves, "cpu")
    assert sum(shape.numel() for shape in calls) == y.numel()
    assert_close(y, case.call([leaf.double() for leaf in leaves], "plain")[0], name)


def test_few_tokens_more_than_rows_hold_are_not_made_many() -> None:
    def refolded(time: int, causal: bool = True) -> bool:
        kernels = torch.randn(2, 1, 16, 3)
        blocks = blocks_of(kernels, None, None, 64, "silu", True, causal, time)
        return refold.refolds(blocks, torch.randn(1, time, 16))

    assert refolded(128)
    assert refolded(120)
    assert not refolded(129)
    assert not refolded(128, causal=False)


@pytest.mark.parametrize("lengths", [None, (3, 7)], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_gradcheck(causal: bool, lengths: tuple[int, ...] | None) -> None:
    case = Case(shape=(2, 7, 2), kernel_size=3, factor=2, convolutions=2, bias=True, dtype=torch.float64)
    case = dataclasses.replace(case, causal=causal, lengths=lengths)
    assert torch.autograd.gradcheck(lambda *leaves: case.call([*leaves], "cpu")[0], case.leaves())


def test_gradients_have_gradients() -> None:
    case = Case(shape=(1, 6, 2), kernel_size=2, factor=2, depth=2, bias=True, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda *leaves: case.call([*leaves], "cpu")[0], case.leaves())


def test_layout_does_not_matter() -> None:
    case = Case(shape=(3, 100, 16), bias=True)
    leaves = [leaf.detach() for leaf in case.leaves()]
    turned = [leaf.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for leaf in leaves]
    spread = [leaf.new_empty(*leaf.shape[:-1], 2 * leaf.shape[-1])[..., ::2].copy_(leaf) for leaf in leaves]
    expected = case.results([leaf.requires_grad_() for leaf in leaves], "cpu")
    for strided in (turned, [leaf.requires_grad_() for leaf in spread]):
        assert not any(leaf.is_contiguous() for leaf in strided)
        for part, truth in zip(case.results(strided, "cpu"), expected, strict=True):
            assert_close(part, truth)


def test_slopes_of_any_layout() -> None:
    case = Case()
    leaves = case.leaves()
    y, _ = case.call(leaves, "cpu")
    row = torch.randn(2, 1, 16)
    for slope in (row.expand(y.shape), torch.randn(2, 16, 100).transpose(1, 2), row[:, :, :1].expand(y.shape)):
        found = torch.autograd.grad(y, leaves, slope, retain_graph=True)
        expected = torch.autograd.grad(y, leaves, slope.contiguous(), retain_graph=True)
        for part, truth in zip(found, expected, strict=True):
            assert_close(part, truth)


def test_padding_is_what_it_is_in_plain_pytorch() -> None:
    case = Case(lengths=(100, 41), bias=True)
    leaves = [leaf.detach() for leaf in case.leaves()]
    assert_close(case.call(leaves, "cpu")[0], case.call(leaves, "plain")[0])
    leaves[0][1, 41:] = torch.nan
    y, state = case.call(leaves, "cpu", return_state=True)
    expected, _ = case.call(leaves, "plain")
    assert torch.equal(y.isnan(), expected.isnan())
    assert state is not None
    assert all(bool(buffer.isfinite().all()) for buffer in state.buffers)


def test_runs_give_the_same_bits() -> None:
    case = Case(shape=(2, 9000, 48), kernel_size=17, factor=5, bias=True)
    leaves = case.leaves()
    first = case.results(leaves, "cpu")
    for _ in range(2):
        again = case.results(leaves, "cpu")
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_threads_and_inference_mode_do_not_disturb_each_other() -> None:
    case = Case(shape=(1, 3000, 32))
    leaves = case.leaves()
    expected = case.results(leaves, "cpu")
    with torch.inference_mode():
        memory._kept.memory = None
        case.call(leaves, "cpu")
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        found[number] = case.results(leaves, "cpu")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    work(3)
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(*pair) for one in found.values() for pair in zip(one, expected, strict=True))


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "not"])
def test_the_operator_keeps_pytorchs_rules(keep: bool) -> None:
    x, weight, bias = Case(bias=True, shape=(2, 20, 4)).leaves()
    torch.library.opcheck(
        torch.ops.tcnca.tcn_cpu.default, (x, weight, bias, torch.tensor([20, 7]), 3, "silu", True, True, keep)
    )
    torch.library.opcheck(torch.ops.tcnca.tcn_cpu.default, (x, weight, None, None, 3, "gelu", False, False, keep))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph_for_all_lengths(backend: str) -> None:
    torch._dynamo.reset()
    case = Case(bias=True)
    leaves = case.leaves()
    graphs: list[object] = []

    def count(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(module)
        compiler = torch._dynamo.lookup_backend(backend)
        return compiler(module, inputs)

    compiled = torch.compile(
        lambda x, weight, bias: tcn(x, weight, 3, bias=bias, return_state=True),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    counts = set[int]()
    for time in (100, 31, 57, 5000):
        x = torch.randn(2, time, 16, requires_grad=True)
        (y, state), (expected, other) = (
            compiled(x, *leaves[1:]),
            plain_tcn(x, leaves[1], 3, bias=leaves[2], return_state=True),
        )
        assert_close(y, expected)
        assert state is not None
        assert other is not None
        for part, truth in zip(state.buffers, other.buffers, strict=True):
            assert_close(part, truth)
        found = torch.autograd.grad(y.sum() + state.buffers[1].sum(), (x, *leaves[1:]))
        truths = torch.autograd.grad(expected.sum() + other.buffers[1].sum(), (x, *leaves[1:]))
        for part, truth in zip(found, truths, strict=True):
            assert_close(part, truth)
        counts.add(len(graphs))
    # Dynamo may begin anew once, before the first call; another length is no reason to.
    assert len(counts) == 1


def test_exports() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 1, 16, 5))

        def forward(self, x: Tensor) -> Tensor:
            return tcn(x, self.weight, 3)[0]

    module, x = Module(), torch.randn(1, 50, 16)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {1: torch.export.Dim("time", min=2, max=4096)}})
    other = torch.randn(1, 77, 16)
    assert_close(program.module()(other), module(other))


_PEAK = """
import resource, sys, torch
from tcnca.ops import tcn
torch.set_num_threads(1)
x = torch.randn(8, 1 << 14, 64, requires_grad=True)
weight = torch.randn(6, 1, 64, 17, requires_grad=True)
slope = torch.randn_like(x)
for time in (64, None):  # what the library itself loads is not counted
    y, _ = tcn(x[:, :time], weight, 8, backend="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if time else before
    torch.autograd.grad(y, (x, weight), slope[:, :time])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (x.numel() * 4))
"""


def test_memory_is_that_of_the_results_and_a_little() -> None:
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    # Six blocks in memory would be six times x and more; the results are two, and a slab is an eighth of x.
    assert float(done.stdout) < 4


def test_small_and_unfit_calls_are_left_to_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fast = tcn_cpu

    def counted(x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(x.numel())
        return fast(x, *rest, **options)

    monkeypatch.setattr(run, "tcn_cpu", counted)
    monkeypatch.setattr(run, "FAST_HERE", True)
    weight = torch.randn(2, 1, 64, 3)
    large, small = torch.randn(1, 512, 64), torch.randn(1, 256, 64)
    tcn(large, weight, 2)
    assert len(calls) == 1
    tcn(small, weight, 2)
    tcn(large.double(), weight.double(), 2)
    tcn(large.bfloat16(), weight.bfloat16(), 2)
    tcn(large, weight, 2, dropout=0.5)
    tcn(large, weight, 2, state=initial_tcn_state(1, 64, 3, 2, 2))
    with torch.autocast("cpu"):
        tcn(large, weight, 2)
    monkeypatch.setenv("TCNCA_KERNELS", "plain")
    tcn(large, weight, 2)
    assert len(calls) == 1
    tcn(small, weight, 2, backend="cpu")
    monkeypatch.delenv("TCNCA_KERNELS")
    assert len(calls) == 2
    monkeypatch.setenv("TCNCA_KERNELS", "fast")
    with pytest.raises(ConfigError, match="TCNCA_KERNELS: got 'fast' in the environment, allowed are auto, plain"):
        tcn(large, weight, 2)


def test_reasons_against_the_fast_path_are_named() -> None:
    x, weight = torch.randn(1, 9, 4), torch.randn(2, 1, 4, 3)
    state = initial_tcn_state(1, 4, 3, 2, 2)
    options: list[tuple[dict[str, Any], str]] = [
        ({"normalize": lambda h, number: h}, "normalize: got one"),
        ({"dropout": 0.5}, "dropout: got 0.5"),
        ({"state": state}, "state: got one"),
        ({"bias": torch.zeros(2, 1, 4, dtype=torch.float64)}, "dtype: got"),
    ]
    for more, words in options:
        with pytest.raises(KernelError, match=f"backend: got 'cpu', which cannot run this; {words}.*'auto' or 'plain'"):
            tcn(x, weight, 2, backend="cpu", **more)
    with torch.autocast("cpu"), pytest.raises(KernelError, match="autocast"):
        tcn(x, weight, 2, backend="cpu")
    with pytest.raises(KernelError, match="allowed is the CPU; x is on meta"):
        tcn(x.to("meta"), weight.to("meta"), 2, backend="cpu")


def test_backward_under_autocast_keeps_its_types() -> None:
    case = Case()
    leaves = case.leaves()
    y, _ = case.call(leaves, "cpu")
    expected = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    with torch.autocast("cpu"):
        found = torch.autograd.grad(y.square().sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_large_scratch_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_KEPT", 1 << 16)
    memory._kept.memory = None
    tcn_cpu(torch.randn(1, 5000, 16), torch.randn(2, 1, 16, 3))
    assert memory._kept.memory is None
    tcn_cpu(torch.randn(1, 50, 16), torch.randn(2, 1, 16, 3))
    assert memory._kept.memory is not None


def test_transforms_and_forward_derivatives_are_left_to_plain() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 600, 64), torch.randn(2, 1, 64, 3)
    direction = torch.randn_like(x)

    def fast(value: Tensor) -> Tensor:
        return tcn(value, weight, 2)[0]

    def plain(value: Tensor) -> Tensor:
        return plain_tcn(value, weight, 2)[0]

    for found, expected in zip(
        torch.func.jvp(fast, (x,), (direction,)), torch.func.jvp(plain, (x,), (direction,)), strict=True
    ):
        assert_close(found, expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fast(forward_ad.make_dual(x, direction))).tangent
    assert_close(tangent, torch.func.jvp(plain, (x,), (direction,))[1])
    assert_close(torch.func.grad(lambda value: fast(value).sum())(x), torch.func.grad(lambda v: plain(v).sum())(x))
    batches = torch.stack([x, direction])
    assert_close(torch.func.vmap(fast)(batches), torch.stack([plain(x), plain(direction)]))
    with pytest.raises(KernelError, match=r"torch\.func: got one of its transforms"):
        torch.func.vmap(lambda value: tcn(value, weight, 2, backend="cpu")[0])(batches)
