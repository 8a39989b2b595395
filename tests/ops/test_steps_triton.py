"""Decoding steps of few operators or kernels: teacher-forced, they equal the parallel forward pass."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcnca import ModelConfig, SequenceModel, TokenInputConfig
from tcnca.generation.fused import FusedStep
from tcnca.generation.fused import unsupported_reason as fused_reason
from tcnca.generation.prompts import prefill
from tcnca.generation.sampling import Sampler, SamplingOptions
from tcnca.generation.step import unsupported_reason
from tcnca.models import ModelState
from tcnca.models.heads import LanguageModelHead
from tcnca.ops.quantize import quantize_rows
from tests.comparison import assert_close
from tests.examples import VARIANTS, VOCABULARY, small_config, small_model
from tests.ops.interpreter import interpreted, not_interpreted

Step = Callable[[SequenceModel, ModelState], Any]

MODELS: dict[str, ModelConfig] = {name: small_config(name) for name in ("tcnca", "mega", "tcnca-simple", "tcn-mlp")} | {
    "ema-mlp-scale": small_config("ema-mlp", norm="scale"),
    "rope-rms": small_config("tcnca-simple", position="rope", norm="rms", chunk_size=6),
    "rotary-bias-batch": small_config("tcnca", position="rotary", norm="batch", **{"mixer.bias": True}),
    "no-position-factor-1": small_config("tcnca", position="none", dilation_factor=1),
    "chunk-1-kernel-1": small_config("tcnca", chunk_size=1, kernel_size=1),
    "scaled-gelu": small_config(
        "tcnca", activation="gelu", d_ff=0, input=TokenInputConfig(vocab_size=VOCABULARY, scale_embeddings=True)
    ),
    "not-affine-gelu-tanh": small_config("mega", final_norm_affine=False, activation="gelu_tanh"),
    "tcnca-untied": small_config("tcnca", **{"head.tie_embeddings": False}),
    "qk-norm-rope": small_config("tcnca", qk_norm=True, position="rope"),
    "qk-norm-simple": small_config("tcnca-simple", qk_norm=True),
    "shift-keys-rope": small_config("tcnca", shift_keys=True, qk_norm=True, position="rope"),
    "half-rope": small_config("tcnca", shift_keys=True, qk_norm=True, position="rope", rope_fraction=0.5),
    "shift-keys-simple": small_config("tcnca-simple", shift_keys=True),
    "relu-untied": small_config("mega", activation="relu", **{"head.tie_embeddings": False}),
    "ngrams": small_config("tcnca", ngram_sizes=[2, 4, 5], ngram_buckets=13),
    "bigrams-scaled": small_config(
        "mega", input=TokenInputConfig(vocab_size=VOCABULARY, scale_embeddings=True, ngram_sizes=(2,))
    ),
}


def assert_steps(make: Step, model: SequenceModel, batch: int, tokens: int, ragged: bool) -> None:
    """Compare steps, and the state after them, with the model."""
    device = model.embedding.weight.device
    x = torch.randint(VOCABULARY, (batch, 5 + tokens), device=device)
    lengths = torch.arange(batch, device=device) % 5 + 1 if ragged else None
    with torch.no_grad():
        state = model(x[:, :5], lengths=lengths).state
        assert state is not None
        before = state.clone()
        step, expected = make(model, state), state.clone()
        for place in range(5, 5 + tokens):
            logits, after = model(x[:, place : place + 1], state=expected)
            assert after is not None
            expected = after
            assert_close(step(x[:, place]), logits[:, 0])
        found = step.state()
        for name, tensor in expected.tensors().items():
            if tensor.is_floating_point():
                assert_close(found.tensors()[name], tensor, name)
            else:
                assert torch.equal(found.tensors()[name], tensor), name
        for name, tensor in before.tensors().items():
            assert torch.equal(state.tensors()[name], tensor), "the given state is a value"


@interpreted
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("name", ["tcnca", "mega", "tcnca-simple", "rotary-bias-batch", "qk-norm-rope", "ngrams"])
def test_the_kernels_equal_the_model_in_the_interpreter(name: str, batch: int) -> None:
    assert_steps(FusedStep, small_model(MODELS[name], torch.float32), batch, 5, ragged=True)


@interpreted
@pytest.mark.slow
def test_short_steps_of_products_equal_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs with less shared memory: here 16 inputs at a time."""
    steps, add = [], FusedStep._add

    def record(self: FusedStep, *given: Any, **named: Any) -> None:
        steps.append(named.get("STEP"))
        add(self, *given, **named)

    monkeypatch.setattr(FusedStep, "_add", record)
    monkeypatch.setattr("tcnca.generation.fused.max_shared_memory", lambda device: 4096)
    assert_steps(FusedStep, small_model(small_config("tcnca", d_ff=40), torch.float32), 6, 2, ragged=True)
    assert 16 in steps
    assert 64 not in steps


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 6, 70])
@torch.no_grad()
def test_many_tiles_equal_the_model(batch: int) -> None:
    """Widths, rows and a chunk of several tiles in every kernel."""
    config = small_config("tcnca", d_model=640, d_ff=1100, d_value=2100, chunk_size=300)
    model, x = SequenceModel(config).cuda().eval(), torch.randint(VOCABULARY, (batch, 310), device="cuda")
    step = FusedStep(model, model.initial_state(batch))
    found = torch.stack([step(token).clone() for token in x.unbind(1)], 1)
    assert_close(found, model(x, return_state=False).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 6, 20])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_equal_the_model(name: str, batch: int) -> None:
    model = small_model(MODELS[name], torch.float32).cuda()
    state = model.initial_state(batch)
    assert fused_reason(model, state) is None
    assert_steps(FusedStep, model, batch, 30, ragged=True)


