"""What is seen of a run: not too much on a screen, and everything in its log, however often it is killed."""

from __future__ import annotations

import io
import json
import random
import time
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tcnca.errors import DataError
from tcnca.training import Watch, watching
from tcnca.training.log import LOG, read_log

LOSS = {"loss": 1.5, "rate": 0.001, "seconds": 3.0, "tokens_per_second": 2000.0}


class Clock:
    """A time that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watching, "time", types.SimpleNamespace(monotonic=made.monotonic, time=made.time))
    return made


def screen(terminal: bool = False, width: int = 120) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width), file


def strict(text: str) -> Any:
    """What a reader makes of it that knows only what JSON has."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_lines_are_few_on_paper_and_all_in_the_log(tmp_path: Path, clock: Clock) -> None:
    console, file = screen()
    with Watch(tmp_path, console) as watch:
        for step in range(1, 101):
            clock.now += 0.5
            watch.log({"step": step, "done": step / 100, **LOSS})
            watch.log({"step": step, "split": "validation", "metric": "accuracy", "score": step / 100})
    said = file.getvalue().splitlines()
    # Fifty seconds, a line of each kind every five.
    assert sum("loss" in line for line in said) == 10
    assert sum("validation accuracy" in line for line in said) == 10
    assert "\x1b" not in file.getvalue()
    assert len((tmp_path / LOG).read_text().splitlines()) == 200


def test_slow_lines_are_all_said(tmp_path: Path, clock: Clock) -> None:
    console, file = screen()
    with Watch(tmp_path, console) as watch:
        for step in range(1, 8):
            clock.now += 6
            watch.log({"step": step, "done": step / 7, **LOSS, "memory_gib": 2.25})
    said = file.getvalue().splitlines()
    assert len(said) == 7
    assert said[0].startswith("update 1, loss 1.5000, 2,000 tokens/s, 2.2 GiB, 14 % done")


def test_the_time_left_is_judged_from_where_a_part_began(tmp_path: Path, clock: Clock) -> None:
    console, file = screen()
    with Watch(tmp_path, console) as watch:
        watch.advance(500, 0.5)
        clock.now += 10
        # A tenth of the run in ten seconds; four tenths are left.
        watch.log({"step": 600, "done": 0.6, **LOSS})
    assert "60 % done, 0:00:40 left" in file.getvalue()


def test_a_slow_beginning_is_forgotten(tmp_path: Path, clock: Clock) -> None:
    console, file = screen()
    with Watch(tmp_path, console) as watch:
        watch.advance(0, 0.0)
        clock.now += 600
        for step in range(1, 61):
            clock.now += 1
            watch.advance(step, step / 100)
        clock.now += 10
        watch.log({"step": 70, "done": 0.7, **LOSS})
    # A second for an update since the middle of what is done.
    assert "70 % done, 0:00:30 left" in file.getvalue()


@pytest.mark.parametrize("d_model", [60, 120])
def test_a_terminal_shows_the_time_left_at_any_width(tmp_path: Path, clock: Clock, width: int) -> None:
    console, file = screen(terminal=True, width=width)
    with Watch(tmp_path, console) as watch:
        watch.advance(20, 0.2)
        clock.now += 5
        watch.log({"step": 20, "split": "validation", "metric": "accuracy", "score": 0.875})
        # Known at the first update, before there is a loss.
        watch.advance(21, 0.21)
        watch._progress.refresh()
        assert "0:06:35" in file.getvalue()
        assert "update 21, accuracy 0.8750" in file.getvalue()
        clock.now += 5
        watch.log({"step": 22, "done": 0.22, **LOSS})
        watch._progress.refresh()
        assert "22 %" in file.getvalue()
        assert "0:06:30" in file.getvalue()
        clock.now += 30
        watch._progress.refresh()
        assert "0:06:00" in file.getvalue()
    assert ("2,000 tokens/s" in file.getvalue()) == (width == 120)
    assert "update 20: validation accuracy 0.8750" in file.getvalue()


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    with Watch(tmp_path, screen()[0]) as watch:
        watch.log({"step": 3, "done": 0.5, **LOSS, "loss": float("nan"), "norm": float("inf")})
        watch.log({"step": 3, "split": "validation", "metric": "accuracy", "score": float("-inf")})
    first, second = (strict(line) for line in (tmp_path / LOG).read_text().splitlines())
    assert (first["loss"], first["norm"], first["rate"]) == (None, None, 0.001)
    assert second["score"] is None


