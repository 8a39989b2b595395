"""`tcnca sweep`: a recipe at every combination of some values, and in some variants."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from tcnca.cli.reporting import explained, say, seconds_of
from tcnca.errors import ConfigError
from tcnca.recipes import builtin
from tcnca.training.sweeps.curves import save_curves
from tcnca.training.sweeps.picture import save_picture
from tcnca.training.sweeps.plan import Point, Sweep, plan
from tcnca.training.sweeps.running import LOG, outcome, run_sweep
from tcnca.training.sweeps.table import (
    CSV,
    HEADINGS,
    MARKDOWN,
    Row,
    best_group,
    best_row,
    cells,
    chosen,
    count,
    grouped,
    ranked,
    read_row,
    read_rows,
    seed_cells,
    seed_headings,
    write_tables,
)
from tcnca.training.sweeps.variants import VARIANT, Variants, load_variants

_SHIPPED = ", ".join(builtin("variants"))


def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe that `tcnca recipes` lists, or a YAML file of yours.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=A,B,C", help="Keys and the values to try, such as lr=1e-4,1e-3."),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"Variants to compare: a YAML file of yours, or one of {_SHIPPED}."),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Variants to run, of those in the file. (default: all)")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep. (default: sweeps/RECIPE-VARIANTS)")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side; GPUs or cores are shared out.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default: GPUs where there are some)")] = None,
    budget: Annotated[str, typer.Option(help="Time of each run, such as 90s, 20m or 2h, in place of updates.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and end.")] = False,
) -> None:
    """Train a recipe at every combination of some values, and choose one by validation.

    The paper's search for associative recall, ten runs:

    tcnca sweep recall-64-10-tcnca-simple lr=1e-5,1e-4,1e-3,1e-2,1e-1 dropout=0,0.1

    Variants, each a set of changes with a name, with everything else equal, twice each:

    tcnca sweep enwik8-short seed=0,1 --variants mixers --only ema,tcn

    A key with one value is changed in all runs. Each run has a folder, as `tcnca train` makes it.

    The same command again skips what is done, goes on with what was begun, and tries again what has failed.
    """
    console = Console(emoji=False, highlight=False)
    with explained():
        seconds = seconds_of("budget", budget) if budget else None
        wanted = plan(
            recipe, changes or [], out, variants=_variants(variants, only), budget=seconds, device=device, jobs=jobs
        )
        if wanted.variants and (advice := wanted.variants.advice(recipe)):
            say(console, f"note: {advice.strip(' ()')}, not for {recipe}")
        if dry_run:
            _show_plan(console, wanted)
            return
        with _Bar(console, wanted) as bar:
            stopped = run_sweep(wanted, bar)
        rows = read_rows(wanted)
        write_tables(wanted, rows)
        drawn = [path.name for path in (save_picture(wanted, rows), save_curves(wanted)) if path]
        _show_table(console, wanted, rows)
        say(console, f"The table is in {wanted.folder}: {', '.join([CSV, MARKDOWN, *drawn])}.")
        if others := wanted.others():
            say(console, f"There are {others} runs there that are not of this sweep.")
        if stopped:
            say(console, f"stopped by {stopped}; nothing is lost, go on with\n{wanted.command}")
            raise typer.Exit(130)
        if any(row.state != "done" for row in rows):
            say(console, "The same command tries again what is not done.")
            raise typer.Exit(1)


def _variants(name: str | None, only: str) -> Variants | None:
    picked = [each.strip() for each in only.split(",")] if only else []
    if name is None and picked:
        raise ConfigError(f"only: got {only}, allowed is a choice of variants: give a file of them with --variants")
    return None if name is None else load_variants(name, picked)


class _Bar:
    """Tells how far a sweep is: a bar in a terminal, and a line for each run that ends."""

    def __init__(self, console: Console, wanted: Sweep) -> None:
        self.console, self.sweep = console, wanted
        self.rows = {point.folder: read_row(wanted, point) for point in wanted.points}
        self.running: list[str] = []
        # It takes what room is left, and what does not fit is cut, not the bar.
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self._progress = Progress(
            *columns, console=console, transient=True, expand=True, disable=not console.is_terminal
        )
        self._bar = self._progress.add_task("", total=len(wanted.points))
        self.over = sum(row.state == "done" for row in self.rows.values())
        done = f", {self.over} of them done already" if self.over else ""
        say(console, f"{len(self.rows)} runs in {wanted.folder}{done}")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, point: Point, again: bool) -> None:
        """Say that a run begins."""
        self.running.append(point.folder.name)
        if not self.console.is_terminal:
            say(self.console, f"{point.folder.name}: {'goes on' if again else 'starts'}")
        self._show()

    def ended(self, point: Point) -> None:
        """Say how a run ended, and bring the tables up to date."""
        self.running.remove(point.folder.name)
        self.over += 1
        row = self.rows[point.folder] = read_row(self.sweep, point)
        write_tables(self.sweep, list(self.rows.values()))
        scores = [f"{split} {self.sweep.metric} {score:.4f}" for split, score in row.scores.items()]
        why = f": {row.error} (see {point.folder / LOG})" if row.error else ""
        say(self.console, f"{point.folder.name}: {', '.join([row.state, *scores])}{why}")
        self._show()

    def stopping(self, name: str, running: int) -> None:
        """Say that a signal came."""
        what = "the run saves and ends" if running == 1 else f"{running} runs save and end"
        say(self.console, f"{name}: {what}; another signal ends at once")

    def _show(self) -> None:
        best = best_row(self.sweep, list(self.rows.values()))
        texts = [f"best {best.scores[self.sweep.split]:.4f} ({best.point.folder.name})"] if best else []
        texts += [f"running {', '.join(self.running)}"] if self.running else []
        self._progress.update(self._bar, completed=self.over, description=escape("; ".join(texts)))


def _show_plan(console: Console, wanted: Sweep) -> None:
    for point in wanted.points:
        state, _ = outcome(point)
        arguments = wanted.train_command(point, "--out", str(point.folder))
        say(console, f"{state:<8} {shlex.join(['tcnca', *arguments])}")


def _show_table(console: Console, wanted: Sweep, rows: list[Row]) -> None:
    best = best_group(wanted, rows)
    runs = best.rows if best else []
    # Narrow, so that a terminal of 80 columns holds it; the speed is in the other tables.
    table = _table(f"Sweep of {wanted.recipe}", [*wanted.varied, *HEADINGS[:-1]])
    for row in ranked(wanted, rows):
        style = "bold green" if row in runs else _STYLES[row.state]
        table.add_row(*map(Text, cells(wanted, row)[:-1]), style=style)
    console.print(table)
    if wanted.seed:
        table = _table("Over seeds", seed_headings(wanted))
        for group in grouped(wanted, rows):
            table.add_row(*map(Text, seed_cells(wanted, group)), style="bold green" if group == best else "")
        console.print(table)
    for row in rows:
        if row.error:
            say(console, f"{row.point.folder.name} failed: {row.error}")
    say(console, f"{count(rows)} {chosen(wanted, rows)}".strip())


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in headings:
        left = heading in ("state", VARIANT)
        table.add_column(Text(heading), justify="left" if left else "right", overflow="fold")
    return table


_STYLES = {"done": "", "failed": "red", "stopped": "yellow", "waiting": "dim"}
