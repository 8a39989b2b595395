"""The trainer: the whole life of a run, from a recipe to a directory with a trained model and its report."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from tcnca.config import check
from tcnca.data import Batch
from tcnca.data.rng import CounterRNG
from tcnca.data.tasks import LanguageTask
from tcnca.errors import CheckpointError, ConfigError, TrainingError, plural, shown
from tcnca.extras import missing
from tcnca.files import LOCK, atomic_path, atomic_write, check_no_links, file_lock
from tcnca.models import ModelConfig, SequenceModel
from tcnca.models.serialization import CONFIG_FILE, WEIGHTS_FILE, find_model, load_config
from tcnca.signals import catch_signals
from tcnca.training import report
from tcnca.training.checkpoint import CHECKPOINTS, CheckpointManager, TrainState, checksum, read_state
from tcnca.training.distributed import (
    DistContext,
    dist_context,
    gradient_sync,
    make_context,
    parallelize,
    preload_compiler,
    should_compile,
)
from tcnca.training.evaluate import Score, autocast, eval_limit, evaluate
from tcnca.training.graphs import TrainingGraphs, should_capture
from tcnca.training.logger import LogConsole, Logger, Meter, StepOutput, read_log
from tcnca.training.optimizer import build_optimizers, scheduled_lr, set_lr
from tcnca.training.provenance import RECIPE, Budget, Launch, add_launch, command_line, hardware, read_launches
from tcnca.training.recipe import Recipe, differences, load_recipe
from tcnca.training.report import REPORT, Result
from tcnca.training.threads import fastest_threads, use_threads

_COMPILING_STEPS = 3
"""First steps that compile code or load it. With CUDA graphs, the third batch of a shape is captured."""
_FEW_STEPS = 100
"""Fewer steps than this teach a model next to nothing."""


class Trainer:
    """Trains a model from a recipe, and keeps everything about the run in a directory.

    `fit` locks the directory, records the provenance, resumes if asked to, trains, saves checkpoints, and leaves the
    model, its scores, curves and a report. `tcnca train` does exactly this.

    Args:
        recipe: a recipe, or the name or file of one.
        out: the run directory; None for `runs/` and the name of the recipe.
        budget: seconds to train, in place of a number of steps. A resumed run keeps the budget it was started with.
        resume: continue from the last checkpoint in `out`, or start a new run if there is none.
        device: `cpu`, `cuda` or `mps`; None for an NVIDIA GPU if there is one.
        name: name of the recipe, for the report.
        command: arguments of the `tcnca` that repeats the run, for the report; by default it trains with the recipe in
            `out`.
        verbose: print progress.
    """

    dist: DistContext
    logger: Logger

    def __init__(
        self,
        recipe: Recipe | str,
        out: str | Path | None = None,
        *,
        budget: float | None = None,
        resume: bool = False,
        device: str | None = None,
        name: str = "",
        command: Sequence[str] = (),
        verbose: bool = True,
    ) -> None:
        self.recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
        self.name = name or Path(recipe if isinstance(recipe, str) else out or self.recipe.data.source).stem
        self.out = Path(out or Path("runs") / self.name)
        self.budget = check("budget", budget, Budget | None)
        self.resume, self.device, self.verbose = resume, device, verbose
        self.command = [*command]
        self.init_weights: str | None = None
        self._check_out()

    def fit(self) -> Result:
        """Train to the end, or until a signal or the budget stops the run."""
        with (
            dist_context(self.device) as self.dist,
            Logger(self.out, LogConsole(quiet=not self.verbose), enabled=self.dist.is_main) as self.logger,
            use_threads(),
        ):
            self._resolve_recipe()
            if self.resume:
                self._adopt_budget()
                if (finished := self._finished()) is not None:
                    return finished
            self.setup()
            try:
                with file_lock(self.out / LOCK) if self.dist.is_main else contextlib.nullcontext():
                    return self._run()
            finally:
                if self.dist.world_size > 1:
                    # Free what holds on to the process group before the processes leave it: DDP that is freed later
                    # may wait forever for a thread of the group.
                    del self.model, self.train_model, self.optimizers, self.context
                    gc.collect()

    def _run(self) -> Result:
        """Restore, train and finish, in a directory that no other run uses."""
        if self.dist.is_main:
            # Another run may have started, and ended, since the first check.
            self._check_out()
        resumed = self.resume and self._restore()
        self._record(resumed)
        try:
            stopped = self._train()
        except TrainingError:
            self._draw_curves()
            raise
        return self._finish(stopped)

    def setup(self) -> None:
        """Build the task, the model and the optimizers."""
        self.compiled = should_compile(self.recipe.runtime, self.dist.device)
        if self.compiled:
            preload_compiler()
        self.context = make_context(self.recipe.runtime.parallel, self.dist)
        self.task = self.recipe.build_task()
        self.checkpoints = CheckpointManager(self.out / CHECKPOINTS, self.recipe.checkpoint.keep, self.dist)
        latest = self.checkpoints.latest() if self.resume and self.recipe.init_from is not None else None
        # A run that is resumed does not need the model that it started from any more.
        config = self.recipe.model_config(self.task) if latest is None else load_config(latest)
        threads = self.recipe.runtime.threads
        if threads == "auto":
            threads = self._fastest_threads(config)
            # Rounding depends on the number, which the recipe in the run directory keeps.
            self.recipe = self.recipe.override({"runtime.threads": threads})
        if threads:
            torch.set_num_threads(threads)
        recipe = self.recipe
        torch.manual_seed(recipe.batch.seed)
        self.model = SequenceModel(config, self.task.preprocessing())
        if recipe.init_from is not None and latest is None:
            same_head = recipe.initialize(self.model, recipe.load_source())
            self.init_weights = checksum(find_model(recipe.init_folder) / WEIGHTS_FILE)
            self.logger.print(f"starting from {recipe.init_from}{'' if same_head else ', with a new head'}")
        self.model.to(self.dist.device)
        # Compile once for all batch shapes: code for one shape is 1 to 5 % faster, but takes 10 s for each of them.
        grows = recipe.batch.initial_size is not None
        dynamic = isinstance(self.task, LanguageTask) and (grows or len(set(self.task.chunks_per_row)) > 1)
        self.train_model = parallelize(self.model, recipe.runtime, self.dist, dynamic=dynamic)
        self.graphed_step: TrainingGraphs | None = None
        if should_capture(recipe.runtime, self.dist):
            self.graphed_step = TrainingGraphs(self._forward_backward, self.dist.device, self.logger.print)
        self.optimizers = build_optimizers(self.model, recipe.optimizer)
        self.state = TrainState(data=self.task.data.digest)

    def _fastest_threads(self, config: ModelConfig) -> int:
        """Measure with how many threads a step is fastest."""
        recipe, dist = self.recipe, self.dist
        if dist.device.type != "cpu" or dist.world_size > 1 or self.compiled:
            return 0  # PyTorch's default
        # The run has a model of its own, so that it does not depend on this measurement.
        torch.manual_seed(recipe.batch.seed)
        model = SequenceModel(config, self.task.preprocessing())
        train_model = parallelize(model, recipe.runtime, dist)
        size = recipe.batch.initial_size or recipe.batch.size
        batch = self.task.batch(0, size, recipe.batch.seed, 0, recipe.batch.grad_accum_steps)

        def step() -> None:
            model.zero_grad()
            with autocast(dist.device, recipe.runtime.precision):
                self.task.loss(train_model(**batch.model_inputs(), return_state=False).logits, batch).backward()

        return fastest_threads(step)

    # The loop.

    def _train(self) -> str:
        """Train until the run is finished. Returns the name of the signal that stopped it before, if one did."""
        recipe, state, meter = self.recipe, self.state, Meter(self.dist, self.state.meter)
        if recipe.init_from is not None and recipe.eval.every and state.step == 0 and state.score is None:
            self._validate(meter)  # what training starts from; it does not count as time of the run
        started = saved = time.monotonic()
        earlier, first_step = state.seconds, state.step
        with catch_signals() as caught, ThreadPoolExecutor(1, "batches") as pool, contextlib.ExitStack() as stack:
            upcoming = pool.submit(self._load_batches, *self._batch_size_and_index(state.step))
            if self.compiled and self.dist.device.type == "cuda" and self.dist.world_size == 1:
                # A process that ends while the thread computes may crash.
                stack.callback(self._preload_kernels(upcoming.result()[0]).join)
            while True:
                # Agree on the time and on signals, so that all processes save, stop and set the learning rate alike.
                now = time.monotonic()
                local = torch.tensor(
                    [earlier + now - started, float(bool(caught) or self.logger.broken_pipe), now - saved],
                    dtype=torch.float64,
                )
                state.seconds, interrupted, unsaved = self.dist.all_reduce_max(local).tolist()
                progress = self._progress()
                finished = progress >= 1.0
                self.logger.progress(state.step, progress)

                # Checkpoint, and stop.
                if interrupted:
                    self.logger.print("stopping: saving a checkpoint (press Ctrl-C again to stop without)")
                if finished or interrupted or self._checkpoint_due(unsaved):
                    self._check_finite(meter)
                    with meter.pause():
                        self._save(meter)
                    saved = time.monotonic()
                if finished:
                    self._log(progress, meter)
                    return ""
                if interrupted:
                    return caught[0] if caught else "SIGPIPE" if self.logger.broken_pipe else "another process"

                # One step; the batches of the next one are loaded meanwhile.
                following = self._batch_size_and_index(state.step + 1)
                batches, upcoming = upcoming, pool.submit(self._load_batches, *following)
                meter.add(state.step, self._step(self._lr(progress), batches))
                state.step += 1
                stack.close()  # after the first step
                if self.compiled and state.step - first_step <= _COMPILING_STEPS:
                    spent = torch.tensor(earlier + time.monotonic() - started, dtype=torch.float64)
                    state.compile_seconds += float(self.dist.all_reduce_max(spent)) - state.seconds
                    self.logger.restart_clock(self._progress())

                # Log, and validate.
                if state.step % recipe.runtime.log_every == 0:
                    self._check_finite(meter)
                    self._log(progress, meter)
                if self._validation_due():
                    # The validated model may be saved as the best so far.
                    self._check_finite(meter)
                    self._validate(meter)

    def _step(self, lr: float, batches: Future[list[Batch]]) -> StepOutput:
        """Take one optimizer step: forward and backward passes, clipping, and the update of the weights."""
        recipe, device = self.recipe, self.dist.device
        started = time.monotonic()
        micro_batches = batches.result()
        data_wait = time.monotonic() - started
        skip_nonfinite = recipe.optimizer.nonfinite == "skip"
        buffers = [buffer.clone() for buffer in self.model.buffers()] if skip_nonfinite else []

        total, tokens = torch.zeros((), device=device), 0
        for index, batch in enumerate(micro_batches):
            # Dropout is a function of seed and step, so that a resumed run drops the same.
            torch.manual_seed(
                int(CounterRNG(recipe.batch.seed, "dropout", self.state.step, self.dist.rank, index).raw(1)[0] >> 1)
            )
            with gradient_sync(self.train_model, index == len(micro_batches) - 1):
                if self.graphed_step is not None:
                    loss = self.graphed_step(batch)
                else:
                    loss = self._forward_backward(batch.to(device, non_blocking=True))
            total, tokens = total + loss, tokens + batch.tokens

        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.optimizer.max_grad_norm or math.inf)
        grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        # Synchronize only when non-finite steps are skipped; `stop` is reported with the next log line.
        skipped = skip_nonfinite and self.dist.any(not bool(torch.isfinite(grad_norm) & torch.isfinite(total)))
        if skipped:
            # The running means of batch norms have already seen the batch.
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        else:
            set_lr(self.optimizers, lr)
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            # Graphs add to gradients where they are in memory.
            optimizer.zero_grad(set_to_none=self.graphed_step is None)
        return StepOutput(total, grad_norm, tokens, data_wait, skipped)

    def _forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of a micro-batch on the device, and return its loss."""
        with self.context or contextlib.nullcontext():
            with autocast(self.dist.device, self.recipe.runtime.precision):
                logits = self.train_model(**batch.model_inputs(), return_state=False).logits
                loss = self.task.loss(logits, batch) * batch.weight / self.recipe.batch.grad_accum_steps
            loss.backward()
        return loss.detach()

    def _batch_size_and_index(self, step: int) -> tuple[int, int]:
        """Return the size of the batch of a step, and its index among all batches of that size.

        Sets the step at which batches grow in the state of the run, once it has come.
        """
        config, state = self.recipe.batch, self.state
        if config.initial_size is None:
            return config.size, step
        if state.grown_at is None and self._progress(step) >= config.grow_at:
            state.grown_at = step
        if state.grown_at is None or step < state.grown_at:
            return config.initial_size, step
        # Continue after the data that the small batches have read.
        read = math.ceil(state.grown_at * config.initial_size / config.size)
        return config.size, read + step - state.grown_at

    def _load_batches(self, size: int, index: int) -> list[Batch]:
        """Return the micro-batches of this process, of the batch at `index` among those of `size`."""
        config, parts = self.recipe.batch, self.recipe.batch.grad_accum_steps
        on_gpu, batches = self.dist.device.type == "cuda", []
        # Code is compiled, and graphs are captured, for few shapes.
        pads = self.compiled or self.graphed_step is not None
        if on_gpu:
            # A thread starts on the first GPU, not on the one that its process uses.
            torch.cuda.set_device(self.dist.device)
        # Processes of one context read the same rows.
        processes = 1 if self.context is None else self.context.size
        for part in range(parts):
            rank = self.dist.rank // processes * parts + part
            batch = self.task.batch(index, size, config.seed, rank, self.dist.world_size // processes * parts)
            if pads and self.task.kind not in ("language", "forecast"):
                batch = batch.pad_to_bucket(self.task.longest)
            if self.context is not None:
                batch = batch.divide(self.context.rank, self.context.size)
            batches.append(batch.pin_memory() if on_gpu else batch)
        return batches

    def _preload_kernels(self, batch: Batch) -> threading.Thread:
        """Compile the library's own kernels in the background, while PyTorch compiles a layer.

        The thread runs a copy of the first layer, without dropout: random numbers belong to the first step.
        """
        device, layer = self.dist.device, copy.deepcopy(self.model.layers[0]).eval()
        vars(layer).pop("forward", None)  # which recomputes activations, and sets the random state for that
        lengths = None if batch.lengths is None else batch.lengths.to(device)
        x = torch.zeros(*batch.inputs.shape[:2], self.model.config.d_model, device=device, requires_grad=True)

        def run() -> None:
            # The training step reports what is wrong with a kernel, or that there is too little memory.
            with contextlib.suppress(Exception):
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                with autocast(device, self.recipe.runtime.precision):
                    y, _ = layer(x, lengths=lengths, state=None, return_state=False, inplace=False)
                    y.sum().backward()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _progress(self, step: int | None = None) -> float:
        """Return the share of the run that is done before a step, by default the next: of its steps, or of its time."""
        if self.budget is None:
            return (self.state.step if step is None else step) / self.recipe.schedule.max_steps
        seconds = self.state.seconds
        # Not more than all seconds, whatever a file says.
        compiling = min(self.state.compile_seconds, seconds)
        return (seconds - compiling) / (self.budget - compiling) if seconds < self.budget else 1.0

    def _lr(self, progress: float) -> float:
        return scheduled_lr(progress, self.recipe.optimizer.lr, self.recipe.schedule)

    def _log(self, progress: float, meter: Meter) -> None:
        if not meter.steps:
            return
        values = {"step": self.state.step, "lr": self._lr(progress), "seconds": self.state.seconds}
        self.logger.log({**values, "progress": progress, **meter.read()})

    def _check_finite(self, meter: Meter) -> None:
        step = meter.first_nonfinite()
        if step is None or self.recipe.optimizer.nonfinite == "skip":
            return
        latest = self.checkpoints.latest()
        good = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        raise TrainingError(
            f"step {step}: the loss or the gradient is not finite (batch of seed {self.recipe.batch.seed}, "
            f"step {step}); {good}. Lower lr or max_grad_norm, or skip such steps with nonfinite=skip"
        )

    # Checkpoints and evaluation.

    def _checkpoint_due(self, unsaved: float) -> bool:
        """Return whether to save a checkpoint, the last one being `unsaved` seconds old."""
        config, step = self.recipe.checkpoint, self.state.step
        by_step = bool(config.every) and step > 0 and step % config.every == 0
        return by_step or bool(config.minutes and unsaved > 60 * config.minutes)

    def _save(self, meter: Meter) -> Path:
        self.state.meter = meter.state()
        latest = self.checkpoints.latest()
        if latest is not None and read_state(latest).step == self.state.step:
            return latest
        return self.checkpoints.save(self.model, self.optimizers, self.state)

    def _validation_due(self) -> bool:
        """Return whether the model is validated after this step. The final evaluation does not count."""
        every, step = self.recipe.eval.every, self.state.step
        last = self.budget is None and step >= self.recipe.schedule.max_steps
        return bool(every) and step % every == 0 and not last

    def _validate(self, meter: Meter) -> None:
        with meter.pause():
            self.state.score = self._evaluate("validation", self.recipe.eval.batches).value
            if self._is_best(self.state.score):
                self.checkpoints.mark_best(self._save(meter), self.state.score)

    def _evaluate(self, split: str, max_batches: int | None = None) -> Score:
        """Measure the model on a split, and log the score."""
        # Running means differ between processes; those of the main one are saved.
        self.dist.broadcast(self.model.buffers())
        # The shapes of evaluation are too rare to compile code for them.
        eager = torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()
        with eager, self.logger.evaluation(split) as progress:
            score = evaluate(
                self.model,
                self.task,
                split,
                self.recipe.eval,
                precision=self.recipe.runtime.precision,
                max_batches=max_batches,
                dist=self.dist,
                progress=progress,
            )
        measured = {"split": split, "metric": score.metric, "value": score.value, "count": score.count}
        self.logger.log({"step": self.state.step, **measured})
        return score

    def _is_best(self, score: float) -> bool:
        """Return whether a validation is the best so far; all processes get the same answer."""
        best, sign = self.checkpoints.best_score(), 1 if self.task.higher_is_better else -1
        return self.dist.any(math.isfinite(score) and (best is None or sign * score > sign * best))

    # The start of a run.

    def _check_out(self) -> None:
        try:
            # Safetensors and matplotlib need it, and would say so only when the run is resumed, or at its end.
            f"{self.name} {self.out}".encode()
        except UnicodeEncodeError as error:
            names = f"{shown(self.name)}, {shown(str(self.out))}"
            raise ConfigError(f"recipe, --out: expected names in UTF-8, got {names}") from error
        if (self.out / RECIPE).exists() and not self.resume:
            # Report first what another directory would not fix.
            self.recipe.validate()
            self.recipe.check_source()
            raise ConfigError(f"{self.out}: already holds a run; continue it with --resume, or choose another --out")
        if self.resume:
            check_no_links(self.out)

    def _resolve_recipe(self) -> None:
        """Apply the changes that the recipe has for a device. A resumed run keeps those that it was started with."""
        wanted = {device: self.recipe.for_device(device) for device in ("cpu", "cuda", "mps")}
        self.recipe = wanted[self.dist.device.type]
        if self.resume and (self.out / RECIPE).is_file():
            started, threads = load_recipe(str(self.out / RECIPE)), self.recipe.runtime.threads
            if started in wanted.values():
                before = started.runtime.threads
                if threads == "auto" and self.dist.world_size == 1 and before in range(1, torch.get_num_threads() + 1):
                    threads = before
                self.recipe = started.override({"runtime.threads": threads})

    def _adopt_budget(self) -> None:
        """Take over the budget of the run that is resumed: the learning rate follows it."""
        launches = read_launches(self.out)
        if not launches:
            return
        before = launches[0].budget
        if self.budget is not None and self.budget != before:
            if CheckpointManager(self.out / CHECKPOINTS, 1, self.dist).latest() is None:
                return  # a new run begins
            text = "no budget" if before is None else f"a budget of {before:g}s"
            raise ConfigError(
                f"--budget: expected the budget that {self.out} was started with ({text}), which the learning rate "
                f"follows, got {self.budget:g}s; {self._advice('leave it out')}"
            )
        self.budget = before

    def _finished(self) -> Result | None:
        """Return the result of a run that is resumed though it is finished."""
        result = report.read_result(self.out)
        # Another recipe is refused when the checkpoint is restored.
        if result is None or not (self.out / RECIPE).is_file() or load_recipe(str(self.out / RECIPE)) != self.recipe:
            return None
        self.logger.print(f"{self.out}: the run is finished, after {plural(result.step, 'step')}; see {REPORT} in it")
        return result

    def _advice(self, unfinished: str) -> str:
        """Return what to do instead of resuming a run with changes."""
        if report.read_result(self.out) is None:
            return unfinished
        return f"to train its model further, start a new run with init_from={self.out} and another --out"

    def _restore(self) -> bool:
        """Restore the last checkpoint, and return whether there is one."""
        place = self.checkpoints.latest()
        if place is None:
            self.logger.print(f"nothing to resume in {self.out}, which has no checkpoint; starting a new run")
            self.logger.rewind(-1)
            return False
        before = load_recipe(str(self.out / RECIPE))
        if before != self.recipe:
            raise CheckpointError(
                f"{self.out}: was started with another recipe, which differs in {differences(before, self.recipe)}; "
                + self._advice("give the same changes again, or another --out")
            )
        data = self.state.data
        self.state = self.checkpoints.load(place, self.model, self.optimizers)
        if self.state.data != data:
            raise CheckpointError(f"{self.out}: was started with other data than {self.recipe.data.source} has now")
        # The run may have been killed between saving this checkpoint and marking it as the best.
        score = self.state.score
        if self._validation_due() and score is not None and self._is_best(score):
            self.checkpoints.mark_best(place, score)
        self.checkpoints.clean_up()
        self.logger.rewind(self.state.step)
        self.logger.print(f"resuming from step {self.state.step:,}")
        return True

    def _record(self, resumed: bool) -> None:
        """Write provenance and recipe, and print what is trained."""
        recipe, dist, schedule = self.recipe, self.dist, self.recipe.schedule
        if dist.is_main:
            launch = Launch(
                recipe=self.name,
                command=command_line(self.command or ["train", str(self.out / RECIPE)]),
                step=self.state.step,
                seed=recipe.batch.seed,
                budget=self.budget,
                processes=dist.world_size,
                init_weights=self.init_weights,
                hardware=hardware(dist.device, dist.world_size),
            )
            add_launch(self.out, launch, resumed=resumed)
            atomic_write(self.out / RECIPE, recipe.to_yaml())
        self.logger.preload()
        dist.barrier()
        for note in self.task.notes():
            self.logger.print(f"warning: {note}")
        if self.task.used_columns:
            self.logger.print(self.task.used_columns)
        for extra, what in (("plots", f"{report.CURVES} is not drawn"), ("tensorboard", "no files for TensorBoard")):
            if reason := missing(extra):
                self.logger.print(f"{what}: {reason}")
        several = f" with {dist.world_size} processes" if dist.world_size > 1 else ""
        if self.context is not None:
            several += f", {self.context.size} to each sequence"
        elif recipe.runtime.parallel.context > 1:
            self.logger.print(
                "warning: runtime.parallel.context has no effect on one process; start several with torchrun"
            )
        compiling = "; the first steps take longer while code is compiled" if self.compiled else ""
        sizes = self.task.value_shape
        shape = f" ({plural(sizes[0], 'time step')} of {plural(sizes[1], 'feature')})" if sizes else ""
        steps = f"{plural(schedule.max_steps, 'step')} (warm-up {schedule.effective_warmup_steps:,})"
        length = report.duration(self.budget) if self.budget is not None else steps
        threads = f" ({plural(torch.get_num_threads(), 'thread')})" if dist.device.type == "cpu" else ""
        place = f"{dist.device.type}{threads}"
        what = f"{length}, {self._parameters():,} parameters, {recipe.data.source}{shape}, on {place}"
        self.logger.print(f"training in {self.out}: {what}{several}{compiling}")

    # The end of a run.

    def _finish(self, stopped: str) -> Result:
        """Save the model, measure it, and write the report; draw only the curves of a run that was stopped."""
        if stopped:
            self._draw_curves()
            return self._result(stopped, {})
        self._export_model()
        config = self.recipe.eval
        if config.max_batches is not None:
            self.logger.print(f"evaluating at most {config.max_batches} batches of each split (eval.max_batches)")
        part = None
        if eval_limit(config, config.batches) != eval_limit(config) and self.checkpoints.best() is not None:
            # The best checkpoint has its score from as many. The whole split follows, as the last line of the log.
            part = self._evaluate("validation", config.batches)
        scores = {split: self._evaluate(split) for split in ("validation", "test") if split in self.task.data.splits}
        latest, comparable = self.checkpoints.latest(), part or scores.get("validation")
        if latest is not None and comparable is not None and self._is_best(comparable.value):
            self.checkpoints.mark_best(latest, comparable.value)
        self._draw_curves()
        result = self._result("", scores)
        if self.dist.is_main:
            report.write_report(self.out, result)
            # Last, as it marks the run as finished.
            report.write_result(self.out, result)
        if self.budget is not None and result.step < _FEW_STEPS and self.recipe.init_from is None:
            self.logger.print(
                f"warning: only {plural(result.step, 'step')} fitted into the budget of {self.budget:g}s, too few to "
                "learn much; give more time, a smaller batch.size or a smaller model"
            )
        return result

    def _export_model(self) -> None:
        """Copy the last model to the run directory, where `tcnca.load` finds it."""
        latest = self.checkpoints.latest()
        if self.dist.is_main and latest is not None:
            for name in (WEIGHTS_FILE, CONFIG_FILE):  # a configuration marks a complete model
                with atomic_path(self.out / name) as temporary:
                    shutil.copyfile(latest / name, temporary)
            self.logger.print(f"saved the model after step {self.state.step:,} in {self.out}")

    def _draw_curves(self) -> None:
        if self.dist.is_main:
            report.draw_curves(self.out, self.name, higher_is_better=self.task.higher_is_better)

    def _result(self, stopped: str, scores: dict[str, Score]) -> Result:
        lines = read_log(self.out) if self.dist.is_main else []
        best = report.best_validation(lines, higher_is_better=self.task.higher_is_better)
        return Result(
            step=self.state.step,
            seconds=self.state.seconds,
            stopped=stopped,
            scores=scores,
            best=best,
            tokens=round(sum(line.get("tokens", 0) for line in lines)),
            tokens_per_second=report.mean_speed(lines),
            memory_gib=max((line["memory_gib"] for line in lines if line.get("memory_gib") is not None), default=None),
            parameters=self._parameters(),
            source=self.recipe.data.source,
            data=self.state.data,
        )

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())