def test_the_memory_of_a_process_without_a_gpu(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("the system does not tell")
    with Watch(tmp_path, screen()[0]) as watch:
        watch.log({"step": 1, "done": 0.5, **LOSS})
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert read_log(tmp_path)[0]["memory_gib"] == pytest.approx(peak / 2**20, rel=0.05)


def test_a_watch_without_a_console_leaves_nothing(tmp_path: Path) -> None:
    with Watch(tmp_path / "run", None) as watch:
        watch.advance(1, 0.1)
        watch.log({"step": 1, "done": 0.1, **LOSS})
        watch.say("hello")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        Watch(tmp_path / "file" / "run", screen()[0]) as watch,
        pytest.raises(DataError, match=r"file.run: cannot be written \(.*\); choose another place with --out"),
    ):
        watch.log({"step": 1, "done": 0.1, **LOSS})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / LOG).symlink_to("/dev/full")
    with pytest.raises(DataError, match=r": the disk is full; free some space"), Watch(tmp_path, screen()[0]) as watch:
        watch.log({"step": 1, "done": 0.1, **LOSS})


def lines_of(first: int, last: int, part: int) -> list[dict[str, Any]]:
    """What a run logs from one update to another: losses every third, validations every fourth."""
    lines: list[dict[str, Any]] = []
    for step in range(first + 1, last + 1):
        if step % 3 == 0:
            lines.append({"step": step, "loss": 1 / step, "part": part})
        if step % 4 == 0:
            lines.append({"step": step, "split": "validation", "score": step, "part": part})
    return lines


@pytest.mark.parametrize("seed", range(20))
def test_a_log_of_many_parts_reads_as_that_of_one(tmp_path: Path, seed: int) -> None:
    """Killed at any update, also in the middle of a line, and gone on from any checkpoint before."""
    draw, begun, reached, text = random.Random(seed), 0, 0, ""
    newest: dict[tuple[int, Any], int] = {}
    for part in range(6):
        reached = draw.randint(begun, 60) if part < 5 else 60
        found = lines_of(begun, reached, part)
        newest.update({(line["step"], line.get("split")): part for line in found})
        whole = "".join(json.dumps(line) + "\n" for line in found)
        cut = draw.randint(0, 25) if part < 5 else 0
        text += whole[: max(len(whole) - cut, 0)]
        # As `open_log` does.
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


def test_a_part_that_ended_in_the_middle_of_a_line_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 3, "loss": 2.0}\n{"step": 6, "lo')
    assert [line["step"] for line in read_log(tmp_path)] == [3]
    with Watch(tmp_path, screen()[0]) as watch:
        watch.log({"step": 5, "done": 0.5, **LOSS})
    assert [(line["step"], line["loss"]) for line in read_log(tmp_path)] == [(3, 2.0), (5, 1.5)]


def test_a_run_that_has_logged_nothing(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []


def test_tensorboard_shows_each_update_once(tmp_path: Path) -> None:
    for part, steps in enumerate([(3, 6, 9, 12), (9, 12, 15)]):
        with Watch(tmp_path, screen()[0]) as watch:
            for step in steps:
                watch.log({"step": step, "done": step / 15, **LOSS, "loss": float(step + part)})
            watch.log({"step": steps[-1], "split": "validation", "metric": "accuracy", "score": 0.5 + part})
        # TensorBoard tells by the second which file came first.
        time.sleep(1.1)
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = {event.step: event.value for event in shown.Scalars("train/loss")}
    assert losses == {3: 3.0, 6: 6.0, 9: 10.0, 12: 13.0, 15: 16.0}
    assert len(shown.Scalars("train/loss")) == 5
    assert [(event.step, event.value) for event in shown.Scalars("validation/accuracy")] == [(15, 1.5)]
