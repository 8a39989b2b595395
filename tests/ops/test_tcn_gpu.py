"""The TCN's kernels on a GPU, against float64 in plain PyTorch."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops import tcn, zero_padding
from tests.comparison import assert_close

pytestmark = pytest.mark.gpu

FULL, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call; channels in eights and 16-bit numbers go to the tensor cores, other calls to the rings."""

    shape: tuple[int, int, int] = (2, 300, 16)
    kernel_size: int = 5
    factor: int = 3
    depth: int = 3
    convolutions: int = 1
    dtype: torch.dtype = BRAIN
    bias: bool = False
    nonlinearity: str = "silu"
    residual: bool = True
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    strided: bool = False

    def real(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor(self.lengths, device="cuda")

    def leaves(self) -> list[Tensor]:
        """x, the kernels and the biases, if there are any."""
        batch, time, channels = self.shape
        room = (batch, time + 3, channels + 16) if self.strided else self.shape
        x = torch.randn(room, device="cuda").to(self.dtype)
        x = x[:, 2 : time + 2, 8 : channels + 8] if self.strided else x
        many = (self.depth, self.convolutions, channels)
        weight = torch.randn(*many, self.kernel_size, device="cuda") / self.kernel_size**0.5
        parts = [x, weight, torch.randn(*many, device="cuda")] if self.bias else [x, weight]
        return [part.to(self.dtype).detach().requires_grad_() for part in parts]

    def run(self, leaves: list[Tensor], slope: Tensor, backend: str) -> list[Tensor]:
        """The output where tokens are real, and the gradients of all leaves."""
        y, state = tcn(
            leaves[0],
            leaves[1],
            self.factor,
            bias=leaves[2] if self.bias else None,
            nonlinearity=self.nonlinearity,
            residual=self.residual,
            causal=self.causal,
            lengths=self.real(),
            backend=backend,  # type: ignore[arg-type]
        )
        assert state is None
        assert y.dtype == leaves[0].dtype
        assert torch.isfinite(y).all()
        gradients = torch.autograd.grad(y, leaves, slope.to(y.dtype))
        assert [part.dtype for part in gradients] == [part.dtype for part in leaves]
        return [zero_padding(y.detach(), self.real()), zero_padding(gradients[0], self.real()), *gradients[1:]]


CASES = {
    "one token": Case(shape=(1, 1, 8)),
    "odd time": Case(shape=(3, 1001, 72), kernel_size=17, depth=4, factor=5),
    "bias and lengths": Case(bias=True, lengths=(300, 41)),
    "empty rows": Case(bias=True, lengths=(0, 0)),
    "bidirectional": Case(causal=False, kernel_size=17, bias=True, lengths=(7, 300)),
    "even and bidirectional": Case(causal=False, kernel_size=4, dtype=HALF),
    "strided": Case(strided=True, lengths=(300, 299)),
    "dilation beyond time": Case(shape=(2, 20, 8), factor=50, depth=3),
    "no skip": Case(residual=False, nonlinearity="none", dtype=HALF),
    "kernel of one": Case(kernel_size=1, bias=True),
    "kernel of 33": Case(kernel_size=33, depth=2),
    "many rows": Case(shape=(300, 40, 16)),
    "two convolutions": Case(convolutions=2, bias=True, lengths=(300, 5)),
    "odd channels": Case(shape=(2, 300, 7), bias=True, lengths=(1, 300)),
    "even channels": Case(shape=(2, 300, 6), strided=True),
    "float32": Case(dtype=FULL, bias=True, strided=True, lengths=(300, 150)),
    "float32, bidirectional": Case(dtype=FULL, causal=False, kernel_size=17, nonlinearity="gelu"),
    "float32, 64 taps": Case(dtype=FULL, kernel_size=64, depth=1, causal=False, lengths=(30, 300)),
    "float32, dilation beyond time": Case(dtype=FULL, shape=(1, 50, 3), factor=1000, depth=3),
    "float32, gelu_tanh": Case(dtype=FULL, nonlinearity="gelu_tanh", convolutions=2),
    "float32, relu": Case(dtype=FULL, nonlinearity="relu"),
    "more blocks than one launch takes": Case(depth=14, factor=1),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_float64(name: str) -> None:
    case = CASES[name]
    leaves = case.leaves()
    # A model takes nothing from padding, so no gradient comes from there.
    slope = zero_padding(torch.randn(case.shape, device="cuda").to(case.dtype), case.real())
    ours, again = case.run(leaves, slope, "cuda"), case.run(leaves, slope, "cuda")
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = case.run(exact, slope, "plain")
    for number, (part, same, truth) in enumerate(zip(ours, again, expected, strict=True)):
        assert torch.equal(part, same)
        assert_close(part, truth, f"part {number}")


def test_slopes_of_any_layout() -> None:
    case = Case()
    leaves = case.leaves()
    row = torch.randn(case.shape[0], 1, case.shape[2], device="cuda").to(case.dtype)
    turned = torch.randn(2, 16, 300, device="cuda").to(case.dtype).transpose(1, 2)
    for slope in (row.expand(case.shape), turned, row[:, :, :1].expand(case.shape)):
        for part, other in zip(
            case.run(leaves, slope, "cuda"), case.run(leaves, slope.contiguous(), "cuda"), strict=True
        ):
            assert_close(part, other)


def test_padding_may_hold_anything() -> None:
    case = Case(lengths=(300, 41), bias=True)
    x, weight, bias = (leaf.detach() for leaf in case.leaves())
    spoilt = x.clone()
    spoilt[1, 41:] = float("nan")
    results = [tcn(part, weight, 3, bias=bias, lengths=case.real(), backend="cuda")[0] for part in (x, spoilt)]
    assert torch.equal(*results)
    assert torch.isfinite(results[1]).all()


@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("convolutions", [1, 2])
@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "new"])
def test_pieces_equal_one_call(dtype: torch.dtype, convolutions: int, inplace: bool) -> None:
    case = Case(dtype=dtype, convolutions=convolutions, bias=True)
    x, weight, bias = (leaf.detach() for leaf in case.leaves())
    expected, _ = tcn(x.double(), weight.double(), 3, bias=bias.double())
    state, pieces = None, []
    for size, part in zip(sizes := [200, 1, 1, 37, 1, 60], x.split(sizes, 1), strict=True):
        backend = "auto" if size == 1 else "cuda"
        reuse = inplace and state is not None
        y, state = tcn(
            part,
            weight,
            3,
            bias=bias,
            state=state,
            return_state=True,
            inplace=reuse,
            backend=backend,  # type: ignore[arg-type]
        )
        pieces.append(y)
    assert state is not None
    assert state.position.tolist() == [300, 300]
    assert all(buffer.dtype == dtype for buffer in state.buffers)
    assert_close(torch.cat(pieces, 1), expected)


