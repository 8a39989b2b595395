"""`tcnca bench layer`, `model` and `lra`: TCNCA against MEGA, as one layer, one training step and as LRA encoders."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tcnca.bench.case import BenchCase, Settings, Workload
from tcnca.bench.oracle import DEEP_TOLERANCE
from tcnca.bench.roofline import Cost
from tcnca.data.tasks.base import class_loss
from tcnca.errors import ConfigError
from tcnca.layers import Layer
from tcnca.models import (
    ClassifierHeadConfig,
    ModelConfig,
    PairHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
    preset,
)
from tcnca.training import DistContext, OptimizerConfig, RuntimeConfig, build_optimizers, load_recipe, set_lr
from tcnca.training.config import Precision
from tcnca.training.distributed import parallelize
from tcnca.training.evaluate import autocast

# Batch size and length of the EnWik8 models, and of each task; for Retrieval, pairs of documents.
GPU_SIZE = (8, 8192)
LRA_SIZES = {
    "listops": (32, 2048),
    "text": (32, 4096),
    "retrieval": (16, 4096),
    "image": (50, 1024),
    "pathfinder": (50, 1024),
    "pathx": (16, 16_384),
}
LRA_CPU_SIZE = (1, 1024)
CPU_LAYERS, CPU_CHUNK_SIZE = 2, 256
_LR = 1e-5
"""Small enough that random targets do not make the weights diverge, however many steps are timed."""
_CHECK_LENGTH, _CHECK_LAYERS = 512, 2
_FLOAT_BYTES = 4
_DESCRIPTIONS = {
    "layer": "one gated layer, without dropout",
    "model": "a training step on random bytes, with dropout, gradient clipping and AdamW",
    "lra": "the encoder on random data, inference and a training step",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model of a task. `overrides` change its preset, `exact` the oracle."""

    name: str
    label: str
    family: str
    overrides: dict[str, Any]
    exact: dict[str, Any]

    def config(self, task: str, **overrides: Any) -> ModelConfig:
        """Return the configuration for a task."""
        return preset(f"{self.family}-{task}").model.override(**self.overrides, **overrides)

    def optimizer(self, task: str) -> OptimizerConfig:
        """Return the optimizer of the task's recipe."""
        return load_recipe(f"{task}-{self.family}").optimizer


def candidates(settings: Settings) -> list[Candidate]:
    """Return all models. The oracle of an EMA uses another algorithm."""
    # The Triton scan does not support truncation: its kernels are as long as the sequence.
    triton = {"backend": "triton", "truncation": None}
    scan = triton if settings.device.type == "cuda" else {"backend": "scan"}
    fft, other = {"backend": "fft"}, {"backend": "scan"}
    return [
        Candidate(name="tcnca", label="TCNCA", family="tcnca", overrides={}, exact={}),
        Candidate(name="tcnca-linear", label="TCNCA-linear", family="tcnca-linear", overrides={}, exact={}),
        Candidate(name="mega-fft", label="MEGA, EMA by FFT", family="mega", overrides=fft, exact=other),
        Candidate(name="mega-scan", label="MEGA, EMA by scan", family="mega", overrides=scan, exact=fft),
    ]


def layer_cases(settings: Settings) -> list[BenchCase]:
    """Return one layer of every EnWik8 model, eager and compiled, without dropout so that the two can be compared."""
    return [
        _case("layer", settings, candidate, candidate.config("enwik8", dropout=0.0), sizes, compiled)
        for sizes in _sizes(settings, (1, 2048))
        for candidate in candidates(settings)
        for compiled in ((False, True) if settings.compile else (False,))
    ]


def model_cases(settings: Settings) -> list[BenchCase]:
    """Return a training step of every EnWik8 model, eager and compiled."""
    num_layers = settings.num_layers or (None if settings.device.type == "cuda" else CPU_LAYERS)
    overrides = {} if num_layers is None else {"num_layers": num_layers}
    return [
        _case("model", settings, candidate, candidate.config("enwik8", **overrides), sizes, compiled)
        for sizes in _sizes(settings, (1, 1024))
        for candidate in candidates(settings)
        for compiled in ((False, True) if settings.compile else (False,))
    ]


def lra_cases(settings: Settings) -> list[BenchCase]:
    """Return inference and a training step of every Long-Range Arena encoder."""
    found = []
    for task, size in LRA_SIZES.items():
        batch, length = size if settings.device.type == "cuda" else LRA_CPU_SIZE
        batch = settings.batches[0] if settings.batches else batch
        length = min(size[1], settings.lengths[0] if settings.lengths else length)
        for candidate in candidates(settings):
            config = _resize(settings, candidate.config(task))
            sizes = {"task": task, "batch": batch, "length": length}
            found.append(_case("lra", settings, candidate, config, sizes))
    return found


