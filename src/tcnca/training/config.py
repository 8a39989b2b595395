"""What a run is made of: typed, checked, and readable as a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tcnca.config import Config, check_at_least, check_choice, check_flag, check_not_negative, check_share
from tcnca.data.schema import Kind
from tcnca.errors import ConfigError

ScheduleKind = Literal["linear", "cosine", "wsd"]
Precision = Literal["float32", "bf16"]
Parallel = Literal["ddp", "fsdp"]
NonFinite = Literal["stop", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What to train on."""

    source: str = ""
    """A set that `tcnca data list` shows, or a file or folder of your own."""
    kind: Kind | None = None
    """What kind of data the recipe is for; None for any."""
    folder: str | None = None
    """Where prepared sets are; None for $TCNCA_DATA, or else `data`."""
    stream: bool = False
    """Whether training examples are made as they are needed, without end; for sets that are made."""
    val_fraction: float = 0.0
    """Share of the training split to validate on, where the set has no validation split."""
    task: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the task, such as `max_length: 1000`, or `carry_state: false` for EnWik8."""
    custom: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How to read data of your own, such as `text: body`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.source, str):
            raise ConfigError(f"data.source: got {self.source!r}, allowed is the name of a set, or a file or folder")
        if self.folder is not None and not isinstance(self.folder, str):
            raise ConfigError(f"data.folder: got {self.folder!r}, allowed is a folder")
        for name in ("task", "custom"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"data.{name}: got {getattr(self, name)!r}, allowed are keys and values")
        if self.kind is not None:
            check_choice("data.kind", self.kind, get_args(Kind))
        check_flag("data.stream", self.stream)
        check_share("data.val_fraction", self.val_fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig(Config):
    """What an update sees."""

    size: int = 32
    """Examples of an update, on all processes together; for a language model, tokens."""
    grad_accum_steps: int = 1
    """Parts into which each process cuts its share, one after the other, to need less memory."""
    seed: int = 0
    """Seed of the order of examples, of the weights and of dropout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch.size", self.size, 1)
        check_at_least("batch.grad_accum_steps", self.grad_accum_steps, 1)
        check_at_least("batch.seed", self.seed, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """Adam with decoupled weight decay. Norms, biases, EMA and the scales of gates are not decayed."""

    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices and kernels."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's decay rates."""
    eps: float = 1e-8
    """Adam's ε."""
    max_grad_norm: float = 1.0
    """Greatest norm of the gradient; 0 for no limit."""
    kernel_lr_mult: float = 1.0
    """Learning rate of the TCN's kernels, as a factor."""
    kernel_wd_mult: float = 1.0
    """Weight decay of the TCN's kernels, as a factor."""
    nonfinite: NonFinite = "stop"
    """What to do when the loss or the gradient is not finite: `stop` the run, or `skip` the update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        betas = tuple(self.betas) if isinstance(self.betas, list | tuple) else (self.betas,)
        object.__setattr__(self, "betas", betas)
        for name in ("lr", "weight_decay", "eps", "max_grad_norm", "kernel_lr_mult", "kernel_wd_mult"):
            check_not_negative(f"optimizer.{name}", getattr(self, name))
        if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
            raise ConfigError(f"optimizer.betas: got {self.betas}, allowed are two numbers from 0 up to, without, 1")
        check_choice("optimizer.nonfinite", self.nonfinite, get_args(NonFinite))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """How the learning rate goes up and down again."""

    max_steps: int = 10_000
    """Number of updates of the run."""
    warmup_steps: int = 500
    """Updates over which the learning rate rises to its peak."""
    warmup_start: float = 1e-7
    """Learning rate of the first update."""
    warmup_power: float = 1.0
    """Power of the rise: 1 is linear, 2 begins flat."""
    kind: ScheduleKind = "linear"
    """What follows: `linear` or `cosine` decay, or `wsd` until `decay` is left, then linear."""
    decay: float = 0.2
    """Share of the run over which a `wsd` schedule decays."""
    end: float = 0.0
    """Learning rate at the end, as a share of its peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("schedule.max_steps", self.max_steps, 1)
        check_at_least("schedule.warmup_steps", self.warmup_steps, 0)
        if self.warmup_steps > self.max_steps:
            raise ConfigError(
                f"schedule.warmup_steps: got {self.warmup_steps}, allowed is at most the updates, {self.max_steps}"
            )
        for name in ("warmup_start", "warmup_power", "end"):
            check_not_negative(f"schedule.{name}", getattr(self, name))
        check_choice("schedule.kind", self.kind, get_args(ScheduleKind))
        check_share("schedule.decay", self.decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """How to look at the model during and after training."""

    every: int = 1000
    """Updates between validations; 0 for none before the end."""
    batch_size: int = 64
    """Examples, or rows of a language model, read side by side."""
    chunk_size: int | None = None
    """Chunk of the attention in evaluation; None for that of training."""
    exact: bool = True
    """Whether to compute in float32, which gives the same score on every machine, or in the precision of the run."""
    batches: int | None = None
    """Batches of a validation during training; None for the whole split. The last one always sees it whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("eval.every", self.every, 0)
        check_at_least("eval.batch_size", self.batch_size, 1)
        check_flag("eval.exact", self.exact)
        for name in ("chunk_size", "batches"):
            if getattr(self, name) is not None:
                check_at_least(f"evaluation.{name}", getattr(self, name), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """What is kept of a run."""

    every: int = 1000
    """Updates between checkpoints; 0 for none by number of updates."""
    minutes: float = 10.0
    """Minutes between checkpoints; 0 for none by time."""
    keep: int = 2
    """How many of the last checkpoints stay; the best one stays as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("checkpoint.every", self.every, 0)
        check_not_negative("checkpoint.minutes", self.minutes)
        check_at_least("checkpoint.keep", self.keep, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Config):
    """How the run is computed."""

    precision: Precision = "float32"
    """`float32`, or `bf16`: weights in float32, most of the arithmetic in bfloat16."""
    compile: bool | Literal["gpu"] = False
    """Whether to compile the model's layers with `torch.compile`; `gpu` does so on a GPU only: a CPU needs a compiler
    of C++ for it. Each length of rows costs half a minute once; rows of unequal lengths are padded to a few."""
    threads: int = 0
    """Threads of a CPU; 0 for PyTorch's own choice. Small models, and busy machines, are faster with one."""
    activation_checkpointing: bool | Literal["cheap"] = False
    """Whether to compute layers again in the backward pass instead of keeping what they made: less memory. `cheap`
    does so with what costs next to nothing, in layers that are compiled; others keep all."""
    parallel: Parallel = "ddp"
    """What several processes share: the data (`ddp`), or weights, gradients and optimizer as well (`fsdp`)."""
    log_every: int = 50
    """Updates between lines of the log."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("runtime.precision", self.precision, get_args(Precision))
        if self.compile != "gpu":
            check_flag("runtime.compile", self.compile)
        check_at_least("runtime.threads", self.threads, 0)
        if self.activation_checkpointing != "cheap":
            check_flag("runtime.activation_checkpointing", self.activation_checkpointing)
        elif self.compile is False:
            raise ConfigError(
                "runtime.activation_checkpointing: got 'cheap' without runtime.compile, allowed is 'cheap' with it"
            )
        check_choice("runtime.parallel", self.parallel, get_args(Parallel))
        check_at_least("runtime.log_every", self.log_every, 1)
