"""Ratios, and the pictures and tables made of them, from numbers that are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tcnca.bench import Report, Result, ratios_of, save_plot
from tcnca.bench.ratios import reached
from tcnca.bench.report import short_time
from tcnca.cli.bench_tables import entry_tables, ratio_table
from tests.bench.small import timed

LONG: dict[str, int | str] = {"batch": 8, "length": 131_072, "dilation_factor": 20}
TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")


def find(rows: list[dict[str, Any]], title: str, part: str, how: str = "graph") -> dict[str, Any]:
    found = [row for row in rows if (row["title"], row["part"], row["how"]) == (title, part, how)]
    assert len(found) == 1, (title, part, [row["title"] for row in rows])
    return found[0]


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
    for place, task in enumerate(TASKS):
        sizes: dict[str, int | str] = {"task": task, "batch": 2, "length": 1024, "num_layers": 4}
        results.append(timed("lra", "tcnca", sizes, inference=1.0, forward=1.0, backward=1.0, update=1.0, step=3.0))
        slow = {"inference": 1.0 + place, "forward": 2.0, "backward": 2.0, "update": 1.0, "step": 6.0}
        results.append(timed("lra", "mega-fft", sizes, **slow))
    return results


def model() -> list[Result]:
    sizes: dict[str, int | str] = {"batch": 8, "length": 8192, "num_layers": 12}
    parts = {"forward": 20.0, "backward": 40.0, "update": 1.0, "step": 61.0}
    slow = {name: 1.5 * value for name, value in parts.items()}
    return [timed("model", "tcnca", sizes, **parts), timed("model", "mega-fft-compiled", sizes, **slow)]


def test_ratio_is_the_slower_time_over_the_faster() -> None:
    rows = ratios_of(ops(), goals=True)
    published = "TCN over FFT-EMA as published, bidirectional"
    forward, backward = find(rows, published, "forward"), find(rows, published, "backward")
    assert forward["value"] == pytest.approx(45.0)
    assert backward["value"] == pytest.approx(20.0)
    assert (forward["paper"], forward["goal"], forward["stretch"]) == (7.07, 40, 100)
    assert (reached(forward, "goal"), reached(forward, "stretch")) == (True, False)
    assert reached(backward, "goal") is False
    own = find(rows, "TCN over FFT-EMA, bidirectional", "forward")
    assert own["value"] == pytest.approx(10.0)
    assert reached(own, "goal") is None
    kernel = find(rows, "FFT-EMA, kernel made in the call over kernel kept, bidirectional", "forward")
    assert kernel["value"] == pytest.approx(1.25)


def test_ratios_are_of_equal_sizes_and_of_what_was_timed() -> None:
    rows = ratios_of(ops(), goals=True)
    assert all(row["sizes"] == LONG for row in rows)
    assert not any("scan-EMA" in row["title"] for row in rows)


def test_goals_for_a_gpu_are_not_those_of_a_cpu() -> None:
    assert all(row["goal"] is row["paper"] is row["stretch"] is None for row in ratios_of(ops(), goals=False))


def test_mean_of_the_arena_needs_all_six() -> None:
    title = "TCNCA over MEGA-chunk by FFT"
    rows = ratios_of(lra(), goals=True)
    mean = [row for row in rows if row["sizes"] == {"task": "mean of six"} and row["part"] == "inference"]
    assert [row["value"] for row in mean] == [pytest.approx(3.5)] * 2
    assert (mean[0]["title"], mean[0]["paper"], mean[0]["goal"]) == (title, 1.28, 1.5)
    papers = {row["sizes"]["task"]: row["paper"] for row in rows if row["part"] == "inference"}
    assert papers["pathx"] == 1.73
    assert not [row for row in ratios_of(lra()[:-1], goals=True) if row["sizes"].get("task") == "mean of six"]


def test_speed_and_memory_of_training_have_goals_of_their_own() -> None:
    rows = ratios_of(model(), goals=True)
    speed = find(rows, "tcnca: tokens a second of training", "step", "eager")
    assert speed["value"] == pytest.approx(65_536 / 61e-3)
    assert reached(speed, "goal") is True
    memory = find(rows, "tcnca: peak memory of a step", "step", "eager")
    assert (memory["value"], memory["unit"], memory["goal"]) == (pytest.approx(20.0), "GB", 25)
    # Less is better.
    assert (reached(memory, "goal"), reached(memory, "stretch")) == (True, False)
    rival = find(rows, "mega-fft-compiled: tokens a second of training", "step")
    assert rival["goal"] is None


def report(suite: str, results: list[Result], device: str = "cuda") -> Report:
    return Report(
        suite=suite,
        hardware={"device": device, "name": "a machine", "memory_gib": 1},
        versions={"torch": "2"},
        commit=None,
        begun="2026",
        command=f"tcnca bench {suite}",
        settings={"dtype": "bfloat16", "channels": 64, "kernel_size": 17, "depth": 4},
        floors={},
        entries=results,
        ratios=ratios_of(results, goals=device == "cuda"),
    )


REPORTS = {
    "ops": lambda: report("ops", ops()),
    "layer": lambda: report("layer", [timed("layer", "tcnca", {"batch": 1, "length": 64}, forward=1.0, backward=2.0)]),
    "model": lambda: report("model", model()),
    "lra": lambda: report("lra", lra()),
}


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
@pytest.mark.parametrize("suite", REPORTS)
def test_pictures_are_drawn(suite: str, ending: str, tmp_path: Path) -> None:
    path = save_plot(tmp_path / f"picture.{ending}", REPORTS[suite]())
    assert path is not None
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


def test_picture_of_operators_names_what_it_shows() -> None:
    from tcnca.bench.plot import draw

    figure = draw(REPORTS["ops"]())
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert {"bidirectional, forward, batch 8", "causal, backward, batch 8"} <= set(titles)
    assert all(axes.get_xlabel() == "length, tokens" for axes in figure.axes)
    lines = figure.axes[0].get_lines()
    assert len(lines) == 3  # of three contestants that have this direction
    assert np.asarray(lines[0].get_ydata()).tolist() == [pytest.approx(45_000 / 2)]


def shown(table: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_tables_show_times_shares_and_goals() -> None:
    made = REPORTS["ops"]()
    text = shown(entry_tables(made)[0])
    assert "batch 8, length 131072, f 20" in text
    assert "22.5 ms" in text  # on the device
    assert "45 ms" in text  # as called
    text = shown(ratio_table(made.ratios))
    line = next(line for line in text.splitlines() if "as published" in line)
    for part in ("8 × 131072", "7.07 / 2.86", "40 / 25", "100 / 50", "45.0 / 20.0"):
        assert part in line
    assert ratio_table([]) is None


def test_unsteady_times_are_marked() -> None:
    made = REPORTS["ops"]()
    assert "~" not in shown(entry_tables(made)[0])
    ways = made.entries[0].times["forward"]
    median = ways["eager"].median
    ways["eager"] = dataclasses.replace(ways["eager"], low=0.5 * median, high=1.5 * median)
    text = shown(entry_tables(made)[0])
    assert text.count("~") == 1
    assert f"~{short_time(median)}" in text


def test_names_are_there_in_a_narrow_terminal() -> None:
    for made in (REPORTS["ops"](), REPORTS["model"]()):
        text = "".join(shown(table, 80) for table in entry_tables(made))
        assert all(entry.label[:4] in text for entry in made.entries)
        text = shown(ratio_table(made.ratios), 80)
        assert any(str(row["title"]).split()[0] in text for row in made.ratios)
        assert "…" not in text


def test_times_for_people() -> None:
    assert [short_time(value) for value in (2e-6, 9.999e-4, 0.0123, 1.5, None)] == [
        "2 µs",
        "1 ms",
        "12.3 ms",
        "1.5 s",
        "–",
    ]
