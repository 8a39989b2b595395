"""The model: an input, a stack of layers, a head. One family, whose members differ in their configuration."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tcnca.config import LayerCount, closest
from tcnca.errors import InputError, StateError
from tcnca.layers import Dropout, Layer, LayerConfig, LayerState, make_norm
from tcnca.models.heads import HeadConfig, LanguageModelHeadConfig, PoolState
from tcnca.models.inputs import InputConfig, TokenInputConfig
from tcnca.models.packing import Lengths, Packing, make_packing
from tcnca.models.prediction import Predictions, predict
from tcnca.models.preprocessing import Preprocessing
from tcnca.ops import NGramState, State, autocasts, check_values, current_context, length_mask, zero_padding
from tcnca.ops.state import MAX_POSITION

_LARGE_STATE = 2**30
"""Bytes of a state above which they are compared with the memory of the device."""

P = ParamSpec("P")
R = TypeVar("R")


def suggest_arguments(names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to answer unknown arguments; `names` are those of other libraries, with what to use."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    answer = names.get(name) or closest(name, known) or f"one of {', '.join(known)}"
                    raise InputError(f"{name}: no such argument; use {answer}")
            return function(*args, **kwargs)

        return call

    return decorate


class ModelConfig(LayerConfig):
    """A stack of layers between an input and a head.

    | model | mixer | attention | gated |
    |---|---|---|---|
    | TCNCA | TCNConfig, residual | AttentionConfig | yes |
    | TCNCA-linear | TCNConfig, linear | AttentionConfig | yes |
    | TCNCA-simple | TCNConfig, residual | AttentionConfig | no |
    | MEGA | EMAConfig | AttentionConfig | yes |
    | TCN-MLP | TCNConfig, residual | None | no |
    | EMA-MLP | EMAConfig | None | no |
    | S4D, S5, LRU | S4DConfig, S5Config, LRUConfig, `d_ff=0` | None | no |
    | SGConv | SGConvConfig, `d_ff=0` | None | no |
    | CDIL-CNN | CDILConfig, `num_layers=1`, `d_ff=0`, `norm="none"`, `causal=False` | None | no |
    | Transformer | None | AttentionConfig, several heads, no chunks | no |
    | Transformer-XL | None | AttentionConfig, several heads, memory | no |
    """

    num_layers: LayerCount = 4
    """Number of layers."""
    input: InputConfig = TokenInputConfig()
    """What the model reads."""
    head: HeadConfig = LanguageModelHeadConfig()
    """What the model predicts."""
    final_norm_affine: bool = True
    """Whether the norm after the last layer, which pre-norm models have, has learned scales."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.check_model(self.input, self.causal)


@dataclasses.dataclass(frozen=True)
class ModelState(State):
    """The streaming state of a causal model.

    Attributes:
        layers: one state for each layer.
        pool: the state of the head, if it pools over time.
        signature: the structure of the model that the state belongs to.
        input: the state of the input, if it has embeddings of n-grams.
    """

    layers: tuple[LayerState, ...]
    pool: PoolState | None
    signature: str
    input: NGramState | None = None


class ModelOutput(NamedTuple):
    """What a model returns.

    Attributes:
        logits: `[batch, time, vocab_size]` of a language model, `[batch, num_classes]` of a classifier, the values
            `[batch, outputs]` of a regression; with pooling `none` `[batch, time, …]`. Zeros at padding.
        state: the state of a causal model after these tokens; None if it was not requested or there is none.
    """

    logits: Tensor
    state: ModelState | None


