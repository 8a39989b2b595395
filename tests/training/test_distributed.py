"""Two processes give what one gives, however the work is shared, and each resumes what the other has saved."""

from __future__ import annotations

import dataclasses
import json
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
from tcnca.training import Recipe, load_recipe
from tests.training.tiny import (
    TinyTrainer,
    arguments,
    assert_same,
    command,
    environment,
    latest,
    log,
    losses,
    merged,
    recipe,
    together,
    weights,
)

PARALLEL = pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
# 499 does not divide the number of examples: some batch has no example for one of the processes.
PLAIN = ["model.dropout=0", "log_every=1", "checkpoint.keep=9", "eval.batch_size=499"]
BYTES = [
    *("max_steps=12", "warmup_steps=4", "log_every=1", "eval.every=6", "checkpoint.every=4", "checkpoint.keep=9"),
    *("num_layers=1", "d_model=8", "d_ff=8", "d_key=4", "d_value=8", "model.chunk_size=16", "model.dropout=0"),
    # Five rows of the longest length, of which one process has three.
    *("data.task.chunk_size=16", "data.task.segments=5", "data.task.eval_length=32", "batch.size=320"),
    "eval.batch_size=3",
]
KINDS = {
    "examples": PLAIN,
    "examples, accumulated": [*PLAIN, "grad_accum_steps=2"],
    "bytes": BYTES,
    "bytes, accumulated": [*BYTES, "grad_accum_steps=2", "batch.size=640"],
    "bytes, sync_batch": [*BYTES, "norm=sync_batch"],
}
QUICK = [("examples", "ddp"), ("bytes, accumulated", "fsdp")]


def wanted(folder: Path, kind: str, *more: str) -> Recipe:
    """Return the recipe of a kind."""
    if KINDS[kind][0] == PLAIN[0]:
        return recipe(*KINDS[kind], *more)
    book = folder / "book.txt"
    book.write_text("".join(f"{number} is {'odd' if number % 2 else 'even'}. " for number in range(300)))
    return load_recipe("lm").override(merged(f"data={book}", *KINDS[kind], *more))


def _fit(folder: Path, given: Recipe, resume: bool) -> None:
    TinyTrainer(folder, given, resume=resume).fit()


def train(count: int, folder: Path, given: Recipe, *, resume: bool = False) -> None:
    assert together(_fit, folder, given, resume, count=count) == [0] * count


