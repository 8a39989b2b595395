"""What a run reports: little on a screen, and everything in its log, however often it is killed."""

from __future__ import annotations

import io
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tcnca.errors import DataError
from tcnca.training import DistContext, Logger, logger, read_log
from tcnca.training.logger import LOG, Meter, StepOutput
from tests.training.tiny import Clock

LOSS = {"loss": 1.5, "lr": 0.001, "seconds": 3.0, "tokens_per_second": 2000.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(logger, "time", made)
    return made


def screen(terminal: bool = False, width: int = 120) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width), file


def test_few_lines_are_printed_and_all_are_logged(tmp_path: Path, clock: Clock) -> None:
    console, file = screen()
    with Logger(tmp_path, console) as watch:
        for step in range(1, 101):
            clock.now += 0.5
            watch.log({"step": step, "progress": step / 100, **LOSS})
            watch.log({"step": step, "split": "validation", "metric": "accuracy", "value": step / 100})
    said = file.getvalue().splitlines()
    # Fifty seconds, a line of each kind every five.
    assert sum("loss" in line for line in said) == 10
    assert sum(": validation accuracy" in line for line in said) == 10
    assert "\x1b" not in file.getvalue()
    assert len((tmp_path / LOG).read_text().splitlines()) == 200


def test_time_left_does_not_count_the_steps_before_the_clock_is_restarted(tmp_path: Path, clock: Clock) -> None:
    console, file = screen()
    with Logger(tmp_path, console) as watch:
        watch.progress(0, 0.0)
        clock.now += 40
        watch.progress(1, 0.01)
        watch.restart_clock(0.01)
        for step in range(2, 12):
            clock.now += 1
            watch.progress(step, step / 100)
        watch.log({"step": 11, "progress": 0.11, **LOSS})
    assert "11 % done, 0:01:29 left" in file.getvalue()


@pytest.mark.parametrize(("terminal", "width"), [(False, 120), (True, 60), (True, 120)])
def test_time_left_is_estimated_from_the_start_of_a_launch(
    tmp_path: Path, clock: Clock, terminal: bool, width: int
) -> None:
    console, file = screen(terminal=terminal, width=width)
    with Logger(tmp_path, console) as watch:
        watch.progress(500, 0.5)
        clock.now += 10
        watch.log({"step": 500, "split": "validation", "metric": "accuracy", "value": 0.875})
        # An eighth of the run in ten seconds; three eighths are left.
        watch.log({"step": 625, "progress": 0.625, **LOSS})
        watch._progress.refresh()
    text = file.getvalue()
    assert "step 500: validation accuracy 0.8750" in text
    if terminal:
        # A narrow terminal cuts the end of the text.
        assert ("2,000 tokens/s" in text) == (width == 120)
        assert "62 %" in text
        assert "0:00:30" in text
    else:
        assert "step 625, loss 1.5000, validation accuracy 0.8750, 2,000 tokens/s, 62 % done, 0:00:30 left\n" in text


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Logger(tmp_path, screen()[0]) as watch:
        watch.log({"step": 3, "progress": 0.5, **LOSS, "loss": float("nan"), "grad_norm": float("inf")})
        watch.log({"step": 3, "split": "validation", "metric": "accuracy", "value": float("-inf")})
    text = (tmp_path / LOG).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = (json.loads(line) for line in text.splitlines())
    assert (first["loss"], first["grad_norm"], first["lr"]) == (None, None, 0.001)
    assert second["value"] is None


def test_the_meter(clock: Clock) -> None:
    meter = Meter(DistContext())
    for step, loss in enumerate([2.0, 4.0, float("nan")]):
        skipped = step == 2
        meter.add(step, StepOutput(torch.tensor(loss), torch.tensor(1.0), 50, 0.25, skipped))
    clock.now += 2
    saved = meter.state()
    with meter.pause():
        clock.now += 100
    clock.now += 2
    # Restored, it continues with the sums; speed and waiting are of the time that is left.
    for each in (meter, Meter(DistContext(), saved)):
        values = each.read()
        assert (values["loss"], values["grad_norm"], values["skipped_steps"], values["tokens"]) == (3.0, 1.0, 1, 150)
    assert meter.first_nonfinite() is None
    meter.add(7, StepOutput(torch.tensor(1.0), torch.tensor(float("inf")), 1, 0.0, False))
    assert meter.first_nonfinite() == 7


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not report its memory")
def test_meter_measures_the_memory_of_the_process() -> None:
    status = Path("/proc/self/status")
    meter = Meter(DistContext())
    meter.add(1, StepOutput(torch.tensor(1.0), torch.tensor(1.0), 1, 0.0, False))
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert meter.read()["memory_gib"] == pytest.approx(peak / 2**20, rel=0.05)


