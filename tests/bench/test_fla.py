"""Models of flash-linear-attention, which is not installed everywhere: a stand-in shows that they are built and run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tcnca.bench import fla, runner
from tcnca.bench.fla import fla_cases
from tcnca.bench.models import GPU_SIZE
from tests.bench.helpers import ROOFLINE, settings, timer

BF16 = settings(dtype=torch.bfloat16)


class StandInConfig:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class StandIn(nn.Module):
    """Answers as a model of the package does."""

    error = 0.0

    def __init__(self, config: StandInConfig) -> None:
        super().__init__()
        self.fields = config.fields
        self.embedding = nn.Embedding(config.fields["vocab_size"], 16)
        self.output = nn.Linear(16, config.fields["vocab_size"])

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> types.SimpleNamespace:
        logits = self.output(self.embedding(tokens))
        if torch.is_autocast_enabled("cpu"):
            logits = logits + self.error
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return types.SimpleNamespace(logits=logits, loss=loss)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "mamba_ssm"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    models: Any = types.ModuleType("fla.models")
    for family in ("GatedDeltaNet", "Mamba2"):
        setattr(models, f"{family}Config", StandInConfig)
        setattr(models, f"{family}ForCausalLM", StandIn)
    monkeypatch.setitem(sys.modules, "fla.models", models)


@pytest.mark.usefixtures("stand_in")
def test_a_training_step_is_timed() -> None:
    for case in fla_cases(BF16, 2, 8, 3):
        result = runner.measure(case, timer(), ROOFLINE)
        assert result.status == "timed", result.reason
        assert {"forward", "backward", "optimizer"} <= result.times.keys()


@pytest.mark.usefixtures("stand_in")
def test_layers_follow_those_of_the_other_models() -> None:
    layers = [fla._model(each, 12, torch.device("cpu")).fields["num_hidden_layers"] for each in fla._CANDIDATES]  # type: ignore[index]
    assert layers == [12, 23]


@pytest.mark.usefixtures("stand_in")
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "error", 1.0)
    assert runner.measure(fla_cases(BF16, 2, 8, 3)[0], timer(), ROOFLINE).status == "wrong"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = runner.measure(fla_cases(BF16, 2, 8, 3)[0], timer(), ROOFLINE)
    assert result.status == "not available"
    assert "pip install flash-linear-attention" in result.reason


def test_it_is_compared_with_float32() -> None:
    result = runner.measure(fla_cases(settings(), 2, 8, 3)[0], timer(), ROOFLINE)
    assert (result.status, "--dtype: expected bfloat16" in result.reason) == ("not available", True)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(2))
def test_the_real_models_have_as_many_parameters_and_run(index: int) -> None:
    pytest.importorskip("fla")
    candidate = fla._CANDIDATES[index]
    if candidate.needs:
        pytest.importorskip(candidate.needs)
    device = torch.device("cuda")
    parameters = sum(each.numel() for each in fla._model(candidate, 12, device).parameters())
    assert parameters == pytest.approx(39_160_000, rel=0.02)
    case = fla_cases(settings(device=device, dtype=torch.bfloat16), *GPU_SIZE, 12)[index]
    assert max(case.check_errors().values()) < case.tolerance
