"""Successive halving: which structures survive, for how long they train, and that a stopped search continues."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tcnca.cli import app
from tcnca.errors import ConfigError, TrainingError
from tcnca.search import Limits, SearchReport, Structure
from tcnca.search import halving as module
from tcnca.search.halving import finalists, read_report, start, train_finalists
from tcnca.search.search import Recommendation
from tcnca.search.structures import overrides
from tcnca.training.sweeps import Row, Sweep
from tests.search.test_search import candidate
from tests.training.tiny import Clock, changed

CONSOLE = Console(file=io.StringIO(), markup=False)


def searched(count: int = 8) -> SearchReport:
    """A report whose finalists are numbered by their dilation factor, from 2 on."""
    measured = [candidate(number, 1.0 + number, parameters=100 - number, front=True) for number in range(count)]
    first = measured[0].structure
    return SearchReport(
        size={"length": 100, "causal": True},
        limits=Limits(),
        hardware={"device": "cpu", "name": "a machine"},
        versions={"torch": "2"},
        commit=None,
        started="2026",
        command="tcnca search",
        load=0.0,
        fit_from_cache=False,
        level=1.0,
        coefficients={},
        candidates=measured,
        recommendation=Recommendation(structure=first, reason="", overrides=overrides(first)),
    )


class Machine:
    """Trains without training: the accuracy grows with the dilation factor, and a run takes 4 seconds more."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.rungs, self.stop_in, self.fail = clock, list[tuple[list[int], float]](), 0, False
        self.done: set[Path] = set()

    def run(self, sweep: Sweep, console: Console, *, deadline: float) -> str:
        factors = [point.recipe.model["mixer"]["dilation_factor"] for point in sweep.points]
        self.rungs.append((factors, sweep.budget or 0.0))
        for point in sweep.points:
            self.clock.tick((sweep.budget or 0.0) + 4.0)
            if len(self.rungs) == self.stop_in:
                return "SIGINT"
            if self.clock.now <= deadline and not self.fail:
                self.done.add(point.folder)
        return ""

    def rows(self, sweep: Sweep) -> list[Row]:
        rows = []
        for point in sweep.points:
            scores = {"validation": point.recipe.model["mixer"]["dilation_factor"] / 100.0}
            done = point.folder in self.done
            rows.append(Row(point=point, state="done" if done else "failed", scores=scores if done else {}, error="no"))
        return rows


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    clock = Clock()
    machine = Machine(clock)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "load_average", lambda: 0.5)
    monkeypatch.setattr(module, "run_sweep", machine.run)
    monkeypatch.setattr(module, "read_rows", machine.rows)
    monkeypatch.setattr(module, "write_tables", lambda *_: None)
    return machine


def train(report: SearchReport, folder: Path) -> tuple[SearchReport, str]:
    return train_finalists(report, folder, CONSOLE, device="cpu")


def begin(budget: float = 600.0, count: int = 8) -> SearchReport:
    return start(searched(), "recall-small", changed(), budget, 60.0, count)


def test_the_better_half_trains_longer(tmp_path: Path, machine: Machine) -> None:
    report, stopped = train(begin(), tmp_path)
    assert stopped == ""
    factors, seconds = zip(*machine.rungs, strict=True)
    assert [sorted(each) for each in factors] == [list(range(2, 10)), [6, 7, 8, 9], [8, 9]]
    # A third of the 540 seconds that are left, less 5 %, for eight runs, of which each may take six seconds more. It is
    # only four.
    assert seconds[0] == 15.3
    assert seconds[1] == pytest.approx(0.95 * (600 - 60 - 8 * 19.3) / 2 / 4 - 4, abs=0.1)
    assert seconds[0] < seconds[1] < seconds[2]
    assert report.training is not None
    assert report.training.spent <= 600.0
    assert machine.clock.now - 100.0 + 60.0 <= 600.0
    assert report.recommendation.structure == Structure(3, 9, 2)
    assert "has the best validation accuracy, 0.0900, of the 2 structures in rung 3" in report.recommendation.reason
    ranks = {each.structure.dilation_factor: each.rung for each in report.candidates}
    assert ranks == {2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 3, 9: 3}


def test_structures_with_the_same_score_are_named(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = {"validation": 1.0}
    monkeypatch.setattr(
        module, "read_rows", lambda sweep: [dataclasses.replace(row, scores=solved) for row in machine.rows(sweep)]
    )
    report, _ = train(begin(count=2), tmp_path)
    assert report.recommendation.structure == Structure(3, 2, 2)
    assert report.recommendation.ties == [Structure(3, 3, 2)]


def test_one_finalist_is_not_trained(tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = train_finalists(begin(count=1), tmp_path, Console(), device="cpu")
    assert not machine.rungs
    assert report.recommendation == searched().recommendation
    assert "only one finalist: nothing to train" in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 8])
