"""One token of a language model in few PyTorch operators, for CPUs, where most of a small step is overhead.

A step is a list of operators on fixed memory, built once: inputs, outputs and their views are arguments of the list.
Only the attention, which reads as much of its chunk as there is, makes views in a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.errors import StateError
from tcnca.generation.quantize import quantize_rows
from tcnca.generation.sampling import Sampler
from tcnca.generation.step import Parts, Quantization, Step, pack, positions, unpack
from tcnca.layers import EMA, TCN, ChunkedAttention, TCNConfig
from tcnca.layers.block import GatedBlock, Layer, ResidualBlock
from tcnca.layers.norm import EPS, BatchNorm, LayerNorm, RMSNorm, weight_norm
from tcnca.models import ModelState, SequenceModel
from tcnca.models.heads import LanguageModelHead
from tcnca.models.inputs import TokenEmbedding
from tcnca.ops import activation, rotary_bias, rotate
from tcnca.ops.attention.naive import bias_max_length
from tcnca.ops.ema.naive import ema_coefficients

GROUPS = 16
"""Parts of a matrix, which threads share. PyTorch multiplies several matrices and vectors in parallel, but not one."""

INT8_INPUTS = 16
"""Inputs that PyTorch's product with int8 matrices reads at once, without a check of how many there are."""


