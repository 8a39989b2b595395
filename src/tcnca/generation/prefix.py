"""Prefix cache: prompts that begin like an earlier one continue from its state."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.generation.prompts import piece_length
from tcnca.models import Lengths, ModelState, SequenceModel, evaluating
from tcnca.models.prediction import check_language_model
from tcnca.ops import check_lengths

_MIN_BLOCK = 256
"""Tokens between two states that are kept, at least: pieces should be worth a call of the model."""
_ITEM = 8
"""Bytes of a token."""


class Prefix(NamedTuple):
    """The first `length` tokens of a prompt: the logits after them, `[1, vocab_size]`, and the state."""

    length: int
    logits: Tensor
    state: ModelState

    @property
    def nbytes(self) -> int:
        """Bytes of the logits and the state."""
        return self.state.nbytes + self.logits.numel() * self.logits.element_size()


class PrefixCache:
    """Reads prompts from the longest beginning that it has read before.

    The states at the end of each prompt, and after every `block_size` tokens of it, are kept. The least recently used
    ones are removed when they take more than `max_bytes`. Their size does not depend on the number of tokens, except
    with full attention; for long prompts, larger blocks leave room for more prompts. Results equal those without a
    cache up to rounding, and exactly if the prompt is cut into the same pieces. The cache must be cleared when weights
    of the model change.

    Args:
        model: a language model.
        max_bytes: of all states, on the device of the model.
        block_size: number of tokens; by default whole chunks of the attention, at least 256 tokens.
    """

    def __init__(self, model: SequenceModel, max_bytes: int = 2**30, block_size: int | None = None) -> None:
        check_language_model(model)
        if max_bytes < 0:
            raise InputError(f"max_bytes: expected at least 0, got {max_bytes}")
        if block_size is not None and block_size < 1:
            raise InputError(f"block_size: expected at least 1, or None, got {block_size}")
        attention = model.config.attention
        chunk = 1 if attention is None else attention.chunk_size or 1
        self.model, self.max_bytes = model, max_bytes
        self.block_size = block_size or -(-_MIN_BLOCK // chunk) * chunk
        self.hits = 0
        """Prompts of which a beginning was known."""
        self.misses = 0
        """Prompts that were read from their first token."""
        self.reused_tokens = 0
        """Tokens that did not have to be read."""
        self.nbytes = 0
        """Bytes of all states."""
        # By the hash of the tokens; the last one was used most recently.
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._prefixes)

    def __repr__(self) -> str:
        return f"PrefixCache(states={len(self)}, nbytes={self.nbytes:,}, hits={self.hits}, misses={self.misses})"

    def check_model(self, model: SequenceModel) -> None:
        """Raise an InputError for another model than that of the cache."""
        if self.model is not model:
            raise InputError("prefix_cache: expected one of this model, got one of another model")

    def clear(self) -> None:
        """Remove all states."""
        self._prefixes.clear()
        self._lengths.clear()
        self.nbytes = 0

    @torch.no_grad()
    def prefill(
        self,
        prompt: Tensor,
        lengths: Lengths | None = None,
        on_piece: Callable[[Tensor, Tensor | None], None] | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Read prompts, and return the logits after the last token of each, `[batch, vocab_size]`, and the state.

        The rows are read one after the other, as each begins with another known state.

        Args:
            prompt: `[batch, time]`, whole numbers, at least one token in each row.
            lengths: `[batch]`, valid tokens of each row; the rest is padding.
            on_piece: is called with the prompts, and which of their tokens are valid; None if all are.
        """
        self.model.embedding.check_shape("prompt", prompt)
        valid, padding = None, self.model.embedding.pad_token_id
        if lengths is not None:
            ends = torch.as_tensor(lengths)
            check_lengths(ends, *prompt.shape)
            valid = torch.arange(prompt.shape[1], device=prompt.device) < ends.to(prompt.device).unsqueeze(1)
        elif padding is not None:
            valid = prompt.long() != padding
        rows = prompt.unbind() if valid is None else [row[kept] for row, kept in zip(prompt, valid, strict=True)]
        if any(not len(row) for row in rows):
            raise InputError("prompt: expected at least 1 token in each row, got an empty row")
        with evaluating(self.model):
            read = [deque(self.pieces(row), maxlen=1)[0][1] for row in rows]
        if on_piece is not None:
            on_piece(prompt.long(), valid)
        return torch.cat([prefix.logits for prefix in read]), ModelState.cat([prefix.state for prefix in read])

    def pieces(self, prompt: Tensor, max_tokens: int | None = None) -> Iterator[tuple[int, Prefix]]:
        """Read a prompt `[time]` in pieces of at most `max_tokens` tokens.

        Yields the number of tokens of each piece and what is known after it. A known beginning is a piece of 0 tokens.
        The prefixes belong to the cache; their memory must not be written to. The model must be in evaluation mode.
        """
        width = piece_length(self.model, 1) if max_tokens is None else max_tokens
        tokens = prompt.long()
        data = tokens.cpu().numpy().tobytes()
        prefix = self._find(data)
        begin = 0 if prefix is None else prefix.length
        self.hits += begin > 0
        self.misses += begin == 0
        self.reused_tokens += begin
        if prefix is not None:
            yield 0, prefix
        digest = hashlib.sha256(data[: begin * _ITEM])
        while begin < len(tokens):
            # Up to the next multiple of a piece or of a block, wherever the known beginning ends.
            end = min(len(tokens), *((begin // size + 1) * size for size in (width, self.block_size)))
            prefix = self._read(tokens[begin:end], prefix)
            digest.update(data[begin * _ITEM : end * _ITEM])
            if end % self.block_size == 0 or end == len(tokens):
                self._keep(digest.digest(), prefix)
            yield end - begin, prefix
            begin = end

    @torch.no_grad()
    def _read(self, tokens: Tensor, prefix: Prefix | None) -> Prefix:
        # Without `inplace`, since the state may be kept. The padding token counts as a token here.
        lengths = None if self.model.embedding.pad_token_id is None else [len(tokens)]
        tokens = tokens.unsqueeze(0).to(self.model.embedding.weight.device)
        logits, state = self.model(tokens, lengths=lengths, state=None if prefix is None else prefix.state)
        assert state is not None
        length = tokens.shape[1] + (0 if prefix is None else prefix.length)
        return Prefix(length, logits[:, -1].clone(), state)

    def _find(self, data: bytes) -> Prefix | None:
        """Return the longest known beginning of a prompt."""
        keys, digest, done = [], hashlib.sha256(), 0
        for end in sorted(length * _ITEM for length in self._lengths if length * _ITEM <= len(data)):
            digest.update(data[done:end])
            keys.append(digest.digest())
            done = end
        for key in reversed(keys):
            if key in self._prefixes:
                self._prefixes.move_to_end(key)
                return self._prefixes[key]
        return None

    def _keep(self, key: bytes, prefix: Prefix) -> None:
        if prefix.nbytes > self.max_bytes or key in self._prefixes:
            return
        self._prefixes[key] = prefix
        self._lengths[prefix.length] += 1
        self.nbytes += prefix.nbytes
        while self.nbytes > self.max_bytes:
            _, oldest = self._prefixes.popitem(last=False)
            self.nbytes -= oldest.nbytes
            self._lengths[oldest.length] -= 1
            self._lengths += Counter()  # without those of which there are none
