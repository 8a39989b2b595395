"""`tcnca bench`: measure operators, layers and models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from tcnca.cli.reporting import Device
from tcnca.config import PositiveInt, check
from tcnca.errors import ConfigError, shown
from tcnca.extras import check_plot_path

if TYPE_CHECKING:
    from tcnca.bench import Report, Settings
    from tcnca.bench.case import BenchCase

app = typer.Typer(
    name="bench",
    help="Measure speed and memory against the FFT-EMA, the scan, PyTorch's convolutions and MEGA.",
    no_args_is_help=True,
)

_Json = Annotated[Path | None, typer.Option("--json", help="File for all numbers.")]
_Plot = Annotated[Path | None, typer.Option("--plot", help="Plot to write: .png, .svg or .pdf.")]
_Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Dtype, float16 in ops only. (default: bfloat16 on a GPU, float32 on a CPU)"),
]
_Lengths = Annotated[
    str | None, typer.Option(help="Sequence lengths, such as 8192,131072. (default: by suite and device)")
]
_Batches = Annotated[str | None, typer.Option(help="Batch sizes, such as 1,8. (default: by suite and device)")]
_Only = Annotated[
    str | None, typer.Option(help="Candidates, or parts of their names, such as tcn,scan. (default: all)")
]
_Seconds = Annotated[
    float, typer.Option(min=0.0, help="Time for each candidate at each size, in eager mode and as a CUDA graph.")
]
_Repeat = Annotated[int | None, typer.Option(min=1, help="Minimum number of runs. (default: 10 on a GPU, 3 on a CPU)")]
_Layers = Annotated[
    int | None, typer.Option(min=1, help="Layers of the models. (default: as in the presets, 2 on a CPU)")
]
_Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Measure compiled code as well. (default: on a GPU)")
]


@app.command()
def ops(
    lengths: _Lengths = None,
    batches: _Batches = None,
    channels: Annotated[int, typer.Option(min=1, help="Channels.")] = 64,
    kernel_size: Annotated[int, typer.Option(min=2, help="Kernel size of the TCN.")] = 17,
    depth: Annotated[int, typer.Option(min=2, help="Blocks of the TCN.")] = 4,
    dtype: _Dtype = None,
    only: _Only = None,
    seconds: _Seconds = 0.2,
    repeat: _Repeat = None,
    device: Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure TCN against EMA over the sequence length (the paper's Figure 2), and chunked attention.

    The TCN has the smallest dilation factor whose receptive field covers the sequence.
    """
    _run("ops", **locals())


@app.command()
def layer(
    lengths: _Lengths = None,
    batches: _Batches = None,
    dtype: _Dtype = None,
    compile: _Compile = None,
    only: _Only = None,
    seconds: _Seconds = 0.5,
    repeat: _Repeat = None,
    device: Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure one layer of the EnWik8 models, TCNCA and MEGA, forward and backward."""
    _run("layer", **locals())


@app.command()
def model(
    lengths: _Lengths = None,
    batches: _Batches = None,
    num_layers: _Layers = None,
    dtype: _Dtype = None,
    compile: _Compile = None,
    only: _Only = None,
    seconds: _Seconds = 2.0,
    repeat: _Repeat = None,
    device: Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure a training step of the EnWik8 models, TCNCA and MEGA: time, tokens per second and peak memory."""
    _run("model", **locals())


@app.command()
def generate(
    lengths: Annotated[
        str | None, typer.Option("--positions", help="Tokens before the first step. (default: 64,1024)")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes. (default: 1,64; on a CPU 1,8)")] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers. (default: as in the presets, 6 of width 256 on a CPU)")
    ] = None,
    dtype: _Dtype = None,
    only: _Only = None,
    seconds: _Seconds = 2.0,
    repeat: _Repeat = None,
    device: Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure the generation of a token by the EnWik8 models: the model itself, the fast step, and 8-bit weights."""
    _run("generate", **locals())


@app.command()
def lra(
    lengths: Annotated[
        int | None,
        typer.Option("--max-length", min=1, help="Longest sequence. (default: by task on a GPU, 1024 on a CPU)"),
    ] = None,
    batches: Annotated[
        int | None, typer.Option("--batch", min=1, help="Batch size. (default: by task on a GPU, 1 on a CPU)")
    ] = None,
    num_layers: _Layers = None,
    dtype: _Dtype = None,
    only: _Only = None,
    seconds: _Seconds = 0.5,
    repeat: _Repeat = None,
    device: Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure the encoders of Long-Range Arena, TCNCA against MEGA-chunk: inference and a training step.

    On a GPU the step is also measured as `runtime.cuda_graphs` launches it.
    """
    _run("lra", **locals())


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Files written by --json.")],
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot to write, of one file.")] = None,
) -> None:
    """Print or plot earlier results; several files share one table of ratios."""
    console = Console(emoji=False, highlight=False)
    from tcnca.bench import read_json

    if plot is not None and len(files) > 1:
        raise ConfigError(f"--plot: expected one file of results, got {len(files)}")
    reports = [read_json(path) for path in files]
    if plot is not None:
        _save_plot(plot, reports[0])
    for report in reports:
        typer.echo(f"{report.suite}, {report.started}, commit {report.commit or 'none'}")
        _print_results(console, report, tables=len(reports) == 1)
    _print_ratios(console, reports)


