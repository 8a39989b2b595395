"""`tcnca sweep`: a recipe with every combination of the given values and variants."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tcnca.cli.boundary import continue_with, exit_code
from tcnca.cli.completion import complete_recipe, complete_variants
from tcnca.cli.reporting import Device, check_changes, parse_duration
from tcnca.errors import ConfigError
from tcnca.extras import missing
from tcnca.recipes import builtin, find

_BUILTIN = ", ".join(builtin("variants"))
_OPTIONS = ("--variants", "--only", "--out", "--jobs", "--device", "--budget", "--dry-run")


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(autocompletion=complete_recipe, help="A recipe that `tcnca recipes` lists, or a YAML file."),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=A,B,C", help="Keys and the values to try, such as lr=1e-4,1e-3."),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            autocompletion=complete_variants,
            help=f"Variants to compare: a YAML file, or one of {_BUILTIN}.",
        ),
    ] = None,
    only: Annotated[str, typer.Option(metavar="NAME,NAME", help="Variants of the file to run. (default: all)")] = "",
    out: Annotated[Path | None, typer.Option(help="Directory of the sweep. (default: sweeps/RECIPE-VARIANTS)")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Runs at a time; they share the GPUs or cores.")] = 1,
    device: Device = None,
    budget: Annotated[str, typer.Option(help="Time of each run, such as 90s, 20m or 2h, instead of max_steps.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, then exit.")] = False,
) -> None:
    """Train a recipe with every combination of the given values, and select one by validation.

    The paper's search for associative recall, ten runs:

    tcnca sweep recall-64-10-tcnca-simple lr=1e-5,1e-4,1e-3,1e-2,1e-1 dropout=0,0.1

    Variants, which are named sets of changes, with two seeds each:

    tcnca sweep enwik8-short seed=0,1 --variants mixers --only ema,tcn

    A key with one value is changed in all runs. Each run has a directory, as `tcnca train` writes it.

    The same command again skips runs that are done, resumes those that were stopped, and repeats those that failed.
    """
    check_changes(changes or [], _OPTIONS)
    seconds = parse_duration("--budget", budget)
    if only and variants is None:
        raise ConfigError(f"--only: expected --variants with it, whose variants it selects, got {only} alone")
    find(recipe)  # answers a misspelled name before PyTorch is imported

    from tcnca.training import sweeps
    from tcnca.training.sweeps.results import CSV, MARKDOWN, point_state

    selected = [name.strip() for name in only.split(",")] if only else []
    compared = None if variants is None else sweeps.load_variants(variants, selected)
    if compared and compared.recipe not in ("", recipe):
        typer.echo(f"note: the variants of {variants} are for {compared.recipe}, not for {recipe}")
    wanted = sweeps.plan(recipe, changes or [], out, variants=compared, budget=seconds, device=device, jobs=jobs)
    if dry_run:
        for point in wanted.points:
            arguments = wanted.train_command(point, "--out", str(point.folder))
            typer.echo(f"{point_state(point)[0]:<8} {shlex.join(['tcnca', *arguments])}")
        return
    with continue_with(f"continue with\n{wanted.command}"):
        stopped = sweeps.run_sweep(wanted, Console(emoji=False, highlight=False, markup=False, soft_wrap=True))
    rows = sweeps.read_rows(wanted)
    sweeps.write_tables(wanted, rows)
    drawn = [path.name for path in (sweeps.save_scores(wanted, rows), sweeps.save_curves(wanted)) if path]
    typer.echo(f"\n{sweeps.to_markdown(wanted, rows)}")
    typer.echo(f"The tables are in {wanted.folder}: {', '.join([CSV, MARKDOWN, *drawn])}.")
    if reason := missing("plots"):
        typer.echo(f"Figures are not drawn: {reason}")
    if stopped:
        typer.echo(f"stopped by {stopped}; nothing is lost, continue with\n{wanted.command}")
        raise typer.Exit(exit_code(stopped))
    if any(row.state != "done" for row in rows):
        typer.echo("The same command repeats what is not done.")
        raise typer.Exit(1)
