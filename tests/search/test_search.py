"""`tcnca search`: what is measured, what is recommended, and the command from start to end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tcnca.cli import app
from tcnca.errors import ConfigError
from tcnca.files import read_json
from tcnca.search import Limits, SearchReport, Structure
from tcnca.search.search import Candidate, promising, recommend

runner = CliRunner()
TINY = ["--length", "40", "--channels", "2", "--seconds", "0", "--device", "cpu"]
WIDE = {"COLUMNS": "160"}


def candidate(number: int, milliseconds: float, *, missed: int = 0, parameters: int = 100, **more: Any) -> Candidate:
    fields: dict[str, Any] = {
        "structure": Structure(3, number + 2, 2),
        "receptive_field": 100,
        "missed_lags": missed,
        "parameters": parameters,
        "state_values": 99,
        "predicted_seconds": milliseconds * 1e-3,
        "predicted_bytes": 1000,
        "seconds": milliseconds * 1e-3,
        "bytes": 1000,
    }
    return Candidate(**{**fields, **more})


def test_the_fastest_that_misses_no_lag_is_recommended() -> None:
    measured = [candidate(0, 1.0, missed=50), candidate(1, 3.0), candidate(2, 2.0), candidate(3, 5.0)]
    found = recommend(measured, Limits(), 100)
    assert found.structure == measured[2].structure
    assert found.reason == (
        "reaches all 100 lags, and is the fastest of the 3 measured structures that do: 2 ms for a forward and "
        "backward pass"
    )
    assert found.overrides == [f"model.mixer.{name}" for name in ("kernel_size=3", "dilation_factor=4", "depth=2")] + [
        "model.mixer.convolutions=1"
    ]


def test_the_smallest_of_equally_fast_structures_is_recommended() -> None:
    measured = [candidate(0, 2.0), candidate(1, 2.04, parameters=80), candidate(2, 2.1, parameters=10)]
    found = recommend(measured, Limits(), 100)
    assert found.structure == measured[1].structure
    assert "the smallest of those within 3% of the fastest" in found.reason
    assert found.ties == [measured[0].structure]


def test_limits_are_kept_or_named() -> None:
    measured = [candidate(0, 1.0, missed=50), candidate(1, 3.0), candidate(2, 1.5, missed=20)]
    found = recommend(measured, Limits(seconds=2e-3), 100)
    assert found.structure == measured[2].structure
    assert found.reason.startswith("misses 20 of 100 lags, the fewest of the 2 measured structures within the limits")
    late = recommend(measured, Limits(seconds=5e-4), 100)
    assert late.structure == measured[0].structure
    assert "No measured structure is within 500 µs; this is the fastest: 1 ms" in late.reason


def test_the_best_by_prediction_and_some_of_the_front_are_measured() -> None:
    complete = [candidate(number, 2.0 + number) for number in range(30)]
    gaps = [candidate(100 + number, 1.0 - 0.1 * number, missed=10 + number) for number in range(9)]
    found = promising([*complete, *gaps], Limits(), 8)
    assert found[:6] == complete[:6]
    assert len(found) == 8
    assert set(found[6:]) <= set(gaps)
    # The fastest of all is on the front.
    assert gaps[-1] in found
    small = candidate(200, 90.0, parameters=5)
    assert promising([*complete, small], Limits(parameters=50), 8) == [small]
    with pytest.raises(ConfigError, match="--params: expected at least 5, the parameters of the smallest structure"):
        promising([*complete, small], Limits(parameters=4), 8)
    # Nothing but gaps is fast enough.
    assert promising([*complete, *gaps], Limits(seconds=1.05e-3), 8)[:6] == gaps[:6]


def test_the_command_from_start_to_end(tmp_path: Path) -> None:
    numbers, plot = tmp_path / "search.json", tmp_path / "search.png"
    arguments = ["search", *TINY, "--measure", "6", "--json", str(numbers), "--plot", str(plot)]
    result = runner.invoke(app, arguments, env=WIDE)
    assert result.exit_code == 0, result.output
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert values["size"]["length"] == 40
    assert values["fit_from_cache"] is False
    assert set(values["recommendation"]) == {"structure", "reason", "overrides", "ties"}
    assert {field.name for field in dataclasses.fields(SearchReport)} == set(values)
    report: SearchReport = read_json(numbers, SearchReport)
    assert len(report.measured) == 6
    assert [each.seconds for each in report.measured] == sorted(each.seconds or 0 for each in report.measured)
    best = next(each for each in report.measured if each.structure == report.recommendation.structure)
    assert best.missed_lags == 0
    assert best.structure.receptive_field >= 40
    assert f"Recommended: {best.structure}. It reaches all 40 lags" in result.output
    assert " ".join(report.recommendation.overrides) in result.output
    assert plot.stat().st_size > 5000

    again = runner.invoke(app, ["search", *TINY, "--measure", "1", "--all"], env=WIDE)
    assert again.exit_code == 0, again.output
    assert "a cost model on disk" in again.output


def test_directions_and_partial_structures(tmp_path: Path) -> None:
    numbers = tmp_path / "search.json"
    options = ["--bidirectional", "--block", "residual", "--partial", "--kernel-sizes", "3,5", "--max-depth", "4"]
    result = runner.invoke(app, ["search", *TINY, *options, "--measure", "2", "--json", str(numbers)], env=WIDE)
    assert result.exit_code == 0, result.output
    report: SearchReport = read_json(numbers, SearchReport)
    assert report.size["causal"] is False
    assert report.size["base"]["block"] == "residual"
    assert {each.structure.kernel_size for each in report.candidates} == {3, 5}
    assert any(each.receptive_field < 40 for each in report.candidates)
    assert all(each.state_values is None for each in report.candidates)
    assert "state" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "1"], "greater than or equal to 2"),
        (["--length", str(2**40)], "--length: expected a length that a TCN of at most 65 taps and 32 blocks covers"),
        (["--length", "99", "--kernel-sizes", "3", "--max-depth", "1"], "--length: expected a length that a TCN of at"),
        (["--length", "99", "--kernel-sizes", "3,x"], "--kernel-sizes: expected integers from 2 to 65536, such as"),
        (["--length", "99", "--kernel-sizes", "1"], "--kernel-sizes: expected integers from 2 to 65536, such as"),
        (["--length", "99", "--plot", "x.jpg"], "--plot: expected a file name that ends in"),
        (["--length", "99", "--json", "."], "--json: expected the name of a file, got the directory ."),
        (["--length", "99", "--budget", "5m"], "--train: expected a recipe with --budget, --finalists, --out, --jobs"),
        (["--length", "99", "--train", "recal-small"], "recall-small"),
        (["--length", "99", "--lenght", "3"], "--lenght: did you mean --length?"),
        (["--length", "99", "--train", "recall-64-10-mega", "data=recall-16"], "got EMAConfig in recall-64-10-mega"),
        (
            ["--length", "99", "--train", "recall-small", "data=recall-16", "--block", "linear"],
            "--block: expected none",
        ),
        (
            ["--length", "99", "--train", "recall-small", "data=recall-16", "--budget", "1s"],
            "s for two runs of a few seconds, got 1s; give more time",
        ),
        ([*TINY, "--params", "1"], "--params: expected at least"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["search", *arguments], env=WIDE)
    assert result.exit_code in (1, 2)
    assert message in result.output


def test_one_thread_is_measured_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnca.search.search.load_average", lambda: 1e4)
    counts: list[int | None] = []

    def use_threads(count: int | None) -> None:
        counts.append(count)
        raise ConfigError("enough")

    monkeypatch.setattr("tcnca.training.threads.use_threads", use_threads)
    busy = runner.invoke(app, ["search", *TINY])
    assert "the machine is busy (load 10000.0): measuring with one thread; --threads sets another" in busy.output
    given = runner.invoke(app, ["search", *TINY, "--threads", "3"])
    assert "busy" not in given.output
    assert counts == [1, 3]


def test_an_interruption_says_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcnca.search import cost

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cost, "workload", interrupt)
    result = runner.invoke(app, ["search", *TINY])
    assert result.exit_code == 130
    assert "stopped by SIGINT; continue with\ntcnca" in result.output
