"""`tcnca bench layer`, `model` and `lra`: TCNCA against others, as one layer, one training step and as LRA encoders."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tcnca.bench.case import DEEP_TOLERANCE, BenchCase, Settings, Workload, optimizer_step
from tcnca.bench.fla import fla_cases
from tcnca.bench.timing import Cost
from tcnca.data import Batch
from tcnca.data.tasks.base import class_loss
from tcnca.errors import ConfigError, KernelError
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
from tcnca.training.config import OptimizerConfig, RuntimeConfig
from tcnca.training.distributed import DistContext, parallelize
from tcnca.training.evaluate import autocast
from tcnca.training.graphs import TrainingGraphs
from tcnca.training.optimizer import build_optimizers, set_lr
from tcnca.training.recipe import load_recipe

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
ENWIK8_LAYERS = 12
CPU_LAYERS, CPU_CHUNK_SIZE = 2, 256
_LR = 1e-5
"""Small enough that random targets do not make the weights diverge, however many steps are timed."""
_CHECK_LENGTH, _CHECK_LAYERS = 512, 2
_FLOAT_BYTES = 4


class Candidate(NamedTuple):
    """A family of models. `overrides` change its presets, `exact` the oracle."""

    name: str
    label: str
    family: str
    overrides: Mapping[str, Any]
    exact: Mapping[str, Any]


TRANSFORMER = Candidate("transformer", "Transformer", "transformer", {"d_ff": 2144}, {})
"""With 39 million parameters, like the others; attention over whole rows by PyTorch's fused kernels."""


def candidates(settings: Settings) -> list[Candidate]:
    """Return all models. The oracle of an EMA uses another algorithm."""
    fft, scan = {"backend": "fft"}, {"backend": "scan"}
    # The Triton scan does not support truncation: its kernels are as long as the sequence.
    fastest = {"backend": "triton", "truncation": None} if settings.on_gpu else scan
    return [
        Candidate("tcnca", "TCNCA", "tcnca", {}, {}),
        Candidate("tcnca-linear", "TCNCA-linear", "tcnca-linear", {}, {}),
        Candidate("mega-fft", "MEGA, EMA by FFT", "mega", fft, scan),
        Candidate("mega-scan", "MEGA, EMA by scan", "mega", fastest, fft),
    ]


def layer_cases(settings: Settings) -> list[BenchCase]:
    """Return one layer of every EnWik8 model, eager and compiled, without dropout so that the two can be compared."""
    return _enwik8_cases("layer", settings, (1, 2048), {"dropout": 0.0})


def model_cases(settings: Settings) -> list[BenchCase]:
    """Return a training step of every EnWik8 model, eager and compiled, and of the models of others on a GPU."""
    num_layers = settings.num_layers or (ENWIK8_LAYERS if settings.on_gpu else CPU_LAYERS)
    found = _enwik8_cases("model", settings, (1, 1024), {"num_layers": num_layers}, [TRANSFORMER])
    sizes = dict.fromkeys((case.sizes["batch"], case.sizes["length"]) for case in found) if settings.on_gpu else {}
    return found + [
        case for batch, length in sizes for case in fla_cases(settings, int(batch), int(length), num_layers)
    ]


def _enwik8_cases(
    suite: str,
    settings: Settings,
    cpu_size: tuple[int, int],
    overrides: Mapping[str, Any],
    others: Sequence[Candidate] = (),
) -> list[BenchCase]:
    batch, length = GPU_SIZE if settings.on_gpu else cpu_size
    return [
        _case(suite, settings, candidate, overrides, {"batch": batch, "length": length}, compiled)
        for batch, length in itertools.product(settings.batches or (batch,), settings.lengths or (length,))
        for candidate in (*candidates(settings), *others)
        for compiled in ((False, True) if settings.compile else (False,))
    ]


def lra_cases(settings: Settings) -> list[BenchCase]:
    """Return inference and a training step of every Long-Range Arena encoder, smaller on a CPU."""
    found = []
    for task, size in LRA_SIZES.items():
        batch, length = size if settings.on_gpu else LRA_CPU_SIZE
        batch = settings.batches[0] if settings.batches else batch
        length = min(size[1], settings.lengths[0] if settings.lengths else length)
        model, overrides = preset(f"mega-{task}").model, {}
        if not settings.on_gpu:
            assert model.attention is not None
            chunk_size = min(model.attention.chunk_size or CPU_CHUNK_SIZE, CPU_CHUNK_SIZE)
            overrides = {"num_layers": min(model.num_layers, CPU_LAYERS), "chunk_size": chunk_size}
        if settings.num_layers is not None:
            overrides["num_layers"] = settings.num_layers
        sizes = {"task": task, "batch": batch, "length": length}
        found += [_case("lra", settings, candidate, overrides, sizes) for candidate in candidates(settings)]
    return found


