"""Small models of every kind, with parameters far from their initial values, and pairwise choices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca import (
    AttentionConfig,
    EMAConfig,
    LRUConfig,
    ModelConfig,
    S4DConfig,
    S5Config,
    SequenceModel,
    SGConvConfig,
    TCNConfig,
    TokenInputConfig,
)
from tcnca.training.config import OptimizerConfig
from tcnca.training.optimizer import parameter_groups

VOCABULARY = 11

TCN = TCNConfig(kernel_size=3, dilation_factor=2, depth=3)
CHAIN = dataclasses.replace(TCN, block="chain", output="activation")
RESIDUAL = dataclasses.replace(TCN, block="residual", output="none", norm="weight")
EMA = EMAConfig(d_state=3)
ATTENTION = AttentionConfig(d_key=4, d_value=6, chunk_size=4)
HEADS = AttentionConfig(num_heads=2, d_key=8, d_value=8, chunk_size=None, position="rope")

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


# The families and variants that together have every position, function, norm, backend and part.
VARIANTS: dict[str, ModelConfig] = {family: small_config(family) for family in FAMILY} | {
    "rotary-relu2-scale-post": small_config(
        "tcnca", position="rotary", norm="scale", prenorm=False, **{"attention.activation": "relu2"}
    ),
    "rope-laplace-rms": small_config(
        "tcnca-simple", position="rope", norm="rms", **{"attention.activation": "laplace"}
    ),
    "qk-norm-rope": small_config("tcnca", qk_norm=True, position="rope"),
    "shift-keys-rope": small_config("tcnca", shift_keys=True, qk_norm=True, position="rope"),
    "half-rope": small_config("tcnca", shift_keys=True, qk_norm=True, position="rope", rope_fraction=0.5),
    "shift-keys-full": small_config("mega-full", shift_keys=True),
    "truncated-scan-batch": small_config("mega", position="none", norm="batch", truncation=6, backend="scan"),
    "full-rope-relu2": small_config("mega-full", position="rope", **{"attention.activation": "relu2"}),
    "full-rotary-laplace-rms-post": small_config(
        "mega-full", position="rotary", norm="rms", prenorm=False, **{"attention.activation": "laplace"}
    ),
    "truncated-1-recurrent": small_config("ema-mlp", truncation=1, backend="recurrent", norm="layer", prenorm=False),
    "tcn-two-convolutions-batch": small_config(
        "tcn-mlp", norm="sync_batch", prenorm=False, convolutions=2, **{"mixer.norm": "batch", "mixer.bias": True}
    ),
    "tcn-two-convolutions-layer": small_config("tcn-mlp", norm="scale", convolutions=2, **{"mixer.norm": "layer"}),
    "tcn-rms-factor-1": small_config("tcnca-simple", dilation_factor=1, **{"mixer.norm": "rms"}),
    "chunk-1-kernel-1": small_config("tcnca", chunk_size=1, kernel_size=1),
    "attention-alone-gated": small_config("tcnca", mixer=None),
    "attention-alone-residual": small_config("tcnca-simple", mixer=None, norm="batch", prenorm=False),
    "transformer-full": small_config("tcnca-simple", mixer=None, attention=HEADS),
    "transformer-xl": small_config(
        "tcnca-simple", mixer=None, attention=dataclasses.replace(HEADS, chunk_size=4, memory=True)
    ),
    "heads-gated": small_config(
        "tcnca",
        attention=AttentionConfig(
            num_heads=2, d_key=8, d_value=6, chunk_size=4, position="rope", qk_norm=True, shift_keys=True
        ),
    ),
    "memory-gated": small_config(
        "mega",
        attention=AttentionConfig(
            d_key=4, d_value=6, chunk_size=3, memory=True, position="rope", qk_norm=True, shift_keys=True
        ),
    ),
    "feed-forward-alone": small_config("tcn-mlp", mixer=None),
    # Like S4's blocks; the stream of a test is longer than the kernel.
    "sgconv": small_config("ema-mlp", mixer=SGConvConfig(kernel_length=13, piece_size=3), d_ff=0),
    "no-norm": small_config("tcn-mlp", norm="none"),
    "s4d": small_config("ema-mlp", mixer=S4DConfig(d_state=4), d_ff=0),
    "s4d-gated": small_config("mega", mixer=S4DConfig(d_state=4, output="none")),
    "s5": small_config("ema-mlp", mixer=S5Config(d_state=8, blocks=2), d_ff=0),
    "lru-gated": small_config("mega", mixer=LRUConfig(d_state=3)),
    "ngrams": small_config("tcnca", ngram_sizes=[2, 4], ngram_buckets=13),
    "no-feed-forward": small_config(
        "tcnca", d_ff=0, input=TokenInputConfig(vocab_size=VOCABULARY, scale_embeddings=True, norm=True)
    ),
}

# Memory is causal.
BIDIRECTIONAL = [name for name, config in VARIANTS.items() if not (config.attention and config.attention.memory)]


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
                buffer.copy_(torch.rand_like(buffer) + (0.5 if name.endswith(("var", "norm")) else -0.5))
    return model


def train(config: ModelConfig, draw: Callable[[], tuple[Tensor, Tensor]], steps: int) -> list[float]:
    """Train a classifier on batches of tokens and classes, and return the losses."""
    model, options = SequenceModel(config), OptimizerConfig(lr=0.02)
    groups = [group | {"lr": options.lr * group["lr_mult"]} for group in parameter_groups(model, options)]
    optimizer, losses = torch.optim.AdamW(groups), []
    for _ in range(steps):
        x, classes = draw()
        loss = F.cross_entropy(model(x, return_state=False).logits, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


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
