"""The code in the README and in the guide runs as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FORKED = ROOT / "tests" / "forked.py"
SHELL = "import subprocess; subprocess.run(['bash', '-e', '-o', 'pipefail', '-c', {!r}], check=True)"

Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a process that runs commands without importing PyTorch again."""
    path = tmp_path_factory.mktemp("forked") / "socket"
    command = [sys.executable, "-m", "tests.forked", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield path
        process.kill()


@pytest.fixture
def run(server: Path, tmp_path: Path) -> Run:
    """Run the blocks of a page in their order, as a user does in an empty folder; return what they print."""
    client = [sys.executable, "-SE", str(FORKED), str(server)]
    # The command of this environment, whether or not it is on the path.
    command = f'tcnca() {{ "{client[0]}" -SE "{FORKED}" "{server}" "$@"; }}\n'

    def run_page(page: str) -> subprocess.CompletedProcess[str]:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```(python|sh)\n(.*?)```", text, re.DOTALL)
        # Installation is tested where there is a network.
        blocks = [(kind, body) for kind, body in blocks if not body.startswith("make ")]
        code = "\n".join(body if kind == "python" else SHELL.format(command + body) for kind, body in blocks)
        assert "import" in code
        assert "tcnca train" in code
        return subprocess.run([*client, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run_page


def test_the_readme_runs(run: Run) -> None:
    done = run("README.md")
    assert done.returncode == 0, done.stderr
    # What it promises.
    assert re.search(r"^a superb hour,good,", done.stdout, re.MULTILINE)
    assert re.search(r"^far too long,bad,", done.stdout, re.MULTILINE)
    assert re.search(r"^job \d+ on node\d: done in \d s$", done.stdout, re.MULTILINE)
    assert "disk failure" in done.stdout.partition("most surprising places")[2]


@pytest.mark.slow
def test_the_guide_runs(run: Run, tmp_path: Path) -> None:
    done = run("docs/guide.md")
    assert done.returncode == 0, done.stderr
    assert {"score.png", "score.json", "lines.csv", "predictions.csv"} <= {path.name for path in tmp_path.iterdir()}


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
