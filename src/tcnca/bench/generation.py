"""`tcnca bench generate`: one token of the EnWik8 models, by the model itself and by the steps of generation."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcnca.bench.case import DEEP_TOLERANCE, BenchCase, Settings, Workload
from tcnca.bench.timing import Cost
from tcnca.errors import ConfigError
from tcnca.generation.dispatch import ModelStep
from tcnca.generation.fused import FusedStep
from tcnca.generation.packed import PackedStep
from tcnca.generation.prompts import prefill
from tcnca.generation.step import Step
from tcnca.models import ModelConfig, ModelState, SequenceModel, TokenInputConfig, preset

# Batch sizes, and positions in the first chunk: as many keys and values are read.
BATCHES, POSITIONS = {"cpu": (1, 8), "cuda": (1, 64)}, (64, 1024)
# Six layers of width 256, 7.5 M parameters.
CPU_SIZES = {"num_layers": 6, "d_model": 256, "d_ff": 512, "vocab_size": 256}
_CHECK_TOKENS, _CHECK_LAYERS = 12, 2
_ROUNDED_TOLERANCE = 0.1
_STEPS_AT_POSITION = 32
"""Steps after which a measured sequence is put back to its position."""
_FAMILIES = {"tcnca": "TCNCA", "tcnca-linear": "TCNCA-linear", "mega": "MEGA"}


class _Kind(NamedTuple):
    """A way to take a step."""

    suffix: str
    label: str
    quantization: Any = None
    cache_dtype: Any = None


_KINDS = (
    _Kind("", ""),
    _Kind("-int8", ", int8", quantization="int8"),
    _Kind("-float8", ", float8 cache", cache_dtype="float8"),
    _Kind("-model", ", the model itself"),
)


def generation_cases(settings: Settings) -> list[BenchCase]:
    """Return every model, with each way to take a step, at each batch size and position."""
    if settings.dtype not in DEEP_TOLERANCE:
        raise ConfigError("--dtype: expected float32 or bfloat16, got float16")
    return [
        _case(settings, family, kind, batch, position)
        for batch, position in itertools.product(
            settings.batches or BATCHES[settings.device.type], settings.lengths or POSITIONS
        )
        for family, kind in itertools.product(_FAMILIES, _KINDS)
        if settings.on_gpu or kind.cache_dtype is None
    ]


def _case(settings: Settings, family: str, kind: _Kind, batch: int, position: int) -> BenchCase:
    config = preset(f"{family}-enwik8").model.override(**({} if settings.on_gpu else CPU_SIZES))
    if settings.num_layers is not None:
        config = config.override(num_layers=settings.num_layers)
    rounded = kind.quantization is not None or kind.cache_dtype is not None
    return BenchCase(
        name=family + kind.suffix,
        label=_FAMILIES[family] + kind.label,
        sizes={"batch": batch, "position": position, "num_layers": config.num_layers, "d_model": config.d_model},
        tokens=batch,
        build=functools.partial(_workload, config, settings, kind, batch, position),
        build_check=functools.partial(_check, config, settings, kind),
        cost={"forward": _cost(config, settings, kind, batch, position)},
        tolerance=_ROUNDED_TOLERANCE if rounded else DEEP_TOLERANCE[settings.dtype],
        isolated=False,
        graph=False,
    )


def _make_step(model: SequenceModel, state: ModelState, kind: _Kind) -> Step:
    if kind.suffix == "-model":
        return ModelStep(model, state)
    if model.embedding.weight.is_cuda:
        return FusedStep(model, state, quantization=kind.quantization, cache_dtype=kind.cache_dtype)
    return PackedStep(model, state, quantization=kind.quantization)


def _workload(config: ModelConfig, settings: Settings, kind: _Kind, batch: int, position: int) -> Workload:
    model = SequenceModel(config).to(settings.device, settings.dtype).eval()
    with torch.no_grad():
        _, state = prefill(model, torch.randint(_vocab_size(config), (batch, position), device=settings.device))
    step, token = _make_step(model, state, kind), torch.randint(_vocab_size(config), (batch,), device=settings.device)
    rows, taken = [state.reorder([row]) for row in range(batch)], 0

    def run() -> Tensor:
        nonlocal taken
        # Now and then back to the position, which is not the time of a median step.
        if taken == _STEPS_AT_POSITION:
            for row, each in enumerate(rows):
                step.load(row, each)
            taken = 0
        taken += 1
        return step(token)

    return Workload(torch.no_grad()(run))


def _check(config: ModelConfig, settings: Settings, kind: _Kind) -> tuple[Workload, Workload]:
    """Build steps of a shallow model from its first token on, and the parallel forward pass of it in float64."""
    config = config.override(num_layers=min(config.num_layers, _CHECK_LAYERS))
    exact = SequenceModel(config).to(settings.dtype).double().eval()
    model = SequenceModel(config).to(settings.device, settings.dtype).eval()
    model.load_state_dict(exact.state_dict())
    tokens = torch.randint(_vocab_size(config), (2, _CHECK_TOKENS))

    @torch.no_grad()
    def run() -> Tensor:
        step = _make_step(model, model.initial_state(2), kind)
        return torch.stack([step(token).clone() for token in tokens.to(settings.device).unbind(1)], 1)

    @torch.no_grad()
    def oracle() -> Tensor:
        return exact(tokens, return_state=False).logits

    return Workload(run), Workload(oracle)


def _vocab_size(config: ModelConfig) -> int:
    assert isinstance(config.input, TokenInputConfig)
    return config.input.vocab_size


def _cost(config: ModelConfig, settings: Settings, kind: _Kind, batch: int, position: int) -> Cost:
    """Minimal cost: weights and the chunk are read once."""
    with torch.device("meta"):
        model = SequenceModel(config)
    attention = config.attention
    assert attention is not None
    length = position % (attention.chunk_size or position) + 1
    size = settings.dtype.itemsize
    weights = sum(weight.numel() for weight in model.parameters()) * (size if kind.quantization is None else 1)
    values = attention.d_value * (size if kind.cache_dtype is None else 1)
    chunk = config.num_layers * batch * length * (attention.d_key * size + values)
    return Cost(weights + chunk, 2 * batch * model.macs_per_token(length))
