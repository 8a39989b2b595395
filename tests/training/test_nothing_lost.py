"""A run that is killed at any instant, also while it writes, goes on as if nothing had been."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.training import Checkpoints, Processes, Run, Watch
from tests.training.tiny import (
    Death,
    Step,
    Witness,
    arguments,
    assert_same,
    command,
    ended,
    latest,
    losses,
    process,
    recipe,
    weights,
)

CHANGES = ["max_steps=5", "checkpoint.every=2", "checkpoint.keep=1", "eval.every=3", "log_every=1"]
SAVED = ["max_steps=4", "checkpoint.every=2", "eval.every=0"]
PARTS = 4
"""Tests in which all instants are looked at, for them to be run side by side."""


class Sent(Watch):
    """Hands over what a run logs at once, so that it is not lost with the process."""

    def __init__(self, folder: Path, there: Connection) -> None:
        super().__init__(folder, None)
        self.there = there

    def log(self, numbers: Mapping[str, Any]) -> None:
        if "loss" in numbers:
            self.there.send((numbers["step"], numbers["loss"]))


class Part(NamedTuple):
    """What came of a part of a run: how its process ended, its losses, and what it did to the run's folder."""

    code: int | None
    losses: dict[int, float]
    steps: list[Step]


def _train(folder: Path, there: Connection, instant: int, death: Death) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    run = Run(recipe(*CHANGES), folder, Processes(), Sent(folder, there))
    run.resume()
    witness = Witness(folder, instant, death)
    sys.addaudithook(witness)
    run.train()
    there.send(witness.steps)


def part(folder: Path, instant: int = -1, death: Death = "before") -> Part:
    """Train on in a process of its own, which may be killed."""
    here, there = Pipe(duplex=False)
    child = process(_train, folder, there, instant, death)
    child.start()
    there.close()
    losses: dict[int, float] = {}
    steps: list[Step] = []
    try:
        while True:
            match here.recv():
                case int(step), float(loss):
                    losses[step] = loss
                case list(found):
                    steps = found
    except EOFError:
        child.join()
    return Part(child.exitcode, losses, steps)


def writing(steps: list[Step]) -> list[int]:
    """Those after which a file is written."""
    # Weights are written by a library that Python does not see; what comes before it is the folder for them.
    weights = [step.event == "os.mkdir" and ".saving-" in step.path for step in steps]
    return [number for number, step in enumerate(steps) if step.writes or weights[number]]


class Whole(NamedTuple):
    """A run that was never stopped, and one that was killed after a while, to be gone on with."""

    folder: Path
    losses: dict[int, float]
    begun: Path
    steps: list[Step]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("instants")
    done = part(folder / "whole")
    assert done.code == 0
    third = next(number for number, step in enumerate(done.steps) if "step-000000003" in step.path)
    killed = part(folder / "begun", third)
    assert killed.code == -signal.SIGKILL
    assert killed.losses.keys() == {1, 2, 3}
    shutil.copytree(folder / "begun", folder / "rest")
    rest = part(folder / "rest")
    assert rest.code == 0
    return Whole(folder / "whole", done.losses, folder / "begun", rest.steps)


def kept(folder: Path) -> tuple[str, str, float | None, list[str]]:
    """The last and the best checkpoint of a run, the score of that one, and what else lies about."""
    checkpoints = Checkpoints(folder / "checkpoints", 1, Processes())
    best = checkpoints.best()
    rest = sorted(path.name for path in checkpoints.folder.glob(".*"))
    return latest(folder).name, best.name if best else "", checkpoints.best_score(), rest


def assert_whole_again(folder: Path, whole: Whole, killed: Part, place: str) -> None:
    """Gone on with, a run that was killed is the one that never was."""
    rest = part(folder)
    assert rest.code == 0, place
    for found in (killed.losses, rest.losses):
        assert found == {step: whole.losses[step] for step in found}, place
    assert_same(weights(tcnca.load(latest(folder))), weights(tcnca.load(latest(whole.folder))))
    assert kept(folder) == kept(whole.folder), place


