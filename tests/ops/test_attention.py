"""Chunked attention: its sums written out, position biases, gradients, precision, state, padding and causality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca import StateError
from tcnca.ops import (
    ATTENTION_ACTIVATIONS,
    AttentionState,
    attend,
    chunked_attention,
    initial_attention_state,
    laplace,
    offset_bias,
    relu2,
    rotary_bias,
    rotate,
)
from tests.comparison import assert_close
from tests.ops.properties import (
    EXTRA,
    SIZES,
    THOROUGH,
    WAITING,
    Case,
    assert_causal,
    assert_inplace_changes_nothing,
    assert_layout_does_not_matter,
    assert_padding_gives_no_nan,
    assert_padding_ignored,
    assert_ragged_stream,
    assert_split_invariant,
    assert_state_left_alone,
    counts,
    in_pieces,
    leaf,
    some_lengths,
)

BATCH, WIDTH, VALUE_WIDTH = 3, 3, 2
every_activation = pytest.mark.parametrize("activation", ATTENTION_ACTIVATIONS)
CHUNKS = st.none() | st.integers(1, 7)


def naive_weights(scores: list[float], activation: str) -> list[float]:
    if activation == "softmax":
        exponentials = [math.exp(score) for score in scores]
        return [value / sum(exponentials) for value in exponentials]
    if activation == "relu2":
        return [max(score, 0.0) ** 2 for score in scores]
    return [0.5 * (1 + math.erf((score - 0.707107) / (0.282095 * math.sqrt(2)))) for score in scores]


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int | None,
    causal: bool,
    activation: str,
    bias: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Query by query over the valid keys of its chunk; zeros for queries that are padding."""
    out = torch.zeros_like(v)
    for row in range(q.shape[0]):
        valid = q.shape[1] if lengths is None else lengths[row]
        for query in range(valid):
            start = 0 if chunk_size is None else query // chunk_size * chunk_size
            stop = valid if chunk_size is None else min(start + chunk_size, valid)
            seen = [key for key in range(start, stop) if key <= query or not causal]
            # `relu2` and `laplace` divide by the number of keys seen.
            scale = q.shape[2] ** -0.5 if activation == "softmax" else 1 / len(seen)
            scores = [
                sum(a * b for a, b in zip(q[row, query].tolist(), k[row, key].tolist(), strict=True)) * scale
                + (0.0 if bias is None else float(bias[key - query + (len(bias) - 1) // 2]))
                for key in seen
            ]
            for key, weight in zip(seen, naive_weights(scores, activation), strict=True):
                out[row, query] += weight * v[row, key]
    return out


def inputs(time: int, batch: int = 2, width: int = 3, d_value: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((batch, time, width), (batch, time, width), (batch, time, d_value))
    # Twice as wide as normal: a softmax that is far from uniform.
    q, k, v = (torch.randn(shape, dtype=torch.float64) * 2 for shape in shapes)
    return q, k, v


@every_activation
@THOROUGH
@given(
    time=st.integers(1, 14),
    chunk_size=CHUNKS,
    causal=st.booleans(),
    with_bias=st.booleans(),
    beyond=st.integers(0, 3),
    data=st.data(),
)
def test_equals_the_sums_written_out(
    activation: str, time: int, chunk_size: int | None, causal: bool, with_bias: bool, beyond: int, data: st.DataObject
) -> None:
    q, k, v = inputs(time)
    max_length = min(chunk_size or time, time) + beyond
    bias = torch.randn(2 * max_length - 1, dtype=torch.float64) if with_bias else None
    lengths = data.draw(st.none() | st.lists(st.integers(0, time), min_size=2, max_size=2), "lengths")
    out, _ = chunked_attention(
        q,
        k,
        v,
        chunk_size=chunk_size,
        causal=causal,
        activation=activation,
        bias=bias,
        lengths=None if lengths is None else torch.tensor(lengths),
    )
    expected = naive_attention(q, k, v, chunk_size, causal, activation, bias, lengths)
    for row, length in enumerate(lengths or [time] * 2):
        assert_close(out[row, :length], expected[row, :length])


@every_activation
def test_a_query_that_sees_nothing_gets_zeros(activation: str) -> None:
    q, k, v = inputs(4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = attend(q, k, v, activation=activation, mask=mask)
    assert not out[:, 2].any()
    assert_close(out[:, [0, 1, 3]], attend(q[:, [0, 1, 3]], k, v, activation=activation))


def test_attention_functions_of_known_values() -> None:
    x = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    assert relu2(x).tolist() == [0.0, 0.0, 0.25, 4.0]
    assert float(laplace(torch.tensor(0.707107, dtype=torch.float64))) == 0.5
    assert_close(laplace(x), torch.tensor(naive_weights(x.tolist(), "laplace"), dtype=torch.float64))


def test_laplace_meets_relu2_in_value_and_slope() -> None:
    # How MEGA chose its two constants, which it gives with six digits: as many as float32 has.
    x = leaf(1) * 0 + math.sqrt(0.5)
    for what, smooth, sharp in zip(("value", "slope"), _at(laplace, x), _at(relu2, x), strict=True):
        assert_close(smooth, sharp, what, dtype=torch.float32)


def _at(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@every_activation
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_dropout_drops_weights_and_scales_the_rest(activation: str, streaming: bool) -> None:
    time = 12
    q, k, _ = inputs(time, batch=8)
    identity = torch.eye(time, dtype=torch.float64).expand(8, -1, -1)
    options: dict[str, Any] = {"chunk_size": 6, "activation": activation, "return_state": streaming}
    weights, _ = chunked_attention(q, k, identity, **options)
    dropped, _ = chunked_attention(q, k, identity, dropout=0.25, **options)
    kept = dropped != 0
    assert_close(dropped[kept], weights[kept] / 0.75)
    share = float(kept.sum() / (weights != 0).sum())
    assert 0.6 < share < 0.9


def naive_turn(vector: list[float], position: float) -> list[float]:
    """Pairs of the first and the second half, turned by `position · 10000^(-i / half)`."""
    half = len(vector) // 2
    turned = [0.0] * len(vector)
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        turned[i] = vector[i] * math.cos(angle) - vector[half + i] * math.sin(angle)
        turned[half + i] = vector[i] * math.sin(angle) + vector[half + i] * math.cos(angle)
    return turned


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@given(width=st.integers(1, 4).map(lambda half: 2 * half), position=st.integers(0, 5000))
def test_rotation_turns_pairs_of_both_halves(width: int, position: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, width, dtype=torch.float64)
    positions = torch.tensor([position, 0, 7])
    expected = [[naive_turn(x[b, t].tolist(), int(positions[t])) for t in range(3)] for b in range(2)]
    assert_close(rotate(x, positions), torch.tensor(expected, dtype=torch.float64))


def test_each_row_may_have_its_own_positions() -> None:
    x, positions = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[0, 1, 2], [5, 6, 7]])
    expected = torch.stack([rotate(x[row], positions[row]) for row in range(2)])
    assert_close(rotate(x, positions), expected)


@given(query=st.integers(0, 300), key=st.integers(0, 300), shift=st.integers(0, 1000))
def test_rotated_scores_depend_on_the_distance_alone(query: int, key: int, shift: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    scores = [(rotate(q, torch.tensor([query + by])) * rotate(k, torch.tensor([key + by]))).sum() for by in (0, shift)]
    # Measured against the greatest score there could be: the score itself may be near zero.
    size = float(q.norm() * k.norm())
    assert_close(scores[1] / size + 2, scores[0] / size + 2)


@given(max_length=st.integers(1, 8), width=st.integers(1, 3).map(lambda half: 2 * half), start=st.integers(0, 9))
def test_rotary_bias_is_the_product_of_turned_vectors(max_length: int, width: int, start: int) -> None:
    torch.manual_seed(0)
    alpha, beta = torch.randn(2, width, dtype=torch.float64)
    bias = rotary_bias(alpha, beta, max_length)
    places = range(start, start + max_length)
    expected = [[dot(naive_turn(alpha.tolist(), m), naive_turn(beta.tolist(), n)) for n in places] for m in places]
    indices = torch.tensor(places)
    assert bias.shape == (2 * max_length - 1,)
    assert_close(offset_bias(bias, indices, indices), torch.tensor(expected, dtype=torch.float64))


def test_bias_is_looked_up_by_key_minus_query() -> None:
    bias = torch.arange(-3.0, 4.0)  # place i holds the offset itself
    query, key = torch.tensor([3, 1]), torch.tensor([0, 1, 4])
    assert offset_bias(bias, query, key).tolist() == [[-3.0, -2.0, 1.0], [-1.0, 0.0, 3.0]]


@every_activation
@pytest.mark.parametrize(
    ("chunk_size", "causal", "lengths"),
    [(None, True, None), (3, True, [5, 2]), (3, False, None), (None, False, [5, 2])],
)
def test_gradients_are_those_of_the_function(
    activation: str, chunk_size: int | None, causal: bool, lengths: list[int] | None
) -> None:
    valid = None if lengths is None else torch.tensor(lengths)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"chunk_size": chunk_size, "causal": causal, "activation": activation, "bias": bias}
        return chunked_attention(q, k, v, lengths=valid, **options)[0]

    assert gradcheck(run, (leaf(2, 5, 2), leaf(2, 5, 2), leaf(2, 5, 1), leaf(9)))


@every_activation
@pytest.mark.parametrize(
    ("chunk_size", "time", "lengths"),
    [(3, 1, None), (3, 2, [3, 0]), (3, 5, [3, 0]), (None, 1, [3, 0]), (None, 5, None)],
)
def test_gradients_through_the_state(
    activation: str, chunk_size: int | None, time: int, lengths: list[int] | None
) -> None:
    valid = None if lengths is None else torch.tensor(lengths).clamp(max=time)
    position = torch.tensor([2, 1])
    slots = 2 if chunk_size is None else chunk_size

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        state = AttentionState(keys, values, position)
        options: dict[str, Any] = {"chunk_size": chunk_size, "activation": activation, "bias": bias, "lengths": valid}
        out, new = chunked_attention(q, k, v, state=state, return_state=True, **options)
        assert new is not None
        return out, new.keys, new.values

    q, k, v, bias = leaf(2, time, 2), leaf(2, time, 2), leaf(2, time, 1), leaf(13)
    assert gradcheck(run, (q, k, v, bias, leaf(2, slots, 2), leaf(2, slots, 1)))


def test_gradients_of_the_position_functions() -> None:
    assert gradcheck(lambda alpha, beta: rotary_bias(alpha, beta, 3), (leaf(4), leaf(4)))
    assert gradcheck(lambda x: rotate(x, torch.tensor([0, 3, 11])), (leaf(2, 3, 4),))


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [7, 1, 32]], ids=["one call", "token by token", "pieces"])
def test_lower_precision_is_close_to_float64(activation: str, dtype: torch.dtype, sizes: list[int]) -> None:
    q, k, v = (torch.randn(2, 40, 8).to(dtype) for _ in range(3))
    bias = torch.randn(31).to(dtype)
    expected, _ = chunked_attention(
        q.double(), k.double(), v.double(), chunk_size=16, activation=activation, bias=bias.double()
    )
    out, state = in_pieces(
        partial(chunked_attention, chunk_size=16, activation=activation, bias=bias), [q, k, v], sizes
    )
    assert out.dtype == dtype
    assert state.tensors()["keys"].dtype == state.tensors()["values"].dtype == dtype
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_rotations_are_close_to_float64(dtype: torch.dtype) -> None:
    # Positions that half precision cannot hold: angles have to be made in float32.
    x, positions = torch.randn(50, 8).to(dtype), torch.arange(50) * 83
    turned = rotate(x, positions)
    assert turned.dtype == dtype
    assert_close(turned, rotate(x.double(), positions))


def attention_case(
    time: int,
    chunk_size: int | None,
    activation: str,
    causal: bool = True,
    with_bias: bool = True,
    max_length: int | None = None,
) -> Case:
    torch.manual_seed(0)
    bias = leaf(2 * (max_length or chunk_size or time) - 1) if with_bias else None

    def operator(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, AttentionState | None]:
        return chunked_attention(
            q, k, v, chunk_size=chunk_size, causal=causal, activation=activation, bias=bias, **options
        )

    leaves = (leaf(BATCH, time, WIDTH), leaf(BATCH, time, WIDTH), leaf(BATCH, time, VALUE_WIDTH))
    return Case(operator, leaves, {} if bias is None else {"bias": bias})


@every_activation
@THOROUGH
@given(chunk_size=CHUNKS, sizes=SIZES, with_bias=st.booleans())
def test_many_calls_equal_one(activation: str, chunk_size: int | None, sizes: list[int], with_bias: bool) -> None:
    assert_split_invariant(attention_case(sum(sizes), chunk_size, activation, with_bias=with_bias), sizes)


@every_activation
@THOROUGH
@given(chunk_size=CHUNKS, sizes=SIZES)
def test_inplace_equals_a_new_state(activation: str, chunk_size: int | None, sizes: list[int]) -> None:
    assert_inplace_changes_nothing(attention_case(sum(sizes), chunk_size, activation), sizes)


@every_activation
@given(chunk_size=CHUNKS, sizes=SIZES)
def test_a_state_can_be_used_again(activation: str, chunk_size: int | None, sizes: list[int]) -> None:
    # The bias covers more tokens, since one state is also continued by a second copy of its piece.
    case = attention_case(sum(sizes), chunk_size, activation, max_length=max(chunk_size or 1, sum(sizes) + max(sizes)))
    assert_state_left_alone(case, sizes)


@pytest.mark.parametrize("chunk_size", [None, 3], ids=["full", "chunks"])
def test_starting_from_the_initial_state_equals_starting_from_none(chunk_size: int | None) -> None:
    case = attention_case(7, chunk_size, "softmax")
    start = initial_attention_state(BATCH, WIDTH, VALUE_WIDTH, chunk_size, dtype=torch.float64)
    with torch.no_grad():
        assert_close(case.operator(*case.inputs, state=start)[0], case.operator(*case.inputs)[0])


@given(chunk_size=st.integers(1, 7), time=st.integers(1, 20))
def test_the_state_holds_one_chunk_and_full_attention_everything(chunk_size: int, time: int) -> None:
    case = attention_case(time, chunk_size, "softmax")
    _, state = case.operator(*case.inputs, return_state=True)
    assert isinstance(state, AttentionState)
    assert state.keys.shape == (BATCH, chunk_size, WIDTH)
    assert state.values.shape == (BATCH, chunk_size, VALUE_WIDTH)
    unfinished = time % chunk_size
    assert torch.equal(state.keys[:, :unfinished], case.inputs[1][:, time - unfinished :])
    full = attention_case(time, None, "softmax")
    _, state = full.operator(*full.inputs, return_state=True)
    assert isinstance(state, AttentionState)
    assert torch.equal(state.values, full.inputs[2])


@every_activation
@given(chunk_size=st.integers(1, 7), at=st.integers(1, 13))
def test_chunks_do_not_see_each_other(activation: str, chunk_size: int, at: int) -> None:
    case = attention_case(14, chunk_size, activation, causal=False)
    out, _ = case.operator(*case.inputs)
    reached = torch.autograd.grad(out[:, at].sum(), case.inputs[2])[0].abs().sum((0, 2)).nonzero().flatten()
    start = at // chunk_size * chunk_size
    visible = list(range(start, min(start + chunk_size, 14)))
    assert set(reached.tolist()) <= set(visible)
    # The others may give a key that they see a weight of zero.
    if activation == "softmax":
        assert reached.tolist() == visible


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_activation
@THOROUGH
@given(chunk_size=CHUNKS, lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(activation: str, causal: bool, chunk_size: int | None, lengths: list[int]) -> None:
    assert_padding_ignored(attention_case(9, chunk_size, activation, causal), lengths)


@every_activation
@THOROUGH
@example(chunk_size=4, calls=WAITING, extra=0, inplace=False)
@example(chunk_size=4, calls=WAITING, extra=0, inplace=True)
@given(chunk_size=CHUNKS, calls=counts(BATCH), extra=EXTRA, inplace=st.booleans())
def test_rows_of_different_lengths_stream_alone(
    activation: str, chunk_size: int | None, calls: list[list[int]], extra: int, inplace: bool
) -> None:
    time = max(map(sum, zip(*calls, strict=True)))
    # With full attention the cache keeps every call's padding, up to the longest row's.
    slots = sum(max(*call, 1) + extra for call in calls)
    case = attention_case(time, chunk_size, activation, max_length=chunk_size or slots)
    with torch.set_grad_enabled(not inplace):
        assert_ragged_stream(case, calls, extra, inplace)


@pytest.mark.parametrize(
    ("chunk_size", "lengths"),
    [(None, [0, 6, 0]), (2, [1, 2, 3]), (3, [6, 3, 2]), (1, [0, 1, 6]), (9, [0, 6, 1])],
    ids=str,
)
@pytest.mark.parametrize(("causal", "streaming"), [(True, True), (False, False)])
@every_activation
def test_chunks_of_nothing_but_padding_give_no_nan(
    activation: str, causal: bool, streaming: bool, chunk_size: int | None, lengths: list[int]
) -> None:
    assert_padding_gives_no_nan(attention_case(6, chunk_size, activation, causal), lengths, streaming)


@every_activation
@given(chunk_size=CHUNKS, at=st.integers(1, 9))
def test_the_future_moves_nothing(activation: str, chunk_size: int | None, at: int) -> None:
    assert_causal(attention_case(10, chunk_size, activation), at)


@pytest.mark.parametrize("chunk_size", [None, 4], ids=["full", "chunks"])
@every_activation
def test_strided_inputs_give_the_same(activation: str, chunk_size: int | None) -> None:
    assert_layout_does_not_matter(attention_case(9, chunk_size, activation), [1, 6, 2])


def test_padding_does_not_make_the_cache_of_full_attention_grow() -> None:
    q, k, v = (torch.randn(2, 3, 2, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(15, dtype=torch.float64)
    state = None
    for lengths in ([1, 0], [1, 2], [1, 0], [1, 1]):
        # A max_length of 8 is enough: no row has more than four tokens.
        _, state = chunked_attention(
            q, k, v, chunk_size=None, bias=bias, lengths=torch.tensor(lengths), state=state, return_state=True
        )
    assert state is not None
    assert state.position.tolist() == [4, 3]
    assert state.keys.shape[1] == 4


def test_a_chunked_state_is_refused_by_full_attention() -> None:
    q, k, v = (torch.randn(1, 6, 2) for _ in range(3))
    _, state = chunked_attention(q, k, v, chunk_size=4, return_state=True)
    with pytest.raises(StateError, match=r"state\.position: expected at most 4 tokens"):
        chunked_attention(q, k, v, chunk_size=None, state=state)


def test_keys_and_values_are_kept_in_the_type_of_the_queries() -> None:
    q, k = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    _, state = chunked_attention(q, k, torch.randn(1, 3, 2, dtype=torch.bfloat16), chunk_size=4, return_state=True)
    assert state is not None
    assert (state.keys.dtype, state.values.dtype) == (torch.float32, torch.float32)
