"""Ratios, tables and plots of known numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tcnca.bench import Ratio, Report, Result, compute_ratios, read_json, save_plot
from tcnca.bench.plot import draw
from tcnca.bench.report import format_seconds, ratio_table, result_tables
from tcnca.errors import ConfigError, DataError
from tests.bench.helpers import timed

LONG: dict[str, int | str] = {"batch": 8, "length": 131_072, "dilation_factor": 20}
TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"


def find(ratios: list[Ratio], title: str, phase: str, mode: str = "graph") -> Ratio:
    (found,) = [ratio for ratio in ratios if (ratio.title, ratio.phase, ratio.mode) == (title, phase, mode)]
    return found


def ops() -> list[Result]:
    return [
        timed("ops", "tcn-bi", LONG, forward=1.0, backward=2.0),
        timed("ops", "fft-ema-published-bi", LONG, forward=45.0, backward=40.0),
        timed("ops", "fft-ema-bi", LONG, forward=10.0, backward=20.0),
        timed("ops", "fft-ema-cached-bi", LONG, forward=8.0, backward=10.0),
        timed("ops", "fft-ema-bi", {**LONG, "length": 8192}, forward=7.0, backward=9.0),
    ]


def lra() -> list[Result]:
    results = []
    for index, task in enumerate(TASKS):
        sizes: dict[str, int | str] = {"task": task, "batch": 2, "length": 1024, "num_layers": 4}
        results.append(timed("lra", "tcnca", sizes, inference=1.0, forward=1.0, backward=1.0, optimizer=1.0, step=3.0))
        slow = {"inference": 1.0 + index, "forward": 2.0, "backward": 2.0, "optimizer": 1.0, "step": 6.0}
        results.append(timed("lra", "mega-fft", sizes, **slow))
    return results


def model() -> list[Result]:
    sizes: dict[str, int | str] = {"batch": 8, "length": 8192, "num_layers": 12}
    phases = {"forward": 20.0, "backward": 40.0, "optimizer": 1.0, "step": 61.0}
    slow = {name: 1.5 * value for name, value in phases.items()}
    return [timed("model", "tcnca", sizes, **phases), timed("model", "mega-fft-compiled", sizes, **slow)]


def report(suite: str, results: list[Result]) -> Report:
    return Report(
        suite=suite,
        hardware={"device": "cuda", "name": "a machine", "memory_gib": 1},
        versions={"torch": "2"},
        commit=None,
        started="2026",
        command=f"tcnca bench {suite}",
        settings={"dtype": "bfloat16", "channels": 64, "kernel_size": 17, "depth": 4},
        results=results,
        ratios=compute_ratios(results, goals=True),
    )


REPORTS = {
    "ops": report("ops", ops()),
    "layer": report("layer", [timed("layer", "tcnca", {"batch": 1, "length": 64}, forward=1.0, backward=2.0)]),
    "model": report("model", model()),
    "lra": report("lra", lra()),
}


def test_ratio_is_the_slower_time_over_the_faster() -> None:
    ratios = REPORTS["ops"].ratios
    published = "TCN over FFT-EMA as published, bidirectional"
    forward, backward = find(ratios, published, "forward"), find(ratios, published, "backward")
    assert forward.value == pytest.approx(45.0)
    assert backward.value == pytest.approx(20.0)
    assert (forward.paper, forward.goal, forward.stretch) == (7.07, 40, 100)
    assert (forward.reached(forward.goal), forward.reached(forward.stretch)) == (True, False)
    assert backward.reached(backward.goal) is False
    ours = find(ratios, "TCN over FFT-EMA, bidirectional", "forward")
    assert ours.value == pytest.approx(10.0)
    assert ours.reached(ours.goal) is None
    cached = find(ratios, "FFT-EMA, cached kernel over kernel computed in the call, bidirectional", "forward")
    assert cached.value == pytest.approx(1.25)
    # Only of equal sizes, and of what was timed.
    assert all(ratio.sizes == LONG for ratio in ratios)
    assert not any("scan-EMA" in ratio.title for ratio in ratios)
    assert all(ratio.goal is ratio.paper is ratio.stretch is None for ratio in compute_ratios(ops(), goals=False))


def test_mean_of_long_range_arena_needs_all_tasks() -> None:
    ratios = REPORTS["lra"].ratios
    means = [ratio for ratio in ratios if ratio.sizes == {"task": "mean of six"} and ratio.phase == "inference"]
    assert [ratio.value for ratio in means] == [pytest.approx(3.5)] * 2
    assert (means[0].title, means[0].paper, means[0].goal) == ("TCNCA over MEGA-chunk by FFT", 1.28, 1.5)
    papers = {ratio.sizes["task"]: ratio.paper for ratio in ratios if ratio.phase == "inference"}
    assert papers["pathx"] == 1.73
    assert not [each for each in compute_ratios(lra()[:-1], goals=True) if each.sizes.get("task") == "mean of six"]


def test_speed_and_memory_of_training_have_goals() -> None:
    ratios = REPORTS["model"].ratios
    speed = find(ratios, "TCNCA: tokens per second in training", "step", "eager")
    assert speed.value == pytest.approx(65_536 / 61e-3)
    assert speed.reached(speed.goal) is True
    memory = find(ratios, "TCNCA: peak memory of a training step", "step", "eager")
    assert memory.value == pytest.approx(20.0)
    assert (memory.unit, memory.goal) == ("GB", 25)
    # Less is better.
    assert (memory.reached(memory.goal), memory.reached(memory.stretch)) == (True, False)
    assert find(ratios, "mega-fft-compiled: tokens per second in training", "step").goal is None


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_are_readable(path: Path) -> None:
    committed = read_json(path)
    assert committed.timed
    assert committed.ratios == compute_ratios(committed.results, goals=True)


@pytest.mark.parametrize("text", ["", "[]", '{"suite": "ops"}', '{"results": [1]}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"other.json: expected results of `tcnca bench`"):
        read_json(path)


@pytest.mark.parametrize(("suite", "suffix"), [("ops", "png"), ("layer", "svg"), ("model", "pdf"), ("lra", "svg")])
def test_plots_are_written(suite: str, suffix: str, tmp_path: Path) -> None:
    path = save_plot(tmp_path / f"plot.{suffix}", REPORTS[suite])
    assert path is not None
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


def test_plot_of_operators_names_what_it_shows() -> None:
    figure = draw(REPORTS["ops"])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert {"bidirectional, forward, batch 8", "causal, backward, batch 8"} <= set(titles)
    assert all(axes.get_xlabel() == "length, tokens" for axes in figure.axes)
    lines = figure.axes[0].get_lines()
    assert len(lines) == 3  # the bidirectional candidates
    assert np.asarray(lines[0].get_ydata()).tolist() == [pytest.approx(45_000 / 2)]


def test_nothing_is_plotted_without_results(tmp_path: Path) -> None:
    attention = [timed("ops", "attention", {"model": "text", "batch": 1, "length": 64}, forward=1.0)]
    assert save_plot(tmp_path / "plot.svg", report("ops", attention)) is None
    # Speeds are relative to MEGA by FFT.
    assert save_plot(tmp_path / "plot.svg", report("lra", lra()[::2])) is None
    with pytest.raises(ConfigError, match=r"--plot: expected a file name that ends in one of .png, .svg, .pdf, got"):
        save_plot(tmp_path / "plot.jpeg", REPORTS["ops"])
    assert list(tmp_path.iterdir()) == []
    assert save_plot(tmp_path / "plot.svg", report("ops", ops()[:1])) is not None


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
    line = next(line for line in text.splitlines() if "as published" in line)
    for part in ("8 × 131072", "7.07 / 2.86", "40 / 25", "100 / 50", "45.0 / 20.0"):
        assert part in line
    assert ratio_table([]) is None


def test_noisy_times_are_marked() -> None:
    noisy = report("ops", ops())
    modes = noisy.results[0].times["forward"]
    median = modes["eager"].median
    modes["eager"] = dataclasses.replace(modes["eager"], q1=0.5 * median, q3=1.5 * median)
    text = render(result_tables(noisy)[0])
    assert text.count("~") == 1
    assert f"~{format_seconds(median)}" in text


@pytest.mark.parametrize("suite", ["ops", "model"])
def test_names_are_readable_in_a_narrow_terminal(suite: str) -> None:
    text = "".join(render(table, 80) for table in result_tables(REPORTS[suite]))
    assert all(result.label[:4] in text for result in REPORTS[suite].results)
    text = render(ratio_table(REPORTS[suite].ratios), 80)
    assert any(ratio.title.split()[0] in text for ratio in REPORTS[suite].ratios)
    assert "…" not in text


def test_times_are_short() -> None:
    found = [format_seconds(value) for value in (2e-6, 9.999e-4, 0.0123, 1.5, None)]
    assert found == ["2 µs", "1 ms", "12.3 ms", "1.5 s", "–"]