def test_all_that_a_save_does_is_seen(whole: Whole) -> None:
    """So that the instants below are all there are."""
    seen = {(step.event, step.path.replace(".saving-", "/").rpartition("/")[2]) for step in whole.steps}
    written = {path.lstrip(".") for event, path in seen if event == "open"}
    assert {"recipe.yaml", "__0_0.distcp", "metadata.tmp", "config.json", "state.json", "best.json"} <= written
    moved = {path for event, path in seen if event == "os.rename"}
    assert {".step-000000003.partial", ".step-000000004.partial", "step-000000002", ".best.json"} <= moved
    assert {"state.json", "model.safetensors", "__0_0.distcp"} <= {path for event, path in seen if event == "os.remove"}


@pytest.mark.slow
@pytest.mark.parametrize("share", range(PARTS))
@pytest.mark.parametrize("death", ["before", "within"])
def test_killed_at_each_step_of_a_save(tmp_path: Path, whole: Whole, death: Death, share: int) -> None:
    """Before each change of the file system, and in the middle of each file that is written."""
    instants = list(range(len(whole.steps))) if death == "before" else writing(whole.steps)
    for instant in instants[share::PARTS]:
        place = f"{death} {instant}: {whole.steps[instant]}"
        folder = tmp_path / str(instant)
        shutil.copytree(whole.begun, folder)
        killed = part(folder, instant, death)
        assert killed.code == -(signal.SIGKILL if death == "before" else signal.SIGXFSZ), place
        assert_whole_again(folder, whole, killed, place)


@pytest.mark.parametrize("death", ["before", "within"])
@pytest.mark.parametrize("instant", range(6))
def test_killed_at_its_very_beginning(tmp_path: Path, whole: Whole, death: Death, instant: int) -> None:
    folder = tmp_path / "run"
    killed = part(folder, instant, death)
    assert killed.code in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert_whole_again(folder, whole, killed, f"{death} {instant}")


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path: Path) -> None:
    changes = ["max_steps=40", "checkpoint.every=1", "eval.every=5", "log_every=1"]
    whole, killed = arguments(tmp_path / "whole", *changes), arguments(tmp_path / "killed", *changes, "--resume")
    assert ended(process(command, whole)) == [0]
    delays = random.Random(0)
    reached = [0]
    for _ in range(8):
        child = process(command, killed)
        child.start()
        # Some while it starts, most while it trains and saves.
        child.join(delays.uniform(0.2, 3))
        child.kill()
        child.join()
        places = (tmp_path / "killed" / "checkpoints").glob("step-*")
        reached.append(max((int(place.name.removeprefix("step-")) for place in places), default=0))
    assert reached == sorted(reached)
    assert ended(process(command, killed)) == [0]
    assert_same(weights(tcnca.load(latest(tmp_path / "killed"))), weights(tcnca.load(latest(tmp_path / "whole"))))
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert kept(tmp_path / "killed") == kept(tmp_path / "whole")


def _command(folder: Path, there: Connection, instant: int, death: Death) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(Witness(folder, instant, death))
    done = CliRunner().invoke(app, arguments(folder, *CHANGES, "--resume"))
    there.send((done.exit_code, done.output, "" if isinstance(done.exception, SystemExit) else repr(done.exception)))


def refused(folder: Path, instant: int, death: Death) -> tuple[int, str, str]:
    """What the command says of a disk that fills up: its exit code, its output, and an error that nobody has caught."""
    here, there = Pipe(duplex=False)
    child = process(_command, folder, there, instant, death)
    child.start()
    there.close()
    said = here.recv()
    child.join()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("share", range(PARTS))
