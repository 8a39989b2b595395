"""The numbers of a run, added up without waiting for the device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tcnca.errors import TrainingError
from tcnca.training.checkpoints import Checkpoints
from tcnca.training.processes import Processes
from tcnca.training.recipe import Recipe


class Update(NamedTuple):
    """What one update gives."""

    loss: Tensor
    norm: Tensor
    """Of the gradient."""
    tokens: int
    """Read by this process."""
    waited: float
    """Seconds that it waited for its data."""
    skipped: bool
    """Whether the optimiser was spared numbers that are not finite."""


class Meter:
    """Adds up what updates give; only reading it waits for the device to finish them."""

    def __init__(self, group: Processes) -> None:
        self.group = group
        self.bad = torch.full((), -1, dtype=torch.int64, device=group.device)
        self._clear()

    def _clear(self) -> None:
        self.loss = torch.zeros((), device=self.group.device)
        self.norm = torch.zeros((), device=self.group.device)
        self.updates, self.skipped, self.tokens, self.waited, self.begun = 0, 0, 0, 0.0, time.monotonic()

    def add(self, step: int, update: Update) -> None:
        """Take note of an update."""
        self.updates, self.tokens, self.waited = (
            self.updates + 1,
            self.tokens + update.tokens,
            self.waited + update.waited,
        )
        if update.skipped:
            self.skipped += 1
            return
        finite = torch.isfinite(update.loss) & torch.isfinite(update.norm)
        self.bad = torch.where((self.bad < 0) & ~finite, step, self.bad)
        self.loss, self.norm = self.loss + update.loss, self.norm + update.norm

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out time that is not spent on updates."""
        begun = time.monotonic()
        yield
        self.begun += time.monotonic() - begun

    def check(self, recipe: Recipe, checkpoints: Checkpoints) -> None:
        """Stop a run whose numbers are no numbers any more."""
        bad = int(self.group.greatest(self.bad.double()))
        if bad >= 0 and recipe.optimiser.nonfinite == "stop":
            latest = checkpoints.latest()
            good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
            raise TrainingError(
                f"update {bad}: the loss or the gradient is not finite (batch of seed {recipe.batch.seed}, step "
                f"{bad}); {good}. Lower learning_rate or clip, or go on without such updates with nonfinite=skip"
            )

    def read(self) -> dict[str, float]:
        """Means since the last reading."""
        sums = torch.stack([self.loss.double(), torch.tensor(float(self.tokens), device=self.group.device).double()])
        loss, tokens = self.group.total(sums).tolist()
        seconds = max(time.monotonic() - self.begun, 1e-9)
        counted = self.updates - self.skipped
        found = {
            "loss": loss / self.group.world / counted if counted else math.nan,
            "norm": float(self.norm) / counted if counted else math.nan,
            **({"skipped": self.skipped} if self.skipped else {}),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "waited": self.waited / seconds,
        }
        if self.group.device.type == "cuda":
            found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._clear()
        return found
