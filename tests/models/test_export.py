"""torch.export: a graph of the whole model, with its state, and for sequences of any length."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from tcnca import ClassifierHeadConfig, ModelState, SequenceModel
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_model

FAMILIES = pytest.mark.parametrize("family", FAMILY)


def _tokens(time: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, time))


def _export(model: SequenceModel, x: Tensor, time: Any = None, **arguments: Any) -> ExportedProgram:
    shapes = None if time is None else {"x": {1: time}, **dict.fromkeys(arguments)}
    return torch.export.export(model, (x,), arguments, dynamic_shapes=shapes)


@FAMILIES
@torch.no_grad()
def test_language_model(family: str) -> None:
    model, x = small_model(family, num_layers=1), _tokens(10)
    logits, state = _export(model, _tokens(10)).module()(x)
    expected = model(x)
    assert_close(logits, expected.logits)
    assert isinstance(state, ModelState)
    after = _tokens(3)
    assert_close(model(after, state=state).logits, model(after, state=expected.state).logits)


@FAMILIES
@torch.no_grad()
def test_bidirectional_classifier_with_lengths(family: str) -> None:
    model = small_model(family, num_layers=1, causal=False, head=ClassifierHeadConfig(num_classes=3, hidden=4))
    x, lengths = _tokens(10), torch.tensor([4, 10])
    program = _export(model, _tokens(10), lengths=torch.tensor([10, 7]))
    assert_close(program.module()(x, lengths=lengths).logits, model(x, lengths=lengths).logits)


@pytest.mark.parametrize("family", [name for name in FAMILY if name != "mega-full"])
@torch.no_grad()
def test_one_step_generates(family: str) -> None:
    model, x = small_model(family), _tokens(9)
    step = _export(model, _tokens(1), state=model.initial_state(2)).module()
    state, pieces = model.initial_state(2), []
    for time in range(9):
        logits, state = step(x[:, time : time + 1], state=state)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), model(x).logits)


@torch.no_grad()
def test_one_step_of_full_attention() -> None:
    model, x = small_model("mega-full"), _tokens(9)
    # Its cache grows, so a graph with fixed shapes is for one position.
    state = model(x[:, :8]).state
    step = _export(model, _tokens(1), state=state).module()
    assert_close(step(x[:, 8:], state=state).logits, model(x).logits[:, 8:])


@FAMILIES
@pytest.mark.parametrize("return_state", [False, True], ids=["no-state", "state"])
@torch.no_grad()
def test_any_length(family: str, return_state: bool) -> None:
    model = small_model(family, num_layers=1)
    run = _export(model, _tokens(20), Dim.DYNAMIC, return_state=return_state).module()
    # Whole chunks and not. With a state, fewer tokens than a dilation has steps take another way, that of a step.
    for time in (5, 8, 23, 60):
        x = _tokens(time)
        assert_close(run(x, return_state=return_state).logits, model(x).logits, f"output of {time} tokens")


@torch.no_grad()
def test_a_named_number_of_whole_chunks() -> None:
    model = small_model("tcnca")
    run = _export(model, _tokens(20), 4 * Dim("chunks", min=2, max=15)).module()
    for time in (8, 60):
        x = _tokens(time)
        assert_close(run(x).logits, model(x).logits, f"output of {time} tokens")


@pytest.mark.parametrize("family", ["tcnca", "mega"])
@torch.no_grad()
def test_saved_program_still_takes_and_gives_states(family: str) -> None:
    model, x = small_model(family), _tokens(6)
    file = io.BytesIO()
    torch.export.save(_export(model, _tokens(1), state=model.initial_state(2)), file)
    file.seek(0)
    step = torch.export.load(file).module()
    state, pieces = model.initial_state(2), []
    for time in range(6):
        logits, state = step(x[:, time : time + 1], state=state)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), model(x).logits)
