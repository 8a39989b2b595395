"""Language modeling on bytes: rows of chunks for training, and the two published evaluation protocols."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.config import check_at_least
from tcnca.data.batch import IGNORE, Batch, optional_tensor
from tcnca.data.rng import CounterRNG
from tcnca.data.sampler import batch_starts, eval_windows, rank_range, shuffled_indices, training_rank_range
from tcnca.data.store import Dataset
from tcnca.data.tasks.base import Task, bits_metric_sums, class_loss
from tcnca.errors import ConfigError, DataError
from tcnca.models.heads import LanguageModelHeadConfig
from tcnca.models.inputs import TokenInputConfig
from tcnca.models.preprocessing import Preprocessing

_NEWLINE = 10
"""The first byte of a split is predicted from this one."""


class LanguageTask(Task):
    """Predict the next byte.

    Training: the rows of a batch have 2, 3 or 4 chunks each (`chunks_per_row`), the same number in all rows. Three
    consecutive steps use the three numbers in random order. Over an epoch, the rows of each number of chunks cover the
    split. They are cut from an offset that can be any byte and changes every epoch; only the rows at the two ends of
    the split overlap their neighbors.

    Evaluation: windows of `eval_length` bytes. Without `carry_state` each window starts from an empty state; with it,
    the split is divided into `segments` equal segments, or fewer if they would be shorter than a window, and the state
    is carried from window to window in a segment, so that the score of a large split does not depend on `eval_length`.

    Tokens are the byte values that occur in the data set if it lists them, as EnWik8 does, or with `all_bytes` all 256.
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
        all_bytes: bool = False,
    ) -> None:
        super().__init__(data)
        numbers = {"chunk_size": chunk_size, "eval_length": eval_length, "segments": segments}
        for name, value in {**numbers, "chunks_per_row": min(chunks_per_row, default=0)}.items():
            check_at_least(name, value, 1)
        self.chunks_per_row = tuple(chunks_per_row)
        # Shorten the chunks of a short text, so that rows of every number of chunks fit.
        self.chunk_size = min(chunk_size, (self._bytes("train").size - 1) // (2 * max(chunks_per_row)))
        if self.chunk_size < 1:
            least = 2 * max(chunks_per_row) + 1
            raise DataError(
                f"{data.name}: expected at least {least} bytes in the training split, got {self._bytes('train').size}"
            )
        self.eval_length, self.segments, self.carry_state = eval_length, segments, carry_state
        symbols = None if all_bytes else data.manifest.get("symbols")
        self.symbols = np.arange(256) if symbols is None else np.array(symbols)
        self._token = np.full(256, IGNORE, np.int64)
        self._token[self.symbols] = np.arange(len(self.symbols))

    @property
    def input(self) -> TokenInputConfig:
        """A token for each byte value."""
        return TokenInputConfig(vocab_size=len(self.symbols), scale_embeddings=True)

    @property
    def head(self) -> LanguageModelHeadConfig:
        """Logits of the next token at every time step."""
        return LanguageModelHeadConfig()

    def preprocessing(self) -> Preprocessing:
        """Return the byte of each token."""
        return Preprocessing(task=self.kind, byte_map=tuple(self.symbols.tolist()))

    def batch(self, step: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
        """Return rows of at most `batch_size` tokens in total."""
        longest = max(self.chunks_per_row) * self.chunk_size
        if batch_size < longest:
            row = f"a row of {max(self.chunks_per_row)} chunks of {self.chunk_size}"
            raise ConfigError(f"batch_size: expected at least {longest} tokens, {row}, got {batch_size}")
        # Check the longest rows at every step, so that the error occurs at the first one.
        training_rank_range(batch_size // longest, rank, world_size)
        turn, position = divmod(step, len(self.chunks_per_row))
        chunks = self.chunks_per_row[CounterRNG(seed, "runs", turn).permutation(len(self.chunks_per_row))[position]]
        rows = batch_size // (chunks * self.chunk_size)
        begin, end = training_rank_range(rows, rank, world_size)
        width, end_of_split = chunks * self.chunk_size, self._bytes("train").size - 1
        # Enough rows for any offset: the first one starts at or before the beginning, the last one reaches the end.
        total = -(-(end_of_split + width - 1) // width)
        first, last = turn * rows + begin, turn * rows + end
        # The offset of the rows changes every epoch, so that a byte is read after beginnings of any length.
        epochs = np.arange(first, last) // total
        offset = np.array([CounterRNG(seed, "cut", chunks, int(epoch)).integers(0, width, 1)[0] for epoch in epochs])
        indices = shuffled_indices(seed, total, first, last, f"runs of {chunks}")
        begins = np.clip(indices * width - offset, 0, end_of_split - width)
        batch = self._windows("train", begins + 1, width)
        return dataclasses.replace(batch, weight=(end - begin) * world_size / rows)

    def eval_batches(self, split: str, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Read windows of `eval_length` bytes, at most `batch_size` rows at once; every byte is predicted once."""
        split = self.eval_split(split)
        total = self._bytes(split).size
        if self.carry_state:
            segments = max(1, min(self.segments, total // self.eval_length))
            bounds = np.arange(segments + 1, dtype=np.int64) * total // segments
            begins, ends = bounds[:-1], bounds[1:]
        else:
            begins = np.arange(0, total, self.eval_length)
            ends = np.minimum(begins + self.eval_length, total)
        for start in batch_starts(len(begins), batch_size):
            group = begins[start : start + batch_size], (ends - begins)[start : start + batch_size]
            first, last = rank_range(len(group[0]), rank, world_size)
            # A process without rows reads one that is not counted.
            begin, lengths = (rows[first:last] if last > first else 0 * rows[:1] for rows in group)
            for offset, width, valid in eval_windows(lengths, int(group[1].max()), self.eval_length):
                yield self._windows(split, begin + offset, width, valid, continues=offset > 0)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return class_loss(logits, batch.targets)

    def metric_sums(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the number of bits, and of the bytes that they encode."""
        return bits_metric_sums(logits, batch.targets)

    def _bytes(self, split: str) -> NDArray[np.uint8]:
        return np.asarray(self.data.columns(split)["bytes"])

    def _windows(
        self,
        split: str,
        begins: NDArray[np.int64],
        width: int,
        valid: NDArray[np.int64] | None = None,
        continues: bool = False,
    ) -> Batch:
        """Return rows whose targets are the `width` bytes from `begins`, `valid` of them counted."""
        data = self._bytes(split)
        where = begins[:, None] + np.arange(-1, width)
        tokens = self._token[data[np.clip(where, 0, data.size - 1)]]
        tokens[where < 0] = max(self._token[_NEWLINE], 0)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
        lengths = None
        if valid is not None and (valid < width).any():
            targets[np.arange(width) >= valid[:, None]] = IGNORE
            lengths = np.maximum(valid, 1)
        return Batch(
            inputs=torch.from_numpy(inputs.copy()),
            targets=torch.from_numpy(targets),
            lengths=optional_tensor(lengths),
            continues=continues,
        )
