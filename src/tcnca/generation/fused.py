"""One token of a language model in a few kernels a layer, as one CUDA graph."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tcnca.generation import step
from tcnca.generation.sampling import Sampler
from tcnca.generation.step import norm_parameters
from tcnca.layers import EMA, TCN, ChunkedAttention
from tcnca.layers.attention import QK_EPS
from tcnca.layers.block import GatedBlock, Layer, ResidualBlock
from tcnca.layers.norm import EPS, weight_norm
from tcnca.models import ModelState, SequenceModel
from tcnca.models.heads import LanguageModelHead
from tcnca.models.inputs import TokenEmbedding
from tcnca.ops import TCNState, rotary_bias
from tcnca.ops.dispatch import INTERPRETED, KERNEL_DTYPES, kernels_enabled, should_use
from tcnca.ops.driver import PROGRAMMATIC_CAPABILITY, capture_graph, current_stream, max_shared_memory
from tcnca.ops.ema.naive import ema_coefficients
from tcnca.ops.ngrams import HASH_PRIME, hash_factors
from tcnca.ops.quantize import quantize_rows

if TYPE_CHECKING:
    from tcnca.ops.launcher import Launch

MAX_WIDTH = 4096
"""Widest input that a program normalizes."""
DOT_ROWS = 5
"""Rows from which matrix products run on the tensor cores."""
TILE = 4096
"""Weights that a program without tensor cores holds."""
MAX_PROGRAMMATIC_ROWS = 8
"""Rows up to which kernels start early: with more, those that wait take the place of those that run."""
SECTOR = 32
"""Bytes of the values that lie together in the cache: what a GPU reads at once."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs convert 8-bit floats."""


def unsupported_reason(model: SequenceModel, state: ModelState, cache_dtype: str | None = None) -> str | None:
    """Return what the kernels cannot run, or None if they can run the model."""
    weight, config = model.embedding.weight, model.config
    if weight.dtype not in KERNEL_DTYPES:
        return f"dtype: expected float32, bfloat16 or float16, got {weight.dtype}"
    if max(config.d_model, config.d_ff, config.attention.d_value if config.attention else 0) > MAX_WIDTH:
        return f"d_model: expected widths of at most {MAX_WIDTH}"
    if not INTERPRETED and not (weight.is_cuda and kernels_enabled() and should_use("triton", weight.device, "a step")):
        return "device: expected an NVIDIA GPU and Triton"
    if not INTERPRETED and _tile_bytes(model, state) > max_shared_memory(weight.device.index):
        return f"d_model: expected less than {config.d_model} for {state.batch_size} sequences in {weight.dtype}"
    if (
        cache_dtype is not None
        and weight.is_cuda
        and torch.cuda.get_device_capability(weight.device) < FLOAT8_CAPABILITY
    ):
        return "cache_dtype: expected a GPU that converts 8-bit floats (compute capability 8.9), got an older one"
    return step.unsupported_reason(model, state)


def _tile_bytes(model: SequenceModel, state: ModelState) -> int:
    """Return how much shared memory the product of a normalized input takes at most, which it holds as a whole.

    By what Triton takes for widths from 512 to 4096: 192 bytes a channel in float32, 32 to 64 in half precision.
    """
    if state.batch_size < DOT_ROWS:
        return 0
    return (192 if model.embedding.weight.dtype == torch.float32 else 64) * _power(model.config.d_model)


