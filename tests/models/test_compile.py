"""torch.compile without graph breaks, for every family, in training and in streaming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import ClassifierHeadConfig, SequenceModel
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_model
from tests.models.gradients import assert_gradients_close, gradients

TIME = 10
LENGTHS = torch.tensor([6, 10])


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _tokens(time: int = TIME, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _model(family: str, **changes: Any) -> SequenceModel:
    # One layer is all that a graph needs to break.
    return small_model(family, num_layers=1, **changes)


def _compiled(model: SequenceModel, backend: str = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def _assert_trains_alike(model: SequenceModel, compiled: Any, x: Tensor, **arguments: Any) -> None:
    """Outputs and gradients of both are the same."""
    results = []
    for run in (compiled, model):
        logits = run(x, return_state=False, **arguments).logits
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
        results.append((logits.detach(), gradients((logits * weights).sum(), model)))
    assert_close(results[0][0], results[1][0])
    assert_gradients_close(results[0][1], results[1][1])


@pytest.mark.parametrize("family", FAMILY)
def test_language_model_trains(family: str) -> None:
    model = _model(family)
    _assert_trains_alike(model, _compiled(model), _tokens())


@pytest.mark.parametrize(
    ("family", "lengths"),
    [*((family, LENGTHS) for family in FAMILY), ("tcnca", None), ("mega", None)],
    ids=[*(f"{family}-lengths" for family in FAMILY), "tcnca-whole", "mega-whole"],
)
def test_bidirectional_classifier_trains(family: str, lengths: Tensor | None) -> None:
    model = _model(family, causal=False, head=ClassifierHeadConfig(num_classes=3, hidden=4))
    _assert_trains_alike(model, _compiled(model), _tokens(), lengths=lengths)


@pytest.mark.parametrize("family", FAMILY)
def test_states_go_in_and_come_out(family: str) -> None:
    model = _model(family)
    past, future, lengths = _tokens(), _tokens(6), torch.tensor([6, 2])
    results = []
    for run in (_compiled(model), model):
        first, state = run(past, lengths=LENGTHS)
        second, _ = run(future, state=state, lengths=lengths)
        logits = torch.cat([first, second], 1)
        results.append((logits.detach(), gradients(logits.square().sum(), model)))
    assert_close(results[0][0], results[1][0])
    assert_gradients_close(results[0][1], results[1][1])


@pytest.mark.parametrize("family", ["tcnca", "mega", "tcn-mlp", "ema-mlp"])
@torch.no_grad()
def test_generation_compiles_one_step_once(family: str) -> None:
    model = _model(family)
    compiled, x = _compiled(model, "eager"), _tokens(12)
    expected, state = model(x).logits, model.initial_state(2)
    for time in range(12):
        # From the second step on, when the state comes from the graph itself, nothing may be compiled anew.
        with torch._dynamo.config.patch(error_on_recompile=time > 1):
            logits, state = compiled(x[:, time : time + 1], state=state, inplace=True)
        assert_close(logits[:, 0], expected[:, time])


@pytest.mark.parametrize("description", ["mask", "cu_seqlens"])
def test_other_descriptions_of_a_batch(description: str) -> None:
    model = _model("tcnca")
    if description == "mask":
        _assert_trains_alike(model, _compiled(model), _tokens(), attention_mask=torch.rand(2, TIME) < 0.6)
    else:
        starts = torch.tensor([0, 3, 3, 10])
        _assert_trains_alike(model, _compiled(model), _tokens(batch=1), cu_seqlens=starts, max_seqlen=7)


@pytest.mark.parametrize("family", ["tcn-mlp", "mega-full", pytest.param("mega", marks=pytest.mark.slow)])
@torch.no_grad()
def test_lengths_of_sequences_may_be_dynamic(family: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = _model(family)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for time in (9, 10, 12, 23, 24, 31):
        x = _tokens(time)
        assert_close(compiled(x, return_state=False).logits, model(x).logits, f"output of {time} tokens")
    # Whole chunks need no mask for a rest, so they may have a graph of their own.
    assert len(graphs) <= (1 if family != "mega" else 2)


def test_batch_statistics_are_kept() -> None:
    x, found = _tokens(), []
    start = _model("tcnca", norm="batch").state_dict()
    for compile_it in (True, False):
        model = _model("tcnca", norm="batch").train()
        model.load_state_dict(start)
        run = _compiled(model) if compile_it else model
        run(x, lengths=LENGTHS, return_state=False)
        found.append(dict(model.named_buffers()))
    for name, expected in found[1].items():
        assert_close(found[0][name].double(), expected.double(), name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tcnca", "mega"])
def test_inductor_trains(family: str) -> None:
    model = _inductors_model(family)
    _assert_trains_alike(model, _compiled(model, "inductor"), _tokens())


@pytest.mark.slow
@torch.no_grad()
def test_inductor_streams() -> None:
    model, x = _inductors_model("tcnca"), _tokens(4)
    compiled = _compiled(model, "inductor")
    expected, state = model(x).logits, model.initial_state(2)
    for time in range(4):
        logits, state = compiled(x[:, time : time + 1], state=state)
        assert_close(logits[:, 0], expected[:, time])


def _inductors_model(family: str) -> SequenceModel:
    # Each part of the graph costs a run of the C++ compiler.
    shallow = {"depth": 1} if family == "tcnca" else {}
    return _model(family, d_ff=0, position="none", **shallow)
