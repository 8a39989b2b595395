"""The sections of a recipe."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from tcnca.config import (
    Config,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OpenKeys,
    PositiveInt,
    Probability,
    Range,
    Seed,
)
from tcnca.data.custom.options import ARRAY_OPTIONS, TABLE_OPTIONS
from tcnca.data.schema import Kind
from tcnca.data.tasks import Task
from tcnca.errors import ConfigError

ScheduleKind = Literal["linear", "cosine", "wsd"]
Precision = Literal["float32", "bf16"]
Strategy = Literal["ddp", "fsdp"]
NonFinite = Literal["stop", "skip"]
OptimizerName = Literal["adamw", "muon"]


def _task_options(task: type[Task] = Task) -> Iterator[str]:
    """Return the names of the options of all tasks."""
    for each in task.__subclasses__():
        yield from (name for name in inspect.signature(each).parameters if name not in ("data", "stream"))
        yield from _task_options(each)


TASK_OPTIONS = tuple(dict.fromkeys(_task_options()))
"""Keys of `data.task`; which of them a data set takes depends on its task."""


class DataConfig(Config, shorthand="source"):
    """What to train on."""

    source: str = ""
    """A data set that `tcnca data list` shows, or a file or folder of your own."""
    kind: Kind | None = None
    """The kind of data that the recipe is for; None for any."""
    folder: str | None = None
    """Where prepared data sets are; None for $TCNCA_DATA, or else `data`."""
    stream: bool = False
    """Whether to generate an endless stream of training examples; for generated data sets."""
    val_fraction: Fraction = 0.0
    """Fraction of the training split to validate on, where the data set has no validation split."""
    task: Annotated[dict[str, Any], OpenKeys(TASK_OPTIONS)] = dataclasses.field(default_factory=dict)
    """Options of the task, such as `max_length: 1000`, or `carry_state: false` for EnWik8."""
    custom: Annotated[dict[str, Any], OpenKeys((*TABLE_OPTIONS, *ARRAY_OPTIONS))] = dataclasses.field(
        default_factory=dict
    )
    """How to read your own data, such as `text: body`."""


class BatchConfig(Config, shorthand="size"):
    """What a step reads."""

    size: PositiveInt = 32
    """Examples per step, over all processes; for a language model, tokens."""
    grad_accum_steps: PositiveInt = 1
    """Parts into which each process cuts its share, computed one after the other, to need less memory."""
    initial_size: PositiveInt | None = None
    """`size` at the start of the run, a divisor of it; None for `size` throughout. As many steps then read less data:
    give the run more `max_steps`, or a time budget."""
    grow_at: Fraction = 0.5
    """Fraction of the steps, or of the time budget, after which batches grow from `initial_size` to `size`."""
    seed: Seed = 0
    """Seed of the order of examples, of the weights and of dropout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_size is not None and self.size % self.initial_size:
            raise ConfigError(f"initial_size: expected a divisor of batch.size, {self.size}, got {self.initial_size}")


