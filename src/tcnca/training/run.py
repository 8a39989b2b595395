"""A run: a recipe goes in, a model and its score come out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tcnca.data import Batch
from tcnca.data.draw import Draw
from tcnca.data.kinds import Task
from tcnca.errors import CheckpointError, TrainingError
from tcnca.models import SequenceModel
from tcnca.training.checkpoints import Checkpoints, Progress, read_progress
from tcnca.training.evaluate import Score, autocast, evaluate
from tcnca.training.optimiser import build_optimiser, set_rate
from tcnca.training.processes import Processes
from tcnca.training.recipe import Recipe, load_recipe
from tcnca.training.schedule import learning_rate
from tcnca.training.watching import Watch

RECIPE = "recipe.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    step: int
    """Updates done."""
    seconds: float
    """Time spent, over all its parts."""
    stopped: str = ""
    """The signal that stopped it before its end, if one did."""
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    """For each split that was looked at in the end, the score."""


class Run:
    """Trains a model by a recipe, and keeps what it does in a folder."""

    def __init__(
        self, recipe: Recipe, folder: Path, group: Processes, watch: Watch, budget: float | None = None
    ) -> None:
        self.recipe, self.folder, self.group, self.watch, self.budget = recipe, folder, group, watch, budget
        self.task: Task = recipe.build_task()
        torch.manual_seed(recipe.batch.seed)
        self.model = SequenceModel(recipe.model_config(self.task)).to(group.device)
        self.stepper = self._parallel()
        self.optimiser = build_optimiser(self.model, recipe.optimiser)
        self.checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint.keep, group)
        self.progress = Progress(data=self.task.data.digest)

    def resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one."""
        place = self.checkpoints.latest()
        if place is None:
            return
        before = load_recipe(str(self.folder / RECIPE))
        if before != self.recipe:
            changed = [field.name for field in dataclasses.fields(Recipe) if _differs(before, self.recipe, field.name)]
            raise CheckpointError(
                f"{self.folder}: was begun with another recipe, which differs in {', '.join(changed)}; "
                f"give the same changes again, or another --out"
            )
        data = self.progress.data
        self.progress = self.checkpoints.load(place, self.model, self.optimiser)
        if self.progress.data != data:
            raise CheckpointError(f"{self.folder}: was begun with other data than is now in {self.recipe.data.source}")
        self.watch.say(f"going on from update {self.progress.step:,}")

    def train(self) -> Result:
        """Train to the end, or until a signal or the budget stops it."""
        if self.group.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RECIPE).write_text(self.recipe.to_yaml(), encoding="utf-8")
        self.group.wait()
        with _signals() as signals, ThreadPoolExecutor(1) as ahead:
            stopped = self._loop(signals, ahead)
        if stopped:
            return Result(step=self.progress.step, seconds=self.progress.seconds, stopped=stopped)
        splits = [split for split in ("validation", "test") if split in self.task.data.splits]
        scores = {split: self.evaluate(split) for split in splits}
        return Result(step=self.progress.step, seconds=self.progress.seconds, scores=scores)

    def evaluate(self, split: str, batches: int | None = None) -> Score:
        """The score on a split."""
        config, engine = self.recipe.evaluation, self.recipe.engine
        return evaluate(
            self.model,
            self.task,
            split,
            config.size,
            chunk=config.chunk,
            batches=batches,
            precision=engine.precision,
            group=self.group,
        )

    def _loop(self, signals: list[str], ahead: ThreadPoolExecutor) -> str:
        begun, before = time.monotonic(), self.progress.seconds
        saved = time.monotonic()
        meter = _Meter(self.group)
        following = ahead.submit(self._batches, self.progress.step)
        while True:
            seconds = before + time.monotonic() - begun
            # Agreed by all: when to stop, and, with a budget, how much of it is spent.
            agreed = self.group.greatest(torch.tensor([seconds, float(bool(signals))], dtype=torch.float64))
            seconds, interrupted = float(agreed[0]), bool(agreed[1])
            step = self.progress.step
            done = step / self.recipe.schedule.updates if self.budget is None else seconds / self.budget
            over = done >= 1.0
            if over or interrupted or self._due(step, saved):
                meter.check(self.recipe, self.checkpoints)
                self._save(seconds)
                saved = time.monotonic()
            if over or interrupted:
                return "" if over else (signals[0] if signals else "another process")
            rate = learning_rate(done, self.recipe.optimiser.learning_rate, self.recipe.schedule)
            batches, following = following, ahead.submit(self._batches, step + 1)
            meter.add(step, *self._update(step, rate, batches))
            self.progress = dataclasses.replace(self.progress, step=step + 1, seconds=seconds)
            if (step + 1) % self.recipe.engine.log_every == 0:
                meter.check(self.recipe, self.checkpoints)
                self.watch.log({"step": step + 1, "rate": rate, "seconds": seconds, "done": done, **meter.read()})
            every = self.recipe.evaluation.every
            if every and (step + 1) % every == 0 and step + 1 < self.recipe.schedule.updates:
                # A validation may save the model as the best so far.
                meter.check(self.recipe, self.checkpoints)
                self._validate()

    def _due(self, step: int, saved: float) -> bool:
        config = self.recipe.checkpoint
        by_step = bool(config.every) and step > 0 and step % config.every == 0
        late = self.group.greatest(torch.tensor(time.monotonic() - saved))
        return by_step or bool(config.minutes and float(late) > 60 * config.minutes)

    def _save(self, seconds: float) -> Path:
        self.progress = dataclasses.replace(self.progress, seconds=seconds)
        latest = self.checkpoints.latest()
        if latest is not None and read_progress(latest).step == self.progress.step:
            return latest
        return self.checkpoints.save(self.model, self.optimiser, self.progress)

    def _validate(self) -> None:
        score = self.evaluate("validation", self.recipe.evaluation.batches)
        self.progress = dataclasses.replace(self.progress, score=score.value)
        found = {"split": "validation", "metric": score.metric, "score": score.value}
        self.watch.log({"step": self.progress.step, **found})
        best = self.checkpoints.best_score()
        if best is None or (score.value > best if self.task.higher_is_better else score.value < best):
            self.checkpoints.mark_best(self._save(self.progress.seconds), score.value)

    def _batches(self, step: int) -> list[Batch]:
        """This process's part of an update, in as many pieces as it is to be read in."""
        config, pieces = self.recipe.batch, self.recipe.batch.accumulate
        parts = []
        for piece in range(pieces):
            rank = self.group.rank * pieces + piece
            batch = self.task.batch(step, config.size, config.seed, rank, self.group.world * pieces)
            parts.append(batch.pin_memory() if self.group.device.type == "cuda" else batch)
        return parts

    def _update(self, step: int, rate: float, batches: Future[list[Batch]]) -> tuple[Tensor, Tensor, int]:
        """One step of the optimiser. Returns the loss, the norm of the gradient, and how many tokens were read."""
        parts = batches.result()
        total, tokens = torch.zeros((), device=self.group.device), 0
        for piece, host in enumerate(parts):
            batch = host.to(self.group.device, non_blocking=True)
            # Dropout, too, is a function of seed and step: a run that is resumed drops what it would have dropped.
            torch.manual_seed(int(Draw(self.recipe.batch.seed, "dropout", step, self.group.rank, piece).raw(1)[0] >> 1))
            with _synchronised(self.stepper, piece == len(parts) - 1), autocast(*self._arithmetic()):
                logits = self.stepper(**batch.arguments(), return_state=False).logits
                loss = self.task.loss(logits, batch) * batch.weight / len(parts)
            loss.backward()
            total, tokens = total + loss.detach(), tokens + batch.tokens
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimiser.clip or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        finite = torch.isfinite(norm) & torch.isfinite(total)
        if self.recipe.optimiser.nonfinite == "stop" or bool(self.group.greatest((~finite).float()) == 0):
            set_rate(self.optimiser, rate)
            self.optimiser.step()
        else:
            total, norm = torch.zeros_like(total), torch.zeros_like(norm)
        self.optimiser.zero_grad(set_to_none=True)
        return total, norm, tokens

    def _arithmetic(self) -> tuple[torch.device, Any]:
        return self.group.device, self.recipe.engine.precision

    def _parallel(self) -> nn.Module:
        engine = self.recipe.engine
        if engine.recompute:
            for layer in self.model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        stepper: nn.Module = self.model
        if engine.compile:
            # Layer by layer: they are alike, so the code of one serves all. For each shape anew: code for shapes left
            # open is slower, and some of it cannot be generated at all.
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        if self.group.world > 1 and engine.parallel == "fsdp":
            mesh = init_device_mesh(self.group.device.type, (self.group.world,))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        if self.group.world > 1 and engine.parallel == "ddp":
            stepper = DistributedDataParallel(stepper)
        return stepper


