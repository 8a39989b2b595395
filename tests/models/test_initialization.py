"""Initialization of models, also after a reset."""

from __future__ import annotations

import pickle

import pytest
import torch

from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    EMAConfig,
    LanguageModelHeadConfig,
    ModelConfig,
    RegressionHeadConfig,
    SequenceModel,
    TCNConfig,
    TokenInputConfig,
    ValueInputConfig,
)
from tests.examples import FAMILY, small_config

WIDE = ModelConfig(
    num_layers=1,
    d_model=256,
    d_ff=300,
    attention=AttentionConfig(d_key=64, d_value=200, chunk_size=128),
    input=TokenInputConfig(vocab_size=500, pad_token_id=3),
    head=LanguageModelHeadConfig(tie_embeddings=False),
)


def deviation(model: SequenceModel, name: str) -> float:
    return float(model.get_parameter(name).detach().std())


def test_matrices_start_at_their_deviations() -> None:
    model = SequenceModel(WIDE)
    for name in ("values", "gates", "output"):
        assert deviation(model, f"layers.0.block.{name}.weight") == pytest.approx(0.02, rel=0.05)
        assert not model.get_parameter(f"layers.0.block.{name}.bias").any()
    for name in ("up", "down"):
        assert deviation(model, f"layers.0.feed_forward.{name}.weight") == pytest.approx(0.02, rel=0.05)
    assert deviation(model, "layers.0.block.gamma") == pytest.approx(0.02, rel=0.3)
    assert not model.get_parameter("layers.0.block.beta").any()
    assert deviation(model, "layers.0.block.attention.bias") == pytest.approx(0.02, rel=0.2)
    assert deviation(model, "embedding.weight") == pytest.approx(256**-0.5, rel=0.05)
    assert deviation(model, "head.weight") == pytest.approx(256**-0.5, rel=0.05)
    assert not model.get_parameter("embedding.weight")[3].any()


@pytest.mark.parametrize("features", [1, 4])
def test_real_valued_inputs_start_at_their_deviations(features: int) -> None:
    model = SequenceModel(
        WIDE.override(d_model=4096, input=ValueInputConfig(features=features), head=RegressionHeadConfig())
    )
    assert deviation(model, "embedding.weight") == pytest.approx(features**-0.5, rel=0.05)
    assert deviation(model, "embedding.bias") == pytest.approx(0.1, rel=0.05)


def test_heads_start_with_xavier_weights_and_a_small_last_layer() -> None:
    model = SequenceModel(WIDE.override(head=ClassifierHeadConfig(num_classes=300, hidden=400)))
    sizes = (("head.hidden.0.weight", 256, 400, 1.0), ("head.output.weight", 400, 300, 0.1))
    for name, inputs, outputs, scale in sizes:
        weight = model.get_parameter(name)
        bound = scale * (6 / (inputs + outputs)) ** 0.5
        assert float(weight.detach().abs().max()) <= bound
        assert float(weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.05)


CONFIGS = {
    **{family: small_config(family) for family in FAMILY},
    "everything": small_config(
        mixer=TCNConfig(kernel_size=3, dilation_factor=2, depth=2, bias=True, norm="batch"),
        norm="batch",
        position="rotary",
        input=ValueInputConfig(features=2, norm=True),
        head=ClassifierHeadConfig(num_classes=3, hidden=4),
    ),
    "scale": small_config("ema-mlp", norm="scale", mixer=EMAConfig(d_state=2)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_reset_parameters_initializes_like_the_constructor(name: str) -> None:
    torch.manual_seed(1)
    built = SequenceModel(CONFIGS[name])
    with torch.device("meta"):
        model = SequenceModel(CONFIGS[name])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(77)
    torch.manual_seed(1)
    model.reset_parameters()
    assert built.state_dict().keys() == model.state_dict().keys()
    # Parts draw in the order in which they stand, so a seed gives other numbers of one distribution.
    for key, tensor in model.state_dict().items():
        assert not (tensor == 77).any(), key
        expected = built.state_dict()[key].double()
        assert bool(tensor.any()) == bool(expected.any()), key
        if bool((expected == expected.flatten()[0]).all()):
            assert torch.equal(tensor.double(), expected), key


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "none"])
def test_models_can_be_pickled(activation: str) -> None:
    model = SequenceModel(small_config(activation=activation)).eval()
    tokens = torch.randint(11, (1, 6))
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", FAMILY)
def test_models_run_on_the_meta_device(family: str) -> None:
    with torch.device("meta"):
        model = SequenceModel(small_config(family))
        logits, state = model(torch.zeros(2, 9, dtype=torch.long))
        assert model(torch.zeros(2, 1, dtype=torch.long), state=state).logits.shape == (2, 1, 11)
    assert logits.shape == (2, 9, 11)