def _case(
    suite: str,
    settings: Settings,
    candidate: Candidate,
    overrides: Mapping[str, Any],
    sizes: Mapping[str, Any],
    compiled: bool = False,
) -> BenchCase:
    if settings.dtype not in DEEP_TOLERANCE:
        raise ConfigError("--dtype: expected float32 or bfloat16, got float16, in which models do not train")
    batch, length, task, layer = sizes["batch"], sizes["length"], sizes.get("task", "enwik8"), suite == "layer"
    config = preset(f"{candidate.family}-{task}").model.override(**candidate.overrides, **overrides)
    tokens = batch * length * config.head.documents
    if layer:
        build = functools.partial(_layer_workload, config, settings, batch, length)
    else:
        optimizer = load_recipe(f"{task}-{candidate.family}").optimizer
        build = functools.partial(_training_workload, config, settings, batch, length, optimizer, suite == "lra")
    return BenchCase(
        name=candidate.name + ("-compiled" if compiled else ""),
        label=candidate.label + (", compiled" if compiled else ""),
        sizes=sizes if layer else {**sizes, "num_layers": config.num_layers},
        tokens=tokens,
        build=functools.partial(build, compiled=compiled),
        build_check=functools.partial(_compiled_check, build, layer)
        if compiled
        else functools.partial(_check, config, config.override(**candidate.exact), settings, length, layer),
        cost=_cost(config, length, tokens, layer),
        tolerance=DEEP_TOLERANCE[settings.dtype],
        joint_gradients=True,
        isolated=layer,
    )


def _check(
    config: ModelConfig, exact_config: ModelConfig, settings: Settings, length: int, layer: bool
) -> tuple[Workload, Workload]:
    """Build a layer or a shallow model without dropout on one short row, and the same in float64 on the CPU."""

    def build(config: ModelConfig) -> nn.Module:
        config = config.override(num_layers=min(config.num_layers, _CHECK_LAYERS))
        return Layer(config) if layer else SequenceModel(config).eval()

    exact, module = build(exact_config).double(), build(config)
    module.load_state_dict(exact.state_dict())
    module = module.to(settings.device)
    length = min(length, _CHECK_LENGTH)
    inputs = (torch.randn(1, length, config.d_model),) if layer else _inputs(config, 1, length)
    exact_inputs = tuple(part.double().requires_grad_(layer) if part.is_floating_point() else part for part in inputs)
    moved = tuple(part.to(settings.device).requires_grad_(layer) for part in inputs)
    leaves, exact_leaves = (moved, exact_inputs) if layer else ((), ())
    oracle = Workload(lambda: exact(*exact_inputs, return_state=False)[0], (*exact_leaves, *exact.parameters()))
    return Workload(lambda: _output(module, moved, settings), (*leaves, *module.parameters())), oracle


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
    return Workload(lambda: _output(block, (x,), settings), (x, *block.parameters()))


def _training_workload(
    config: ModelConfig,
    settings: Settings,
    batch: int,
    length: int,
    optimizer_config: OptimizerConfig,
    inference: bool,
    compiled: bool,
) -> Workload:
    """Build a training step on random data and, on request, inference and the step with CUDA graphs."""
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
        return loss(inputs, targets)

    def loss(inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        with _autocast(settings):
            return class_loss(wrapped(*inputs, return_state=False)[0], targets)

    max_grad_norm = optimizer_config.max_grad_norm
    step = functools.partial(optimizer_step, optimizer, parameters, max_grad_norm, settings.on_gpu)
    if not inference:
        return Workload(run, parameters, step)
    eval_model = SequenceModel(config).to(settings.device).eval()
    eval_model.load_state_dict(model.state_dict())
    infer = torch.no_grad()(lambda: _output(eval_model, inputs, settings))
    if not settings.on_gpu:
        return Workload(run, parameters, step, infer)

    def forward_backward(held: Batch) -> Tensor:
        documents = (held.inputs,) if held.second is None else (held.inputs, held.second)
        found = loss(documents, held.targets)
        found.backward()
        return found.detach()

    second = inputs[1] if len(inputs) > 1 else None
    on_host = Batch(inputs=inputs[0], second=second, targets=targets).to("cpu").pin_memory()
    graphed = TrainingGraphs(forward_backward, settings.device, _fail)

    def graphed_step() -> None:
        graphed(on_host)
        step(set_to_none=False)

    return Workload(run, parameters, step, infer, graphed_step)


def _fail(reason: str) -> None:
    raise KernelError(reason)


def _autocast(settings: Settings) -> torch.autocast:
    return autocast(settings.device, "bf16" if settings.dtype == torch.bfloat16 else "float32")


def _output(module: nn.Module, inputs: tuple[Tensor, ...], settings: Settings) -> Tensor:
    """Run a layer or model without a state."""
    with _autocast(settings):
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


def _cost(config: ModelConfig, length: int, tokens: int, layer: bool) -> dict[str, Cost]:
    """Minimal cost of each phase. Activations between layers are not counted, since they could stay on the chip."""
    with torch.device("meta"):
        module = Layer(config) if layer else SequenceModel(config)
    weights = _FLOAT_BYTES * sum(parameter.numel() for parameter in module.parameters())
    sequence = _FLOAT_BYTES * tokens * config.d_model if layer else 0
    flops = 2 * tokens * (module.macs(length) if isinstance(module, Layer) else module.macs_per_token(length))
    forward, backward = Cost(2 * sequence + weights, flops), Cost(3 * sequence + 2 * weights, 2 * flops)
    # The optimizer reads weights, gradients and Adam's two moments, and writes all but the gradients.
    optimizer = Cost(7 * weights, 0)
    step = Cost(forward.bytes + backward.bytes + optimizer.bytes, forward.flops + backward.flops)
    return {"inference": forward, "forward": forward, "backward": backward, "optimizer": optimizer, "step": step}
