"""The number of threads that a run on a CPU uses."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnca.models import ModelConfig
from tcnca.training import DistContext, distributed, load_recipe, trainer
from tcnca.training.threads import fastest_threads, use_threads
from tests.training.tiny import TinyTrainer, assert_same, fit, recipe, weights


class Cores:
    """Cores on which a step takes a time that depends on the number of threads; it replaces a clock and PyTorch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], default: int) -> None:
        self.now, self.threads, self.seconds, self.used = 0.0, default, seconds, list[int]()
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", functools.partial(setattr, self, "threads"))

    def step(self) -> None:
        self.used.append(self.threads)
        self.now += self.seconds(self.threads)


@pytest.mark.parametrize(
    ("seconds", "default", "fastest", "fewest"),
    [
        (lambda threads: 0.1 / threads, 8, 8, 1),
        (lambda threads: 0.1 / min(threads, 4), 6, 4, 1),
        (lambda threads: 0.1 * threads, 8, 1, 1),  # many threads for a tiny model
        (lambda threads: 0.1 * 0.95**threads, 2, 1, 1),  # not worth a core
        (lambda threads: 60.0 / threads, 64, 64, 32),  # a large model is measured with few numbers only
        (lambda threads: 10.0, 64, 64, 64),
        (lambda threads: 0.1, 1, 1, None),
    ],
)
def test_the_fastest_number_of_threads_is_found(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], default: int, fastest: int, fewest: int | None
) -> None:
    cores = Cores(monkeypatch, seconds, default)
    assert fastest_threads(cores.step) == fastest
    assert cores.threads == default
    assert min(cores.used, default=None) == fewest
    assert cores.now < 3.0 + 2 * seconds(default)


@pytest.mark.parametrize("first", range(24))
def test_a_disturbance_does_not_change_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    cores = Cores(monkeypatch, lambda threads: 0.1 / threads + 0.3 * (0 <= len(cores.used) - first < 4), 4)
    assert fastest_threads(cores.step) == 4


def test_a_run_keeps_the_number_of_threads_that_was_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe names the number, so that the run can be repeated, and resumed, exactly."""
    measured = list[int]()

    def measure(step: Callable[[], None]) -> int:
        step()
        measured.append(2)
        return 2

    monkeypatch.setattr(trainer, "fastest_threads", measure)
    wanted = recipe("threads=auto")
    with use_threads(3):
        whole = TinyTrainer(tmp_path / "whole", wanted)
        whole.after_setup = lambda _: measured.append(torch.get_num_threads())
        whole.fit()
        assert measured == [2, 2]
        assert torch.get_num_threads() == 3
        assert load_recipe(str(tmp_path / "whole" / "recipe.yaml")).runtime.threads == 2
        assert_same(weights(fit(tmp_path / "named", "threads=2").model), weights(whole.model))

        TinyTrainer(tmp_path / "parts", wanted, stop_after=5).fit()
        monkeypatch.setattr(trainer, "fastest_threads", None)
        TinyTrainer(tmp_path / "parts", wanted, stop_after=8, resume=True).fit()
        shutil.copytree(tmp_path / "parts", tmp_path / "other")
        for folder, changed, threads in (("parts", wanted, 2), ("other", wanted.override(["threads=1"]), 1)):
            last = TinyTrainer(tmp_path / folder, changed, resume=True)
            last.after_setup = lambda _: measured.append(torch.get_num_threads())
            assert last.fit().step == 12
            assert measured.pop() == threads
            assert load_recipe(str(tmp_path / folder / "recipe.yaml")).runtime.threads == threads
            if threads == 2:
                assert_same(weights(last.model), weights(whole.model))


@pytest.mark.parametrize(("processes", "cores", "threads"), [(1, 2, 2), (1, 1, "auto"), (4, 2, "auto")])
def test_another_machine_or_several_processes_measure_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, cores: int, threads: int | str
) -> None:
    monkeypatch.setattr(trainer, "fastest_threads", lambda _: 2)
    wanted = recipe("threads=auto")
    TinyTrainer(tmp_path / "run", wanted, stop_after=5).fit()
    resumed = TinyTrainer(tmp_path / "run", wanted, resume=True)
    resumed.dist = DistContext(world_size=processes)
    with use_threads(cores):
        resumed._resolve_recipe()
    assert resumed.recipe.runtime.threads == threads


@pytest.mark.parametrize(
    ("dist", "compiled"),
    [(DistContext(device=torch.device("cuda")), False), (DistContext(world_size=2), False), (DistContext(), True)],
    ids=["GPU", "processes", "compiled"],
)
def test_nothing_is_measured_where_threads_matter_less(tmp_path: Path, dist: DistContext, compiled: bool) -> None:
    run = TinyTrainer(tmp_path / "run", recipe("threads=auto"))
    run.dist, run.compiled = dist, compiled
    assert run._fastest_threads(ModelConfig()) == 0


def test_what_is_measured_recomputes_activations_as_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed = list[object]()

    def measure(step: Callable[[], None]) -> int:
        step()
        assert recomputed
        return 1

    def checkpoint(function: Callable[..., object], *arguments: Any, **options: Any) -> object:
        recomputed.append(function)
        return torch.utils.checkpoint.checkpoint(function, *arguments, **options)

    monkeypatch.setattr(trainer, "fastest_threads", measure)
    monkeypatch.setattr(distributed, "checkpoint", checkpoint)
    TinyTrainer(tmp_path / "run", recipe("threads=auto", "activation_checkpointing=true"), stop_after=1).fit()
