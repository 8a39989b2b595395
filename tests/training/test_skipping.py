"""Updates that are skipped leave no trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca.training import Processes, Run, Watch
from tests.training.tiny import recipe, weights


class Noted(Watch):
    """Keeps what a run logs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.lines: list[dict[str, Any]] = []

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Take note."""
        self.lines.append(dict(numbers))


def trained(folder: Path, poisoned: range, *changes: str) -> tuple[Run, dict[str, Any]]:
    """A run of 12 updates, some of which read what is not finite, and the only line of its log."""
    watch = Noted(folder)
    seldom = ["log_every=12", "eval.every=0", "checkpoint.every=0"]
    one = Run(recipe("nonfinite=skip", *seldom, *changes), folder, Processes(), watch)
    step = 0

    def poison(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return output * torch.nan if step - 1 in poisoned else output

    # In training only: the final scores are not poisoned.
    one.model.embedding.register_forward_hook(
        lambda module, inputs, output: poison(module, inputs, output) if one.model.training else output
    )
    one.train()
    (line,) = [line for line in watch.lines if "loss" in line]
    return one, line


def test_they_do_not_count_in_the_mean_loss(tmp_path: Path) -> None:
    still = ["lr=0", "schedule.warmup_start=0", "model.dropout=0"]
    _, plain = trained(tmp_path / "plain", range(0), *still)
    _, half = trained(tmp_path / "half", range(6), *still)
    assert "skipped" not in plain
    assert half["skipped"] == 6
    # The model stands still, and twelve batches are much like six: it was half as much when they counted as nothing.
    assert half["loss"] == pytest.approx(plain["loss"], rel=0.1)
    assert half["norm"] == pytest.approx(plain["norm"], rel=0.3)


def test_a_line_of_nothing_but_skipped_updates_has_no_loss(tmp_path: Path) -> None:
    _, line = trained(tmp_path, range(12))
    assert line["skipped"] == 12
    assert line["loss"] != line["loss"]


def test_batch_norms_forget_them(tmp_path: Path) -> None:
    one, _ = trained(tmp_path, range(3, 5), "norm=batch")
    assert any("running_mean" in name for name in weights(one.model))
    assert all(torch.isfinite(tensor).all() for tensor in weights(one.model).values())
