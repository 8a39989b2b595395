"""The README's code runs as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    assert code.count("import tcnca") == 1
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ModelState(batch_size=4" in done.stdout
    assert (tmp_path / "my-classifier" / "model.safetensors").is_file()


def test_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_folders_are_those_of_the_package() -> None:
    named = set(re.findall(r"`tcnca/(\w+)`", README))
    folders = {path.name for path in (ROOT / "src" / "tcnca").iterdir() if (path / "__init__.py").is_file()}
    assert named == folders
