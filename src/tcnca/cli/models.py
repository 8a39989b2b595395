"""`tcnca models`: the presets in numbers."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tcnca.cli.reporting import explained, say
from tcnca.config import check_choice
from tcnca.models import Preset, Summary, preset, presets, summarize
from tcnca.recipes import FAMILIES


def models(
    like: Annotated[str, typer.Argument(help="Show only presets whose name contains this, for example enwik8.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the paper's models and ours: size, receptive field, streaming state and cost of a token."""
    with explained():
        chosen = [preset(name) for name in presets() if like.lower() in name]
        if not chosen:
            check_choice("preset", like, presets())
    if as_json:
        rows = {
            entry.name: {
                "family": entry.family,
                "task": entry.task,
                "length": entry.length,
                **vars(summarize(entry.model, entry.length)),
            }
            for entry in chosen
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console(emoji=False, highlight=False)
    say(console, family_lines({entry.family for entry in chosen}))
    console.print(models_table([(entry, summarize(entry.model, entry.length)) for entry in chosen]))


def family_lines(shown: set[str]) -> str:
    """Return a line for each family that is shown: what it is, and whether it is the paper's or ours."""
    return "\n".join(f"  {name:<13} {about}" for name, about in FAMILIES.items() if name in shown)


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
        "Receptive field: tokens that the mixer of one layer sees; a truncated EMA has a limit. Streaming state: of "
        "one sequence of the task's length in float32; bidirectional models (–) do not stream. Cost: million "
        "multiply-adds to read one token of such a sequence, an EMA counted as its recurrence."
    )
    table.caption_justify = "left"
    return table
