"""The shell completes commands, options, recipes, presets and run directories, without importing PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcnca import recipes
from tcnca.cli import COMMANDS, app
from tcnca.cli.completion import complete_device, complete_preset, complete_recipe, complete_run, complete_variants
from tcnca.models import presets


def completed(words: str, shell: str = "bash") -> list[str]:
    """What a shell offers for the last of these words."""
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TCNCA_COMPLETE": f"complete_{shell}"}
    found = CliRunner().invoke(app, [], prog_name="tcnca", env=environment)
    assert found.exit_code == 0, found.output
    return found.stdout.split()


def test_commands_and_options() -> None:
    assert set(completed("tcnca ")) == set(COMMANDS)
    assert completed("tcnca gen") == ["generate"]
    assert "--temperature" in completed("tcnca generate --temp")
    assert completed("tcnca bench mod") == ["model"]
    assert completed("tcnca train lm --device m") == ["mps"]


def test_names() -> None:
    assert completed("tcnca train recall-sm") == ["recall-small"]
    assert completed("tcnca sweep classi") == ["classify"]
    assert completed("tcnca models mega-path") == ["mega-pathfinder", "mega-pathx"]
    assert completed("tcnca reproduce recall-1") == ["recall-10"]
    assert set(complete_preset("")) == set(presets())
    assert complete_recipe("") == recipes.builtin()
    assert complete_variants("") == recipes.builtin("variants")
    assert complete_device("c") == ["cpu", "cuda"]
    # The shell then completes the names of files.
    assert complete_recipe("./mine.ya") == []


def test_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete_run("") == complete_run("runs/") == complete_run("missing/x") == []
    for name in ("runs/lm", "runs/long", "runs/empty", "saved", "other"):
        Path(name).mkdir(parents=True)
    for name in ("runs/lm/recipe.yaml", "runs/long/recipe.yaml", "saved/model.safetensors", "other/notes.txt"):
        Path(name).touch()
    lm, long = str(Path("runs/lm")), str(Path("runs/long"))
    assert complete_run("") == ["saved", lm, long]
    assert complete_run("runs/") == complete_run("runs/l") == [lm, long]
    assert completed("tcnca eval runs/lo") == [long]
    assert completed("tcnca generate sa") == ["saved"]


def test_completion_does_not_import_pytorch() -> None:
    code = (
        "import sys\nfrom tcnca.cli import app\n"
        "try: app([], prog_name='tcnca')\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    environment = {"COMP_WORDS": "tcnca train recall-sm", "COMP_CWORD": "2", "_TCNCA_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert done.stdout.split() == ["recall-small", "False"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_shells_are_printed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell)
    done = CliRunner().invoke(app, ["--show-completion"], prog_name="tcnca")
    assert done.exit_code == 0
    assert "_TCNCA_COMPLETE=complete_" + shell in done.stdout
