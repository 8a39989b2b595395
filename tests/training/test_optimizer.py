"""Parameter groups, and the learning rate over a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcnca.training import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizers,
    parameter_groups,
    scheduled_lr,
    set_lr,
)
from tests.examples import FAMILY, small_model


def names_in(family: str, config: OptimizerConfig) -> dict[str, set[str]]:
    model = small_model(family)
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        group["name"]: {by_id[id(parameter)] for parameter in group["params"]}
        for group in parameter_groups(model, config)
    }


@pytest.mark.parametrize("family", FAMILY)
def test_norms_biases_ema_and_scales_are_not_decayed(family: str) -> None:
    groups = names_in(family, OptimizerConfig())
    together = [name for group in groups.values() for name in group]
    assert sorted(together) == sorted(name for name, _ in small_model(family).named_parameters())
    for name in groups["matrices"] | groups.get("kernels", set()):
        assert "norm" not in name
        assert not name.endswith(("bias", "gamma", "beta", "alpha", "delta", "omega", "scale"))
    assert {"embedding.weight", "layers.0.feed_forward.up.weight"} <= groups["matrices"]
    kernels = {f"layers.{i}.block.mixer.weight" for i in range(2)} if family.startswith("tcn") else set()
    assert groups.get("kernels", set()) == kernels


def test_kernels_have_factors_of_their_own() -> None:
    config = OptimizerConfig(lr=0.01, weight_decay=0.2, kernel_lr_mult=0.1, kernel_wd_mult=0.5)
    (optimizer,) = build_optimizers(small_model(), config)
    set_lr([optimizer], 0.004)
    found = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {"matrices": (0.004, 0.2), "kernels": (pytest.approx(0.0004), 0.1), "rest": (0.004, 0.0)}


def test_decay_is_decoupled() -> None:
    """With a zero gradient, a weight shrinks by learning rate times decay."""
    model = small_model("tcnca")
    (optimizer,) = build_optimizers(model, OptimizerConfig(weight_decay=0.5))
    set_lr([optimizer], 0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    weight, norm = "layers.0.feed_forward.up.weight", "layers.0.feed_forward.norm.weight"
    torch.testing.assert_close(after[weight].detach(), before[weight] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(after[norm].detach(), before[norm])


def rates(schedule: ScheduleConfig, peak: float = 1.0) -> list[float]:
    return [scheduled_lr(step / schedule.max_steps, peak, schedule) for step in range(schedule.max_steps + 1)]


def test_linear_is_as_published() -> None:
    found = rates(ScheduleConfig(max_steps=100, warmup_steps=20, warmup_start=1e-7), peak=0.005)
    for step, rate in enumerate(found):
        expected = 1e-7 + step * (0.005 - 1e-7) / 20 if step < 20 else 0.005 * (100 - step) / 80
        assert rate == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 50, "warmup_start": 0.0, "warmup_power": 2}, {25: 0.25, 50: 1.0}),
        ({"warmup_steps": 0, "kind": "cosine", "end": 0.1}, {0: 1.0, 25: 0.1 + 0.9 * 0.8535534, 50: 0.55, 100: 0.1}),
        ({"warmup_steps": 10, "kind": "wsd", "decay": 0.2}, {10: 1.0, 50: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
    ],
)
def test_values_of_a_schedule(options: dict[str, Any], expected: dict[int, float]) -> None:
    found = rates(ScheduleConfig(max_steps=100, **options))
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 30, 100])
def test_learning_rate_rises_to_its_peak_and_falls_to_its_end(kind: str, warmup: int) -> None:
    schedule = ScheduleConfig(max_steps=100, warmup_steps=warmup, kind=kind, end=0.05)  # type: ignore[arg-type]
    found = rates(schedule)
    assert all(0 <= rate <= 1.0 + 1e-12 for rate in found)
    assert found[-1] == pytest.approx(1.0 if warmup == 100 else 0.05)
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    # A run that takes a little longer than its budget stays at its end.
    assert scheduled_lr(1.2, 1.0, schedule) == found[-1]


def test_a_warm_up_longer_than_the_run_is_capped() -> None:
    capped = rates(ScheduleConfig(max_steps=100, warmup_steps=500))
    assert capped == rates(ScheduleConfig(max_steps=100, warmup_steps=10))
    assert capped.index(max(capped)) == 10
