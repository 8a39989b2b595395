"""The least work of a whole model."""

from __future__ import annotations

import torch

from tcnca.bench.entry import Work
from tcnca.models import ModelConfig, SequenceModel

_FLOAT = 4
"""Bytes of a weight."""


def model_work(config: ModelConfig, length: int, tokens: int) -> dict[str, Work]:
    """Of each part of a step of training, and of inference. What lies between layers need not leave the chip."""
    with torch.device("meta"):
        model = SequenceModel(config)
    weights = _FLOAT * sum(parameter.numel() for parameter in model.parameters())
    flops = 2 * model.macs_per_token(length) * tokens
    # The update reads weights, gradients and Adam's two means, and writes all but the gradients.
    parts = {
        "inference": Work(weights, flops),
        "forward": Work(weights, flops),
        "backward": Work(2 * weights, 2 * flops),
        "update": Work(7 * weights, 0),
    }
    steps = [parts[name] for name in ("forward", "backward", "update")]
    whole = Work(sum(part.bytes for part in steps), sum(part.flops for part in steps))
    return {**parts, "step": whole}
