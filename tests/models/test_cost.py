"""The cost of a token, as counted, is the cost of a token, as computed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tcnca
from tcnca import ClassifierHeadConfig, EMAConfig, SequenceModel, TCNConfig
from tests.examples import FAMILY, small_config

LENGTH = 16


def counted(model: SequenceModel, length: int) -> float:
    """Multiply-adds of matrix products and convolutions for one token, as PyTorch counts them."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, return_state=False)
    return counter.get_total_flops() / 2 / length


@pytest.mark.parametrize("family", [name for name in FAMILY if name.startswith("tcn")])
def test_tcn_models(family: str) -> None:
    model = SequenceModel(small_config(family))
    attention = model.config.attention
    # Plain PyTorch computes the half of the scores that a causal mask then hides.
    hidden = 0.0
    if attention is not None and attention.chunk_size is not None:
        hidden = model.config.num_layers * (attention.chunk_size - (attention.chunk_size + 1) // 2)
        hidden *= attention.d_key + attention.d_value
    assert model.macs_per_token(LENGTH) == pytest.approx(counted(model, LENGTH) - hidden)


def test_bidirectional_attention_sees_whole_chunks() -> None:
    config = small_config("tcnca", causal=False, head=ClassifierHeadConfig(num_classes=3, pooling="none"))
    model = SequenceModel(config)
    assert model.macs_per_token(LENGTH) == pytest.approx(counted(model, LENGTH))


def test_full_attention_costs_more_with_the_length() -> None:
    model = SequenceModel(small_config("mega-full"))
    attention = model.config.attention
    assert attention is not None
    more = model.macs_per_token(33) - model.macs_per_token(17)
    assert more == model.config.num_layers * 8 * (attention.d_key + attention.d_value)


def test_an_ema_counts_as_its_recurrence() -> None:
    without = SequenceModel(small_config("ema-mlp", mixer=None)).macs_per_token(LENGTH)
    states = 2 * 8 * 3  # layers, channels, hidden states
    for truncation, products in ((None, 3), (LENGTH, 3), (5, 4)):
        model = SequenceModel(small_config("ema-mlp", mixer=EMAConfig(d_state=3, truncation=truncation)))
        assert model.macs_per_token(LENGTH) - without == products * states


def test_summary_of_a_preset() -> None:
    entry = tcnca.preset("mega-enwik8", chunk_size=None)
    summary = tcnca.models.summarize(entry.model, entry.length)
    assert summary.receptive_field is None
    # 16 hidden states a channel, all keys and values, and two positions a layer.
    assert summary.state_bytes == 12 * (4 * (512 * 16 + 8192 * (128 + 1024)) + 16)
    bidirectional = tcnca.models.summarize(tcnca.preset("mega-text").model, 4002)
    assert bidirectional.state_bytes is None
    assert bidirectional.receptive_field == 2 * 1024 - 1 + 127
    tcn = TCNConfig(kernel_size=5, dilation_factor=3, depth=2)
    seen = 1 + 4 * (1 + 3) + 127
    assert tcnca.models.summarize(tcnca.preset("tcnca-text", mixer=tcn).model, 4002).receptive_field == seen
