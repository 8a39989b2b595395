"""torch.compile without graph breaks and torch.export, for representative models, in training and in streaming."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from tcnca import ClassifierHeadConfig, ModelState, SequenceModel
from tests.comparison import assert_close
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_model
from tests.models.gradients import assert_gradients_close, gradients

TIME = 10
LENGTHS = torch.tensor([6, 10])
COMPILED = (*FAMILY, "half-rope", "rotary-relu2-scale-post", "transformer-full", "ngrams")
MODELS = {name: VARIANTS[name] for name in COMPILED}
CLASSIFIER = ClassifierHeadConfig(num_classes=3, hidden=4)


def _families(*quick: str) -> pytest.MarkDecorator:
    """All families, of which only some run by default."""
    return pytest.mark.parametrize(
        "family", [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in MODELS]
    )


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _tokens(time: int = TIME, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _model(family: str, **changes: Any) -> SequenceModel:
    # One layer is enough for a graph to break.
    return small_model(MODELS[family], num_layers=1, **changes)


def _compiled(model: SequenceModel, backend: str = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def _assert_trains_alike(model: SequenceModel, compiled: Any, x: Tensor, **arguments: Any) -> None:
    results = []
    for run in (compiled, model):
        logits = run(x, return_state=False, **arguments).logits
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
        results.append((logits.detach(), gradients((logits * weights).sum(), model)))
    assert_close(results[0][0], results[1][0])
    assert_gradients_close(results[0][1], results[1][1])


@_families("tcnca")
def test_language_model_trains(family: str) -> None:
    model = _model(family)
    _assert_trains_alike(model, _compiled(model), _tokens())


@_families("mega")
def test_bidirectional_classifier_trains(family: str) -> None:
    model = _model(family, causal=False, head=CLASSIFIER)
    _assert_trains_alike(model, _compiled(model), _tokens(), lengths=LENGTHS)


@_families("tcn-mlp", "half-rope", "ngrams")
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


@pytest.mark.parametrize("family", ["tcnca", "mega"])
@torch.no_grad()
def test_generation_compiles_one_step_once(family: str) -> None:
    model = _model(family)
    compiled, x = _compiled(model, "eager"), _tokens(12)
    expected, state = model(x).logits, model.initial_state(2)
    for time in range(12):
        # From the second step on, when the state comes from the graph itself, nothing may be recompiled.
        with torch._dynamo.config.patch(error_on_recompile=time > 1):
            logits, state = compiled(x[:, time : time + 1], state=state, inplace=True)
        assert_close(logits[:, 0], expected[:, time])


@pytest.mark.slow
def test_masks_and_packed_documents() -> None:
    model = _model("tcnca")
    _assert_trains_alike(model, _compiled(model), _tokens(), attention_mask=torch.rand(2, TIME) < 0.6)
    starts = torch.tensor([0, 3, 3, 10])
    _assert_trains_alike(model, _compiled(model), _tokens(batch=1), cu_seqlens=starts, max_seqlen=7)


@pytest.mark.parametrize("family", ["tcn-mlp", pytest.param("mega", marks=pytest.mark.slow)])
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
    # Whole chunks need no mask, so they may have a separate graph.
    assert len(graphs) <= (1 if family != "mega" else 2)


@pytest.mark.parametrize("name", ["tcnca", "s4d"])
@torch.no_grad()
def test_lengths_of_continued_sequences_may_be_dynamic(name: str) -> None:
    model = small_model(VARIANTS[name], num_layers=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled, state = torch.compile(model, fullgraph=True, backend=counter, dynamic=True), model(_tokens(9)).state
    for time in (9, 50, 64, 130):
        x = _tokens(time)
        assert_close(compiled(x, state=state).logits, model(x, state=state).logits)
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_traces_of_tensors_without_values(family: str) -> None:
    """Neither fake tensors nor those of `make_fx` have values that a call can read."""
    with FakeTensorMode():
        model, state = SequenceModel(MODELS[family]), None
        for time in (9, 6, 1):
            logits, state = model(_tokens(time), state=state)
            assert logits.shape == (2, time, VOCABULARY)
    model, x = _model(family), _tokens()
    assert_close(make_fx(lambda x: model(x).logits)(x)(x), model(x).logits)


@pytest.mark.slow
def test_batch_statistics_are_kept() -> None:
    x, found = _tokens(), []
    start = _model("tcn-mlp", norm="batch").state_dict()
    for compile_it in (True, False):
        model = _model("tcn-mlp", norm="batch").train()
        model.load_state_dict(start)
        run = _compiled(model) if compile_it else model
        run(x, lengths=LENGTHS, return_state=False)
        found.append(dict(model.named_buffers()))
    for name, expected in found[1].items():
        assert_close(found[0][name].double(), expected.double(), name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tcnca", "mega"])
def test_inductor_trains_and_streams(family: str) -> None:
    # Each part of the graph costs a run of the C++ compiler.
    model = _model(family, d_ff=0, position="none", **({"depth": 1} if family == "tcnca" else {}))
    compiled, x = _compiled(model, "inductor"), _tokens()
    _assert_trains_alike(model, compiled, x)
    with torch.no_grad():
        expected, state = model(x).logits, model.initial_state(2)
        for time in range(4):
            logits, state = compiled(x[:, time : time + 1], state=state)
            assert_close(logits[:, 0], expected[:, time])


def _export(model: SequenceModel, x: Tensor, time: Any = None, **arguments: Any) -> ExportedProgram:
    shapes = None if time is None else {"x": {1: time}, **dict.fromkeys(arguments)}
    return torch.export.export(model, (x,), arguments, dynamic_shapes=shapes)


@_families("mega-full")
@torch.no_grad()
def test_exported_language_model(family: str) -> None:
    model, x = _model(family), _tokens()
    logits, state = _export(model, _tokens()).module()(x)
    expected = model(x)
    assert_close(logits, expected.logits)
    assert isinstance(state, ModelState)
    after = _tokens(3)
    assert_close(model(after, state=state).logits, model(after, state=expected.state).logits)


@_families("tcnca-simple")
@torch.no_grad()
def test_exported_classifier_with_lengths(family: str) -> None:
    model = _model(family, causal=False, head=CLASSIFIER)
    x, lengths = _tokens(), torch.tensor([4, 10])
    program = _export(model, _tokens(), lengths=torch.tensor([10, 7]))
    assert_close(program.module()(x, lengths=lengths).logits, model(x, lengths=lengths).logits)


@pytest.mark.parametrize("family", ["tcnca", pytest.param("mega", marks=pytest.mark.slow)])
@torch.no_grad()
def test_saved_program_of_one_step_generates(family: str) -> None:
    model, x, file = small_model(family), _tokens(9), io.BytesIO()
    torch.export.save(_export(model, _tokens(1), state=model.initial_state(2)), file)
    file.seek(0)
    step = torch.export.load(file).module()
    state, pieces = model.initial_state(2), []
    for time in range(9):
        logits, state = step(x[:, time : time + 1], state=state)
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), model(x).logits)


@_families("mega")
@torch.no_grad()
def test_exported_program_of_any_length(family: str) -> None:
    model = _model(family)
    for return_state in (False, True):
        run = _export(model, _tokens(20), Dim.DYNAMIC, return_state=return_state).module()
        for time in (5, 8, 23, 60):
            x = _tokens(time)
            assert_close(run(x, return_state=return_state).logits, model(x).logits, f"output of {time} tokens")
