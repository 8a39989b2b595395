"""Operations on states between two calls: detach, convert, repeat, reorder, save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tcnca import ModelState, RegressionHeadConfig, SequenceModel, ValueInputConfig
from tests.comparison import assert_close
from tests.examples import ATTENTION, EMA, FAMILY, TCN, VOCABULARY, pairwise, small_model

FAMILIES = pytest.mark.parametrize("family", FAMILY)


def _tokens(batch: int, time: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _after(model: SequenceModel, x: Tensor) -> ModelState:
    state = model(x).state
    assert state is not None
    return state


@FAMILIES
def test_detach_cuts_the_graph_and_keeps_the_values(family: str) -> None:
    model = small_model(family, input=ValueInputConfig(), head=RegressionHeadConfig(pooling="mean"))
    x = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    state = _after(model, x[:, :6])
    cut = state.detach()
    assert any(tensor.requires_grad for tensor in state.tensors().values())
    assert not any(tensor.requires_grad for tensor in cut.tensors().values())
    logits = model(x[:, 6:], state=cut).logits
    assert_close(logits, model(x).logits)
    (gradient,) = torch.autograd.grad(logits.sum(), x)
    assert not gradient[:, :6].any()
    assert gradient[:, 6:].all()


@FAMILIES
@torch.no_grad()
def test_to_another_type_keeps_positions_whole(family: str) -> None:
    model, x = small_model(family), _tokens(2, 15)
    parallel = model(x).logits
    state = _after(model, x[:, :10]).to(torch.float32)
    for name, tensor in state.tensors().items():
        assert tensor.dtype == (torch.long if name.endswith("position") else torch.float32), name
    logits, state_after = model.float()(x[:, 10:], state=state)
    assert logits.dtype == torch.float32
    assert_close(logits, parallel[:, 10:])
    assert state_after.to(torch.float64).tensors().keys() == state.tensors().keys()


@FAMILIES
@torch.no_grad()
def test_reorder_keeps_rows_at_different_positions_apart(family: str) -> None:
    model, past, new, order = small_model(family), _tokens(3, 9), _tokens(3, 4), torch.tensor([1, 2, 1])
    lengths = [3, 9, 6]
    state = model(past, lengths=lengths).state
    assert state is not None
    logits = model(new, state=state.reorder(order)).logits
    for row, source in enumerate(order.tolist()):
        whole = torch.cat([past[source, : lengths[source]], new[row]]).unsqueeze(0)
        assert_close(logits[row], model(whole).logits[0, -4:], f"row {row}")


@pytest.mark.parametrize(("family", "pooling"), pairwise(list(FAMILY), ["mean", "first"]))
@torch.no_grad()
def test_saved_state_continues(family: str, pooling: str, tmp_path: Path) -> None:
    head = RegressionHeadConfig(pooling=pooling)  # type: ignore[arg-type]
    model, x = small_model(family, head=head), _tokens(2, 15)
    state = _after(model, x[:, :10])
    state.save(tmp_path / "state.safetensors")
    loaded = ModelState.load(tmp_path / "state.safetensors")
    for name, tensor in state.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor), name
    assert loaded.signature == state.signature
    assert_close(model(x[:, 10:], state=loaded).logits, model(x[:, 10:], state=state).logits)


@pytest.mark.parametrize("family", ["tcnca", "tcnca-simple", "tcn-mlp", "mega", "ema-mlp"])
@torch.no_grad()
def test_size_of_a_state_does_not_depend_on_the_past(family: str) -> None:
    model = small_model(family)
    sizes = {_after(model, _tokens(2, time)).nbytes for time in (1, 4, 30)}
    assert sizes == {model.initial_state(2).nbytes}


@torch.no_grad()
def test_bytes_of_a_state_are_the_values_it_must_hold() -> None:
    layers, batch, width, number, position = 2, 3, 8, 8, 8
    window = (TCN.receptive_field - 1) * width * number + position
    averages = EMA.d_state * width * number + position
    assert ATTENTION.chunk_size is not None
    chunk = ATTENTION.chunk_size * (ATTENTION.d_key + ATTENTION.d_value) * number + position
    expected = {"tcn-mlp": window, "tcnca": window + chunk, "ema-mlp": averages, "mega": averages + chunk}
    for family, bytes_a_layer in expected.items():
        assert small_model(family).initial_state(batch).nbytes == layers * batch * bytes_a_layer, family


@pytest.mark.parametrize("family", ["tcnca", "tcnca-simple", "tcn-mlp"])
@torch.no_grad()
def test_a_step_in_place_moves_no_memory(family: str) -> None:
    model, x = small_model(family), _tokens(2, 9)
    state = _after(model, x[:, :8])
    new = model(x[:, 8:], state=state, inplace=True).state
    assert new is not None
    for name, tensor in new.tensors().items():
        assert tensor.data_ptr() == state.tensors()[name].data_ptr(), name


@pytest.mark.parametrize("family", ["tcn-mlp", "ema-mlp"])
def test_sums_over_the_past_keep_their_digits_in_half_precision(family: str) -> None:
    """A mean over more tokens than bfloat16 can count, after the state was asked to become bfloat16."""
    model = small_model(family, dtype=torch.bfloat16, head=RegressionHeadConfig(outputs=3))
    tokens = torch.randint(VOCABULARY, (1, 1500))
    with torch.no_grad():
        whole = model(tokens).logits
        state = model(tokens[:, :300]).state
        assert state is not None
        state = state.to(torch.bfloat16)
        for begin in range(300, 1500, 40):
            logits, state = model(tokens[:, begin : begin + 40], state=state)
    assert_close(logits, whole)
