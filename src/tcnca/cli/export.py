"""`tcnca export`: a trained model as an ONNX file, for Hugging Face, or as a folder of smaller weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from tcnca import pretrained
from tcnca.cli.reporting import OptionalRun
from tcnca.errors import ConfigError, format_score, plural
from tcnca.extras import require

if TYPE_CHECKING:
    from tcnca.export import Graph, OnnxExport
    from tcnca.models.serialization import SavedDtype


def export(
    run: OptionalRun = None,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="The ONNX file to write.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The folder to write: the model, and what `tcnca eval` needs, without checkpoints."
        ),
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder to write for Hugging Face: `AutoModelForCausalLM.from_pretrained(FOLDER)`.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(help="With --model: data type of the weights in the file. (default: that of the run or model)"),
    ] = None,
    step: Annotated[
        bool | None,
        typer.Option(
            "--step/--sequence",
            help="With --onnx: one time step with the state in and out, or whole sequences. (default: a step of a "
            "language model, sequences of any other)",
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="With --onnx: time steps of a sequence. (default: any number)")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="With --onnx: number of sequences. (default: any number)")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file or model.")] = False,
) -> None:
    """Write a trained model to an ONNX file, to a folder that takes less space than a run, or for Hugging Face.

    The ONNX file takes raw values, and is compared with PyTorch if ONNX Runtime is installed. Its metadata has what
    else a program needs: class names, byte map, shapes of the state.

    A folder is used like a run: `tcnca eval FOLDER`, `tcnca.load(FOLDER)`. With --dtype int8 it takes a quarter of the
    space, and the model is computed in float32 as before.
    """
    given = [name for name, value in {"--onnx": onnx, "--model": model, "--hf": hf}.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(f"--onnx, --model, --hf: expected one of them, got {' and '.join(given) or 'none'}")
    if dtype is not None and model is None:
        raise ConfigError(
            f"--dtype: expected it with --model, got {given[0]}, whose files are in float32; leave it out"
        )
    for option, value in {"--step": step, "--length": length, "--batch-size": batch_size}.items():
        if value is not None and onnx is None:
            raise ConfigError(f"{option}: expected it with --onnx, got {given[0]}; leave it out")
    if onnx is not None:
        _export_onnx(run, onnx, step, length, batch_size, best, force)
    elif model is not None:
        _export_model(run, model, dtype, best, force)
    elif hf is not None:
        _export_hf(run, hf, best, force)


def _export_onnx(
    run: Path | None,
    onnx: Path,
    step: bool | None,
    length: int | None,
    batch_size: int | None,
    best: bool,
    force: bool,
) -> None:
    require("onnx", "--onnx")
    if onnx.exists() and not force:
        raise ConfigError(f"--onnx: expected a new file, got {onnx}, which exists; --force replaces it")

    from tcnca.export import export_onnx
    from tcnca.inference import load

    graph: Graph | None = None if step is None else "step" if step else "sequence"
    with Console(stderr=True).status(f"exporting {run or pretrained.NAME}"):
        done = export_onnx(load(run, best=best), onnx, graph, length=length, batch_size=batch_size)
    _print(done)


def _export_model(run: Path | None, folder: Path, dtype: SavedDtype | None, best: bool, force: bool) -> None:
    from tcnca.inference import export_model
    from tcnca.models.serialization import saved_dtype
    from tcnca.training.provenance import RECIPE

    export_model(run, folder, dtype, best=best, force=force)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    weights = f"weights in {saved_dtype(folder) or dtype or 'the data type of the run'}"
    typer.echo(f"wrote {folder}: {weights}, {size / 1e6:,.1f} MB in all")
    evaluated = f"tcnca eval {folder}, or in Python with " if (folder / RECIPE).is_file() else ""
    typer.echo(f'use it like a run: {evaluated}tcnca.load("{folder}")')


def _export_hf(run: Path | None, folder: Path, best: bool, force: bool) -> None:
    require("hf", "--hf")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not force:
        raise ConfigError(f"--hf: expected a new or empty folder, got {folder}, which exists; --force writes into it")

    from tcnca.hf import save_pretrained
    from tcnca.inference import load

    name = save_pretrained(load(run, best=best), folder, about=_describe_training(run))
    typer.echo(f"wrote {folder}: the model, its tokenizer and a model card (README.md)")
    typer.echo(f'use it: import tcnca.hf, then transformers.{name}.from_pretrained("{folder}")')


def _describe_training(run: Path | None) -> str:
    """Return how a run was trained and what it scored, for a model card; nothing is known of other models."""
    from tcnca.training.provenance import read_launches
    from tcnca.training.report import read_result

    folder = pretrained.FOLDER if run is None else run
    launches, result = read_launches(folder), read_result(folder)
    if result is None:
        return ""
    scores = ", ".join(f"{split} {format_score(score.value)}" for split, score in result.scores.items())
    metric = next((f" ({score.metric})" for score in result.scores.values()), "")
    how = f" with `{launches[0].command}`" if launches else ""
    return (
        f"Trained{how} on {result.source}, {plural(result.step, 'step')}, {result.tokens:,} tokens: {scores}{metric}."
    )


def _print(done: OnnxExport) -> None:
    what = "one step" if done.graph == "step" else "whole sequences"
    typer.echo(f"wrote {done.path}: {what}, {done.path.stat().st_size / 1e6:,.1f} MB")
    width = max(map(len, (*done.inputs, *done.outputs)))
    for kind, tensors in (("input", done.inputs), ("output", done.outputs)):
        for name, (dtype, shape) in tensors.items():
            typer.echo(f"{kind:6}  {name:{width}}  {dtype:7}  [{', '.join(map(str, shape))}]")
    if done.difference is None:
        typer.echo("not compared with PyTorch: onnxruntime is not installed (pip install 'tcnca[onnx]')")
    else:
        typer.echo(f"largest difference between ONNX Runtime and PyTorch: {done.difference:.1e}")
