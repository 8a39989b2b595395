"""Two processes give what one gives, however the work is shared, and each resumes what the other has saved."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.data import Batch
from tcnca.errors import ConfigError, DataError
from tcnca.training import CheckpointManager, DistContext, Recipe, dist_context, load_recipe, read_log
from tcnca.training.config import ParallelConfig
from tcnca.training.distributed import make_context
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
    "ngram_dropout=0",
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
    # Parts of rows that are no whole chunks, and TCN kernels that reach further than a part.
    "bytes, far": [*BYTES, "model.chunk_size=12", "kernel_size=9", "dilation_factor=2", "depth=4"],
    # Odd heights: one process has more rows of a matrix than the other.
    "bytes, muon": [*BYTES, "optimizer=muon", "muon_beta2=0.9", "d_ff=7", "d_key=2", "d_value=9"],
}
CONTEXT = ["{context: 2}", "{strategy: fsdp, context: 2}"]
"""Rows are divided over the processes."""
QUICK = [("examples", "ddp"), ("bytes, muon", "fsdp"), ("bytes, far", CONTEXT[0])]


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
        for parallel in ("ddp", "fsdp", *CONTEXT)
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["examples", "bytes, far"])
def test_data_and_context_equal_one(tmp_path: Path, kind: str, strategy: str) -> None:
    given = wanted(tmp_path, kind, f"parallel={{strategy: {strategy}, data: 2, context: 2}}")
    train(1, tmp_path / "one", given)
    train(4, tmp_path / "four", given)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert_same_scores(tmp_path / "one", tmp_path / "four")
    assert [line["tokens"] for line in log(tmp_path / "four") if "loss" in line] == [
        line["tokens"] for line in log(tmp_path / "one") if "loss" in line
    ]


def test_data_times_context_is_the_number_of_processes() -> None:
    message = "runtime.parallel: expected data times context to be 6, the number of processes, got 2 times 2"
    with pytest.raises(ConfigError, match=message):
        make_context(ParallelConfig(data=2, context=2), DistContext(world_size=6))
    assert make_context(ParallelConfig(context=2), DistContext()) is None


def _fit_in_parts(folder: Path, given: Recipe) -> None:
    sys.modules["tcnca.training.evaluate"]._MAX_CPU_TOKENS = 64  # type: ignore[attr-defined]
    TinyTrainer(folder, given).fit()


def test_processes_with_other_numbers_of_parts_evaluate_together(tmp_path: Path) -> None:
    """Each call of a sharded model needs all processes."""
    given = wanted(tmp_path, "bytes", "parallel=fsdp", "max_steps=2", "eval.every=1", "eval.batch_size=5")
    assert together(_fit_in_parts, tmp_path / "two", given, count=2) == [0, 0]
    train(1, tmp_path / "one", given)
    assert_same_scores(tmp_path / "one", tmp_path / "two")


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


UNEVEN = ["max_steps=5", "log_every=3", "checkpoint.every=5", "eval.every=0"]


def _copy(source: Path, target: Path, given: Recipe) -> None:
    """Load a checkpoint and save it again."""
    trainer = TinyTrainer(target.parent, given)
    with dist_context("cpu") as trainer.dist:
        trainer.setup()
        state = trainer.checkpoints.load(source, trainer.model, trainer.optimizers)
        CheckpointManager(target, 1, trainer.dist).save(trainer.model, trainer.optimizers, state)
        del trainer.model, trainer.train_model, trainer.optimizers


def optimizers(place: Path) -> dict[str, torch.Tensor]:
    """Return the optimizers of a checkpoint, put together from the rows of all files."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for path in place.glob("optimizers-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            rows = json.loads(file.metadata()["rows"])
            for name in file.keys():  # noqa: SIM118, not a dict
                assert found.setdefault(name, {}).setdefault(rows.get(name, 0), file.get_tensor(name)).numel()
    assert sum("exp_avg_sq" in name for name in found) > 9
    return {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in found.items()}


def test_a_checkpoint_is_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    _fit(tmp_path / "run", recipe(*UNEVEN), False)
    source = first = latest(tmp_path / "run")
    # Eight rows on three processes are not as many on each, and one row is on one process only.
    for count, parallel in ((3, "fsdp"), (2, "fsdp"), (2, "ddp")):
        target = tmp_path / f"{parallel} {count}"
        changed = recipe(*UNEVEN, f"parallel={parallel}")
        assert together(_copy, source, target, changed, count=count) == [0] * count
        source = target / first.name
        assert len(list(source.glob("optimizers-*"))) == (count if parallel == "fsdp" else 1)
        assert_same(weights(tcnca.load(source)), weights(tcnca.load(first)))
        assert_same(optimizers(source), optimizers(first))
        if parallel == "fsdp":
            # Each process writes its own part, and the main one some numbers more.
            parts = [sum(map(torch.numel, load_file(path).values())) for path in source.glob("optimizers-*")]
            assert max(parts) < 1.3 * sum(parts) / count


KILLED = ["max_steps=11", "log_every=5", "checkpoint.every=4", "eval.every=6", "eval.batch_size=499"]
CLOCKS = {"time", "seconds", "tokens_per_second", "data_wait", "memory_gib"}
"""What a log has that is measured, and differs from run to run."""


