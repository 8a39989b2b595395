"""The model: an input, a stack of layers, a head."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tcnca.errors import InputError, StateError
from tcnca.layers import Block, Dropout, LayerState, TCNConfig, make_norm
from tcnca.models.config import ModelConfig
from tcnca.models.heads import LanguageModelHeadConfig, PairHeadConfig, PooledHead, PoolState, VocabularyHead
from tcnca.models.inputs import TokenEmbedding, TokenInputConfig, ValueEmbedding, ValueInputConfig
from tcnca.models.layout import Layout, Lengths, make_layout
from tcnca.ops import State, TCNState, autocasts, length_mask, zero_padding


@dataclasses.dataclass(frozen=True)
class ModelState(State):
    """All that a causal model remembers of the sequences it has read.

    layers: one state a layer.
    pool: what the head remembers, if it pools over time.
    signature: the structure of the model that made it.
    """

    layers: tuple[LayerState, ...]
    pool: PoolState | None
    signature: str


class ModelOutput(NamedTuple):
    """What a model returns.

    logits: `[batch, time, vocab_size]` of a language model, `[batch, num_classes]` of a classifier, the values
        `[batch, outputs]` of a regression; with pooling `none` `[batch, time, …]`. Zeros where a token is padding.
    state: what a causal model remembers after these tokens; None if it was not asked for or there is none.
    """

    logits: Tensor
    state: ModelState | None


# Without a name for it, an exported program cannot be saved.
pytree._register_namedtuple(ModelOutput, serialized_type_name="tcnca.ModelOutput")


class SequenceModel(nn.Module):
    """Any member of the family: TCNCA, TCNCA-simple, MEGA, TCN-MLP, EMA-MLP, by its configuration."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.embedding: TokenEmbedding | ValueEmbedding
        if isinstance(config.input, ValueInputConfig):
            self.embedding = ValueEmbedding(config.input, width, config.norm)
        else:
            self.embedding = TokenEmbedding(config.input, width, config.norm)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config.block()) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, width, config.final_norm_affine) if config.prenorm else None
        self.head: VocabularyHead | PooledHead
        if isinstance(config.head, LanguageModelHeadConfig):
            assert isinstance(config.input, TokenInputConfig)
            self.head = VocabularyHead(config.head, config.input.vocab_size, width)
        else:
            self.head = PooledHead(config.head, width)
        self._signature = _signature(config)

    @property
    def streams(self) -> bool:
        """Whether the model has a state: it is causal and reads one document."""
        return self.config.causal and not isinstance(self.config.head, PairHeadConfig)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, for example after a model built on the `meta` device was given memory."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def set_chunk_size(self, chunk_size: int | None) -> SequenceModel:
        """Attend in chunks of another size from now on, for example longer ones in evaluation; None for all tokens.

        A `simple` position bias must reach that far: `AttentionConfig.max_length` says how far it does. States of the
        old size do not fit any more. Returns the model itself.
        """
        if self.config.attention is None:
            raise InputError("chunk: this model has no attention, so there is nothing to set")
        for block in self._blocks():
            if block.mixing.attention is not None:
                block.mixing.attention.set_chunk_size(chunk_size)
                self.config = dataclasses.replace(self.config, attention=block.mixing.attention.config)
        self._signature = _signature(self.config)
        return self

    def initial_state(self, batch: int) -> ModelState:
        """The state of `batch` sequences before their first token. Passing None to `forward` means the same."""
        if not self.streams:
            raise StateError("state: this model has none, as only causal models of one document stream")
        if batch < 1:
            raise StateError(f"batch: got {batch}, allowed is 1 or more")
        pool = None
        if isinstance(self.head, PooledHead) and self.head.pooling != "none":
            pool = self.head.initial_state(batch, self.embedding.weight)
        return ModelState(tuple(block.initial_state(batch) for block in self._blocks()), pool, self._signature)

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

        Training, prefill and generation are this one function: a sequence may come in one call or in any
        number of calls, each with the state that the one before returned.

        Args:
            x: tokens `[batch, time]`, or real values `[batch, time, features]` (`[batch, time]` for one feature).
            second: the second document of a pair, as `x`.
            lengths: `[batch]`, real tokens in each row; what follows them is padding.
            mask: `[batch, time]`, true for real tokens, anywhere in the row: padding left, right or between.
            lengths2, mask2: the same for `second`.
            cu_seqlens: `[documents + 1]`: `x` is one row of documents, document `i` from `cu_seqlens[i]` to
                `cu_seqlens[i + 1]`. Each is a sequence of its own, also in the state. It costs as much as that many
                rows of the longest document: pack documents of like lengths.
            max_seqlen: the longest document's length; saves reading it off the device, and `torch.compile` needs it.
            state: the state after the tokens before these; None at the start of the sequence.
            return_state: whether to return the new state; by default wherever there is one. Training that does
                not carry it on saves time with False.
            inplace: the given state's memory may be reused, which makes a step cheap. That state is used up: going on
                from it again is an error, except inside `torch.compile`, which cannot tell.

        Returns:
            The logits and the new state.
        """
        if return_state is None:
            return_state = self.streams
        self._check_pair(second, lengths2, attention_mask2, state, return_state)
        features, layout, states = self._encode(
            "x", x, lengths, attention_mask, cu_seqlens, max_seqlen, state, return_state, inplace
        )
        if isinstance(self.head, VocabularyHead):
            logits = self.head(layout.restore(features, x.shape[1]), self.embedding.weight)
            return ModelOutput(logits, ModelState(states, None, self._signature) if return_state else None)
        pooled, pool = self.head.pool(features, layout.lengths, None if state is None else state.pool, return_state)
        if second is not None:
            features, other, _ = self._encode(
                "second", second, lengths2, attention_mask2, None, None, None, False, False
            )
            if features.shape[0] != pooled.shape[0]:
                raise InputError(f"second: got a batch of {features.shape[0]}, allowed is {pooled.shape[0]}, that of x")
            pooled = self.head.combine(pooled, self.head.pool(features, other.lengths, None, False)[0])
        logits = self.head(pooled)
        if self.head.pooling == "none":
            logits = layout.restore(zero_padding(logits, layout.lengths), x.shape[1])
        return ModelOutput(logits, ModelState(states, pool, self._signature) if return_state else None)

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
    ) -> tuple[Tensor, Layout, tuple[LayerState, ...]]:
        """Features of right-padded rows, zero in the padding, with their layout and the layers' new states."""
        self.embedding.check_shape(name, x)
        x = x if x.is_floating_point() else x.long()  # narrow types lack operations, and bounds may not fit them
        padding = getattr(self.config.input, "pad_token_id", None)
        if padding is not None and lengths is None and attention_mask is None and cu_seqlens is None:
            attention_mask = x != padding
        layout = make_layout(x, lengths, attention_mask, cu_seqlens, max_seqlen, "2" if name == "second" else "")
        rows, real = layout.rows(x), layout.lengths
        if state is not None:
            self._check_state(state, rows)
        if real is not None:
            # Whatever the padding holds, NaN or a token of no vocabulary, it is not looked at.
            rows = rows.masked_fill(~_real(real, rows), 0)
        if isinstance(self.embedding, TokenEmbedding):
            self.embedding.check_tokens(name, rows)
        h = zero_padding(self.dropout(self.embedding(rows, real)), real)
        if inplace and state is not None and not torch.compiler.is_compiling():
            state.consume()  # before the layers: one that fails leaves it half written
        states = []
        for index, layer in enumerate(self.layers):
            before = None if state is None else state.layers[index]
            h, new = layer(h, lengths=real, state=before, return_state=return_state, inplace=inplace)
            states.append(new)
        h = h if self.norm is None else self.norm(h, real)
        return zero_padding(h, real), layout, tuple(states)

    def macs_per_token(self, length: int) -> int:
        """Multiplications and additions to read one token of a sequence of `length`, counted in pairs, on average.

        An EMA counts as its recurrence, whatever way it is computed.
        """
        total = sum(block.macs(length) for block in self._blocks())
        if isinstance(self.head, VocabularyHead):
            total += self.embedding.weight.numel()
        elif self.head.pooling == "none":
            total += sum(module.weight.numel() for module in self.head.modules() if isinstance(module, nn.Linear))
        return total

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    def _check_pair(
        self,
        second: Tensor | None,
        lengths2: Lengths | None,
        attention_mask2: Tensor | None,
        state: ModelState | None,
        return_state: bool,
    ) -> None:
        pair = isinstance(self.config.head, PairHeadConfig)
        if pair and second is None:
            raise InputError("second: got None, allowed is a second document: this model has a two-document head")
        if not pair and second is not None:
            raise InputError("second: got a tensor, allowed is None: this model has no two-document head")
        if second is None and not (lengths2 is None and attention_mask2 is None):
            raise InputError("lengths2, mask2: got one without a second document, allowed is None")
        if not self.streams and (state is not None or return_state):
            kind = "reads two documents" if pair else "is bidirectional"
            raise StateError(
                f"state: asked of a model that {kind}, allowed is None; only causal models of one document stream"
            )

    def _check_state(self, state: ModelState, rows: Tensor) -> None:
        if not isinstance(state, ModelState):
            raise StateError(f"state: got a {type(state).__name__}, allowed is a ModelState, as this model returns")
        state.check_not_consumed()
        if state.signature != self._signature:
            raise StateError(
                f"state: comes from another model: it was made by {state.signature}; allowed is {self._signature}"
            )
        position = _position(state)
        if position is None:
            return  # a model of feed-forward nets alone remembers nothing
        if position.shape[0] != rows.shape[0]:
            raise StateError(f"state: got a batch of {position.shape[0]}, allowed is {rows.shape[0]}, that of x")
        if position.device != rows.device:
            raise StateError(
                f"state: got one on {position.device}, allowed is {rows.device}, where x is; move it with state.to(…)"
            )
        kept, kind = _kept(state), self.embedding.weight.dtype
        if kept is not None and kept.dtype != kind and not autocasts(rows.device):
            raise StateError(
                f"state: got {kept.dtype}, allowed is {kind}, the model's; change it with state.to({kind})"
            )


