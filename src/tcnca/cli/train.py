"""`tcnca train`, `tcnca eval` and `tcnca compare`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tcnca.cli.boundary import continue_with, exit_code
from tcnca.cli.completion import complete_recipe, complete_run
from tcnca.cli.reporting import Device, check_changes, parse_duration
from tcnca.errors import ConfigError, escape_control
from tcnca.extras import check_plot_path
from tcnca.recipes import find

if TYPE_CHECKING:
    from tcnca.training import Result

_Changes = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as lr=0.01 num_layers=4.")
]


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            autocompletion=complete_recipe,
            help="A recipe that `tcnca recipes` lists, a YAML file, or, with --resume, a run directory.",
        ),
    ],
    changes: _Changes = None,
    data: Annotated[str, typer.Option(help="Data set, file or folder; the same as data=X.")] = "",
    out: Annotated[Path | None, typer.Option(help="Run directory. (default: runs/RECIPE)")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, or start a new run if there is none.")
    ] = False,
    budget: Annotated[str, typer.Option(help="Time to train, such as 90s, 20m or 2h, instead of max_steps.")] = "",
    device: Device = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Check and print the recipe, then exit.")
    ] = False,
) -> None:
    """Train a model from a recipe. On several devices: `torchrun --nproc-per-node 8 -m tcnca train RECIPE`."""
    changes = [*([f"data={data}"] if data else []), *(changes or [])]
    check_changes(changes, ("--data", "--out", "--resume", "--budget", "--device", "--print-config"))
    seconds = parse_duration("--budget", budget)
    name = Path(recipe).stem
    if os.path.isfile(Path(recipe) / "recipe.yaml"):  # a run directory
        recipe, out = str(Path(recipe) / "recipe.yaml"), out or Path(recipe)
    find(recipe)  # answers a misspelled name before PyTorch is imported
    if device != "cpu" and not print_config:
        threading.Thread(target=_create_gpu_context, daemon=True).start()
    from tcnca.training import Trainer, load_recipe
    from tcnca.training.provenance import command_line

    options = [*(["--budget", budget] if budget else []), *(["--device", device] if device else [])]
    arguments = ["train", recipe, *changes, *options]
    again = command_line([*arguments, *(["--out", str(out)] if out else []), "--resume"])
    with continue_with(f"continue with\n{again}"):
        wanted = load_recipe(recipe).override(changes)
        if print_config:
            wanted.validate()
            typer.echo(wanted.to_yaml().rstrip())
            return
        trainer = Trainer(
            wanted,
            out or Path("runs") / name,
            budget=seconds,
            resume=resume,
            device=device,
            name=name,
            command=arguments,
        )
        result = trainer.fit()
    if trainer.dist.is_main:
        _print_result(trainer.out, result, again)
    if result.stopped:
        raise typer.Exit(exit_code(result.stopped))


def _create_gpu_context() -> None:
    """Create the context that PyTorch will use on the GPU, which takes seconds, while PyTorch is imported."""
    with contextlib.suppress(OSError, AttributeError):  # there is no driver
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        driver.cuInit(0)
        # Kept until the process ends. Without a GPU it fails, and PyTorch will say what is wrong.
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), int(os.environ.get("LOCAL_RANK", 0)))


def _print_result(out: Path, result: Result, again: str) -> None:
    from tcnca.training.report import CURVES, REPORT, cost_rows, score_rows

    if result.stopped:
        # Nobody reads the standard output after SIGPIPE.
        text = f"stopped by {result.stopped} after step {result.step:,}; continue with\n{again}"
        typer.echo(text, err=result.stopped == "SIGPIPE")
        return
    console = Console(emoji=False, highlight=False)
    scores = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("split", "metric", "value", "count"):
        scores.add_column(column, justify="right" if column in ("value", "count") else "left")
    for row in score_rows(result):
        scores.add_row(*row)
    costs = Table(box=None, show_header=False, pad_edge=False)
    for name, value in cost_rows(result):
        costs.add_row(name, value)
    console.print(scores, costs)
    curves = f", {CURVES}" if (out / CURVES).is_file() else ""
    typer.echo(f"\nThe run is in {out}: the model, {REPORT}{curves} and checkpoints.")


def eval_(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_run,
            help="Run directory, or an exported model. (default: the pretrained model, on EnWik8)",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="How to measure, such as data.task.carry_state=false eval.batch_size=8."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    device: Device = None,
) -> None:
    """Evaluate a trained model on a split."""
    changes = changes or []
    if run is not None and re.match(r"[\w.]+=", run) and not os.path.exists(run):
        changes = [run, *changes]
        run = None

    from tcnca.training import evaluate_run

    evaluate_run(None if run is None else Path(run), changes, split=split, best=best, device=device)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", autocompletion=complete_run, help="Run directories.")],
    reach: Annotated[
        list[float] | None,
        typer.Option(metavar="SCORE", help="Also print when a validation first reached this score; can be repeated."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw validations over steps and time into this PNG, SVG or PDF file.")
    ] = None,
) -> None:
    """Compare runs: scores, steps, time, speed and memory, as a table in Markdown for each metric.

    tcnca compare runs/enwik8-fast-* --reach 1.3 --reach 1.2 --plot curves.png

    Runs that are not finished are compared by what they have logged. Times are those of training, with compilation.
    """
    if plot is not None:
        check_plot_path(plot)

    from tcnca.training.comparison import comparison_rows, group_by_metric, read_runs, save_comparison
    from tcnca.training.report import markdown_table

    groups = group_by_metric(read_runs(runs))
    if len(groups) > 1 and (reach or plot is not None):
        metrics = escape_control(" and ".join(groups))
        raise ConfigError(f"{'--reach' if reach else '--plot'}: expected runs with one metric, got {metrics}")
    for place, (metric, found) in enumerate(groups.items()):
        titles, *body = comparison_rows(found, reach or [])
        typer.echo(("\n" if place else "") + escape_control(markdown_table(titles, body), "\n"))
        if metric:
            typer.echo(f"\nScores: {escape_control(metric)}.")
        if plot is not None:
            save_comparison(found, plot)
            typer.echo(f"The validations are drawn in {plot}.")