class OptimizerConfig(Config, shorthand="name"):
    """AdamW, or Muon for the matrices inside the layers. Norms, biases, EMA and the scales of gates are not decayed."""

    name: OptimizerName = "adamw"
    """`adamw`, or `muon` for the matrices inside the layers and AdamW for everything else."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices and kernels."""
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: NonNegativeFloat = 1e-8
    """Adam's ε."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Largest norm of the gradient; 0 for no limit."""
    muon_lr: NonNegativeFloat = 0.005
    """Peak learning rate of Muon. The root mean square of its updates is 0.2, about that of AdamW's."""
    muon_weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of Muon."""
    muon_momentum: Probability = 0.95
    """Decay rate of Muon's momentum."""
    muon_beta2: Probability | None = None
    """Decay rate of a running mean of the squares of each row of Muon's updates, by whose root the row is divided
    (NorMuon); None for updates as they are."""
    kernel_lr_mult: NonNegativeFloat = 1.0
    """Factor of the learning rate of the kernels of TCN and SGConv."""
    kernel_wd_mult: NonNegativeFloat = 1.0
    """Factor of the weight decay of the TCN's kernels; those of SGConv have none."""
    ssm_lr_mult: NonNegativeFloat = 1.0
    """Factor of the learning rate of state-space parameters, besides their own: 0.1 in S4D, 0.25 in S5, 0.5 in the
    LRU. They are not decayed."""
    ngram_lr_mult: NonNegativeFloat = 1.0
    """Factor of the learning rate of embeddings of n-grams."""
    nonfinite: NonFinite = "stop"
    """What to do when the loss or the gradient is not finite: `stop` the run, or `skip` the step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "muon" and not self.lr:
            raise ConfigError("lr: expected a positive number, which the schedule of both optimizers follows, got 0")


class ScheduleConfig(Config):
    """How long to train, and the learning rate over time."""

    max_steps: PositiveInt = 10_000
    """Number of training steps."""
    warmup_steps: NonNegativeInt = 500
    """Steps over which the learning rate rises to its peak. If they are more than the run has, a tenth of the run."""
    warmup_start: NonNegativeFloat = 1e-7
    """Learning rate of the first step."""
    warmup_power: NonNegativeFloat = 1.0
    """Power of the rise: 1 is linear, 2 begins flat."""
    kind: ScheduleKind = "linear"
    """Decay after the warm-up: `linear`, `cosine`, or `wsd`, which stays at the peak and then decays linearly."""
    decay: Fraction = 0.2
    """Fraction of the run over which a `wsd` schedule decays."""
    end: NonNegativeFloat = 0.0
    """Learning rate at the end, as a fraction of its peak."""

    @property
    def effective_warmup_steps(self) -> int:
        """The steps of warm-up: a run that is shorter than `warmup_steps` warms up for a tenth of its steps."""
        return self.warmup_steps if self.warmup_steps <= self.max_steps else self.max_steps // 10


class EvalConfig(Config):
    """How to evaluate the model during and after training."""

    every: NonNegativeInt = 1000
    """Steps between validations; 0 for none before the end."""
    batch_size: PositiveInt = 64
    """Examples, or rows of a language model, per batch. To need less memory than training, the model reads batches of
    more than 131,072 time steps, on a CPU 8,192, in parts."""
    chunk_size: PositiveInt | None = None
    """Chunk of the attention in evaluation; None for that of training."""
    exact: bool = False
    """Whether to compute in float32, which gives the same score on every machine, or in the precision of the run, which
    is several times as fast on a GPU. A CPU always computes in float32."""
    batches: PositiveInt | None = None
    """Batches of a validation during training; None for the whole split."""
    max_batches: PositiveInt | None = None
    """Most batches of any evaluation, the last ones of a run included; None for no limit."""


class CheckpointConfig(Config):
    """What to keep of a run."""

    every: NonNegativeInt = 1000
    """Steps between checkpoints; 0 for none by number of steps."""
    minutes: NonNegativeFloat = 10.0
    """Minutes between checkpoints; 0 for none by time."""
    keep: PositiveInt = 2
    """How many of the last checkpoints to keep; the best one is kept as well."""


class ParallelConfig(Config, shorthand="strategy"):
    """What several processes share. Without effect on one process."""

    strategy: Strategy = "ddp"
    """What all processes share: the data (`ddp`), or weights, gradients and optimizer as well (`fsdp`)."""
    data: PositiveInt | None = None
    """Parts of a batch, each of which has its own rows; None for as many as the processes allow."""
    context: PositiveInt = 1
    """Processes that divide the time axis of the same rows, for sequences that are too long for one. `data` times
    `context` is the number of processes. See docs/scaling.md."""


class RuntimeConfig(Config):
    """How to compute."""

    precision: Precision = "float32"
    """`float32`, or `bf16`: weights in float32, most of the arithmetic in bfloat16."""
    compile: bool | Literal["gpu"] = False
    """Whether to compile the layers with `torch.compile`; `gpu` does so on a GPU only, as a CPU needs a C++ compiler.
    That takes 13 to 19 seconds on one H200, and about ten when code of an earlier run is found. Language models are
    compiled once for rows of all lengths, others for each of a few lengths that rows are padded to."""
    cuda_graphs: bool = False
    """Whether to launch the forward and backward pass of a batch as one CUDA graph, for each batch shape that comes up
    repeatedly. Faster where launches take longer than the kernels; rows of unequal lengths are padded to a few, except
    those of forecasts. Without effect on a CPU and with several processes."""
    # Not compared, as a run may be resumed with another number.
    threads: Annotated[int, Range(0, 1024)] | Literal["auto"] = dataclasses.field(default=0, compare=False)
    """CPU threads; 0 for PyTorch's default, `auto` for the number that is fastest in a measurement before the run. With
    several processes, a GPU or `compile`, `auto` is PyTorch's default. A run may be resumed with another number."""
    activation_checkpointing: bool | Literal["cheap"] = False
    """Whether to recompute layers in the backward pass instead of keeping their activations: less memory. `cheap`
    recomputes only what costs next to nothing, in compiled layers."""
    parallel: ParallelConfig = ParallelConfig()
    """What several processes share: `ddp`, `fsdp`, or `{data: 2, context: 4}`."""
    log_every: PositiveInt = 50
    """Steps between log lines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_checkpointing == "cheap" and self.compile is False:
            raise ConfigError("activation_checkpointing: expected runtime.compile with 'cheap', got compile false")