def rounded_to_int8(model: SequenceModel) -> SequenceModel:
    """A copy with the weights of matrix products rounded."""
    copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, (nn.Linear, LanguageModelHead)) and module.weight is not None:
            weight, scale = quantize_rows(module.weight)
            module.weight.data = weight.to(module.weight.dtype) * scale.unsqueeze(1).to(module.weight.dtype)
    return copy


def assert_int8(model: SequenceModel, batch: int, tokens: int) -> None:
    """Compare steps with int8 weights and those of a model with rounded weights."""
    rounded = rounded_to_int8(model)
    assert_steps(lambda _, state: FusedStep(model, state, quantization="int8"), rounded, batch, tokens, ragged=True)


@interpreted
def test_int8_weights_equal_rounded_ones_in_the_interpreter() -> None:
    assert_int8(small_model(MODELS["relu-untied"], torch.float32), 1, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("name", ["tcnca-untied", "relu-untied"])
def test_int8_weights_equal_rounded_ones(name: str, batch: int) -> None:
    assert_int8(small_model(MODELS[name], torch.float32).cuda(), batch, 30)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 20])
def test_the_values_of_a_float8_cache_are_rounded(batch: int) -> None:
    config = small_config("tcnca", d_model=64, d_ff=128, d_key=32, d_value=64, chunk_size=16)
    model = small_model(config, torch.float32).cuda()
    x = torch.randint(VOCABULARY, (batch, 27), device="cuda")
    with torch.no_grad():
        state = model(x[:, :3]).state
        assert state is not None
        step = FusedStep(model, state, cache_dtype="float8")
        logits = torch.stack([step(x[:, place]).clone() for place in range(3, 27)], 1)
        expected, after = model(x, return_state=True)
    assert after is not None
    # The first layer reads nothing that was rounded.
    found, values = (each.tensors()["layers.0.attention.values"] for each in (step.state(), after))
    filled = 27 % 16
    torch.testing.assert_close(
        found[:, :filled], values[:, :filled].to(torch.float8_e4m3fn).float(), rtol=0.07, atol=1e-3
    )
    assert not torch.equal(found[:, :filled], values[:, :filled])
    error = (logits - expected[:, 3:]).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error < 0.03