def _killed(folder: Path, given: Recipe, during: str) -> None:
    """A run of which one process is killed by SIGKILL, during a step or while it saves the checkpoint of step 8."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trainer = TinyTrainer(folder, given)

    def kill(trainer: TinyTrainer) -> None:
        if (during, trainer.state.step, trainer.dist.rank) == ("step", 7, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def kill_while_saving(event: str, given: tuple[Any, ...]) -> None:
        if event == "os.chmod" and "step-000000008" in str(given[0]) and during == str(given[0]).rpartition("/")[2]:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.before_step = kill
    sys.addaudithook(kill_while_saving)
    trainer.fit()


@pytest.mark.parametrize(
    ("parallel", "during"),
    [
        ("ddp", "step"),
        ("fsdp", "optimizers-00001.safetensors"),
        pytest.param("fsdp", "step", marks=pytest.mark.slow),
        pytest.param("ddp", "optimizers-00000.safetensors", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, parallel: str, during: str) -> None:
    """Weights, optimizers, log and best, bit for bit."""
    whole, parts, given = tmp_path / "whole", tmp_path / "parts", recipe(*KILLED, f"parallel={parallel}")
    train(2, whole, given)
    codes = together(_killed, parts, given, during)
    assert 0 not in codes
    assert -signal.SIGKILL in codes
    # The last line of the log is of step 5, so that the sums of step 6 are those of the checkpoint.
    assert latest(parts).name == "step-000000006"
    train(2, parts, given, resume=True)

    found, expected = (
        [{key: line[key] for key in line.keys() - CLOCKS} for line in read_log(run)] for run in (parts, whole)
    )
    assert found == expected
    assert [line["step"] for line in expected if "loss" in line] == [5, 10, 11]
    assert {"loss", "grad_norm", "tokens", "lr", "progress", "step"} == expected[0].keys()
    assert scores(parts) == scores(whole)
    best = [json.loads((run / "checkpoints" / "best.json").read_text()) for run in (parts, whole)]
    assert best[0] == best[1]
    for name in (latest(whole).name, best[0]["checkpoint"]):
        one, other = parts / "checkpoints" / name, whole / "checkpoints" / name
        assert_same(weights(tcnca.load(one)), weights(tcnca.load(other)))
        assert_same(optimizers(one), optimizers(other))
        for path in other.glob("*.safetensors"):
            assert (one / path.name).read_bytes() == path.read_bytes()
    assert_same(weights(tcnca.load(parts)), weights(tcnca.load(whole)))


def _without_space(folder: Path, given: Recipe) -> None:
    """A run of which one process cannot write a file of a checkpoint."""
    trainer = TinyTrainer(folder, given)

    def fill_disk(trainer: TinyTrainer) -> None:
        if trainer.dist.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))

    trainer.before_step = fill_disk
    with pytest.raises(DataError, match=r"checkpoints: cannot be written \(File too large\)"):
        trainer.fit()


def test_all_processes_stop_if_one_cannot_write(tmp_path: Path) -> None:
    assert together(_without_space, tmp_path, recipe("parallel=fsdp", "max_steps=2")) == [0, 0]
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_log_is_right_on_another_number_of_processes(tmp_path: Path) -> None:
    """Also if a line has sums of steps before the run was resumed."""
    changes = [*PLAIN, "log_every=5", "checkpoint.every=4", "eval.every=0"]
    train(2, tmp_path / "two", recipe(*changes))
    rewind(tmp_path / "two", tmp_path / "one", 8)
    train(1, tmp_path / "one", recipe(*changes), resume=True)
    expected, found = read_log(tmp_path / "two"), read_log(tmp_path / "one")
    assert [line["step"] for line in found if "loss" in line] == [10, 12]
    for line, other in zip([line for line in expected if line["step"] > 5 and "loss" in line], found, strict=False):
        assert other["tokens"] == line["tokens"]
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(line[name], rel=1e-5)


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


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and the processes that it has started, which are in sessions of their own."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for process in (agent.pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)
    agent.wait()


@pytest.mark.slow
def test_a_lost_agent_is_replaced(tmp_path: Path) -> None:
    """Two agents, as on two machines, that find each other by a rendezvous: one is killed, and another takes over."""
    changes = ["max_steps=300", "log_every=1", "checkpoint.every=20", "eval.every=0", "parallel={context: 2}"]
    parts = arguments(tmp_path / "parts", *changes, "--resume")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "x"]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", "--max-restarts", "3"]

    def agent(host: bool, output: TextIO) -> subprocess.Popen[bytes]:
        command = [*start, "--rdzv-conf", f"is_host={int(host)}", "-m", "tcnca", *parts]
        # Otherwise agents that stay do not publish the address of the store again, for which a new one waits.
        settings = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, env=settings, stdout=output, stderr=output)

    lines, agents = tmp_path / "parts" / "log.jsonl", []
    # The output goes to a file, since nobody reads a pipe.
    with (tmp_path / "output.txt").open("w") as output:
        try:
            agents = [agent(True, output), agent(False, output)]
            while agents[0].poll() is None and not (lines.is_file() and len(lines.read_bytes().splitlines()) > 50):
                time.sleep(0.02)
            # The agent and its process, as if the machine had lost power.
            _kill(agents[1])
            agents.append(agent(False, output))
            codes = [agents[index].wait(300) for index in (0, 2)]
        finally:
            for each in agents:
                _kill(each)
    text = (tmp_path / "output.txt").read_text()
    assert codes == [0, 0], text
    assert "resuming from step" in text
    launches = json.loads((tmp_path / "parts" / "provenance.json").read_text())["launches"]
    assert [launch["processes"] for launch in launches] == [2, 2]
    assert 20 <= launches[1]["step"] < 300
    train(2, tmp_path / "whole", recipe(*changes))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_same(weights(tcnca.load(tmp_path / "parts")), weights(tcnca.load(tmp_path / "whole")))


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
