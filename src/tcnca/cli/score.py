"""`tcnca score`: the bits per byte of a text, in total, along it and by line."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tcnca import pretrained
from tcnca.cli.completion import complete_run
from tcnca.cli.reporting import Device, Threads, open_stdout, progress_bar
from tcnca.errors import ConfigError, DataError, InputError, Stopped, TcncaError, escape_control, plural
from tcnca.extras import check_plot_path
from tcnca.files import atomic_path, atomic_write, partial_path, replace_file, to_json

if TYPE_CHECKING:
    from tcnca.inference.scoring import Place, TextProfile
    from tcnca.inference.streaming import Stream

_PIECE = 2**16
"""Bytes that are read at once."""
_STDIO = Path("-")
_PRETRAINED = Path(pretrained.NAME)
"""Stands for the pretrained model."""
_TOP = 10
_SHOWN_BEFORE = 16
"""Characters of a line that are printed before its most surprising place."""


def score(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN...] FILE...",
            autocompletion=complete_run,
            help="Run directories or folders of saved models (default: the pretrained model), and texts; - for "
            "standard input.",
        ),
    ],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write totals, curve and places as JSON; - for standard output."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the bits per byte along the text: .png, .svg or .pdf.")
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the bits of each line: CSV if the name ends in .csv, else JSONL; - for standard output.",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of most surprising places to show. (default: 10; in a comparison, only in --json)"
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Measure the bits per byte of texts with language models, and find what surprises them.

    Each text is read once, in bounded memory. Each byte is predicted from all before it; `tcnca eval` gives the same
    total with data.task.segments=1. Several models or texts are compared in one table.
    """
    # What is not a folder is a text.
    files = [path for path in paths if not path.is_dir()]
    _check_files(files)
    runs = [path for path in paths if path.is_dir()] or [_PRETRAINED]
    _check_outputs(files, {"--json": json_file, "--plot": plot, "--lines": lines})
    if lines is not None and len(runs) * len(files) > 1:
        raise ConfigError(f"--lines: expected one run and one text, got {len(runs)} and {len(files)}")

    if plot is not None:
        check_plot_path(plot)

    from tcnca.inference.loading import load
    from tcnca.inference.scoring import TextProfile, check_bytes, draw_profiles
    from tcnca.inference.streaming import Stream
    from tcnca.training.distributed import dist_context
    from tcnca.training.threads import use_threads

    console = Console(emoji=False, highlight=False, stderr=_STDIO in (lines, json_file))
    results: list[_Result] = []
    stopped: BaseException | None = None
    try:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(dist_context(device)).device
            stack.enter_context(use_threads(threads))
            models = [load(None if run is _PRETRAINED else run, place, best=best) for run in runs]
            for run, model in zip(runs, models, strict=True):
                check_bytes(model, str(run))
            write = None if lines is None else stack.enter_context(_line_writer(lines))
            for file in files:
                found = [
                    _Result(run, file, Stream(model), TextProfile(_TOP if top is None else top))
                    for run, model in zip(runs, models, strict=True)
                ]
                results += found
                # Bars and lines of text would mix.
                with progress_bar(f"scoring {file}", lines != _STDIO) as progress:
                    _score_file(file, found, write, progress)
    except (KeyboardInterrupt, Stopped, TcncaError) as error:
        stopped = error  # after what was measured so far is written
    results = [result for result in results if result.profile.count]
    if results:
        _print_totals(console, results)
    if len(results) == 1:
        _print_places(console, results[0], "most surprising places")
    elif top is not None:
        for result in results:
            _print_places(console, result, f"most surprising places: {result.run}, {result.file}")
    if json_file is not None and results:
        content = {"complete": stopped is None, "scores": [result.to_dict() for result in results]}
        text = to_json(content, indent=1) + "\n"
        if json_file == _STDIO:
            sys.stdout.write(text)
        else:
            atomic_write(json_file, text)
    if plot is not None and results:
        names = {**_short_names(files), **_short_names(runs)}
        profiles: dict[str, dict[str, TextProfile]] = {}
        for result in results:
            profiles.setdefault(names[result.file], {})[names[result.run]] = result.profile
        draw_profiles(plot, profiles)
    if stopped is not None:
        raise stopped


