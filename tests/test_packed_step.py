"""Steps on a CPU equal the model: at any batch size and position, with any threads, and closely with int8 weights."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnca
from tcnca import SequenceModel, TokenInputConfig
from tcnca.errors import InputError, StateError
from tcnca.generation import dispatch
from tcnca.generation.dispatch import MIN_PACKED_LAYERS, ModelStep, make_step
from tcnca.generation.packed import PackedStep
from tcnca.ops.quantize import quantize_rows
from tcnca.training.threads import use_threads
from tests.comparison import assert_close, relative_error
from tests.examples import VOCABULARY, small_config, small_model
from tests.ops.test_steps_triton import MODELS, assert_steps

numba = pytest.importorskip("numba")
from tcnca.ops.decoding import cpu_kernels  # noqa: E402

FAMILIES = ("tcnca", "mega", "tcnca-simple", "tcn-mlp", "ema-mlp-scale")


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_the_model(name: str, batch: int, ragged: bool) -> None:
    assert_steps(PackedStep, small_model(MODELS[name], torch.float32), batch, 14, ragged)


@pytest.mark.parametrize(("batch", "threads"), [(1, 2), (3, 2), (1, 5)])
@pytest.mark.parametrize("name", ["tcnca", "tcnca-simple"])
def test_threads_share_a_step(name: str, batch: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_model(name, torch.float32, chunk_size=7), torch.randint(VOCABULARY, (batch, 30))
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 5)
    # More than the machine has: their parts are then computed one after the other.
    monkeypatch.setattr(numba, "set_num_threads", lambda _: None)
    with torch.no_grad():
        expected = model(x, return_state=False).logits
    with use_threads(threads):
        step = PackedStep(model, model.initial_state(batch))
        assert step.threads == threads
        assert_close(torch.stack([step(token).clone() for token in x.unbind(1)], 1), expected)


def test_threads_of_pytorch_are_not_changed() -> None:
    """Numba's threads start once in a process, and set the number of PyTorch's."""
    program = """
import torch
from tcnca.generation.packed import PackedStep
from tests.examples import small_model

