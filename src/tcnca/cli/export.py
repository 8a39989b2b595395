"""`tcnca export`: a trained model as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tcnca.errors import ConfigError

if TYPE_CHECKING:
    from tcnca.export import Graph, OnnxExport


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="Run directory, or folder of a saved model.")],
    onnx: Annotated[Path, typer.Option(metavar="FILE", help="The ONNX file to write.")],
    step: Annotated[
        bool | None,
        typer.Option(
            "--step/--sequence",
            help="One time step with the state in and out, or whole sequences. (default: a step of a language model, "
            "sequences of any other)",
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Time steps of a sequence. (default: any number)")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Number of sequences. (default: any number)")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a trained model to an ONNX file, and compare it with PyTorch if ONNX Runtime is installed.

    The file takes raw values. Its metadata has what else a program needs: class names, byte map, shapes of the state.
    """
    if onnx.exists() and not force:
        raise ConfigError(f"--onnx: expected a new file, got {onnx}, which exists; --force replaces it")

    from tcnca.export import export_onnx
    from tcnca.inference import load

    graph: Graph | None = None if step is None else "step" if step else "sequence"
    with Console(stderr=True).status(f"exporting {run}"):
        done = export_onnx(load(run, best=best), onnx, graph, length=length, batch_size=batch_size)
    _print(done)


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
