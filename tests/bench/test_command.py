"""`tcnca bench` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tcnca.bench import Floors, Pair, write_json
from tcnca.bench import running as running_module
from tcnca.bench.check import errors_of
from tcnca.cli import app
from tests.bench.small import FLOORS
from tests.bench.test_ratios import REPORTS

runner = CliRunner()
TINY = ["--lengths", "33", "--channels", "4", "--kernel-size", "3", "--depth", "3", "--seconds", "0", "--repeat", "1"]


@pytest.fixture(autouse=True)
def _known_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> Floors:
        return FLOORS

    monkeypatch.setattr(running_module, "measure_floors", measured)


def test_help_names_every_benchmark() -> None:
    output = runner.invoke(app, ["bench", "--help"]).output
    for name in ("ops", "layer", "model", "lra", "show"):
        assert name in output


@pytest.mark.parametrize("suite", ["ops", "layer", "model", "lra"])
def test_help_names_the_options(suite: str) -> None:
    output = runner.invoke(app, ["bench", suite, "--help"], env={"COLUMNS": "120"}).output
    for option in ("--json", "--plot", "--only", "--dtype", "--device", "--repeat", "--seconds"):
        assert option in output
    assert "(default: all)" in output


def test_operators_are_measured_written_and_drawn(tmp_path: Path) -> None:
    numbers, picture = tmp_path / "ops.json", tmp_path / "ops.png"
    wanted = ["--only", "tcn,conv,fft-ema,copy", "--json", str(numbers), "--plot", str(picture)]
    result = runner.invoke(app, ["bench", "ops", "--device", "cpu", *TINY, *wanted])
    assert result.exit_code == 0, result.output
    assert "sizes are scaled down" in result.output
    assert "TCN over PyTorch's" in result.output
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert [entry["name"] for entry in values["entries"]] == ["copy", "tcn", "conv", "fft-ema"]
    assert {entry["status"] for entry in values["entries"]} == {"timed"}
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (SystemExit(9), 9)], ids=["Ctrl-C", "death"])
def test_what_was_measured_is_kept(
    end: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(100))

    def interrupted(pair: Pair, together: bool) -> dict[str, float]:
        if next(count) == 2:
            raise end
        return errors_of(pair, together)

    monkeypatch.setattr(running_module, "errors_of", interrupted)
    numbers = tmp_path / "ops.json"
    result = runner.invoke(app, ["bench", "ops", "--device", "cpu", *TINY, "--json", str(numbers)])
    assert result.exit_code == code
    assert ("stopped" in result.output) == (code == 130)
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert values["stopped"] is True
    assert [entry["name"] for entry in values["entries"]] == ["copy", "tcn"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops", "--lengths", "1k"], "--lengths: got '1k', allowed are whole numbers of at least 1"),
        (["ops", "--batches", "0"], "--batches: got '0'"),
        (["ops", "--dtype", "int8"], "--dtype: got int8, allowed are float32, bfloat16, float16"),
        (["ops", "--only", "nonsense"], "--only: got nonsense, allowed are attention"),
        (["ops", "--plot", "ops.jpg"], "--plot: got ops.jpg, allowed are names that end in .png, .svg, .pdf"),
        (["show", "none.json"], "none.json: cannot be read"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_that_is_not_there() -> None:
    result = runner.invoke(app, ["bench", "ops", "--device", "cuda"])
    assert result.exit_code == 1
    assert "--device: got cuda, allowed are cpu" in result.output


def test_numbers_are_shown_and_drawn_again(tmp_path: Path) -> None:
    paths = {suite: tmp_path / f"{suite}.json" for suite in REPORTS}
    for suite, path in paths.items():
        write_json(path, REPORTS[suite]())
    picture = tmp_path / "model.svg"
    result = runner.invoke(app, ["bench", "show", str(paths["model"]), "--plot", str(picture)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "tokens a second" in result.output
    assert picture.stat().st_size > 5000
    together = runner.invoke(app, ["bench", "show", *map(str, paths.values())], env={"COLUMNS": "160"})
    assert together.exit_code == 0, together.output
    assert "mean of six" in together.output
    assert "TCN over FFT-EMA as published" in together.output
    refused = runner.invoke(app, ["bench", "show", *map(str, paths.values()), "--plot", str(picture)])
    assert "--plot: got 4 files, allowed is one" in refused.output
