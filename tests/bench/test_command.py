"""`tcnca bench` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tcnca.bench import Result, write_json
from tcnca.bench import runner as runner_module
from tcnca.bench.case import BenchCase
from tcnca.cli import app
from tests.bench.helpers import REPORTS

runner = CliRunner()
TINY = ["--lengths", "33", "--channels", "4", "--kernel-size", "3", "--depth", "3", "--seconds", "0", "--repeat", "1"]


def test_operators_are_measured_written_and_plotted(tmp_path: Path) -> None:
    numbers, plot = tmp_path / "ops.json", tmp_path / "ops.png"
    options = ["--only", "tcn,conv,fft-ema,copy", "--json", str(numbers), "--plot", str(plot)]
    result = runner.invoke(app, ["bench", "ops", "--device", "cpu", *TINY, *options])
    assert result.exit_code == 0, result.output
    assert "default sizes are smaller" in result.output
    assert "TCN over PyTorch's" in result.output
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert [case["name"] for case in values["results"]] == ["copy", "tcn", "conv", "fft-ema"]
    assert {case["status"] for case in values["results"]} == {"timed"}
    assert plot.stat().st_size > 5000


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (SystemExit(9), 9)], ids=["Ctrl-C", "exit"])
def test_what_was_measured_is_kept(
    end: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = runner_module.measure

    def interrupted(case: BenchCase, *others: Any) -> Result:
        if case.name == "naive-tcn":
            raise end
        return measure(case, *others)

    monkeypatch.setattr(runner_module, "measure", interrupted)
    numbers = tmp_path / "ops.json"
    result = runner.invoke(app, ["bench", "ops", "--device", "cpu", *TINY, "--json", str(numbers)])
    assert result.exit_code == code
    assert ("interrupted" in result.output) == (code == 130)
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert values["interrupted"] is True
    assert [case["name"] for case in values["results"]] == ["copy", "tcn", "tcn-skip"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--lengths", "1k"], "--lengths: expected integers of at least 1, such as 1,8, got '1k'"),
        (["ops", "--batches", "0"], "--batches: expected integers of at least 1, such as 1,8, got '0'"),
        (["ops", "--only", "nonsense"], "--only: expected candidates or parts of their names, got 'nonsense'"),
        (["ops", "--plot", "ops.jpg"], "--plot: expected a file name that ends in"),
        (["ops", "--json", "."], "--json: expected the name of a file, got the directory ."),
        (
            ["show", "none.json"],
            "none.json: cannot be read (No such file or directory); give a file",
        ),
        pytest.param(
            ["ops", "--device", "cuda"],
            "--device: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert message in result.output


def test_results_are_shown_and_plotted_again(tmp_path: Path) -> None:
    paths = {suite: tmp_path / f"{suite}.json" for suite in REPORTS}
    for suite, path in paths.items():
        write_json(path, REPORTS[suite])
    plot, wide = tmp_path / "model.svg", {"COLUMNS": "160"}
    result = runner.invoke(app, ["bench", "show", str(paths["model"]), "--plot", str(plot)], env=wide)
    assert result.exit_code == 0, result.output
    assert "tokens per second" in result.output
    assert plot.stat().st_size > 5000
    together = runner.invoke(app, ["bench", "show", *map(str, paths.values())], env=wide)
    assert together.exit_code == 0, together.output
    assert "mean of six" in together.output
    assert "TCN over FFT-EMA as published" in together.output
    refused = runner.invoke(app, ["bench", "show", *map(str, paths.values()), "--plot", str(plot)])
    assert "--plot: expected one file of results, got 5" in refused.output
