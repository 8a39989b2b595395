"""One token of a language model in few PyTorch operators, for CPUs, where most of a small step is overhead.

All sequences of the batch must be at the same position: ring buffers and the chunk are then read by slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.layers import EMA, TCN, ChunkedAttention
from tcnca.layers.block import GatedBlock, Layer, ResidualBlock
from tcnca.layers.norm import EPS, BatchNorm, LayerNorm, weight_norm
from tcnca.models import ModelState, SequenceModel
from tcnca.models.heads import LanguageModelHead
from tcnca.models.inputs import TokenEmbedding
from tcnca.ops import AttentionState, EMAState, TCNState, activation, rotary_bias, rotate
from tcnca.ops.ema.naive import ema_coefficients

Part = Callable[[Tensor], Tensor]


class PackedStep:
    """Maps the tokens `[batch]` to the logits of the next ones, `[batch, vocab_size]`.

    Args:
        model: a language model that `unsupported_reason` accepts.
        state: the state after the preceding tokens, which is copied.
    """

    @torch.no_grad()
    def __init__(self, model: SequenceModel, state: ModelState) -> None:
        assert isinstance(model.embedding, TokenEmbedding) and isinstance(model.head, LanguageModelHead)
        self.model, self.batch, self.dtype = model, state.batch_size, model.embedding.weight.dtype
        layer = state.layers[0]
        part: Any = layer.mixer if layer.attention is None else layer.attention
        self.position = int(part.position[0])
        self._table, self._scale = model.embedding.weight.detach(), model.embedding.scale
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        self._head, self._norm = head.detach(), _norm(model.norm)
        self._slots = self._tcn_slots(layer.mixer)
        self._parts = [self._copy(each) for each in state.layers]
        self._layers = [self._build_layer(each, parts) for each, parts in zip(model.layers, self._parts, strict=True)]

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """Take a step."""
        x = F.embedding(token, self._table)
        x = x * self._scale if self._scale != 1.0 else x
        if self._slots is not None:
            offsets, starts, sizes = self._slots
            now = self.position % sizes
            self._now = starts + now
            self._past = (starts.unsqueeze(1) + (now.unsqueeze(1) - offsets) % sizes.unsqueeze(1)).flatten()
        for layer in self._layers:
            x = layer(x)
        self.position += 1
        return F.linear(self._norm(x), self._head)

    def state(self) -> ModelState:
        """Return the state after the last token, as a copy."""
        template = self.model.initial_state(self.batch)
        position = torch.full((self.batch,), self.position, dtype=torch.long)
        layers = []
        for layer, parts in zip(template.layers, self._parts, strict=True):
            mixer: Any = layer.mixer
            if isinstance(mixer, TCNState):
                sizes = [buffer.shape[1] for buffer in mixer.buffers]
                mixer = TCNState(tuple(part.clone() for part in parts["ring"].split(sizes, 1)), position.clone())
            elif isinstance(mixer, EMAState):
                mixer = EMAState(parts["hidden"].clone(), None, position.clone())
            attention = layer.attention
            if attention is not None:
                attention = AttentionState(parts["keys"].clone(), parts["values"].clone(), position.clone())
            layers.append(type(layer)(mixer, attention))
        return ModelState(tuple(layers), None, template.signature)

    def _tcn_slots(self, state: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the lags of the taps, the first slot and the size of each ring, if the mixer is a TCN."""
        if not isinstance(state, TCNState):
            return None
        sizes = torch.tensor([buffer.shape[1] for buffer in state.buffers])
        config: Any = self.model.config.mixer
        dilations = sizes // max(config.kernel_size - 1, 1)
        lags = dilations.unsqueeze(1) * torch.arange(1, config.kernel_size)
        return lags, sizes.cumsum(0) - sizes, sizes

    @staticmethod
    def _copy(state: Any) -> dict[str, Tensor]:
        parts = {}
        if isinstance(state.mixer, TCNState):
            parts["ring"] = torch.cat(list(state.mixer.buffers), 1)
        elif isinstance(state.mixer, EMAState):
            parts["hidden"] = state.mixer.hidden.clone()
        if state.attention is not None:
            parts["keys"], parts["values"] = state.attention.keys.clone(), state.attention.values.clone()
        return parts

    # The parts of a layer.

    def _build_layer(self, layer: nn.Module, parts: dict[str, Tensor]) -> Part:
        assert isinstance(layer, Layer)
        block = layer.block
        mix: Part = _identity
        if isinstance(block.mixer, TCN):
            mix = self._build_tcn(block.mixer, parts["ring"])
        elif isinstance(block.mixer, EMA):
            mix = self._build_ema(block.mixer, parts["hidden"])
        if isinstance(block, GatedBlock):
            run = self._build_gated(block, mix, parts)
        else:
            run = self._build_residual(block, mix, parts)
        net = layer.feed_forward
        if net is None:
            return run
        norm, act = _norm(net.norm), net.activation
        up, down = _linear(net.up), _linear(net.down)
        return lambda x: (y := run(x)) + down(act(up(norm(y))))

    def _build_gated(self, block: GatedBlock, mix: Part, parts: dict[str, Tensor]) -> Part:
        norm, act, widths = _norm(block.norm), block.activation, list(block.widths)
        values, gates, output = _linear(block.values), _linear(block.gates), _linear(block.output)
        attend = self._build_attention(block.attention, parts)
        gamma, beta = block.gamma.detach(), block.beta.detach()
        update, key, reset, _ = widths
        smooth = [update, key + reset, update]

        def run(x: Tensor) -> Tensor:
            normed = norm(x)
            u, zeta_r, h = gates(mix(normed)).split(smooth, -1)
            zeta, r = F.silu(zeta_r).split([key, reset], -1)
            # Queries and keys together, `[batch, 2, d_key]`.
            both = torch.addcmul(beta, zeta.unsqueeze(1), gamma)
            attended = attend(both, act(values(normed)))
            return torch.lerp(x, act(h + output(attended * r)), torch.sigmoid(u))

        return run

    def _build_residual(self, block: ResidualBlock, mix: Part, parts: dict[str, Tensor]) -> Part:
        mixer_norm = None if block.mixer_norm is None else _norm(block.mixer_norm)
        if block.attention is None:
            return (lambda x: x + mix(mixer_norm(x))) if mixer_norm is not None else _identity
        attention_norm, project, output = _norm(block.attention_norm), _linear(block.projection), _linear(block.output)
        attend = self._build_attention(block.attention, parts)
        d_key = block.widths[0]

        def run(x: Tensor) -> Tensor:
            x = x if mixer_norm is None else x + mix(mixer_norm(x))
            both, v = project(attention_norm(x)).split([2 * d_key, block.widths[2]], -1)
            return x + output(attend(both.unflatten(-1, (2, d_key)), v))

        return run

    def _build_attention(
        self, attention: ChunkedAttention, parts: dict[str, Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        keys, values, config = parts["keys"], parts["values"], attention.config
        chunk, factor = keys.shape[1], config.d_key**-0.5
        bias: Tensor | None = None
        if config.position == "rotary":
            bias = rotary_bias(attention.alpha, attention.beta, chunk)
        elif config.position == "simple":
            bias = attention.bias.detach()
        reach = 0 if bias is None else (len(bias) + 1) // 2
        rope = config.position == "rope"

        def attend(both: Tensor, v: Tensor) -> Tensor:
            slot = self.position % chunk
            if rope:
                both = rotate(both, torch.tensor([slot, slot]))
            keys[:, slot] = both[:, 1]
            values[:, slot] = v
            scores = torch.bmm(both[:, :1] * factor, keys[:, : slot + 1].transpose(1, 2))
            if bias is not None:
                scores = scores + bias[reach - 1 - slot : reach]
            return torch.bmm(scores.softmax(-1), values[:, : slot + 1]).squeeze(1)

        return attend

    def _build_tcn(self, mixer: TCN, ring: Tensor) -> Part:
        config = mixer.config
        weight = (mixer.weight if mixer.scale is None else weight_norm(mixer.weight, mixer.scale))[:, 0].detach()
        first = list(weight[:, :, 0].unbind(0))
        rest = weight[:, :, 1:].transpose(1, 2).flatten(0, 1).contiguous()
        bias = None if mixer.bias is None else mixer.bias[:, 0].detach()
        gain = None if mixer.gain is None else list(mixer.gain[:, 0].detach().unbind(0))
        omega = None if mixer.omega is None else mixer.omega.detach()
        act, residual, depth, lags = (
            activation(config.activation),
            config.block == "residual",
            config.depth,
            config.kernel_size - 1,
        )

        def mix(x: Tensor) -> Tensor:
            taps = ring.index_select(1, self._past) * rest
            past = taps.view(self.batch, depth, lags, -1).sum(2)
            past = past if bias is None else past + bias
            h, inputs = x, []
            for block, sums in enumerate(past.unbind(1)):
                inputs.append(h)
                y = torch.addcmul(sums, h, first[block])
                if residual:
                    y = h + act(y)
                elif gain is not None:
                    y = torch.addcmul(y, gain[block], act(y))
                h = y
            if lags:
                ring.index_copy_(1, self._now, torch.stack(inputs, 1))
            y = h if omega is None else torch.addcmul(h, x, omega)
            return act(y) if config.output == "activation" else y

        return mix

    def _build_ema(self, mixer: EMA, hidden: Tensor) -> Part:
        coefficients = ema_coefficients(mixer.delta, mixer.alpha, mixer.beta, mixer.gamma)
        drive, decay, readout = (part[0].detach() for part in coefficients)
        omega, active = mixer.omega.detach(), mixer.config.output == "activation"

        def mix(x: Tensor) -> Tensor:
            hidden.mul_(decay).addcmul_(drive, x.unsqueeze(-1))
            y = torch.addcmul((hidden * readout).sum(-1).to(x.dtype), x, omega)
            return F.silu(y) if active else y

        return mix


def _identity(x: Tensor) -> Tensor:
    return x


def _linear(layer: nn.Linear) -> Part:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    return lambda x: F.linear(x, weight, bias)


def _norm(norm: nn.Module | None) -> Part:
    if norm is None:
        return _identity
    if isinstance(norm, LayerNorm):
        shape, weight, bias = norm.normalized_shape, norm.weight, norm.bias
        return lambda x: F.layer_norm(x, shape, weight, bias, EPS)
    if isinstance(norm, BatchNorm):
        return lambda x: norm(x.unsqueeze(1)).squeeze(1)
    return norm