@pytest.mark.parametrize("terminal", [False, True])
def test_an_evaluation_shows_its_progress(tmp_path: Path, clock: Clock, terminal: bool) -> None:
    console, file = screen(terminal=terminal)
    with Logger(tmp_path, console) as watch, watch.evaluation("test") as progress:
        for batch in range(1, 5):
            clock.now += 6
            progress(batch, batch / 8)
            watch._progress.refresh()
    text = file.getvalue()
    if terminal:
        assert "evaluating test" in text
        assert "50 %" in text
    else:
        assert "evaluating test: batch 4, 50 % done, 0:00:24 left" in text.splitlines()
    with Logger(tmp_path, console) as watch, watch.evaluation("test") as progress:
        clock.now += 6
        progress(3, None)
    assert terminal or "evaluating test: batch 3\n" in file.getvalue()
    assert not (tmp_path / LOG).exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / LOG).symlink_to("/dev/full")
    with pytest.raises(DataError, match=r": the disk is full; free some space"), Logger(tmp_path, screen()[0]) as watch:
        watch.log({"step": 1, "progress": 0.1, **LOSS})


def lines_of(first: int, last: int, part: int) -> list[dict[str, Any]]:
    """Return what a run logs from one step to another: losses every third, validations every fourth."""
    lines: list[dict[str, Any]] = []
    for step in range(first + 1, last + 1):
        if step % 3 == 0:
            lines.append({"step": step, "loss": 1 / step, "part": part})
        if step % 4 == 0:
            lines.append({"step": step, "split": "validation", "value": step, "part": part})
    return lines


@pytest.mark.parametrize("seed", range(8))
def test_a_log_of_many_parts_reads_as_that_of_one(tmp_path: Path, seed: int) -> None:
    """Killed at any step, also in the middle of a line, and resumed from any checkpoint before."""
    draw, begun, reached, text = random.Random(seed), 0, 0, ""
    newest: dict[tuple[int, Any], int] = {}
    for part in range(6):
        reached = draw.randint(begun, 60) if part < 5 else 60
        found = lines_of(begun, reached, part)
        newest.update({(line["step"], line.get("split")): part for line in found})
        whole = "".join(json.dumps(line) + "\n" for line in found)
        cut = draw.randint(0, 25) if part < 5 else 0
        text += whole[: max(len(whole) - cut, 0)]
        # As the logger does.
        text += "" if not text or text.endswith("\n") else "\n"
        begun = draw.randint(0, reached)
    # What was cut off, and not done again, is missing; nothing else is.
    (tmp_path / LOG).write_text(text)
    found = read_log(tmp_path)
    assert [line["step"] for line in found] == sorted(line["step"] for line in found)
    wanted = {(line["step"], line.get("split")): line for line in lines_of(0, 60, 0)}
    for line in found:
        key = (line["step"], line.get("split"))
        assert line["part"] == newest[key]
        assert {**wanted.pop(key), "part": line["part"]} == line
    assert all(json.dumps({**line, "part": newest[key]}) not in text for key, line in wanted.items())


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    for part, steps in enumerate([(3, 6, 9, 12), (9, 12, 15)]):
        with Logger(tmp_path, screen()[0]) as watch:
            for step in steps:
                watch.log({"step": step, "progress": step / 15, **LOSS, "loss": float(step + part)})
            watch.log({"step": steps[-1], "split": "validation", "metric": "accuracy", "value": 0.5 + part})
        # TensorBoard orders files by their second.
        time.sleep(1.1)
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in shown.Scalars("train/loss")}
    assert losses == {3: 3.0, 6: 6.0, 9: 10.0, 12: 13.0, 15: 16.0}
    assert len(shown.Scalars("train/loss")) == 5
    assert [(event.step, event.value) for event in shown.Scalars("validation/accuracy")] == [(15, 1.5)]


def test_a_log_that_ends_in_the_middle_of_a_line_is_continued(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 3, "loss": 2.0}\n{"step": 6, "lo')
    assert [line["step"] for line in read_log(tmp_path)] == [3]
    with Logger(tmp_path, screen()[0]) as watch:
        watch.log({"step": 5, "progress": 0.5, **LOSS})
    assert [(line["step"], line["loss"]) for line in read_log(tmp_path)] == [(3, 2.0), (5, 1.5)]
