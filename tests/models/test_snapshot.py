"""A snapshot copies few slots, and rolling back to it restores every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import ClassifierHeadConfig, ModelState, RegressionHeadConfig, SequenceModel, StateError, ValueInputConfig
from tcnca.ops import EMAState, State, ema, tcn
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_config, small_model
from tests.ops.properties import assert_bit_equal

BATCH = 3
# Tokens of each row in successive calls, of which the longest has `sum` tokens; calls of one token write in place.
LENGTHS = st.lists(st.lists(st.integers(0, 7), min_size=BATCH, max_size=BATCH), min_size=1, max_size=5)


def _tokens(batch: int, time: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _ragged(model: SequenceModel, lengths: list[int]) -> ModelState:
    """Return a state whose rows have read different numbers of tokens."""
    state = model(_tokens(BATCH, max(lengths)), lengths=lengths).state
    assert state is not None
    return state.clone()


def _read(model: SequenceModel, state: ModelState, calls: list[list[int]]) -> ModelState:
    for lengths in calls:
        x = _tokens(BATCH, max(*lengths, 1))
        new = model(x, lengths=lengths, state=state, inplace=True).state
        assert new is not None
        state = new
    return state


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=6)
@given(past=st.lists(st.integers(1, 19), min_size=BATCH, max_size=BATCH), calls=LENGTHS, spare=st.integers(0, 2))
@torch.no_grad()
def test_rollback_restores_every_bit(name: str, past: list[int], calls: list[list[int]], spare: int) -> None:
    model = small_model(VARIANTS[name], torch.float32)
    state = _ragged(model, past)
    before = state.clone()
    most = max(sum(row) for row in zip(*calls, strict=True))
    snapshot = state.snapshot(max(most + spare, 1))
    restored = _read(model, state, calls).rollback(snapshot)
    assert_bit_equal(restored, before)
    # A second time, and what follows is what would have followed.
    restored = _read(model, restored, [[1, 1, 1]] * min(snapshot.max_tokens, 5)).rollback(snapshot)
    assert_bit_equal(restored, before)
    x = _tokens(BATCH, 6)
    assert torch.equal(model(x, state=restored).logits, model(x, state=before).logits)


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_single_tokens_over_chunks_and_around_rings(family: str) -> None:
    """With exactly as many tokens as the snapshot allows, from every place in a chunk."""
    model = small_model(family, torch.bfloat16)
    state = _ragged(model, [17, 2, 30])
    for count in (1, 2, 3, 4, 5, 9, 25):
        before, snapshot = state.clone(), state.snapshot(count)
        # Rows that have read all may wait for others.
        calls = [[1, 1, 1]] * count + [[0, 0, 0]]
        state = _read(model, state, calls).rollback(snapshot)
        assert_bit_equal(state, before)
        state = _read(model, state, [[1, 1, 1]])


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize("mixed", [True, False])
@torch.no_grad()
def test_pooled_heads_roll_back(pooling: Any, mixed: bool) -> None:
    changes: dict[str, Any] = {} if mixed else {"mixer": None}
    head = ClassifierHeadConfig(pooling=pooling) if mixed else RegressionHeadConfig(pooling=pooling)
    model = small_model(small_config("tcn-mlp", input=ValueInputConfig(), head=head, **changes))
    x = torch.randn(2, 9, dtype=torch.float64)
    state = model(x[:, :4]).state
    assert state is not None
    before, snapshot = state.clone(), state.snapshot(5)
    for time in range(4, 9):
        state = model(x[:, time : time + 1], state=state, inplace=True).state
        assert state is not None
    assert_bit_equal(state.rollback(snapshot), before)


@torch.no_grad()
def test_snapshot_is_small() -> None:
    model = small_model("tcnca", torch.float32, chunk_size=64, kernel_size=9, dilation_factor=8)
    state = _ragged(model, [70, 3, 9])
    # 5 of the 8, 64 and 512 slots of the rings, and of the 64 of the chunk.
    assert state.snapshot(4).nbytes < 0.06 * state.nbytes
    assert state.snapshot(1000).nbytes == state.nbytes


@torch.no_grad()
def test_snapshots_nest() -> None:
    model = small_model("tcnca", torch.float32)
    state = _ragged(model, [5, 6, 7])
    first, outer = state.clone(), state.snapshot(9)
    state = _read(model, state, [[1, 1, 1]] * 3)
    second, inner = state.clone(), state.snapshot(6)
    state = _read(model, state, [[1, 0, 1]] * 6).rollback(inner)
    assert_bit_equal(state, second)
    assert_bit_equal(_read(model, state, [[2, 3, 1]]).rollback(outer), first)


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_refusals(family: str) -> None:
    model = small_model(family, torch.float32)
    state = _ragged(model, [5, 6, 7])
    for wrong in (0, -1, 1.0, True, None):
        with pytest.raises(StateError, match="max_tokens: expected an integer of at least 1"):
            state.snapshot(wrong)  # type: ignore[arg-type]
    snapshot = state.snapshot(3)
    with pytest.raises(StateError, match="expected one of this state, got one of another state"):
        _ragged(model, [5, 6, 7]).rollback(snapshot)
    with pytest.raises(StateError, match="expected one of this state, got one of another model"):
        small_model(family, num_layers=1).initial_state(BATCH).rollback(snapshot)
    other = model(_tokens(BATCH, 1), state=state).state
    assert other is not None
    with pytest.raises(StateError, match="without it the earlier state is still valid"):
        other.rollback(snapshot)
    read = _read(model, state, [[1, 2, 3], [0, 1, 1]])
    with pytest.raises(StateError, match=r"expected 0 to 3 tokens \(max_tokens\) since it was made, got \[1, 3, 4\]"):
        read.rollback(snapshot)
    with pytest.raises(StateError, match="has consumed"):
        state.snapshot(3)


@torch.no_grad()
def test_a_state_that_was_rolled_back_is_consumed() -> None:
    model = small_model("mega", torch.float32)
    state = _ragged(model, [5, 6, 7])
    snapshot = state.snapshot(3)
    read = _read(model, state, [[1, 1, 1]])
    restored = read.rollback(snapshot)
    with pytest.raises(StateError, match="has consumed"):
        read.rollback(snapshot)
    with pytest.raises(StateError, match="got one of another model"):
        restored.layers[0].rollback(snapshot)  # type: ignore[arg-type]


def test_states_of_operators_roll_back() -> None:
    parameters = [torch.randn(1, 2, 3) for _ in range(4)]
    _, state = ema(torch.randn(2, 5, 2), *parameters, truncation=4, return_state=True)
    assert isinstance(state, EMAState)
    before, snapshot = state.clone(), state.snapshot(2)
    _, after = ema(torch.randn(2, 2, 2), *parameters, truncation=4, state=state, return_state=True, inplace=True)
    assert after is not None
    assert_bit_equal(after.rollback(snapshot), before)
    _, other = ema(torch.randn(2, 5, 2), *parameters, return_state=True)
    assert other is not None
    with pytest.raises(StateError, match="got one of another model"):
        other.rollback(snapshot)


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_states_of_several_sequences_become_one(family: str) -> None:
    model, x = small_model(family), _tokens(3, 20)
    lengths = [3, 12, 7]
    states = [model(x[row : row + 1, :length]).state for row, length in enumerate(lengths)]
    together = ModelState.cat([state for state in states if state is not None])
    next_tokens = _tokens(3, 4)
    logits = model(next_tokens, state=together).logits
    for row, state in enumerate(states):
        torch.testing.assert_close(logits[row], model(next_tokens[row : row + 1], state=state).logits[0])


def test_cat_refuses_states_of_several_models() -> None:
    _, first = tcn(torch.randn(2, 5, 2), torch.randn(1, 1, 2, 3), 2, return_state=True)
    _, second = tcn(torch.randn(2, 5, 2), torch.randn(2, 1, 2, 3), 2, return_state=True)
    states: list[State] = [state for state in (first, second) if state is not None]
    with pytest.raises(StateError, match="expected states of one model"):
        State.cat(states)
    with pytest.raises(StateError, match="expected at least 1"):
        State.cat([])
