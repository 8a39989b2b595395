"""Two processes give what one gives, however the work is shared, and each goes on with what the other has saved."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.data import Batch
from tcnca.training import Run, Watch, processes
from tests.training.tiny import (
    arguments,
    assert_same,
    command,
    environment,
    latest,
    log,
    losses,
    recipe,
    together,
    weights,
)

PARALLEL = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
# Not a multiple of what is evaluated: some batch has no example for one of the processes.
PLAIN = ["model.dropout=0", "log_every=1", "checkpoint.keep=9", "eval.batch_size=499"]
BYTES = [
    *("max_steps=12", "warmup_steps=4", "log_every=1", "eval.every=6", "checkpoint.every=4", "checkpoint.keep=9"),
    *("num_layers=1", "d_model=8", "d_ff=8", "d_key=4", "d_value=8", "model.chunk_size=16", "model.dropout=0"),
    # Five rows of the longest runs, of which one process has three.
    *(
        "data.task.chunk_size=16",
        "data.task.segments=5",
        "data.task.eval_length=32",
        "batch.size=320",
        "eval.batch_size=3",
    ),
]
KINDS = {
    "examples": PLAIN,
    "accumulated": [*PLAIN, "grad_accum_steps=2"],
    "bytes": BYTES,
    "bytes, accumulated": [*BYTES, "grad_accum_steps=2", "batch.size=640"],
    "bytes, normed together": [*BYTES, "norm=sync_batch"],
}


def given(folder: Path, kind: str, *more: str) -> list[str]:
    """What to give to `tcnca` to train."""
    if KINDS[kind][0] == PLAIN[0]:
        return arguments(folder, *KINDS[kind], *more)
    book = folder.parent / "book.txt"
    book.write_text("".join(f"{number} is {'odd' if number % 2 else 'even'}. " for number in range(300)))
    return arguments(folder, f"data={book}", *KINDS[kind], *more, recipe="lm")


def trained(count: int, wanted: list[str]) -> None:
    assert together(command, wanted, count=count) == [0] * count


def cut(folder: Path, other: Path, step: int) -> None:
    """A copy of a run as it was after an update."""
    shutil.copytree(folder, other)
    for place in (other / "checkpoints").glob("step-*"):
        if int(place.name.removeprefix("step-")) > step:
            shutil.rmtree(place)
    for name in ("checkpoints/best.json", "log.jsonl", "result.json"):
        (other / name).unlink(missing_ok=True)


def scores(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))["scores"]


def assert_same_scores(one: Path, other: Path) -> None:
    found, expected = scores(other), scores(one)
    assert found.keys() == expected.keys() == {"validation", "test"}
    for split, score in expected.items():
        assert found[split]["count"] == score["count"]
        assert found[split]["value"] == pytest.approx(score["value"], rel=1e-5)


@pytest.mark.slow
@PARALLEL
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(tmp_path: Path, parallel: str, kind: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, count in ((one, 1), (two, 2)):
        trained(count, given(folder, kind, f"parallel={parallel}"))
    expected = losses(one)
    assert list(expected) == list(range(1, 13))
    assert losses(two) == pytest.approx(expected, rel=1e-5)
    # A bias before a norm over the batch has no gradient but noise, by which Adam moves it: losses do not see that, but
    # running means do.
    exact = "normed" not in kind
    if exact:
        assert_same_scores(one, two)
    # What one has begun, two go on with, and the reverse.
    later = {step: loss for step, loss in expected.items() if step > 4}
    for folder, count in ((two, 1), (one, 2)):
        other = tmp_path / f"on {count}"
        cut(folder, other, 4)
        trained(count, given(other, kind, f"parallel={parallel}", "--resume"))
        assert losses(other) == pytest.approx(later, rel=1e-5)
        if exact:
            assert_same_scores(one, other)


@pytest.mark.slow
@PARALLEL
def test_all_processes_evaluate_the_same_model(tmp_path: Path, parallel: str) -> None:
    """Also where each has seen other examples: running means are those of the process that saves."""
    folder = tmp_path / "run"
    trained(2, given(folder, "bytes", f"parallel={parallel}", "norm=batch"))
    printed = CliRunner().invoke(app, ["eval", str(folder), "--device", "cpu"])
    assert printed.exit_code == 0, printed.output
    assert f"test: bits per byte {scores(folder)['test']['value']:.4f}" in printed.output
    validated = {line["step"]: line["score"] for line in log(folder) if line.get("split") == "validation"}
    shutil.rmtree(latest(folder))
    (folder / "checkpoints" / "best.json").unlink()
    while latest(folder).name > "step-000000006":
        shutil.rmtree(latest(folder))
    again = CliRunner().invoke(app, ["eval", str(folder), "--device", "cpu", "--split", "validation"])
    assert f"step-000000006, validation: bits per byte {validated[6]:.4f}" in again.output


@pytest.mark.slow
@PARALLEL
def test_evaluating_on_two_counts_everything_once(tmp_path: Path, parallel: str) -> None:
    for kind in ("examples", "bytes"):
        folder = tmp_path / kind
        trained(1, given(folder, kind, f"parallel={parallel}", "max_steps=4"))
        before = scores(folder)["test"]
        assert together(command, ["eval", str(folder), "--device", "cpu"]) == [0, 0]
        found = json.loads((folder / "eval-test.json").read_text(encoding="utf-8"))
        assert found["count"] == before["count"]
        assert found["value"] == pytest.approx(before["value"], rel=1e-6)


def _poisoned(folder: Path, changes: list[str], settings: dict[str, str]) -> None:
    """A run of which the last process meets one loss that is not finite."""
    torch.set_num_threads(1)
    os.environ.update(settings)
    with processes("cpu") as group:
        run = Run(recipe(*PLAIN, *changes), folder, group, Watch(folder, None))
        batch = run.task.batch

        def bad(step: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
            whole = batch(step, batch_size, seed, rank, world_size)
            return dataclasses.replace(whole, weight=torch.nan) if (step, rank) == (5, world_size - 1) else whole

        run.task.batch = bad  # type: ignore[method-assign]
        run.train()
        torch.save(weights(run.model), folder / f"{group.rank}.pt")


@pytest.mark.slow
def test_what_is_skipped_all_skip(tmp_path: Path) -> None:
    changes = ["nonfinite=skip", "max_steps=8"]
    for count in (1, 2):
        assert together(_poisoned, tmp_path / str(count), changes, count=count) == [0] * count
    first, second = (torch.load(tmp_path / "2" / f"{rank}.pt") for rank in range(2))
    assert_same(first, second)
    for name, tensor in torch.load(tmp_path / "1" / "0.pt").items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6)
    assert together(_poisoned, tmp_path / "shared", [*changes, "parallel=fsdp"]) == [0, 0]
    for name, tensor in weights(tcnca.load(latest(tmp_path / "shared"))).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@PARALLEL
def test_where_one_stops_all_stop(tmp_path: Path, parallel: str) -> None:
    assert together(_poisoned, tmp_path, [f"parallel={parallel}"]) == [1, 1]
    assert latest(tmp_path).name == "step-000000004"


def _hesitant(folder: Path, changes: list[str], settings: dict[str, str]) -> None:
    """A run of which one process is slow to look whether a validation was the best."""
    torch.set_num_threads(1)
    os.environ.update(settings)
    with processes("cpu") as group:
        run = Run(recipe(*PLAIN, *changes), folder, group, Watch(folder, None))
        look = run.checkpoints.best_score

        def late() -> float | None:
            time.sleep(0.5 * group.rank)
            return look()

        run.checkpoints.best_score = late  # type: ignore[method-assign]
        run.train()


@pytest.mark.slow
def test_all_agree_on_what_is_best(tmp_path: Path) -> None:
    assert together(_hesitant, tmp_path, ["max_steps=4", "eval.every=0"]) == [0, 0]


@pytest.mark.slow
def test_a_signal_to_torchrun_saves(tmp_path: Path) -> None:
    changes = ["max_steps=300", "model.dropout=0.1", "log_every=1", "checkpoint.every=0", "eval.every=0"]
    whole, parts = (arguments(tmp_path / name, *changes) for name in ("whole", "parts"))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tcnca"]
    # Their words go to a file: nobody reads a pipe.
    with (tmp_path / "said.txt").open("w") as said:
        running = subprocess.Popen([*start, *parts], env=environment(), stdout=said, stderr=said)
        lines = tmp_path / "parts" / "log.jsonl"
        while running.poll() is None and not (lines.is_file() and len(lines.read_bytes().splitlines()) > 20):
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        running.wait(60)
    text = (tmp_path / "said.txt").read_text()
    step = int(latest(tmp_path / "parts").name.removeprefix("step-"))
    assert 20 < step < 300, text
    assert f"stopped by SIGTERM after update {step}; go on with" in text
    trained(2, [*parts, "--resume"])
    trained(2, whole)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same(weights(tcnca.load(latest(tmp_path / "parts"))), weights(tcnca.load(latest(tmp_path / "whole"))))