def rewind(folder: Path, other: Path, step: int) -> None:
    """Copy a run as it was after a step."""
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


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        pytest.param(kind, parallel, marks=[] if (kind, parallel) in QUICK else [pytest.mark.slow])
        for kind in KINDS
        for parallel in ("ddp", "fsdp")
    ],
)
def test_two_processes_equal_one(tmp_path: Path, parallel: str, kind: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, count in ((one, 1), (two, 2)):
        train(count, folder, wanted(tmp_path, kind, f"parallel={parallel}"))
    expected = losses(one)
    assert list(expected) == list(range(1, 13))
    assert losses(two) == pytest.approx(expected, rel=1e-5)
    # A bias before a norm over the batch has no gradient but noise, by which Adam moves it: losses do not show that,
    # but running means do.
    exact = "sync_batch" not in kind
    if exact:
        assert_same_scores(one, two)
    # One process resumes what two have started, and the reverse.
    later = {step: loss for step, loss in expected.items() if step > 4}
    for folder, count in ((two, 1), (one, 2)):
        other = tmp_path / f"on {count}"
        rewind(folder, other, 4)
        train(count, other, wanted(tmp_path, kind, f"parallel={parallel}"), resume=True)
        assert losses(other) == pytest.approx(later, rel=1e-5)
        if exact:
            assert_same_scores(one, other)


@PARALLEL
def test_all_processes_evaluate_the_same_model(tmp_path: Path, parallel: str) -> None:
    """Also if each has seen other examples: running means are those of the process that saves."""
    folder = tmp_path / "run"
    train(2, folder, wanted(tmp_path, "bytes", f"parallel={parallel}", "norm=batch"))
    # Two processes count everything once, as one does.
    for count in (1, 2):
        assert together(command, ["eval", str(folder), "--device", "cpu"], count=count) == [0] * count
        found = json.loads((folder / "eval-test.json").read_text(encoding="utf-8"))
        assert found["count"] == scores(folder)["test"]["count"]
        assert found["value"] == pytest.approx(scores(folder)["test"]["value"], rel=1e-6)
    validated = {line["step"]: line["value"] for line in log(folder) if line.get("split") == "validation"}
    shutil.rmtree(latest(folder))
    (folder / "checkpoints" / "best.json").unlink()
    while latest(folder).name > "step-000000006":
        shutil.rmtree(latest(folder))
    again = CliRunner().invoke(app, ["eval", str(folder), "--device", "cpu", "--split", "validation"])
    assert f"step-000000006, validation: bits per byte {validated[6]:.4f}" in again.output


def _poisoned(folder: Path, changes: list[str]) -> None:
    """A run in which the last process meets a loss that is not finite."""

    def poison(trainer: TinyTrainer) -> None:
        batch = trainer.task.batch

        def bad(step: int, batch_size: int, seed: int = 0, rank: int = 0, world_size: int = 1) -> Batch:
            whole = batch(step, batch_size, seed, rank, world_size)
            return dataclasses.replace(whole, weight=torch.nan) if (step, rank) == (5, world_size - 1) else whole

        trainer.task.batch = bad  # type: ignore[method-assign]

    trainer = TinyTrainer(folder, recipe(*PLAIN, *changes))
    trainer.after_setup = poison
    trainer.fit()


def test_all_processes_skip_the_same_steps(tmp_path: Path) -> None:
    changes = ["nonfinite=skip", "max_steps=8"]
    for name, count, more in (("one", 1, []), ("two", 2, []), ("fsdp", 2, ["parallel=fsdp"])):
        assert together(_poisoned, tmp_path / name, [*changes, *more], count=count) == [0] * count
    one = weights(tcnca.load(tmp_path / "one"))
    for name in ("two", "fsdp"):
        for key, tensor in weights(tcnca.load(tmp_path / name)).items():
            torch.testing.assert_close(one[key], tensor, rtol=1e-4, atol=1e-6)


@PARALLEL
def test_all_processes_stop_together(tmp_path: Path, parallel: str) -> None:
    assert together(_poisoned, tmp_path, [f"parallel={parallel}"]) == [1, 1]
    assert latest(tmp_path).name == "step-000000004"


@pytest.mark.slow
def test_a_signal_to_torchrun_saves(tmp_path: Path) -> None:
    changes = ["max_steps=300", "model.dropout=0.1", "log_every=1", "checkpoint.every=0", "eval.every=0"]
    parts = arguments(tmp_path / "parts", *changes)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tcnca"]
    # The output goes to a file, since nobody reads a pipe.
    with (tmp_path / "output.txt").open("w") as output:
        running = subprocess.Popen([*start, *parts], env=environment(), stdout=output, stderr=output)
        lines = tmp_path / "parts" / "log.jsonl"
        while running.poll() is None and not (lines.is_file() and len(lines.read_bytes().splitlines()) > 20):
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        running.wait(60)
    text = (tmp_path / "output.txt").read_text()
    step = int(latest(tmp_path / "parts").name.removeprefix("step-"))
    assert 20 < step < 300, text
    assert f"stopped by SIGTERM after step {step}; continue with" in text
    (launch,) = json.loads((tmp_path / "parts" / "provenance.json").read_text())["launches"]
    assert launch["processes"] == 2
    assert launch["command"].startswith("torchrun --nproc-per-node 2 -m tcnca train recall-small data=recall-16 ")
    train(2, tmp_path / "parts", recipe(*changes), resume=True)
    train(2, tmp_path / "whole", recipe(*changes))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same(weights(tcnca.load(latest(tmp_path / "parts"))), weights(tcnca.load(latest(tmp_path / "whole"))))
    # Two processes leave one report.
    assert "2 processes" in (tmp_path / "parts" / "report.md").read_text()
    again = [*start, *parts, "--resume"]
    done = subprocess.run(again, env=environment(), timeout=200, capture_output=True, text=True, check=True)
    assert done.stdout.count("the run is finished") == 1


def _hesitant(folder: Path, changes: list[str]) -> None:
    """A run in which one process is late to compare a validation with the best."""

    def delay(trainer: TinyTrainer) -> None:
        look = trainer.checkpoints.best_score

        def late() -> float | None:
            time.sleep(0.5 * trainer.dist.rank)
            return look()

        trainer.checkpoints.best_score = late  # type: ignore[method-assign]

    trainer = TinyTrainer(folder, recipe(*PLAIN, *changes))
    trainer.after_setup = delay
    trainer.fit()


def test_all_processes_agree_on_the_best(tmp_path: Path) -> None:
    assert together(_hesitant, tmp_path, ["max_steps=4", "eval.every=0"]) == [0, 0]
