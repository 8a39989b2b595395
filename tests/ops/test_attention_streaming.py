"""Chunked attention with state in and out, padding, and causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tcnca import StateError
from tcnca.ops import ATTENTION_ACTIVATIONS, AttentionState, chunked_attention, initial_attention_state
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
    leaf,
    some_lengths,
)

BATCH, WIDTH, VALUE_WIDTH = 3, 3, 2
CHUNKS = st.none() | st.integers(1, 7)

every_function = pytest.mark.parametrize("function", ATTENTION_ACTIVATIONS)


def attention_case(
    time: int,
    chunk_size: int | None,
    function: str,
    causal: bool = True,
    with_bias: bool = True,
    reach: int | None = None,
) -> Case:
    torch.manual_seed(0)
    bias = leaf(2 * (reach or chunk_size or time) - 1) if with_bias else None

    def operator(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, AttentionState | None]:
        return chunked_attention(
            q, k, v, chunk_size=chunk_size, causal=causal, activation=function, bias=bias, **options
        )

    inputs = (leaf(BATCH, time, WIDTH), leaf(BATCH, time, WIDTH), leaf(BATCH, time, VALUE_WIDTH))
    return Case(operator, inputs, {} if bias is None else {"bias": bias})


@every_function
@THOROUGH
@given(chunk_size=CHUNKS, sizes=SIZES, with_bias=st.booleans())
def test_many_calls_equal_one(function: str, chunk_size: int | None, sizes: list[int], with_bias: bool) -> None:
    assert_split_invariant(attention_case(sum(sizes), chunk_size, function, with_bias=with_bias), sizes)


@every_function
@THOROUGH
@given(chunk_size=CHUNKS, sizes=SIZES)
def test_inplace_equals_a_new_state(function: str, chunk_size: int | None, sizes: list[int]) -> None:
    assert_inplace_changes_nothing(attention_case(sum(sizes), chunk_size, function), sizes)


@every_function
@given(chunk_size=CHUNKS, sizes=SIZES)
def test_a_state_can_be_used_again(function: str, chunk_size: int | None, sizes: list[int]) -> None:
    # The bias reaches further, since one state is also continued by a second copy of its piece.
    case = attention_case(sum(sizes), chunk_size, function, reach=max(chunk_size or 1, sum(sizes) + max(sizes)))
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


@every_function
@given(chunk_size=st.integers(1, 7), at=st.integers(1, 13))
def test_chunks_do_not_see_each_other(function: str, chunk_size: int, at: int) -> None:
    case = attention_case(14, chunk_size, function, causal=False)
    out, _ = case.operator(*case.inputs)
    reached = torch.autograd.grad(out[:, at].sum(), case.inputs[2])[0].abs().sum((0, 2)).nonzero().flatten()
    start = at // chunk_size * chunk_size
    visible = list(range(start, min(start + chunk_size, 14)))
    assert set(reached.tolist()) <= set(visible)
    # The others may give a key that they see a weight of zero.
    if function == "softmax":
        assert reached.tolist() == visible


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_function
@THOROUGH
@given(chunk_size=CHUNKS, lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(function: str, causal: bool, chunk_size: int | None, lengths: list[int]) -> None:
    assert_padding_ignored(attention_case(9, chunk_size, function, causal), lengths)


@every_function
@THOROUGH
@example(chunk_size=4, calls=WAITING, extra=0, inplace=False)
@example(chunk_size=4, calls=WAITING, extra=0, inplace=True)
@given(chunk_size=CHUNKS, calls=counts(BATCH), extra=EXTRA, inplace=st.booleans())
def test_rows_of_different_lengths_stream_alone(
    function: str, chunk_size: int | None, calls: list[list[int]], extra: int, inplace: bool
) -> None:
    time = max(map(sum, zip(*calls, strict=True)))
    # With full attention the cache keeps every call's padding, up to the longest row's.
    slots = sum(max(*call, 1) + extra for call in calls)
    case = attention_case(time, chunk_size, function, reach=chunk_size or slots)
    with torch.set_grad_enabled(not inplace):
        assert_ragged_stream(case, calls, extra, inplace)


@pytest.mark.parametrize(
    ("chunk_size", "lengths"),
    [(None, [0, 6, 0]), (2, [0, 6, 0]), (2, [1, 2, 3]), (3, [6, 3, 2]), (4, [4, 1, 0]), (1, [0, 1, 6]), (9, [0, 6, 1])],
    ids=str,
)
@pytest.mark.parametrize(("causal", "streaming"), [(True, True), (True, False), (False, False)])
@every_function
def test_chunks_of_nothing_but_padding_give_no_nan(
    function: str, causal: bool, streaming: bool, chunk_size: int | None, lengths: list[int]
) -> None:
    assert_padding_gives_no_nan(attention_case(6, chunk_size, function, causal), lengths, streaming)


@every_function
@given(chunk_size=CHUNKS, at=st.integers(1, 9))
def test_the_future_moves_nothing(function: str, chunk_size: int | None, at: int) -> None:
    assert_causal(attention_case(10, chunk_size, function), at)


@pytest.mark.parametrize("chunk_size", [None, 4], ids=["full", "chunks"])
@every_function
def test_strided_inputs_give_the_same(function: str, chunk_size: int | None) -> None:
    assert_layout_does_not_matter(attention_case(9, chunk_size, function), [1, 6, 2])


def test_padding_does_not_make_the_cache_of_full_attention_grow() -> None:
    q, k, v = (torch.randn(2, 3, 2, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(15, dtype=torch.float64)
    state = None
    for lengths in ([1, 0], [1, 2], [1, 0], [1, 1]):
        # A reach of 8 is enough: no row has more than four tokens.
        _, state = chunked_attention(
            q, k, v, chunk_size=None, bias=bias, lengths=torch.tensor(lengths), state=state, return_state=True
        )
    assert state is not None
    assert state.position.tolist() == [4, 3]
    assert state.keys.shape[1] == 4


def test_a_chunked_state_is_refused_by_full_attention() -> None:
    q, k, v = (torch.randn(1, 6, 2) for _ in range(3))
    _, state = chunked_attention(q, k, v, chunk_size=4, return_state=True)
    with pytest.raises(StateError, match=r"state\.position: got more tokens than the 4 slots"):
        chunked_attention(q, k, v, chunk_size=None, state=state)


def test_keys_and_values_are_kept_in_the_type_of_the_queries() -> None:
    q, k = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    _, state = chunked_attention(q, k, torch.randn(1, 3, 2, dtype=torch.bfloat16), chunk_size=4, return_state=True)
    assert state is not None
    assert (state.keys.dtype, state.values.dtype) == (torch.float32, torch.float32)
