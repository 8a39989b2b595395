"""SGConv: its kernel against the definition, streams beyond the kernel, optimizer groups, and learning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tcnca
from tcnca import ClassifierHeadConfig, ConfigError, ModelConfig, SGConv, SGConvConfig, StateError
from tcnca.layers.sgconv import SGConvOutput
from tcnca.models import summarize
from tcnca.training.config import OptimizerConfig
from tcnca.training.optimizer import parameter_groups
from tests.comparison import assert_close
from tests.examples import ATTENTION, VOCABULARY, small_config, small_model, train
from tests.layers.checks import assert_compiles, assert_gradients
from tests.layers.formulas import scramble
from tests.ops.test_long_conv import direct_sum

DIRECTIONS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
# Kernel lengths with one piece, two, several, and a last piece that is cut.
SIZES = pytest.mark.parametrize(("length", "dim"), [(1, 1), (3, 4), (4, 4), (5, 4), (8, 4), (32, 4), (19, 3), (6, 1)])


def row_of_pieces(pieces: Tensor, decay: float) -> list[float]:
    """The taps of one channel before the division, one by one from the definition."""
    count, dim = pieces.shape
    taps = []
    for i, piece in enumerate(pieces.tolist()):
        factor = 2 ** max(0, i - 1)
        for j in range(dim * factor):
            # Parameters are at the centers of the intervals that they cover; beyond the outer ones they stay constant.
            place = min(max((j + 0.5) / factor - 0.5, 0.0), dim - 1.0)
            left = min(math.floor(place), dim - 1)
            right = min(left + 1, dim - 1)
            value = piece[left] + (place - left) * (piece[right] - piece[left])
            taps.append(value * decay ** (count - 1 - i))
    return taps


def defined_kernel(weight: Tensor, initial: Tensor, length: int, decay: float) -> Tensor:
    rows = []
    for now, then in zip(weight.flatten(0, 1), initial.flatten(0, 1), strict=True):
        norm = math.sqrt(sum(tap**2 for tap in row_of_pieces(then, decay)))
        rows.append([tap / norm for tap in row_of_pieces(now, decay)][:length])
    return torch.tensor(rows, dtype=torch.float64).view(*weight.shape[:2], length)


def small(causal: bool = True, **fields: Any) -> SGConv:
    module = SGConv(3, SGConvConfig(**({"kernel_length": 7, "piece_size": 2} | fields)), causal).double()
    module.reset_parameters()  # with norms of all digits
    return module


@DIRECTIONS
@SIZES
@pytest.mark.parametrize("decay", [2.0, 1.5])
def test_kernel_equals_the_definition(causal: bool, length: int, dim: int, decay: float) -> None:
    module = SGConv(2, causal=causal, kernel_length=length, piece_size=dim, decay_factor=decay)
    module.double().reset_parameters()
    pieces = module.config.pieces
    assert pieces == 1 + max(0, math.ceil(math.log2(length / dim)))
    initial = module.weight.detach().clone()
    assert_close(module.kernel().detach(), defined_kernel(initial, initial, length, decay))
    if length == dim * 2 ** (pieces - 1):
        assert_close(module.kernel().detach().norm(dim=-1), torch.ones(1 if causal else 2, 2).double())
    for taps in range(1, length + 2):
        assert torch.equal(module.kernel(taps), module.kernel()[..., :taps])
    # The kernel may grow: what it is divided by stays as it was.
    with torch.no_grad():
        module.weight.add_(torch.randn_like(module.weight) * 3)
    assert_close(module.kernel().detach(), defined_kernel(module.weight.detach(), initial, length, decay))


@DIRECTIONS
@pytest.mark.parametrize("output", get_args(SGConvOutput))
@pytest.mark.parametrize("time", [1, 5, 16])
def test_equals_the_formula(causal: bool, output: SGConvOutput, time: int) -> None:
    module = small(causal, output=output)
    initial = module.weight.detach().clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x = torch.randn(2, time, 3, dtype=torch.float64)
    kernel = defined_kernel(module.weight.detach(), initial, 7, 2.0)
    expected = direct_sum(x, kernel[:1]) + module.omega * x
    if not causal:
        # The second kernel, reversed, begins with the next input.
        expected = expected + F.pad(direct_sum(x.flip(1), kernel[1:]).flip(1)[:, 1:], (0, 0, 0, 1))
    if output != "none":
        expected = F.gelu(expected)
    if module.output is not None:
        linear = module.output.linear
        values, gates = (expected @ linear.weight.T + linear.bias).chunk(2, -1)
        expected = values * torch.sigmoid(gates)
    assert_close(module(x).detach(), expected.detach())


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), inplace=st.booleans())
@torch.no_grad()
def test_any_pieces_equal_one_call_beyond_the_kernel(sizes: list[int], inplace: bool) -> None:
    torch.manual_seed(0)
    module, x = small(), torch.randn(2, sum(sizes), 3, dtype=torch.float64)
    state, outputs = module.initial_state(2), []
    for piece in x.split(sizes, 1):
        y, state = module(piece, state=state, inplace=inplace)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), module(x))
    assert state.window.shape == (2, 6, 3)


@torch.no_grad()
def test_nothing_is_seen_beyond_the_kernel() -> None:
    module, x = small(output="none"), torch.zeros(1, 20, 3, dtype=torch.float64)
    x[:, 4] = 1.0
    seen = module(x)[0].abs().amax(-1) > 1e-12
    assert seen.nonzero().flatten().tolist() == list(range(4, 11))
    assert module.receptive_field == 7
    both = small(causal=False, output="none")
    seen = both(x.roll(5, 1))[0].abs().amax(-1) > 1e-12
    assert seen.nonzero().flatten().tolist() == list(range(2, 16))
    assert both.receptive_field == 14


def test_outputs_depend_on_the_past_only() -> None:
    module, x = small(), torch.randn(2, 12, 3, dtype=torch.float64)
    changed = torch.cat([x[:, :5], torch.randn_like(x[:, 5:])], 1)
    assert_close(module(changed)[:, :5].detach(), module(x)[:, :5].detach())


@DIRECTIONS
def test_gradients_are_right_with_padding(causal: bool) -> None:
    module = small(causal)
    scramble(module)
    assert_gradients(module)


@DIRECTIONS
@torch.no_grad()
def test_padding_is_ignored(causal: bool) -> None:
    module, x = small(causal), torch.randn(3, 9, 3, dtype=torch.float64)
    lengths = torch.tensor([9, 4, 1])
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y = module(x, lengths=lengths)
    for row, length in enumerate(lengths):
        assert_close(y[row : row + 1, :length], module(x[row : row + 1, :length]), f"row {row}")


@torch.no_grad()
def test_kernels_of_half_precision_are_computed_in_float32() -> None:
    module = SGConv(4, kernel_length=50, piece_size=4).bfloat16()
    assert module.kernel().dtype == torch.float32
    x = torch.randn(2, 60, 4).bfloat16()
    y = module(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, module.float()(x.float()))


@DIRECTIONS
def test_compiles_without_graph_breaks(causal: bool) -> None:
    module = small(causal)
    assert_compiles(module, state=module.initial_state(2) if causal else None)


def test_state_of_another_length_is_named() -> None:
    module, x = small(), torch.randn(2, 3, 3, dtype=torch.float64)
    with pytest.raises(StateError, match=r"^state.window: expected shape \[2, 6, 3\], got \[2, 8, 3\]"):
        module(x, state=small(kernel_length=9).initial_state(2))


def test_a_field_without_effect_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^dropout: expected output 'glu' with 0.1, got 'none'"):
        SGConvConfig(output="none", dropout=0.1)


def test_dropout_is_before_the_linear_map() -> None:
    module, x = SGConv(4, kernel_length=8, piece_size=2, dropout=0.5), torch.randn(1, 500, 4)
    assert module.output is not None
    dropped = []
    module.output.linear.register_forward_pre_hook(lambda _, inputs: dropped.append(inputs[0]))
    with torch.no_grad():
        module(x)
        module.eval()(x)
    assert 0.4 < float((dropped[0] == 0).float().mean()) < 0.6
    # GELU of very negative values is 0 too.
    assert float((dropped[1] == 0).float().mean()) < 0.05


def test_kernels_have_a_small_learning_rate_and_no_weight_decay() -> None:
    model = tcnca.build(small_config("ema-mlp", mixer=SGConvConfig(kernel_length=8, piece_size=2)))
    groups = parameter_groups(model, OptimizerConfig(lr=0.01, weight_decay=0.05, kernel_lr_mult=2.0))
    (kernels,) = [group for group in groups if group["name"] == "kernels"]
    assert {parameter.shape for parameter in kernels["params"]} == {(1, 8, 3, 2)}
    assert kernels["weight_decay"] == 0.0
    # The published 1e-3 where that of the others is 0.01, times the recipe's factor.
    assert 0.01 * kernels["lr_mult"] == pytest.approx(2e-3)


@pytest.mark.parametrize("attention", [ATTENTION, None], ids=["gated", "residual"])
@torch.no_grad()
def test_models_are_saved_and_generate(attention: tcnca.AttentionConfig | None, tmp_path: Path) -> None:
    mixer = SGConvConfig(kernel_length=9, piece_size=2)
    config = small_config(mixer=mixer, attention=attention, gated=attention is not None)
    assert ModelConfig.from_dict(config.to_dict()) == config
    model, x = small_model(config, torch.float32), torch.randint(VOCABULARY, (2, 15))
    loaded = tcnca.load(tcnca.save(model, tmp_path))
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert torch.equal(loaded.get_buffer("layers.0.block.mixer.norm"), model.get_buffer("layers.0.block.mixer.norm"))
    assert tcnca.generate(loaded, x, 12, temperature=0.0).shape == (2, 12)
    summary = summarize(config, 15)
    assert summary.receptive_field == (9 if attention is None else 9 + 4 - 1)  # a chunk has four tokens
    assert summary.state_bytes == model.initial_state(1).nbytes


def test_meta_models_get_norms_with_their_parameters() -> None:
    with torch.device("meta"):
        module = SGConv(4, kernel_length=16, piece_size=4)
    module.to_empty(device="cpu").reset_parameters()
    assert_close(module.kernel().detach().norm(dim=-1), torch.ones(1, 4))


def test_a_small_model_learns() -> None:
    def draw() -> tuple[Tensor, Tensor]:
        # The class is the token five steps before the last one, which is in the second piece of the kernel.
        x = torch.randint(4, (64, 24))
        return x, x[:, -6]

    mixer, head = SGConvConfig(kernel_length=24, piece_size=4), ClassifierHeadConfig(num_classes=4, pooling="last")
    config = small_config("ema-mlp", num_layers=1, d_model=16, d_ff=0, mixer=mixer, head=head)
    losses = train(config, draw, steps=150)
    assert losses[0] > 1.2
    assert sum(losses[-5:]) / 5 < 0.5
