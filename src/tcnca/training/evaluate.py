"""The score of a model on a split: everything counted once, on any number of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch

from tcnca.data import Task
from tcnca.models import SequenceModel
from tcnca.training.config import EvalConfig, Precision
from tcnca.training.processes import Processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model does."""

    metric: str
    """What was measured."""
    value: float
    """The result."""
    count: int
    """How many answers it is the mean of."""
    higher_is_better: bool
    """Whether a greater value is a better one."""

    def better_than(self, other: float | None) -> bool:
        """Whether this is better than another value, or there is none."""
        if other is None or math.isnan(other):
            return not math.isnan(self.value)
        return self.value > other if self.higher_is_better else self.value < other


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    task: Task,
    split: str,
    config: EvalConfig | None = None,
    *,
    precision: Precision = "float32",
    batches: int | None = None,
    group: Processes | None = None,
    watch: Callable[[int], None] | None = None,
) -> Score:
    """Measure a model on a split.

    Args:
        model: the model; it is put into evaluation mode and back.
        task: what to do.
        split: for example `test`.
        config: how much is read at a time, and how; its `every` and `batches` are for those who train.
        precision: of the arithmetic, where the configuration does not ask for exactness.
        batches: look at so many batches only.
        group: the processes that share the work.
        watch: is told, after each batch, how many are done.
    """
    config = config or EvalConfig()
    precision = "float32" if config.exact else precision
    group = group or Processes(device=next(model.parameters()).device)
    totals = torch.zeros(2, dtype=torch.float64)
    state = None
    with _evaluating(model, config.chunk_size), autocast(group.device, precision):
        some = itertools.islice(task.eval_batches(split, config.batch_size, group.rank, group.world), batches)
        for done, host in enumerate(some, 1):
            batch = host.to(group.device)
            carried = {"state": state if batch.continues else None} if task.kind in ("language", "forecast") else {}
            output = model(**batch.model_inputs(), **carried, return_state=bool(carried))
            state = output.state
            totals += torch.stack([part.double().cpu() for part in task.metric_sums(output.logits, batch)])
            if watch is not None:
                watch(done)
    total, count = group.total(totals).tolist()
    value = total / count if count else math.nan
    return Score(metric=task.metric, value=value, count=int(count), higher_is_better=task.higher_is_better)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Arithmetic in the precision of a run."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def _evaluating(model: SequenceModel, chunk_size: int | None) -> Iterator[None]:
    training, attention = model.training, model.config.attention
    model.eval()
    try:
        if chunk_size is not None and attention is not None:
            model.set_chunk_size(chunk_size)
        yield
    finally:
        if chunk_size is not None and attention is not None:
            model.set_chunk_size(attention.chunk_size)
        model.train(training)
