"""Measurements of a model's function: the influence of inputs, impulse responses of mixers, attention weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tcnca.errors import ConfigError
from tcnca.layers import TCN, AttentionConfig, ChunkedAttention, Layer, Mixer
from tcnca.layers.norm import weight_norm
from tcnca.models import SequenceModel, evaluating
from tcnca.models.heads import PooledHead
from tcnca.models.packing import Packing
from tcnca.ops import split_heads

Array = NDArray[np.float64]
Progress = Callable[[int, int | None], None]
POSITIONS = 8
"""Outputs over which the influence of inputs is averaged."""
MAX_TOKENS = 4096
_MIN_TOKENS = 1024
_MAX_MACS = 5e11
"""Operations of a measurement of influences, which bounds its time to about a minute on a CPU."""
MAX_RESPONSE = 2**14
"""Steps of an impulse response."""
_OPEN_RESPONSE = 4096
"""Steps of the impulse response of a mixer whose receptive field has no limit."""
_MIXED_CHANNELS = 32
"""Channels whose response is measured one by one, where a mixer mixes them."""
_RESPONSE_NUMBERS = 2**24
"""Numbers of the inputs of one call for impulse responses, which bounds the memory."""


def default_layers(count: int) -> list[int]:
    """Return the first, the middle and the last of `count` layers."""
    return sorted({0, count // 2, count - 1})


def default_tokens(model: SequenceModel, length: int) -> int:
    """Return how many tokens influences are measured on: fewer for larger models, so that the time is bounded."""
    attention = model.config.attention
    if attention is not None and attention.chunk_size is None and attention.position == "simple":
        length = min(length, attention.reach)
    length = min(length, MAX_TOKENS)
    affordable = int(_MAX_MACS / ((POSITIONS + 2) * max(model.macs_per_token(length), 1)))
    return min(length, max(_MIN_TOKENS, 1 << (max(affordable, 1).bit_length() - 1)))


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Leave out the gradients of parameters in the block, of which none are needed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _layers(model: SequenceModel) -> list[Layer]:
    return cast(list[Layer], list(model.layers))


def layer_mixer(model: SequenceModel, layer: int) -> Mixer:
    """Return the mixer of a layer; raise a ConfigError if there is none."""
    mixer = _layers(model)[layer].block.mixer
    if mixer is None:
        raise ConfigError("mixer: expected a model with a mixer, got one without")
    return mixer


def _outputs(model: SequenceModel, features: Tensor) -> Tensor:
    """Return the logits or values of single tokens, or their features if the head pools over time."""
    features = features if model.norm is None else model.norm(features, None)
    if isinstance(model.head, PooledHead) and model.head.pooling != "none":
        return features
    outputs: Tensor = model.head(features, Packing(), features.shape[1], model.embedding.weight)
    return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Influence:
    """The norm of the derivative of an output by an input embedding, over the lag between them.

    lags: from the latest input to the earliest. Lag 0 is the input at the time of the output, and negative lags are
        in the future.
    norms: root mean square over outputs, of each lag.
    """

    lags: NDArray[np.int64]
    norms: Array
    tokens: int
    positions: int
    pooled: bool
    """Whether outputs are features of the last layer, since the head pools over time."""

    def reach(self, share: float) -> int:
        """Return the smallest distance within which the sum of norms is at least this share of the whole."""
        order = np.argsort(np.abs(self.lags), kind="stable")
        sums = np.cumsum(self.norms[order])
        place = int(np.searchsorted(sums, share * sums[-1])) if sums[-1] > 0 else 0
        return int(np.abs(self.lags)[order][min(place, len(order) - 1)])


def influence(
    model: SequenceModel, x: Tensor, positions: int = POSITIONS, seed: int = 0, progress: Progress | None = None
) -> Influence:
    """Measure how much inputs influence outputs, by their distance: the effective receptive field.

    For an output at time `t` and an embedding at time `t - lag`, this is the Frobenius norm of the derivative, averaged
    over outputs. It is estimated with one random vector for each output: `E |Jᵀr|² = |J|²` for `r` of unit variance.
    Layers are differentiated one after the other, so that memory is that of one layer.

    Args:
        model: the model.
        x: one sequence, `[1, time]` or `[1, time, features]`, on the device of the model.
        positions: number of outputs. They are evenly spaced, in the second half of the sequence if the model is causal,
            else in its middle half.
        seed: of the random vectors.
        progress: is called with the derivatives that are done, and with their number.
    """
    time = x.shape[1]
    low, high = (time // 2, time - 1) if model.config.causal else (time // 4, 3 * time // 4)
    places = np.unique(np.linspace(low, high, positions).round().astype(int))
    layers, generator = _layers(model), torch.Generator().manual_seed(seed)
    with evaluating(model), _frozen(model):
        with torch.no_grad():
            inputs = [model.embedding(x, None)]
            for layer in layers:
                inputs.append(layer(inputs[-1])[0])
        gradients = []
        for place in places:
            with torch.enable_grad():
                features = inputs[-1][:, place : place + 1].detach().requires_grad_()
                outputs = _outputs(model, features)
            vector = torch.randn(outputs.shape, generator=generator).to(outputs)
            gradient = torch.zeros_like(inputs[-1])
            gradient[:, place : place + 1] = torch.autograd.grad(outputs, features, vector)[0]
            gradients.append(gradient)
        done = 0
        for layer, before in zip(reversed(layers), reversed(inputs[:-1]), strict=True):
            with torch.enable_grad():
                before = before.detach().requires_grad_()
                after = layer(before)[0]
            for index, gradient in enumerate(gradients):
                gradients[index] = torch.autograd.grad(after, before, gradient, retain_graph=True)[0]
                done += 1
                if progress is not None:
                    progress(done, len(layers) * len(places))
    squares, counts = np.zeros(2 * time - 1), np.zeros(2 * time - 1)
    for place, gradient in zip(places, gradients, strict=True):
        found = gradient[0].double().square().sum(-1).cpu().numpy()
        # Lag `l` is at index `l + time - 1`: the lags of this output are from `place` down to `place - time + 1`.
        squares[place : place + time] += found[::-1]
        counts[place : place + time] += 1
    lags = np.arange(1 - time, time)
    known = (counts > 0) & ((lags >= 0) if model.config.causal else True)
    pooled = isinstance(model.head, PooledHead) and model.head.pooling != "none"
    return Influence(
        lags=lags[known],
        norms=np.sqrt(squares[known] / counts[known]),
        tokens=time,
        positions=len(places),
        pooled=pooled,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """The response of a mixer's channels to a unit impulse in the same channel.

    lags: steps after the impulse; negative ones are before it, in bidirectional mixers.
    values: `[channels, lags]`: the output with the impulse minus the output without.
    channels: numbers of the channels.
    """

    lags: NDArray[np.int64]
    values: Array
    channels: NDArray[np.int64]

    def reach(self, share: float) -> NDArray[np.int64]:
        """Return for each channel the smallest distance within which is this share of the sum of magnitudes."""
        order = np.argsort(np.abs(self.lags), kind="stable")
        sums = np.cumsum(np.abs(self.values[:, order]), -1)
        found = (sums < share * sums[:, -1:]).sum(-1).clip(max=len(order) - 1)
        return np.abs(self.lags)[order][found]


@torch.no_grad()
def impulse_response(mixer: Mixer, max_length: int = MAX_RESPONSE) -> Response:
    """Measure the response of a mixer to an impulse of 1 in a channel, in the same channel.

    For a linear mixer this is its kernel, all convolutions and the skip connection together. A mixer with
    non-linearities responds differently to impulses of other sizes. Where channels are mixed, up to 32 of them are
    measured, evenly spaced.
    """
    some, width = next(mixer.parameters()), mixer.d_model
    field = min(mixer.receptive_field or _OPEN_RESPONSE, max_length)
    # Of a bidirectional mixer, as much of the past as of the future.
    length, place = (field, 0) if mixer.causal else (2 * (field // 2) + 1, field // 2)
    with evaluating(mixer):
        silence = cast(Tensor, mixer(some.new_zeros(1, length, width)))
        half = some.new_zeros(1, length, width)
        half[:, place, ::2] = 1.0
        apart = width == 1 or torch.equal(mixer(half)[..., 1::2], silence[..., 1::2])
        if apart:
            x = some.new_zeros(1, length, width)
            x[:, place] = 1.0
            channels, values = np.arange(width), (mixer(x) - silence)[0].T
        else:
            channels = np.unique(np.linspace(0, width - 1, min(width, _MIXED_CHANNELS)).round().astype(int))
            rows = max(1, _RESPONSE_NUMBERS // (length * width))
            parts = []
            for begin in range(0, len(channels), rows):
                chosen = torch.as_tensor(channels[begin : begin + rows], device=some.device)
                row, x = torch.arange(len(chosen), device=some.device), some.new_zeros(len(chosen), length, width)
                x[row, place, chosen] = 1.0
                parts.append((mixer(x) - silence)[row, :, chosen])
            values = torch.cat(parts)
    return Response(lags=np.arange(length) - place, values=values.double().cpu().numpy(), channels=channels)


def tcn_kernels(mixer: Mixer) -> Array | None:
    """Return the kernels of a TCN as they are applied, `[convolutions, channels, taps]`; None for other mixers."""
    if not isinstance(mixer, TCN):
        return None
    weight = mixer.weight if mixer.scale is None else weight_norm(mixer.weight, mixer.scale)
    return weight.detach().flatten(0, 1).double().cpu().numpy()


@torch.no_grad()
def attention_maps(model: SequenceModel, x: Tensor, layers: Sequence[int]) -> dict[int, Array]:
    """Return the attention weights of some layers on a sequence, `[heads, queries, keys]` of each; zero if not visible.

    Args:
        model: the model.
        x: one sequence, `[1, time]` or `[1, time, features]`, on the device of the model.
        layers: numbers of the layers.
    """
    found: dict[int, Array] = {}
    with evaluating(model):
        h = model.embedding(x, None)
        for number, layer in enumerate(_layers(model)[: max(layers, default=-1) + 1]):
            attention = layer.block.attention
            if attention is None:
                raise ConfigError("attention: expected a model with attention, got one without")
            calls: list[tuple[Tensor, ...]] = []

            def record(_: nn.Module, inputs: Any, calls: list[tuple[Tensor, ...]] = calls) -> None:
                calls.append(inputs)

            handle = attention.register_forward_pre_hook(record)
            try:
                h = layer(h)[0]
            finally:
                handle.remove()
            if number in layers:
                found[number] = attention_weights(attention, *calls[0][:2]).double().cpu().numpy()
    return found


def attention_weights(attention: ChunkedAttention, q: Tensor, k: Tensor) -> Tensor:
    """Return the weights `[heads, queries, keys]` of a module for queries and keys `[1, time, d_key]`.

    The output is linear in the values. With the rows of an identity matrix as values, it is the matrix of weights:
    those of the module itself, with its positions, norms and memory.
    """
    heads = attention.config.num_heads
    identity = torch.eye(q.shape[1], dtype=q.dtype, device=q.device).repeat(1, heads)
    weights = cast(Tensor, attention(q, k, identity.unsqueeze(0)))
    return split_heads(weights[0], heads).movedim(1, 0)


def visible_keys(attention: AttentionConfig, causal: bool, time: int) -> NDArray[np.bool_]:
    """Return which keys a query sees, `[queries, keys]`."""
    query, key = np.arange(time)[:, None], np.arange(time)
    chunk = attention.chunk_size or time
    distance = query // chunk - key // chunk
    visible = (distance == 0) | (attention.memory & (distance == 1))
    return visible & (key <= query) if causal else visible


def mean_weights(weights: Array, visible: NDArray[np.bool_]) -> tuple[NDArray[np.int64], Array]:
    """Return lags, and the mean weight at each, over heads and the queries that see a key there."""
    lags = [lag for lag in range(1 - len(visible), len(visible)) if np.diagonal(visible, -lag).any()]
    means = [np.diagonal(weights, -lag, 1, 2)[:, np.diagonal(visible, -lag)].mean() for lag in lags]
    return np.array(lags), np.array(means)
