"""The command line: one table of subcommands, each in a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from tcnca.cli.bench import app as bench_app
from tcnca.cli.data import app as data_app
from tcnca.cli.demo import demo
from tcnca.cli.models import models
from tcnca.cli.recipes import recipes
from tcnca.cli.sweep import sweep
from tcnca.cli.train import eval_, train
from tcnca.version import __version__

app = typer.Typer(
    name="tcnca",
    help="TCNCA and its relatives: models for very long sequences.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tcnca {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """TCNCA and its relatives: models for very long sequences."""


for command in (demo, models, recipes):
    app.command()(command)
# `--lr 1e-3` reaches these commands, which answer with `lr=1e-3`.
app.command(context_settings={"ignore_unknown_options": True})(train)
app.command(context_settings={"ignore_unknown_options": True})(sweep)
app.command("eval")(eval_)
app.add_typer(data_app)
app.add_typer(bench_app)
