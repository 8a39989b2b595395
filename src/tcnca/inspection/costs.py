"""What a model consists of and what a token costs, part by part, and how far it sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tcnca.layers import TCN, CDILConfig, Layer, Mixer, TCNConfig
from tcnca.layers.structure import Structure
from tcnca.models import ModelConfig, SequenceModel
from tcnca.models.heads import LanguageModelHead
from tcnca.models.inputs import TokenEmbedding
from tcnca.ops import EMAState, LongConvState, lag_counts

PARTS = ("embedding", "mixer", "attention", "projections", "feed-forward", "norms", "head")
"""Parts of a model. Projections are all linear maps and gates around mixer and attention."""
_NORMS = {"norm", "mixer_norm", "attention_norm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The size of a part, and what one token costs in it."""

    parameters: int = 0
    """Number of parameters. A matrix that is shared with the embedding counts there only."""
    macs: int = 0
    """Multiply-accumulate operations for one token, on average. Element-wise operations are not counted."""
    weight_bytes: int = 0
    """Bytes of weights that are read to generate one token of one sequence."""
    moved_state_bytes: int = 0
    """Bytes of the streaming state that are read or written to generate one token of one sequence, on average."""
    state_bytes: int = 0
    """Bytes of the streaming state of one sequence."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes moved to generate one token of one sequence: weights and streaming state, without activations."""
        return self.weight_bytes + self.moved_state_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, count: int) -> Cost:
        return Cost(**{name: value * count for name, value in vars(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of a model by part. All layers of a model are alike."""

    length: int
    """Tokens of the sequences that averages are over."""
    parts: Mapping[str, Cost]
    """Cost of each of `PARTS`, over all layers."""
    layer: Cost
    """Cost of one layer."""
    streams: bool
    """Whether the model generates token by token. Otherwise bytes and states are 0."""

    @property
    def total(self) -> Cost:
        """Cost of the model."""
        return sum(self.parts.values(), Cost())


def model_costs(model: SequenceModel, length: int) -> Costs:
    """Return the cost of a model by part, for sequences of `length`."""
    # A state can be larger than the memory. On the `meta` device it takes none.
    with torch.device("meta"):
        twin = SequenceModel(model.config).to(model.embedding.weight.dtype)
    layer = _layer_costs(cast(Layer, twin.layers[0]), length, twin.streams)
    outside = _outer_costs(twin)
    parts = {part: outside[part] + layer[part] * len(twin.layers) for part in PARTS}
    return Costs(length=length, parts=parts, layer=sum(layer.values(), Cost()), streams=twin.streams)


def _outer_costs(model: SequenceModel) -> dict[str, Cost]:
    """Return the costs of what is not in a layer: embedding, last norm and head."""
    costs = dict.fromkeys(PARTS, Cost())
    embedding, streams = model.embedding.weight, model.streams
    macs = model.head.macs(embedding)
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            continue
        part, size = _part(name), parameter.numel() * parameter.element_size()
        if part == "embedding" and isinstance(model.embedding, TokenEmbedding) and parameter.ndim == 2:
            rows = 1 if parameter is embedding else len(model.embedding.ngram_sizes)
            size = size // len(parameter) * rows
        elif part == "head" and not macs:
            size = 0  # it runs once for each sequence
        costs[part] += Cost(parameters=parameter.numel(), weight_bytes=size if streams else 0)
    tied = isinstance(model.head, LanguageModelHead) and model.head.weight is None
    costs["head"] += Cost(macs=macs, weight_bytes=embedding.numel() * embedding.element_size() if tied else 0)
    if streams:
        for part, state in (
            ("embedding", model.embedding.initial_state(1)),
            ("head", model.head.initial_state(1, embedding)),
        ):
            size = 0 if state is None else state.nbytes
            costs[part] += Cost(state_bytes=size, moved_state_bytes=2 * size)
    return costs


def _part(name: str) -> str:
    """Return the part that a parameter or module belongs to, by its name."""
    path = name.split(".")[:-1]
    for part in ("mixer", "attention"):
        if part in path:
            return part
    if not _NORMS.isdisjoint(path):
        return "norms"
    return "feed-forward" if "feed_forward" in path else "projections" if "block" in path else path[0]


def _layer_costs(layer: Layer, length: int, streams: bool) -> dict[str, Cost]:
    """Return the costs of the parts of a layer."""
    costs = dict.fromkeys(PARTS, Cost())
    for name, parameter in layer.named_parameters():
        size = parameter.numel() * parameter.element_size() if streams else 0
        costs[_part(name)] += Cost(parameters=parameter.numel(), weight_bytes=size)
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            costs[_part(f"{name}.weight")] += Cost(macs=module.weight.numel())
    mixer, attention = layer.block.mixer, layer.block.attention
    state = layer.initial_state(1) if streams else None
    if mixer is not None:
        costs["mixer"] += Cost(macs=mixer.macs(length))
        if state is not None and state.mixer is not None:
            costs["mixer"] += Cost(state_bytes=state.mixer.nbytes, moved_state_bytes=_moved_bytes(mixer))
    if attention is not None:
        costs["attention"] += Cost(macs=attention.macs(length))
        if state is not None and state.attention is not None:
            size, widths = state.attention.keys.element_size(), attention.config.d_key + attention.config.d_value
            # The cache of full attention starts empty and grows to all keys and values.
            grown = length * widths * size if attention.chunk_size is None else 0
            # Each number of the visible keys and values is used in one operation. Those of the token are written.
            moved = attention.macs(length) * size
            costs["attention"] += Cost(state_bytes=state.attention.nbytes + grown, moved_state_bytes=moved)
    return costs


def _moved_bytes(mixer: Mixer) -> int:
    """Return the bytes of a mixer's state that one token reads or writes."""
    state = mixer.initial_state(1)
    if isinstance(mixer, TCN):
        # A convolution reads `kernel_size - 1` values of each channel and writes one.
        return mixer.weight.numel() * mixer.weight.element_size() if state.nbytes > 8 else 0
    moved = 0
    for name, tensor in state.tensors().items():
        size = tensor.numel() * tensor.element_size()
        slot = size // max(tensor.shape[1], 1) if tensor.dim() > 1 else 0
        if isinstance(state, EMAState) and name == "window":
            moved += 2 * slot  # the oldest input is replaced
        elif isinstance(state, LongConvState) and name == "window":
            moved += size + slot
        elif name != "position":
            moved += 2 * size
    return moved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dilated(Structure):
    """The structure of a mixer with dilated convolutions, with its direction and whether its blocks are residual."""

    residual: bool
    causal: bool

    @property
    def taps(self) -> NDArray[np.int64]:
        """Time of the input of each tap relative to the output, in dilations."""
        return (0 if self.causal else (self.kernel_size - 1) // 2) - np.arange(self.kernel_size)

    def lags(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return all lags of the receptive field, negative ones in the future, and the ways in which each is reached.

        See `tcnca.ops.lag_counts`.
        """
        counts = lag_counts(**dataclasses.asdict(self))
        return np.arange(len(counts)) - self.lead(self.causal), counts


def dilated_structure(config: ModelConfig) -> Dilated | None:
    """Return the structure of a model's mixer if it is a stack of dilated convolutions, else None."""
    mixer = config.mixer
    if isinstance(mixer, TCNConfig):
        sizes = {field.name: getattr(mixer, field.name) for field in dataclasses.fields(Structure)}
        return Dilated(**sizes, residual=mixer.block == "residual", causal=config.causal)
    if isinstance(mixer, CDILConfig):
        return Dilated(mixer.kernel_size, 2, mixer.depth, residual=True, causal=False)
    return None


def mixer_receptive_field(model: SequenceModel) -> int | None:
    """Return the number of inputs that one output of a layer's mixer depends on; None if there is no limit."""
    mixer = cast(Layer, model.layers[0]).block.mixer
    return 1 if mixer is None else mixer.receptive_field


def stack_receptive_field(model: SequenceModel) -> int | None:
    """Return the number of inputs that one output of the last layer depends on at most; None if there is no limit.

    Attention widens the receptive field to a whole chunk in every layer, so it depends on the place in the chunk: the
    largest is returned. A head that pools over time sees all outputs.
    """
    config, field, past = model.config, mixer_receptive_field(model), model.embedding.past
    if field is None:
        return None
    if config.attention is None:
        return 1 + config.num_layers * (field - 1) + past
    chunk = config.attention.chunk_size
    if chunk is None:
        return None
    structure = dilated_structure(config)
    lead = 0 if config.causal else field // 2 if structure is None else structure.lead(config.causal)
    # A shifted key is that of the token before; a memory is one more chunk.
    shift, before = int(config.attention.shift_keys), chunk * config.attention.memory
    first = last = np.arange(chunk)
    for _ in range(config.num_layers):
        first = first // chunk * chunk - before - shift - (field - 1 - lead)
        if not config.causal:
            end = last // chunk * chunk + chunk - 1
            # Of queries, keys and values. Those of a gated block are not mixed.
            latest = (last + lead, end - shift + lead, end + (0 if config.gated else lead))
            last = np.maximum.reduce(latest)
    return int((last - first).max()) + 1 + past
