"""`tcnca search`: a structure of the TCN for a length, by measurement."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tcnca.cli.boundary import continue_with, exit_code
from tcnca.cli.completion import complete_recipe
from tcnca.cli.reporting import Device, Threads, check_changes, parse_duration
from tcnca.errors import ConfigError, shown
from tcnca.extras import check_plot_path
from tcnca.recipes import find

if TYPE_CHECKING:
    from tcnca.search import Limits, SearchReport, Size, Structure

_PAPER: dict[str, Any] = {"block": "residual", "output": "none", "init": "decay", "norm": "weight"}
_BUDGET = 600.0
"""Seconds of a search that trains, by default."""
_TRAINING = ("--budget", "--finalists", "--out", "--jobs")
_OPTIONS = (
    *("--length", "--causal", "--bidirectional", "--channels", "--batch", "--block", "--budget-us", "--params"),
    *(
        "--kernel-sizes",
        "--max-depth",
        "--partial",
        "--measure",
        "--seconds",
        "--refit",
        "--all",
        "--dtype",
        "--device",
    ),
    *("--threads", "--train", *_TRAINING, "--json", "--plot"),
)


def search(
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens that the receptive field must cover.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="With --train, changes to the recipe.")
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--bidirectional", help="Direction. (default: causal; of --train: the recipe's)"),
    ] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Channels of the TCN. (default: 64; of --train: d_model)")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    block: Annotated[
        Literal["linear", "residual"] | None,
        typer.Option(help="linear: TCNCA-linear; residual: the paper's. (default: linear; of --train: the recipe's)"),
    ] = None,
    budget_us: Annotated[
        float | None, typer.Option(min=0.001, help="Longest time of a forward and backward pass, in microseconds.")
    ] = None,
    params: Annotated[int | None, typer.Option(min=1, help="Most parameters of the TCN.")] = None,
    kernel_sizes: Annotated[str | None, typer.Option(help="Kernel sizes to try, such as 5,9,17.")] = None,
    max_depth: Annotated[int, typer.Option(min=1, max=64, help="Most blocks.")] = 32,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also try structures without gaps that cover less than the length.")
    ] = False,
    measure: Annotated[int, typer.Option(min=1, help="Structures to measure after the prediction.")] = 16,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time to measure for; more if one round takes longer.")
    ] = 90.0,
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit the cost model anew, though there is one on disk.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show everything measured, not only the front.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Dtype. (default: bfloat16 on a GPU, float32 on a CPU)"),
    ] = None,
    device: Device = None,
    threads: Threads = None,
    train: Annotated[
        str | None,
        typer.Option("--train", metavar="RECIPE", autocompletion=complete_recipe, help="Train the finalists with it."),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="With --train, time of the whole search, such as 5m. (default: 10m)")
    ] = "",
    finalists: Annotated[
        int | None, typer.Option(min=2, help="With --train, most structures to train. (default: 8)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --train, directory. (default: searches/RECIPE-LENGTH)")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="With --train, runs at a time. (default: 1)")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="File for all numbers.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot to write: .png, .svg or .pdf.")] = None,
) -> None:
    """Choose kernel size, dilation factor, depth and convolutions of the TCN for a length.

    tcnca search --length 16384 --channels 64 --plot search.png

    Times of all structures are predicted by a cost model that is fitted to measurements on this machine. The promising
    structures are measured. The recommendation misses the fewest lags within the limits, and is the fastest of those.

    With --train the finalists are trained briefly, the better half longer, and so on:

    tcnca search --length 64 --train recall-small --budget 5m

    The same command again continues a search that was stopped while it trained.
    """
    begun = time.monotonic()
    check_changes(changes or [], _OPTIONS)
    given = parse_duration("--budget", budget)
    whole = given or _BUDGET
    sizes = _numbers(kernel_sizes)
    if train is None and (changes or given or finalists or out or jobs):
        raise ConfigError(f"--train: expected a recipe with {', '.join(_TRAINING)} and changes, got none")
    if train is not None:
        find(train)  # answers a misspelled name before PyTorch is imported
    if json is not None and (json.is_dir() or not json.name):
        raise ConfigError(f"--json: expected the name of a file, got the directory {json}")
    if plot is not None:
        check_plot_path(plot)
    console = Console(emoji=False, highlight=False)

    import torch

    from tcnca.search import Limits, enumerate_structures, write_json
    from tcnca.search.halving import check_budget
    from tcnca.search.plot import save_plot
    from tcnca.search.search import is_busy, load_average, result_table, summary_lines
    from tcnca.training.provenance import command_line
    from tcnca.training.threads import use_threads

    if device == "mps":
        raise ConfigError("--device: expected cpu or cuda, got mps, on which times are not measured")
    limits = Limits(seconds=None if budget_us is None else budget_us * 1e-6, parameters=params)
    options = {"kernel_sizes": sizes} if sizes else {}
    structures = enumerate_structures(length, max_depth=max_depth, partial=partial, **options)
    command = command_line(sys.argv[1:])
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if threads is None and on_cpu and is_busy(load_average()):
        # Several threads wait for each other, for the longer the busier the machine is.
        typer.echo(
            f"the machine is busy (load {load_average():.1f}): measuring with one thread; --threads sets another"
        )
        threads = 1
    with use_threads(threads), continue_with(f"continue with\n{command}"):
        size = _size(length, causal, channels, batch, block, dtype, device, train, changes or [])
        folder = out or Path("searches") / f"{Path(train or '').stem}-{length}"
        report = _stopped_report(folder, size, limits, train, changes or [], given) if train else None
        if report is None:
            if train is not None:
                check_budget(whole, jobs or 1)
                seconds = min(seconds, whole / 3)  # most of the time is for training
            report = _measure(console, size, structures, limits, measure, seconds, refit, command)
        stopped = ""
        if train is not None:
            report, stopped = _train(report, train, changes or [], whole, begun, finalists, folder, device, jobs or 1)
    if json is not None:
        write_json(json, report)
    facts = report.hardware
    memory = f"{facts['memory_gib']} GiB" if "memory_gib" in facts else f"{facts.get('threads', 'unknown')} threads"
    typer.echo(f"{facts['name']}, {memory}, {report.size['dtype']}, torch {report.versions['torch']}")
    console.print(result_table(report, everything=show_all))
    for line in summary_lines(report):
        typer.echo(line)
    best = report.recommendation
    typer.echo(f"\nRecommended: {best.structure}. It {best.reason}.\n    {' '.join(best.overrides)}")
    if best.ties:
        typer.echo(f"Tied with it: {', '.join(map(str, best.ties))}.")
    if json is not None:
        typer.echo(f"All numbers are in {json}.")
    if plot is not None:
        save_plot(plot, report)
        typer.echo(f"The plot is {plot}.")
    if stopped:
        typer.echo(f"stopped by {stopped}; nothing is lost, continue with\n{command}")
        raise typer.Exit(exit_code(stopped))


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (0,)
    if any(not 2 <= number <= 2**16 for number in numbers):
        raise ConfigError(f"--kernel-sizes: expected integers from 2 to 65536, such as 5,9,17, got {shown(text)}")
    return tuple(sorted(set(numbers)))


def _size(
    length: int,
    causal: bool | None,
    channels: int | None,
    batch: int,
    block: str | None,
    dtype: str | None,
    device: str | None,
    train: str | None,
    changes: list[str],
) -> Size:
    """Return what to measure on: as the options say, or else as in the recipe."""
    import torch

    from tcnca.layers import TCNConfig
    from tcnca.search import Size
    from tcnca.search.halving import recipe_model
    from tcnca.training.distributed import check_device

    check_device(device)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    base, width, direction = TCNConfig(), 64, True
    if train is not None:
        own = {"--block": block, "--channels": channels, "--causal/--bidirectional": causal}
        for option, value in own.items():
            if value is not None:
                raise ConfigError(
                    f"{option}: expected none with --train, whose recipe says it, got {value}; leave it out"
                )
        model = recipe_model(train, changes, chosen.type)
        assert isinstance(model.mixer, TCNConfig)
        base, width, direction = model.mixer, model.d_model, model.causal
    elif block == "residual":
        base = TCNConfig(**_PAPER)
    return Size(
        length=length,
        batch=batch,
        channels=channels or width,
        causal=direction if causal is None else causal,
        base=base,
        device=chosen,
        dtype=getattr(torch, dtype or ("bfloat16" if chosen.type == "cuda" else "float32")),
    )


def _measure(
    console: Console,
    size: Size,
    structures: list[Structure],
    limits: Limits,
    measure: int,
    seconds: float,
    refit: bool,
    command: str,
) -> SearchReport:
    """Run the search with a line of progress."""
    from tcnca.search import run_search

    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar = progress.add_task("measuring", total=None)

    def show(purpose: str, structure: Structure, done: int, total: int) -> None:
        progress.update(bar, completed=done, total=total, description=f"{purpose}: {structure}")
        if done == 0 and not console.is_terminal:
            typer.echo(f"{purpose} …")

    with progress:
        return run_search(
            size,
            limits=limits,
            structures=structures,
            count=measure,
            seconds=seconds,
            refit=refit,
            command=command,
            on_measured=show,
        )


def _stopped_report(
    folder: Path, size: Size, limits: Limits, recipe: str, changes: list[str], budget: float | None
) -> SearchReport | None:
    """Return the report of a search that was stopped in a directory; None if there is none."""
    from tcnca.search.halving import read_report

    report = read_report(folder)
    if report is None or report.training is None:
        return None
    found = {"size": report.size, "limits": report.limits}
    found |= {name: getattr(report.training, name) for name in ("recipe", "changes", "budget")}
    wanted = {"size": size.facts(), "limits": limits, "recipe": recipe, "changes": changes}
    wanted["budget"] = budget or report.training.budget
    differing = [name for name in wanted if found[name] != wanted[name]]
    if differing and not report.training.rungs:
        return None  # nothing was trained
    if differing:
        raise ConfigError(
            f"{folder}: holds another search, which differs in {', '.join(differing)}; choose another directory with "
            f"--out, or remove this one"
        )
    return report


def _train(
    report: SearchReport,
    recipe: str,
    changes: list[str],
    budget: float,
    begun: float,
    count: int | None,
    folder: Path,
    device: str | None,
    jobs: int,
) -> tuple[SearchReport, str]:
    from tcnca.search.halving import FINALISTS, start, train_finalists

    if report.training is None:
        report = start(report, recipe, changes, budget, time.monotonic() - begun, count or FINALISTS)
    console = Console(emoji=False, highlight=False, markup=False, soft_wrap=True)
    return train_finalists(report, folder, console, device=device, jobs=jobs)
