"""A run: a recipe goes in, a model and its score come out."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tcnca.data import Batch
from tcnca.data.rng import CounterRNG
from tcnca.data.tasks import Task
from tcnca.errors import CheckpointError
from tcnca.models import SequenceModel
from tcnca.models.serialization import CONFIG_FILE, WEIGHTS_FILE
from tcnca.training.checkpoints import Checkpoints, Progress, read_progress
from tcnca.training.evaluate import Score, autocast, evaluate
from tcnca.training.files import beside, write_whole
from tcnca.training.meter import Meter, Update
from tcnca.training.optimizer import build_optimizer, set_rate
from tcnca.training.parallel import compiles, parallelize, synchronized
from tcnca.training.processes import Processes
from tcnca.training.recipe import Recipe, differences, load_recipe
from tcnca.training.schedule import scheduled_lr
from tcnca.training.stopping import signals
from tcnca.training.watching import Watch

RECIPE = "recipe.yaml"
_COMPILING = 3
"""Updates for which code is made first: a language model's three lengths of rows."""


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
        if recipe.runtime.threads:
            torch.set_num_threads(recipe.runtime.threads)
        self.task: Task = recipe.build_task()
        torch.manual_seed(recipe.batch.seed)
        self.model = SequenceModel(recipe.model_config(self.task)).to(group.device)
        self.compiled = compiles(recipe.runtime, group.device)
        self.stepper = parallelize(self.model, recipe.runtime, group)
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint.keep, group)
        self.progress = Progress(data=self.task.data.digest)

    def resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one."""
        place = self.checkpoints.latest()
        if place is None:
            return
        before = load_recipe(str(self.folder / RECIPE))
        if before != self.recipe:
            raise CheckpointError(
                f"{self.folder}: was begun with another recipe, which differs in {differences(before, self.recipe)}; "
                f"give the same changes again, or another --out"
            )
        data = self.progress.data
        self.progress = self.checkpoints.load(place, self.model, self.optimizer)
        if self.progress.data != data:
            raise CheckpointError(f"{self.folder}: was begun with other data than is now in {self.recipe.data.source}")
        self._mark_again(place)
        self.checkpoints.tidy()
        self.watch.say(f"going on from update {self.progress.step:,}")

    def _mark_again(self, place: Path) -> None:
        """Mark the best checkpoint that a run was killed before it could mark."""
        # Only then was this checkpoint itself what was validated last.
        if not self._validates(self.progress.step) or self.progress.score is None:
            return
        better = self.task.higher_is_better
        score = Score(metric=self.task.metric, value=self.progress.score, count=0, higher_is_better=better)
        if self._agreed(score.better_than(self.checkpoints.best_score())):
            self.checkpoints.mark_best(place, score.value)

    def _agreed(self, found: bool) -> bool:
        """What the processes found, each for itself, before one of them acts upon it."""
        return bool(self.group.greatest(torch.tensor(float(found))))

    def train(self) -> Result:
        """Train to the end, or until a signal or the budget stops it."""
        if self.group.first:
            write_whole(self.folder / RECIPE, self.recipe.to_yaml())
        self.group.wait()
        self.watch.say(self._introduction())
        # A thread begins on the first GPU, whichever its process has chosen.
        settle = (torch.cuda.set_device, (self.group.device,)) if self.group.device.type == "cuda" else (None, ())
        with signals() as caught, ThreadPoolExecutor(1, "batches", *settle) as ahead:
            stopped = self._loop(caught, ahead)
        if stopped:
            return Result(step=self.progress.step, seconds=self.progress.seconds, stopped=stopped)
        splits = [split for split in ("validation", "test") if split in self.task.data.splits]
        scores = {split: self.evaluate(split) for split in splits}
        latest = self.checkpoints.latest()
        for split, score in scores.items():
            # What was seen of some batches only is no match for a whole split.
            comparable = self.recipe.eval.batches is None or self.checkpoints.best() is None
            if self._note(split, score) and comparable and latest is not None:
                self.checkpoints.mark_best(latest, score.value)
        self._leave_model()
        return Result(step=self.progress.step, seconds=self.progress.seconds, scores=scores)

    def _introduction(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        what = f"{parameters:,} parameters, {self.recipe.data.source}, on {self.group.device.type}"
        several = f" with {self.group.world} processes" if self.group.world > 1 else ""
        compiled = "; the first updates take a while, until they are compiled" if self.compiled else ""
        return f"training in {self.folder}: {what}{several}{compiled}"

    def _leave_model(self) -> None:
        """Put the trained model where `tcnca.load` finds it by the folder of the run."""
        latest = self.checkpoints.latest()
        if self.group.first and latest is not None:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                with beside(self.folder / name) as draft:
                    shutil.copyfile(latest / name, draft)

    def evaluate(self, split: str, batches: int | None = None) -> Score:
        """The score on a split."""
        # Running means are of what each process has seen; those of the first are saved.
        self.group.copy_first(self.model.buffers())
        # Code compiled for the shapes of training does not fit those of evaluation, which are seen too rarely to pay
        # for code of their own.
        with torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext():
            return evaluate(
                self.model,
                self.task,
                split,
                self.recipe.eval,
                precision=self.recipe.runtime.precision,
                batches=batches,
                group=self.group,
            )

    def _loop(self, caught: list[str], ahead: ThreadPoolExecutor) -> str:
        begun, before = time.monotonic(), self.progress.seconds
        saved, first = time.monotonic(), self.progress.step
        meter = Meter(self.group, self.progress.meter)
        following = ahead.submit(self._batches, self.progress.step)
        while True:
            seconds = before + time.monotonic() - begun
            # Agreed by all: when to stop, when to save, and, with a budget, how much of it is spent.
            mine = [seconds, float(bool(caught)), time.monotonic() - saved]
            seconds, interrupted, unsaved = self.group.greatest(torch.tensor(mine, dtype=torch.float64)).tolist()
            step = self.progress.step
            done = self._done(seconds)
            over = done >= 1.0
            self.watch.advance(step, done)
            if interrupted:
                self.watch.say("stopping: saving what is done (Ctrl-C once more to stop without)")
            if over or interrupted or self._due(step, unsaved):
                meter.check(self.recipe, self.checkpoints)
                with meter.pause():
                    self._save(seconds, meter)
                saved = time.monotonic()
            if over:
                self._log(seconds, done, meter)
            if over or interrupted:
                return "" if over else (caught[0] if caught else "another process")
            batches, following = following, ahead.submit(self._batches, step + 1)
            meter.add(step, self._update(step, self._rate(done), batches))
            self.progress = dataclasses.replace(self.progress, step=step + 1, seconds=seconds)
            if self.compiled and step - first < _COMPILING:
                # Agreed by all as well: where the rates of processes differ, so do their weights from then on.
                spent = self.group.greatest(torch.tensor(before + time.monotonic() - begun, dtype=torch.float64))
                compiling = self.progress.compiling + float(spent) - seconds
                self.progress = dataclasses.replace(self.progress, compiling=compiling)
            if (step + 1) % self.recipe.runtime.log_every == 0:
                meter.check(self.recipe, self.checkpoints)
                self._log(seconds, done, meter)
            if self._validates(step + 1):
                # A validation may save the model as the best so far.
                meter.check(self.recipe, self.checkpoints)
                with meter.pause():
                    self._validate(meter)

    def _done(self, seconds: float) -> float:
        """The share of the run that is over: of its updates, or of its time."""
        if self.budget is None:
            return self.progress.step / self.recipe.schedule.max_steps
        left_out = self.progress.compiling
        return (seconds - left_out) / (self.budget - left_out) if seconds < self.budget else 1.0

    def _rate(self, done: float) -> float:
        return scheduled_lr(done, self.recipe.optimizer.lr, self.recipe.schedule)

    def _log(self, seconds: float, done: float, meter: Meter) -> None:
        """Tell what is not told yet."""
        if not meter.updates:
            return
        numbers = {"rate": self._rate(done), "seconds": seconds, "done": done, **meter.read()}
        self.watch.log({"step": self.progress.step, **numbers})

    def _due(self, step: int, unsaved: float) -> bool:
        """Whether it is time for a checkpoint, the last one being `unsaved` seconds old."""
        config = self.recipe.checkpoint
        by_step = bool(config.every) and step > 0 and step % config.every == 0
        return by_step or bool(config.minutes and unsaved > 60 * config.minutes)

    def _validates(self, step: int) -> bool:
        """Whether the model is validated after so many updates; what comes at the end is not meant."""
        every = self.recipe.eval.every
        ends = self.budget is None and step >= self.recipe.schedule.max_steps
        return bool(every) and step % every == 0 and not ends

    def _save(self, seconds: float, meter: Meter) -> Path:
        self.progress = dataclasses.replace(self.progress, seconds=seconds, meter=meter.state())
        latest = self.checkpoints.latest()
        if latest is not None and read_progress(latest).step == self.progress.step:
            return latest
        return self.checkpoints.save(self.model, self.optimizer, self.progress)

    def _validate(self, meter: Meter) -> None:
        score = self.evaluate("validation", self.recipe.eval.batches)
        self.progress = dataclasses.replace(self.progress, score=score.value)
        if self._note("validation", score):
            self.checkpoints.mark_best(self._save(self.progress.seconds, meter), score.value)

    def _note(self, split: str, score: Score) -> bool:
        """Keep a score. Whether it is the best by validation so far."""
        self.watch.log({"step": self.progress.step, "split": split, "metric": score.metric, "score": score.value})
        return split == "validation" and self._agreed(score.better_than(self.checkpoints.best_score()))

    def _batches(self, step: int) -> list[Batch]:
        """This process's part of an update, in as many pieces as it is to be read in."""
        config, pieces = self.recipe.batch, self.recipe.batch.grad_accum_steps
        parts = []
        for piece in range(pieces):
            rank = self.group.rank * pieces + piece
            batch = self.task.batch(step, config.size, config.seed, rank, self.group.world * pieces)
            if self.compiled and self.task.kind not in ("language", "forecast"):
                batch = batch.pad_to_bucket()
            parts.append(batch.pin_memory() if self.group.device.type == "cuda" else batch)
        return parts

    def _update(self, step: int, rate: float, batches: Future[list[Batch]]) -> Update:
        """One step of the optimizer."""
        begun = time.monotonic()
        parts = batches.result()
        waited = time.monotonic() - begun
        total, tokens = torch.zeros((), device=self.group.device), 0
        skips = self.recipe.optimizer.nonfinite == "skip"
        running = [buffer.clone() for buffer in self.model.buffers()] if skips else []
        for piece, host in enumerate(parts):
            batch = host.to(self.group.device, non_blocking=True)
            # Dropout, too, is a function of seed and step: a run that is resumed drops what it would have dropped.
            torch.manual_seed(
                int(CounterRNG(self.recipe.batch.seed, "dropout", step, self.group.rank, piece).raw(1)[0] >> 1)
            )
            with synchronized(self.stepper, piece == len(parts) - 1), autocast(*self._arithmetic()):
                logits = self.stepper(**batch.model_inputs(), return_state=False).logits
                loss = self.task.loss(logits, batch) * batch.weight / len(parts)
            loss.backward()
            total, tokens = total + loss.detach(), tokens + host.tokens
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.max_grad_norm or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        finite = torch.isfinite(norm) & torch.isfinite(total)
        # Only to skip is it necessary to know, and to wait for it; who stops is told with the next line of the log.
        skipped = skips and self._agreed(not bool(finite))
        if not skipped:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        else:
            # What was not finite is in the running means of batch norms already.
            for buffer, before in zip(self.model.buffers(), running, strict=True):
                buffer.copy_(before)
        self.optimizer.zero_grad(set_to_none=True)
        return Update(total, norm, tokens, waited, skipped)

    def _arithmetic(self) -> tuple[torch.device, Any]:
        return self.group.device, self.recipe.runtime.precision
