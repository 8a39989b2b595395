"""The temporal convolutional network against explicit sums, its receptive field, and streaming."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca.ops import ACTIVATIONS, TCNState, initial_tcn_state, receptive_field, tcn
from tests.comparison import assert_close
from tests.ops.properties import THOROUGH, in_pieces, leaf

# Kernel size, dilation factor, depth, convolutions per block.
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2))
Shape = tuple[int, int, int, int]

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "none": lambda x: x,
}


def explicit_conv(x: Tensor, weight: Tensor, dilation: int, bias: Tensor | None, causal: bool) -> Tensor:
    """Tap `j` looks `j` dilations back; in a bidirectional convolution the smaller half of the taps looks ahead."""
    time, kernel_size = x.shape[1], weight.shape[1]
    ahead = 0 if causal else (kernel_size - 1) // 2
    y = torch.zeros_like(x) if bias is None else torch.zeros_like(x) + bias
    for now, tap in itertools.product(range(time), range(kernel_size)):
        source = now - (tap - ahead) * dilation
        if 0 <= source < time:
            y[:, now] += weight[:, tap] * x[:, source]
    return y


def explicit_tcn(
    x: Tensor,
    weight: Tensor,
    factor: int,
    bias: Tensor | None = None,
    activation: str = "silu",
    residual: bool = True,
    causal: bool = True,
    norm_fn: Callable[[Tensor, int], Tensor] = lambda h, _: h,
    drop: Callable[[Tensor, int], Tensor] = lambda h, _: h,
) -> Tensor:
    depth, convolutions = weight.shape[:2]
    for block in range(depth):
        h = x
        for index in range(convolutions):
            number, offset = block * convolutions + index, None if bias is None else bias[block, index]
            h = norm_fn(explicit_conv(h, weight[block, index], factor**block, offset, causal), number)
            h = drop(FORMULAS[activation](h), number)
        x = x + h if residual else h
    return x


@THOROUGH
@given(
    time=st.integers(1, 14),
    shape=SHAPES,
    activation=st.sampled_from(ACTIVATIONS),
    residual=st.booleans(),
    causal=st.booleans(),
    with_bias=st.booleans(),
)
def test_equals_the_explicit_blocks(
    time: int, shape: Shape, activation: str, residual: bool, causal: bool, with_bias: bool
) -> None:
    torch.manual_seed(0)
    kernel_size, factor, depth, convolutions = shape
    x, weight = (torch.randn(*s, dtype=torch.float64) for s in ((2, time, 2), (depth, convolutions, 2, kernel_size)))
    bias = torch.randn(depth, convolutions, 2, dtype=torch.float64) if with_bias else None
    y, _ = tcn(x, weight, factor, bias=bias, activation=activation, residual=residual, causal=causal)
    assert_close(y, explicit_tcn(x, weight, factor, bias, activation, residual, causal))


@pytest.mark.parametrize("convolutions", [1, 2])
def test_order_of_norm_and_dropout(convolutions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 6, 2, dtype=torch.float64), torch.randn(3, convolutions, 2, 3, dtype=torch.float64)
    called: list[tuple[str, float]] = []

    def norm_fn(h: Tensor, number: int) -> Tensor:
        called.append(("norm", number))
        return h * (number + 2) + 1

    def dropout(h: Tensor, probability: float) -> Tensor:
        called.append(("dropout", probability))
        return h / (len(called) // 2 + 2)

    monkeypatch.setattr(F, "dropout", dropout)
    y, _ = tcn(x, weight, 2, norm_fn=norm_fn, dropout=0.25)
    expected = explicit_tcn(
        x, weight, 2, norm_fn=lambda h, number: h * (number + 2) + 1, drop=lambda h, number: h / (number + 3)
    )
    assert_close(y, expected)
    assert called == [pair for number in range(3 * convolutions) for pair in (("norm", number), ("dropout", 0.25))]


@given(
    kernel_size=st.integers(1, 20), factor=st.integers(2, 5), depth=st.integers(1, 8), convolutions=st.integers(1, 3)
)
def test_receptive_field_is_the_papers_formula(kernel_size: int, factor: int, depth: int, convolutions: int) -> None:
    expected = 1 + convolutions * (kernel_size - 1) * ((factor**depth - 1) // (factor - 1))
    assert receptive_field(kernel_size, factor, depth, convolutions) == expected


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no skip"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@given(shape=SHAPES)
def test_gradients_reach_the_receptive_field(causal: bool, residual: bool, shape: Shape) -> None:
    kernel_size, factor, depth, convolutions = shape
    reach = receptive_field(*shape)
    x, middle = leaf(1, 2 * reach + 1, 1), reach
    # Positive weights, so that no two paths cancel.
    weight = torch.rand(depth, convolutions, 1, kernel_size, dtype=torch.float64) + 0.5
    y, _ = tcn(x, weight, factor, activation="none", causal=causal, residual=residual)
    (gradient,) = torch.autograd.grad(y[0, middle, 0], x)
    reached = gradient.flatten().nonzero().flatten()
    first, last = int(reached.min()), int(reached.max())
    taps_ahead = 0 if causal else (kernel_size - 1) // 2
    assert last - first + 1 == reach
    assert last - middle == convolutions * taps_ahead * sum(factor**block for block in range(depth))
    if factor <= convolutions * (kernel_size - 1) + 1:  # otherwise there are gaps between the taps of a block
        assert len(reached) == reach


@given(shape=SHAPES)
def test_the_state_contains_the_receptive_field_less_one(shape: Shape) -> None:
    kernel_size, factor, depth, convolutions = shape
    x, weight = torch.randn(3, 2, 2), torch.randn(depth, convolutions, 2, kernel_size)
    y, returned = tcn(x, weight, factor, return_state=True)
    initial = initial_tcn_state(3, 2, *shape)
    assert returned is not None
    for state in (initial, returned):
        assert len(state.buffers) == depth * convolutions
        assert sum(buffer.shape[1] for buffer in state.buffers) == receptive_field(*shape) - 1
    assert_close(tcn(x, weight, factor, state=initial)[0], y)


@pytest.mark.parametrize(("convolutions", "causal"), [(1, True), (2, False)])
def test_gradcheck(convolutions: int, causal: bool) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tcn(x, weight, 2, bias=bias, causal=causal)[0]

    assert gradcheck(function, (leaf(2, 4, 2), leaf(2, convolutions, 2, 3), leaf(2, convolutions, 2)))


@pytest.mark.parametrize(("time", "lengths"), [(1, None), (1, [1, 0]), (2, None), (3, [2, 0]), (5, None)])
def test_gradcheck_through_the_state(time: int, lengths: list[int] | None) -> None:
    position = torch.tensor([5, 2])
    valid = None if lengths is None else torch.tensor(lengths)

    def function(x: Tensor, weight: Tensor, bias: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
        y, new = tcn(x, weight, 2, bias=bias, lengths=valid, state=TCNState(buffers, position), return_state=True)
        assert new is not None
        return y, *new.buffers

    assert gradcheck(function, (leaf(2, time, 1), leaf(2, 1, 1, 3), leaf(2, 1, 1), leaf(2, 2, 1), leaf(2, 4, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 1, 32]], ids=["one call", "token by token", "pieces"])
def test_lower_precision_is_close_to_float64(dtype: torch.dtype, sizes: list[int]) -> None:
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 40, 3), (3, 1, 3, 5), (3, 1, 3)))
    weight = weight / 5**0.5  # keeps variances
    expected, _ = tcn(x.double(), weight.double(), 2, bias=bias.double())
    y, state = in_pieces(lambda x, **options: tcn(x, weight, 2, bias=bias, **options), [x], sizes)
    assert y.dtype == dtype
    assert all(buffer.dtype == dtype for name, buffer in state.tensors().items() if name.startswith("buffers"))
    assert_close(y, expected)
