"""The documents: code runs as shown, commands are accepted, links lead somewhere, and the site has all pages."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from docs import build

import tcnca
from tcnca.recipes import builtin
from tcnca.training import load_recipe
from tcnca.training.sweeps.plan import parse_grid
from tests.documents import PAGES, ROOT, anchors, blocks, commands, links, parse, read

FORKED = ROOT / "tests" / "forked.py"
SHELL = "import subprocess; subprocess.run(['bash', '-e', '-o', 'pipefail', '-c', {!r}], check=True)"


class Page(NamedTuple):
    """A page whose blocks run."""

    path: str
    prints: tuple[str, ...] = ()
    """Patterns of what it prints, in this order."""
    writes: tuple[str, ...] = ()
    """Files that it leaves."""
    before: str = ""
    """Python that prepares what the page takes for granted."""
    after: str = ""
    """Python that checks what the page has computed."""
    shortened: tuple[tuple[str, str], ...] = ()
    """Texts of its blocks, and what runs in their place, to take less time."""
    slow: bool = False


REVIEWS = """
import tcnca
rows = (f"{'good' if number % 2 else 'bad'} film {number},{number % 2}" for number in range(100))
open("reviews.csv", "w").write("\\n".join(["text,label", *rows]))
tcnca.data.prepare_dataset("reviews", origin="reviews.csv")
"""
RUNNING = [
    Page(
        "README.md",
        prints=(
            r"^a superb hour,good,",
            r"^far too long,bad,",
            r"^step,visits,orders$",
            r"^job \d+ on node\d: done in \d s$",
            r"most surprising places[^$]*disk failure",
        ),
    ),
    Page("docs/data.md", prints=("accuracy",), before=REVIEWS, shortened=(("range(1000)", "range(2)"),)),
    Page(
        "docs/training.md",
        prints=(r"^20 [\d.]+$", r"^accuracy [\d.]+ 500$"),
        writes=("runs/first/model.safetensors",),
        # The loaded model is the trained one.
        after="assert score == result.scores['test'], score",
    ),
    Page(
        "docs/tutorials/texts.md",
        prints=(r'kind regards",shipping,', r'order 4711",login,', r"^\['billing'\]"),
        writes=("routed.csv",),
        slow=True,
    ),
    Page(
        "docs/tutorials/signals.md",
        # Commands print before Python, whose output is kept until it ends.
        prints=(
            r"^step,load$",
            r"^\['good', 'worn', 'good', 'worn'\] \[0 1 0 1\]$",
            r"^256 \['worn'\]",
            r"next 10 values 0\.[012]",
        ),
        writes=("next.csv",),
        slow=True,
    ),
    Page(
        "docs/tutorials/logs.md",
        prints=(r"app.log:301: .*segmentation", r'"line": 352.*disk space', r"bits per byte: .*(seg|disk)", r"True$"),
    ),
    Page("docs/tutorials/mixer.md", prints=(r"^[\d.]+e[-+]\d\d", r"^accuracy (1.0|0.9)"), slow=True),
    Page(
        "docs/tutorials/table.md",
        prints=(r"^waiting +tcnca train recall-64-10-tcnca-simple ", r"^\| TCNCA-simple .*3\.0 s", r"--budget 3s"),
        slow=True,
    ),
    Page(
        "docs/tutorials/processes.md",
        prints=("together they equal the whole", r"^\d+ bytes, \d\.\d\d bits per byte"),
        writes=("runs/context/model.safetensors",),
        slow=True,
    ),
    Page("docs/index.md", prints=(r"most surprising places[^$]*disk failure", r"True"), slow=True),
    Page("docs/concepts.md", prints=(r"receptive_field=", r"^9361$", r"^0\.0 True$", r"^\d+ bytes, at token")),
    Page("docs/faq.md", prints=(r"^\d+ bytes after 20,000", r"1000, 64.*100, 8", r"did you mean tcnca-linear-enwik8")),
    Page("docs/guide.md", writes=("score.png", "score.json", "lines.csv", "predictions.csv"), slow=True),
]


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


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.path, marks=[pytest.mark.slow] if page.slow else []) for page in RUNNING]
)
def test_code_runs(page: Page, server: Path, tmp_path: Path) -> None:
    # The commands of this environment, whether or not they are on the path.
    client = [sys.executable, "-SE", str(FORKED), str(server)]
    functions = f'tcnca() {{ "{sys.executable}" -SE "{FORKED}" "{server}" "$@"; }}\n'
    functions += f'torchrun() {{ "{sys.executable}" -m torch.distributed.run "$@"; }}\n'
    # A user does the same in an empty folder, block after block.
    program = [page.before]
    for block in blocks(page.path, "python", "sh"):
        text = block.text if block.runs else ""
        for old, new in page.shortened:
            text = text.replace(old, new)
        if file := re.match(r"# (\w+\.py)\n", text):  # a file that the reader saves
            program.append(f"open({file[1]!r}, 'w').write({text!r})")
        else:
            program.append(text if block.language == "python" else SHELL.format(functions + text))
    code = "\n".join([*program, page.after])
    done = subprocess.run([*client, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    position = 0
    for pattern in page.prints:
        found = re.compile(pattern, re.MULTILINE).search(done.stdout, position)
        assert found, f"expected {pattern} in\n{done.stdout[position:]}"
        position = found.end()
    for path in page.writes:
        assert (tmp_path / path).exists(), path


def test_every_block_runs_or_says_why_not() -> None:
    running = {page.path: page for page in RUNNING}
    for name in PAGES:
        texts = [block.text for block in blocks(name, "python", "sh") if block.runs]
        assert bool(texts) == (name in running), f"{name}: expected the page in RUNNING, or `<!-- not run: why -->`"
        for old, _ in running[name].shortened if name in running else ():
            assert any(old in text for text in texts), f"{name}: {old}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # some take files, which must exist
    for arguments in commands(page):
        try:
            name, found = parse(arguments)
        except Exception as error:
            raise AssertionError(f"{page}: tcnca {shlex.join(arguments)}") from error
        recipe = found.get("recipe") or found.get("name")
        # There is no run to start from here.
        changes = [change for change in found.get("changes") or [] if not change.startswith("init_from=runs/")]
        if name == "sweep" and recipe in builtin():
            for key, values in parse_grid(changes).items():
                load_recipe(recipe).override([f"{key}={values[0]}"]).validate()
        elif recipe in builtin():
            load_recipe(recipe).override(changes).validate()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for path, anchor in links(page):
        # The site has files, not folders.
        assert (ROOT / path).is_file(), f"{page} links to {path}, which is not a file"
        assert not anchor or not path.endswith(".md") or anchor in anchors(path), f"{page} links to {path}#{anchor}"


def test_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = re.findall(r"^make (\w+)", read("README.md"), re.MULTILINE)
    assert shown == ["demo", "test"]
    for command in re.findall(
        r"\bmake ([a-z-]+)", "".join(block.text for page in PAGES for block in blocks(page, "sh"))
    ):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_every_page_is_on_the_site() -> None:
    # With a tag for a function of MkDocs, which is not needed here.
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(_nav(yaml.safe_load(text)["nav"]))
    assert len(listed) == len(set(listed))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert {*listed} == pages | {*build.PAGES.values()}, "expected each page in the nav of mkdocs.yml"


def _nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _nav(each)


def test_every_public_name_is_documented() -> None:
    listed: dict[str, list[str]] = {}
    for page in PAGES:
        for module, names in re.findall(r"^<!-- api (\S+) (.+) -->$", read(page), re.MULTILINE):
            listed.setdefault(module, []).extend(names.split())
    for module in ("ops", "layers", "models", "generation", "inference", "data", "training"):
        names, expected = listed[f"tcnca.{module}"], importlib.import_module(f"tcnca.{module}").__all__
        assert len(names) == len({*names}), f"docs/api lists a name of tcnca.{module} twice"
        assert {*names} ^ {*expected} == set(), f"expected docs/api to list the names of tcnca.{module}"
    everywhere = {name for names in listed.values() for name in names}
    assert {*tcnca.__all__} - {"__version__", "data"} <= everywhere


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the site needs `pip install -e '.[docs]'`, or `make docs`")
    assert build.main(tmp_path / "site") == 0
    for name in ("index", "concepts", "cli", "recipes", "api/layers", "report", "changelog"):
        assert (tmp_path / "site" / f"{name}.html").is_file(), name
    text = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("site/**/*.html"))
    # Nothing is loaded from a network, and everything generated is there.
    assert not re.search(r"(?:<script[^>]*src|<link[^>]*href|<img[^>]*src)=\"?(?:https?:)?//", text)
    assert not re.search(r"<!-- (?:api|commands|families|recipes|variants)\b", text)
    for recipe in builtin():
        assert f'id="{recipe}"' in text, recipe
