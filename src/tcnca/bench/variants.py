"""The models that compete: TCNCA, and MEGA with its EMA by FFT or as a scan."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tcnca.bench.entry import Pair, Settings, Subject
from tcnca.data.tasks.base import class_loss
from tcnca.errors import ConfigError
from tcnca.layers import EMAConfig
from tcnca.models import (
    ClassifierHeadConfig,
    ModelConfig,
    PairHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
    preset,
)
from tcnca.training import OptimizerConfig, Processes, RuntimeConfig, build_optimizer, set_rate
from tcnca.training.config import Precision
from tcnca.training.evaluate import autocast
from tcnca.training.parallel import parallelize

_RATE = 1e-5
"""Learning rate: so small that random targets do no harm to the weights, however many steps are timed."""
_CHECKED = 512
"""Tokens, of one row and two layers at most, that are checked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to build the model of a task."""

    name: str
    label: str
    family: str
    changes: dict[str, Any]


def variants(device: torch.device) -> tuple[Variant, ...]:
    """All of them. The fused scan of a GPU knows no truncation: its kernels are as long as the sequence."""
    scan = {"backend": "triton", "truncation": None} if device.type == "cuda" else {"backend": "scan"}
    return (
        Variant(name="tcnca", label="TCNCA", family="tcnca", changes={}),
        Variant(name="mega-fft", label="MEGA, EMA by FFT", family="mega", changes={"backend": "fft"}),
        Variant(name="mega-scan", label="MEGA, EMA by scan", family="mega", changes=scan),
    )


def config_of(variant: Variant, task: str, **changes: Any) -> ModelConfig:
    """The model of a task."""
    return preset(f"{variant.family}-{task}").model.override(**variant.changes, **changes)


def precision_of(settings: Settings) -> Precision:
    """The precision of training that goes with the type of arithmetic."""
    if settings.dtype == torch.float16:
        raise ConfigError("--dtype: got float16, allowed are float32 and bfloat16: models do not train in float16")
    return "bf16" if settings.dtype == torch.bfloat16 else "float32"


def exact_config(config: ModelConfig) -> ModelConfig:
    """The configuration of a model's oracle: its EMA goes another way."""
    if not isinstance(config.mixer, EMAConfig):
        return config
    return config.override(backend="fft" if config.mixer.backend == "scan" else "scan")


def small_config(config: ModelConfig) -> ModelConfig:
    """A model of the same structure that is quick to check."""
    return config.override(num_layers=min(config.num_layers, 2))


def arithmetic(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """Autocast as in training."""
    return autocast(settings.device, precision_of(settings))


def inputs_of(config: ModelConfig, batch: int, length: int) -> tuple[Tensor, ...]:
    """Random input of a model: one sequence a row, or two for pairs of documents."""
    documents = config.head.documents
    if isinstance(config.input, TokenInputConfig):
        return tuple(torch.randint(config.input.vocab_size, (batch, length)) for _ in range(documents))
    assert isinstance(config.input, ValueInputConfig)
    return tuple(torch.randn(batch, length, config.input.features) for _ in range(documents))


def model_pair(config: ModelConfig, settings: Settings, length: int) -> Pair:
    """A small model in the precision of training, and the same in float64 on the CPU, without dropout."""
    config = small_config(config)
    exact = SequenceModel(exact_config(config)).eval()
    model = SequenceModel(config).eval()
    model.load_state_dict(exact.state_dict())
    model, exact = model.to(settings.device), exact.double()
    inputs = inputs_of(config, 1, min(length, _CHECKED))
    moved = tuple(part.to(settings.device) for part in inputs)
    doubled = tuple(part.double() if part.is_floating_point() else part for part in inputs)

    def run() -> Tensor:
        with arithmetic(settings):
            return _logits(model, moved)

    return Pair(
        Subject(run, tuple(model.parameters())), Subject(lambda: _logits(exact, doubled), tuple(exact.parameters()))
    )


def training_subject(
    config: ModelConfig,
    optimizer: OptimizerConfig,
    settings: Settings,
    batch: int,
    length: int,
    *,
    compiled: bool = False,
    inference: bool = False,
) -> Subject:
    """A step of training on random data, and inference beside it where that is wanted."""
    torch.manual_seed(0)
    model = SequenceModel(config).to(settings.device)
    stepper = parallelize(model, RuntimeConfig(compile=compiled), Processes(device=settings.device))
    adam = build_optimizer(model, optimizer)
    set_rate(adam, _RATE)
    inputs = tuple(part.to(settings.device) for part in inputs_of(config, batch, length))
    targets = _targets(config, inputs[0]).to(settings.device)
    parameters = tuple(model.parameters())

    def run() -> Tensor:
        with arithmetic(settings):
            return class_loss(_logits(stepper, inputs), targets)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm)
        for group in adam.param_groups:
            # Asked for inside a graph, and warned of outside.
            group["capturable"] = settings.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        adam.step()
        adam.zero_grad(set_to_none=True)

    if not inference:
        return Subject(run, parameters, update)
    reader = SequenceModel(config).to(settings.device).eval()
    reader.load_state_dict(model.state_dict())

    def infer() -> Tensor:
        with torch.no_grad(), arithmetic(settings):
            return _logits(reader, inputs)

    return Subject(run, parameters, update, infer)


def _logits(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    logits: Tensor = model(*inputs, return_state=False).logits
    return logits


def _targets(config: ModelConfig, x: Tensor) -> Tensor:
    if isinstance(config.head, ClassifierHeadConfig | PairHeadConfig):
        return torch.randint(config.head.num_classes, x.shape[:1])
    return torch.randint(config.input.vocab_size if isinstance(config.input, TokenInputConfig) else 1, x.shape)