def _sizes(settings: Settings, cpu_size: tuple[int, int]) -> list[dict[str, int]]:
    batch, length = GPU_SIZE if settings.device.type == "cuda" else cpu_size
    sizes = itertools.product(settings.batches or (batch,), settings.lengths or (length,))
    return [{"batch": batch, "length": length} for batch, length in sizes]


def _resize(settings: Settings, config: ModelConfig) -> ModelConfig:
    """Make a model smaller for a CPU, and as deep as requested."""
    overrides: dict[str, int] = {}
    if settings.device.type != "cuda":
        assert config.attention is not None
        chunk_size = min(config.attention.chunk_size or CPU_CHUNK_SIZE, CPU_CHUNK_SIZE)
        overrides = {"num_layers": min(config.num_layers, CPU_LAYERS), "chunk_size": chunk_size}
    if settings.num_layers is not None:
        overrides["num_layers"] = settings.num_layers
    return config.override(**overrides)


def _case(
    suite: str,
    settings: Settings,
    candidate: Candidate,
    config: ModelConfig,
    sizes: Mapping[str, Any],
    compiled: bool = False,
) -> BenchCase:
    batch, length, task, layer = sizes["batch"], sizes["length"], sizes.get("task", "enwik8"), suite == "layer"
    tokens = batch * length * config.head.documents
    build = functools.partial(_layer_workload, config, settings, batch, length)
    if not layer:
        optimizer = candidate.optimizer(task)
        build = functools.partial(_training_workload, config, settings, batch, length, optimizer, suite == "lra")
    check = functools.partial(_check, candidate, config, settings, length, layer)
    return BenchCase(
        suite=suite,
        name=candidate.name + ("-compiled" if compiled else ""),
        label=candidate.label + (", compiled" if compiled else ""),
        description=f"{task}: {_DESCRIPTIONS[suite]}",
        sizes=sizes if layer else {**sizes, "num_layers": config.num_layers},
        tokens=tokens,
        build=functools.partial(build, compiled=compiled),
        build_check=functools.partial(_compiled_check, build, layer) if compiled else check,
        cost=_layer_cost(config, length, tokens) if layer else _model_cost(config, length, tokens),
        tolerance=DEEP_TOLERANCE[settings.dtype],
        joint_gradients=True,
        isolated=layer,
    )


def _autocast(settings: Settings) -> contextlib.AbstractContextManager[object]:
    if settings.dtype == torch.float16:
        raise ConfigError("--dtype: expected float32 or bfloat16, got float16, in which models do not train")
    precision: Precision = "bf16" if settings.dtype == torch.bfloat16 else "float32"
    return autocast(settings.device, precision)


def _check(
    candidate: Candidate, config: ModelConfig, settings: Settings, length: int, layer: bool
) -> tuple[Workload, Workload]:
    """Build a layer or a shallow model without dropout on one short row, and the same in float64 on the CPU."""
    config = config.override(num_layers=min(config.num_layers, _CHECK_LAYERS))

    def build(config: ModelConfig) -> nn.Module:
        return Layer(config) if layer else SequenceModel(config).eval()

    exact, module = build(config.override(**candidate.exact)).double(), build(config)
    module.load_state_dict(exact.state_dict())
    module = module.to(settings.device)
    length = min(length, _CHECK_LENGTH)
    inputs = (torch.randn(1, length, config.d_model),) if layer else _inputs(config, 1, length)
    exact_inputs = tuple(part.double().requires_grad_(layer) if part.is_floating_point() else part for part in inputs)
    moved = tuple(part.to(settings.device).requires_grad_(layer) for part in inputs)

    def run() -> Tensor:
        with _autocast(settings):
            return _output(module, moved)

    leaves, exact_leaves = (moved, exact_inputs) if layer else ((), ())
    oracle = Workload(lambda: _output(exact, exact_inputs), (*exact_leaves, *exact.parameters()))
    return Workload(run, (*leaves, *module.parameters())), oracle


def _compiled_check(build: Callable[..., Workload], layer: bool) -> tuple[Workload, Workload]:
    """Build compiled and eager code at full size, since compiled code is specialized to its size.

    The eager candidate is compared with float64 in its own case. Of models, only the loss can be compared: compiled
    dropout draws other numbers, and a model without dropout compiles to other code.
    """
    compiled, eager = build(compiled=True), build(compiled=False)
    return (compiled, eager) if layer else (Workload(compiled.run), Workload(eager.run))


