"""Small models of every kind, with parameters far from their initial values so that every term matters, and `pairwise`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tcnca import (
    AttentionConfig,
    EMAConfig,
    ModelConfig,
    SequenceModel,
    TCNConfig,
    TokenInputConfig,
)

VOCABULARY = 11

TCN = TCNConfig(kernel_size=3, dilation_factor=2, depth=3)
CHAIN = dataclasses.replace(TCN, block="chain", output="activation")
RESIDUAL = dataclasses.replace(TCN, block="residual", output="none", norm="weight")
EMA = EMAConfig(d_state=3)
ATTENTION = AttentionConfig(d_key=4, d_value=6, chunk_size=4)

# One configuration for each model of the paper, with all blocks of the TCN among them.
FAMILY: dict[str, dict[str, Any]] = {
    "tcnca": {"mixer": TCN, "attention": ATTENTION, "gated": True},
    "mega": {"mixer": EMA, "attention": ATTENTION, "gated": True},
    "mega-full": {
        "mixer": EMA,
        "attention": AttentionConfig(d_key=4, d_value=6, chunk_size=None, max_length=64),
        "gated": True,
    },
    "tcnca-simple": {"mixer": CHAIN, "attention": ATTENTION, "gated": False},
    "tcn-mlp": {"mixer": RESIDUAL, "attention": None, "gated": False},
    "ema-mlp": {"mixer": EMA, "attention": None, "gated": False},
}


def small_config(family: str = "tcnca", **changes: Any) -> ModelConfig:
    """Return a configuration of two narrow layers."""
    config = ModelConfig(
        num_layers=2, d_model=8, d_ff=12, input=TokenInputConfig(vocab_size=VOCABULARY), **FAMILY[family]
    )
    return config.override(**changes)


def small_model(
    config: ModelConfig | str = "tcnca", dtype: torch.dtype = torch.float64, **changes: Any
) -> SequenceModel:
    """Return a model in evaluation mode with parameters far from their initial values."""
    config = small_config(config, **changes) if isinstance(config, str) else config.override(**changes)
    model = SequenceModel(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + (0.5 if name.endswith("var") else -0.5))
    return model


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of `choices` in which every pair of values of two of them occurs."""
    everything = list(itertools.product(*(range(len(values)) for values in choices)))

    def pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set[tuple[tuple[int, int], tuple[int, int]]]().union(*map(pairs, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(tuple(values[index] for values, index in zip(choices, best, strict=True)))
    return chosen
