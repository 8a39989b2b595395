"""How a sweep treats the processes of its runs: in order, side by side, and with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnca.errors import ConfigError, TrainingError
from tcnca.training.sweeps.plan import Point, Sweep, plan
from tcnca.training.sweeps.running import outcome, run_sweep

STAND_IN = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[sys.argv.index("--out") + 1])
with (place.parent / "calls.jsonl").open("a") as file:
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    call = {{"arguments": sys.argv[1:], **{{name: os.environ.get(name) for name in names}}}}
    file.write(json.dumps(call) + "\\n")
def stop(*_):
    print("stopped by the signal")
    raise SystemExit(130)
signal.signal(signal.SIGTERM, stop)
{body}
"""
"""What is started in place of a run, to see how it is treated."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def make(body: str) -> None:
        path = tmp_path / "python"
        path.write_text(STAND_IN.format(python=sys.executable, body=body))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


def calls(sweep: Sweep) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (sweep.folder / "calls.jsonl").read_text().splitlines()]


class Heard:
    """Notes what it hears, and does something when a run starts."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self.then = then

    def started(self, point: Point, again: bool) -> None:
        self.lines.append(f"{point.folder.name} {'goes on' if again else 'starts'}")
        self.then()

    def ended(self, point: Point) -> None:
        self.lines.append(f"{point.folder.name} {outcome(point)[0]}")

    def stopping(self, name: str, running: int) -> None:
        self.lines.append(f"{name} {running}")


def planned(folder: Path, *changes: str, **more: Any) -> Sweep:
    return plan("recall-small", changes or ["num_layers=1,2,3,4"], folder / "sweep", **more)


def test_runs_are_started_in_order_and_so_many_at_a_time(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    # The first waits for the second, which never comes unless they run side by side.
    stand_in(
        "end = time.time() + 20\n"
        "while len((place.parent / 'calls.jsonl').read_text().splitlines()) < 2 and time.time() < end:\n"
        "    time.sleep(0.01)\n"
        "sys.exit(time.time() >= end)"
    )
    sweep = planned(tmp_path, device="cpu", jobs=2)
    heard = Heard()
    assert run_sweep(sweep, heard) == ""
    assert [line for line in heard.lines if "starts" in line] == [f"num_layers={n} starts" for n in (1, 2, 3, 4)]
    # Never more than two: the third starts after one of the first two has ended.
    running = 0
    for line in heard.lines:
        running += 1 if "starts" in line else -1
        assert running <= 2
    found = calls(sweep)
    assert "failed" not in " ".join(heard.lines)
    assert {call["OMP_NUM_THREADS"] for call in found} == {"3"}
    first = next(call for call in found if "num_layers=1" in call["arguments"])
    place = str(sweep.folder / "num_layers=1")
    expected = ["-m", "tcnca", "train", "recall-small", "num_layers=1", "--out", place, "--device", "cpu"]
    assert first["arguments"] == expected


def test_runs_are_spread_over_gpus(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    stand_in("")
    sweep = planned(tmp_path, jobs=3)
    run_sweep(sweep, Heard())
    first = [call["CUDA_VISIBLE_DEVICES"] for call in calls(sweep) if "num_layers=4" not in call["arguments"]]
    assert sorted(first) == ["2", "2", "5"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("print('Error: no such luck'); print('bye'); sys.exit(1)", "no such luck"),
        ("print('begun', end=''); raise RuntimeError('broken')", "RuntimeError: broken"),
        ("sys.exit(3)", "ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL; there may be too little memory"),
    ],
)
def test_one_that_fails_takes_no_other_along(
    tmp_path: Path, stand_in: Callable[[str], None], body: str, error: str
) -> None:
    stand_in(f"if 'num_layers=2' in sys.argv:\n    {body}")
    sweep = planned(tmp_path, "num_layers=1,2,3")
    assert run_sweep(sweep, Heard()) == ""
    assert outcome(sweep.points[1]) == ("failed", error)
    assert len(calls(sweep)) == 3
    # It is tried again, as the other ones are, which have left no result.
    run_sweep(sweep, Heard())
    assert len(calls(sweep)) == 6


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_is_passed_on(tmp_path: Path, stand_in: Callable[[str], None], again: bool) -> None:
    """One that does not heed it is ended by the second."""
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if again else ""
    stand_in(f"{ignoring}(place / 'ready').touch()\ntime.sleep(60)")
    sweep = planned(tmp_path, device="cpu")

    class Impatient(Heard):
        def stopping(self, name: str, running: int) -> None:
            super().stopping(name, running)
            if again and len(self.lines) < 4:
                os.kill(os.getpid(), signal.SIGTERM)

    def then() -> None:
        while not (sweep.points[0].folder / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    heard = Impatient(then)
    begun = time.monotonic()
    assert run_sweep(sweep, heard) == "SIGTERM"
    assert time.monotonic() - begun < 20
    told = ["SIGTERM 1"] * (2 if again else 1)
    assert heard.lines == ["num_layers=1 starts", *told, "num_layers=1 stopped"]
    assert [outcome(point)[0] for point in sweep.points] == ["stopped", "waiting", "waiting", "waiting"]
    said = (sweep.points[0].folder / "sweep.log").read_text()
    assert ("stopped by the signal" in said) is not again


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("")
    sweep = planned(tmp_path, "num_layers=1,2")

    def second() -> None:
        with pytest.raises(TrainingError, match="another sweep is at work there"):
            run_sweep(sweep, Heard())

    run_sweep(sweep, Heard(second))
    assert len(calls(sweep)) == 2


def test_an_error_leaves_no_run_behind(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("time.sleep(60)")
    sweep = planned(tmp_path, jobs=2)

    def broken() -> None:
        raise ConfigError("broken")

    begun = time.monotonic()
    with pytest.raises(ConfigError, match="broken"):
        run_sweep(sweep, Heard(broken))
    assert time.monotonic() - begun < 20
    assert outcome(sweep.points[0])[0] == "stopped"
