"""What is missing of the optional packages is named with the command that installs it.

`test_platforms.py` trains and generates without all of them.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import MissingPackageError, TcncaError
from tcnca.extras import EXTRAS, missing, require

ROOT = Path(__file__).parents[1]
OPTIONAL = [module for modules in EXTRAS.values() for module in modules]


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No optional package can be found, in an empty folder."""
    for module in OPTIONAL:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {*EXTRAS, "all", "dev", "docs"}
    assert extras["all"] == [f"tcnca[{','.join(sorted(EXTRAS))}]"]
    # What a plain installation has, besides PyTorch and NumPy.
    names = {text.partition(">")[0] for text in project["dependencies"]}
    assert names == {"filelock", "numpy", "pyyaml", "rich", "safetensors", "torch", "typer"}


def test_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in EXTRAS:
        assert missing(extra) is None
        require(extra, "this")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert missing("plots") == "matplotlib is not installed; pip install 'tcnca[plots]'"
    with pytest.raises(
        MissingPackageError, match=r"^--plot: matplotlib is not installed; pip install 'tcnca\[plots\]'"
    ):
        require("plots", "--plot")
    assert issubclass(MissingPackageError, TcncaError)
    assert issubclass(MissingPackageError, ImportError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "ops", "--plot", "x.png"], "--plot: matplotlib is not installed; pip install 'tcnca[plots]'"),
        (["compare", "missing", "--plot", "x.png"], "--plot: matplotlib is not installed"),
        (["score", "text.txt", "--plot", "x.png"], "--plot: matplotlib is not installed"),
        (["report"], "figures of the report: matplotlib is not installed; pip install 'tcnca[plots]'"),
        (["data", "prepare", "enwik8"], "enwik8: cannot be downloaded: requests is not installed"),
        (["export", "--hf", "x"], "--hf: transformers is not installed; pip install 'tcnca[hf]'"),
        (["export", "--onnx", "x.onnx"], "--onnx: onnx is not installed; pip install 'tcnca[onnx]'"),
    ],
    ids=lambda value: "-".join(value[:2]).lstrip("-") if isinstance(value, list) else "",
)
def test_commands_name_the_extra_they_need(without_extras: Path, arguments: list[str], message: str) -> None:
    (without_extras / "text.txt").write_text("a text", encoding="utf-8")
    (without_extras / "results").mkdir()
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in without_extras.iterdir()} <= {"text.txt", "data", "results"}


def test_the_version_is_in_one_place() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "CITATION.cff", *(ROOT / "src").rglob("*.py")]
    found = [path.name for path in files if f'"{tcnca.__version__}"' in path.read_text(encoding="utf-8")]
    assert found == ["version.py"]
