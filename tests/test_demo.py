"""The demo trains a model, asks it and reports honestly; and every model can stream."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import tcnca
from tcnca.cli import app
from tcnca.cli.demo import FOLDER, GOAL, MAX_TOKENS, PROMPT, STREAMED, STREAMING_TOLERANCE, streaming_errors
from tcnca.files import file_lock
from tests.examples import small_model

runner = CliRunner()
SHORT = ["max_steps=3", "warmup_steps=1", "batch.size=4"]
SYMBOLS = [*"abcde", *"12345"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo writes into `runs` of the working directory, and would read a data set that is prepared there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TCNCA_DATA", raising=False)


def demo(*arguments: str) -> Result:
    return runner.invoke(app, ["demo", *arguments], env={"COLUMNS": "80"})


def answers(output: str) -> dict[str, str]:
    """Return the answers by the sequence that was asked."""
    found, before = {}, list[str]()
    for line in output.splitlines():
        asked, arrow, answer = line.partition(" → ")
        if arrow:
            found[" ".join([*before, asked, answer[0]]).strip()] = answer.split("?")[1].split()[0]
            before = []
        else:
            before = [*before, line.strip()] if line.startswith("  ") else []
    return {" ".join(asked.split()): answer for asked, answer in found.items()}


def value_of(sequence: str) -> str:
    """Return the right answer: the symbol that followed the last one when it came before."""
    *symbols, key = sequence.split()
    return symbols[symbols.index(key) + 1]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The directory of a demo of three steps, which held an earlier one, and its output."""
    place = tmp_path_factory.mktemp("short")
    folder = place / FOLDER
    (folder / "checkpoints" / "step-000000099").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("about: an earlier demo\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.delenv("TCNCA_DATA", raising=False)
        return folder, demo(*SHORT, "--seed", "3")


def test_the_demo_does_not_remove_what_is_not_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir(parents=True)
    for name in ("thesis.txt", ".gitignore"):
        (FOLDER / name).write_text("mine", encoding="utf-8")
        done = CliRunner().invoke(app, ["demo"])
        assert done.exit_code == 1
        assert "expected the run of an earlier demo" in done.output
        assert (FOLDER / name).read_text(encoding="utf-8") == "mine"
        (FOLDER / name).unlink()


def test_an_active_run_keeps_its_directory() -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "recipe.yaml").write_text("about: active\n", encoding="utf-8")
    with file_lock(FOLDER / ".lock"):
        refused = demo(*SHORT)
    assert refused.exit_code == 1
    assert "another process is active in this directory" in refused.output
    assert (FOLDER / "recipe.yaml").is_file()


def test_a_short_demo_reports_honestly(short: tuple[Path, Result]) -> None:
    """A missed goal is an error, and wrong answers of the saved model are marked."""
    folder, result = short
    assert result.exit_code == 1
    accuracy = json.loads((folder / "result.json").read_text(encoding="utf-8"))["scores"]["test"]["value"]
    assert accuracy < GOAL
    assert f"{100 * accuracy:.1f} % of 500 test sequences right" in result.output
    assert "expected 99 %" in result.output
    assert "Continue with" not in result.output
    found, model = answers(result.output), tcnca.load(folder)
    assert [len(asked.split()) for asked in found] == [9, 9, 9, 9, 65, 65, 65]
    for asked, answer in found.items():
        tokens = torch.tensor([[SYMBOLS.index(symbol) for symbol in asked.split()]])
        assert SYMBOLS[int(model(tokens).logits[0, -1].argmax())] == answer
    wrong = sum(value_of(asked) != answer for asked, answer in found.items())
    assert result.output.count("WRONG") == wrong > 0
    # It started over, and left its curves.
    assert [place.name for place in (folder / "checkpoints").glob("step-*")] == ["step-000000003"]
    assert "seed: 3" in (folder / "recipe.yaml").read_text(encoding="utf-8")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_begins_with_a_continuation(short: tuple[Path, Result]) -> None:
    """The one of the command that it shows; nothing is selected."""
    _, result = short
    (shown,) = re.findall(r"^  tcnca generate (--prompt .*)$", result.stdout, re.MULTILINE)
    again = runner.invoke(app, ["generate", *shlex.split(shown)])
    assert again.exit_code == 0, again.output
    assert len(again.stdout) > 0.8 * MAX_TOKENS
    assert PROMPT + again.stdout in result.stdout
    assert result.stdout.index(PROMPT + again.stdout) < result.stdout.index("Associative recall")
    assert re.search(rf"^{MAX_TOKENS} tokens in .* tokens/s, .*seed 3, model pretrained/", result.stderr, re.MULTILINE)


def test_other_data_and_changes_to_streaming_are_refused() -> None:
    result = demo("data=recall-16-4")
    assert result.exit_code == 1
    assert "tcnca train recall-small data=recall-16-4" in result.output
    result = demo("--streaming", "max_steps=3")
    assert result.exit_code == 1
    assert "max_steps=3: expected no changes with --streaming" in result.output
    assert not FOLDER.exists()


@pytest.mark.slow
def test_it_learns_to_recall_within_two_minutes() -> None:
    begun = time.process_time()
    result = demo()
    assert result.exit_code == 0, result.output
    # CPU time, which does not depend on what else is running.
    assert time.process_time() - begun < 120
    done = json.loads((FOLDER / "result.json").read_text(encoding="utf-8"))
    assert min(score["value"] for score in done["scores"].values()) >= GOAL
    found = answers(result.output)
    assert found["a 2 c 4 b 3 d 1 a"] == "2"
    assert all(value_of(asked) == answer for asked, answer in found.items())
    for command in ("tcnca generate --prompt", "tcnca eval runs/demo", "curves.png"):
        assert command in result.output
    assert runner.invoke(app, ["eval", str(FOLDER)]).exit_code == 0


@pytest.mark.slow
def test_all_models_stream() -> None:
    result = demo("--streaming", "--tokens", "50")
    assert result.exit_code == 0, result.output
    assert result.output.count("yes") == len(STREAMED)


def test_comparison_notices_a_broken_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(dtype=torch.float32)
    assert max(streaming_errors(model, 20, 0)[:2]) <= STREAMING_TOLERANCE
    forgetful = model.initial_state(1)
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda x, **options: real(x, **{**options, "state": None, "inplace": False}))
    monkeypatch.setattr(model, "initial_state", lambda batch: forgetful)
    assert min(streaming_errors(model, 20, 0)[:2]) > STREAMING_TOLERANCE