@not_interpreted
def test_large_values_of_a_float8_cache_become_the_largest() -> None:
    model = small_model("tcnca", torch.float32)
    state = model.initial_state(2)
    state.layers[0].attention.values.fill_(-1e4)  # type: ignore[union-attr]
    step = FusedStep(model, state, cache_dtype="float8")
    step.load(1, state.reorder([0]))
    assert set(step.state().tensors()["layers.0.attention.values"].unique().tolist()) == {-448.0}


def assert_rows_can_be_loaded(model: SequenceModel, count: int) -> None:
    """Replace one row of three by another sequence, and take `count` steps."""
    x = torch.randint(VOCABULARY, (3, 40), device=model.embedding.weight.device)
    with torch.no_grad():
        state, other = model(x[:, :9]).state, model(x[1:2, 3:20]).state
        assert state is not None
        assert other is not None
        step = FusedStep(model, state)
        for place in (9, 10, 11):
            step(x[:, place])
        step.load(1, other)
        assert step.state().tensors()["layers.0.mixer.position"].tolist() == [12, 17, 12]
        rows = [(x[0:1], 12), (x[1:2, 3:], 17), (x[2:3], 12)]
        tokens = torch.cat([row[:, place : place + count] for row, place in rows])
        found = torch.stack([step(token).clone() for token in tokens.unbind(1)], 1)
        alone = [model(row).logits[:, place : place + count] for row, place in rows]
    assert_close(found, torch.cat(alone))


@interpreted
def test_rows_can_be_loaded_in_the_interpreter() -> None:
    assert_rows_can_be_loaded(small_model(MODELS["ngrams"], torch.float32), 3)


@interpreted
def test_sampling_in_the_step_equals_sampling_after_it() -> None:
    model, x = small_model(MODELS["tcnca"], torch.float32), torch.randint(VOCABULARY, (2, 5))
    with torch.no_grad():
        last, state = prefill(model, x)
        found = []
        for fused in (True, False):
            sampler = Sampler(2, VOCABULARY, x.device)
            sampler.assign(range(2), SamplingOptions(top_k=9, repetition_penalty=1.2), [(1,), (2,)])
            sampler.fused = fused
            first, step = sampler(last), FusedStep(model, state, sampler)
            found.append(torch.stack([first, *[step.next() for _ in range(5)]]))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tcnca", "mega", "tcn-mlp", "tcnca-simple"])
def test_rows_can_be_loaded(name: str) -> None:
    assert_rows_can_be_loaded(small_model(MODELS[name], torch.float32).cuda(), 18)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tcnca", "mega"])
def test_the_kernels_round_like_the_model_in_bfloat16(name: str) -> None:
    config = small_config(name, d_model=64, d_ff=128, d_key=32, d_value=64, chunk_size=16)
    model = small_model(config, torch.bfloat16).cuda()
    exact = small_model(config, torch.float32).cuda()
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    x = torch.randint(VOCABULARY, (4, 60), device="cuda")
    with torch.no_grad():
        expected = exact(x, return_state=False).logits
        state = model(x[:, :1]).state
        assert state is not None
        step, plain = FusedStep(model, state), state
        errors: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place in range(1, 60):
            logits, after = model(x[:, place : place + 1], state=plain)
            assert after is not None
            plain = after
            errors[0].append((step(x[:, place]).float() - expected[:, place]).square().mean())
            errors[1].append((logits[:, 0].float() - expected[:, place]).square().mean())
    fused, eager = (torch.stack(each).mean().sqrt() for each in errors)
    assert fused < 1.2 * eager


@not_interpreted
@pytest.mark.parametrize(
    "name",
    ["mega-full", "rotary-relu2-scale-post", "rope-laplace-rms", "tcn-two-convolutions-layer", "no-feed-forward"],
)
def test_what_the_steps_do_not_support_is_named(name: str) -> None:
    model = small_model(VARIANTS[name])
    reason = unsupported_reason(model, model.initial_state(1))
    assert reason is not None
    assert ": expected " in reason
