"""`tcnca models` and `tcnca recipes`: the presets in numbers, and the built-in recipes with all their keys."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from tcnca.cli.completion import complete_preset, complete_recipe
from tcnca.config import Config, check_choice, field_texts
from tcnca.recipes import FAMILIES, descriptions, find

if TYPE_CHECKING:
    from tcnca.models import Preset, Summary
    from tcnca.training import Recipe

_COMMENT = 34
"""Column at which comments start."""


def models(
    like: Annotated[
        str,
        typer.Argument(
            autocompletion=complete_preset, help="Show only presets whose name contains this, for example enwik8."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the paper's models and ours: size, receptive field, streaming state and cost of a token."""
    from tcnca.models import preset, presets, summarize

    chosen = [preset(name) for name in presets() if like.lower() in name]
    if not chosen:
        check_choice("preset", like, presets())
    rows = [(entry, summarize(entry.model, entry.length)) for entry in chosen]
    if as_json:
        about = {
            entry.name: {"family": entry.family, "task": entry.task, "length": entry.length, **vars(summary)}
            for entry, summary in rows
        }
        typer.echo(json.dumps(about, indent=2))
        return
    console = Console(emoji=False, highlight=False)
    shown = {entry.family for entry in chosen}
    typer.echo("\n".join(f"  {name:<14} {about}" for name, about in FAMILIES.items() if name in shown))
    console.print(models_table(rows))


def models_table(rows: list[tuple[Preset, Summary]]) -> Table:
    """Return a table of presets, in sections by task."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("preset", no_wrap=True)
    for column in ("parameters", "receptive\nfield", "streaming\nstate, MiB", "cost of a\ntoken, MMAC"):
        table.add_column(column, justify="right", no_wrap=True)
    task = rows[0][0].task if rows else ""
    for entry, summary in rows:
        if entry.task != task:
            table.add_section()
            task = entry.task
        table.add_row(
            entry.name,
            f"{summary.parameters:,}",
            "unlimited" if summary.receptive_field is None else f"{summary.receptive_field:,}",
            "–" if summary.state_bytes is None else f"{summary.state_bytes / 2**20:.2f}",
            f"{summary.macs / 1e6:.2f}",
        )
    table.caption = (
        "Receptive field: tokens that one layer sees at most, by its mixer and its attention; a truncated EMA has a "
        "limit. Streaming state: of one sequence of the task's length in float32; bidirectional models (–) do not "
        "stream. Cost: million multiply-adds to read one token of such a sequence, an EMA counted as its recurrence."
    )
    table.caption_justify = "left"
    return table


def recipes(
    name: Annotated[
        str, typer.Argument(autocompletion=complete_recipe, help="A recipe, or a file of yours, to print as a whole.")
    ] = "",
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as lr=0.01 num_layers=4.")
    ] = None,
) -> None:
    """List the built-in recipes, or print one with all its keys."""
    typer.echo(printed(name, changes or []) if name else listed())


def listed() -> str:
    """Return the built-in recipes in groups, after what their families of models are."""
    groups = descriptions()
    width = max(len(name) for group in groups.values() for name in group)
    lines = list(FAMILIES.values())
    for title, group in groups.items():
        lines += ["", title, *(f"  {name:<{width}}  {about}" for name, about in group.items())]
    lines += ["", "`tcnca recipes NAME` prints one; any key can be changed: `tcnca train NAME num_layers=4`."]
    return "\n".join(lines)


def printed(name: str, changes: list[str]) -> str:
    """Return a recipe as YAML, with a comment for each key, and its whole model in comments."""
    find(name)  # answers a misspelled name before PyTorch is imported
    from tcnca.training import load_recipe

    recipe = load_recipe(name).override(changes)
    recipe.validate()
    lines = []
    texts = field_texts(type(recipe))
    for section in recipe.to_dict():
        value = getattr(recipe, section)
        if not isinstance(value, Config):
            text = yaml.safe_dump({section: value}, sort_keys=False, allow_unicode=True, width=1000)
            first, *rest = text.splitlines()
            lines += [_line(first, texts[section]), *rest]
            continue
        lines.append(_line(f"{section}:", texts[section]))
        inner = field_texts(type(value))
        for key, each in value.to_dict().items():
            text = yaml.safe_dump({key: each}, default_flow_style=True, allow_unicode=True, width=1000).strip()
            lines.append(_line(f"  {text[1:-1]}", inner[key]))
    if "preset" in recipe.model or recipe.init_from is not None:
        lines += _whole_model(recipe)
    return "\n".join(lines)


def _line(text: str, comment: str) -> str:
    first = comment.split(". ")[0].rstrip(".")
    return f"{text:<{_COMMENT - 1}} # {first}"


def _whole_model(recipe: Recipe) -> list[str]:
    """Return the model after the recipe's changes, as comments."""
    values = recipe.model_config().to_dict()
    lines = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).splitlines()
    title = "# The whole model; any of its keys can be changed, such as num_layers=4:"
    return [title, *(f"#   {line}" for line in lines)]