@pytest.mark.parametrize("death", ["full", "short"])
def test_a_disk_that_is_full(tmp_path: Path, whole: Whole, death: Death, share: int) -> None:
    """Whatever it was that did not fit, a message says so, and the run goes on when there is space again."""
    instants = [number for number in writing(whole.steps) if "step-000000005" not in whole.steps[number].path]
    for instant in instants[share::PARTS]:
        place = f"{death} {instant}: {whole.steps[instant]}"
        folder = tmp_path / str(instant)
        shutil.copytree(whole.begun, folder)
        code, output, error = refused(folder, instant, death)
        assert (code, error) == (1, ""), f"{place}\n{output}"
        assert f"Error: {folder}" in output, f"{place}\n{output}"
        assert ("the disk is full" if death == "full" else "cannot be written (File too large)") in output, place
        assert "Traceback" not in output, f"{place}\n{output}"
        assert_whole_again(folder, whole, Part(code, {}, []), place)


def _cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0xFF for byte in content[middle : middle + 8]) + content[middle + 8 :]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert CliRunner().invoke(app, arguments(folder, *SAVED)).exit_code == 0
    (folder / "result.json").unlink()
    return folder


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda content: b"{}", lambda content: b""])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "optimizer/__0_0.distcp", "optimizer/.metadata", "state.json"]
)
def test_a_damaged_checkpoint(tmp_path: Path, saved: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    """It is named, and the run goes on from the one before when it is removed."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    wanted, last = arguments(folder, *SAVED), latest(folder)
    path = last / name
    path.write_bytes(damage(path.read_bytes()))
    done = CliRunner().invoke(app, [*wanted, "--resume"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert f"Error: {last}" in done.output
    assert "remove" in done.output
    shutil.rmtree(last)
    again = CliRunner().invoke(app, [*wanted, "--resume"])
    assert again.exit_code == 0, again.output
    assert latest(folder) == last
    assert_same(weights(tcnca.load(last)), weights(tcnca.load(latest(saved))))


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda content: b"[]"])
@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints/best.json"])
def test_damage_beside_the_checkpoints(tmp_path: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    wanted = arguments(tmp_path, "max_steps=4", "eval.every=2")
    assert CliRunner().invoke(app, wanted).exit_code == 0
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    best = ["eval", str(tmp_path), "--best"]
    done = CliRunner().invoke(app, [*wanted, "--resume"] if name == "recipe.yaml" else best)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    # What is left of a recipe may be another recipe, which is refused as such.
    assert f"Error: {tmp_path if name == 'recipe.yaml' else tmp_path / name}" in done.output


class Until(Watch):
    """Notes what a run logs, and stops it after some seconds."""

    def __init__(self, folder: Path, lines: list[Mapping[str, Any]], seconds: float) -> None:
        super().__init__(folder, None)
        self.lines, self.seconds = lines, seconds

    def log(self, numbers: Mapping[str, Any]) -> None:
        if "loss" in numbers:
            self.lines.append(numbers)
            if numbers["seconds"] > self.seconds:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_budget_is_for_all_parts_together(tmp_path: Path) -> None:
    """Validations and checkpoints are part of it, and the rate goes down to its end."""
    budget, lines = 6.0, list[Mapping[str, Any]]()
    wanted = recipe("max_steps=100000", "warmup_steps=10000", "log_every=1", "eval.every=30", "checkpoint.every=50")
    spent = 0.0
    for until in (2.5, 100.0):
        run = Run(wanted, tmp_path, Processes(), Until(tmp_path, lines, until), budget)
        run.resume()
        begun = time.monotonic()
        result = run.train()
        spent += time.monotonic() - begun
    assert result.stopped == ""
    assert result.seconds == pytest.approx(budget, rel=0.03)
    # The last validation and the test come after.
    assert spent == pytest.approx(budget, abs=1.0)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert max(b - a for a, b in itertools.pairwise(seconds)) < 1.0
    peak = wanted.optimizer.lr
    assert max(line["rate"] for line in lines) == pytest.approx(peak, rel=0.05)
    assert lines[-1]["rate"] < 0.05 * peak
