"""Attention with the memory of the chunk before, against a dense evaluation, and in any number of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from tcnca.errors import StateError
from tcnca.ops import AttentionState, chunked_attention
from tests.comparison import assert_close
from tests.ops import properties
from tests.ops.properties import SIZES, Case, assert_same_gradients, counts, gradients, in_pieces, leaf, some_lengths

BACKENDS = pytest.mark.parametrize("backend", ["naive", "sdpa"])
BATCH, HEADS, WIDTH = 3, 2, 4
CHUNKS = st.integers(1, 6)
FEW = settings(max_examples=20)


def dense(parts: Sequence[Tensor], chunk_size: int, rope_width: int) -> Tensor:
    """Transformer-XL with all pairs of tokens: masks for what is seen and for what is memory, absolute positions."""
    time = torch.arange(parts[0].shape[1])
    chunk = time // chunk_size
    age = chunk.unsqueeze(1) - chunk
    seen, memory = (time <= time.unsqueeze(1)) & (age <= 1), age == 1
    outputs = []
    for one_q, one_k, one_v in zip(*(part.chunk(HEADS, -1) for part in parts), strict=True):
        turned = []
        for part in (one_q, one_k):
            # A pair of features is a complex number.
            half = rope_width // 2
            pairs = torch.complex(part[..., :half], part[..., half:rope_width])
            angles = time.unsqueeze(1) * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
            pairs = pairs * torch.polar(torch.ones_like(angles), angles)
            turned.append(torch.cat([pairs.real, pairs.imag, part[..., rope_width:]], -1))
        scores = torch.where(memory, *(turned[0] @ key.mT for key in (turned[1].detach(), turned[1])))
        weights = (scores * one_q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((weights * memory) @ one_v.detach() + (weights * ~memory) @ one_v)
    return torch.cat(outputs, -1)


def case(time: int, chunk_size: int, *, rope_width: int = 2, backend: str = "naive") -> Case:
    torch.manual_seed(0)
    operator = partial(
        chunked_attention,
        chunk_size=chunk_size,
        num_heads=HEADS,
        memory=True,
        rope_width=rope_width,
        backend=backend,  # type: ignore[arg-type]
    )
    return Case(operator, tuple(leaf(BATCH, time, HEADS * WIDTH, scale=2) for _ in range(3)), {})


@BACKENDS
@FEW
@given(time=st.integers(1, 20), chunk_size=CHUNKS, rope_width=st.sampled_from([0, 2, 4]))
def test_equals_a_dense_evaluation(backend: str, time: int, chunk_size: int, rope_width: int) -> None:
    made = case(time, chunk_size, rope_width=rope_width, backend=backend)
    out, expected = made.operator(*made.inputs)[0], dense(made.inputs, chunk_size, rope_width)
    assert_close(out.detach(), expected.detach())
    assert_same_gradients(gradients(out, made.leaves()), gradients(expected, made.leaves()))


def test_no_gradient_flows_into_the_memory() -> None:
    made = case(9, 3)
    for part in made.inputs[1:]:
        (found,) = torch.autograd.grad(made.operator(*made.inputs)[0][:, 6:].sum(), part)
        assert not found[:, :6].any()
        assert found[:, 6:].any()
    changed = made.inputs[2].detach().clone()
    changed[:, 4] += 1
    moved = (made.operator(*made.inputs[:2], changed)[0] != made.operator(*made.inputs)[0]).any(-1).any(0)
    assert moved.tolist() == [4 <= time < 9 for time in range(9)]


@BACKENDS
@FEW
@given(chunk_size=CHUNKS, sizes=SIZES)
def test_many_calls_equal_one(backend: str, chunk_size: int, sizes: list[int]) -> None:
    made = case(sum(sizes), chunk_size, backend=backend)
    properties.assert_split_invariant(made, sizes)
    without = Case(made.operator, tuple(part.detach() for part in made.inputs), {})
    assert_close(in_pieces(without.operator, without.inputs, sizes)[0], made.operator(*without.inputs)[0])
    properties.assert_inplace_changes_nothing(without, sizes)
    properties.assert_state_left_alone(without, sizes)


@BACKENDS
@FEW
@given(chunk_size=CHUNKS, calls=counts(BATCH), gradient=st.booleans())
def test_rows_wait_for_each_other(backend: str, chunk_size: int, calls: list[list[int]], gradient: bool) -> None:
    made = case(max(sum(row) for row in zip(*calls, strict=True)), chunk_size, backend=backend)
    if not gradient:
        made = Case(made.operator, tuple(part.detach() for part in made.inputs), {})
    properties.assert_ragged_stream(made, calls, 1, inplace=not gradient)


@BACKENDS
@FEW
@given(chunk_size=CHUNKS, lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(backend: str, chunk_size: int, lengths: list[int]) -> None:
    made = case(9, chunk_size, backend=backend)
    properties.assert_padding_ignored(made, lengths)
    for streaming in (False, True):
        properties.assert_padding_gives_no_nan(made, lengths, streaming)


@BACKENDS
def test_causality_and_layout(backend: str) -> None:
    made = case(11, 4, backend=backend)
    for time in (3, 4, 9):
        properties.assert_causal(made, time)
    properties.assert_layout_does_not_matter(made, [3, 1, 7])


@pytest.mark.parametrize("time", [1, 3])
@BACKENDS
def test_gradcheck_inside_a_chunk(backend: Any, time: int) -> None:
    """Finite differences also see the memory, so that all is in the first chunk, or queries are all that moves."""
    options: dict[str, Any] = {"num_heads": 2, "memory": True, "rope_width": 2, "backend": backend}

    def run(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk_size: int = 5) -> Tensor:
        state = AttentionState(keys, values, torch.tensor([2, 1]))
        out, new = chunked_attention(q, k, v, chunk_size=chunk_size, state=state, return_state=True, **options)
        assert new is not None
        return torch.cat([out, new.keys, new.values], 1)

    assert gradcheck(run, tuple(leaf(2, size, 4) for size in (time, time, time, 10, 10)))
    k, v, keys, values = (leaf(2, size, 4).detach() for size in (time, time, 6, 6))
    assert gradcheck(lambda q: run(q, k, v, keys, values, 3), (leaf(2, time, 4),))


@pytest.mark.parametrize("sizes", [[1] * 8, [8], [3, 5]])
@torch.no_grad()
def test_a_sequence_may_be_as_long_as_it_likes(sizes: list[int]) -> None:
    made = case(30, 4)
    q, k, v = (part.detach() for part in made.inputs)
    _, state = made.operator(q[:, :22], k[:, :22], v[:, :22], return_state=True)
    assert isinstance(state, AttentionState)
    later = dataclasses.replace(state, position=state.position + 8 * 10**14)
    results = []
    for start in (state, later):
        outputs, new, begin = [], start, 22
        for size in sizes:
            piece = slice(begin, begin + size)
            y, new = made.operator(q[:, piece], k[:, piece], v[:, piece], state=new, return_state=True)  # type: ignore[assignment]
            outputs.append(y)
            begin += size
        results.append(torch.cat(outputs, 1))
    assert torch.equal(*results)


def test_the_state_holds_two_chunks_in_a_ring() -> None:
    made = case(11, 3)
    _, state = made.operator(*made.inputs, return_state=True)
    assert isinstance(state, AttentionState)
    assert (state.keys.shape, state.position.tolist()) == ((BATCH, 6, HEADS * WIDTH), [11] * BATCH)
    for time in range(5, 11):
        assert torch.equal(state.keys[:, time % 6], made.inputs[1][:, time])
        assert torch.equal(state.values[:, time % 6], made.inputs[2][:, time])
    with pytest.raises(StateError, match=r"state\.keys: expected shape \[3, 8, 8\], got \[3, 6, 8\]"):
        chunked_attention(*made.inputs, chunk_size=4, num_heads=HEADS, memory=True, state=state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@BACKENDS
@torch.no_grad()
def test_lower_precision_is_close_to_float64(backend: str, dtype: torch.dtype) -> None:
    made = case(40, 8, backend=backend)
    narrow = [part.detach().to(dtype) / 2 for part in made.inputs]
    expected, _ = made.operator(*(part.double() for part in narrow))
    for sizes in ([40], [1] * 40, [11, 3, 26]):
        out, state = in_pieces(made.operator, narrow, sizes)
        assert out.dtype == state.tensors()["keys"].dtype == dtype
        assert_close(out, expected)
