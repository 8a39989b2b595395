"""`tcnca predict`: label the rows of a file, or continue series."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tcnca.cli.reporting import Device, Run, Threads, open_stdout, progress_bar
from tcnca.errors import format_interval, format_score, plural

if TYPE_CHECKING:
    from tcnca.inference import PredictSummary


def predict(
    run: Run,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="A table of texts or numbers (.csv, .tsv, .jsonl), lines (.txt), arrays (.npy, .npz), - for lines of "
            "standard input, or texts.",
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
    device: Device = None,
    threads: Threads = None,
    format: Annotated[
        Literal["csv", "tsv", "jsonl", "text"] | None,
        typer.Option(help="Format of standard input, or of a file without suffix. (default: text, one per line)"),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Column of the text. (default: as in training)")] = None,
    second: Annotated[str | None, typer.Option(help="Column of the second text of a pair.")] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="Column or array with the sequences, or columns of numbers as a,b,c. (default: as in training)"
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Array with the length of each sequence, '' if no sequence has padding. (default: as in training)"
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="Column or array with the truth, '' for no comparison. (default: as in training)"),
    ] = None,
) -> None:
    """Predict classes, values or forecasts with a trained model: the rows of the input with predictions appended."""
    from tcnca.data.custom.arrays import ARRAY_SUFFIXES
    from tcnca.inference import ColumnOptions, PredictOptions, load, predict_inputs
    from tcnca.models.prediction import prediction_kind
    from tcnca.training.distributed import dist_context
    from tcnca.training.threads import use_threads

    out = None if out is not None and str(out) == "-" else out
    options = PredictOptions(
        out=out,
        format=format,
        columns=ColumnOptions(text=text, second=second, values=values, lengths=lengths, label=label),
        probabilities=probabilities,
        steps=steps,
        batch_size=batch_size,
    )
    with dist_context(device) as dist, use_threads(threads):
        model = load(run, dist.device, best=best)
        prediction_kind(model, str(run))
        # A bar would mix with predictions in the terminal, and texts in the arguments are few.
        shows = (out is not None or not sys.stdout.isatty()) and (inputs == ["-"] or os.path.isfile(inputs[0]))
        unit = "rows" if inputs == ["-"] else "bytes"
        unit = "sequences" if Path(inputs[0]).suffix.lower() in ARRAY_SUFFIXES else unit
        with progress_bar(f"predicting {'standard input' if inputs == ['-'] else inputs[0]}", shows, unit) as progress:
            summary = predict_inputs(model, inputs, options, stdout=open_stdout(), progress=progress)
    _print_summary(summary, out, model.preprocessing.max_length)


def _print_summary(summary: PredictSummary, out: Path | None, max_length: int | None) -> None:
    """Print to standard error, as standard output may be a file of predictions."""
    if summary.warning:
        typer.echo(f"warning: {summary.warning}", err=True)
    if not summary.count:
        typer.echo("the input has a header, but no rows to predict", err=True)
    if summary.cut:
        typer.echo(f"cut {plural(summary.cut, 'sequence')} to {max_length:,}, as in training (max_length)", err=True)
    if summary.unknown:
        typer.echo(
            f"warning: {plural(summary.unknown, 'label')} outside the classes of the model, counted as wrong; the "
            f"first: {summary.first_unknown}; --label '' predicts without comparing",
            err=True,
        )
    if summary.metric is not None:
        # Errors are in the units of the data, and can be of any size.
        score = format_score(summary.score)
        interval = format_interval(summary.metric, summary.score, summary.compared)
        typer.echo(f"{summary.metric} {score} (of {summary.compared:,}){interval}", err=True)
    if out is not None:
        typer.echo(f"wrote {plural(summary.count, 'prediction')} to {out}", err=True)
