"""`tcnca reproduce` runs the experiments behind the paper's tables, `tcnca report` shows the results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tcnca.cli.boundary import continue_with, exit_code
from tcnca.cli.reporting import Device, parse_duration
from tcnca.config import check_choice
from tcnca.errors import ConfigError
from tcnca.report.tables import SPEED, SUITES, TABLES

_NAMES = ", ".join([*TABLES, SPEED])
_Results = Annotated[Path, typer.Option("--results", help="Folder of the results.")]


def _complete_table(incomplete: str) -> list[str]:
    return [name for name in (*TABLES, SPEED, "all") if name.startswith(incomplete)]


def reproduce(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE]...", autocompletion=_complete_table, help=f"{_NAMES}, or all. (default: list them)"
        ),
    ] = None,
    only: Annotated[str, typer.Option(metavar="NAME,NAME", help="Rows and columns to run. (default: all)")] = "",
    budget: Annotated[str, typer.Option(help="Time of each run, such as 90s, 20m or 2h. (default: by table)")] = "",
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Seeds of each cell.")] = "0",
    resume: Annotated[bool, typer.Option("--resume", help="Continue runs that were stopped.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Runs at a time; they share the GPUs or cores.")] = 1,
    device: Device = None,
    results: _Results = Path("results"),
    runs: Annotated[Path, typer.Option(help="Folder of the run directories.")] = Path("runs/reproduce"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, then exit.")] = False,
) -> None:
    """Run the experiments behind tables and figures of the paper, and keep each result as a JSON file.

    tcnca reproduce recall-10 --jobs 4

    tcnca reproduce lra --only image,text,tcnca,mega-chunk --budget 10m

    Cells that have a result are skipped. `tcnca report` shows all results beside the paper's.
    """
    names = list(dict.fromkeys(tables or []))
    names = [*TABLES, SPEED] if "all" in names else names
    for name in names:
        check_choice("TABLE", name, [*TABLES, SPEED, "all"])
    seconds = parse_duration("--budget", budget)

    from tcnca.report.runs import is_measured, run_cells, run_speed, select_runs

    words = [word for word in only.split(",") if word.strip()]
    wanted = select_runs(
        names or list(TABLES), words, seeds=_parse_seeds(seeds), budget=seconds, results=results, runs=runs
    )
    if not names:
        for table in TABLES.values():
            states = [run.state for run in wanted if run.table is table]
            counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            typer.echo(f"{table.name:<10} {table.title}, {table.source}: {counts}")
        measured = [suite for suite in SUITES if is_measured(results / SPEED / f"{suite}.json")]
        typer.echo(f"{SPEED:<10} Figure 2, and all run times: {len(measured)} of {len(SUITES)} benchmarks done")
        typer.echo("\nRun one with `tcnca reproduce NAME`; --dry-run prints its commands.")
        return
    if dry_run:
        for run in wanted:
            typer.echo(f"{run.state:<8} {shlex.join(['tcnca', *run.command(device)])}")
        for suite in SUITES if SPEED in names and not words else ():
            path = results / SPEED / f"{suite}.json"
            command = shlex.join(["tcnca", "bench", suite, "--json", str(path)])
            typer.echo(f"{'done' if is_measured(path) else 'waiting':<8} {command}")
        return
    console = Console(emoji=False, highlight=False, markup=False, soft_wrap=True)
    stopped, failed = "", list[str]()
    if wanted:
        with continue_with("continue with the same command and --resume"):
            stopped = run_cells(wanted, runs, console, resume=resume, jobs=jobs, device=device)
    if SPEED in names and not stopped and not words:
        failed = run_speed(results, console, device)
    if stopped:
        typer.echo(f"stopped by {stopped}; nothing is lost, continue with the same command and --resume")
        raise typer.Exit(exit_code(stopped))
    missing = [run.folder.name for run in wanted if run.state != "done"]
    if missing or failed:
        typer.echo(f"not done: {', '.join([*missing, *failed])}")
        raise typer.Exit(1)
    typer.echo(f"The results are in {results}; `tcnca report` shows them beside the paper's.")


def _parse_seeds(text: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise ConfigError(f"--seeds: expected numbers such as 0,1,2, got {text!r}")
    return found


def report(
    results: Annotated[Path, typer.Argument(help="Folder of the results.")] = Path("results"),
    out: Annotated[Path | None, typer.Option(help="Folder of the report. (default: that of the results)")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Also write a summary into this file, between the lines that mark its place.")
    ] = None,
) -> None:
    """Show all results beside the paper's, with figures, as one page of HTML and as Markdown."""
    if not results.is_dir():
        got = "a file" if results.exists() else "no such folder"
        raise ConfigError(f"{results}: expected the folder that `tcnca reproduce` writes to, got {got}; check the path")
    if readme is not None and not readme.is_file():
        raise ConfigError(f"--readme: expected a file, got {readme}; check the path")

    from tcnca.report.page import fill_summary, write_report

    for path in write_report(results, out or results):
        typer.echo(path)
    if readme is not None:
        changed = fill_summary(readme, results)
        typer.echo(f"{readme}: {'the summary is written' if changed else 'is up to date'}")
