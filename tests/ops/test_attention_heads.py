"""Attention of several heads, by PyTorch's own operators and by `scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca.errors import InputError, KernelError
from tcnca.ops import ATTENTION_ACTIVATIONS, AttentionState, chunked_attention, rotate, rotate_heads
from tests.comparison import assert_close
from tests.ops import properties
from tests.ops.properties import SIZES, Case, counts, in_pieces, leaf, some_lengths

BACKENDS = pytest.mark.parametrize("backend", ["naive", "sdpa"])
BATCH, HEADS, WIDTH = 3, 2, 3
CHUNKS = st.none() | st.integers(1, 7)
FEW = settings(max_examples=20)


def head_by_head(parts: Sequence[Tensor], chunk_size: int | None, causal: bool, activation: str) -> Tensor:
    """One row, `[time, features]`: for each head and query, the sum over the keys that it sees."""
    q, k, v = parts
    out = torch.zeros_like(v)
    d_key, d_value = q.shape[1] // HEADS, v.shape[1] // HEADS
    for head in range(HEADS):
        key, value = slice(head * d_key, (head + 1) * d_key), slice(head * d_value, (head + 1) * d_value)
        for t in range(len(q)):
            start = 0 if chunk_size is None else t // chunk_size * chunk_size
            stop = t + 1 if causal else len(q) if chunk_size is None else min(start + chunk_size, len(q))
            scores = torch.stack([(q[t, key] * k[s, key]).sum() for s in range(start, stop)])
            if activation == "softmax":
                weights = (scores / math.sqrt(d_key)).exp()
                weights = weights / weights.sum()
            elif activation == "relu2":
                weights = (scores / len(scores)).clamp(min=0) ** 2
            else:
                weights = 0.5 * (1 + torch.erf((scores / len(scores) - 0.707107) / (0.282095 * math.sqrt(2))))
            out[t, value] = sum(weights[i] * v[start + i, value] for i in range(len(scores)))
    return out


def case(
    time: int, chunk_size: int | None, *, causal: bool = True, backend: str = "naive", activation: str = "softmax"
) -> Case:
    torch.manual_seed(0)
    operator = partial(
        chunked_attention,
        chunk_size=chunk_size,
        num_heads=HEADS,
        causal=causal,
        backend=backend,  # type: ignore[arg-type]
        activation=activation,
    )
    return Case(operator, tuple(leaf(BATCH, time, HEADS * width, scale=2) for width in (WIDTH, WIDTH, WIDTH)), {})


@pytest.mark.parametrize(
    ("backend", "activation"), [*(("naive", name) for name in ATTENTION_ACTIVATIONS), ("sdpa", "softmax")]
)
@FEW
@given(time=st.integers(1, 14), chunk_size=CHUNKS, causal=st.booleans(), data=st.data())
def test_equals_each_head_alone(
    backend: str, activation: str, time: int, chunk_size: int | None, causal: bool, data: st.DataObject
) -> None:
    made = case(time, chunk_size, causal=causal, backend=backend, activation=activation)
    lengths = data.draw(st.none() | some_lengths(BATCH, time), "lengths")
    valid = None if lengths is None else torch.tensor(lengths)
    out = made.operator(*made.inputs, lengths=valid)[0].detach()
    for row, length in enumerate(lengths or [time] * BATCH):
        parts = [part.detach()[row, :length] for part in made.inputs]
        expected = head_by_head(parts, chunk_size, causal, activation)
        assert_close(out[row, :length], expected)


@BACKENDS
@FEW
@given(chunk_size=CHUNKS, sizes=SIZES)
def test_many_calls_equal_one(backend: str, chunk_size: int | None, sizes: list[int]) -> None:
    made = case(sum(sizes), chunk_size, backend=backend)
    properties.assert_split_invariant(made, sizes)
    properties.assert_inplace_changes_nothing(made, sizes)
    properties.assert_state_left_alone(made, sizes)


@BACKENDS
@FEW
@given(chunk_size=CHUNKS, calls=counts(BATCH), inplace=st.booleans())
def test_rows_wait_for_each_other(backend: str, chunk_size: int | None, calls: list[list[int]], inplace: bool) -> None:
    time = max(sum(row) for row in zip(*calls, strict=True))
    made = case(time, chunk_size, backend=backend)
    if inplace:
        made = Case(made.operator, tuple(part.detach() for part in made.inputs), {})
    properties.assert_ragged_stream(made, calls, 1, inplace)


@BACKENDS
@FEW
@given(chunk_size=CHUNKS, causal=st.booleans(), lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(backend: str, chunk_size: int | None, causal: bool, lengths: list[int]) -> None:
    made = case(9, chunk_size, causal=causal, backend=backend)
    properties.assert_padding_ignored(made, lengths)
    properties.assert_padding_gives_no_nan(made, lengths, streaming=causal)


@BACKENDS
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_causality_and_layout(backend: str, chunk_size: int | None) -> None:
    made = case(11, chunk_size, backend=backend)
    properties.assert_causal(made, 6)
    properties.assert_layout_does_not_matter(made, [3, 1, 7])


@pytest.mark.parametrize("outlier", [1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("chunk_size", [None, 4])
@BACKENDS
@torch.no_grad()
def test_what_a_query_does_not_see_does_not_change_a_bit(backend: str, chunk_size: int | None, outlier: float) -> None:
    operator = partial(chunked_attention, chunk_size=chunk_size, num_heads=2, backend=backend)  # type: ignore[arg-type]
    parts = [torch.randn(2, 11, 6) for _ in range(3)]
    sizes = [3, 1, 7]
    expected, streamed = operator(*parts)[0], in_pieces(operator, parts, sizes)[0]
    for index in (1, 2):
        changed = [part.clone() for part in parts]
        changed[index][0, 6, 1] = outlier
        for y, same in ((operator(*changed)[0], expected), (in_pieces(operator, changed, sizes)[0], streamed)):
            assert torch.equal(y[0, :6], same[0, :6])
            assert torch.equal(y[1], same[1])
            assert torch.equal(y[0, :, 3:], same[0, :, 3:]), "another head"


@BACKENDS
@pytest.mark.parametrize(("chunk_size", "time"), [(3, 1), (3, 2), (3, 5), (None, 1), (None, 5)])
def test_gradcheck_through_the_state(backend: Any, chunk_size: int | None, time: int) -> None:
    position, slots = torch.tensor([2, 1]), chunk_size or 2

    def run(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        state, options = AttentionState(keys, values, position), {"num_heads": 2, "backend": backend}
        out, new = chunked_attention(q, k, v, chunk_size=chunk_size, state=state, return_state=True, **options)
        assert new is not None
        return out, new.keys, new.values

    assert gradcheck(run, (*(leaf(2, time, 4) for _ in range(3)), leaf(2, slots, 4), leaf(2, slots, 4)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_gradcheck_of_the_fused_attention(causal: bool, chunk_size: int | None) -> None:
    lengths = torch.tensor([5, 2])

    def run(*parts: Tensor) -> Tensor:
        options: dict[str, Any] = {"chunk_size": chunk_size, "num_heads": 2, "causal": causal, "backend": "sdpa"}
        out = chunked_attention(*parts, lengths=lengths, **options)[0]
        return torch.cat([out[0], out[1, :2]])

    assert gradcheck(run, tuple(leaf(2, 5, 4) for _ in range(3)))


def test_heads_are_rotated_apart() -> None:
    x, positions = torch.randn(2, 3, 12, dtype=torch.float64), torch.tensor([[0, 1, 2], [5, 6, 7]])
    for width in (2, 4):
        heads = [rotate(part, positions, width) for part in x.split(4, -1)]
        assert torch.equal(rotate_heads(x, positions, 3, width), torch.cat(heads, -1))


def test_auto_takes_the_fused_attention_for_several_heads_only() -> None:
    q, k, v = (torch.randn(2, 6, 4) for _ in range(3))
    fused = F.scaled_dot_product_attention
    used = []
    for options in (
        {"num_heads": 2},
        {"num_heads": 1},
        {"num_heads": 2, "activation": "laplace"},
        {"num_heads": 2, "dropout": 0.5},  # no fused kernel for CPUs
        {"num_heads": 2, "memory": True},
        {"num_heads": 1, "memory": True},
    ):
        with mock.patch.object(F, "scaled_dot_product_attention", side_effect=fused) as spy:
            chunked_attention(q, k, v, chunk_size=3, **options)
        used.append(spy.called)
    assert used == [True, False, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@BACKENDS
def test_lower_precision_is_close_to_float64(backend: Any, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 40, 16).to(dtype) for _ in range(3))
    options: dict[str, Any] = {"chunk_size": 16, "num_heads": 4, "backend": backend}
    expected, _ = chunked_attention(q.double(), k.double(), v.double(), **options)
    out, _ = in_pieces(partial(chunked_attention, **options), [q, k, v], [20, 1, 19])
    assert out.dtype == dtype
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 3}, InputError, "num_heads: expected a divisor of d_key and d_value, 4 and 4, got 3"),
        ({"num_heads": 0}, InputError, "num_heads: expected a divisor"),
        ({"num_heads": 2, "bias": torch.zeros(11)}, InputError, "bias: expected None for several heads"),
        ({"backend": "sdpa", "bias": torch.zeros(11)}, KernelError, "bias: expected None, got a tensor"),
        ({"backend": "sdpa", "activation": "relu2"}, KernelError, "activation: expected 'softmax', got 'relu2'"),
        ({"memory": True, "chunk_size": None}, InputError, "memory: expected False with no chunks, got True"),
        ({"memory": True, "causal": False}, InputError, "memory: expected False with bidirectional attention"),
        ({"memory": True, "bias": torch.zeros(11)}, InputError, "memory: expected False with a bias, got True"),
        ({"rope_width": 2}, InputError, r"rope_width: expected an even .* 0 without \(use rotate\), got 2"),
        ({"rope_width": 6, "memory": True}, InputError, "rope_width: expected an even"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = (torch.randn(1, 6, 4) for _ in range(3))
    with pytest.raises(error, match=message):
        chunked_attention(q, k, v, **{"chunk_size": 6, **options})
