"""`tcnca recipes`: the recipes that come with the library, and what one would run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tcnca.cli.reporting import explained, say
from tcnca.training import load_recipe
from tcnca.training import recipes as all_recipes


def recipes(
    name: Annotated[str, typer.Argument(help="A recipe, or a file of yours, to print whole.")] = "",
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as learning_rate=0.01 layers=4.")
    ] = None,
) -> None:
    """List the recipes, one for every experiment of the paper, or print one with all its keys."""
    console = Console(emoji=False, highlight=False)
    with explained():
        if name:
            say(console, load_recipe(name).override(changes or []).to_yaml().rstrip())
            return
        found = all_recipes()
        width = max(map(len, found))
        for recipe, about in found.items():
            say(console, f"{recipe:<{width}}  {about}")
        say(console, "\n`tcnca recipes NAME` prints one; any key can be changed: `tcnca recipes NAME layers=4`.")