def _layer_workload(config: ModelConfig, settings: Settings, batch: int, length: int, compiled: bool) -> Workload:
    torch.manual_seed(0)
    block = Layer(config).to(settings.device)
    if compiled:
        block.compile(dynamic=False)
    x = torch.randn(batch, length, config.d_model).to(settings.device).requires_grad_()

    def run() -> Tensor:
        with _autocast(settings):
            return _output(block, (x,))

    return Workload(run, (x, *block.parameters()))


def _training_workload(
    config: ModelConfig,
    settings: Settings,
    batch: int,
    length: int,
    optimizer_config: OptimizerConfig,
    inference: bool,
    compiled: bool,
) -> Workload:
    """Build a training step on random data and, on request, inference."""
    torch.manual_seed(0)
    model = SequenceModel(config).to(settings.device)
    wrapped = parallelize(model, RuntimeConfig(compile=compiled), DistContext(device=settings.device))
    optimizers = build_optimizers(model, optimizer_config)
    set_lr(optimizers, _LR)
    (optimizer,) = optimizers
    inputs = tuple(part.to(settings.device) for part in _inputs(config, batch, length))
    targets = _targets(config, inputs[0]).to(settings.device)
    parameters = tuple(model.parameters())

    def run() -> Tensor:
        with _autocast(settings):
            return class_loss(_output(wrapped, inputs), targets)

    def optimizer_step() -> None:
        nn.utils.clip_grad_norm_(parameters, optimizer_config.max_grad_norm)
        for group in optimizer.param_groups:
            # PyTorch requires it during capture and warns about it otherwise.
            group["capturable"] = settings.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if not inference:
        return Workload(run, parameters, optimizer_step)
    eval_model = SequenceModel(config).to(settings.device).eval()
    eval_model.load_state_dict(model.state_dict())

    def infer() -> Tensor:
        with torch.no_grad(), _autocast(settings):
            return _output(eval_model, inputs)

    return Workload(run, parameters, optimizer_step, infer)


def _output(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Run a layer or model without a state."""
    output: Tensor = module(*inputs, return_state=False)[0]
    return output


def _inputs(config: ModelConfig, batch: int, length: int) -> tuple[Tensor, ...]:
    documents = range(config.head.documents)
    if isinstance(config.input, TokenInputConfig):
        vocab_size = config.input.vocab_size
        return tuple(torch.randint(vocab_size, (batch, length)) for _ in documents)
    assert isinstance(config.input, ValueInputConfig)
    features = config.input.features
    return tuple(torch.randn(batch, length, features) for _ in documents)


def _targets(config: ModelConfig, x: Tensor) -> Tensor:
    if isinstance(config.head, ClassifierHeadConfig | PairHeadConfig):
        return torch.randint(config.head.num_classes, x.shape[:1])
    assert isinstance(config.input, TokenInputConfig)
    return torch.randint(config.input.vocab_size, x.shape)


def _layer_cost(config: ModelConfig, length: int, tokens: int) -> dict[str, Cost]:
    with torch.device("meta"):
        block = Layer(config)
    weights = _FLOAT_BYTES * sum(parameter.numel() for parameter in block.parameters())
    sequence, flops = _FLOAT_BYTES * tokens * config.d_model, 2 * block.macs(length) * tokens
    return {
        "forward": Cost(2 * sequence + weights, flops),
        "backward": Cost(3 * sequence + 2 * weights, 2 * flops),
    }


def _model_cost(config: ModelConfig, length: int, tokens: int) -> dict[str, Cost]:
    """Minimal cost of each phase; activations between layers are not counted, since they could stay on the chip."""
    with torch.device("meta"):
        model = SequenceModel(config)
    weights = _FLOAT_BYTES * sum(parameter.numel() for parameter in model.parameters())
    flops = 2 * model.macs_per_token(length) * tokens
    # The optimizer reads weights, gradients and Adam's two moments, and writes all but the gradients.
    step = {
        "forward": Cost(weights, flops),
        "backward": Cost(2 * weights, 2 * flops),
        "optimizer": Cost(7 * weights, 0),
    }
    total = Cost(sum(cost.bytes for cost in step.values()), sum(cost.flops for cost in step.values()))
    return {"inference": step["forward"], **step, "step": total}
