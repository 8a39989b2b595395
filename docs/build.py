"""Build the documentation site: `make docs`, or `python docs/build.py`.

The Markdown files of the repository are written so that they read well where they are. This program copies them to
`build/docs`, adds what is generated from the code, and lets MkDocs turn the copy into `site`. It changes two things:

- Links to files outside `docs`. Such a file becomes a page, if `PAGES` lists it, or is copied to the site.
- Comments such as `<!-- recipes -->`, which `GENERATED` replaces: the recipes, the commands and the docstrings.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import posixpath
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from tcnca.cli import COMMANDS, app
from tcnca.config import Config, field_texts
from tcnca.layers import Mixer
from tcnca.recipes import FAMILIES, builtin, descriptions, find

ROOT = Path(__file__).parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "measurements.md",
    "results/report.md": "report.md",
}
"""Pages outside `docs`, and their names on the site."""

_FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_COMMENT = re.compile(r"<!-- (\w+)((?: [\w.]+)*) -->")


def main(site: Path = ROOT / "site") -> int:
    """Assemble the pages, and build the site from them. Return the exit code."""
    assemble(ROOT / "build" / "docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    # Without the notice of the theme about its successor, which reads the same mkdocs.yml.
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


def assemble(out: Path) -> None:
    """Write the pages of the site, and all files that they link to, to a folder."""
    shutil.rmtree(out, ignore_errors=True)
    pages = dict(PAGES)
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            pages[name] = name.removeprefix("docs/")
    copied: dict[str, str] = {}
    for source, target in pages.items():
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            text = (ROOT / source).read_text(encoding="utf-8")
            (out / target).write_text(_convert(text, source, target, pages, copied), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, out / target)
    for source, target in copied.items():
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, out / target)


def _convert(text: str, source: str, target: str, pages: dict[str, str], copied: dict[str, str]) -> str:
    """Return a page with its links as they are on the site, and with what is generated."""

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[0]))
        if path == "README.md":
            path = "docs/index.md"
        if path not in pages:
            if not (ROOT / path).is_file():
                raise SystemExit(f"{source}: expected a link to a file, got {found[0]}")
            copied[path] = f"files/{path}"
        return posixpath.relpath(pages.get(path) or copied[path], posixpath.dirname(target) or ".")

    def generate(found: re.Match[str]) -> str:
        return GENERATED[found[1]](*found[2].split()) if found[1] in GENERATED else found[0]

    parts, end = [], 0
    for fence in [*_FENCED.finditer(text), None]:
        prose = text[end : fence.start() if fence else len(text)]
        parts += [_COMMENT.sub(generate, _LINK.sub(link, prose)), fence[0] if fence else ""]
        end = fence.end() if fence else len(text)
    return "".join(parts)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def _families() -> str:
    rows = [about.split(": ", 1) for about in FAMILIES.values()]
    return _table(
        ["family", ""], [[f"`{name}-*`", "**{}**: {}".format(*row)] for name, row in zip(FAMILIES, rows, strict=True)]
    )


def _recipes() -> str:
    """Return each built-in recipe: what it is, and its file with those that it extends."""
    parts = []
    for title, group in descriptions().items():
        parts.append(f"## {title.partition(':')[0]}\n\n")
        parts.append(_table(["recipe", ""], [[f"[`{name}`](#{name})", about] for name, about in group.items()]))
        for name in group:
            parts.append(f"\n### {name}\n\n")
            data = " data=FILE" if "data=FILE" in title else ""
            parts.append(f"{group[name]}. `tcnca train {name}{data}`\n\n")
            parts += [
                _collapsed(path.name if path.stem == name else f"{path.name}, which it extends", path)
                for path in _chain(name)
            ]
        parts.append("\n")
    return "".join(parts)


def _chain(name: str) -> Iterator[Path]:
    """Yield the file of a recipe, then those that it extends."""
    while name:
        path = find(name)
        yield path
        extended = re.search(r"^extends: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        name = extended[1] if extended else ""


def _variants() -> str:
    parts = []
    for name in builtin("variants"):
        path = find(name, "variants")
        about = re.search(r"^about: (.+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        parts.append(f"### {name}\n\n{about[1] if about else ''}\n\n{_collapsed(path.name, path)}\n")
    return "".join(parts)


def _collapsed(title: str, path: Path) -> str:
    lines = ["```yaml", *path.read_text(encoding="utf-8").splitlines(), "```"]
    return f'??? abstract "{title}"\n' + "".join(f"    {line}\n" if line else "\n" for line in lines) + "\n"


def _commands() -> str:
    """Return the help of every command."""
    group: Any = typer.main.get_command(app)
    listed = [[f"[`tcnca {name}`](#tcnca-{name})", about] for name, (_, about) in COMMANDS.items()]
    parts = [_table(["command", ""], listed)]
    for name, lazy in group.commands.items():
        command = lazy.load()
        parts.append(_command(f"tcnca {name}", command, "##"))
        for inner, each in getattr(command, "commands", {}).items():
            parts.append(_command(f"tcnca {name} {inner}", each, "###"))
    return "".join(parts)


def _command(name: str, command: Any, heading: str) -> str:
    context = typer.Context(command, info_name=name)
    usage = command.get_usage(context).removeprefix("Usage: ")
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    paragraphs = [f"`{text}`" if text.startswith("tcnca ") else text for text in paragraphs]
    parts = [f"\n{heading} {name}\n\n", "\n\n".join(paragraphs), f"\n\n```text\n{' '.join(usage.split())}\n```\n\n"]
    records = [each.get_help_record(context) for each in command.get_params(context) if each.name != "help"]
    # Without what a terminal adds to say that there is no limit.
    rows = [[f"`{_plain(record[0])}`", _plain(record[1])] for record in records if record]
    return "".join([*parts, _table(["argument", ""], rows) if rows and not hasattr(command, "commands") else ""])


def _plain(text: str) -> str:
    return re.sub(r" range>", ">", re.sub(r" <list\[str\]>|; \d+<=x<=\d{10,}", "", text))


def _api(module: str, *names: str) -> str:
    """Return where MkDocs puts the docstrings of some public names of a module, and the fields of configurations."""
    return "".join(_documented(f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in names)


def _documented(path: str, value: Any) -> str:
    if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("tcnca."):
        path = f"{value.__module__}.{value.__qualname__}"  # that of a package can also name a module
    if not (isinstance(value, type) and issubclass(value, Config)):
        inherited = isinstance(value, type) and issubclass(value, Mixer) and value is not Mixer
        return f"::: {path}\n" + ("    options: {members: false}\n\n" if inherited else "\n")
    methods = [name for name, each in vars(value).items() if not name.startswith("_") and inspect.isroutine(each)]
    parts = [
        f"::: {path}\n    options: {{members: false, show_signature: false, separate_signature: false}}\n\n",
        _fields(value),
        "\n",
    ]
    parts += [f"::: {path}.{name}\n    options: {{heading_level: 4}}\n\n" for name in methods if name != "build"]
    return "".join(parts)


def _fields(config: type[Config]) -> str:
    """Return a table of the fields of a configuration."""
    rows, texts, hints = [], field_texts(config), typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        default = "required" if value is dataclasses.MISSING else f"`{_shown(value)}`"
        text = " ".join(texts[field.name].split())
        choices = [
            each for member in (hints[field.name], *typing.get_args(hints[field.name])) for each in _literals(member)
        ]
        if not all(f"`{choice}`" in text for choice in choices):
            text += f" One of `{'`, `'.join(choices)}`."
        rows.append([f"`{field.name}`", default, re.sub(r"docs/([\w-]+\.md)", r"[\1](../\1)", text)])
    return _table(["field", "default", ""], rows) if rows else ""


def _literals(hint: Any) -> list[str]:
    return [str(each) for each in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []


def _shown(value: Any) -> str:
    return f"{type(value).__name__}()" if isinstance(value, Config) else repr(value)


GENERATED: dict[str, Callable[..., str]] = {
    "api": _api,
    "commands": _commands,
    "families": _families,
    "recipes": _recipes,
    "variants": _variants,
}
"""What replaces a comment, by its first word."""


if __name__ == "__main__":
    sys.exit(main())
