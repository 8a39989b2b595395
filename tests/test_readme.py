"""The code in the README and in the guide runs as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


SHELL = "import subprocess; subprocess.run(['bash', '-e', '-c', {!r}], check=True)"
# The command of this environment, whether or not it is on the path.
COMMAND = f'tcnca() {{ "{sys.executable}" -m tcnca "$@"; }}\n'


@pytest.mark.parametrize(("page", "languages"), [("README.md", "python"), ("docs/guide.md", "python|sh")])
def test_blocks_run_in_order(tmp_path: Path, page: str, languages: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    # The test below runs the commands that train by the clock.
    blocks = [
        block for block in re.findall(rf"```({languages})\n(.*?)```", text, re.DOTALL) if "--budget" not in block[1]
    ]
    code = "\n".join(body if kind == "python" else SHELL.format(COMMAND + body) for kind, body in blocks)
    assert code.count("tcnca\n") >= 1
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_commands_of_the_guide_run(tmp_path: Path) -> None:
    """With fewer steps, in a copy of what they read."""
    text = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?tcnca generate.*?)```", text, re.DOTALL)
    assert "--budget 60s" in commands
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/guide.md"):
        (tmp_path / page).write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
    script = f'set -e\ntcnca() {{ {sys.executable} -m tcnca "$@"; }}\n' + commands.replace(
        "--budget 60s", "max_steps=2"
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "200 tokens in" in done.stderr
    assert {"score.png", "score.json", "lines.csv"} <= {path.name for path in tmp_path.iterdir()}


def test_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))])
def test_links_point_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}, which does not exist"