def _real(lengths: Tensor, rows: Tensor) -> Tensor:
    mask = length_mask(lengths, rows.shape[1])
    return mask if rows.dim() == 2 else mask.unsqueeze(-1)


def _kept(state: ModelState) -> Tensor | None:
    """A tensor that a state keeps in the model's own floating type, if there is one."""
    mixer, attention = state.layers[0].mixer, state.layers[0].attention
    if attention is not None:
        return attention.keys
    return mixer.buffers[0] if isinstance(mixer, TCNState) else None


def _position(state: ModelState) -> Tensor | None:
    for part in (state.layers[0].mixer, state.layers[0].attention, state.pool):
        if part is not None:
            return part.position
    return None


def _signature(config: ModelConfig) -> str:
    """What two models must share for one to go on from the other's state."""
    mixer, attention = config.mixer, config.attention
    mixes, looks = "no mixer", "no attention"
    if isinstance(mixer, TCNConfig):
        names = ("kernel_size", "dilation_factor", "depth", "convolutions")
        mixes = "a TCN of " + ", ".join(f"{name} {getattr(mixer, name)}" for name in names)
    elif mixer is not None:
        mixes = f"an EMA of hidden {mixer.d_state}, truncation {mixer.truncation}"
    if attention is not None:
        looks = (
            f"{attention.activation} attention of chunk {attention.chunk_size}, d_key {attention.d_key}, "
            f"d_value {attention.d_value}, {attention.position} positions"
        )
    joined = "gated" if config.gated else "plain"
    pooling = getattr(config.head, "pooling", "none")
    return f"{config.num_layers} {joined} layers of width {config.d_model}, {mixes}; {looks}; pooling {pooling}"
