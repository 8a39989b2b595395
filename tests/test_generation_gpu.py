"""On a GPU, generation replays a captured step with the results of the model itself."""

from __future__ import annotations

import pytest
import torch

from tcnca.generation import MIN_GRAPH_TOKENS, GraphedStep, generate, should_capture, stream
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_model


def test_nothing_is_captured_without_a_gpu_or_for_few_tokens() -> None:
    model = small_model()
    assert not should_capture(model, torch.device("cpu"), 100)
    assert should_capture(model, torch.device("cuda"), MIN_GRAPH_TOKENS)
    assert not should_capture(model, torch.device("cuda"), MIN_GRAPH_TOKENS - 1)
    # The state of full attention grows.
    assert not should_capture(small_model("mega-full"), torch.device("cuda"), 100)
    # A model of feed-forward nets has no state.
    assert not should_capture(small_model("tcn-mlp", mixer=None), torch.device("cuda"), 100)


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(set(FAMILY) - {"mega-full"}))
def test_captured_step_equals_the_model(family: str) -> None:
    model = small_model(family).cuda()
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
            monkeypatch.setattr("tcnca.generation.fused_reason", lambda *_, reason=reason: reason)
        if reason == "so is the graph":
            monkeypatch.setattr("tcnca.generation.should_capture", lambda *_: False)
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
