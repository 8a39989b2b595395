"""Associative recall: a language model of which only the last answer counts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tcnca.data.batch import IGNORE, Batch
from tcnca.data.columns import Columns
from tcnca.data.generators.generator import Stream
from tcnca.data.store import Dataset
from tcnca.data.tasks.examples import ExampleTask
from tcnca.data.tasks.task import class_loss, class_metric_sums
from tcnca.models.heads import LanguageModelHeadConfig
from tcnca.models.inputs import TokenInputConfig


class RecallTask(ExampleTask):
    """Name the value of the key that is asked last."""

    kind = "classification"
    metric = "accuracy"
    causal = True

    def __init__(self, data: Dataset, *, stream: Stream | None = None) -> None:
        super().__init__(data, stream=stream)

    @property
    def input(self) -> TokenInputConfig:
        """Keys and values."""
        return TokenInputConfig(vocab_size=len(self.data.manifest["symbols"]))

    @property
    def head(self) -> LanguageModelHeadConfig:
        """Logits of the next token; those at the last time are the answer."""
        return LanguageModelHeadConfig(tie_embeddings=False)

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy of the answers."""
        # Only the last time has an answer; the logits of the others need not be looked at.
        return class_loss(logits[:, -1], batch.targets[:, -1])

    def metric_sums(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Right answers and all answers."""
        return class_metric_sums(logits[:, -1], batch.targets[:, -1])

    def _collate(self, columns: Columns, chosen: NDArray[np.int64]) -> Batch:
        tokens = np.asarray(columns["tokens"][chosen], np.int64)  # type: ignore[index]
        targets = np.full_like(tokens, IGNORE)
        targets[:, -1] = columns["labels"][chosen]  # type: ignore[index]
        return Batch(inputs=torch.from_numpy(tokens), targets=torch.from_numpy(targets))
