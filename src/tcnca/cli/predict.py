"""`tcnca predict`: label the rows of a file, or continue series."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tcnca.cli.reporting import Threads, open_stdout, progress_bar, use_threads

if TYPE_CHECKING:
    from tcnca.inference import PredictSummary


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="Run directory, or folder of a saved model.")],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="A table (.csv, .tsv, .jsonl), lines (.txt), arrays (.npy, .npz), - for lines of standard input, or "
            "texts.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File: .csv, .tsv, .jsonl, .npz or .npy; - for standard output. If the command ends early, what was "
            "predicted is in FILE.partial. (default: -)",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Time steps of a forecast.")] = 1,
    probabilities: Annotated[bool, typer.Option(help="Write the probability of each class.")] = True,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences that are computed at once. (default: depends on their lengths)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default: a GPU if there is one)")] = None,
    threads: Threads = None,
    format: Annotated[
        Literal["csv", "tsv", "jsonl", "text"] | None,
        typer.Option(help="Format of standard input, or of a file without suffix. (default: text, one per line)"),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Column of the text. (default: as in training)")] = None,
    second: Annotated[str | None, typer.Option(help="Column of the second text of a pair.")] = None,
    values: Annotated[str | None, typer.Option(help="Column or array with the sequences of numbers.")] = None,
    label: Annotated[
        str | None,
        typer.Option(help="Column or array with the truth, '' for no comparison. (default: as in training)"),
    ] = None,
) -> None:
    """Predict classes, values or forecasts with a trained model: the rows of the input with predictions appended."""
    from tcnca.inference import ColumnOptions, PredictOptions, load, predict_inputs
    from tcnca.training.distributed import dist_context

    out = None if out is not None and str(out) == "-" else out
    options = PredictOptions(
        out=out,
        format=format,
        columns=ColumnOptions(text=text, second=second, values=values, label=label),
        probabilities=probabilities,
        steps=steps,
        batch_size=batch_size,
    )
    with dist_context(device) as dist, use_threads(threads):
        model = load(run, dist.device, best=best)
        # A bar would mix with predictions in the terminal, and texts in the arguments are few.
        shows = (out is not None or not sys.stdout.isatty()) and (inputs == ["-"] or os.path.isfile(inputs[0]))
        with progress_bar(f"predicting {'standard input' if inputs == ['-'] else inputs[0]}", shows) as progress:
            summary = predict_inputs(model, inputs, options, stdout=open_stdout(), progress=progress)
    _print_summary(summary, out, model.preprocessing.max_length)


def _print_summary(summary: PredictSummary, out: Path | None, max_length: int | None) -> None:
    """Print to standard error, as standard output may be a file of predictions."""
    if summary.cut:
        typer.echo(f"{summary.cut:,} sequences were cut to {max_length:,}, as in training (max_length)", err=True)
    if summary.unknown:
        typer.echo(
            f"warning: {summary.unknown:,} labels are not classes of the model, and count as wrong; the first: "
            f"{summary.first_unknown}; --label '' predicts without comparing",
            err=True,
        )
    if summary.metric is not None:
        typer.echo(f"{summary.metric} {summary.score:.4f} (of {summary.compared:,})", err=True)
    if out is not None:
        typer.echo(f"wrote {summary.count:,} predictions to {out}", err=True)
