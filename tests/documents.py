"""The documents of the repository: their pages, code blocks, commands and links.

Blocks of `sh` and `python` run in the tests, page by page from top to bottom, except those below a comment
`<!-- not run: why -->`. The commands of those are still checked, and so are commands inside sentences. A block of
Python that begins with a comment such as `# parts.py` is saved as that file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from tcnca.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "benchmarks/*.md", "results/*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
_BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")


class Block(NamedTuple):
    """A code block of a page."""

    language: str
    text: str
    runs: bool


def read(page: str) -> str:
    """Return the text of a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the code blocks of a page in some languages."""
    found = [Block(language, text, not comment) for comment, language, text in _BLOCK.findall(read(page))]
    return [block for block in found if block.language in languages]


def prose(page: str) -> str:
    """Return a page without its code blocks."""
    return _BLOCK.sub("", read(page))


def links(page: str) -> Iterator[tuple[str, str]]:
    """Yield where the links of a page lead in the repository, and to which heading, if any."""
    for target in _LINK.findall(re.sub(r"`[^`]*`", "", prose(page))):
        path, _, anchor = target.partition("#")
        yield (ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT).as_posix() if path else page, anchor


def anchors(page: str) -> set[str]:
    """Return the anchors of the headings of a page, as the hosts of repositories, and the site, derive them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: str) -> list[list[str]]:
    """Return the arguments of each `tcnca …` in blocks that do not run, and in sentences."""
    code = "".join(block.text for block in blocks(page, "sh") if not block.runs)
    lines = code.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(tcnca [^`]+)`", " ".join(prose(page).split()))
    found = [re.split(r" (?:>|\|) ", line)[0] for line in lines if re.search(r"\btcnca ", line) and "…" not in line]
    words = [shlex.split(line, comments=True) for line in found]
    found_arguments = [each[each.index("tcnca") + 1 :] for each in words if "tcnca" in each]
    return [each for each in found_arguments if not each[0].startswith("-")]


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the command and its parameters as the command line understands them, without running it."""
    command, name = typer.main.get_command(app), ""
    while isinstance(command, TyperGroup) and arguments:
        name, *arguments = arguments
        command = command.commands[name]
    return name, command.make_context(name, arguments).params if arguments else {}