class _Meter:
    """Adds up what updates give without waiting for the device to finish them."""

    def __init__(self, group: Processes) -> None:
        self.group = group
        self.bad = torch.full((), -1, dtype=torch.int64, device=group.device)
        self._clear()

    def _clear(self) -> None:
        self.loss = torch.zeros((), device=self.group.device)
        self.norm = torch.zeros((), device=self.group.device)
        self.updates, self.tokens, self.begun = 0, 0, time.monotonic()

    def add(self, step: int, loss: Tensor, norm: Tensor, tokens: int) -> None:
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        self.bad = torch.where((self.bad < 0) & ~finite, step, self.bad)
        self.loss, self.norm = self.loss + loss, self.norm + norm
        self.updates, self.tokens = self.updates + 1, self.tokens + tokens

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
        seconds = max(time.monotonic() - self.begun, 1e-9)
        sums = torch.stack([self.loss.double(), torch.tensor(float(self.tokens), device=self.group.device).double()])
        loss, tokens = self.group.total(sums).tolist()
        found = {
            "loss": loss / self.group.world / max(self.updates, 1),
            "norm": float(self.norm) / max(self.updates, 1),
            "tokens_per_second": tokens / seconds,
        }
        if self.group.device.type == "cuda":
            found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._clear()
        return found


@contextlib.contextmanager
def _synchronised(stepper: nn.Module, last: bool) -> Iterator[None]:
    """Let processes exchange gradients once an update, after its last piece."""
    if isinstance(stepper, DistributedDataParallel) and not last:
        with stepper.no_sync():
            yield
        return
    if isinstance(stepper, FSDPModule):
        stepper.set_requires_gradient_sync(last)
    yield


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """Collect the signals that ask a run to stop, for it to do so between two updates."""
    caught: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _differs(one: Recipe, other: Recipe, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))
