"""`tcnca export`: a trained model as an ONNX file, or as a folder with smaller weights and without checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from tcnca import pretrained
from tcnca.errors import ConfigError

if TYPE_CHECKING:
    from tcnca.export import Graph, OnnxExport
    from tcnca.models.serialization import SavedDtype


def export(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|MODEL", help="Run directory, or folder of a saved model. (default: the pretrained model)"
        ),
    ] = None,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="The ONNX file to write.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The folder to write: the model, and what `tcnca eval` needs, without checkpoints."
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
    """Write a trained model to an ONNX file, or to a folder that takes less space than a run.

    The ONNX file takes raw values, and is compared with PyTorch if ONNX Runtime is installed. Its metadata has what
    else a program needs: class names, byte map, shapes of the state.

    A folder is used like a run: `tcnca eval FOLDER`, `tcnca.load(FOLDER)`. With --dtype int8 it takes a quarter of the
    space, and the model is computed in float32 as before.
    """
    if (onnx is None) == (model is None):
        raise ConfigError(f"--onnx, --model: expected one of them, got {'neither' if onnx is None else 'both'}")
    if onnx is not None:
        if dtype is not None:
            raise ConfigError("--dtype: expected it with --model, got --onnx, whose files are in float32; leave it out")
        _export_onnx(run, onnx, step, length, batch_size, best, force)
        return
    assert model is not None
    for option, value in {"--step": step, "--length": length, "--batch-size": batch_size}.items():
        if value is not None:
            raise ConfigError(f"{option}: expected it with --onnx, got --model; leave it out")
    _export_model(run, model, dtype, best, force)


def _export_onnx(
    run: Path | None,
    onnx: Path,
    step: bool | None,
    length: int | None,
    batch_size: int | None,
    best: bool,
    force: bool,
) -> None:
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