def _run(suite: str, *, json: Path | None, plot: Path | None, **options: Any) -> None:
    """Measure, print, write and plot. JSON is written after every candidate, and after Ctrl-C."""
    if plot is not None:
        check_plot_path(plot)
    console = Console(emoji=False, highlight=False)
    from tcnca.bench import run_suite, write_json
    from tcnca.bench.report import format_seconds, format_sizes
    from tcnca.training.provenance import command_line

    if json is not None and (json.is_dir() or not json.name):
        raise ConfigError(f"--json: expected the name of a file, got the directory {json}")
    settings = _settings(**options)
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), text)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar = progress.add_task("roofline", total=None)

    def on_start(case: BenchCase, index: int, total: int) -> None:
        text = f"{case.label}, {format_sizes(case.sizes)}"
        progress.update(bar, completed=index, total=total, description=text)

    def on_result(report: Report) -> None:
        if json is not None:
            write_json(json, report)
        if not console.is_terminal:
            result = report.results[-1]
            times = ", ".join(f"{phase} {format_seconds(result.seconds(phase))}" for phase in result.times)
            typer.echo(f"{result.label}, {format_sizes(result.sizes)}: {times or result.status}")

    with progress:
        report = run_suite(suite, settings, command_line(sys.argv[1:]), on_start=on_start, on_result=on_result)
    # Again, since only now the run is known to be complete.
    if json is not None:
        write_json(json, report)
    _print_results(console, report)
    _print_ratios(console, [report])
    if json is not None:
        typer.echo(f"All numbers are in {json}.")
    if plot is not None:
        _save_plot(plot, report)
    if report.interrupted:
        typer.echo("interrupted; the numbers are those measured so far")
        raise typer.Exit(130)


def _settings(
    *,
    device: str | None,
    dtype: str | None,
    lengths: str | int | None,
    batches: str | int | None,
    only: str | None,
    repeat: int | None,
    compile: bool | None = False,
    **others: Any,
) -> Settings:
    import torch

    from tcnca.bench import Settings
    from tcnca.training.distributed import check_device

    check_device(device)
    if device == "mps":
        raise ConfigError("--device: expected cpu or cuda, got mps, on which times are not measured")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = chosen.type == "cuda"
    return Settings(
        device=chosen,
        dtype=getattr(torch, dtype or ("bfloat16" if on_gpu else "float32")),
        lengths=_numbers("--lengths", lengths),
        batches=_numbers("--batches", batches),
        only=tuple(part.strip() for part in (only or "").split(",") if part.strip()),
        repeat=repeat or (10 if on_gpu else 3),
        compile=on_gpu if compile is None else compile,
        **others,
    )


def _numbers(name: str, text: str | int | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in str(text).split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ConfigError(f"{name}: expected integers of at least 1, such as 1,8, got {shown(text)}")
    for number in numbers:
        check(name, number, PositiveInt)
    return numbers


def _save_plot(path: Path, report: Report) -> None:
    from tcnca.bench import save_plot

    saved = save_plot(path, report)
    typer.echo(f"The plot is {saved}." if saved else "No plot: nothing to draw was timed.")


def _print_results(console: Console, report: Report, *, tables: bool = True) -> None:
    from tcnca.bench.report import failure_lines, result_tables

    facts = report.hardware
    size = f"{facts['memory_gib']} GiB" if "memory_gib" in facts else f"{facts.get('threads', 'unknown')} threads"
    typer.echo(f"{facts['name']}, {size}, {report.settings['dtype']}, torch {report.versions['torch']}")
    if report.roofline:
        copy, product = (report.roofline[f"{unit}_per_second"] / 1e9 for unit in ("bytes", "flops"))
        typer.echo(f"roofline: a copy moves {copy:,.0f} GB/s, a matrix product computes {product:,.0f} GFLOP/s")
    if facts["device"] == "cpu":
        typer.echo("On a CPU default sizes are smaller: times and ratios are not comparable with the paper's.")
    for table in result_tables(report) if tables else ():
        console.print(table)
    for line in failure_lines(report.results):
        typer.echo(line)


def _print_ratios(console: Console, reports: list[Report]) -> None:
    from tcnca.bench.report import ratio_table

    table = ratio_table([ratio for report in reports for ratio in report.ratios])
    if table is not None:
        console.print(table)