# Without a name for it, an exported program cannot be saved.
pytree._register_namedtuple(ModelOutput, serialized_type_name="tcnca.ModelOutput")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The size and cost of a model."""

    parameters: int
    """Number of parameters."""
    receptive_field: int | None
    """Inputs that an output of a layer depends on at most, by its mixer and its attention; None if without limit."""
    state_bytes: int | None
    """Bytes of the streaming state of one sequence; None if the model does not stream."""
    macs: int
    """Multiply-accumulate operations for one token, on average."""


class SequenceModel(nn.Module):
    """A model of the family: TCNCA, TCNCA-simple, MEGA, TCN-MLP, EMA-MLP, Transformer, depending on its configuration.

    Args:
        config: the structure.
        preprocessing: facts about the data. The model standardizes real-valued inputs with them and returns values in
            the units of the data; they are saved with the model.
    """

    def __init__(self, config: ModelConfig, preprocessing: Preprocessing | None = None) -> None:
        super().__init__()
        self.config = config
        self.preprocessing = preprocessing or Preprocessing()
        width = config.d_model
        self.embedding = config.input.build(width, config.norm, self.preprocessing)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, width, config.final_norm_affine) if config.prenorm else None
        self.head = config.head.build(width, config.input, self.preprocessing)
        self._describe()

    @property
    def streams(self) -> bool:
        """Whether the model has a state: it is causal and reads one document."""
        return self.config.causal and self.config.head.documents == 1

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, if they are known."""
        return self.preprocessing.class_names

    def encode(self, text: str | bytes) -> Tensor:
        """Return the tokens `[1, time]` of a text, on the device of the model."""
        return self.preprocessing.encode(text).unsqueeze(0).to(self.embedding.weight.device)

    def decode(self, tokens: Tensor) -> bytes:
        """Return the text of tokens `[time]` or `[1, time]`."""
        return self.preprocessing.decode(tokens)

    def predict(self, inputs: Any, second: Any = None, *, steps: int = 1, batch_size: int | None = None) -> Predictions:
        """Return what the model answers on raw inputs: classes and their probabilities, values, or forecasts.

        The model applies what it was saved with: class names, vocabulary, standardization, greatest length. It runs in
        evaluation mode, without gradients, on its own device, in batches of similar lengths.

        Args:
            inputs: texts; or an array or tensor of sequences, `[sequences, time]` or `[sequences, time, features]`; or
                a list of arrays of different lengths, `[time]` or `[time, features]`. A single text, an array `[time]`
                and, for several features, an array `[time, features]` are one sequence.
            second: the second texts of pairs.
            steps: for a forecast, the number of time steps; each is predicted from those before it.
            batch_size: sequences that are computed at once; by default depending on their lengths.
        """
        return predict(self, inputs, second, steps=steps, batch_size=batch_size)

    def reset_parameters(self) -> None:
        """Initialize all parameters, for example after a model built on the `meta` device was given memory."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def set_chunk_size(self, chunk_size: int | None) -> SequenceModel:
        """Change the chunk size of the attention, for example to evaluate with longer chunks; None for no chunks.

        A `simple` position bias must cover it (see `AttentionConfig.max_length`). Earlier states no longer fit.
        Returns the model itself.
        """
        if self.config.attention is None:
            raise InputError("chunk_size: expected a model with attention, got one without")
        for layer in self._layers():
            if layer.block.attention is not None:
                layer.block.attention.set_chunk_size(chunk_size)
                self.config = dataclasses.replace(self.config, attention=layer.block.attention.config)
        self._describe()
        return self

    def initial_state(self, batch: int) -> ModelState:
        """Return the state of `batch` sequences before their first token; `forward` takes None for the same."""
        self._check_streams()
        if batch < 1:
            raise StateError(f"batch: expected at least 1, got {batch}")
        self._check_state_size(batch)
        pool = self.head.initial_state(batch, self.embedding.weight)
        layers = tuple(layer.initial_state(batch) for layer in self._layers())
        return ModelState(layers, pool, self._signature, self.embedding.initial_state(batch))

    @suggest_arguments(
        {
            "input_ids": "x",
            "inputs": "x",
            "inputs_embeds": "x",
            "input_values": "x",
            "tokens": "x",
            "mask": "attention_mask",
            "src_key_padding_mask": "attention_mask, true for valid tokens",
            "key_padding_mask": "attention_mask, true for valid tokens",
            "past_key_values": "state",
            "cache_params": "state",
            "use_cache": "return_state",
            "labels": "torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()) on its logits",
            "targets": "torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()) on its logits",
        }
    )
    def forward(
        self,
        x: Tensor,
        second: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        lengths2: Lengths | None = None,
        attention_mask: Tensor | None = None,
        attention_mask2: Tensor | None = None,
        cu_seqlens: Lengths | None = None,
        max_seqlen: int | None = None,
        state: ModelState | None = None,
        return_state: bool | None = None,
        inplace: bool = False,
    ) -> ModelOutput:
        """Run the model on `x`.

        Training, prefill and generation use this function: a sequence can be passed in one call or in any number of
        calls, each with the state that the previous one returned.

        Args:
            x: tokens `[batch, time]`, or real values `[batch, time, features]` (`[batch, time]` for one feature).
            second: the second document of a pair, like `x`.
            lengths: `[batch]`, valid tokens of each row; the rest is padding.
            attention_mask: `[batch, time]`, true for valid tokens; padding can be anywhere in the row.
            lengths2: `lengths` of `second`.
            attention_mask2: `attention_mask` of `second`.
            cu_seqlens: `[documents + 1]`: `x` is one row of documents, document `i` from `cu_seqlens[i]` to
                `cu_seqlens[i + 1]`. Each is a separate sequence, also in the state. The cost is that of as many rows of
                the longest document: pack documents of similar lengths.
            max_seqlen: length of the longest document; avoids a synchronization, and `torch.compile` requires it.
            state: the state after the preceding tokens; None at the start of the sequence.
            return_state: whether to return the new state; by default if the model streams. Training without carried
                states is faster with False.
            inplace: whether the memory of `state` may be reused, which makes single steps cheap. `state` cannot be used
                again, which is an error, but not detected inside `torch.compile`.

        Returns:
            The logits and the new state.
        """
        if return_state is None:
            return_state = self.streams
        self._check_documents(second, lengths2 is not None or attention_mask2 is not None)
        if return_state or state is not None:
            self._check_streams()
        features, packing, states, tokens = self._encode(
            "x", x, lengths, attention_mask, cu_seqlens, max_seqlen, state, return_state, inplace
        )
        pooled, pool = self.head.pool(features, packing.lengths, None if state is None else state.pool, return_state)
        if second is not None:
            features, other, *_ = self._encode(
                "second", second, lengths2, attention_mask2, None, None, None, False, False
            )
            if features.shape[0] != pooled.shape[0]:
                raise InputError(f"second: expected a batch of {pooled.shape[0]}, like x, got {features.shape[0]}")
            pooled = self.head.combine(pooled, self.head.pool(features, other.lengths, None, False)[0])
        logits = self.head(pooled, packing, x.shape[1], self.embedding.weight)
        new = ModelState(states, pool, self._signature, tokens) if return_state else None
        if new is not None and not torch.compiler.is_compiling():
            # Its parts need no check when it comes back; a copy, or what is read from a file, has another identity.
            object.__setattr__(new, "_made_as", id(new))
        return ModelOutput(logits, new)

    def _encode(
        self,
        name: str,
        x: Tensor,
        lengths: Lengths | None,
        attention_mask: Tensor | None,
        cu_seqlens: Lengths | None,
        max_seqlen: int | None,
        state: ModelState | None,
        return_state: bool,
        inplace: bool,
    ) -> tuple[Tensor, Packing, tuple[LayerState, ...], NGramState | None]:
        """Return the features of right-padded rows, zero at padding, their packing and the new states.

        Those of the layers are first, that of the input is last.
        """
        self.embedding.check_shape(name, x)
        x = x if x.is_floating_point() else x.long()  # narrow types lack operations, and bounds may not fit them
        pad_token_id = self.embedding.pad_token_id
        if pad_token_id is not None and lengths is None and attention_mask is None and cu_seqlens is None:
            attention_mask = x != pad_token_id
        context = current_context()
        if context is not None:
            context.check_time(x.shape[1], x.device)
        packing = make_packing(x, lengths, attention_mask, cu_seqlens, max_seqlen, "2" if name == "second" else "")
        rows, valid = packing.rows(x), packing.lengths
        if state is not None:
            self._check_state(state, rows)
        elif return_state and not torch.compiler.is_compiling():
            self._check_state_size(rows.shape[0])
        if valid is not None:
            # Padding may hold anything, also NaN or tokens outside the vocabulary.
            mask = length_mask(valid, rows.shape[1])
            rows = rows.masked_fill(~(mask if rows.dim() == 2 else mask.unsqueeze(-1)), 0)
        self.embedding.check_values(name, rows)
        last = None if state is None else state.input
        h = zero_padding(self.dropout(self.embedding(rows, valid, last)), valid)
        tokens = self.embedding.next_state(rows, valid, last) if return_state else None
        if inplace and state is not None and not torch.compiler.is_compiling():
            state.consume()  # before the layers: a failing call leaves it partly overwritten
        states = []
        for index, layer in enumerate(self.layers):
            before = None if state is None else state.layers[index]
            h, new = layer(h, lengths=valid, state=before, return_state=return_state, inplace=inplace)
            states.append(new)
        h = h if self.norm is None else self.norm(h, valid)
        return zero_padding(h, valid), packing, tuple(states), tokens

    def macs_per_token(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token of a sequence of `length`, on average.

        An EMA counts as its recurrence, whatever its backend.
        """
        return sum(layer.macs(length) for layer in self._layers()) + self.head.macs(self.embedding.weight)

    def _layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def _describe(self) -> None:
        """Set what two models must share for one to continue from a state of the other, and an example of a state."""
        config, block = self.config, self._layers()[0].block
        mixer = "no mixer" if block.mixer is None else block.mixer.signature
        attention = "no attention" if block.attention is None else block.attention.signature
        kind = "gated" if config.gated else "residual"
        layers = f"{config.num_layers} {kind} layers of d_model {config.d_model}"
        parts = (layers, mixer, attention, self.head.signature, self.embedding.signature)
        self._signature = ", ".join(part for part in parts if part)
        self._state_bytes = 0
        if self.streams:
            # On the `meta` device a state of any size takes no memory.
            with torch.device("meta") as meta:
                mixer_state = None if config.mixer is None else config.mixer.build(config.d_model).initial_state(1)
                like = torch.empty(1, config.d_model)
            attention_state = None
            if block.attention is not None:
                attention_state = block.attention.initial_state(1, meta, like.dtype)
            layer, pool = LayerState(mixer_state, attention_state), self.head.initial_state(1, like)
            tokens = self.embedding.initial_state(1)
            self._example = ModelState((layer,) * config.num_layers, pool, self._signature, tokens)
            self._example_tensors = self._example.tensors()
            others = sum(0 if part is None else part.nbytes for part in (pool, tokens))
            self._state_bytes = layer.nbytes * config.num_layers + others

    def _check_documents(self, second: Tensor | None, described: bool) -> None:
        """Raise an InputError unless there is a second document for a model of pairs, and for no other."""
        pair = self.config.head.documents == 2
        if pair and second is None:
            raise InputError("second: expected a second document, as this model reads pairs, got None")
        if not pair and second is not None:
            raise InputError("second: expected None, as this model reads single documents, got a tensor")
        if second is None and described:
            raise InputError("lengths2, attention_mask2: expected None without a second document, got one")

    def _check_streams(self) -> None:
        if not self.streams:
            kind = "is bidirectional" if self.config.head.documents == 1 else "reads two documents"
            raise StateError(f"state: expected a causal model of one document, got a model that {kind}")

    def _check_state(self, state: ModelState, rows: Tensor) -> None:
        if not isinstance(state, ModelState):
            raise StateError(f"state: expected a ModelState that this model returned, got a {type(state).__name__}")
        state.check_not_consumed()
        if state.signature != self._signature:
            raise StateError(f"state: expected one of {self._signature}, got one of another model, {state.signature}")
        if not torch.compiler.is_compiling() and getattr(state, "_made_as", None) != id(state):
            self._check_parts(state)
        parts = (state.layers[0], state.pool, state.input)
        tensor = next((tensor for part in parts if part is not None for tensor in part.tensors().values()), None)
        if tensor is None:
            return  # a model of feed-forward nets only has an empty state
        if tensor.shape[0] != rows.shape[0]:
            raise StateError(f"state: expected a batch of {rows.shape[0]}, like x, got {tensor.shape[0]}")
        if tensor.device != rows.device:
            raise StateError(f"state: expected {rows.device}, like x, got {tensor.device}; move it with state.to(…)")
        kept, dtype = _floating_dtype(state.layers[0]), self.embedding.weight.dtype
        if kept is not None and kept != dtype and not autocasts(rows.device):
            raise StateError(f"state: expected {dtype}, like the model, got {kept}; convert it with state.to({dtype})")

    def _check_parts(self, state: ModelState) -> None:
        """Raise a StateError unless all of a state fits, which can come from a file with the right signature."""
        leaves, structure = pytree.tree_flatten(state)
        expected_leaves, expected = pytree.tree_flatten(self._example)
        if structure != expected or [leaf is None for leaf in leaves] != [leaf is None for leaf in expected_leaves]:
            raise StateError("state: expected the parts that a state of this model has, got others")
        tensors = [leaf for leaf in leaves if leaf is not None]
        for (name, like), tensor in zip(self._example_tensors.items(), tensors, strict=True):
            shape = (tensors[0].shape[0], *like.shape[1:])
            # The cache of full attention, whose example is empty, has any size.
            fits = [not size or size == got for size, got in zip(shape, tensor.shape, strict=False)]
            if tensor.dim() != like.dim() or not all(fits):
                raise StateError(f"state.{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
            if tensor.is_floating_point() != like.is_floating_point():
                raise StateError(f"state.{name}: expected {like.dtype}, got {tensor.dtype}")
            if tensor.device != tensors[0].device:
                raise StateError(f"state.{name}: expected one device for all tensors, got {tensor.device}")
            if name == "input.tokens":
                last = len(self.embedding.weight)
                valid = (tensor >= 0) & (tensor <= last)
                check_values(valid, f"state.{name}: expected values from 0 to {last}", tensor, StateError)
            elif not like.is_floating_point():
                valid = (tensor >= 0) & (tensor < MAX_POSITION)
                check_values(valid, f"state.{name}: expected values from 0 to 2^53", tensor, StateError)

    def _check_state_size(self, batch: int) -> None:
        """Raise a StateError if the state of `batch` sequences is larger than the memory of the device."""
        size = batch * self._state_bytes
        if size > _LARGE_STATE and size > (memory := _memory(self.embedding.weight.device)):
            raise StateError(
                f"state: expected at most {memory:,} bytes, the memory of the device, got a model and a batch of "
                f"{batch} that need {size:,}; reduce the receptive field, the truncation or the chunk size, or call "
                "the model with return_state=False"
            )


def _memory(device: torch.device) -> float:
    """Return the bytes of memory of a device; infinity where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return math.inf


def summarize(config: ModelConfig, length: int) -> Summary:
    """Return the size and cost of a model for sequences of `length`, without allocating its weights."""
    with torch.device("meta"):
        model = SequenceModel(config)
    mixer, attention, state_bytes = model._layers()[0].block.mixer, config.attention, None
    field = 1 if mixer is None else mixer.receptive_field
    if attention is not None and field is not None:
        # The last token of a chunk sees the most. A memory is one more chunk, a shifted key that of the token before.
        chunk = attention.chunk_size
        field = None if chunk is None else chunk * (1 + attention.memory) + attention.shift_keys + field - 1
    field = None if field is None else field + model.embedding.past
    if model.streams:
        state_bytes = model.initial_state(1).nbytes
        if attention is not None and attention.chunk_size is None:
            # The cache of full attention starts empty and grows to all keys and values.
            size = model.embedding.weight.element_size()
            state_bytes += config.num_layers * length * (attention.d_key + attention.d_value) * size
    return Summary(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        receptive_field=field,
        state_bytes=state_bytes,
        macs=model.macs_per_token(length),
    )


def _floating_dtype(state: State) -> torch.dtype | None:
    """Return the dtype of a state's first tensor that is kept in the dtype of the model, if there is one."""
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        values = () if state._least_dtype(field.name) is not None else value if isinstance(value, tuple) else (value,)
        for each in values:
            if isinstance(each, Tensor) and each.is_floating_point():
                return each.dtype
            found = _floating_dtype(each) if isinstance(each, State) else None
            if found is not None:
                return found
    return None
