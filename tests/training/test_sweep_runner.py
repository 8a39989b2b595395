"""How a sweep runs its processes: in order, several at a time, and with nothing left behind; and a real sweep."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import ConfigError
from tcnca.signals import DUPLICATE_SECONDS
from tcnca.training import load_recipe
from tcnca.training.sweeps import Sweep, plan, run_sweep
from tcnca.training.sweeps.results import point_state
from tests.training.tiny import MODEL, SMALL, assert_same, environment, fit, latest, log, recipe, weights

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
"""Started in place of a run, to see how it is treated."""


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


def run(sweep: Sweep, console: Console | None = None) -> tuple[str, list[str]]:
    """Run a sweep. Returns the signal that stopped it, and what it printed of its runs."""
    file = io.StringIO()
    stopped = run_sweep(sweep, console or Console(file=file, markup=False, soft_wrap=True))
    return stopped, file.getvalue().splitlines()[1:]


def planned(folder: Path, *changes: str, **more: Any) -> Sweep:
    return plan("recall-small", changes or ["num_layers=1,2,3,4"], folder / "sweep", **more)


def test_jobs_limits_the_runs_at_a_time(
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
    stopped, lines = run(sweep)
    assert stopped == ""
    assert [line for line in lines if "starts" in line] == [f"num_layers={n}: starts" for n in (1, 2, 3, 4)]
    # Never more than two: the third starts after one of the first two has ended.
    running = 0
    for line in lines:
        running += 1 if "starts" in line else -1
        assert running <= 2
    found = calls(sweep)
    assert "failed" not in " ".join(lines)
    assert {call["OMP_NUM_THREADS"] for call in found} == {"3"}
    first = next(call for call in found if "num_layers=1" in call["arguments"])
    place = str(sweep.folder / "num_layers=1")
    expected = ["-m", "tcnca", "train", "recall-small", "num_layers=1", "--device", "cpu", "--out", place]
    assert first["arguments"] == expected


def test_a_deadline_stops_runs_that_can_be_resumed(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("time.sleep(60)")
    sweep = planned(tmp_path, device="cpu")
    file, started = io.StringIO(), time.monotonic()
    assert run_sweep(sweep, Console(file=file, markup=False), deadline=started + 1.0) == ""
    assert time.monotonic() - started < 30
    assert "the time is over: runs save and end" in file.getvalue()
    assert [point_state(point)[0] for point in sweep.points] == ["stopped", "waiting", "waiting", "waiting"]


def test_runs_are_spread_over_gpus(
    tmp_path: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    stand_in("")
    sweep = planned(tmp_path, jobs=3)
    run(sweep)
    first = [call["CUDA_VISIBLE_DEVICES"] for call in calls(sweep) if "num_layers=4" not in call["arguments"]]
    assert sorted(first) == ["2", "2", "5"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("print('Error: no such luck'); print('bye'); sys.exit(1)", "no such luck"),
        ("print('begun', end=''); raise RuntimeError('broken')", "RuntimeError: broken"),
        ("sys.exit(3)", "ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL; it may have run out of memory"),
    ],
)
def test_a_failed_run_does_not_end_the_others(
    tmp_path: Path, stand_in: Callable[[str], None], body: str, error: str
) -> None:
    stand_in(f"if 'num_layers=2' in sys.argv:\n    {body}")
    sweep = planned(tmp_path, "num_layers=1,2,3")
    run(sweep)
    assert point_state(sweep.points[1]) == ("failed", error)
    assert len(calls(sweep)) == 3
    # It is repeated, like the others, which have left no result.
    run(sweep)
    assert len(calls(sweep)) == 6


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_is_passed_on(tmp_path: Path, stand_in: Callable[[str], None], again: bool) -> None:
    """A run that ignores it is ended by the second, if that is not forwarded with the first."""
    # It takes a second to save.
    handler = "signal.SIG_IGN" if again else "lambda *_: (time.sleep(1), stop())"
    stand_in(f"signal.signal(signal.SIGTERM, {handler})\n(place / 'ready').touch()\ntime.sleep(60)")
    sweep = planned(tmp_path, device="cpu")

    def send() -> None:
        while not (sweep.points[0].folder / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.2 * DUPLICATE_SECONDS if again else 0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    begun = time.monotonic()
    stopped, lines = run(sweep)
    sender.join()
    assert stopped == "SIGTERM"
    assert time.monotonic() - begun < 20
    told = ["SIGTERM: runs save and end; another signal ends them at once"] * (2 if again else 1)
    assert lines == ["num_layers=1: starts", *told, "num_layers=1: stopped"]
    assert [point_state(point)[0] for point in sweep.points] == ["stopped", "waiting", "waiting", "waiting"]
    log_text = (sweep.points[0].folder / "sweep.log").read_text()
    assert ("stopped by the signal" in log_text) is not again


def test_an_error_leaves_no_run_behind(tmp_path: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("time.sleep(60)")
    sweep = planned(tmp_path, jobs=2)

    class Broken(Console):
        def print(self, *texts: Any, **_: Any) -> None:
            if "starts" in texts[0]:
                raise ConfigError("broken")

    begun = time.monotonic()
    with pytest.raises(ConfigError, match="broken"):
        run(sweep, Broken())
    assert time.monotonic() - begun < 20
    assert point_state(sweep.points[0])[0] == "stopped"


VARIANTS = """
about: One line.
variants:
  plain: []
  none: [model.mixer=null]
  broken: [lr=1e38]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A real sweep of three runs, two at a time, of which one fails."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    folder.with_suffix(".yaml").write_text(VARIANTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        done = CliRunner().invoke(app, arguments(folder, "--jobs", "2"))
    assert done.exit_code == 1, done.output
    return folder, done.output


