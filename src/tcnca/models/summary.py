"""A model in numbers."""

from __future__ import annotations

import dataclasses

import torch

from tcnca.layers import EMAConfig, TCNConfig
from tcnca.models.model import SequenceModel
from tcnca.models.presets import Preset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a model costs."""

    parameters: int
    """Number of parameters."""
    receptive_field: int | None
    """Inputs that one output of a layer's mixer depends on; None if there is no limit."""
    state_bytes: int | None
    """Bytes of the streaming state of one sequence of the task's length; None if the model does not stream."""
    macs: int
    """Multiplications and additions for one token of a sequence of the task's length, counted in pairs."""


def summarize(preset: Preset) -> Summary:
    """Count a preset's model without allocating its weights."""
    with torch.device("meta"):
        model = SequenceModel(preset.model)
        state_bytes = _state_bytes(model, preset.length) if model.streams else None
    mixer = preset.model.mixer
    field: int | None = 1
    if isinstance(mixer, TCNConfig):
        field = mixer.receptive_field
    elif isinstance(mixer, EMAConfig):
        field = mixer.truncation if preset.model.causal or mixer.truncation is None else 2 * mixer.truncation - 1
    return Summary(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        receptive_field=field,
        state_bytes=state_bytes,
        macs=model.macs_per_token(preset.length),
    )


def _state_bytes(model: SequenceModel, length: int) -> int:
    total = model.initial_state(1).nbytes
    attention = model.config.attention
    if attention is not None and attention.chunk_size is None:
        # Full attention keeps every key and value; its cache starts empty.
        size = next(model.parameters()).element_size()
        total += model.config.num_layers * length * (attention.d_key + attention.d_value) * size
    return total