class FusedStep(step.Step):
    """A step for NVIDIA GPUs. The weights are read when it is built.

    Args:
        model: a language model that `unsupported_reason` accepts.
        state: the state after the preceding tokens, which is copied.
        sampler: chooses the tokens of `next`, in the same graph.
        quantization: `int8` to round the weights of matrix products to 8 bits, with a factor for each output.
        cache_dtype: `float8` to round the values of the attention to 8 bits.
        programmatic: whether kernels start before the preceding one ends; by default where that is faster.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: SequenceModel,
        state: ModelState,
        sampler: Sampler | None = None,
        *,
        quantization: step.Quantization | None = None,
        cache_dtype: step.CacheDtype | None = None,
        programmatic: bool | None = None,
    ) -> None:
        super().__init__(sampler)
        weight = model.embedding.weight
        self.model, self.batch, self.device, self.dtype = model, state.batch_size, weight.device, weight.dtype
        self._shared_memory = max_shared_memory((self.device.index or 0) if weight.is_cuda else None)
        self.quantization = quantization
        self.cache_dtype = self.dtype if cache_dtype is None else torch.float8_e4m3fn
        if programmatic is None:
            capable = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= PROGRAMMATIC_CAPABILITY
            programmatic = capable and self.batch <= MAX_PROGRAMMATIC_ROWS
        self.programmatic = programmatic and not INTERPRETED
        self.token = torch.zeros(self.batch, dtype=torch.long, device=self.device) if sampler is None else sampler.token
        self._launches: list[tuple[Launch, list[Tensor]]] = []
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        # Positions when the step was built or a row was loaded, less the steps before that.
        self._positions, self._steps = step.positions(state), 0
        self._build(state)

    def __call__(self, token: Tensor) -> Tensor:
        """Take a step."""
        self.token.copy_(token)
        self._replay(sampled=False)
        return self.logits

    def next(self) -> Tensor:
        """Take a step with the last tokens of the sampler, and return its next ones, `[batch]`."""
        assert self.sampler is not None
        if not self.sampler.fused:
            return super().next()
        self.sampler.prepare()
        self._replay(sampled=True)
        return self.token.clone()

    def state(self) -> ModelState:
        """Return the state after the last token, as a copy."""
        layers = [dict(parts) for parts in self._parts]
        for parts in layers:
            if "values" in parts:
                parts["values"] = parts["values"].to(self.dtype).transpose(1, 2).flatten(2)
        return step.pack(self.model, layers, self._positions + self._steps, self._tokens)

    def load(self, row: int, state: ModelState) -> None:
        """Continue one row from another state, of batch size 1."""
        for parts, new in zip(self._parts, step.unpack(state), strict=True):
            for name, part in new.items():
                if name == "values":
                    part = self._in_panels(part, parts[name].shape[3])
                parts[name][row].copy_(part[0])
        position = step.positions(state)
        self.slots[row] = (position % self._sizes).to(torch.int32)
        self._positions[row] = position[0] - self._steps
        if self._tokens is not None and state.input is not None:
            self._tokens[row].copy_(state.input.tokens[0])

    def _replay(self, sampled: bool) -> None:
        if self.token.is_cuda:
            if sampled not in self._graphs:
                self._capture(sampled)
            self._graphs[sampled].replay()
        else:
            self._run(sampled)
        self._steps += 1

    def _run(self, sampled: bool) -> None:
        stream = 0 if INTERPRETED else current_stream(self.device.index or 0)
        for launch, tensors in self._launches:
            launch(stream, *tensors)
        if sampled:
            assert self.sampler is not None
            self.sampler.launch(self.logits)

    def _capture(self, sampled: bool) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with capture_graph(stream, error_mode="thread_local") as graph:
                self._run(sampled)
            torch.cuda.current_stream().wait_stream(stream)
            self._graphs[sampled] = graph

    # The kernels of a step, in order.

    def _add(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: list[Tensor],
        numbers: tuple[int | float, ...] = (),
        warps: int = 4,
        stages: int = 3,
        **constants: Any,
    ) -> None:
        from tcnca.ops.launcher import ALIGNMENT, Launch

        launch = Launch(
            kernel,
            grid,
            tuple(tensor.dtype for tensor in tensors),
            numbers,
            {**constants, "PDL": self.programmatic},
            device=None if self.device.type == "cpu" else self.device.index or 0,
            num_warps=warps,
            num_stages=stages,
            stride_divisor=1 if all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors) else None,
            programmatic=self.programmatic,
        )
        self._launches.append((launch, tensors))

    def _build(self, state: ModelState) -> None:
        from tcnca.ops.decoding import kernels

        model, config, batch = self.model, self.model.config, self.batch
        assert isinstance(model.embedding, TokenEmbedding)
        assert isinstance(model.head, LanguageModelHead)
        width = config.d_model
        self.x, self.spare, self.normed, self.mixed = (self._empty(width) for _ in range(4))
        self.hidden = self._empty(max(config.d_ff, 1))
        self._sizes = sizes = self._slot_sizes(state)
        self.slots = (self._positions.unsqueeze(1) % sizes).to(torch.int32).contiguous()
        self.blocks = len(sizes) - 1
        chunk = 1 if config.attention is None else config.attention.chunk_size or 1
        self.scores = torch.empty(batch, chunk, device=self.device)
        table = model.embedding.weight
        self._tokens = None if state.input is None else state.input.tokens.clone()
        self._add_embedding(kernels, model.embedding)
        self._parts = step.unpack(state)
        for layer, parts in zip(model.layers, self._parts, strict=True):
            assert isinstance(layer, Layer)
            self._add_layer(kernels, layer, parts)
        head = table if model.head.weight is None else model.head.weight
        self.logits = torch.empty(batch, head.shape[0], device=self.device, dtype=self.dtype)
        self._add_linear(kernels, self.x, head, None, self.logits, norm=model.norm)
        self._add(
            kernels.advance_slots,
            (batch, 1),
            [self.slots, sizes],
            warps=1,
            COUNT=len(sizes),
            COLUMNS=_power(len(sizes)),
        )

    def _add_embedding(self, kernels: Any, embedding: TokenEmbedding) -> None:
        sizes, buckets = embedding.ngram_sizes, embedding.ngram_buckets
        # Without n-grams these are never read.
        ngram_weight, tokens, factors, first = embedding.weight, self.token, self.token, self.token
        if embedding.ngram_weight is not None:
            assert self._tokens is not None
            places = {size: index * buckets for index, size in enumerate(sizes)}
            ngram_weight, tokens = embedding.ngram_weight, self._tokens
            factors = torch.tensor(hash_factors(sizes), device=self.device)
            first = torch.tensor([places.get(size, -1) for size in range(1, max(sizes) + 1)], device=self.device)
        self._add(
            kernels.embed,
            (self.batch, 1),
            [self.token, embedding.weight, ngram_weight, tokens, factors, first, self.x],
            (float(embedding.scale),),
            WIDTH=self.model.config.d_model,
            COLUMNS=_power(self.model.config.d_model),
            PAST=max(sizes, default=1) - 1,
            PAST_COLUMNS=_power(max(sizes, default=1)),
            BUCKETS=buckets,
            PRIME=HASH_PRIME,
        )

    def _add_layer(self, kernels: Any, layer: Layer, parts: step.Parts) -> None:
        block = layer.block
        gated = isinstance(block, GatedBlock)
        mixed = self.mixed if gated else self.spare
        norm = block.norm if isinstance(block, GatedBlock) else block.mixer_norm
        if isinstance(block.mixer, TCN):
            self._add_tcn(kernels, block.mixer, norm, parts["ring"], mixed, add=not gated)
        elif isinstance(block.mixer, EMA):
            parts["hidden"] = parts["hidden"].float().contiguous()
            self._add_ema(kernels, block.mixer, norm, parts["hidden"], mixed, add=not gated)
        if not gated:
            self.x, self.spare = self.spare, self.x
        if block.attention is not None:
            panel = math.gcd(block.attention.config.d_value, SECTOR // self.cache_dtype.itemsize)
            parts["keys"] = parts["keys"].contiguous()
            parts["values"] = self._in_panels(parts["values"], panel)
            if "last_key" in parts:
                parts["last_key"] = parts["last_key"].contiguous()
            self._add_attention(kernels, block, parts["keys"], parts["values"], parts.get("last_key"))
        net = layer.feed_forward
        if net is not None:
            name = self.model.config.activation
            self._add_linear(kernels, self.x, net.up.weight, net.up.bias, self.hidden, "activation", name, net.norm)
            self._add_linear(kernels, self.hidden, net.down.weight, net.down.bias, self.x, "add")

    def _add_tcn(
        self, kernels: Any, mixer: TCN, norm: nn.Module | None, ring: Tensor, mixed: Tensor, add: bool
    ) -> None:
        config, width, channels = mixer.config, mixer.d_model, 16 if self.batch < 16 else 32
        weight = mixer.weight if mixer.scale is None else weight_norm(mixer.weight, mixer.scale)
        norm_kind, *factors = norm_parameters(norm, width, self.device)
        # Absent parameters are never read.
        optional = [weight if each is None else each for each in (mixer.bias, mixer.gain, mixer.omega)]
        self._add(
            kernels.mix_tcn,
            (self.batch, -(-width // channels)),
            [
                self.x,
                *factors,
                ring,
                weight[:, 0].transpose(1, 2).contiguous(),
                *(each.detach().contiguous() for each in optional),
                self.slots,
                self.normed,
                mixed,
            ],
            (EPS,),
            warps=1,
            WIDTH=width,
            COLUMNS=_power(width),
            CHANNELS=channels,
            DEPTH=config.depth,
            KERNEL=config.kernel_size,
            PAST=_power(max(config.kernel_size - 1, 1)),
            FACTOR=config.dilation_factor,
            NORM=norm_kind,
            BIAS=mixer.bias is not None,
            BLOCK=config.block,
            OUTPUT=config.output,
            ACTIVATION=config.activation,
            ADD=add,
        )

    def _add_ema(
        self, kernels: Any, mixer: EMA, norm: nn.Module | None, hidden: Tensor, mixed: Tensor, add: bool
    ) -> None:
        width, states, channels = mixer.d_model, mixer.config.d_state, 16 if self.batch < 16 else 32
        coefficients = ema_coefficients(mixer.delta, mixer.alpha, mixer.beta, mixer.gamma)
        norm_kind, *factors = norm_parameters(norm, width, self.device)
        self._add(
            kernels.mix_ema,
            (self.batch, -(-width // channels)),
            [
                self.x,
                *factors,
                hidden,
                *(part[0].float().contiguous() for part in coefficients),
                mixer.omega.detach(),
                self.normed,
                mixed,
            ],
            (EPS,),
            warps=1,
            WIDTH=width,
            COLUMNS=_power(width),
            CHANNELS=channels,
            STATES=states,
            STATE_COLUMNS=_power(states),
            NORM=norm_kind,
            ACTIVATION="silu" if mixer.config.output == "activation" else "none",
            ADD=add,
        )

    def _add_attention(
        self, kernels: Any, block: GatedBlock | ResidualBlock, keys: Tensor, values: Tensor, last_key: Tensor | None
    ) -> None:
        attention, config = block.attention, self.model.config
        assert isinstance(attention, ChunkedAttention)
        d_key, d_value, width = attention.config.d_key, attention.config.d_value, config.d_model
        gated = isinstance(block, GatedBlock)
        gamma, beta, query, key = keys, keys, 0, d_key
        if isinstance(block, GatedBlock):
            weight = torch.cat([block.values.weight, block.gates.weight])
            bias = torch.cat([block.values.bias, block.gates.bias])
            inputs, norm, outputs = (self.normed, self.mixed), None, 2 * width + d_key + d_value
            gamma, beta, query, key = block.gamma.detach(), block.beta.detach(), width, width
        else:
            q, v = block.projection.weight.split([2 * d_key, d_value])
            weight = torch.cat([v, q])
            bias = torch.cat(list(reversed(block.projection.bias.split([2 * d_key, d_value]))))
            inputs, norm, outputs = (self.x, self.x), block.attention_norm, 2 * d_key
        gates = self._empty(outputs)
        self._add_linear(
            kernels,
            inputs[0],
            weight,
            bias,
            gates,
            "gates",
            config.activation if gated else "none",
            norm,
            second=inputs[1],
            cache=values,
            VALUES=d_value,
            OPEN=width if gated else 0,
            SMOOTH=width + d_key + d_value if gated else 0,
        )
        chunk, panel, many = keys.shape[1], values.shape[3], self.batch >= 16
        places = min(128 if many else 16, _power(chunk))
        position = attention.config.position
        if position == "rotary":
            offsets = rotary_bias(attention.alpha, attention.beta, chunk)
        else:
            offsets = attention.bias.detach() if position == "simple" else keys
        scale = keys if attention.qk_scale is None else attention.qk_scale.detach()
        self._add(
            kernels.score,
            (self.batch, -(-chunk // places)),
            [
                gates[:, query:],
                gates[:, key:],
                gamma,
                beta,
                keys,
                keys if last_key is None else last_key,
                offsets,
                scale,
                self.slots,
                self.scores,
            ],
            ((len(offsets) + 1) // 2, gates.shape[1], d_key**-0.5),
            warps=8 if many else 2,
            KEY=d_key,
            KEY_COLUMNS=_power(d_key),
            CHUNK=chunk,
            BLOCKS=self.blocks,
            PLACES=places,
            ROTATED=attention.config.rope_width,
            BIAS=position in ("simple", "rotary"),
            AFFINE=gated,
            NORM_EPS=None if attention.qk_scale is None else QK_EPS,
            SHIFT=last_key is not None,
        )
        attended = self._empty(d_value)
        places = min(64 if many else 512, _power(chunk))
        self._add(
            kernels.attend,
            (d_value // panel, self.batch),
            [self.scores, values, gates[:, width + d_key :] if gated else gates, self.slots, attended],
            (gates.shape[1],),
            warps=2 if many else 8,
            VALUES=d_value,
            CHUNK=chunk,
            BLOCKS=self.blocks,
            PANEL=panel,
            PLACES=places,
            GATED=gated,
        )
        epilogue = "blend" if gated else "add"
        output = block.output
        self._add_linear(
            kernels, attended, output.weight, output.bias, self.x, epilogue, config.activation, gates=gates
        )

    def _add_linear(
        self,
        kernels: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        epilogue: str = "none",
        activation: str = "none",
        norm: nn.Module | None = None,
        *,
        second: Tensor | None = None,
        gates: Tensor | None = None,
        cache: Tensor | None = None,
        VALUES: int = 1,  # noqa: N803, a constant of the kernel
        **constants: Any,
    ) -> None:
        outputs, inputs = weight.shape
        dot = self.batch >= DOT_ROWS
        if dot:
            rows, columns = (64, 32) if outputs >= 2048 and norm is None else (16, 32 if outputs >= 1024 else 16)
            step = _power(inputs) if norm is not None else min(128 if rows == 64 else 512, _power(inputs))
            # Of a loop, two steps of both factors are in shared memory. An input that is normalized takes no loop.
            while norm is None and 2 * (rows + columns) * step * self.dtype.itemsize > self._shared_memory:
                step //= 2
            # The least that a matrix product of Triton takes.
            step = max(step, 16)
        else:
            rows, step = 1, _power(inputs)
            columns = max(TILE // step, 1)
        if cache is not None:
            # A program computes values or gates, never both.
            assert bias is not None
            weight, bias = (_pad_rows(part, VALUES, columns) for part in (weight, bias))
        outputs = weight.shape[0]
        weight = scale = weight.detach().contiguous()
        if self.quantization is not None:
            weight, scale = quantize_rows(weight)
        norm_kind, *factors = norm_parameters(norm, self.model.config.d_model, self.device)
        self._add(
            kernels.linear,
            (-(-outputs // columns), -(-self.batch // rows) if dot else 1),
            [
                x,
                x if second is None else second,
                weight,
                scale,
                scale if bias is None else bias.detach().contiguous(),
                *factors,
                out,
                out if gates is None else gates,
                out if cache is None else cache,
                self.slots,
            ],
            (self.batch, EPS),
            IN=inputs,
            OUT=outputs,
            COLUMNS=columns,
            ROWS=rows,
            STEP=step,
            DOT=dot,
            NORM=norm_kind,
            BIAS=bias is not None,
            QUANTIZED=self.quantization is not None,
            VALUES=VALUES,
            PADDED=-(-VALUES // columns) * columns,
            BLOCKS=self.blocks,
            CHUNK=1 if cache is None else cache.shape[2],
            PANEL=1 if cache is None else cache.shape[3],
            GATES=out.shape[1] if gates is None else gates.shape[1],
            EPILOGUE=epilogue,
            ACTIVATION=activation,
            **{"OPEN": 0, "SMOOTH": 0, **constants},
        )

    def _in_panels(self, values: Tensor, panel: int) -> Tensor:
        """Return values `[batch, chunk_size, d_value]` as the cache has them: `[batch, panels, chunk_size, panel]`."""
        if self.cache_dtype != self.dtype:
            # As the kernels do; PyTorch 2.11 turns larger ones into NaN.
            limit = torch.finfo(self.cache_dtype).max
            values = values.clamp(-limit, limit)
        return values.unflatten(2, (-1, panel)).transpose(1, 2).contiguous().to(self.cache_dtype)

    def _empty(self, width: int) -> Tensor:
        return torch.zeros(self.batch, width, device=self.device, dtype=self.dtype)

    def _slot_sizes(self, state: ModelState) -> Tensor:
        """Return after how many tokens each kind of slot repeats: of the attention, and of the blocks of the TCN."""
        attention, mixer = state.layers[0].attention, state.layers[0].mixer
        sizes = [1 if attention is None else attention.keys.shape[1]]
        if isinstance(mixer, TCNState):
            sizes += [max(buffer.shape[1], 1) for buffer in mixer.buffers]
        return torch.tensor(sizes, dtype=torch.int32, device=self.device)


def _pad_rows(rows: Tensor, first: int, multiple: int) -> Tensor:
    """Insert zeros after the `first` rows, up to a multiple of a number."""
    zeros = rows.new_zeros(-first % multiple, *rows.shape[1:])
    return torch.cat([rows[:first], zeros, rows[first:]])


def _power(number: int) -> int:
    """Return the next power of two."""
    return 1 << max(number - 1, 0).bit_length()