torch.set_num_threads(2)
model = small_model("tcnca", torch.float32)
PackedStep(model, model.initial_state(1))(torch.zeros(1, dtype=torch.long))
print(torch.get_num_threads())
"""
    options: dict[str, Any] = {"env": {**os.environ, "NUMBA_NUM_THREADS": "3"}, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, **options).stdout == "2\n"


def test_the_exponential_is_exact_to_three_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    found, expected = _exponentials(x), np.exp(x.astype(np.float64))
    assert np.abs(found / expected - 1).max() < 3 * 2**-23
    # Weights of attention and gates: what is less than the smallest number is nearly zero.
    assert _exponentials(np.array([-np.inf, -1e30, -88], dtype=np.float32)).max() < 2e-38
    assert np.isnan(_exponentials(np.array([np.nan], dtype=np.float32))).all()


# With the fast math of the kernels, which may reorder the sums in it.
@numba.njit(**(cpu_kernels._SERIAL | {"cache": False}))  # type: ignore[untyped-decorator]
def _exponentials(x: Any) -> Any:
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = cpu_kernels.exp(x[i])
    return y


@pytest.mark.parametrize("tokens", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_many_steps_equal_the_parallel_forward_in_float32(name: str, tokens: int) -> None:
    model = small_model(MODELS[name], torch.float32)
    x = torch.randint(VOCABULARY, (2, tokens))
    with torch.no_grad():
        expected = model(x, return_state=False).logits
    step = PackedStep(model, model.initial_state(2))
    found = torch.stack([step(token).clone() for token in x.unbind(1)], 1)
    assert_close(found, expected)
    assert_close(found[:, -20:], expected[:, -20:])


@pytest.mark.parametrize("name", ["tcnca", "mega", "tcnca-simple", "rotary-bias-batch", "rope-rms", "ngrams"])
def test_a_row_can_be_replaced_by_a_sequence_at_another_position(name: str) -> None:
    model = small_model(MODELS[name], torch.float32)
    x, other = torch.randint(VOCABULARY, (3, 20)), torch.randint(VOCABULARY, (1, 27))
    with torch.no_grad():
        expected, after = (model(each, return_state=False).logits for each in (x, other))
        step, alone = PackedStep(model, model.initial_state(3)), model(other[:, :7]).state
        assert alone is not None
        for place in range(20):
            if place == 9:
                step.load(1, alone)
            tokens = x[:, place].clone()
            if place >= 9:
                tokens[1] = other[0, place - 2]
            logits = step(tokens)
            wanted = expected[:, place].clone()
            if place >= 9:
                wanted[1] = after[0, place - 2]
            assert_close(logits, wanted)
        for place in range(7, 18):
            alone = model(other[:, place : place + 1], state=alone).state
            assert alone is not None
        for key, tensor in step.state().reorder([1]).tensors().items():
            assert_close(tensor, alone.tensors()[key], key, torch.float32)


def test_only_a_single_sequence_replaces_a_row() -> None:
    model = small_model("tcnca", torch.float32)
    step = PackedStep(model, model.initial_state(3))
    with pytest.raises(StateError, match="state: expected a batch of 1, got 2"):
        step.load(0, model.initial_state(2))


@pytest.mark.parametrize("name", [*FAMILIES, "rope-rms", "rotary-bias-batch", "scaled-gelu"])
def test_bfloat16_is_as_near_to_the_exact_result_as_the_model(name: str) -> None:
    model = small_model(MODELS[name], torch.bfloat16)
    exact = small_model(MODELS[name], torch.float32)
    exact.load_state_dict({key: weight.float() for key, weight in model.state_dict().items()})
    x = torch.randint(VOCABULARY, (4, 40))
    with torch.no_grad():
        expected, rounded = (each(x, return_state=False).logits.float() for each in (exact, model))
    step = PackedStep(model, model.initial_state(4))
    found = torch.stack([step(token).float() for token in x.unbind(1)], 1)
    assert relative_error(found, expected) < 1.5 * relative_error(rounded, expected)


def test_quantized_rows_are_within_half_a_level() -> None:
    weight = torch.randn(30, 50) * torch.logspace(-4, 4, 30).unsqueeze(1)
    weight[3] = 0.0
    levels, scale = quantize_rows(weight)
    assert levels.dtype == torch.int8
    assert levels.abs().max() == 127
    assert torch.equal(scale.bfloat16().float(), scale)
    error = (levels * scale.unsqueeze(1) - weight).abs() / scale.unsqueeze(1)
    assert error.max() <= 0.5 + 1e-4
    assert not levels[3].any()


def trained_model() -> tuple[SequenceModel, Tensor]:
    """A model of the bytes of this file, trained for a moment, and a text to score."""
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 64, "d_key": 16, "d_value": 32, "chunk_size": 16}
    model = SequenceModel(small_config("tcnca", input=TokenInputConfig(vocab_size=256), **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(25):
        rows = torch.stack([text[start : start + 65] for start in torch.randint(len(text) - 65, (16,))])
        logits = model(rows[:, :-1], return_state=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), text[: 8 * 101].view(8, 101)


def bits_per_byte(model: SequenceModel, text: Tensor, **options: Any) -> float:
    step = PackedStep(model, model.initial_state(len(text)), **options)
    logits = torch.stack([step(token).clone() for token in text[:, :-1].unbind(1)], 1)
    return float(F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())) / math.log(2)


def test_int8_weights_cost_less_than_a_hundredth_of_a_bit_per_byte() -> None:
    model, text = trained_model()
    exact = bits_per_byte(model, text)
    assert exact < 5, "the model has learned something"
    quantized = bits_per_byte(model, text, quantization="int8")
    assert 0 < abs(quantized - exact) < 0.01


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", ["tcnca", "tcnca-simple"])
def test_int8_products_are_those_of_the_quantized_weights(name: str, batch: int) -> None:
    model = small_model(name, torch.float32)
    rounded = deepcopy(model)
    with torch.no_grad():
        matrices = [module.weight for module in rounded.modules() if isinstance(module, nn.Linear)]
        for weight in matrices:
            levels, scale = quantize_rows(weight)
            weight.copy_(levels * scale.unsqueeze(1))
    steps = [
        PackedStep(model, model.initial_state(batch), quantization="int8"),
        PackedStep(rounded, rounded.initial_state(batch)),
        PackedStep(model, model.initial_state(batch)),
    ]
    # The embedding is rounded in the product with it only.
    for step in steps:
        step._ops.pop()
    for token in torch.randint(VOCABULARY, (12, batch)):
        for step in steps:
            step(token)
        found, expected, exact = (torch.from_numpy(step._x) for step in steps)
        assert_close(found, expected)
        assert relative_error(found, exact) > 1e-4


@pytest.mark.parametrize(
    ("tokens", "kind"), [(MIN_PACKED_LAYERS // 2, PackedStep), (10, ModelStep), (None, PackedStep)]
)
def test_kernels_are_used_where_they_are_worth_compiling(tokens: int | None, kind: type) -> None:
    model = small_model("tcnca", torch.float32)
    assert model.config.num_layers == 2
    assert type(make_step(model, model.initial_state(1), max_new_tokens=tokens)) is kind
    assert isinstance(make_step(model, model.initial_state(1), max_new_tokens=10, quantization="int8"), PackedStep)
    double = model.double()
    assert type(make_step(double, double.initial_state(1))) is ModelStep


def test_models_generate_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = small_model("tcnca", torch.float32), torch.zeros(1, 3, dtype=torch.long)
    expected = tcnca.generate(model, prompt, 600, seed=1)
    monkeypatch.setitem(sys.modules, "numba", None)
    dispatch._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"numba is not installed; pip install 'tcnca\[cpu\]'. Until then gener"):
        assert type(make_step(model, model.initial_state(1))) is ModelStep
    # A second warning would be an error.
    assert torch.equal(tcnca.generate(model, prompt, 600, seed=1)[:, :20], expected[:, :20])
    with pytest.raises(InputError, match=r"quantization: expected None .* numba is not installed"):
        tcnca.generate(model, prompt, 3, quantization="int8")
