"""What the steps of one token share: which models they support, and the state that they unpack and pack."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnca.generation.sampling import Sampler
from tcnca.layers import EMA, TCN, Layer
from tcnca.layers.norm import EPS, BatchNorm, LayerNorm, RMSNorm
from tcnca.models import ModelState, SequenceModel, evaluating
from tcnca.models.heads import LanguageModelHead
from tcnca.models.inputs import TokenEmbedding
from tcnca.ops import AttentionState, EMAState, NGramState, TCNState

Quantization = Literal["int8"]
CacheDtype = Literal["float8"]
Parts = dict[str, Tensor]
"""The state of a layer: `ring` of a TCN, `hidden` of an EMA, `keys`, `values` and `last_key` of the attention."""


class Step(abc.ABC):
    """Maps the tokens `[batch]` to the logits of the next ones, `[batch, vocab_size]`, for rows at any position.

    Args:
        sampler: chooses the tokens of `next`.
    """

    def __init__(self, sampler: Sampler | None) -> None:
        self.sampler = sampler

    @abc.abstractmethod
    def __call__(self, token: Tensor) -> Tensor:
        """Take a step. The next one may overwrite the logits."""

    @abc.abstractmethod
    def state(self) -> ModelState:
        """Return the state after the last token, as a copy."""

    @abc.abstractmethod
    def load(self, row: int, state: ModelState) -> None:
        """Continue one row from another state, of batch size 1."""

    def next(self) -> Tensor:
        """Take a step with the last tokens of the sampler, and return its next ones, `[batch]`."""
        assert self.sampler is not None
        return self.sampler(self(self.sampler.token))


@contextlib.contextmanager
def generating(model: SequenceModel) -> Iterator[None]:
    """Put the model in evaluation mode, and compute no gradients.

    Not in inference mode, whose tensors could not be written to outside of it, where the caller may continue.
    """
    with torch.inference_mode(False), torch.no_grad(), evaluating(model):
        yield


def unsupported_reason(model: SequenceModel, state: ModelState) -> str | None:
    """Return which part of a model the packed and the fused step do not support, or None if there is none."""
    config, dtype = model.config, model.embedding.weight.dtype
    attention = config.attention
    if not isinstance(model.embedding, TokenEmbedding) or not isinstance(model.head, LanguageModelHead):
        return "head: expected a language model"
    if model.embedding.norm is not None:
        return "input.norm: expected False"
    if not config.prenorm:
        return "prenorm: expected True"
    if config.norm == "none":
        return "norm: expected one"
    if any(weight.dtype != dtype for weight in model.parameters()):
        return "dtype: expected the same for all weights"
    if attention is not None and (attention.chunk_size is None or attention.activation != "softmax"):
        return "attention: expected the softmax in chunks"
    if attention is not None and (attention.num_heads > 1 or attention.memory):
        return "attention: expected one head without memory"
    for layer in model.layers:
        assert isinstance(layer, Layer)
        mixer = layer.block.mixer
        if isinstance(mixer, TCN):
            if mixer.config.convolutions != 1 or len(mixer.norms):
                return "mixer: expected blocks of one convolution without norms of activations"
        elif not isinstance(mixer, EMA) or mixer.config.truncation is not None:
            return "mixer: expected a TCN, or an EMA without truncation"
    floating = {name: part for name, part in state.tensors().items() if part.is_floating_point()}
    if any(part.dtype != dtype for name, part in floating.items() if not name.endswith(".hidden")):
        return f"state: expected {dtype}"
    return None


def unpack(state: ModelState) -> list[Parts]:
    """Return the tensors of each layer. The ring buffers of all blocks of a TCN become one."""
    layers = []
    for layer in state.layers:
        parts = {}
        if isinstance(layer.mixer, TCNState):
            parts["ring"] = torch.cat(list(layer.mixer.buffers), 1)
        elif isinstance(layer.mixer, EMAState):
            parts["hidden"] = layer.mixer.hidden.clone()
        if layer.attention is not None:
            parts["keys"], parts["values"] = layer.attention.keys.clone(), layer.attention.values.clone()
            if layer.attention.last_key is not None:
                parts["last_key"] = layer.attention.last_key.clone()
        layers.append(parts)
    return layers


def pack(model: SequenceModel, layers: list[Parts], position: Tensor, tokens: Tensor | None = None) -> ModelState:
    """Return the state of which `unpack` gives these tensors, as a copy.

    `position` is `[batch]`, `tokens` those of the state of n-grams.
    """
    empty = model.initial_state(len(position))
    packed = []
    for layer, parts in zip(empty.layers, layers, strict=True):
        mixer: Any = layer.mixer
        if isinstance(mixer, TCNState):
            sizes = [buffer.shape[1] for buffer in mixer.buffers]
            mixer = TCNState(tuple(part.clone() for part in parts["ring"].split(sizes, 1)), position.clone())
        elif isinstance(mixer, EMAState):
            mixer = EMAState(parts["hidden"].clone(), None, position.clone())
        attention = layer.attention
        if attention is not None:
            last_key = parts["last_key"].clone() if "last_key" in parts else None
            attention = AttentionState(parts["keys"].clone(), parts["values"].clone(), position.clone(), last_key)
        packed.append(type(layer)(mixer, attention))
    return ModelState(tuple(packed), None, empty.signature, None if tokens is None else NGramState(tokens.clone()))


def norm_parameters(
    norm: nn.Module | None, width: int, device: torch.device | None = None
) -> tuple[str, Tensor, Tensor]:
    """Return the kind of a norm, and its factors and offsets `[width]`; those of a batch norm have its statistics."""
    scale, shift = torch.ones(width, device=device), torch.zeros(width, device=device)
    if norm is None:
        return "none", scale, shift
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    scale = scale if weight is None else weight.float().expand(width)
    shift = shift if bias is None else bias.float()
    kind = {LayerNorm: "layer", RMSNorm: "rms", BatchNorm: "batch"}[type(norm)]
    if isinstance(norm, BatchNorm):
        scale = scale * torch.rsqrt(norm.running_var + EPS)
        shift = shift - norm.running_mean * scale
    return kind, scale.contiguous(), shift.contiguous()


def positions(state: ModelState) -> Tensor:
    """Return the number of tokens that each sequence has seen, as a copy."""
    layer = state.layers[0]
    part: Any = layer.mixer if layer.attention is None else layer.attention
    return part.position.clone()
