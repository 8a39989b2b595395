"""Whole benchmarks: what they write, and what is left of one that is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnca.bench import SUITES, Entry, Report, Settings, read_json, run_suite, save_plot, write_json
from tcnca.bench import running as running_module
from tcnca.errors import ConfigError, DataError
from tests.bench.small import FLOORS, Silent, contestant, settings
from tests.bench.test_registry import SMALL


def suite_of(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(running_module, "SUITES", {**SUITES, "ops": lambda _: list(entries)})


def run(**changes: Any) -> Report:
    return run_suite("ops", settings(**changes), "tcnca bench ops", Silent(), FLOORS)


@pytest.mark.parametrize("suite", SUITES)
def test_suite_runs_on_a_cpu(suite: str, tmp_path: Path) -> None:
    watch = Silent()
    only = {"only": ("tcn", "fft-ema", "fft-ema-cached", "scan-ema", "attention")} if suite == "ops" else {}
    report = run_suite(suite, settings(**SMALL[suite], **only), f"tcnca bench {suite}", watch, FLOORS)
    assert [result.name for result in watch.results] == [result.name for result in report.entries] == watch.begun
    for result in report.entries:
        assert result.status == "timed", result.reason
        assert max(result.errors.values()) <= result.tolerance
        expected = {"inference", "step"} if suite == "lra" else {"step"} if suite == "model" else {"forward"}
        assert expected <= set(result.times)
        assert all((result.share(part) or 0) > 0 for part in result.times)
    assert report.ratios
    assert save_plot(tmp_path / "picture.png", report) is not None
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_json_holds_all_that_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suite_of(monkeypatch, contestant(lambda x: x * x), contestant(lambda x: x, "same"))
    path = tmp_path / "deep" / "numbers.json"
    report = run()
    write_json(path, report)
    values = json.loads(path.read_text(encoding="utf-8"))
    names = {"suite", "hardware", "versions", "settings", "command", "entries", "ratios"}
    assert names <= set(values)
    assert values["command"] == "tcnca bench ops"
    assert values["versions"]["torch"] == str(torch.__version__)
    assert values["hardware"]["device"] == values["settings"]["device"] == "cpu"
    assert values["settings"]["threads"] == torch.get_num_threads()
    assert values["settings"]["dtype"] == "float32"
    square, same = values["entries"]
    assert square["status"] == "timed"
    assert set(square["times"]["forward"]["eager"]) == {"median", "low", "high", "runs"}
    assert set(square["share_of_floor"]) == {"forward", "backward"}
    assert square["tokens_per_second"] == pytest.approx(5 / square["times"]["forward"]["eager"]["median"])
    assert same["status"] == "wrong"
    assert same["times"] == {}
    assert read_json(path) == report


def test_what_is_not_finite_is_written_as_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JSON has no infinity; a file with one could not be read elsewhere."""
    suite_of(monkeypatch, contestant(lambda x: x / 0))
    write_json(tmp_path / "numbers.json", run())

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    text = (tmp_path / "numbers.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse)["entries"][0]["errors"]["output"] is None


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    suite_of(monkeypatch, contestant(lambda x: x * x), contestant(interrupted, "second"), contestant(interrupted))
    report = run()
    assert report.stopped
    assert [result.name for result in report.entries] == ["square"]


def test_ctrl_c_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running_module, "measure_floors", interrupted)
    suite_of(monkeypatch, contestant(lambda x: x * x))
    report = run_suite("ops", settings(), "tcnca bench ops", Silent())
    assert (report.stopped, report.entries, report.floors) == (True, [], {})


def test_one_that_needs_too_much_memory_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    suite_of(monkeypatch, contestant(hungry, "hungry"), contestant(lambda x: x * x))
    assert [result.status for result in run().entries] == ["out of memory", "timed"]


def test_floors_are_measured_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def measured(clock: object, dtype: torch.dtype) -> object:
        asked.append(dtype)
        return FLOORS

    monkeypatch.setattr(running_module, "measure_floors", measured)
    suite_of(monkeypatch, contestant(lambda x: x * x))
    report = run_suite("ops", settings(), "tcnca bench ops", Silent())
    assert asked == [torch.float32]
    assert report.floors["bandwidth"] == FLOORS.bandwidth


@pytest.mark.parametrize("text", ["", "[]", '{"suite": "ops"}', '{"entries": [1]}'])
def test_files_that_are_none_of_ours(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"other.json: cannot be read as results of `tcnca bench`"):
        read_json(path)


def test_pictures_have_endings_that_say_their_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite_of(monkeypatch, contestant(lambda x: x))
    with pytest.raises(ConfigError, match=r"--plot: got .*picture.jpeg, allowed are names that end in .png, .svg"):
        save_plot(tmp_path / "picture.jpeg", run())
    assert save_plot(tmp_path / "picture.svg", run()) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("only", ["tcn", "copy", "fft-ema-cached-bi", "attention"])
def test_picture_of_one_contestant(only: str, tmp_path: Path) -> None:
    report = run_suite("ops", settings(**SMALL["ops"], only=(only,)), "tcnca bench ops", Silent(), FLOORS)
    assert (save_plot(tmp_path / "picture.png", report) is None) == (only == "attention")


@pytest.mark.parametrize("only", ["tcnca", "mega-fft"])
def test_picture_of_the_arena_needs_what_speeds_are_relative_to(only: str, tmp_path: Path) -> None:
    wanted = settings(**SMALL["lra"], only=(only,))
    drawn = save_plot(tmp_path / "picture.png", run_suite("lra", wanted, "tcnca bench lra", Silent(), FLOORS))
    assert (drawn is None) == (only == "tcnca")


def test_settings_of_a_run_can_be_kept() -> None:
    json.dumps(running_module._plain(Settings(device=torch.device("cpu"), dtype=torch.bfloat16, only=("tcn",))))
