"""Chunked attention: its sums written out, position biases, gradients, precision and state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca import StateError
from tcnca.ops import (
    ATTENTION_ACTIVATIONS,
    AttentionState,
    attend,
    chunked_attention,
    offset_bias,
    rotary_bias,
    rotate,
)
from tcnca.ops.attention import naive
from tests.comparison import assert_close
from tests.ops.properties import THOROUGH, assert_bit_equal, in_pieces, leaf

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
    options: dict[str, Any] = {"chunk_size": chunk_size, "causal": causal, "activation": activation, "bias": bias}
    out, _ = chunked_attention(q, k, v, lengths=None if lengths is None else torch.tensor(lengths), **options)
    expected = naive_attention(q, k, v, chunk_size, causal, activation, bias, lengths)
    for row, length in enumerate(lengths or [time] * 2):
        assert_close(out[row, :length], expected[row, :length])


@every_activation
@pytest.mark.parametrize("num_heads", [1, 2], ids=["one head", "two heads"])
@pytest.mark.parametrize("chunk_size", [9, None])
@pytest.mark.parametrize("lengths", [None, [20, 13]], ids=["whole", "padded"])
def test_blocks_of_queries_give_the_same(
    activation: str,
    num_heads: int,
    chunk_size: int | None,
    lengths: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (part.requires_grad_() for part in inputs(20, width=4))
    bias = torch.randn(39, dtype=torch.float64) if num_heads == 1 else None
    valid = None if lengths is None else torch.tensor(lengths)
    options: dict[str, Any] = {"chunk_size": chunk_size, "activation": activation, "bias": bias, "num_heads": num_heads}
    expected, _ = chunked_attention(q, k, v, lengths=valid, **options)
    monkeypatch.setattr("tcnca.ops.attention.naive._QUERY_BLOCK", 4)
    out, _ = chunked_attention(q, k, v, lengths=valid, **options)
    assert_close(out.detach(), expected.detach())
    slope = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad(y, (q, k, v), slope) for y in (out, expected)), strict=True)
    for found, truth in pairs:
        assert_close(found, truth)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "relu2", "bias": True},
        {"activation": "laplace", "bias": True},
        {"num_heads": 2},
        {"num_heads": 2, "backend": "sdpa"},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_size", [5, None])
@pytest.mark.parametrize("sizes", [[3, 2, 4], [5, 11], [7, 3, 5, 1], [2, 14]], ids=str)
def test_rows_at_one_position_continue_as_rows_that_differ(
    chunk_size: int | None, sizes: list[int], options: dict[str, Any]
) -> None:
    time = sum(sizes)
    q, k, v = (part.requires_grad_() for part in inputs(time, width=4, d_value=4))
    bias = torch.randn(2 * time + 1, dtype=torch.float64, requires_grad=True) if "bias" in options else None
    run = partial(chunked_attention, chunk_size=chunk_size, **{**options, "bias": bias})
    together, _ = in_pieces(run, (q, k, v), sizes)
    # A third row, at other positions, keeps the others from being read together.
    start = [torch.randn(3, 1, 4, dtype=torch.float64) for _ in range(3)]
    _, state = run(*start, lengths=torch.tensor([0, 0, 1]), return_state=True)
    apart = []
    for parts in zip(*(part.split(sizes, 1) for part in (q, k, v)), strict=True):
        out, state = run(*(torch.cat([part, part[:1]]) for part in parts), state=state, return_state=True)
        apart.append(out[:2])
    expected = torch.cat(apart, 1)
    assert_close(together.detach(), expected.detach())
    leaves, slope = [q, k, v, *([] if bias is None else [bias])], torch.randn_like(expected)
    gradients = [torch.autograd.grad(each, leaves, slope) for each in (together, expected)]
    for found, truth in zip(*gradients, strict=True):
        assert_close(found, truth)


@every_activation
@pytest.mark.parametrize("num_heads", [1, 2], ids=["one head", "two heads"])
def test_steps_of_rows_at_one_position_have_the_same_bits_without_a_mask(
    activation: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(7, width=4)
    run = partial(chunked_attention, chunk_size=5, activation=activation, num_heads=num_heads, backend="naive")
    masks: list[bool] = []
    attend_to_slots = naive.attend

    def noted(*args: Any, mask: Tensor | None, **options: Any) -> Tensor:
        masks.append(mask is not None)
        return attend_to_slots(*args, mask=mask, **options)

    monkeypatch.setattr(naive, "attend", noted)
    out, _ = in_pieces(run, (q, k, v), [2, 1, 1, 1, 1, 1])
    assert not any(masks[1:])
    monkeypatch.setattr(naive, "common_position", lambda position: None)
    expected, _ = in_pieces(run, (q, k, v), [2, 1, 1, 1, 1, 1])
    assert all(masks[7:])
    assert torch.equal(out, expected)


@every_activation
def test_a_query_that_sees_nothing_gets_zeros(activation: str) -> None:
    q, k, v = inputs(4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = attend(q, k, v, activation=activation, mask=mask)
    assert not out[:, 2].any()
    assert_close(out[:, [0, 1, 3]], attend(q[:, [0, 1, 3]], k, v, activation=activation))


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
    ("chunk_size", "time", "lengths"),
    [(3, 1, None), (3, 2, [3, 0]), (3, 5, [3, 0]), (None, 1, [3, 0]), (None, 5, None)],
)
def test_gradcheck_through_the_state(
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


@given(chunk_size=st.integers(1, 7), time=st.integers(1, 20))
def test_the_state_holds_one_chunk_and_full_attention_everything(chunk_size: int, time: int) -> None:
    q, k, v = inputs(time)
    _, state = chunked_attention(q, k, v, chunk_size=chunk_size, return_state=True)
    assert state is not None
    assert (state.keys.shape, state.values.shape) == ((2, chunk_size, 3), (2, chunk_size, 2))
    unfinished = time % chunk_size
    assert torch.equal(state.keys[:, :unfinished], k[:, time - unfinished :])
    _, state = chunked_attention(q, k, v, chunk_size=None, return_state=True)
    assert state is not None
    assert torch.equal(state.values, v)


@pytest.mark.parametrize("chunk_size", [4, None], ids=["chunks", "full"])
@pytest.mark.parametrize("lengths", [None, [7, 3]], ids=["whole", "padded"])
def test_the_state_has_memory_of_its_own(chunk_size: int | None, lengths: list[int] | None) -> None:
    parts = torch.randn(2, 7, 9)  # one projection, as in a layer
    options: dict[str, Any] = {"chunk_size": chunk_size, "lengths": None if lengths is None else torch.tensor(lengths)}
    _, state = chunked_attention(*parts.split(3, -1), return_state=True, **options)
    assert state is not None
    before = state.clone()
    parts.zero_()
    assert_bit_equal(state, before)
    sizes = [part.untyped_storage().nbytes() for part in state.tensors().values()]
    assert sum(sizes) == state.nbytes


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


def test_the_state_has_the_dtype_of_the_queries() -> None:
    q, k = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    _, state = chunked_attention(q, k, torch.randn(1, 3, 2, dtype=torch.bfloat16), chunk_size=4, return_state=True)
    assert state is not None
    assert (state.keys.dtype, state.values.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("outlier", [1e30, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("chunk_size", [None, 4], ids=["full", "chunks"])
@every_activation
@torch.no_grad()
def test_what_a_query_does_not_see_does_not_change_a_bit(
    activation: str, chunk_size: int | None, outlier: float
) -> None:
    operator = partial(chunked_attention, chunk_size=chunk_size, activation=activation, causal=True)
    parts = [torch.randn(2, 11, width) for width in (3, 3, 2)]
    sizes = [3, 1, 7]
    expected, streamed = operator(*parts)[0], in_pieces(operator, parts, sizes)[0]
    for index in (1, 2):
        changed = [part.clone() for part in parts]
        changed[index][0, 6] = outlier
        for y, same in ((operator(*changed)[0], expected), (in_pieces(operator, changed, sizes)[0], streamed)):
            assert torch.equal(y[0, :6], same[0, :6])
            assert torch.equal(y[1], same[1])
            if chunk_size is not None:
                assert torch.equal(y[0, 8:], same[0, 8:]), "another chunk"
            if index == 2 and outlier != 1e30:
                assert not bool(y[0, 6:8].isfinite().any()), "a value that is seen"


def test_opcheck_of_the_rotation() -> None:
    positions = torch.randint(50, (2, 7))
    torch.library.opcheck(torch.ops.tcnca.rotation_table.default, (positions, 3, torch.float64))
    torch.library.opcheck(torch.ops.tcnca.rotation_table.default, (torch.arange(5), 2, torch.float32))


@pytest.mark.parametrize("position", ["rope", "rotary"])
def test_compiled_code_has_no_sines(position: str) -> None:
    # They would take the compiler ten seconds.
    operators: list[object] = []

    def collect(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        operators.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def rotated(x: Tensor) -> Tensor:
        return rotate(x, torch.arange(5)) if position == "rope" else rotary_bias(x[0, 0], x[1, 1], 5)

    x = torch.randn(2, 5, 4)
    torch._dynamo.reset()
    assert_close(torch.compile(rotated, backend=collect)(x), rotated(x))
    assert torch.ops.tcnca.rotation_table.default in operators
    assert not any("sin" in str(operator) for operator in operators)
