"""The provenance of a run is recorded when it starts, and repeats it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import DataError, TrainingError
from tcnca.training.provenance import Launch, add_launch, command_line, commit, hardware, read_launches
from tests.training.tiny import MODEL, SMALL, TinyTrainer, arguments, assert_same, fit, latest, log, recipe, weights


def trained(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def launch() -> Launch:
    return Launch(recipe="lm", command="tcnca train lm", step=0, seed=7, budget=None, processes=1, hardware={})


def test_the_recorded_command_repeats_the_run(tmp_path: Path) -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    trained(*arguments(tmp_path / "one", "batch.seed=3", "lr=0.02"))
    (found,) = read_launches(tmp_path / "one")
    assert before <= datetime.datetime.fromisoformat(found.started) <= datetime.datetime.now(datetime.UTC)
    assert (found.recipe, found.step, found.seed, found.budget, found.processes) == ("recall-small", 0, 3, None, 1)
    changes = [*SMALL, *MODEL, "batch.seed=3", "lr=0.02"]
    assert found.command == shlex.join(["tcnca", "train", "recall-small", *changes, "--device", "cpu"])
    assert found.hardware["device"] == "cpu"
    assert found.hardware["name"]
    assert 1 <= int(found.hardware["cores"]) <= (os.cpu_count() or 1)
    expected = {"tcnca": tcnca.__version__, "python": platform.python_version(), "torch": torch.__version__}
    assert expected.items() <= found.versions.items()
    assert platform.system() in found.platform
    name, *rest = shlex.split(found.command)
    assert name == "tcnca"
    trained(*rest, "--out", str(tmp_path / "two"))
    assert_same(*(weights(tcnca.load(latest(tmp_path / each))) for each in ("one", "two")))
    results = [json.loads((tmp_path / each / "result.json").read_text())["scores"] for each in ("one", "two")]
    assert results[0] == results[1]


def test_a_resumption_without_a_checkpoint_is_a_new_run(tmp_path: Path) -> None:
    """Its recipe and budget may differ, and its provenance is that of the new run alone."""
    TinyTrainer(tmp_path, recipe("batch.seed=1"), budget=60.0, stop_after=3).fit()
    shutil.rmtree(tmp_path / "checkpoints")
    TinyTrainer(tmp_path, recipe("batch.seed=2"), budget=1.0, resume=True, stop_after=3).fit()
    (found,) = read_launches(tmp_path)
    assert (found.seed, found.step, found.budget) == (2, 0, 1.0)
    shutil.rmtree(tmp_path / "checkpoints")
    TinyTrainer(tmp_path, recipe("batch.seed=3"), resume=True).fit()
    (found,) = read_launches(tmp_path)
    assert (found.seed, found.budget) == (3, 1.0)  # the budget is kept unless another is given
    assert "| seed | 3 |" in (tmp_path / "report.md").read_text()


def test_the_report_names_the_threads(tmp_path: Path) -> None:
    fit(tmp_path, "threads=1")
    assert ", 1 thread |" in (tmp_path / "report.md").read_text()


def test_each_resumption_is_a_launch(tmp_path: Path) -> None:
    fit(tmp_path)
    (first,) = read_launches(tmp_path)
    whole = log(tmp_path)
    # As if it had been killed in the last steps.
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000012")
    (tmp_path / "result.json").unlink()
    fit(tmp_path, resume=True)
    found = read_launches(tmp_path)
    assert found[0] == first
    assert [each.step for each in found] == [0, 8]
    assert found[1].command == first.command
    assert "resumed from | step 8" in (tmp_path / "report.md").read_text()
    assert len(log(tmp_path)) == len(whole), "no step is logged twice"


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    nested = {**dataclasses.asdict(launch()), "hardware": {"name": json.loads("[" * 900 + "]" * 900)}}
    for text in (
        *('{"launches": [', "[]", '{"launches": [1]}', '{"launches": [{"step": 1}]}', "[" * 100_000),
        json.dumps({"launches": [nested]}),
        json.dumps({"launches": {"x" * 100_000: 1}}),
    ):
        (tmp_path / "provenance.json").write_text(text)
        with pytest.raises(TrainingError, match=r"provenance\.json: .*expected .*; remove it"):
            add_launch(tmp_path, launch(), resumed=True)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file.run.provenance.json: cannot be written"):
        add_launch(tmp_path / "file" / "run", launch(), resumed=False)
    result = CliRunner().invoke(app, arguments(tmp_path / "file" / "run"))
    assert result.exit_code == 1
    assert "cannot be written" in result.output
    assert "Traceback" not in result.output


def test_the_command_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert command_line(["train", "lm", "data=my file.txt"]) == "tcnca train lm 'data=my file.txt'"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert command_line(["train", "lm"]) == "torchrun --nproc-per-node 8 -m tcnca train lm"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert command_line(["train", "lm"]) == "torchrun --nnodes 2 --nproc-per-node 8 -m tcnca train lm"


@pytest.mark.gpu
def test_the_hardware_of_a_gpu() -> None:
    found = hardware(torch.device("cuda", 0), 2)
    assert (found["device"], found["count"]) == ("cuda", 2)
    assert found["name"] == torch.cuda.get_device_name(0)
    assert found["memory_gib"] == pytest.approx(torch.cuda.mem_get_info(0)[1] / 2**30, rel=0.02)


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    assert commit(package) is None
    git(tmp_path, "init", "--quiet")
    (package / "__init__.py").write_text("")
    # Not of this repository, like an installed package inside another checkout.
    assert commit(package) is None
    git(tmp_path, "add", ".")
    assert commit(package) is None
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(package) == head
    (tmp_path / "notes.txt").write_text("no source")
    assert commit(package) == head
    (package / "new.py").write_text("")
    assert commit(package) == f"{head}+changes"
    # Variables that git sets for its hooks do not matter.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert commit(package) == f"{head}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(package) is None
