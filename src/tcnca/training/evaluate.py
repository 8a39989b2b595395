"""The score of a model on a split: every answer counts once, on any number of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tcnca import pretrained
from tcnca.config import check_choice
from tcnca.data import Batch, Task
from tcnca.data.schema import SPLITS
from tcnca.errors import ConfigError, DataError, format_interval, format_score
from tcnca.files import atomic_write, check_no_links, to_json
from tcnca.models import ModelState, SequenceModel, evaluating, load
from tcnca.models.serialization import CONFIG_FILE
from tcnca.ops.checks import has_float64
from tcnca.training.checkpoint import CHECKPOINTS, CheckpointManager, verify
from tcnca.training.config import EvalConfig, Precision
from tcnca.training.distributed import DistContext, dist_context
from tcnca.training.logger import LogConsole, Logger
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import load_recipe
from tcnca.training.threads import use_threads

_MAX_TOKENS = 2**17
"""Time steps of a call of the model: more of them would not be faster, and need more memory than training."""
_MAX_CPU_TOKENS = 2**13
"""The same on a CPU, where larger tensors are slower, as they do not fit into its caches."""
_MAX_NUMBERS = 2**23
"""Numbers of the inputs of windows that are joined, which bounds the memory of the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model does on a split."""

    metric: str
    """Name of the metric."""
    value: float
    """Mean over all answers."""
    count: int
    """Number of answers."""
    higher_is_better: bool
    """Whether a greater value is better."""


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    task: Task,
    split: str,
    config: EvalConfig | None = None,
    *,
    precision: Precision = "float32",
    max_batches: int | None = None,
    dist: DistContext | None = None,
    progress: Callable[[int, float | None], None] | None = None,
) -> Score:
    """Measure a model on a split.

    Args:
        model: the model, which is put into evaluation mode and back.
        task: the task.
        split: for example `test`.
        config: batch size, chunk size and exactness.
        precision: of the arithmetic on a GPU, unless `config.exact` asks for float32.
        max_batches: the number of batches to look at; None for the whole split. `config.max_batches` is a limit too.
        dist: the processes that share the work.
        progress: is called after each part of a batch with the number of batches, and the share that is done if it is
            known.
    """
    config = config or EvalConfig()
    dist = dist or DistContext(device=next(model.parameters()).device)
    precision = eval_precision(config, precision, dist.device)
    limit = eval_limit(config, max_batches)
    # A split has one answer per example or byte, except where targets are numbers.
    answers = math.inf if task.metric == "mean squared error" else task.sizes[task.eval_split(split)]
    streams = task.kind in ("language", "forecast")
    attention = model.config.attention
    chunk_size = (config.chunk_size or (attention and attention.chunk_size) or 1) if streams else None
    # The cost of full attention is quadratic in the length of a call.
    joins = attention is None or config.chunk_size is not None or attention.chunk_size is not None
    # On the device, which is not waited for until the end, if it has float64.
    totals = torch.zeros(2, dtype=torch.float64, device=dist.device if has_float64(dist.device) else "cpu")
    states: dict[int, ModelState | None] = {}
    most = _MAX_CPU_TOKENS if dist.device.type == "cpu" else _MAX_TOKENS
    rows = time = answered = before = 0
    with _evaluation_mode(model, config.chunk_size), autocast(dist.device, precision):
        batches = itertools.islice(task.eval_batches(split, config.batch_size, dist.rank, dist.world_size), limit)
        for batch, done, goes_on in _prefetch(join_windows(batches, most if joins else 0), dist.device):
            if not batch.continues:
                # Each part has its own state, so the next batches are divided alike.
                rows, time = part_size(batch, most, chunk_size)
            parts = list(split_batch(batch, rows, time))
            # With FSDP, all processes must call the model equally often.
            number = int(dist.all_reduce_max(torch.tensor(len(parts))))
            for index in range(number):
                row, host, last = parts[min(index, len(parts) - 1)]
                part = host.to(dist.device, non_blocking=True)
                if index >= len(parts):
                    model(**part.model_inputs(), return_state=False)
                    continue
                state = states.pop(row, None) if part.continues else None
                carry = {"state": state, "inplace": state is not None} if streams else {}
                # A state takes memory and time, and is not needed at the end of a sequence.
                keep = streams and (goes_on or not last)
                output = model(**part.model_inputs(), **carry, return_state=keep)
                if keep:
                    states[row] = output.state
                sums = task.metric_sums(output.logits, part)
                totals += torch.stack([each.to(totals.device).to(totals.dtype) for each in sums])
                answered += host.tokens if task.kind == "language" else len(host) * last
                if progress is not None:
                    read = before + (done - before) * (index + 1) / number
                    share = max(read / (limit or math.inf), answered * dist.world_size / answers)
                    progress(done, min(share, 1.0) or None)
            before = done
    total, count = dist.all_reduce_sum(totals).tolist()
    value = total / count if count else math.nan
    return Score(metric=task.metric, value=value, count=int(count), higher_is_better=task.higher_is_better)


def part_size(batch: Batch, most: int, chunk_size: int | None = None) -> tuple[int, int]:
    """Return how many rows and time steps of a batch to compute at once: `most` in all, for bounded memory.

    Rows that are too long are divided only with a `chunk_size`, that of a streaming model, at multiples of it.
    """
    time = batch.inputs.shape[1] + (0 if batch.second is None else batch.second.shape[1])
    if chunk_size is not None and time > most:
        time = most // chunk_size * chunk_size or most
    return max(1, most // time), time


def split_batch(batch: Batch, rows: int, time: int) -> Iterator[tuple[int, Batch, bool]]:
    """Yield parts of at most so many rows and time steps, as tuples `(row, part, last)`.

    `row` is the index of the first row of a part; `last` tells whether the part ends these rows.
    """
    length = batch.inputs.shape[1]
    for row in range(0, len(batch), rows):
        part = batch.rows(row, row + rows)
        for begin in range(0, length, time):
            yield row, part if time >= length else part.window(begin, begin + time), begin + time >= length


class _Joined(NamedTuple):
    """Batches that continue one another, as one."""

    batch: Batch
    done: int
    """Number of batches up to the last of these."""
    goes_on: bool
    """Whether the next batch continues this one."""


def join_windows(batches: Iterator[Batch], longest: int) -> Iterator[_Joined]:
    """Join batches that continue one another to rows of at most `longest`: one long call is faster than several."""
    group: list[Batch] = []
    done = 0
    for done, batch in enumerate(batches):
        time = sum(each.inputs.shape[1] for each in (*group, batch))
        numbers = sum(each.inputs.numel() for each in (*group, batch))
        fits = time <= longest and numbers <= _MAX_NUMBERS
        if group and not (batch.continues and fits):
            yield _Joined(Batch.join(group), done, batch.continues)
            group = []
        group.append(batch)
    if group:
        yield _Joined(Batch.join(group), done + 1, False)


def _prefetch(batches: Iterator[_Joined], device: torch.device) -> Iterator[_Joined]:
    """Load each batch while the one before it is computed, for a GPU into pinned memory."""

    def load() -> _Joined | None:
        joined = next(batches, None)
        if joined is None or device.type != "cuda":
            return joined
        torch.cuda.set_device(device)  # a thread starts on the first GPU
        return joined._replace(batch=joined.batch.pin_memory())

    with ThreadPoolExecutor(1, "batches") as pool:
        upcoming = pool.submit(load)
        while (joined := upcoming.result()) is not None:
            upcoming = pool.submit(load)
            yield joined


def eval_precision(config: EvalConfig, precision: Precision, device: torch.device) -> Precision:
    """Return the precision of an evaluation: that of the run, except where float32 is asked for, or faster."""
    return "float32" if config.exact or device.type == "cpu" else precision


def eval_limit(config: EvalConfig, max_batches: int | None = None) -> int | None:
    """Return the smaller of `max_batches` and the limit of the configuration; None if there is neither."""
    limits = [limit for limit in (max_batches, config.max_batches) if limit is not None]
    return min(limits, default=None)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the autocast context of a precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def _evaluation_mode(model: SequenceModel, chunk_size: int | None) -> Iterator[None]:
    attention = model.config.attention
    with evaluating(model):
        try:
            if chunk_size is not None and attention is not None:
                model.set_chunk_size(chunk_size)
            yield
        finally:
            if chunk_size is not None and attention is not None:
                model.set_chunk_size(attention.chunk_size)


def evaluate_run(
    run: Path | None,
    changes: Sequence[str] = (),
    *,
    split: str = "test",
    best: bool = False,
    device: str | None = None,
    verbose: bool = True,
) -> Score:
    """Measure the last or the best checkpoint of a run, and write the score into the run directory.

    Each combination of split, checkpoint and changes has its own file.

    Args:
        run: the run directory, or the folder of a model that was exported from one; None for the pretrained model,
            whose score is not written.
        changes: `key=value` changes to the recipe: how to measure, not what was trained.
        split: for example `test`.
        best: measure the best checkpoint by validation instead of the last.
        device: `cpu`, `cuda` or `mps`; None for a GPU if there is one.
        verbose: print progress and the score.
    """
    check_choice("split", split, SPLITS)
    saves, run = run is not None, run or pretrained.FOLDER
    if not (run / RECIPE).is_file():
        what = f"it has no {RECIPE}" if run.exists() else "there is no such folder"
        raise ConfigError(f"{run}: expected a run directory, as `tcnca train` writes it; {what}")
    if saves:
        check_no_links(run)
    trained = load_recipe(str(run / RECIPE))
    recipe = trained.override(changes)
    for section in ("init_from", "model", "batch", "optimizer", "schedule", "checkpoint"):
        if getattr(recipe, section) != getattr(trained, section):
            raise ConfigError(f"{section}: is fixed by training; only keys of data, eval and runtime can be changed")
    with dist_context(device) as dist, Logger(run, LogConsole(quiet=not verbose), enabled=dist.is_main) as logger:
        place = _find_checkpoint(run, best, dist)
        name = place.resolve().name if saves else pretrained.NAME
        model, task, precision = load(place, dist.device), recipe.build_task(), recipe.runtime.precision
        if task.preprocessing().byte_map != model.preprocessing.byte_map:
            raise ConfigError(
                f"data: expected the byte values that {name} was trained with as tokens, got others; leave out changes "
                "of data.task.all_bytes and data.source"
            )
        threads = recipe.runtime.threads
        # The run may come from a machine with more cores.
        chosen = threads != trained.runtime.threads or threads in range(1, torch.get_num_threads() + 1)
        with use_threads(threads if chosen and threads != "auto" else None), logger.evaluation(split) as progress:
            score = evaluate(model, task, split, recipe.eval, precision=precision, dist=dist, progress=progress)
        # Printed first: the score is not lost if the directory cannot be written.
        interval = format_interval(score.metric, score.value, score.count)
        logger.print(f"{name}, {split}: {score.metric} {format_score(score.value)} (of {score.count:,}){interval}")
        if dist.is_main and saves:
            file = re.sub(r"[^\w.=-]+", "_", "-".join(["eval", split, *(["best"] if best else []), *changes]))
            facts = {"split": split, "checkpoint": name, "device": dist.device.type, "changes": list(changes)}
            try:
                atomic_write(run / f"{file}.json", to_json({**facts, **dataclasses.asdict(score)}, indent=1) + "\n")
            except DataError as error:
                # A run that somebody else keeps can be evaluated, too.
                logger.print(f"warning: the score was not saved: {error}")
    return score


def _find_checkpoint(run: Path, best: bool, dist: DistContext) -> Path:
    """Return the last or the best checkpoint, which is verified; or the folder itself if only the model is left."""
    checkpoints = CheckpointManager(run / CHECKPOINTS, 1, dist)
    place = checkpoints.best() if best else checkpoints.latest()
    if place is not None:
        verify(place)
        return place
    if best or not (run / CONFIG_FILE).is_file():
        reason = "no best checkpoint; leave out --best" if best else "no checkpoint yet"
        raise ConfigError(f"{pretrained.NAME if run == pretrained.FOLDER else run}: has {reason}")
    return run
