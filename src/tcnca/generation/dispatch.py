"""The choice of a step, and the steps that call the model itself."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.extras import missing
from tcnca.generation import fused, packed
from tcnca.generation.sampling import Sampler
from tcnca.generation.step import CacheDtype, Quantization, Step
from tcnca.models import ModelState, SequenceModel, evaluating
from tcnca.ops.driver import capture_graph

MIN_GRAPH_TOKENS = 8
"""Capturing a CUDA graph costs about as much as this number of steps."""
MIN_PACKED_LAYERS = 1000
"""Layers of all steps together that the model itself computes in about the time in which kernels for CPUs compile."""
_WARM_UP_STEPS = 2
"""Steps on the captured stream, in which libraries allocate their workspaces."""


def make_step(
    model: SequenceModel,
    state: ModelState,
    sampler: Sampler | None = None,
    *,
    max_new_tokens: int | None = None,
    quantization: Quantization | None = None,
    cache_dtype: CacheDtype | None = None,
) -> Step:
    """Return the fastest step that can generate `max_new_tokens` tokens after a state; None for many."""
    device = model.embedding.weight.device
    rounded = quantization is not None or cache_dtype is not None
    # Weights that autocast has converted live for one replay only.
    if not torch.is_autocast_enabled(device.type):
        many = max_new_tokens is None or max_new_tokens * model.config.num_layers >= MIN_PACKED_LAYERS
        if device.type == "cpu" and (rounded or many):
            reason = packed.unsupported_reason(model, state)
            if reason is None:
                return packed.PackedStep(model, state, sampler, quantization=quantization)
            if reason == missing("cpu"):
                _warn_once(f"{reason}. Until then generation on a CPU is slower")
        if device.type == "cuda" and (rounded or max_new_tokens is None or max_new_tokens >= MIN_GRAPH_TOKENS):
            if fused.unsupported_reason(model, state) is None:
                return fused.FusedStep(model, state, sampler, quantization=quantization, cache_dtype=cache_dtype)
            if has_fixed_state(model) and torch.version.hip is None:
                return GraphedStep(model, state, sampler)
    return ModelStep(model, state, sampler)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def check_rounding(model: SequenceModel, quantization: str | None, cache_dtype: str | None) -> None:
    """Raise an error if generation cannot round the weights or the cache of a model as asked."""
    for name, value, expected in (("quantization", quantization, "int8"), ("cache_dtype", cache_dtype, "float8")):
        if value not in (None, expected):
            raise InputError(f"{name}: expected {expected!r} or None, got {value!r}")
    if quantization is None and cache_dtype is None:
        return
    state, device = model.initial_state(1), model.embedding.weight.device
    if torch.is_autocast_enabled(device.type):
        reason: str | None = "autocast: expected it off"
    elif device.type == "cuda":
        reason = fused.unsupported_reason(model, state, cache_dtype)
    elif cache_dtype is not None:
        reason = f"device: expected an NVIDIA GPU, got {device}"
    else:
        reason = packed.unsupported_reason(model, state)
    if reason is not None:
        name = "cache_dtype" if quantization is None else "quantization"
        raise InputError(f"{name}: expected None for this model; {reason}")


def has_fixed_state(model: SequenceModel) -> bool:
    """Whether the state has one size: that of full attention grows, and a model of feed-forward nets has none."""
    attention = model.config.attention
    return model.config.mixer is not None if attention is None else attention.chunk_size is not None


class ModelStep(Step):
    """A step of the model itself, for any language model."""

    def __init__(self, model: SequenceModel, state: ModelState, sampler: Sampler | None = None) -> None:
        super().__init__(sampler)
        self.model, self._state = model, state.clone()

    def __call__(self, token: Tensor) -> Tensor:
        """Take a step."""
        with evaluating(self.model):
            logits, state = self.model(token.unsqueeze(1), state=self._state, inplace=True)
        assert state is not None
        self._state = state
        return logits[:, -1]

    def state(self) -> ModelState:
        """Return the state after the last token, as a copy."""
        return self._state.clone()

    def load(self, row: int, state: ModelState) -> None:
        """Continue one row from another state, of batch size 1, whose size must be fixed."""
        new = state.tensors()
        for name, tensor in self._state.tensors().items():
            tensor[row].copy_(new[name][0])


class GraphedStep(ModelStep):
    """A step of the model as a CUDA graph: a few hundred small kernels with one launch."""

    def __init__(self, model: SequenceModel, state: ModelState, sampler: Sampler | None = None) -> None:
        super().__init__(model, state, sampler)
        before = self._state.tensors()
        self._token = next(iter(before.values())).new_zeros(state.batch_size, dtype=torch.long)
        with torch.cuda.device(self._token.device):
            # PyTorch's default capture stream belongs to the device of the first capture.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_STEPS):
                    model(self._token.unsqueeze(1), state=self._state.clone(), inplace=True)
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads, for example one that pins memory, may continue: the capture concerns this thread only.
            with capture_graph(stream, error_mode="thread_local") as self._graph:
                logits, after = model(self._token.unsqueeze(1), state=self._state.detach(), inplace=True)
                assert after is not None
                for name, tensor in after.tensors().items():
                    if tensor.data_ptr() != before[name].data_ptr():
                        before[name].copy_(tensor)
        # Replays read and write this memory, so it must stay alive.
        self._held = after
        self._logits = logits[:, -1]

    def __call__(self, token: Tensor) -> Tensor:
        """Take a step."""
        self._token.copy_(token)
        self._graph.replay()
        return self._logits
