"""`tcnca sweep`: a recipe at every combination of some values, and in some variants."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from tcnca.cli.reporting import check_changes, explained, parse_duration, say
from tcnca.errors import ConfigError
from tcnca.recipes import builtin, find

if TYPE_CHECKING:
    from tcnca.training.sweeps import Point, Sweep
    from tcnca.training.sweeps.tables import Row

_BUILTIN = ", ".join(builtin("variants"))
_OPTIONS = ("--variants", "--only", "--out", "--jobs", "--device", "--budget", "--dry-run")
_STYLES = {"done": "", "failed": "red", "stopped": "yellow", "waiting": "dim"}


def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe that `tcnca recipes` lists, or a YAML file.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=A,B,C", help="Keys and the values to try, such as lr=1e-4,1e-3."),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"Variants to compare: a YAML file, or one of {_BUILTIN}."),
    ] = None,
    only: Annotated[str, typer.Option(metavar="NAME,NAME", help="Variants of the file to run. (default: all)")] = "",
    out: Annotated[Path | None, typer.Option(help="Directory of the sweep. (default: sweeps/RECIPE-VARIANTS)")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share the GPUs or cores.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default: GPUs if there are any)")] = None,
    budget: Annotated[str, typer.Option(help="Time of each run, such as 90s, 20m or 2h, instead of max_steps.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, then exit.")] = False,
) -> None:
    """Train a recipe at every combination of some values, and select one by validation.

    The paper's search for associative recall, ten runs:

    tcnca sweep recall-64-10-tcnca-simple lr=1e-5,1e-4,1e-3,1e-2,1e-1 dropout=0,0.1

    Variants, which are named sets of changes, with two seeds each:

    tcnca sweep enwik8-short seed=0,1 --variants mixers --only ema,tcn

    A key with one value is changed in all runs. Each run has a directory, as `tcnca train` writes it.

    The same command again skips runs that are done, resumes those that were stopped, and repeats those that failed.
    """
    console = Console(emoji=False, highlight=False)
    with explained():
        check_changes(changes or [], _OPTIONS)
        seconds = parse_duration("--budget", budget) if budget else None
        if only and variants is None:
            raise ConfigError(f"--only: expected --variants with it, whose variants it selects, got {only} alone")
        find(recipe)  # answers a misspelled name before PyTorch is imported

        from tcnca.training import sweeps
        from tcnca.training.sweeps.tables import CSV, MARKDOWN

        selected = [name.strip() for name in only.split(",")] if only else []
        compared = None if variants is None else sweeps.load_variants(variants, selected)
        wanted = sweeps.plan(recipe, changes or [], out, variants=compared, budget=seconds, device=device, jobs=jobs)
        if compared and (advice := compared.advice(recipe)):
            say(console, f"note: {advice.strip(' ()')}, not for {recipe}")
        if dry_run:
            for point in wanted.points:
                arguments = wanted.train_command(point, "--out", str(point.folder))
                say(console, f"{sweeps.point_state(point)[0]:<8} {shlex.join(['tcnca', *arguments])}")
            return
        with _Bar(console, wanted) as bar:
            stopped = sweeps.run_sweep(wanted, bar)
        rows = sweeps.read_rows(wanted)
        sweeps.write_tables(wanted, rows)
        drawn = [path.name for path in (sweeps.save_scores(wanted, rows), sweeps.save_curves(wanted)) if path]
        _print_tables(console, wanted, rows)
        say(console, f"The tables are in {wanted.folder}: {', '.join([CSV, MARKDOWN, *drawn])}.")
        if others := wanted.count_others():
            say(console, f"{others} more runs in it are not of this sweep.")
        if stopped:
            say(console, f"stopped by {stopped}; nothing is lost, continue with\n{wanted.command}")
            raise typer.Exit(130)
        if any(row.state != "done" for row in rows):
            say(console, "The same command repeats what is not done.")
            raise typer.Exit(1)


class _Bar:
    """Shows the progress of a sweep: a bar in a terminal, and a line for each run that ends."""

    def __init__(self, console: Console, wanted: Sweep) -> None:
        from tcnca.training.sweeps.tables import read_row

        self.console, self.sweep = console, wanted
        self.rows = {point.folder: read_row(wanted, point) for point in wanted.points}
        self.running: list[str] = []
        # The text is cut off if it does not fit, not the bar.
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self._progress = Progress(
            *columns, console=console, transient=True, expand=True, disable=not console.is_terminal
        )
        self._bar = self._progress.add_task("", total=len(wanted.points))
        self.over = sum(row.state == "done" for row in self.rows.values())
        done = f", {self.over} already done" if self.over else ""
        say(console, f"{len(self.rows)} runs in {wanted.folder}{done}")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, point: Point, resumed: bool) -> None:
        """Show that a run starts."""
        self.running.append(point.folder.name)
        if not self.console.is_terminal:
            say(self.console, f"{point.folder.name}: {'resumes' if resumed else 'starts'}")
        self._show()

    def ended(self, point: Point) -> None:
        """Print how a run ended, and update the tables."""
        from tcnca.training.sweeps.runner import LOG
        from tcnca.training.sweeps.tables import read_row, write_tables

        self.running.remove(point.folder.name)
        self.over += 1
        row = self.rows[point.folder] = read_row(self.sweep, point)
        write_tables(self.sweep, list(self.rows.values()))
        scores = [f"{split} {self.sweep.metric} {score:.4f}" for split, score in row.scores.items()]
        reason = f": {row.error} (see {point.folder / LOG})" if row.error else ""
        say(self.console, f"{point.folder.name}: {', '.join([row.state, *scores])}{reason}")
        self._show()

    def stopping(self, signal_name: str, running: int) -> None:
        """Print that a signal arrived."""
        what = "the run saves and ends" if running == 1 else f"{running} runs save and end"
        say(self.console, f"{signal_name}: {what}; another signal ends them at once")

    def _show(self) -> None:
        from tcnca.training.sweeps import best_row

        best = best_row(self.sweep, list(self.rows.values()))
        texts = [f"best {best.scores[self.sweep.split]:.4f} ({best.point.folder.name})"] if best else []
        texts += [f"running {', '.join(self.running)}"] if self.running else []
        self._progress.update(self._bar, completed=self.over, description=escape("; ".join(texts)))


def _print_tables(console: Console, wanted: Sweep, rows: list[Row]) -> None:
    from tcnca.training.sweeps import tables

    best = tables.best_group(wanted, rows)
    runs = best.rows if best else []
    # Without the speed, to fit into 80 columns.
    table = _table(f"Sweep of {wanted.recipe}", [*wanted.varied, *tables.HEADINGS[:-1]])
    for row in tables.ranked(wanted, rows):
        style = "bold green" if row in runs else _STYLES[row.state]
        table.add_row(*map(Text, tables.cells(wanted, row)[:-1]), style=style)
    console.print(table)
    if wanted.seed:
        table = _table("Over seeds", tables.seed_headings(wanted))
        for group in tables.grouped(wanted, rows):
            table.add_row(*map(Text, tables.seed_cells(wanted, group)), style="bold green" if group == best else "")
        console.print(table)
    for row in rows:
        if row.error:
            say(console, f"{row.point.folder.name} failed: {row.error}")
    say(console, f"{tables.count(rows)} {tables.selection(wanted, rows)}".strip())


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in headings:
        left = heading in ("state", "variant")
        table.add_column(Text(heading), justify="left" if left else "right", overflow="fold")
    return table
