"""Endless streams: a model reads values as they come, and answers as it goes, in memory that does not grow."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.files import atomic_path
from tcnca.generation.prompts import piece_length
from tcnca.models import ModelState, Predictions, SequenceModel, evaluating
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.prediction import PaddedRows, check_language_model, class_names, to_numpy, to_sequence
from tcnca.models.preprocessing import to_bytes
from tcnca.ops import State

Bits = NDArray[np.float64]

_NEWLINE = 10
"""The first byte of a text is predicted from this one, as in evaluation."""


@dataclasses.dataclass(frozen=True)
class StreamState(State):
    """Where a stream is.

    model: the state of the model; None before the first value.
    logits: `[1, vocab_size]` of the next token, of a language model that has read one.
    position: `[1]`, values read so far.
    weights: digest of the weights that the state was computed with.
    """

    model: ModelState | None
    logits: Tensor | None
    position: Tensor
    weights: str


class Stream:
    """Reads one endless sequence, value by value or in pieces of any size, and answers after each piece.

    Memory does not grow with the number of values, except with full attention. The pieces do not matter, up to
    rounding. A stream that was saved continues in another process exactly as it would have here.

    Args:
        model: a causal model of one document; it runs in evaluation mode.
        state: where to continue, from `Stream.state`.

    Attributes:
        position: number of values that were read.
    """

    def __init__(self, model: SequenceModel, state: StreamState | None = None) -> None:
        if not model.streams:
            kind, advice = "reads pairs", "train one of single sequences"
            if model.config.head.documents == 1:
                kind, advice = (
                    "is bidirectional",
                    "train with `causal=true`, such as `tcnca train classify causal=true`",
                )
            raise InputError(f"model: expected a causal model of single sequences, got one that {kind}; {advice}")
        self.model = model
        self._classes = None if model.config.head.generates else class_names(model)
        self.reset()
        if state is not None:
            self._restore(state)

    def reset(self) -> None:
        """Start a new sequence."""
        self.position = 0
        self._state: ModelState | None = None
        self._logits: Tensor | None = None

    def push(self, values: Any) -> Predictions:
        """Read the next values, and return what the model answers.

        Values that the model cannot take are refused before any of them is read.

        Args:
            values: one value; any number of them, `[time]` or `[time, features]`; or a text, for a model of text.

        Returns:
            The predictions of a model with an output at every time step, `[time, …]`, such as the next value of a
            forecast; or of all values so far, `[1, …]`, if the model pools them, in the units of the data. Of a
            language model, `bits` has those of each token that was pushed, given all before it, and `probabilities`
            those of the next token, `[1, vocab_size]`, or of the next byte, `[1, 256]`, if the model reads bytes.
        """
        if self.model.config.head.generates:
            bits = self.score(values)
            assert self._logits is not None
            return Predictions(bits=bits, probabilities=self._by_byte(self._logits.softmax(-1)))
        x = self._to_tensor(values)
        if not x.shape[1]:
            raise InputError("values: expected at least one value, got none")
        outputs: list[Tensor] = []
        for piece, logits in self._read(x):
            outputs = [*outputs, logits[0]] if logits.dim() == 3 else [logits]
            self.position += piece.shape[1]
        answer = torch.cat(outputs).float()
        if self._classes is None:
            return Predictions(values=answer.cpu().numpy())
        labels = [self._classes[index] for index in answer.argmax(-1).tolist()]
        return Predictions(classes=self._classes, labels=labels, probabilities=answer.softmax(-1).cpu().numpy())

    def score(self, values: Any) -> Bits:
        """Read the next tokens or text with a language model, and return the bits of each token, given all before it.

        The mean over a text is its bits per byte, that of `tcnca eval` with one segment.
        """
        check_language_model(self.model)
        tokens = self._to_tensor(values)
        if self._logits is None:
            tokens = torch.cat([self._first_token(tokens.device), tokens], 1)
        bits = [np.zeros(0)]
        for piece, logits in self._read(tokens):
            predicted, targets = logits[0, :-1].float(), piece[0]
            if self._logits is None:
                targets = targets[1:]
            else:
                predicted = torch.cat([self._logits, predicted])
            nats = F.cross_entropy(predicted, targets, reduction="none")
            bits.append(nats.cpu().double().numpy() / math.log(2))
            self._logits = logits[:, -1].float().clone()
            self.position += len(targets)
        return np.concatenate(bits)

    def state(self) -> StreamState:
        """Return where the stream is, as a copy."""
        return StreamState(
            None if self._state is None else self._state.clone(),
            None if self._logits is None else self._logits.clone(),
            torch.tensor([self.position]),
            self._digest,
        )

    def save(self, path: str | Path) -> None:
        """Write the stream to a safetensors file, completely or not at all."""
        with atomic_path(Path(path)) as temporary:
            self.state().save(temporary)

    @classmethod
    def load(cls, model: SequenceModel, path: str | Path) -> Stream:
        """Continue a stream that `save` wrote, with the model that it was saved with."""
        return cls(model, StreamState.load(path))

    def _restore(self, state: StreamState) -> None:
        if state.weights != self._digest:
            raise StateError(
                "state: expected one of this model, got one of a model with other weights; start a new one"
            )
        if state.batch_size != 1:
            raise StateError(f"state: expected one sequence, got {state.batch_size}")
        expected = self.model.initial_state(1).signature
        if state.model is not None and state.model.signature != expected:
            raise StateError(
                f"state: expected one of {expected}, got one of {state.model.signature}; set its chunk size first"
            )
        vocab_size, generates = self.model.embedding.weight.shape[0], self.model.config.head.generates
        shape = None if state.logits is None else list(state.logits.shape)
        if shape != ([1, vocab_size] if generates and state.model is not None else None):
            raise StateError(f"state.logits: expected shape {[1, vocab_size]} of a language model only, got {shape}")
        state = state.to(self.model.embedding.weight.device)
        self.position, self._state = int(state.position[0]), state.model
        # A file may have any dtype.
        self._logits = None if state.logits is None else state.logits.float()

    @functools.cached_property
    def _digest(self) -> str:
        """Of all weights, computed once: a watch saves its stream every few seconds."""
        found = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            found.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()[:16]

    def _to_tensor(self, values: Any) -> Tensor:
        """Return tokens `[1, time]` or values `[1, time, features]`; raise an InputError if one does not fit."""
        sequence = self._to_sequence(values)
        x, _ = PaddedRows(self.model, [sequence], [0], lambda row: "values").pad(0, len(sequence))
        return x

    def _to_sequence(self, values: Any) -> NDArray[Any]:
        input = self.model.config.input
        if isinstance(values, str | bytes | bytearray | memoryview):
            data = to_bytes(values, "values")
            if isinstance(input, TokenInputConfig) and self.model.preprocessing.symbols is None:
                return self.model.preprocessing.encode_bytes(data, self.position).numpy()
            return to_sequence(self.model, data, "values")
        array = to_numpy(values)
        several = isinstance(input, ValueInputConfig) and input.features > 1
        return to_sequence(
            self.model, array[None] if array.ndim == 0 or (several and array.ndim == 1) else array, "values"
        )

    def _read(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of `x` (`[1, time, …]`) that end with whole chunks of the attention, and their logits."""
        width, begin = piece_length(self.model, 1), 0
        while begin < x.shape[1]:
            # A language model has read a token before the first value.
            end = begin + width - (self.position + (self._logits is not None)) % width
            piece = x[:, begin:end]
            with torch.no_grad(), evaluating(self.model):
                logits, self._state = self.model(piece, state=self._state, inplace=self._state is not None)
            yield piece, logits
            begin = end

    def _first_token(self, device: torch.device) -> Tensor:
        """Return the token that the first one is predicted from, `[1, 1]`."""
        known = self.model.preprocessing.byte_map or ()
        return torch.tensor([[known.index(_NEWLINE) if _NEWLINE in known else 0]], device=device)

    def _by_byte(self, probabilities: Tensor) -> NDArray[np.float32]:
        """Return the probabilities of tokens by byte, if the model reads bytes."""
        found, known = probabilities.cpu().numpy(), self.model.preprocessing.byte_map
        if known is None:
            return found
        by_byte = np.zeros((1, 256), np.float32)
        by_byte[:, list(known)] = found[:, : len(known)]
        return by_byte
