"""`tcnca recipes`: the recipes that come with the library, and what one would run."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml
from rich.console import Console

from tcnca.cli.reporting import explained, say
from tcnca.models import preset
from tcnca.training import Recipe, load_recipe
from tcnca.training import recipes as all_recipes


def recipes(
    name: Annotated[str, typer.Argument(help="A recipe, or a file of yours, to print whole.")] = "",
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as lr=0.01 num_layers=4.")
    ] = None,
) -> None:
    """List the recipes, one for every experiment of the paper, or print one with all its keys."""
    console = Console(emoji=False, highlight=False)
    with explained():
        if name:
            recipe = load_recipe(name).override(changes or [])
            say(console, recipe.to_yaml().rstrip())
            if "preset" in recipe.model:
                say(console, _whole_model(recipe))
            return
        found = all_recipes()
        width = max(map(len, found))
        for each, about in found.items():
            say(console, f"{each:<{width}}  {about}")
        say(console, "\n`tcnca recipes NAME` prints one; any key can be changed: `tcnca recipes NAME num_layers=4`.")


def _whole_model(recipe: Recipe) -> str:
    """What the preset says of the model, as comments: all of it can be changed."""
    changes = {key: value for key, value in recipe.model.items() if key != "preset"}
    values = preset(recipe.model["preset"]).model.override(**changes).to_dict()
    lines = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).splitlines()
    title = "# The whole model; any of its keys can be changed, such as num_layers=4:"
    return "\n".join([title, *(f"#   {line}" for line in lines)])