def test_the_least_budget_trains_two_finalists(tmp_path: Path, machine: Machine, count: int) -> None:
    # The measurements took 60 s. Two runs of 2 s, each with 6 s beyond its training, take 16 s, and 5 % more.
    with pytest.raises(ConfigError, match=r"--budget: expected at least 17s .* got 16s after the measurements"):
        train(begin(76.0, count), tmp_path)
    train(begin(77.0, count), tmp_path)
    assert [len(factors) for factors, _ in machine.rungs] == [2]


def test_a_stopped_search_continues_where_it_was(tmp_path: Path, machine: Machine) -> None:
    machine.stop_in = 2
    report, stopped = train(begin(), tmp_path)
    assert stopped == "SIGINT"
    machine.stop_in = 0
    stored = read_report(tmp_path)
    assert stored is not None
    assert stored.training is not None
    assert stored.training == report.training
    spent = stored.training.spent
    assert spent == pytest.approx(machine.clock.now - 100.0 + 60.0)
    machine.clock.tick(1e6)  # the time between does not count
    continued, stopped = train(stored, tmp_path)
    assert stopped == ""
    # The stopped rung again, with the same time for each run, which the sweep resumes.
    assert machine.rungs[1] == machine.rungs[2]
    assert continued.training is not None
    assert [len(rung.structures) for rung in continued.training.rungs] == [8, 4, 2]
    assert continued.recommendation.structure == Structure(3, 9, 2)
    again, _ = train(continued, tmp_path)
    assert again.recommendation == continued.recommendation
    assert len(machine.rungs) == 4


def test_a_small_budget_trains_fewer(tmp_path: Path, machine: Machine) -> None:
    train(begin(60.0 + 50.0), tmp_path)
    assert len(machine.rungs[0][0]) == 2
    with pytest.raises(
        ConfigError, match="--budget: expected at least 17s for two runs of a few seconds, got 10s after the"
    ):
        train(begin(70.0), tmp_path / "other")


def test_a_run_that_exceeds_the_budget_has_no_score(tmp_path: Path, machine: Machine, monkeypatch: Any) -> None:
    """Then the best of the rung before is recommended."""
    run = machine.run

    def slow(sweep: Sweep, console: Console, *, deadline: float) -> str:
        machine.clock.tick(0.0 if len(machine.rungs) < 2 else 1e4)
        return run(sweep, console, deadline=deadline)

    monkeypatch.setattr(module, "run_sweep", slow)
    report, stopped = train(begin(), tmp_path)
    assert stopped == ""
    assert len(machine.rungs) == 3
    assert report.recommendation.structure == Structure(3, 9, 2)
    assert "of the 4 structures in rung 2" in report.recommendation.reason


def test_runs_without_a_score_are_left_out(tmp_path: Path, machine: Machine) -> None:
    machine.fail = True
    with pytest.raises(TrainingError, match="no finalist has a score; the first failed with: no"):
        train(begin(), tmp_path)


def test_finalists_are_of_the_front_and_within_the_limits() -> None:
    report = searched(5)
    others = [candidate(50, 0.5, missed=9, front=True), candidate(60, 1.5)]
    limits = Limits(seconds=4.5e-3)
    report = dataclasses.replace(report, candidates=[*report.candidates, *others], limits=limits)
    assert [each.dilation_factor for each in finalists(report, 9)] == [2, 3, 4, 5, 52]
    assert [each.dilation_factor for each in finalists(report, 3)] == [2, 3, 4]


@pytest.mark.slow
def test_a_recipe_is_trained(tmp_path: Path) -> None:
    options = ["--length", "33", "--seconds", "1", "--budget", "90s", "--finalists", "2", "--measure", "4"]
    small = changed("eval.batch_size=64")
    place = ["--out", str(tmp_path / "search"), "--json", str(tmp_path / "search.json"), "--device", "cpu"]
    arguments = ["search", *options, "--train", "recall-small", *small, *place]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads((tmp_path / "search.json").read_text(encoding="utf-8"))
    (rung,) = values["training"]["rungs"]
    assert len(rung["structures"]) == 2
    assert all(0.0 <= score <= 1.0 for score in rung["scores"])
    assert values["training"]["spent"] <= 95.0
    assert "has the best validation accuracy" in result.output
    assert (tmp_path / "search" / "rung-1" / "sweep.csv").exists()
    # Again: nothing is left to do.
    again = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert again.exit_code == 0, again.output
    assert "starts" not in again.output
    other = CliRunner().invoke(app, [*arguments, "--params", "99999"])
    assert "holds another search, which differs in limits; choose another directory with --out" in other.output
