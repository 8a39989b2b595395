"""Language models on bytes: runs of chunks to train on, and the two published ways to evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.data.batch import IGNORE, Batch, tensor
from tcnca.data.rng import CounterRNG
from tcnca.data.sampler import calls, groups, part, places, training_part
from tcnca.data.store import Dataset
from tcnca.data.tasks.task import Task, bits_metric_sums, class_loss
from tcnca.errors import ConfigError, DataError
from tcnca.models.heads import LanguageModelHeadConfig
from tcnca.models.inputs import TokenInputConfig

_NEWLINE = 10
"""What the first byte of a split is predicted from."""


class LanguageTask(Task):
    """Predict the next byte.

    Training: the split is seen as consecutive chunks; a batch holds runs of 2, 3 or 4 of them, all of the same number.
    Three steps in a row have the three numbers in random order, and over an epoch the runs of each number cover the
    split, one after the other, cut at a chunk that changes from epoch to epoch; only those at its two ends overlap the
    next, to fit in.

    Evaluation: calls of `eval_length` bytes. Without `carry_state` each call starts from nothing; with it, the split is cut into
    `segments` equal segments, and inside a segment a call goes on from the state of the one before.
    """

    kind = "language"
    metric = "bits per byte"
    causal = True

    def __init__(
        self,
        data: Dataset,
        *,
        chunk_size: int = 2048,
        chunks_per_row: Sequence[int] = (2, 3, 4),
        eval_length: int = 12_288,
        segments: int = 50,
        carry_state: bool = True,
    ) -> None:
        super().__init__(data)
        for name, value in (
            ("chunk_size", chunk_size),
            ("eval_length", eval_length),
            ("segments", segments),
            ("chunks_per_row", min(chunks_per_row, default=0)),
        ):
            if value < 1:
                raise ConfigError(f"{name}: got {value}, allowed is at least 1")
        self.chunks_per_row = tuple(chunks_per_row)
        # A short text still makes runs of all numbers of chunks, of shorter chunks.
        self.chunk_size = min(chunk_size, (self._bytes("train").size - 1) // (2 * max(chunks_per_row)))
        if self.chunk_size < 1:
            raise DataError(f"{data.name}: the training split has too few bytes, {self._bytes('train').size}")
        self.eval_length, self.segments, self.carry_state = eval_length, segments, carry_state
        symbols = data.manifest.get("symbols")
        self.symbols = np.arange(256) if symbols is None else np.array(symbols)
        self._token = np.full(256, IGNORE, np.int64)
        self._token[self.symbols] = np.arange(len(self.symbols))

    @property
    def input(self) -> TokenInputConfig:
        """A token for each byte value that occurs in the set."""
        return TokenInputConfig(vocab_size=len(self.symbols), scale_embeddings=True)

    @property
    def head(self) -> LanguageModelHeadConfig:
        """Logits of the next token at every time."""
        return LanguageModelHeadConfig()

    def encode(self, text: bytes) -> Tensor:
        """Tokens `[1, time]` of a text."""
        tokens = self._token[np.frombuffer(text, np.uint8)]
        if (tokens == IGNORE).any():
            strange = text[int(np.argmax(tokens == IGNORE))]
            raise DataError(f"{self.name}: the byte {strange:#04x} does not occur in this set and has no token")
        return torch.from_numpy(tokens)[None]

    def decode(self, tokens: Tensor) -> bytes:
        """The text of tokens `[time]`."""
        return self.symbols[tokens.cpu().numpy()].astype(np.uint8).tobytes()

    def batch(self, step: int, size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """Runs of together at most `size` tokens."""
        max_length = max(self.chunks_per_row) * self.chunk_size
        if size < max_length:
            run_of = f"{max(self.chunks_per_row)} chunks of {self.chunk_size}"
            raise ConfigError(f"size: got {size} tokens, allowed is at least {max_length}, a run of {run_of}")
        # Said at the first step, not when the first batch of long runs comes.
        training_part(size // max_length, rank, world_size)
        turn, place = divmod(step, len(self.chunks_per_row))
        run = self.chunks_per_row[CounterRNG(seed, "runs", turn).permutation(len(self.chunks_per_row))[place]]
        rows = size // (run * self.chunk_size)
        begin, end = training_part(rows, rank, world_size)
        width, end_of_split = run * self.chunk_size, self._bytes("train").size - 1
        # Enough for any cut: the first run begins at the beginning or before it, the last one reaches the end.
        total = -(-(end_of_split + width - self.chunk_size) // width)
        numbers = np.arange(turn * rows + begin, turn * rows + end)
        epochs = numbers // total
        # The cut between runs moves by whole chunks from epoch to epoch.
        cut = np.array([CounterRNG(seed, "cut", run, int(epoch)).integers(0, run, 1)[0] for epoch in epochs])
        found = places(seed, total, turn * rows + begin, turn * rows + end, f"runs of {run}")
        begins = np.clip((found * run - cut) * self.chunk_size, 0, end_of_split - width)
        batch = self._windows("train", begins + 1, width)
        return dataclasses.replace(batch, weight=(end - begin) * world_size / rows)

    def eval_batches(self, split: str, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Calls of `eval_length` bytes, at most `size` rows at once; every byte is predicted once."""
        split = self.eval_split(split)
        total = self._bytes(split).size
        if self.carry_state:
            segments = min(self.segments, total)
            bounds = np.arange(segments + 1, dtype=np.int64) * total // segments
            begins, ends = bounds[:-1], bounds[1:]
        else:
            begins = np.arange(0, total, self.eval_length)
            ends = np.minimum(begins + self.eval_length, total)
        for group in groups(len(begins), size):
            together = begins[group : group + size], (ends - begins)[group : group + size]
            first, last = part(len(together[0]), rank, world_size)
            # A process without a row of its own reads one that does not count.
            begin, length = (rows[first:last] if last > first else 0 * rows[:1] for rows in together)
            for offset, width, real in calls(length, int(together[1].max()), self.eval_length):
                yield self._windows(split, begin + offset, width, real, continues=offset > 0)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats."""
        return class_loss(logits, batch.targets)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Bits, and bytes that they stand for."""
        return bits_metric_sums(logits, batch.targets)

    def _bytes(self, split: str) -> NDArray[np.uint8]:
        return np.asarray(self.data.columns(split)["bytes"])

    def _windows(
        self,
        split: str,
        begins: NDArray[np.int64],
        width: int,
        real: NDArray[np.int64] | None = None,
        continues: bool = False,
    ) -> Batch:
        """Rows whose targets are the `width` bytes from `begins`, of which `real` count, and inputs those before."""
        data = self._bytes(split)
        where = begins[:, None] + np.arange(-1, width)
        tokens = self._token[data[np.clip(where, 0, data.size - 1)]]
        tokens[where < 0] = max(self._token[_NEWLINE], 0)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
        lengths = None
        if real is not None and (real < width).any():
            targets[np.arange(width) >= real[:, None]] = IGNORE
            lengths = np.maximum(real, 1)
        return Batch(
            inputs=torch.from_numpy(inputs.copy()),
            targets=torch.from_numpy(targets),
            lengths=tensor(lengths),
            continues=continues,
        )
