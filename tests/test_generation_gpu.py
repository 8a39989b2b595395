"""On a GPU, generation replays a captured step with the results of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcnca.generation import generate, stream
from tcnca.generation.dispatch import MIN_GRAPH_TOKENS, GraphedStep, ModelStep, has_fixed_state, make_step
from tcnca.generation.fused import FusedStep
from tests.comparison import assert_close
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_model


def test_what_has_no_fixed_state_is_not_captured() -> None:
    assert has_fixed_state(small_model())
    # The state of full attention grows.
    assert not has_fixed_state(small_model("mega-full"))
    # A model of feed-forward nets has no state.
    assert not has_fixed_state(small_model("tcn-mlp", mixer=None))


@pytest.mark.gpu
def test_each_model_gets_its_fastest_step() -> None:
    def kind(name: str, dtype: torch.dtype, tokens: int | None, **options: Any) -> type:
        model = small_model(name, dtype).cuda()
        return type(make_step(model, model.initial_state(2), max_new_tokens=tokens, **options))

    assert kind("tcnca", torch.float32, MIN_GRAPH_TOKENS) is FusedStep
    assert kind("tcnca", torch.float32, None) is FusedStep
    assert kind("tcnca", torch.float32, MIN_GRAPH_TOKENS - 1) is ModelStep
    assert kind("tcnca", torch.float32, 1, quantization="int8") is FusedStep
    assert kind("tcnca", torch.float64, None) is GraphedStep
    assert kind("mega-full", torch.float32, None) is ModelStep


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted({*FAMILY, "transformer-xl"} - {"mega-full"}))
def test_captured_step_equals_the_model(family: str) -> None:
    model = small_model(VARIANTS[family]).cuda()
    tokens = torch.randint(VOCABULARY, (3, 60), device="cuda")
    lengths = torch.tensor([7, 3, 1], device="cuda")
    with torch.no_grad():
        state = model(tokens[:, :7], lengths=lengths).state
        assert state is not None
        expected, step = state.clone(), GraphedStep(model, state.clone())
        for place in range(7, 60):
            logits, expected = model(tokens[:, place : place + 1], state=expected)
            assert_close(step(tokens[:, place]), logits[:, -1])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILY)
def test_generation_with_a_graph_equals_the_plain_loop(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(family, torch.float32).cuda().eval()
    prompt = torch.randint(VOCABULARY, (2, 11), device="cuda")
    results = []
    for reason in (None, "the fused step is left out", "so is the graph"):
        if reason is not None:
            monkeypatch.setattr("tcnca.generation.fused.unsupported_reason", lambda *_, reason=reason: reason)
        if reason == "so is the graph":
            monkeypatch.setattr("tcnca.generation.dispatch.has_fixed_state", lambda *_: False)
        results.append(generate(model, prompt, 40, temperature=0.0))
        results.append(generate(model, prompt, 40, top_k=5, repetition_penalty=1.2, seed=3, num_samples=3))
    for found, expected in zip(results, results[-2:] * 3, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
def test_two_generations_side_by_side() -> None:
    one, other = small_model().cuda().eval(), small_model("mega").cuda().eval()
    prompt = torch.randint(VOCABULARY, (2, 5), device="cuda")
    alone = [generate(model, prompt, 20, temperature=0.0) for model in (one, other)]
    pairs = zip(stream(one, prompt, 20, temperature=0.0), stream(other, prompt, 20, temperature=0.0), strict=True)
    together = [torch.stack(tokens, 1) for tokens in zip(*pairs, strict=True)]
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found, expected)
