"""The dilated depthwise convolution against explicit sums, and the properties of a streaming operator."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca.ops import ConvState, dilated_conv, initial_conv_state
from tests.comparison import assert_close
from tests.ops import properties
from tests.ops.properties import EXTRA, SIZES, THOROUGH, WAITING, Case, counts, in_pieces, leaf, some_lengths

BATCH, CHANNELS = 3, 2
KERNEL_SIZES = st.integers(1, 5)
DILATIONS = st.integers(1, 5)


def conv_case(time: int, kernel_size: int, dilation: int, causal: bool = True) -> Case:
    torch.manual_seed(0)
    weight, bias = leaf(CHANNELS, kernel_size), leaf(CHANNELS)

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, ConvState | None]:
        return dilated_conv(x, weight, dilation, bias=bias, causal=causal, **options)

    return Case(operator, (leaf(BATCH, time, CHANNELS),), {"weight": weight, "bias": bias})


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


@THOROUGH
@given(
    time=st.integers(1, 12), kernel_size=KERNEL_SIZES, dilation=DILATIONS, causal=st.booleans(), with_bias=st.booleans()
)
def test_equals_the_explicit_sum(time: int, kernel_size: int, dilation: int, causal: bool, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, time, 2), (2, kernel_size)))
    bias = torch.randn(2, dtype=torch.float64) if with_bias else None
    y, _ = dilated_conv(x, weight, dilation, bias=bias, causal=causal)
    assert_close(y, explicit_conv(x, weight, dilation, bias, causal))


@pytest.mark.parametrize(("kernel_size", "past", "future"), [(1, 0, 0), (2, 1, 0), (3, 1, 1), (4, 2, 1), (5, 2, 2)])
def test_bidirectional_taps_are_centered(kernel_size: int, past: int, future: int) -> None:
    x = leaf(1, 41, 1)
    y, _ = dilated_conv(x, torch.ones(1, kernel_size, dtype=torch.float64), 3, causal=False)
    (gradient,) = torch.autograd.grad(y[0, 20, 0], x)
    assert gradient.flatten().nonzero().flatten().tolist() == list(range(20 - 3 * past, 20 + 3 * future + 1, 3))


@THOROUGH
@given(kernel_size=KERNEL_SIZES, dilation=DILATIONS, sizes=SIZES, at=st.integers(1, 9))
def test_streaming(kernel_size: int, dilation: int, sizes: list[int], at: int) -> None:
    case = conv_case(sum(sizes), kernel_size, dilation)
    properties.assert_split_invariant(case, sizes)
    properties.assert_inplace_changes_nothing(case, sizes)
    properties.assert_state_left_alone(case, sizes)
    properties.assert_causal(conv_case(10, kernel_size, dilation), at)


def test_the_state_contains_only_the_inputs_still_needed() -> None:
    case = conv_case(20, 4, 3)
    y, state = case.operator(*case.inputs, return_state=True)
    assert isinstance(state, ConvState)
    assert state.buffer.shape == (BATCH, 9, CHANNELS)
    assert sorted(state.buffer[0, :, 0].tolist()) == sorted(case.inputs[0][0, -9:, 0].tolist())
    initial = initial_conv_state(BATCH, CHANNELS, 4, 3, dtype=torch.float64)
    assert_close(case.operator(*case.inputs, state=initial)[0].detach(), y.detach())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@THOROUGH
@given(kernel_size=KERNEL_SIZES, dilation=DILATIONS, lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(causal: bool, kernel_size: int, dilation: int, lengths: list[int]) -> None:
    properties.assert_padding_ignored(conv_case(9, kernel_size, dilation, causal), lengths)


@THOROUGH
@example(kernel_size=3, dilation=2, calls=WAITING, extra=0, inplace=False)
@example(kernel_size=3, dilation=2, calls=WAITING, extra=0, inplace=True)
@given(kernel_size=KERNEL_SIZES, dilation=DILATIONS, calls=counts(BATCH), extra=EXTRA, inplace=st.booleans())
def test_rows_of_different_lengths_stream_independently(
    kernel_size: int, dilation: int, calls: list[list[int]], extra: int, inplace: bool
) -> None:
    case = conv_case(max(map(sum, zip(*calls, strict=True))), kernel_size, dilation)
    with torch.set_grad_enabled(not inplace):
        properties.assert_ragged_stream(case, calls, extra, inplace)


@pytest.mark.parametrize(("causal", "streaming"), [(True, True), (True, False), (False, False)])
def test_rows_without_tokens_give_no_nan(causal: bool, streaming: bool) -> None:
    properties.assert_padding_gives_no_nan(conv_case(6, 3, 2, causal), [0, 6, 0], streaming)


def test_strided_inputs_give_the_same() -> None:
    properties.assert_layout_does_not_matter(conv_case(9, 3, 2), [1, 6, 2])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kernel_size", [1, 2, 3])
def test_gradcheck(kernel_size: int, causal: bool) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return dilated_conv(x, weight, 2, bias=bias, causal=causal)[0]

    assert gradcheck(function, (leaf(2, 5, 2), leaf(2, kernel_size), leaf(2)))


@pytest.mark.parametrize(("time", "lengths"), [(1, None), (1, [1, 0]), (2, None), (3, [3, 2]), (7, None), (7, [3, 2])])
def test_gradcheck_through_the_state(time: int, lengths: list[int] | None) -> None:
    position = torch.tensor([5, 2])
    valid = None if lengths is None else torch.tensor(lengths)

    def function(x: Tensor, weight: Tensor, bias: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        state = ConvState(buffer, position)
        y, new = dilated_conv(x, weight, 2, bias=bias, lengths=valid, state=state, return_state=True)
        assert new is not None
        return y, new.buffer

    assert gradcheck(function, (leaf(2, time, 2), leaf(2, 3), leaf(2), leaf(2, 4, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 1, 32]], ids=["one call", "token by token", "pieces"])
def test_lower_precision_is_close_to_float64(dtype: torch.dtype, sizes: list[int]) -> None:
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 40, 3), (3, 5), (3,)))
    expected, _ = dilated_conv(x.double(), weight.double(), 3, bias=bias.double())
    y, state = in_pieces(lambda x, **options: dilated_conv(x, weight, 3, bias=bias, **options), [x], sizes)
    assert y.dtype == dtype
    assert state.tensors()["buffer"].dtype == dtype
    assert_close(y, expected)
