"""The numbers of a run, added up without waiting for the device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
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
    """Whether the optimizer was spared numbers that are not finite."""


class Meter:
    """Adds up what updates give; only reading it waits for the device to finish them."""

    loss: Tensor
    norm: Tensor
    begun: float

    def __init__(self, group: Processes, before: Mapping[str, float] | None = None) -> None:
        """`before` is the `state` of a run that goes on."""
        self.group = group
        self.bad = torch.full((), -1, dtype=torch.int64, device=group.device)
        self._clear()
        if before:
            # The loss and the tokens are sums over all processes, of which the first keeps what was.
            share = float(group.first)
            self.loss, self.norm = self.loss + before["loss"] * share, self.norm + before["norm"]
            self.updates, self.skipped = int(before["updates"]), int(before["skipped"])
            self.tokens, self.begun = int(before["tokens"] * share), self.begun - before["seconds"]

    def state(self) -> dict[str, float]:
        """What was added up since the last reading, for a run that is stopped here and goes on."""
        if not self.updates:
            return {}
        loss, tokens = self._sums()
        seconds = time.monotonic() - self.begun
        counts = {"updates": self.updates, "skipped": self.skipped}
        return {"loss": loss, "norm": float(self.norm), "tokens": tokens, "seconds": seconds, **counts}

    def _sums(self) -> tuple[float, float]:
        sums = torch.stack([self.loss.double(), torch.tensor(float(self.tokens), device=self.group.device).double()])
        loss, tokens = self.group.total(sums).tolist()
        return loss, tokens

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
        if bad >= 0 and recipe.optimizer.nonfinite == "stop":
            latest = checkpoints.latest()
            good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
            raise TrainingError(
                f"update {bad}: the loss or the gradient is not finite (batch of seed {recipe.batch.seed}, step "
                f"{bad}); {good}. Lower lr or clip, or go on without such updates with nonfinite=skip"
            )

    def read(self) -> dict[str, float]:
        """Means since the last reading."""
        loss, tokens = self._sums()
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
