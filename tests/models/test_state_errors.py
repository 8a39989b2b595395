"""A streaming state that is not this model's, this batch's or this device's is refused, never used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import (
    ClassifierHeadConfig,
    InputError,
    ModelConfig,
    ModelState,
    PairHeadConfig,
    RegressionHeadConfig,
    StateError,
    TCNConfig,
)
from tests.comparison import assert_close
from tests.examples import VOCABULARY, small_config, small_model


def tokens(batch: int = 2, time: int = 7) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, time))


def state_of(config: ModelConfig, batch: int = 2) -> ModelState:
    state = small_model(config)(tokens(batch)).state
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("tcnca", {"kernel_size": 2}),
        ("tcnca", {"depth": 2}),
        ("tcnca", {"convolutions": 2}),
        ("tcnca", {"dilation_factor": 3}),
        ("tcnca", {"chunk_size": 2}),
        ("tcnca", {"d_key": 2}),
        ("tcnca", {"d_value": 4}),
        ("tcnca", {"d_model": 6}),
        ("tcnca", {"num_layers": 1}),
        ("tcnca", {"gated": False}),
        ("mega", {"mixer.d_state": 2}),
        ("mega", {"truncation": 5}),
        ("mega-full", {"chunk_size": 4}),
        ("tcn-mlp", {"kernel_size": 2}),
    ],
    ids=str,
)
def test_state_of_another_model(family: str, changes: dict[str, Any]) -> None:
    other = state_of(small_config(family).override(**changes))
    with pytest.raises(StateError, match=r"^state: .*allowed is"):
        small_model(family)(tokens(), state=other)


def test_state_of_another_family() -> None:
    for family, other in (("tcnca", "mega"), ("mega", "tcnca"), ("tcn-mlp", "tcnca-simple"), ("ema-mlp", "mega")):
        with pytest.raises(StateError, match=r"^state: .*allowed is"):
            small_model(family)(tokens(), state=state_of(small_config(other)))


def test_state_of_another_tcn_whose_buffers_have_the_same_sizes() -> None:
    """Two blocks of one convolution remember as much as one block of two: only what they do with it differs."""
    one = TCNConfig(kernel_size=3, dilation_factor=1, depth=2)
    other = TCNConfig(kernel_size=3, dilation_factor=1, depth=1, convolutions=2)
    states = [state_of(small_config(mixer=config)) for config in (one, other)]
    shapes = [[tensor.shape for tensor in state.tensors().values()] for state in states]
    assert shapes[0] == shapes[1]
    with pytest.raises(StateError, match=r"^state: comes from another model: it was made by .*; allowed is"):
        small_model(small_config(mixer=one))(tokens(), state=states[1])


def test_state_of_another_pooling() -> None:
    last, mean = (small_config(head=ClassifierHeadConfig(pooling=pooling)) for pooling in ("last", "mean"))
    with pytest.raises(StateError, match=r"^state: .*pooling last; allowed is .*pooling mean"):
        small_model(mean)(tokens(), state=state_of(last))


def test_state_of_the_chunk_before_it_was_changed() -> None:
    model = small_model()
    _, state = model(tokens())
    with pytest.raises(StateError, match=r"^state: comes from another model"):
        model.set_chunk_size(2)(tokens(), state=state)


def test_state_fits_again_when_the_chunk_is_set_back() -> None:
    model = small_model()
    x = tokens(time=9)
    with torch.no_grad():
        _, state = model(x[:, :5])
        model.set_chunk_size(2).set_chunk_size(4)
        assert_close(model(x[:, 5:], state=state).logits, model(x).logits[:, 5:])


@pytest.mark.parametrize("family", ["tcnca", "mega", "mega-full", "tcn-mlp"])
def test_state_of_another_batch(family: str) -> None:
    model = small_model(family)
    _, state = model(tokens(3))
    with pytest.raises(StateError, match=r"^state: got a batch of 3, allowed is 2"):
        model(tokens(2), state=state)


def test_state_of_another_number_of_packed_documents() -> None:
    model = small_model()
    _, state = model(tokens(1), cu_seqlens=[0, 3, 7])
    with pytest.raises(StateError, match=r"^state: got a batch of 2, allowed is 3"):
        model(tokens(1), cu_seqlens=[0, 3, 5, 7], state=state)


@pytest.mark.parametrize("family", ["tcnca", "mega", "tcn-mlp"])
def test_state_on_another_device(family: str) -> None:
    model = small_model(family)
    _, state = model(tokens())
    with pytest.raises(StateError, match=r"^state: got one on meta, allowed is cpu.*state\.to"):
        model(tokens(), state=state.to("meta"))


@pytest.mark.parametrize("wrong", [(), "state", 3, {}], ids=str)
def test_state_that_is_none(wrong: Any) -> None:
    with pytest.raises(StateError, match=f"^state: got a {type(wrong).__name__}, allowed is a ModelState"):
        small_model()(tokens(), state=wrong)


def test_part_of_a_state_is_none() -> None:
    part = state_of(small_config()).layers[0]
    with pytest.raises(StateError, match=r"^state: got a LayerState, allowed is a ModelState"):
        small_model()(tokens(), state=part)


@pytest.mark.parametrize("head", [ClassifierHeadConfig(), RegressionHeadConfig()], ids=["classifier", "regression"])
def test_bidirectional_model_has_no_state(head: Any) -> None:
    model = small_model(small_config(head=head, causal=False))
    assert not model.streams
    for asked in ({"state": state_of(small_config())}, {"return_state": True}):
        with pytest.raises(StateError, match=r"^state: asked of a model that is bidirectional, allowed is None"):
            model(tokens(), **asked)
    with pytest.raises(StateError, match=r"^state: this model has none"):
        model.initial_state(2)


def test_pair_model_has_no_state() -> None:
    model = small_model(small_config(head=PairHeadConfig()))
    assert not model.streams
    for asked in ({"state": state_of(small_config())}, {"return_state": True}):
        with pytest.raises(StateError, match=r"^state: asked of a model that reads two documents, allowed is None"):
            model(tokens(), tokens(), **asked)
    with pytest.raises(StateError, match=r"^state: this model has none"):
        model.initial_state(2)


@pytest.mark.parametrize("batch", [0, -1])
def test_initial_state_of_no_sequences(batch: int) -> None:
    with pytest.raises(StateError, match=f"^batch: got {batch}, allowed is 1 or more"):
        small_model().initial_state(batch)


def test_refused_state_is_left_as_it_was() -> None:
    """Also where the call was allowed to reuse its memory."""
    model = small_model()
    _, state = model(tokens(2))
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    with pytest.raises(StateError):
        model(tokens(3), state=state, inplace=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


@pytest.mark.parametrize("family", ["tcnca", "mega", "tcn-mlp"])
def test_state_of_another_floating_type(family: str) -> None:
    model = small_model(family)
    _, state = model(tokens())
    with pytest.raises(StateError, match=r"^state: got torch\.float32, allowed is torch\.float64, .*state\.to"):
        model(tokens(), state=state.to(torch.float32))
    model(tokens(), state=state.to(torch.float32).to(torch.float64))


@pytest.mark.parametrize("family", ["tcnca", "mega", "mega-full", "tcn-mlp"])
def test_state_that_was_used_up(family: str) -> None:
    model = small_model(family)
    with torch.no_grad():
        _, state = model(tokens())
        kept = state.clone()
        _, following = model(tokens(time=1), state=state, inplace=True)
        for use in (lambda: model(tokens(time=1), state=state), state.clone, lambda: state.to("cpu"), state.detach):
            with pytest.raises(StateError, match="used up by a call with inplace=True, allowed is the state that call"):
                use()
        # What followed it and what was copied before go on.
        model(tokens(time=1), state=following, inplace=True)
        model(tokens(time=1), state=kept)


def test_state_of_a_call_that_failed_is_used_up_too() -> None:
    model = small_model("mega-full", mixer=TCNConfig(kernel_size=3, dilation_factor=2, depth=2), max_length=6)
    _, state = model(tokens(time=4))
    with torch.no_grad(), pytest.raises(InputError, match="at most 6"):
        model(tokens(time=3), state=state, inplace=True)
    with pytest.raises(StateError, match="used up"):
        model(tokens(time=2), state=state)


def test_slots_that_no_row_fills_do_not_use_up_the_reach() -> None:
    model = small_model("mega-full", max_length=6)
    x = tokens(1, 6)
    _, empty = model(x, lengths=[0])
    assert_close(model(x, state=empty).logits, model(x).logits)
    _, state = model(tokens(2, 5), lengths=[5, 2])
    model(x[:, :4], state=state.reorder([1]))