@dataclasses.dataclass(frozen=True)
class _Result:
    """What a model makes of a text."""

    run: Path
    file: Path
    stream: Stream
    profile: TextProfile

    def to_dict(self) -> dict[str, Any]:
        """Return what is written as JSON."""
        curve = self.profile.curve
        return {
            "run": str(self.run),
            "file": str(self.file),
            "parameters": sum(parameter.numel() for parameter in self.stream.model.parameters()),
            "bytes": self.profile.count,
            "unknown_bytes": self.profile.unknown,
            "bits": self.profile.bits,
            "bits_per_byte": self.profile.bits_per_byte,
            "curve": {
                "bytes_per_point": curve.width,
                "bits_per_byte": [round(value, 4) for value in curve.values().tolist()],
            },
            "places": [
                {**place.to_dict(), "before": _decode(place.before), "after": _decode(place.after)}
                for place in self.profile.places()
            ],
        }


def _short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each path without its folder, if that tells all of them apart."""
    names = {path: "standard input" if path == _STDIO else path.resolve().name for path in paths}
    return names if len(set(names.values())) == len(names) else {path: str(path) for path in paths}


def _check_files(files: Sequence[Path]) -> None:
    if not files:
        raise ConfigError("[RUN...] FILE...: expected a text after the runs, got none; - reads standard input")
    for file in files:
        if file == _STDIO:
            continue
        if not file.exists():
            raise DataError(
                f"{file}: expected a run directory or a text to score, got nothing of this name; check the path"
            )
        if file.suffix == ".safetensors":
            raise DataError(f"{file}: expected a run directory or a text to score, got weights; give their folder")
        if file.is_file() and not file.stat().st_size:
            raise InputError(f"{file}: expected a text, got an empty one")


def _check_outputs(files: Sequence[Path], outputs: Mapping[str, Path | None]) -> None:
    """Raise a ConfigError for a file that cannot be written, before the texts are read."""
    used: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        if path == _STDIO and option != "--plot":
            written = [path]
        elif path.is_dir():
            raise ConfigError(f"{option}: expected a file, got {path}, which is a folder")
        elif not path.parent.is_dir():
            raise ConfigError(f"{option}: expected a file in a folder that exists, got {path}")
        else:
            written = [path.resolve(), *([partial_path(path).resolve()] if option == "--lines" else [])]
        for each in written:
            if each != _STDIO and each.exists() and any(file.exists() and each.samefile(file) for file in files):
                raise ConfigError(f"{option}: expected another file than the text, got {path}")
            if each in used:
                raise ConfigError(f"{option}: expected another output than that of {used[each]}, got {path}")
            used[each] = option


def _score_file(
    file: Path,
    results: Sequence[_Result],
    write: Callable[[Iterator[Place]], None] | None,
    progress: Callable[[int, int | None], None],
) -> None:
    """Read a text once, and score it with each model; `write` takes its lines."""
    from tcnca.inference.scoring import Lines, known_bytes, score_bytes

    by_line = Lines()
    # Pipes and devices have no size.
    done, size = 0, None if file == _STDIO else file.stat().st_size or None
    for data in _read(file):
        for result in results:
            bits = score_bytes(result.stream, data)
            unknown = int((~known_bytes(result.stream.model, data)).sum())
            result.profile.add(data, bits, unknown)
        if write is not None:
            write(by_line.add(data, bits))
        done += len(data)
        progress(done, size)
    if not done:
        raise InputError(f"{file}: expected a text, got an empty one")
    if write is not None:
        write(by_line.finish())


def _read(file: Path) -> Iterator[bytes]:
    """Yield the pieces of a file, or of the standard input as they come."""
    with contextlib.ExitStack() as stack:
        try:
            source: Any = sys.stdin.buffer if file == _STDIO else stack.enter_context(file.open("rb"))
            while data := source.read1(_PIECE):
                yield data
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def _line_writer(path: Path) -> Iterator[Callable[[Iterator[Place]], None]]:
    """Yield a function that writes the scores of lines; an error leaves complete rows in a `.partial` file."""
    count = 0
    with contextlib.ExitStack() as stack:
        if path == _STDIO:
            file: Any = open_stdout()
        else:
            temporary = stack.enter_context(atomic_path(path))
            file = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
        header = ["line", "offset", "bytes", "bits", "bits_per_byte", "text"] if path.suffix.lower() == ".csv" else None

        def write(found: Iterator[Place]) -> None:
            nonlocal count
            rows = [place.to_dict() for place in found]
            text = io.StringIO(newline="")
            if header is None:
                text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                csv.writer(text).writerows([*([] if count else [header]), *(row.values() for row in rows)])
            if rows:
                file.write(text.getvalue())  # in one call: no row is cut by a signal
                file.flush()
            count += len(rows)

        try:
            yield write
        except BaseException as error:
            if path != _STDIO and count and not isinstance(error, OSError):
                file.close()  # Windows renames no file that is open
                replace_file(temporary, partial_path(path))
                error.add_note(f"{plural(count, 'line')} saved in {partial_path(path)}")
            raise
    if path != _STDIO:
        partial_path(path).unlink(missing_ok=True)


def _print_totals(console: Console, results: Sequence[_Result]) -> None:
    several = len({result.file for result in results}) > 1
    totals = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "text") if several else ("run",):
        totals.add_column(column, overflow="fold")
    unknown = any(result.profile.unknown for result in results)
    for column in ("bits per byte", "bytes", "bits", *(["unknown bytes"] if unknown else [])):
        totals.add_column(column, justify="right", no_wrap=True)
    for result in results:
        names = [Text(escape_control(str(path), "")) for path in (result.run, result.file)]
        profile = result.profile
        numbers = [f"{profile.bits_per_byte:.4f}", f"{profile.count:,}", f"{profile.bits:,.0f}"]
        numbers += [f"{profile.unknown:,}"] if unknown else []
        totals.add_row(*names[: 2 if several else 1], *numbers)
    console.print(totals)


def _print_places(console: Console, result: _Result, title: str) -> None:
    if not (places := result.profile.places()):
        return
    console.print(Text(escape_control(title, ""), "italic"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("bits per byte", "line", "offset", "text"):
        table.add_column(column, justify="left" if column == "text" else "right", no_wrap=True)
    last = max(places, key=lambda place: place.offset)
    # What the numbers and the gaps between the columns leave.
    width = console.width - len("bits per byte") - max(4, len(f"{last.line:,}")) - max(6, len(f"{last.offset:,}")) - 10
    for place in places:
        before, text, after = (escape_control(_decode(part), "") for part in (place.before, place.text, place.after))
        whole = Text.assemble((before[-_SHOWN_BEFORE:], "dim"), (text, "bold"), (after, "dim"))
        whole.truncate(max(width, 10), overflow="ellipsis")
        table.add_row(f"{place.bits / place.length:.2f}", f"{place.line:,}", f"{place.offset:,}", whole)
    console.print(table)
    attention = result.stream.model.config.attention
    chunk = None if attention is None or attention.memory else attention.chunk_size
    if chunk is not None and any(_starts_chunk(place, chunk) for place in places):
        console.print(
            f"The attention of this model starts anew every {chunk:,} bytes, and the bytes that follow are harder to "
            "predict: places there may be nothing unusual.\n"
        )


def _starts_chunk(place: Place, chunk: int) -> bool:
    """Return whether a place begins in the first bytes of a chunk, or just before it; short chunks are everywhere."""
    start = (place.offset + place.length) // chunk * chunk
    return chunk > 8 * place.length and start > 0 and place.offset - start < place.length


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")