def test_gradients_flow_through_the_state() -> None:
    case = Case(dtype=FULL, bias=True, lengths=(300, 120))
    leaves = case.leaves()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    results = []
    for x, weight, bias in (leaves, exact):
        _, state = tcn(x, weight, 3, bias=bias, lengths=case.real(), return_state=True)
        assert state is not None
        parts = torch.stack([buffer.square().sum() for buffer in state.buffers])
        results.append(torch.autograd.grad(parts.sum(), (x, weight), allow_unused=False))
    for ours, truth in zip(*results, strict=True):
        assert_close(ours, truth)


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_autocast_computes_in_its_type_and_returns_gradients_in_theirs(dtype: torch.dtype) -> None:
    case = Case(dtype=FULL, bias=True)
    leaves = case.leaves()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.autocast("cuda", dtype):
        y, state = tcn(leaves[0], leaves[1], 3, bias=leaves[2], return_state=True, backend="cuda")
        fused, _ = tcn(leaves[0], leaves[1], 3, bias=leaves[2], backend="cuda")
    truth, _ = tcn(exact[0], exact[1], 3, bias=exact[2])
    assert state is not None
    assert y.dtype == fused.dtype == dtype
    assert all(buffer.dtype == FULL for buffer in state.buffers)
    slope = torch.randn_like(y)
    gradients = torch.autograd.grad(fused, leaves, slope)
    for part, other in zip(gradients, torch.autograd.grad(truth, exact, slope.double()), strict=True):
        assert part.dtype == FULL
        assert_close(part, other, dtype=dtype)
    assert_close(y, truth)
    assert_close(fused, truth)


def test_gradients_of_gradients_are_refused() -> None:
    x, weight = Case().leaves()
    y, _ = tcn(x, weight, 3, backend="cuda")
    (slope,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(KernelError, match="TCNCA_KERNELS=plain"):
        slope.float().sum().backward()


def test_operators_keep_pytorchs_rules() -> None:
    case = Case(bias=True, lengths=(300, 41))
    x, weight, bias = case.leaves()
    settings = (1, 3, "silu", True, True, True)
    arguments = (x, weight[:, 0].detach().requires_grad_(), bias[:, 0].detach().requires_grad_(), case.real())
    torch.library.opcheck(torch.ops.tcnca.tcn_blocks.default, (*arguments, *settings))


def test_a_new_thread_can_start_kernels() -> None:
    x, weight = (leaf.detach() for leaf in Case().leaves())
    expected, _ = tcn(x, weight, 3, backend="cuda")
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(tcn(x, weight, 3, backend="cuda")[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_graphs_replay_to_the_bit() -> None:
    x, weight = (leaf.detach() for leaf in Case().leaves())
    expected, _ = tcn(x, weight, 3, backend="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = tcn(x, weight, 3, backend="cuda")
    for _ in range(2):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
