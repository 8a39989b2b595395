"""A run that is killed at any instant, also while it writes, continues as if nothing had happened."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.training import CheckpointManager, DistContext
from tests.training.tiny import (
    Death,
    Operation,
    Saboteur,
    TinyTrainer,
    arguments,
    assert_same,
    ended,
    latest,
    losses,
    process,
    recipe,
    weights,
)

CHANGES = [
    "max_steps=5",
    "checkpoint.every=2",
    "checkpoint.keep=1",
    "eval.every=3",
    "log_every=1",
    "eval.batch_size=500",
]
SAVED = ["max_steps=4", "checkpoint.every=2", "eval.every=2"]
OPTIMIZERS = "optimizers-00000.safetensors"
PARTS = 4
"""Tests that share all instants, to run in parallel."""


def _train(folder: Path, instant: int, death: Death) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trainer = TinyTrainer(folder, recipe(*CHANGES), resume=True)
    saboteur = Saboteur(folder, instant, death)
    sys.addaudithook(saboteur)
    trainer.fit()
    folder.with_suffix(".json").write_text(json.dumps(saboteur.operations))


def train(folder: Path, instant: int = -1, death: Death = "before") -> int | None:
    """Train in a process, which is killed at an instant. Returns its exit code."""
    (code,) = ended(process(_train, folder, instant, death))
    return code


def operations(folder: Path) -> list[Operation]:
    """Return what a run that was not killed has done to its directory."""
    return [Operation(*values) for values in json.loads(folder.with_suffix(".json").read_text())]


def writing(found: list[Operation]) -> list[int]:
    """Return the operations after which a file is written."""
    # Safetensors does not write through Python; what comes before is the directory for it.
    return [
        number
        for number, each in enumerate(found)
        if each.writes or (each.event == "os.mkdir" and (".saving-" in each.path or ".partial" in each.path))
    ]


class Whole(NamedTuple):
    """A run that was never interrupted, and one that was killed while it saved its second checkpoint."""

    folder: Path
    begun: Path
    rest: list[Operation]
    """What it takes to finish the killed run."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("instants")
    assert train(folder / "whole") == 0
    found = operations(folder / "whole")
    third = next(number for number, each in enumerate(found) if "step-000000003" in each.path)
    assert train(folder / "begun", third) == -signal.SIGKILL
    assert losses(folder / "begun").keys() == {1, 2, 3}
    shutil.copytree(folder / "begun", folder / "rest")
    assert train(folder / "rest") == 0
    return Whole(folder / "whole", folder / "begun", operations(folder / "rest"))


def kept(folder: Path) -> tuple[str, str, float | None, list[str]]:
    """Return the last and the best checkpoint of a run, the best score, and what else lies about."""
    checkpoints = CheckpointManager(folder / "checkpoints", 1, DistContext())
    best = checkpoints.best()
    rest = sorted(path.name for path in (*folder.glob(".*"), *checkpoints.folder.glob(".*")) if path.name != ".lock")
    return latest(folder).name, best.name if best else "", checkpoints.best_score(), rest


def assert_recovers(folder: Path, whole: Whole, place: str) -> None:
    """Check that a killed run, once resumed, equals the one that never was."""
    assert train(folder) == 0, place
    assert losses(folder) == losses(whole.folder), place
    for each in (lambda folder: folder, latest):
        assert_same(weights(tcnca.load(each(folder))), weights(tcnca.load(each(whole.folder))))
    assert kept(folder) == kept(whole.folder), place


def kill_and_recover(folder: Path, whole: Whole, instant: int, death: Death) -> None:
    place = f"{death} {instant}: {whole.rest[instant]}"
    shutil.copytree(whole.begun, folder)
    assert train(folder, instant, death) == -(signal.SIGKILL if death == "before" else signal.SIGXFSZ), place
    assert_recovers(folder, whole, place)


def test_all_that_a_run_writes_is_seen(whole: Whole) -> None:
    """So that the instants below are all there are."""
    seen = {(each.event, each.path.replace(".saving-", "/").rpartition("/")[2]) for each in whole.rest}
    written = {path.lstrip(".") for event, path in seen if event == "open"}
    run = {"recipe.yaml", "provenance.json", "model.safetensors", "result.json", "report.md"}
    assert run | {"config.json", "state.json", "best.json"} <= written
    assert {("os.mkdir", ".step-000000003.partial"), ("os.chmod", OPTIMIZERS)} <= seen
    moved = {path for event, path in seen if event == "os.rename"}
    assert {".step-000000003.partial", ".step-000000004.partial", "step-000000002", ".best.json"} <= moved
    assert {"state.json", "model.safetensors", OPTIMIZERS} <= {path for event, path in seen if event == "os.remove"}


@pytest.mark.parametrize(
    ("event", "name", "death"),
    [
        ("os.mkdir", ".step-000000003.partial", "within"),
        ("os.chmod", OPTIMIZERS, "before"),
        ("open", "state.json", "within"),
        ("os.rename", ".step-000000003.partial", "before"),
        ("os.rename", "checkpoints/.best.json", "before"),
        ("os.remove", "model.safetensors", "before"),
        ("open", ".result.json", "within"),
    ],
)
def test_killed_while_it_saves(tmp_path: Path, whole: Whole, event: str, name: str, death: Death) -> None:
    found = [number for number, each in enumerate(whole.rest) if each.event == event and each.path.endswith(name)]
    kill_and_recover(tmp_path / "run", whole, found[0], death)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(PARTS))