class PackedStep(Step):
    """A step for CPUs. The weights are read when it is built.

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
        assert isinstance(model.embedding, TokenEmbedding)
        assert isinstance(model.head, LanguageModelHead)
        self.model, self.batch, self.dtype = model, state.batch_size, model.embedding.weight.dtype
        self.quantization = quantization
        self._ops: list[Callable[[], object]] = []
        self._build_slots()
        self._parts = [self._arrange(parts) for parts in unpack(state)]
        self._set_positions(positions(state))

        self.token = torch.zeros(self.batch, dtype=torch.long)
        self.x = self._columns(model.config.d_model)
        table = model.embedding.weight.detach() * model.embedding.scale
        self._add(lambda: self.x.copy_(table.index_select(0, self.token)))
        for layer, parts in zip(model.layers, self._parts, strict=True):
            assert isinstance(layer, Layer)
            self._add_layer(layer, parts)
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        self.logits = self._columns(len(head))
        self._add_linear(self._add_norm(model.norm, self.x), head, None, self.logits)

    @torch.inference_mode()
    def __call__(self, token: Tensor) -> Tensor:
        """Take a step."""
        self.token.copy_(token)
        self._find_slots()
        for run in self._ops:
            run()
        self._positions += 1
        return self.logits

    @torch.no_grad()
    def state(self) -> ModelState:
        """Return the state after the last token, as a copy."""
        return pack(self.model, [self._restore(parts) for parts in self._parts], torch.from_numpy(self._positions))

    @torch.no_grad()
    def load(self, row: int, state: ModelState) -> None:
        """Overwrite the state of one row by that of a single sequence, which may be at another position."""
        if state.batch_size != 1:
            raise StateError(f"state: expected a batch of 1, got {state.batch_size}")
        for parts, new in zip(self._parts, unpack(state), strict=True):
            for name, part in self._arrange(new).items():
                parts[name][row] = part[0]
        self._positions[row] = positions(state).item()
        self._set_positions(torch.from_numpy(self._positions))

    # The slots of the ring buffers and of the chunk.

    def _build_slots(self) -> None:
        """Prepare what the slots of all steps have in common, and of all layers."""
        mixer, rows = self.model.config.mixer, np.arange(self.batch)
        self._lags = mixer.kernel_size - 1 if isinstance(mixer, TCNConfig) else 0
        if isinstance(mixer, TCNConfig) and self._lags:
            self._dilations = mixer.dilation_factor ** np.arange(mixer.depth)[:, None]
            sizes = self._lags * self._dilations
            self._sizes: list[int] = sizes[:, 0].tolist()
            self._first = sizes.cumsum(0) - sizes + rows * sum(self._sizes)
            # The slots of lag 1, 2, … when the newest input is in slot 0, 1, …
            self._turns = (np.arange(self._lags)[:, None] - np.arange(1, self._lags + 1)) % self._lags
            self._now = np.zeros((mixer.depth, self.batch), dtype=np.int64)
            self._past = np.zeros((mixer.depth, self.batch, self._lags), dtype=np.int64)
        attention: Any = self.model.layers[0].block.attention  # type: ignore[union-attr]
        self._chunk: int = 0 if attention is None else attention.chunk_size
        # Two threads share the chunk of a single sequence.
        self._padding = self._chunk % 2 if self.batch == 1 else 0
        self._row_cells = rows * (self._chunk + self._padding)
        self._places, self._cells = np.zeros_like(rows), np.zeros_like(rows)

    def _set_positions(self, position: Tensor) -> None:
        self._positions = position.numpy()
        self._equal = bool((position == position[0]).all())

    def _find_slots(self) -> None:
        """Find where this step reads and writes, in every layer. NumPy has less overhead for such small arrays."""
        if self._chunk:
            np.remainder(self._positions, self._chunk, out=self._places)
            np.add(self._places, self._row_cells, out=self._cells)
            self._place = int(self._places[0] if self._equal else self._places.max())
            self._length = self._place + 1
            self._length += self._length % 2 if self.batch == 1 else 0
        if self._lags:
            rounds, phases = np.divmod(self._positions, self._dilations)
            turns = rounds % self._lags
            first = self._first + phases * self._lags
            np.add(first, turns, out=self._now)
            np.add(first[..., None], self._turns[turns], out=self._past)

    def _arrange(self, parts: Parts) -> Parts:
        """Return the parts in the order of this step: inputs that it reads together lie together in the rings."""
        return self._reorder(parts, (self._lags, -1), self._padding)

    def _restore(self, parts: Parts) -> Parts:
        """Undo `_arrange`."""
        return self._reorder(parts, (-1, self._lags), -self._padding)

    def _reorder(self, parts: Parts, shape: tuple[int, int], padding: int) -> Parts:
        parts = dict(parts)
        if self._lags:
            blocks = (block.unflatten(1, shape).transpose(1, 2) for block in parts["ring"].split(self._sizes, 1))
            parts["ring"] = torch.cat([block.flatten(1, 2) for block in blocks], 1)
        for name in ("keys", "values") if self._chunk else ():
            parts[name] = F.pad(parts[name], (0, 0, 0, padding))
        return parts

    # The operators of a step, in order.

    def _add(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self._ops.append(functools.partial(function, *args, **kwargs))

    def _empty(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.dtype)

    def _columns(self, width: int) -> Tensor:
        """Return memory for `[batch, width]` in the layout that matrix products write."""
        return self._empty(width, self.batch).t()

    def _add_layer(self, layer: Layer, parts: Parts) -> None:
        if isinstance(layer.block, GatedBlock):
            self._add_gated(layer.block, parts)
        else:
            self._add_residual(layer.block, parts)
        net = layer.feed_forward
        if net is not None:
            hidden = self._columns(self.model.config.d_ff)
            self._add_linear(self._add_norm(net.norm, self.x), net.up.weight, net.up.bias, hidden)
            self._add_activation(self.model.config.activation, hidden)
            self._add_linear(hidden, net.down.weight, net.down.bias, self.x, accumulate=True)

    def _add_gated(self, block: GatedBlock, parts: Parts) -> None:
        width, d_key, d_value, _ = block.widths
        name = self.model.config.activation
        normed, mixed = self._add_mixer(block.mixer, block.norm, parts)
        values, gates = self._columns(d_value), self._columns(sum(block.widths))
        self._add_linear(normed, block.values.weight, block.values.bias, values)
        self._add_activation(name, values)
        # The bias of the output is that of the candidate, to which the output is added.
        bias = block.gates.bias + F.pad(block.output.bias, (gates.shape[1] - width, 0))
        self._add_linear(mixed, block.gates.weight, bias, gates)
        u, zeta, r, h = gates.split(list(block.widths), 1)
        self._add_activation("silu", gates[:, width : width + d_key + d_value])
        factors = torch.tensor([[d_key**-0.5], [1.0]], dtype=self.dtype)
        both, attended = self._empty(self.batch, 2, d_key), self._empty(self.batch, d_value)
        self._add(torch.addcmul, block.beta * factors, zeta.unsqueeze(1), block.gamma * factors, out=both)
        self._add_attention(block.attention, parts, both, values, attended)
        self._add(attended.mul_, r)
        self._add_linear(attended, block.output.weight, None, h, accumulate=True)
        self._add_activation(name, h)
        self._add(u.sigmoid_)
        self._add(torch.lerp, self.x, h, u, out=self.x)

    def _add_residual(self, block: ResidualBlock, parts: Parts) -> None:
        _, mixed = self._add_mixer(block.mixer, block.mixer_norm, parts)
        self._add(self.x.add_, mixed)
        if block.attention is None:
            return
        d_key, _, d_value = block.widths
        factors = torch.ones(sum(block.widths), dtype=self.dtype)
        factors[:d_key] = d_key**-0.5
        projected, attended = self._columns(sum(block.widths)), self._empty(self.batch, d_value)
        normed = self._add_norm(block.attention_norm, self.x)
        weight, bias = block.projection.weight * factors.unsqueeze(1), block.projection.bias * factors
        self._add_linear(normed, weight, bias, projected)
        both = projected[:, : 2 * d_key].unflatten(1, (2, d_key))
        self._add_attention(block.attention, parts, both, projected[:, 2 * d_key :], attended)
        self._add_linear(attended, block.output.weight, block.output.bias, self.x, accumulate=True)

    def _add_attention(
        self, attention: ChunkedAttention, parts: Parts, both: Tensor, values: Tensor, attended: Tensor
    ) -> None:
        """Attend from the scaled query and the key `[batch, 2, d_key]`, with `values` `[batch, d_value]`."""
        key_cache, value_cache, table = parts["keys"], parts["values"], self._position_table(attention)
        query, d_value = both[:, 0].unsqueeze(2), values.shape[1]
        places, cells = torch.from_numpy(self._places), torch.from_numpy(self._cells)
        if attention.config.position == "rope":
            self._add(lambda: both.copy_(rotate(both, places.unsqueeze(1))))
        self._add(key_cache.flatten(0, 1).index_copy_, 0, cells, both[:, 1])
        self._add(value_cache.flatten(0, 1).index_copy_, 0, cells, values)

        def weights(length: int) -> Tensor:
            if self._equal:
                bias = table.as_strided((1, length, 1), (0, 1, 0), self._chunk - 1 - self._place)
            else:
                windows = table.as_strided((self._chunk, length), (1, 1))
                bias = windows.index_select(0, self._chunk - 1 - places).unsqueeze(2)
            return torch.baddbmm(bias, key_cache.narrow(1, 0, length), query).softmax(1)

        out = attended.unsqueeze(1)

        def attend() -> None:
            length = self._length
            torch.bmm(weights(length).transpose(1, 2), value_cache.narrow(1, 0, length), out=out)

        sums = self._empty(2, 1, d_value)
        first, second = sums.unbind(0)

        def attend_alone() -> None:
            half = self._length // 2
            torch.bmm(
                weights(2 * half).view(2, 1, half), value_cache.narrow(1, 0, 2 * half).view(2, half, -1), out=sums
            )
            torch.add(first, second, out=attended)

        self._add(attend_alone if self.batch == 1 else attend)

    def _position_table(self, attention: ChunkedAttention) -> Tensor:
        """Return the bias of each offset from the most distant key to the query's own, then -inf for later slots."""
        config, chunk = attention.config, self._chunk
        bias = self._empty(2 * chunk - 1)
        if config.position == "rotary":
            bias = rotary_bias(attention.alpha, attention.beta, chunk)
        elif config.position == "simple":
            bias = attention.bias
        reach = bias_max_length(bias)
        return F.pad(bias[reach - chunk : reach], (0, chunk), value=-math.inf)

    def _add_mixer(self, mixer: nn.Module | None, norm: nn.Module | None, parts: Parts) -> tuple[Tensor, Tensor]:
        """Add norm and mixer; return where their outputs are."""
        if isinstance(mixer, TCN):
            return self._add_tcn(mixer, norm, parts["ring"])
        assert isinstance(mixer, EMA)
        normed = self._add_norm(norm, self.x)
        return normed, self._add_ema(mixer, normed, parts["hidden"])

    def _add_tcn(self, mixer: TCN, norm: nn.Module | None, ring: Tensor) -> tuple[Tensor, Tensor]:
        config, batch, lags, width = mixer.config, self.batch, self._lags, mixer.d_model
        weight = (mixer.weight if mixer.scale is None else weight_norm(mixer.weight, mixer.scale))[:, 0]
        # The inputs of all blocks, and the output of the last one.
        inputs = self._empty(config.depth + 1, batch, width)
        sums, y = self._empty(config.depth, batch, width), self._empty(batch, width)
        normed = self._add_norm(norm, self.x, inputs[0])
        if lags:
            cells, taps = ring.flatten(0, 1), self._empty(config.depth, batch, lags, width)
            kernels = weight[:, :, 1:].transpose(1, 2).unsqueeze(1).contiguous()
            self._add(torch.index_select, cells, 0, torch.from_numpy(self._past).flatten(), out=taps.view(-1, width))
            self._add(torch.mul, taps, kernels, out=taps)
            self._add(torch.sum, taps, 2, out=sums)
        if mixer.bias is not None:
            sums.copy_(mixer.bias)
            if lags:
                self._add(sums.add_, mixer.bias.detach())
        for block in range(config.depth):
            x, out, first = inputs[block], inputs[block + 1], weight[block, :, 0].contiguous()
            if config.block == "residual":
                self._add(torch.addcmul, sums[block], x, first, out=y)
                self._add_activation(config.activation, y)
                self._add(torch.add, x, y, out=out)
                continue
            self._add(torch.addcmul, sums[block], x, first, out=out)
            if mixer.gain is not None:
                self._add(y.copy_, out)
                self._add_activation(config.activation, y)
                self._add(out.addcmul_, mixer.gain[block].detach(), y)
        if lags:
            self._add(cells.index_copy_, 0, torch.from_numpy(self._now).flatten(), inputs[:-1].flatten(0, 1))
        mixed = inputs[-1]
        if mixer.omega is not None:
            self._add(mixed.addcmul_, normed, mixer.omega.detach())
        if config.output == "activation":
            self._add_activation(config.activation, mixed)
        return normed, mixed

    def _add_ema(self, mixer: EMA, x: Tensor, hidden: Tensor) -> Tensor:
        coefficients = ema_coefficients(mixer.delta, mixer.alpha, mixer.beta, mixer.gamma)
        drive, decay, readout = (part[0] for part in coefficients)
        product, mixed = torch.zeros_like(hidden), self._empty(*x.shape)
        self._add(hidden.mul_, decay)
        self._add(hidden.addcmul_, drive, x.unsqueeze(2))
        self._add(torch.mul, hidden, readout, out=product)
        self._add(lambda: mixed.copy_(product.sum(2)))
        self._add(mixed.addcmul_, x, mixer.omega.detach())
        if mixer.config.output == "activation":
            self._add_activation("silu", mixed)
        return mixed

    def _add_norm(self, norm: nn.Module | None, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = self._empty(*x.shape) if out is None else out
        shape = x.shape[1:]
        weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
        if isinstance(norm, LayerNorm):
            self._add(lambda: out.copy_(torch.layer_norm(x, shape, weight, bias, EPS)))
        elif isinstance(norm, RMSNorm):
            scale = None if weight is None else weight.detach().expand(shape).contiguous()
            self._add(lambda: out.copy_(torch.rms_norm(x, shape, scale, EPS)))
        else:
            assert isinstance(norm, BatchNorm)
            scale = torch.rsqrt(norm.running_var + EPS) * (1.0 if weight is None else weight)
            shift = (0.0 if bias is None else bias) - norm.running_mean * scale
            self._add(lambda: out.copy_(torch.addcmul(shift, x, scale)))
        return out

    def _add_activation(self, name: str, x: Tensor) -> None:
        """Apply a function in place."""
        function = activation(name)
        if name == "silu":
            self._add(F.silu, x, inplace=True)
        elif name != "none":
            self._add(lambda: x.copy_(function(x)))

    def _add_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool = False
    ) -> None:
        """Write the product with a matrix `[outputs, inputs]` and a bias to `out`, or add it to what is there."""
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if self.quantization == "int8":
            levels, scale = quantize_rows(weight)
            if weight.shape[1] % INT8_INPUTS == 0 and has_int8_product():
                self._add_int8(x, levels, scale, bias, out, accumulate)
                return
            weight = (levels * scale.unsqueeze(1)).to(self.dtype)
        if self.dtype in (torch.bfloat16, torch.float16):
            write = out.add_ if accumulate else out.copy_
            self._add(lambda: write(F.linear(x, weight, bias)))
            return
        groups = math.gcd(weight.shape[0], GROUPS)
        matrices = weight.contiguous().unflatten(0, (groups, -1))
        # One row as a matrix of columns would have a leading dimension of 1, with which products are slow.
        x = x.flatten().unsqueeze(0) if self.batch == 1 else x
        columns, y = x.t().expand(groups, -1, -1), out.t().unflatten(0, (groups, -1))
        if accumulate:
            if bias is not None:
                self._add(out.add_, bias)
            self._add(y.baddbmm_, matrices, columns)
        elif bias is None:
            self._add(torch.bmm, matrices, columns, out=y)
        else:
            self._add(torch.baddbmm, bias.view(groups, -1, 1), matrices, columns, out=y)

    def _add_int8(
        self, x: Tensor, levels: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool
    ) -> None:
        scale = scale.bfloat16()

        def product() -> Tensor:
            return torch._weight_int8pack_mm(x.to(torch.bfloat16).contiguous(), levels, scale)

        if bias is not None and accumulate:
            self._add(out.add_, bias)
        if accumulate:
            self._add(lambda: out.add_(product()))
        elif bias is not None:
            self._add(lambda: torch.add(bias, product(), out=out))
        else:
            self._add(lambda: out.copy_(product()))


@functools.cache
def has_int8_product() -> bool:
    """Whether this version of PyTorch multiplies by int8 matrices on this CPU, an operator without a public name."""
    x, levels, scale = torch.ones(1, 32), torch.ones(32, 32, dtype=torch.int8), torch.ones(32)
    try:
        y = torch._weight_int8pack_mm(x.bfloat16(), levels, scale.bfloat16())
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool((y == 32).all())
