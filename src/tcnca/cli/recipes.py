"""`tcnca recipes`: the built-in recipes, and everything that one says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console

from tcnca.cli.reporting import explained, say
from tcnca.config import Config, field_texts
from tcnca.recipes import FAMILIES, descriptions, find

if TYPE_CHECKING:
    from tcnca.training import Recipe

_COMMENT = 34
"""Column at which comments start."""


def recipes(
    name: Annotated[str, typer.Argument(help="A recipe, or a file of yours, to print as a whole.")] = "",
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as lr=0.01 num_layers=4.")
    ] = None,
) -> None:
    """List the built-in recipes, or print one with all its keys."""
    console = Console(emoji=False, highlight=False)
    with explained():
        say(console, printed(name, changes or []) if name else listed())


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
    find(name)  # answers a misspelt name before PyTorch is imported
    from tcnca.training import load_recipe

    recipe = load_recipe(name).override(changes)
    recipe.validate()
    lines = []
    texts = field_texts(type(recipe))
    for section in recipe.to_dict():
        value = getattr(recipe, section)
        if not isinstance(value, Config):
            lines += yaml.safe_dump({section: value}, sort_keys=False, allow_unicode=True, width=1000).splitlines()
            continue
        lines.append(_line(f"{section}:", texts[section]))
        inner = field_texts(type(value))
        for key, each in value.to_dict().items():
            text = yaml.safe_dump({key: each}, default_flow_style=True, allow_unicode=True, width=1000).strip()
            lines.append(_line(f"  {text[1:-1]}", inner[key]))
    if "preset" in recipe.model:
        lines += _whole_model(recipe)
    return "\n".join(lines)


def _line(text: str, comment: str) -> str:
    first = comment.split(". ")[0].rstrip(".")
    return f"{text:<{_COMMENT - 1}} # {first}"


def _whole_model(recipe: Recipe) -> list[str]:
    """Return the model after the recipe's changes to its preset, as comments."""
    values = recipe.model_config().to_dict()
    lines = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).splitlines()
    title = "# The whole model; any of its keys can be changed, such as num_layers=4:"
    return [title, *(f"#   {line}" for line in lines)]