def arguments(folder: Path, *more: str) -> list[str]:
    variants = ["--variants", str(folder.with_suffix(".yaml"))]
    return ["sweep", "recall-small", *SMALL, *MODEL, *variants, "--device", "cpu", "--out", str(folder), *more]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_tables_agree_with_the_runs(swept: tuple[Path, str]) -> None:
    folder, output = swept
    *done, failed = rows_of(folder)
    assert [(row["variant"], row["state"]) for row in done] == [("plain", "done"), ("none", "done")]
    for row, changes in zip(done, ([], ["model.mixer=null"]), strict=True):
        result = json.loads((Path(row["folder"]) / "result.json").read_text())
        for split in ("validation", "test"):
            assert float(row[split]) == result["scores"][split]["value"]
        seen = [line["value"] for line in log(Path(row["folder"])) if line.get("split") == "validation"]
        assert float(row["best_validation"]) == max(seen)
        assert (int(row["steps"]), float(row["seconds"])) == (result["step"], result["seconds"])
        assert (row["metric"], row["max_steps"]) == ("accuracy", "12")
        assert float(row["tokens_per_second"]) > 0
        assert (int(row["parameters"]), float(row["memory_gib"])) == (result["parameters"], result["memory_gib"])
        assert load_recipe(f"{row['folder']}/recipe.yaml") == recipe(*changes).for_device("cpu")
    assert (failed["variant"], failed["state"], failed["validation"], failed["test"]) == ("broken", "failed", "", "")
    assert "the loss or the gradient is not finite" in failed["error"]
    assert failed["error"] in (Path(failed["folder"]) / "sweep.log").read_text()

    page = (folder / "sweep.md").read_text()
    body = [re.split(r" +\| ?", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")][2:]
    done = sorted(done, key=lambda row: -float(row["validation"]))
    assert [line[2] for line in body] == [*(f"{float(row['validation']):.4f}" for row in done), "–"]
    for text in (f"Its test accuracy is {float(done[0]['test']):.4f}", f"--out {folder} --jobs 2", failed["error"]):
        assert text in page
    assert page in output
    assert "sweep.csv, sweep.md, sweep.png, curves.png" in output
    for name in ("sweep.png", "curves.png"):
        with Image.open(folder / name) as picture:
            assert picture.width > 1000


def test_done_runs_are_not_repeated(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    again = CliRunner().invoke(app, arguments(folder, "--only", "none,plain"))
    assert again.exit_code == 0, again.output
    assert "2 already done" in again.output
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*")} == before
    more = CliRunner().invoke(app, arguments(folder, "--dry-run"))
    assert [line.split()[0] for line in more.output.splitlines()] == ["done", "done", "failed"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["eval.every=5"], r"variant=plain: holds a run of another recipe, which differs in eval\.every \(it has"),
        (["--budget", "5m"], "variant=plain: holds a run with the budget None, in seconds, now 300"),
        (["--budget", "soon"], "--budget: expected a time"),
        (["--device", "tpu"], "--device: expected cpu"),
        (["--jbos", "2"], r"--jbos: did you mean --jobs\?"),
    ],
)
def test_other_runs_are_not_mixed_in(swept: tuple[Path, str], more: list[str], message: str) -> None:
    wanted = [
        word for word in arguments(swept[0]) if word.partition("=")[0] not in {each.partition("=")[0] for each in more}
    ]
    refused = CliRunner().invoke(app, [*wanted, *more])
    assert refused.exit_code == 1
    assert re.search(message, refused.output), refused.output


@pytest.mark.slow
def test_an_interrupted_sweep_continues(tmp_path: Path) -> None:
    grid = ("lr=1e-2,1e-3", "max_steps=250", "log_every=5", "eval.every=0", "checkpoint.every=0")
    small = [change for change in SMALL if change.partition("=")[0] not in {each.partition("=")[0] for each in grid}]
    start = [sys.executable, "-m", "tcnca", "sweep", "recall-small", *grid, *small, *MODEL]
    command = [*start, "--device", "cpu", "--out", str(tmp_path / "sweep")]
    first = tmp_path / "sweep" / "lr=0.01"
    # As from a terminal: the signal reaches the sweep and its runs.
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not (first / "log.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopped by SIGINT; nothing is lost, continue with\ntcnca sweep recall-small" in said
    rows = rows_of(tmp_path / "sweep")
    assert [row["state"] for row in rows] == ["stopped", "waiting"]
    assert 0 < int(rows[0]["steps"]) <= int(latest(first).name.removeprefix("step-")) < 250

    command += ["--jobs", "2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    assert "lr=0.01: resumes" in done.stdout
    assert "lr=0.001: starts" in done.stdout
    whole = fit(tmp_path / "whole", *grid[1:], "lr=1e-2")
    assert_same(weights(tcnca.load(latest(first))), weights(whole.model))
