"""The score of a model on a split: everything counted once, on any number of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import torch

from tcnca.data import Task
from tcnca.models import SequenceModel
from tcnca.training.config import Precision
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


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    task: Task,
    split: str,
    size: int,
    *,
    chunk: int | None = None,
    batches: int | None = None,
    precision: Precision = "float32",
    group: Processes | None = None,
) -> Score:
    """Measure a model on a split.

    Args:
        model: the model; it is put into evaluation mode and back.
        task: what to do.
        split: for example `test`.
        size: examples, or rows of a language model, read side by side.
        chunk: chunk of the attention; None for the model's own.
        batches: look at so many batches only.
        precision: of the arithmetic.
        group: the processes that share the work.
    """
    group = group or Processes(device=next(model.parameters()).device)
    totals = torch.zeros(2, dtype=torch.float64)
    state = None
    with _evaluating(model, chunk), autocast(group.device, precision):
        for host in itertools.islice(task.evaluation(split, size, group.rank, group.world), batches):
            batch = host.to(group.device)
            carried = {"state": state if batch.continues else None} if task.kind in ("language", "forecast") else {}
            output = model(**batch.arguments(), **carried, return_state=bool(carried))
            state = output.state
            totals += torch.stack([part.double().cpu() for part in task.tally(output.logits, batch)])
    total, count = group.total(totals).tolist()
    return Score(metric=task.metric, value=total / max(count, 1), count=int(count))


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Arithmetic in the precision of a run."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextlib.contextmanager
def _evaluating(model: SequenceModel, chunk: int | None) -> Iterator[None]:
    training, attention = model.training, model.config.attention
    model.eval()
    try:
        if chunk is not None and attention is not None:
            model.set_chunk(chunk)
        yield
    finally:
        if chunk is not None and attention is not None:
            model.set_chunk(attention.chunk)
        model.train(training)
