"""One token of a language model in a few kernels for CPUs, where Python and PyTorch cost more than a small step.

A step is a list of kernels with their arguments, arrays of NumPy, built once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnca.errors import StateError
from tcnca.extras import missing
from tcnca.generation import step as steps
from tcnca.generation.sampling import Sampler
from tcnca.generation.step import Quantization, Step, pack, positions, unpack
from tcnca.layers import EMA, TCN, ChunkedAttention
from tcnca.layers.attention import QK_EPS
from tcnca.layers.block import GatedBlock, Layer, ResidualBlock
from tcnca.layers.norm import EPS, weight_norm
from tcnca.models import ModelState, SequenceModel
from tcnca.models.heads import LanguageModelHead
from tcnca.models.inputs import TokenEmbedding
from tcnca.ops import rotary_bias
from tcnca.ops.attention.naive import bias_max_length, rotation_table
from tcnca.ops.ema.naive import ema_coefficients
from tcnca.ops.ngrams import HASH_PRIME, hash_factors
from tcnca.ops.quantize import quantize_rows

Array = np.ndarray[Any, np.dtype[Any]]


def unsupported_reason(model: SequenceModel, state: ModelState) -> str | None:
    """Return why a model has no step of this kind, or None if it has."""
    if model.embedding.weight.dtype == torch.float64:
        return "dtype: expected float32 or less, got float64"
    return steps.unsupported_reason(model, state) or missing("cpu")


class PackedStep(Step):
    """A step for CPUs, in float32. The weights are read when it is built.

    Args:
        model: a language model that `unsupported_reason` accepts.
        state: the state after the preceding tokens, which is copied.
        sampler: chooses the tokens of `next`.
        quantization: `int8` for matrices of 8 bits.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: SequenceModel,
        state: ModelState,
        sampler: Sampler | None = None,
        *,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(sampler)
        # Numba takes a second to import.
        import numba

        from tcnca.ops.decoding import cpu_kernels

        assert isinstance(model.embedding, TokenEmbedding)
        assert isinstance(model.head, LanguageModelHead)
        self.model, self.batch, self.quantization = model, state.batch_size, quantization
        config: Any = numba.config
        threads = torch.get_num_threads()
        self.threads: int = min(threads, config.NUMBA_NUM_THREADS)
        if self.threads > 1:
            # This starts Numba's threads, which sets the number of OpenMP's, and so of PyTorch's, to all cores.
            numba.get_num_threads()
            torch.set_num_threads(threads)
        self._set_num_threads = numba.set_num_threads
        self._kernels: Any = cpu_kernels
        self._linear = cpu_kernels.parallel_linear if self.threads > 1 else cpu_kernels.linear
        self._attend = cpu_kernels.parallel_attend if self.threads > 1 else cpu_kernels.attend
        self._ops: list[Callable[[], object]] = []
        self._parts = [{name: _array(part) for name, part in parts.items()} for parts in unpack(state)]
        self._positions = positions(state).numpy()

        self._x = self._empty(model.config.d_model)
        self._table = _array(model.embedding.weight * model.embedding.scale)
        self._ngrams = None if state.input is None else _NGrams(model.embedding, state.input.tokens)
        for layer, parts in zip(model.layers, self._parts, strict=True):
            assert isinstance(layer, Layer)
            self._add_layer(layer, parts)
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        self._logits = self._empty(len(head))
        self._add_linear(self._add_norm(model.norm, self._x), head, None, self._logits)

    def __call__(self, token: Tensor) -> Tensor:
        """Take a step."""
        np.take(self._table, token.numpy(), axis=0, out=self._x)
        if self._ngrams is not None:
            self._x += self._ngrams(token.numpy())
        if self.threads > 1:
            self._set_num_threads(self.threads)
        for run in self._ops:
            run()
        self._positions += 1
        return torch.from_numpy(self._logits).to(self.model.embedding.weight.dtype)

    @torch.no_grad()
    def state(self) -> ModelState:
        """Return the state after the last token, as a copy."""
        dtype = self.model.embedding.weight.dtype
        layers = [
            {
                name: torch.from_numpy(part).to(torch.float32 if name == "hidden" else dtype)
                for name, part in parts.items()
            }
            for parts in self._parts
        ]
        tokens = None if self._ngrams is None else torch.from_numpy(self._ngrams.tokens)
        return pack(self.model, layers, torch.from_numpy(self._positions), tokens)

    @torch.no_grad()
    def load(self, row: int, state: ModelState) -> None:
        """Overwrite the state of one row by that of a single sequence, which may be at another position."""
        if state.batch_size != 1:
            raise StateError(f"state: expected a batch of 1, got {state.batch_size}")
        for parts, new in zip(self._parts, unpack(state), strict=True):
            for name, part in new.items():
                parts[name][row] = _array(part)[0]
        self._positions[row] = positions(state).item()
        if self._ngrams is not None and state.input is not None:
            self._ngrams.tokens[row] = state.input.tokens[0].numpy()

    # The kernels of a step, in order.

    def _add(self, kernel: Callable[..., object], *args: Any) -> None:
        self._ops.append(functools.partial(kernel, *args))

    def _empty(self, *shape: int) -> Array:
        return np.zeros((self.batch, *shape), dtype=np.float32)

    def _add_layer(self, layer: Layer, parts: dict[str, Array]) -> None:
        if isinstance(layer.block, GatedBlock):
            self._add_gated(layer.block, parts)
        else:
            self._add_residual(layer.block, parts)
        net = layer.feed_forward
        if net is not None:
            hidden, name = self._empty(self.model.config.d_ff), self.model.config.activation
            self._add_linear(self._add_norm(net.norm, self._x), net.up.weight, net.up.bias, hidden, name)
            self._add_linear(hidden, net.down.weight, net.down.bias, self._x, accumulate=True)

    def _add_gated(self, block: GatedBlock, parts: dict[str, Array]) -> None:
        width, d_key, d_value, _ = block.gates.parts
        name = self.model.config.activation
        normed = self._add_norm(block.norm, self._x)
        mixed = self._add_mixer(block.mixer, normed, parts)
        values, gates = self._empty(d_value), self._empty(sum(block.gates.parts))
        self._add_linear(normed, block.values.weight, block.values.bias, values, name)
        zeta, r, h = width, width + d_key, width + d_key + d_value
        self._add_linear(mixed, block.gates.weight, block.gates.bias, gates, "silu", active=(zeta, h))
        scale = torch.tensor([[d_key**-0.5], [1.0]])
        query, key = self._add_transform(gates, zeta, zeta, block.gamma * scale, block.beta * scale)
        attended = self._add_attention(block.attention, parts, query, key, (values, 0), (gates, r))
        self._add_linear(attended, block.output.weight, block.output.bias, gates, start=h, accumulate=True)
        self._add(self._kernels.update, self._x, gates, 0, h, self._kernels.ACTIVATIONS[name])

    def _add_residual(self, block: ResidualBlock, parts: dict[str, Array]) -> None:
        self._add(
            np.add, self._x, self._add_mixer(block.mixer, self._add_norm(block.mixer_norm, self._x), parts), self._x
        )
        if block.attention is None:
            return
        d_key, _, d_value = block.projection.parts
        projected, ones = self._empty(sum(block.projection.parts)), self._empty(d_value) + np.float32(1.0)
        normed = self._add_norm(block.attention_norm, self._x)
        self._add_linear(normed, block.projection.weight, block.projection.bias, projected)
        gamma = torch.tensor([[d_key**-0.5], [1.0]]).repeat(1, d_key)
        query, key = self._add_transform(projected, 0, d_key, gamma, torch.zeros_like(gamma))
        attended = self._add_attention(block.attention, parts, query, key, (projected, 2 * d_key), (ones, 0))
        self._add_linear(attended, block.output.weight, block.output.bias, self._x, accumulate=True)

    def _add_transform(
        self, source: Array, first_query: int, first_key: int, gamma: Tensor, beta: Tensor
    ) -> tuple[Array, Array]:
        query, key = self._empty(gamma.shape[1]), self._empty(gamma.shape[1])
        self._add(self._kernels.transform, source, first_query, first_key, _array(gamma), _array(beta), query, key)
        return query, key

    def _add_attention(
        self,
        attention: ChunkedAttention,
        parts: dict[str, Array],
        query: Array,
        key: Array,
        values: tuple[Array, int],
        gates: tuple[Array, int],
    ) -> Array:
        """Attend with values and gates that are columns of an array, and return where the output is."""
        config, chunk = attention.config, parts["keys"].shape[1]
        d_key, d_value = parts["keys"].shape[2], parts["values"].shape[2]
        bias = torch.zeros(2 * chunk - 1)
        if config.position == "rotary":
            bias = rotary_bias(attention.alpha, attention.beta, chunk)
        elif config.position == "simple":
            bias = attention.bias
        reach = bias_max_length(bias)
        rotation = np.zeros((2, chunk, 0), dtype=np.float32)
        if config.position == "rope":
            sines = rotation_table(torch.arange(chunk), config.rope_width // 2, torch.float32)
            rotation = _array(torch.stack(sines))
        # Threads share the chunks of few sequences.
        num_parts = -(-self.threads // self.batch)
        scratch = self._empty(chunk), self._empty(num_parts, 2), self._empty(num_parts, d_value)
        y = self._empty(d_value)
        table = _array(bias[reach - chunk : reach])
        caches = parts["keys"], parts["values"]
        if attention.qk_scale is not None:
            # The query has the factor of the scores already.
            factor, kind, zeros = d_key**-0.5, self._kernels.NORMS["rms"], self._empty(d_key)[0]
            for x, eps, scale in (
                (query, QK_EPS * factor**2, attention.qk_scale * factor),
                (key, QK_EPS, torch.ones(1)),
            ):
                self._add(
                    self._kernels.normalize, x, kind, _array(scale.float().expand(d_key)), zeros, np.float32(eps), x
                )
        if attention.config.shift_keys:
            self._add(self._kernels.exchange, key, parts["last_key"])
        self._add(self._attend, self._positions, query, key, *values, *gates, rotation, table, *caches, *scratch, y)
        return y

    def _add_mixer(self, mixer: nn.Module | None, x: Array, parts: dict[str, Array]) -> Array:
        """Add a mixer; return where its output is."""
        y, functions = self._empty(self.model.config.d_model), self._kernels.ACTIVATIONS
        if isinstance(mixer, TCN):
            config = mixer.config
            weight = (mixer.weight if mixer.scale is None else weight_norm(mixer.weight, mixer.scale))[:, 0]
            bias = weight.new_zeros(weight.shape[:2]) if mixer.bias is None else mixer.bias.flatten(0, 1)
            gain = weight.new_zeros(0, weight.shape[1]) if mixer.gain is None else mixer.gain.flatten(0, 1)
            omega = weight.new_zeros(weight.shape[1]) if mixer.omega is None else mixer.omega
            dilations = config.dilation_factor ** np.arange(config.depth)
            output = functions[config.activation if config.output == "activation" else "none"]
            self._add(
                self._kernels.tcn,
                x,
                parts["ring"],
                self._positions,
                dilations,
                _array(weight.transpose(1, 2)),
                _array(bias),
                _array(gain),
                _array(omega),
                config.block == "residual",
                functions[config.activation],
                output,
                np.empty(x.shape[1], dtype=np.float32),
                y,
            )
            return y
        assert isinstance(mixer, EMA)
        coefficients = ema_coefficients(mixer.delta, mixer.alpha, mixer.beta, mixer.gamma)
        drive, decay, readout = (_array(part[0]) for part in coefficients)
        output = functions["silu" if mixer.config.output == "activation" else "none"]
        self._add(self._kernels.ema, x, parts["hidden"], drive, decay, readout, _array(mixer.omega), output, y)
        return y

    def _add_norm(self, norm: nn.Module | None, x: Array) -> Array:
        """Add a norm; return where its output is."""
        assert norm is not None  # models whose norms follow their layers are not packed
        kind, scale, shift = steps.norm_parameters(norm, x.shape[1])
        y = self._empty(x.shape[1])
        self._add(
            self._kernels.normalize, x, self._kernels.NORMS[kind], _array(scale), _array(shift), np.float32(EPS), y
        )
        return y

    def _add_linear(
        self,
        x: Array,
        weight: Tensor,
        bias: Tensor | None,
        y: Array,
        function: str = "none",
        *,
        active: tuple[int, int] | None = None,
        start: int = 0,
        accumulate: bool = False,
    ) -> None:
        """Write the product with a matrix `[outputs, inputs]` to `y` from column `start` on, or add it."""
        scale = torch.ones(len(weight))
        if self.quantization == "int8":
            weight, scale = quantize_rows(weight)
        matrix = weight.detach().numpy() if weight.dtype == torch.int8 else _array(weight)
        bias = torch.zeros(len(weight)) if bias is None else bias
        kind, active = self._kernels.ACTIVATIONS[function], active or (0, len(weight))
        args = matrix, _array(scale), _array(bias), y, start, accumulate, kind, *active
        self._add(self._linear, x, *args, self.threads)


class _NGrams:
    """The sum of the embeddings of the n-grams that end at a token; see `tcnca.ops.hash_ngrams`."""

    def __init__(self, embedding: TokenEmbedding, tokens: Tensor) -> None:
        assert embedding.ngram_weight is not None
        self.tokens = tokens.numpy().copy()
        self._weight, self._scale = _array(embedding.ngram_weight), np.float32(embedding.scale)
        self._factors = np.array(hash_factors(embedding.ngram_sizes)[::-1])
        self._lags = np.array(embedding.ngram_sizes) - 1
        self._buckets = embedding.ngram_buckets
        self._first = np.arange(len(self._lags)) * self._buckets

    def __call__(self, token: Array) -> Array:
        window = np.concatenate([self.tokens, token[:, None] + 1], 1)
        self.tokens[:] = window[:, 1:]
        sums = (window * self._factors % HASH_PRIME)[:, ::-1].cumsum(1)[:, self._lags]
        return self._weight[sums % HASH_PRIME % self._buckets + self._first].sum(1) * self._scale


def _array(tensor: Tensor) -> Array:
    """Return a tensor as a contiguous array of float32, without a copy if it is one."""
    return tensor.detach().float().contiguous().numpy()
