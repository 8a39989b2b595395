"""Models of flash-linear-attention in `tcnca bench model`: linear attention and state-space models of others.

The package is a dependency of this benchmark alone. Where it is missing, the benchmark says so and measures the rest.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tcnca.bench.case import DEEP_TOLERANCE, BenchCase, Settings, Workload, optimizer_step
from tcnca.errors import ConfigError
from tcnca.training.evaluate import autocast

_VOCAB_SIZE, _D_MODEL = 256, 512
_LAYERS = 12
"""Layers of the models that these are compared with, to which the sizes below fit."""
_LR, _MAX_GRAD_NORM = 1e-5, 1.0
_CHECK_LENGTH, _CHECK_LAYERS = 512, 2


class _Candidate(NamedTuple):
    """A model of the package, with about 39 million parameters.

    name: of the candidate.
    family: beginning of the names of its classes.
    layers: layers for every twelve of ours.
    fields: of its configuration.
    needs: another package, without which it computes in plain PyTorch.
    """

    name: str
    label: str
    family: str
    layers: int
    fields: Mapping[str, Any]
    needs: str = ""


_CANDIDATES = (
    _Candidate(
        name="gated-deltanet",
        label="Gated DeltaNet (flash-linear-attention)",
        family="GatedDeltaNet",
        layers=12,
        fields={"head_dim": 128, "num_heads": 3, "intermediate_size": 1088},
    ),
    _Candidate(
        name="mamba2",
        label="Mamba-2 (flash-linear-attention)",
        family="Mamba2",
        layers=23,
        fields={"head_dim": 64, "num_heads": 16, "state_size": 128},
        needs="mamba_ssm",
    ),
)


def fla_cases(settings: Settings, batch: int, length: int, num_layers: int) -> list[BenchCase]:
    """Return a training step of each model, at the size of `num_layers` layers of ours.

    There is no second implementation to compare with: the check compares autocast with float32.
    """
    return [
        BenchCase(
            name=candidate.name,
            label=candidate.label,
            sizes={"batch": batch, "length": length, "num_layers": num_layers},
            tokens=batch * length,
            build=functools.partial(_workload, candidate, settings, batch, length, num_layers),
            build_check=functools.partial(_check, candidate, settings, min(length, _CHECK_LENGTH)),
            cost={},
            tolerance=DEEP_TOLERANCE[torch.bfloat16],
            joint_gradients=True,
            isolated=False,
        )
        for candidate in _CANDIDATES
    ]


def _model(candidate: _Candidate, num_layers: int, device: torch.device) -> nn.Module:
    for package in filter(None, ("fla", candidate.needs)):
        if importlib.util.find_spec(package) is None:
            name = "flash-linear-attention" if package == "fla" else package.replace("_", "-")
            raise ConfigError(f"{candidate.name}: expected the package {name}, got none; pip install {name}")
    models = importlib.import_module("fla.models")
    config = getattr(models, f"{candidate.family}Config")(
        vocab_size=_VOCAB_SIZE,
        hidden_size=_D_MODEL,
        num_hidden_layers=max(1, round(candidate.layers * num_layers / _LAYERS)),
        tie_word_embeddings=True,
        use_cache=False,
        **candidate.fields,
    )
    model: nn.Module = getattr(models, f"{candidate.family}ForCausalLM")(config)
    return model.to(device)


def _workload(candidate: _Candidate, settings: Settings, batch: int, length: int, num_layers: int) -> Workload:
    """Build a training step on random data."""
    torch.manual_seed(0)
    model = _model(candidate, num_layers, settings.device).train()
    parameters = tuple(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=_LR, fused=settings.on_gpu)
    tokens = torch.randint(_VOCAB_SIZE, (batch, length), device=settings.device)

    def run() -> Tensor:
        with autocast(settings.device, "bf16"):
            loss: Tensor = model(tokens, labels=tokens).loss
        return loss

    step = functools.partial(optimizer_step, optimizer, parameters, _MAX_GRAD_NORM, settings.on_gpu)
    return Workload(run, parameters, step)


def _check(candidate: _Candidate, settings: Settings, length: int) -> tuple[Workload, Workload]:
    """Build a shallow model in the dtype of the benchmark, and the same in float32."""
    if settings.dtype != torch.bfloat16:
        raise ConfigError(
            f"--dtype: expected bfloat16 for {candidate.name}, which is compared with float32, got float32"
        )
    models = [_model(candidate, _CHECK_LAYERS, settings.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(_VOCAB_SIZE, (1, length), device=settings.device)

    def logits(model: nn.Module, enabled: bool) -> Tensor:
        with autocast(settings.device, "bf16" if enabled else "float32"):
            found: Tensor = model(tokens).logits
        return found

    tested, exact = (
        Workload(functools.partial(logits, model, enabled), tuple(model.parameters()))
        for model, enabled in zip(models, (True, False), strict=True)
    )
    return tested, exact
