"""`tcnca bench`: how fast operators, layers and models are, against their rivals."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from tcnca.bench import DTYPES, Entry, Report, Result, Settings, read_json, run_suite, save_plot, write_json
from tcnca.bench.plot import check_picture
from tcnca.bench.report import short_time
from tcnca.cli.bench_tables import entry_tables, ratio_table, reasons, sizes_text
from tcnca.cli.reporting import explained, say
from tcnca.errors import ConfigError
from tcnca.training.distributed import check_device
from tcnca.training.provenance import command_line

app = typer.Typer(
    name="bench",
    help="Measure speed and memory, against the FFT-EMA, the scan, PyTorch's convolutions and MEGA.",
    no_args_is_help=True,
)

_Json = Annotated[Path | None, typer.Option("--json", help="File to write all numbers to.")]
_Plot = Annotated[Path | None, typer.Option("--plot", help="Picture to draw: .png, .svg or .pdf.")]
_Device = Annotated[str | None, typer.Option(help="cpu or cuda. (default: a GPU where there is one)")]
_Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16. (default: bfloat16 on a GPU, float32 on a CPU)")
]
_Lengths = Annotated[
    str | None, typer.Option(help="Tokens of a sequence, such as 8192,131072. (default: by benchmark and device)")
]
_Batches = Annotated[
    str | None, typer.Option(help="Sequences side by side, such as 1,8. (default: by benchmark and device)")
]
_Only = Annotated[
    str | None, typer.Option(help="Contestants, or parts of their names, such as tcn,scan. (default: all)")
]
_Seconds = Annotated[
    float, typer.Option(min=0.0, help="Time to spend on each contestant at each size, as called and as a graph.")
]
_Repeat = Annotated[int | None, typer.Option(min=1, help="Least number of runs. (default: 10 on a GPU, 3 on a CPU)")]
_Layers = Annotated[
    int | None, typer.Option(min=1, help="Layers of the models. (default: those of the presets, on a CPU 2)")
]
_Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Whether to compile as well. (default: on a GPU)")
]


@app.command()
def ops(
    lengths: _Lengths = None,
    batches: _Batches = None,
    channels: Annotated[int, typer.Option(min=1, help="Channels.")] = 64,
    kernel_size: Annotated[int, typer.Option(min=2, help="Taps of the TCN's kernels.")] = 17,
    depth: Annotated[int, typer.Option(min=2, help="Blocks of the TCN.")] = 4,
    dtype: _Dtype = None,
    only: _Only = None,
    seconds: _Seconds = 0.2,
    repeat: _Repeat = None,
    device: _Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """The TCN against the EMA over the length of the sequence (the paper's Figure 2), and chunked attention.

    The TCN's dilation factor is the least whose receptive field covers the sequence.
    """
    with explained():
        settings = _settings(device, dtype, lengths, batches, only, seconds, repeat)
        sizes = {"channels": channels, "kernel_size": kernel_size, "depth": depth}
        _run("ops", _changed(settings, **sizes), json, plot)


@app.command()
def layer(
    lengths: _Lengths = None,
    batches: _Batches = None,
    dtype: _Dtype = None,
    compiled: _Compile = None,
    only: _Only = None,
    seconds: _Seconds = 0.5,
    repeat: _Repeat = None,
    device: _Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """One whole layer of the EnWik8 models, TCNCA's and MEGA's, forward and backward."""
    with explained():
        settings = _settings(device, dtype, lengths, batches, only, seconds, repeat)
        _run("layer", _changed(settings, compile=_compiles(settings, compiled)), json, plot)


@app.command()
def model(
    lengths: _Lengths = None,
    batches: _Batches = None,
    layers: _Layers = None,
    dtype: _Dtype = None,
    compiled: _Compile = None,
    only: _Only = None,
    seconds: _Seconds = 2.0,
    repeat: _Repeat = None,
    device: _Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """A step of training of the EnWik8 models, TCNCA and MEGA: time, tokens a second and peak memory."""
    with explained():
        settings = _settings(device, dtype, lengths, batches, only, seconds, repeat)
        _run("model", _changed(settings, num_layers=layers, compile=_compiles(settings, compiled)), json, plot)


@app.command()
def lra(
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens to cut sequences to. (default: none on a GPU, 1024 on a CPU)")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences side by side. (default: by task on a GPU, 1 on a CPU)")
    ] = None,
    layers: _Layers = None,
    dtype: _Dtype = None,
    only: _Only = None,
    seconds: _Seconds = 0.5,
    repeat: _Repeat = None,
    device: _Device = None,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """The encoders of Long-Range Arena, TCNCA against MEGA-chunk: inference and a step of training."""
    with explained():
        settings = _settings(device, dtype, _text(max_length), _text(batch), only, seconds, repeat)
        _run("lra", _changed(settings, num_layers=layers), json, plot)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="What --json has written, one or more.")],
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture to draw, of one file.")] = None,
) -> None:
    """Print, or draw, what was measured before; of several files one table of ratios."""
    console = Console(emoji=False, highlight=False)
    with explained():
        if plot is not None and len(files) > 1:
            raise ConfigError(f"--plot: got {len(files)} files, allowed is one")
        reports = [read_json(path) for path in files]
        if plot is not None:
            _draw(console, plot, reports[0])
        for report in reports:
            say(console, f"{report.suite}: {_where(report)}, {report.begun}, commit {report.commit or 'none'}")
            if len(reports) == 1:
                _tell_entries(console, report)
        _tell_ratios(console, reports)


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{name}: got {text!r}, allowed are whole numbers of at least 1, such as 1,8")
    return numbers


def _settings(
    device: str | None,
    dtype: str | None,
    lengths: str | None,
    batches: str | None,
    only: str | None,
    seconds: float,
    repeat: int | None,
) -> Settings:
    check_device(device)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    kind = dtype or ("bfloat16" if on_gpu else "float32")
    if kind not in DTYPES:
        raise ConfigError(f"--dtype: got {kind}, allowed are {', '.join(DTYPES)}")
    return Settings(
        device=where,
        dtype=DTYPES[kind],
        lengths=_numbers("--lengths", lengths),
        batches=_numbers("--batches", batches),
        only=tuple(part.strip() for part in only.split(",")) if only else (),
        seconds=seconds,
        repeat=repeat or (10 if on_gpu else 3),
    )


def _changed(settings: Settings, **changes: Any) -> Settings:
    return dataclasses.replace(settings, **changes)


def _compiles(settings: Settings, wanted: bool | None) -> bool:
    return settings.device.type == "cuda" if wanted is None else wanted


def _run(suite: str, settings: Settings, json: Path | None, plot: Path | None) -> None:
    """Measure, print, write and draw, also what was measured until Ctrl-C, and write after every contestant."""
    console = Console(emoji=False, highlight=False)
    if plot is not None:
        check_picture(plot)
    if json is not None and (json.is_dir() or not json.name):
        raise ConfigError(f"--json: got the folder {json}, allowed is the name of a file")
    keep = None if json is None else functools.partial(write_json, json)
    with _Bar(console) as bar:
        report = run_suite(suite, settings, command_line(sys.argv[1:]), bar, keep=keep)
    # Written first: a table that cannot be printed is not to cost the numbers.
    if keep is not None:
        keep(report)
    _tell_entries(console, report)
    _tell_ratios(console, [report])
    if json is not None:
        say(console, f"All numbers are in {json}.")
    if plot is not None:
        _draw(console, plot, report)
    if report.stopped:
        say(console, "stopped; the numbers are those measured until then")
        raise typer.Exit(130)


def _draw(console: Console, plot: Path, report: Report) -> None:
    drawn = save_plot(plot, report)
    say(console, f"The picture is {drawn}." if drawn else "Nothing was timed that could be drawn.")


def _where(report: Report) -> str:
    facts = report.hardware
    size = f"{facts['memory_gib']} GiB" if "memory_gib" in facts else f"{facts['threads']} threads"
    return f"{facts['name']}, {size}, {report.settings['dtype']}, torch {report.versions['torch']}"


def _tell_entries(console: Console, report: Report) -> None:
    say(console, _where(report))
    if report.floors:
        copied, product = report.floors["bandwidth"] / 1e9, report.floors["rate"] / 1e9
        say(console, f"floors: a copy moves {copied:,.0f} GB/s, a matrix product computes {product:,.0f} GFLOP/s")
    if report.hardware["device"] == "cpu":
        say(console, "On a CPU sizes are scaled down unless they are given: times and ratios are not the paper's.")
    for table in entry_tables(report):
        console.print(table)
    for line in reasons(report.entries):
        say(console, line)


def _tell_ratios(console: Console, reports: list[Report]) -> None:
    table = ratio_table([row for report in reports for row in report.ratios])
    if table is not None:
        console.print(table)


class _Bar:
    """Tells how far a benchmark is: a bar in a terminal, a line for each contestant elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), text)
        self._progress = Progress(
            *columns, console=console, transient=True, expand=True, disable=not console.is_terminal
        )
        self._bar = self._progress.add_task("what the machine can do at best", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, entry: Entry, done: int, total: int) -> None:
        """Say what is measured now."""
        text = f"{entry.label}, {sizes_text(entry.sizes)}"
        self._progress.update(self._bar, completed=done, total=total, description=text)

    def ended(self, result: Result) -> None:
        """Say how it went, where there is no bar."""
        if not self.console.is_terminal:
            times = ", ".join(f"{part} {short_time(result.seconds(part))}" for part in result.times)
            say(self.console, f"{result.label}, {sizes_text(result.sizes)}: {times or result.status}")
