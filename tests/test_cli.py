"""The command line as a whole: start-up, help and mistakes. Commands have tests of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import tcnca.cli
from tcnca import __version__, presets
from tcnca.__main__ import main
from tcnca.cli import COMMANDS, app
from tcnca.errors import ConfigError, Stopped

runner = CliRunner()
# Must be answered without importing libraries that take seconds to load, which this prints.
QUICK = ["--version", "--help", "train no-such-recipe", "trian", *(f"{name} --help" for name in COMMANDS)]
SCRIPT = """
import contextlib, io, sys
from tcnca.__main__ import main
for line in sys.argv[1].splitlines():
    sys.argv[1:] = line.split()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main()
    print(line, *{"torch", "matplotlib", "numpy"} & set(sys.modules), sep=": ")
"""


def test_help_and_mistakes_do_not_import_torch() -> None:
    arguments = [sys.executable, "-c", SCRIPT, "\n".join(QUICK)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == QUICK


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"tcnca {__version__}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed_and_has_help(name: str) -> None:
    assert name in runner.invoke(app, ["--help"]).output
    result = runner.invoke(app, [name, "--help"], prog_name="tcnca")
    assert result.exit_code == 0, result.output
    assert f"tcnca {name}" in result.output


def test_help_is_wrapped_to_the_terminal_and_flags_have_no_type() -> None:
    output = runner.invoke(app, ["generate", "--help"], env={"COLUMNS": "80"}).output
    assert "prompt. The same seed gives the same text, and each of several continuations" in output
    for line in ("--help", "generate --help", "data prepare --help"):
        assert "<bool>" not in runner.invoke(app, line.split(), env={"COLUMNS": "200"}).output


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [("trian", "'train'"), ("bench oops", "'ops'"), ("bench ops --lenghts 8", "--lengths")],
)
def test_the_closest_command_or_option_is_suggested(line: str, suggestion: str) -> None:
    result = runner.invoke(app, line.split(), env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert suggestion in result.output


def test_ctrl_c_during_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tcnca.cli, "app", interrupted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130


def test_models_lists_every_preset() -> None:
    result = runner.invoke(app, ["models", "--json"])
    rows = json.loads(result.output)
    assert list(rows) == list(presets())
    assert rows["mega-enwik8"]["parameters"] == 39_137_792
    assert rows["mega-enwik8"]["receptive_field"] is None
    assert rows["tcnca-enwik8"]["receptive_field"] == 9361 + 2048 - 1
    assert rows["transformer-enwik8"]["receptive_field"] is None
    assert rows["transformer-xl-enwik8"]["receptive_field"] == 2 * 512
    assert rows["tcnca-text"]["state_bytes"] is None
    # R - 1 inputs and the keys and values of a chunk in float32, and 8 bytes of position in mixer and attention.
    assert rows["tcnca-enwik8"]["state_bytes"] == 12 * (4 * (9360 * 512 + 2048 * (128 + 1024)) + 16)


def test_models_table_can_be_filtered() -> None:
    output = runner.invoke(app, ["models", "recall-64"]).output
    assert "tcnca-simple-recall-64" in output
    assert "enwik8" not in output
    result = runner.invoke(app, ["models", "nonsense"])
    assert result.exit_code != 0
    assert "nonsense" in result.output


def _raises(error: BaseException) -> Any:
    def printed(*_: Any) -> str:
        raise error

    return printed


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("lr: expected a number"), 1, "Error: lr: expected a number\n"),
        (ConfigError("lr\x1b[2J: expected"), 1, "Error: lr\\x1b[2J: expected\n"),
        (KeyError("weights"), 70, "Error: KeyError: 'weights'\nThis is a bug in tcnca"),
        (RuntimeError("x" * 10_000), 70, "x…\nThis is a bug in tcnca"),
        (MemoryError(), 1, "batch.size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "activation_checkpointing"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "grad_accum_steps"),
        (PermissionError(13, "Permission denied", "secret.yaml"), 1, "Error: secret.yaml: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "Error: output: No space left on device\n"),
        (KeyboardInterrupt(), 130, "\nstopped by SIGINT\n"),
        (Stopped(signal.SIGTERM), 143, "\nstopped by SIGTERM\n"),
    ],
)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_errors_become_messages(
    monkeypatch: pytest.MonkeyPatch, debug: str, error: BaseException, code: int, message: str
) -> None:
    monkeypatch.setattr("tcnca.cli.models.printed", _raises(error))
    monkeypatch.setenv("TCNCA_DEBUG", debug)
    result = runner.invoke(app, ["recipes", "any"])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == code
    assert message in result.stderr
    assert ("Traceback" in result.stderr) == (debug == "1")


SIGNALED = """
import os, runpy, signal, sys
import {module} as owner
def end(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # torchrun and systemd may send a second one
owner.{name} = end
sys.argv[1:] = ["recipes"]
runpy.run_module("tcnca", run_name="__main__")
"""


@pytest.mark.parametrize(("module", "name"), [("importlib", "import_module"), ("tcnca.recipes", "read_yaml")])
def test_sigterm_ends_with_a_message(module: str, name: str) -> None:
    """While modules are imported, and in a command."""
    arguments = [sys.executable, "-c", SIGNALED.format(module=module, name=name)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "\nstopped by SIGTERM\n")


def test_any_text_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a path that is not UTF-8, or a terminal whose encoding has few characters."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(tcnca.cli, "app", lambda: print("a\udcff é"))
    main()
    output.flush()
    assert output.buffer.getvalue() == b"a\\udcff \\xe9\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "3000 1"),
        ({"GOMP_SPINCOUNT": "7"}, "7 1"),
        ({"OMP_WAIT_POLICY": "active"}, "None 1"),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "3000 0"),
    ],
    ids=["default", "own count", "own policy", "own pages"],
)
def test_variables_are_set_before_pytorch_reads_them(given: dict[str, str], expected: str) -> None:
    """Waiting threads of GNU's OpenMP give their core away, and large tensors have large pages."""
    code = """
import os, sys
import tcnca.__main__, tcnca.cli
def show():
    print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"), "torch" in sys.modules)
tcnca.cli.app = show
tcnca.__main__.main()
"""
    own = ("OMP_", "GOMP_", "THP_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(own)} | given
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout == f"{expected} False\n"


def test_warnings_of_the_library_are_messages() -> None:
    code = """
import warnings
import tcnca.__main__, tcnca.cli, tcnca.errors
def warn():
    for file in (tcnca.errors.__file__, "other.py"):
        warnings.warn_explicit("slow", RuntimeWarning, file, 7)
tcnca.cli.app = warn
tcnca.__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "Warning: slow\nother.py:7: RuntimeWarning: slow\n"


def test_a_reader_that_ends_is_no_error() -> None:
    command = f"{sys.executable} -m tcnca recipes | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
