"""Ratios, tables and plots of known numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tcnca.bench import Ratio, read_json, save_plot
from tcnca.bench.plot import draw
from tcnca.bench.report import format_seconds, ratio_table, result_tables
from tcnca.errors import ConfigError, DataError
from tests.bench.helpers import LONG, LRA, OPS, REPORTS, report, timed

ROOT = Path(__file__).parents[2]
COMMITTED = sorted([*(ROOT / "benchmarks" / "results").glob("*.json"), *(ROOT / "results" / "speed").glob("*.json")])


def find(suite: str, title: str, phase: str, mode: str = "graph") -> Ratio:
    ratios = REPORTS[suite].ratios
    (found,) = [ratio for ratio in ratios if (ratio.title, ratio.phase, ratio.mode) == (title, phase, mode)]
    return found


def test_ratio_is_the_slower_time_over_the_faster() -> None:
    published = "TCN over FFT-EMA as published, bidirectional"
    forward, backward = find("ops", published, "forward"), find("ops", published, "backward")
    assert [forward.value, backward.value] == pytest.approx([45.0, 20.0])
    assert (forward.paper, forward.goal, forward.stretch) == (7.07, 40, 100)
    assert (forward.reached, backward.reached) == (True, False)
    ours = find("ops", "TCN over FFT-EMA, bidirectional", "forward")
    assert ours.value == pytest.approx(10.0)
    assert ours.reached is None
    cached = find("ops", "FFT-EMA, cached kernel over kernel computed in the call, bidirectional", "forward")
    assert cached.value == pytest.approx(1.25)
    # Only of equal sizes, and of what was timed.
    assert all(ratio.sizes == LONG for ratio in REPORTS["ops"].ratios)
    assert not any("scan-EMA" in ratio.title for ratio in REPORTS["ops"].ratios)


def test_goals_are_for_gpus() -> None:
    ratios = report("ops", OPS, device="cpu").ratios
    assert ratios
    assert all(ratio.goal is ratio.paper is ratio.stretch is None for ratio in ratios)


def test_mean_of_long_range_arena_needs_all_tasks() -> None:
    ratios = [ratio for ratio in REPORTS["lra"].ratios if ratio.phase == "inference" and ratio.mode == "graph"]
    *tasks, mean = ratios
    assert mean.sizes == {"task": "mean of six"}
    assert mean.value == pytest.approx(3.5)
    assert (mean.title, mean.paper, mean.goal) == ("TCNCA over MEGA-chunk by FFT", 1.28, 1.5)
    assert tasks[-1].paper == 1.73
    assert not [each for each in report("lra", LRA[:-1]).ratios if each.sizes.get("task") == "mean of six"]


def test_speed_and_memory_of_training_have_goals() -> None:
    speed = find("model", "TCNCA: tokens per second in training", "step", "eager")
    assert speed.value == pytest.approx(65_536 / 61e-3)
    assert speed.reached is True
    memory = find("model", "TCNCA: peak memory of a training step", "step", "eager")
    # Less is better.
    assert memory.value == pytest.approx(20.0)
    assert (memory.goal, memory.reached) == (25, True)
    assert find("model", "mega-fft-compiled: tokens per second in training", "step").goal is None


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_are_readable(path: Path) -> None:
    ratios = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    assert ratios == [dataclasses.asdict(ratio) for ratio in read_json(path).ratios]


@pytest.mark.parametrize("text", ["", "[]", '{"suite": "ops"}', '{"results": [1]}', "[" * 100_000])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"other.json: .*; give a file that `tcnca bench` has written"):
        read_json(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["hardware"], {}),
        (["versions"], {"torch": [1]}),
        (["settings"], []),
        (["roofline", "bytes_per_second"], "fast"),
        (["results", 0, "sizes"], 7),
        (["results", 0, "tokens"], None),
        (["results", 0, "times", "forward", "eager", "median"], 0.0),
        (["results", 0, "times", "forward"], None),
        (["more"], 1),
    ],
)
def test_changed_results_are_refused(place: list[str | int], value: object, tmp_path: Path) -> None:
    path = tmp_path / "changed.json"
    values = json.loads((ROOT / "results" / "speed" / "ops.json").read_text(encoding="utf-8"))
    target = values
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataError, match=r"changed.json: .*expected .*; give a file"):
        read_json(path)


@pytest.mark.parametrize(
    ("suite", "suffix"), [("ops", "png"), ("layer", "svg"), ("model", "pdf"), ("lra", "svg"), ("generate", "svg")]
)
def test_plots_are_written(suite: str, suffix: str, tmp_path: Path) -> None:
    path = save_plot(tmp_path / f"plot.{suffix}", REPORTS[suite])
    assert path is not None
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


def test_plot_of_operators_shows_times_over_length() -> None:
    figure = draw(REPORTS["ops"])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "bidirectional, forward, batch 8"
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["FFT-EMA as published", "FFT-EMA", "TCN"]
    assert np.asarray(lines[0].get_ydata()).tolist() == [pytest.approx(45_000 / 2)]


def test_plot_of_long_range_arena_shows_speed_relative_to_mega_and_the_paper() -> None:
    inference = draw(REPORTS["lra"]).axes[0]
    tcnca, mega = inference.containers[:2]
    assert [bar.get_height() for bar in tcnca] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert [bar.get_height() for bar in mega] == pytest.approx([1.0] * 6)
    assert [np.asarray(line.get_ydata())[0] for line in inference.get_lines()][-1] == 1.73


def test_nothing_is_plotted_without_results(tmp_path: Path) -> None:
    attention = [timed("attention", {"model": "text", "batch": 1, "length": 64}, forward=1.0)]
    assert save_plot(tmp_path / "plot.svg", report("ops", attention)) is None
    assert save_plot(tmp_path / "plot.svg", report("ops", [timed("ssm", LONG, forward=1.0)])) is None
    # Speeds are relative to MEGA by FFT.
    assert save_plot(tmp_path / "plot.svg", report("lra", LRA[::2])) is None
    with pytest.raises(ConfigError, match=r"--plot: expected a file name that ends in one of .png, .svg, .pdf, got"):
        save_plot(tmp_path / "plot.jpeg", REPORTS["ops"])
    assert list(tmp_path.iterdir()) == []


def render(table: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_tables_show_times_and_goals() -> None:
    text = render(result_tables(REPORTS["ops"])[0])
    assert "batch 8, length 131072, f 20" in text
    assert "22.5 ms" in text  # as a graph
    assert "45 ms" in text  # in eager mode
    assert "~" not in text
    text = render(ratio_table(REPORTS["ops"].ratios))
    forward, backward = text.split("as published")[1].splitlines()[:2]
    assert forward.split()[-6:] == ["forward", "7.07", "40", "100", "45", "45"]
    assert backward.split() == ["backward", "2.86", "25", "50", "20", "20"]
    assert ratio_table([]) is None


def test_noisy_times_are_marked() -> None:
    result = timed("tcn", LONG, forward=1.0)
    timing = result.times["forward"]["eager"]
    result.times["forward"]["eager"] = dataclasses.replace(timing, q1=0.5e-3, q3=1.5e-3)
    text = render(result_tables(report("ops", [result]))[0])
    assert text.count("~") == 1
    assert "~1 ms" in text


def test_names_are_readable_in_a_narrow_terminal() -> None:
    text = "".join(render(table, 80) for table in result_tables(REPORTS["model"]))
    assert "TCNCA" in text
    text = render(ratio_table(REPORTS["model"].ratios), 80)
    assert "TCNCA: tokens per second in training" in text
    assert "…" not in text


def test_times_are_short() -> None:
    found = [format_seconds(value) for value in (2e-6, 9.999e-4, 0.0123, 1.5, None)]
    assert found == ["2 µs", "1 ms", "12.3 ms", "1.5 s", "–"]
