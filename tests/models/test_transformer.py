"""The Transformer and the Transformer-XL as members of the family."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import InputError, ModelConfig, SequenceModel, StateError, generate, load, save
from tcnca.generation.dispatch import ModelStep, make_step
from tcnca.generation.prompts import piece_length
from tests.comparison import assert_close, relative_error
from tests.examples import VARIANTS, VOCABULARY, small_config, small_model
from tests.models.gradients import assert_gradients_close, gradients

NAMES = ("transformer-full", "transformer-xl", "heads-gated", "memory-gated")
EVERY = pytest.mark.parametrize("name", NAMES)
TIME = 21


def _tokens(time: int = TIME) -> Tensor:
    return torch.randint(VOCABULARY, (2, time))


def _in_pieces(model: Any, x: Tensor, sizes: list[int], **options: Any) -> Tensor:
    state, pieces = None, []
    for piece in x.split(sizes, 1):
        logits, state = model(piece, state=state, **options)
        pieces.append(logits)
    return torch.cat(pieces, 1)


@EVERY
@pytest.mark.parametrize("sizes", [[3, 1, 5, 12], [8, 1, 1, 2, 9]], ids=str)
def test_gradients_flow_through_states(name: str, sizes: list[int]) -> None:
    model, x = small_model(VARIANTS[name]), _tokens()
    weights = torch.randn(2, TIME, VOCABULARY, dtype=torch.float64)
    expected = gradients((model(x, return_state=False).logits * weights).sum(), model)
    assert_gradients_close(gradients((_in_pieces(model, x, sizes) * weights).sum(), model), expected)


def test_a_layer_of_memory_sees_one_chunk_further() -> None:
    model, x = small_model(VARIANTS["transformer-xl"]), _tokens(18)
    moved = []
    with torch.no_grad():
        before = model(x).logits[:, 17]
        for time in range(18):
            other = x.clone()
            other[:, time] = (other[:, time] + 1) % VOCABULARY
            moved.append(bool((model(other).logits[:, 17] != before).any()))
    # Chunks of four: the last token is in the fifth, and two layers reach the third.
    assert moved == [time >= 8 for time in range(18)]


@EVERY
@torch.no_grad()
def test_token_by_token_in_half_precision_and_float32(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, x = small_model(VARIANTS[name], dtype), _tokens()
        assert_close(_in_pieces(model, x, [5, *[1] * 16], inplace=True), model(x).logits)


@EVERY
def test_autocast_is_close_to_float32(name: str) -> None:
    model, x = small_model(VARIANTS[name], torch.float32), _tokens()
    exact = model(x).logits
    with torch.autocast("cpu", torch.bfloat16):
        whole, pieces = model(x).logits, _in_pieces(model, x, [5, 1, 6, 9])
        whole.sum().backward()
    for logits in (whole, pieces):
        assert relative_error(logits, exact) < 0.05
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", NAMES[:2])
def test_compiles_without_graph_breaks(name: str) -> None:
    torch.compiler.reset()
    model, x, lengths = small_model(VARIANTS[name], num_layers=1), _tokens(11), torch.tensor([11, 6])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for run in (compiled, model):
        first, state = run(x[:, :9], lengths=lengths.clamp(max=9))
        second, state = run(x[:, 9:], state=state)
        third, _ = run(x[:, :1], state=state)
        logits = torch.cat([first, second, third], 1)
        results.append((logits.detach(), gradients(logits.square().sum(), model)))
    assert_close(results[0][0], results[1][0])
    assert_gradients_close(results[0][1], results[1][1])
    torch.compiler.reset()


@EVERY
@torch.no_grad()
def test_generation_calls_the_model(name: str) -> None:
    model = small_model(VARIANTS[name], tie_embeddings=False)
    text = _tokens(3)
    state = model(text).state
    assert state is not None
    assert type(make_step(model, state)) is ModelStep
    expected = text
    for _ in range(12):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, text, 12, temperature=0.0), expected[:, 3:])
    with pytest.raises(InputError, match="quantization: expected None for this model"):
        generate(model.float(), text, 2, quantization="int8")


def test_heads_and_memory_are_part_of_the_signature() -> None:
    signatures = set()
    for changes in ({}, {"num_heads": 2}, {"memory": True}, {"num_heads": 2, "memory": True}):
        model = small_model(small_config("tcnca", d_key=8, position="rope", **changes))
        signatures.add(model.initial_state(1).signature)
    assert len(signatures) == 4
    with pytest.raises(StateError, match="memory"):
        small_model("tcnca", d_key=8, position="rope")(_tokens(), state=model.initial_state(2))


def test_what_is_older_than_heads_and_memory_can_be_read() -> None:
    model = small_model("tcnca")
    values = model.config.to_dict()
    for name in ("num_heads", "memory"):
        del values["attention"][name]
    assert ModelConfig.from_dict(values) == model.config
    assert model.initial_state(1).signature.endswith(
        "ChunkedAttention(chunk_size=4, d_key=4, d_value=6, activation=softmax, position=simple), no pooling"
    )


@EVERY
@torch.no_grad()
def test_saved_models_and_states_continue(name: str, tmp_path: Path) -> None:
    model, x = small_model(VARIANTS[name], torch.float32), _tokens()
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded, SequenceModel)
    first, state = model(x[:, :9])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    after = loaded(x[:, 9:], state=torch.load(file, weights_only=True)).logits
    assert_close(torch.cat([first, after], 1), model(x).logits)


def test_cost_counts_the_memory() -> None:
    plain, memory = (small_model(VARIANTS["transformer-xl"], memory=memory) for memory in (False, True))
    # Two layers; of 16 tokens, 12 see a chunk of 4 more; keys and values are 8 wide.
    assert memory.macs_per_token(16) - plain.macs_per_token(16) == 2 * 3 * (8 + 8)
    assert memory.macs_per_token(3) == plain.macs_per_token(3)


def test_prompts_are_read_in_shorter_pieces_by_several_heads() -> None:
    one = small_model("mega-full", position="rope", d_key=8, d_value=8)
    assert piece_length(small_model(VARIANTS["transformer-full"]), 2) == piece_length(one, 2) // 2
