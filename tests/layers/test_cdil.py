"""CDIL-CNN: its stack against loops with indices modulo the length, rotations, padding, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tcnca
from tcnca import CDIL, CDILConfig, ClassifierHeadConfig, ConfigError, ModelConfig, StateError, TokenInputConfig
from tcnca.models import summarize
from tests.comparison import assert_close
from tests.examples import VOCABULARY, small_config, small_model, train
from tests.layers.checks import assert_compiles, assert_gradients
from tests.layers.formulas import scramble

# The published network: its stack is the only layer, without norm and feed-forward net, and its head one linear map.
PUBLISHED: dict[str, Any] = {
    "num_layers": 1,
    "d_ff": 0,
    "causal": False,
    "norm": "none",
    "head": ClassifierHeadConfig(num_classes=4, pooling="mean", hidden=None),
}


def small(**fields: Any) -> CDIL:
    module = CDIL(3, CDILConfig(**({"depth": 3} | fields))).double()
    scramble(module)
    return module


def stack(module: CDIL, x: Tensor) -> Tensor:
    """The published stack, `x ← relu(conv(x)) + x`, of one row `[time, channels]`."""
    depth, channels, _ = module.weight.shape
    taps, time = module.config.kernel_size, len(x)
    for i in range(depth):
        y = torch.zeros_like(x)
        for out in range(channels):
            direction = module.weight[i, out]
            kernel = (module.scale[i, out] * direction / direction.norm()).view(taps, channels)
            for t in range(time):
                sources = [(t + (j - taps // 2) * 2**i) % time for j in range(taps)]
                y[t, out] = module.bias[i, out] + (kernel * x[sources]).sum()
        x = y.relu() + x
    return x


@pytest.mark.parametrize("time", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("fields", [{}, {"depth": 1}, {"kernel_size": 5, "depth": 2}, {"kernel_size": 1}], ids=str)
@torch.no_grad()
def test_equals_the_stack_with_modular_indices(time: int, fields: dict[str, Any]) -> None:
    module, x = small(**fields), torch.randn(2, time, 3, dtype=torch.float64)
    assert_close(x + module(x), torch.stack([stack(module, row) for row in x]))


@torch.no_grad()
def test_equals_pytorchs_circular_convolutions() -> None:
    module, x = small(), torch.randn(2, 11, 3, dtype=torch.float64)
    h = x.transpose(1, 2)
    for i in range(3):
        conv = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(3, 3, 3, padding=2**i, dilation=2**i, padding_mode="circular").double()
        )
        conv.parametrizations.weight.original0.copy_(module.scale[i].view(3, 1, 1))
        conv.parametrizations.weight.original1.copy_(module.weight[i].view(3, 3, 3).transpose(1, 2))
        conv.bias.copy_(module.bias[i])
        h = conv(h).relu() + h
    assert_close(x + module(x), h.transpose(1, 2))


@pytest.mark.parametrize("shift", [1, 4, -3, 11])
@torch.no_grad()
def test_rotating_the_input_rotates_the_output(shift: int) -> None:
    module, x = small(), torch.randn(2, 11, 3, dtype=torch.float64)
    assert_close(module(x.roll(shift, 1)), module(x).roll(shift, 1))
    # Inside of the valid part of each row, too.
    lengths, rows = torch.tensor([11, 7]), x.clone()
    rows[1, :7] = x[1, :7].roll(shift, 0)
    before, after = module(x, lengths=lengths), module(rows, lengths=lengths)
    assert_close(after[1, :7], before[1, :7].roll(shift, 0))


@torch.no_grad()
def test_padding_is_ignored() -> None:
    module, x = small(), torch.randn(4, 9, 3, dtype=torch.float64)
    lengths = torch.tensor([9, 4, 1, 0])
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y = module(x, lengths=lengths)
    assert bool(y.isfinite().all())
    for row, length in enumerate(lengths[:3]):
        assert_close(y[row : row + 1, :length], module(x[row : row + 1, :length]), f"row {row}")


def test_gradients_are_right_with_padding() -> None:
    assert_gradients(small())


@torch.no_grad()
def test_initialization_is_that_of_pytorchs_convolutions() -> None:
    module = CDIL(64)
    bound = (3 * 64) ** -0.5
    assert module.weight.shape == (9, 64, 3 * 64)
    assert float(module.weight.abs().max()) <= bound
    assert float(module.weight.std()) == pytest.approx(bound / 3**0.5, rel=0.01)
    assert_close(module.scale, module.weight.norm(dim=-1))
    assert float(module.bias.std()) == pytest.approx(0.01, rel=0.2)


@torch.no_grad()
def test_a_model_is_the_published_network() -> None:
    model = small_model(small_config("tcn-mlp", mixer=CDILConfig(depth=3), **PUBLISHED))
    mixer, x = model.get_submodule("layers.0.block.mixer"), torch.randint(VOCABULARY, (2, 9))
    assert isinstance(mixer, CDIL)
    embedded = model.get_parameter("embedding.weight")[x]
    pooled = torch.stack([stack(mixer, row).mean(0) for row in embedded])
    assert_close(model(x).logits, pooled @ model.get_parameter("head.output.weight").T)
    # Nothing else has parameters. The published head has a bias too.
    head = ClassifierHeadConfig(num_classes=10, hidden=None)
    inputs = TokenInputConfig(vocab_size=256)
    config = small_config("tcn-mlp", mixer=CDILConfig(), **(PUBLISHED | {"d_model": 64, "head": head, "input": inputs}))
    convolutions = 9 * (3 * 64 * 64 + 64 + 64)
    assert summarize(config, 1024).parameters == 256 * 64 + convolutions + 64 * 10


def test_causal_use_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match=r"^causal: expected False .* got True; circular padding .*TCN"):
        CDIL(8, causal=True)
    with pytest.raises(ConfigError, match=r"^causal: expected False"):
        tcnca.build(small_config("tcn-mlp", mixer=CDILConfig()))
    for asked in ({"return_state": True}, {"state": tcnca.TCN(8).initial_state(2)}):
        with pytest.raises(StateError, match="bidirectional"):
            CDIL(8)(torch.randn(2, 3, 8), **asked)
    with pytest.raises(StateError, match="bidirectional"):
        CDIL(8).initial_state(1)


def test_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^kernel_size: expected an odd number, .*got 4"):
        CDILConfig(kernel_size=4)
    with pytest.raises(ConfigError, match=r"^depth: expected a receptive field of at most"):
        CDILConfig(depth=31)
    assert CDILConfig(depth=9).receptive_field == CDIL(4, depth=9).receptive_field == 1023


def test_autocast_adds_in_float32() -> None:
    module, x = CDIL(8, depth=3), torch.randn(2, 20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        assert module(x.bfloat16()).dtype == torch.bfloat16
    assert y.dtype == torch.float32
    assert_close(y, module(x).detach(), dtype=torch.bfloat16)


def test_compiles_without_graph_breaks() -> None:
    assert_compiles(small())


@torch.no_grad()
def test_models_are_saved(tmp_path: Path) -> None:
    config = small_config("tcn-mlp", mixer=CDILConfig(depth=2), **PUBLISHED)
    assert ModelConfig.from_dict(config.to_dict()) == config
    model, x = small_model(config, torch.float32), torch.randint(VOCABULARY, (2, 15))
    loaded = tcnca.load(tcnca.save(model, tmp_path))
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_meta_modules_are_initialized_later() -> None:
    with torch.device("meta"):
        module = CDIL(4)
    module.to_empty(device="cpu").reset_parameters()
    assert_close(module.scale.detach(), module.weight.detach().norm(dim=-1))


def test_a_small_model_learns_across_the_ends() -> None:
    def draw() -> tuple[Tensor, Tensor]:
        # The class is what comes two tokens after the only 3, for which the sequence is a circle.
        x, place, rows = torch.randint(3, (64, 16)), torch.randint(16, (64,)), torch.arange(64)
        x[rows, place] = 3
        return x, x[rows, (place + 2) % 16]

    config = small_config("tcn-mlp", mixer=CDILConfig(depth=3), **PUBLISHED, d_model=16)
    losses = train(config, draw, steps=150)
    assert losses[0] > 1.2
    assert sum(losses[-5:]) / 5 < 0.3
