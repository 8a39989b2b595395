"""On a GPU, generation replays a recorded step and says what the model itself would."""

from __future__ import annotations

import pytest
import torch

from tcnca.generation import generate, stream
from tcnca.generation.graph import LEAST_TOKENS, GraphedStep, records
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_model


def test_nothing_is_recorded_without_a_gpu_or_for_few_tokens() -> None:
    model = small_model()
    assert not records(model, torch.device("cpu"), 100)
    assert records(model, torch.device("cuda"), LEAST_TOKENS)
    assert not records(model, torch.device("cuda"), LEAST_TOKENS - 1)
    # Its state grows.
    assert not records(small_model("mega-full"), torch.device("cuda"), 100)


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(set(FAMILY) - {"mega-full"}))
def test_a_recorded_step_is_a_step(family: str) -> None:
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
def test_generation_is_that_of_the_plain_loop(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(family).cuda().eval()
    prompt = torch.randint(VOCABULARY, (2, 11), device="cuda")
    recorded = generate(model, prompt, 40, temperature=0.0)
    monkeypatch.setattr("tcnca.generation.sampling.records", lambda *_: False)
    assert torch.equal(recorded, generate(model, prompt, 40, temperature=0.0))


@pytest.mark.gpu
def test_two_generations_side_by_side() -> None:
    one, other = small_model().cuda().eval(), small_model("mega").cuda().eval()
    prompt = torch.randint(VOCABULARY, (2, 5), device="cuda")
    alone = [generate(model, prompt, 20, temperature=0.0) for model in (one, other)]
    pairs = zip(stream(one, prompt, 20, temperature=0.0), stream(other, prompt, 20, temperature=0.0), strict=True)
    together = [torch.stack(tokens, 1) for tokens in zip(*pairs, strict=True)]
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found, expected)
