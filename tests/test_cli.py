"""The command line."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from tcnca import __version__, presets
from tcnca.cli import app

runner = CliRunner()


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"tcnca {__version__}"


def test_help_names_every_command() -> None:
    output = runner.invoke(app, ["--help"]).output
    assert "demo" in output
    assert "models" in output


def test_models_lists_every_preset() -> None:
    result = runner.invoke(app, ["models", "--json"])
    rows = json.loads(result.output)
    assert list(rows) == list(presets())
    assert rows["mega-enwik8"]["parameters"] == 39_137_792
    assert rows["mega-enwik8"]["receptive_field"] is None
    assert rows["tcnca-enwik8"]["receptive_field"] == 9361
    assert rows["tcnca-text"]["state_bytes"] is None
    # R - 1 inputs and the keys and values of a chunk in float32, and 8 bytes of position in mixer and attention.
    assert rows["tcnca-enwik8"]["state_bytes"] == 12 * (4 * (9360 * 512 + 2048 * (128 + 1024)) + 16)


def test_models_table_can_be_narrowed_down() -> None:
    output = runner.invoke(app, ["models", "recall-64"]).output
    assert "tcnca-simple-recall-64" in output
    assert "mega-recall-64" in output
    assert "enwik8" not in output


def test_models_that_do_not_exist() -> None:
    result = runner.invoke(app, ["models", "nonsense"])
    assert result.exit_code == 2
    assert "nonsense" in result.output
