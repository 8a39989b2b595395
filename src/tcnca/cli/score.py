"""`tcnca score`: the bits per byte of a text, in total, along it and by line."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tcnca.cli.reporting import ProgressReporter, escape_controls
from tcnca.errors import ConfigError, DataError, InputError, Stopped, VocabularyError
from tcnca.files import atomic_path, atomic_write, to_json

if TYPE_CHECKING:
    import torch

    from tcnca.models import SequenceModel
    from tcnca.scoring import Place, TextProfile

_PIECE = 2**16
"""Bytes that are read at once."""
STDIN = "-"


def score(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN... FILE", help="Run directories or folders of saved models, then a text; - for standard input."
        ),
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write totals, curve and places as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the bits per byte along the text.")
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the bits of each line: CSV if the name ends so, else JSONL; - for output."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Number of most surprising places to show.")] = 10,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. (default: a GPU if there is one)")] = None,
) -> None:
    """Measure the bits per byte of a text with one or several language models, and find what surprises them.

    The text is read once, in bounded memory. Each byte is predicted from all before it; `tcnca eval` gives the same
    total with data.task.segments=1.
    """
    *runs, file = paths
    if not runs:
        raise ConfigError(f"RUN... FILE: expected at least one run and a text, got {file} only")
    if lines is not None and len(runs) > 1:
        raise ConfigError(f"--lines: expected one run, got {len(runs)}")
    if str(file) != STDIN and (file.is_dir() or not file.exists()):
        reason = "a folder" if file.is_dir() else "nothing of this name"
        raise DataError(f"{file}: expected a file to score, got {reason}")

    from tcnca.scoring import Lines, TextProfile, draw_profiles
    from tcnca.streaming import Stream
    from tcnca.training.distributed import dist_context

    console = Console(emoji=False, highlight=False, stderr=str(lines) == STDIN)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(dist_context(device)).device
        streams = [Stream(load_model(run, place)) for run in runs]
        profiles = [TextProfile(top) for _ in runs]
        write = None if lines is None else stack.enter_context(_line_writer(lines))
        by_line = Lines()
        stopped: BaseException | None = None
        try:
            with contextlib.closing(_read(file)) as pieces:
                for data in pieces:
                    for stream, profile in zip(streams, profiles, strict=True):
                        bits = stream.score(data)
                        profile.add(data, bits)
                    if write is not None:
                        write(by_line.add(data, bits))
        except (KeyboardInterrupt, Stopped) as error:
            stopped = error  # after what was measured so far is written
        except VocabularyError as error:
            raise VocabularyError(f"{file}: {error}") from error
        if write is not None:
            write(by_line.finish())
    if not profiles[0].count and stopped is None:
        raise InputError(f"{file}: expected a text, got an empty one")
    _print(console, runs, profiles)
    if json_file is not None:
        atomic_write(json_file, to_json(_content(file, runs, streams, profiles, stopped is None), indent=1) + "\n")
    if plot is not None:
        draw_profiles(plot, file.name, [(run.name, profile) for run, profile in zip(runs, profiles, strict=True)])
    if stopped is not None:
        raise stopped


def load_model(run: Path, device: torch.device) -> SequenceModel:
    """Load a model, with the chunk size with which its run is evaluated."""
    from tcnca.models import load
    from tcnca.training import load_recipe
    from tcnca.training.provenance import RECIPE

    model = load(run, device)
    if model.config.attention is not None and (run / RECIPE).is_file():
        chunk_size = load_recipe(str(run / RECIPE)).eval.chunk_size
        if chunk_size is not None:
            model.set_chunk_size(chunk_size)
    return model


def _read(file: Path) -> Generator[bytes, None, None]:
    """Yield the pieces of a file, or of the standard input as they come, and show the progress."""
    with ProgressReporter(Console(stderr=True, emoji=False, highlight=False)) as reporter:
        try:
            source: Any = sys.stdin.buffer if str(file) == STDIN else file.open("rb")
            with contextlib.nullcontext() if str(file) == STDIN else source:
                # Pipes and devices have no size.
                done, size = 0, None if str(file) == STDIN else file.stat().st_size or None
                while data := source.read1(_PIECE):
                    yield data
                    done += len(data)
                    reporter("scoring", done, size)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def _line_writer(path: Path) -> Iterator[Callable[[Iterator[Place]], None]]:
    """Yield a function that writes the scores of lines."""
    with contextlib.ExitStack() as stack:
        if str(path) == STDIN:
            file: Any = sys.stdout
        else:
            temporary = stack.enter_context(atomic_path(path))
            file = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
        rows = csv.writer(file) if path.suffix.lower() == ".csv" else None
        if rows is not None:
            rows.writerow(["line", "offset", "bytes", "bits", "bits_per_byte", "text"])

        def write(found: Iterator[Place]) -> None:
            for place in found:
                if rows is not None:
                    rows.writerow(place.to_dict().values())
                else:
                    file.write(json.dumps(place.to_dict(), ensure_ascii=False) + "\n")
            file.flush()

        yield write


def _print(console: Console, runs: list[Path], profiles: list[TextProfile]) -> None:
    totals = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    totals.add_column("run", overflow="fold")
    for column in ("bits per byte", "bytes", "bits"):
        totals.add_column(column, justify="right", no_wrap=True)
    for run, profile in zip(runs, profiles, strict=True):
        numbers = f"{profile.bits_per_byte:.4f}", f"{profile.count:,}", f"{profile.bits:,.0f}"
        totals.add_row(Text(escape_controls(str(run), "")), *numbers)
    console.print(totals)
    if len(runs) > 1 or not (places := profiles[0].places()):
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="most surprising places", title_justify="left")
    last = max(places, key=lambda place: place.offset)
    for column, greatest in (("bits per byte", 0), ("line", last.line), ("offset", last.offset)):
        table.add_column(column, justify="right", no_wrap=True, min_width=max(len(column), len(f"{greatest:,}")))
    table.add_column("text", no_wrap=True, overflow="ellipsis")
    for place in places:
        text = escape_controls(place.text.decode("utf-8", "replace"), "")
        table.add_row(f"{place.bits / place.length:.2f}", f"{place.line:,}", f"{place.offset:,}", Text(text))
    console.print(table)


def _content(
    file: Path, runs: list[Path], streams: list[Any], profiles: list[TextProfile], complete: bool
) -> dict[str, Any]:
    """Return what is written as JSON."""
    return {
        "file": str(file),
        "bytes": profiles[0].count,
        "complete": complete,
        "runs": [
            {
                "run": str(run),
                "parameters": sum(parameter.numel() for parameter in stream.model.parameters()),
                "bits": profile.bits,
                "bits_per_byte": profile.bits_per_byte,
                "curve": {
                    "bytes_per_point": profile.curve.width,
                    "bits_per_byte": [round(value, 4) for value in profile.curve.values().tolist()],
                },
                "places": [place.to_dict() for place in profile.places()],
            }
            for run, stream, profile in zip(runs, streams, profiles, strict=True)
        ],
    }