@pytest.mark.parametrize("death", ["before", "within"])
def test_killed_at_every_operation(tmp_path: Path, whole: Whole, death: Death, share: int) -> None:
    """Before each change of the file system, and in the middle of each file that is written."""
    instants = list(range(len(whole.rest))) if death == "before" else writing(whole.rest)
    for instant in instants[share::PARTS]:
        kill_and_recover(tmp_path / str(instant), whole, instant, death)


@pytest.mark.parametrize(
    ("instant", "death"),
    [
        pytest.param(
            instant, death, marks=() if (instant, death) in ((1, "before"), (4, "within")) else pytest.mark.slow
        )
        for instant in range(8)
        for death in ("before", "within")
    ],
)
def test_killed_at_its_very_start(tmp_path: Path, whole: Whole, death: Death, instant: int) -> None:
    assert train(tmp_path / "run", instant, death) in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert_recovers(tmp_path / "run", whole, f"{death} {instant}")


def _command(folder: Path, instant: int, death: Death) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(Saboteur(folder, instant, death))
    done = CliRunner().invoke(app, arguments(folder, *CHANGES, "--resume"))
    error = "" if isinstance(done.exception, SystemExit) else repr(done.exception)
    # The limit on file sizes would hold for this file as well.
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    folder.with_suffix(".json").write_text(json.dumps([done.exit_code, done.output, error]))


def check_full_disk(folder: Path, whole: Whole, instant: int, death: Death) -> None:
    """Check that a message names the disk, and that the run continues when there is space again."""
    place = f"{death} {instant}: {whole.rest[instant]}"
    shutil.copytree(whole.begun, folder)
    assert ended(process(_command, folder, instant, death)) == [0]
    code, output, error = json.loads(folder.with_suffix(".json").read_text())
    assert (code, error) == (1, ""), f"{place}\n{output}"
    assert f"Error: {folder}" in output, f"{place}\n{output}"
    assert ("the disk is full" if death == "full" else "cannot be written (File too large)") in output, place
    assert "Traceback" not in output, f"{place}\n{output}"
    assert_recovers(folder, whole, place)


def filling(whole: Whole) -> list[int]:
    """Return the writes of a checkpoint or of the start of a run that may find a full disk."""
    return [number for number in writing(whole.rest) if "step-000000005" not in whole.rest[number].path]


@pytest.mark.parametrize(("name", "death"), [(".partial", "short"), ("state.json", "full"), (".saving-", "full")])
def test_a_full_disk(tmp_path: Path, whole: Whole, name: str, death: Death) -> None:
    instant = next(number for number in filling(whole) if name in whole.rest[number].path)
    check_full_disk(tmp_path / "run", whole, instant, death)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(PARTS))
@pytest.mark.parametrize("death", ["full", "short"])
def test_a_full_disk_at_every_write(tmp_path: Path, whole: Whole, death: Death, share: int) -> None:
    for instant in filling(whole)[share::PARTS]:
        check_full_disk(tmp_path / str(instant), whole, instant, death)


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0xFF for byte in content[middle : middle + 8]) + content[middle + 8 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) * 2 // 3],
    "flipped": _flipped,
    "replaced": lambda _: b"{}",
    "emptied": lambda _: b"",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert CliRunner().invoke(app, arguments(folder, *SAVED)).exit_code == 0
    (folder / "result.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", "flipped"),
        ("model.safetensors", "truncated"),
        ("config.json", "replaced"),
        (OPTIMIZERS, "flipped"),
        (OPTIMIZERS, "emptied"),
        *(("state.json", damage) for damage in DAMAGES),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, saved: Path, name: str, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    last = latest(folder)
    (last / name).write_bytes(DAMAGES[damage]((last / name).read_bytes()))
    done = CliRunner().invoke(app, [*arguments(folder, *SAVED), "--resume"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert f"Error: {last}" in done.output
    assert "remove this checkpoint to resume from the one before" in done.output
    # Without it, the run continues from the one before.
    shutil.rmtree(last)
    TinyTrainer(folder, recipe(*SAVED), resume=True).fit()
    assert latest(folder) == last
    assert_same(weights(tcnca.load(last)), weights(tcnca.load(latest(saved))))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "replaced"])
@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints/best.json"])
def test_damage_next_to_the_checkpoints_is_named(tmp_path: Path, saved: Path, name: str, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / name).write_bytes(DAMAGES[damage]((folder / name).read_bytes()))
    resume, best = [*arguments(folder, *SAVED), "--resume"], ["eval", str(folder), "--best"]
    done = CliRunner().invoke(app, resume if name == "recipe.yaml" else best)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    # What is left of a recipe may be another recipe, which is refused as such.
    assert f"Error: {folder if name == 'recipe.yaml' else folder / name}" in done.output
