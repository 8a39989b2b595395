"""A benchmark from beginning to end: each contestant is made, checked, timed and let go."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tcnca.bench.check import errors_of
from tcnca.bench.entry import Entry, Settings
from tcnca.bench.floors import Floors, measure_floors
from tcnca.bench.layer import layer_entries
from tcnca.bench.lra import lra_entries
from tcnca.bench.model import model_entries
from tcnca.bench.ops import ops_entries
from tcnca.bench.ratios import ratios_of
from tcnca.bench.report import EAGER, GRAPH, Report, Result
from tcnca.bench.timing import Clock, Times, parts_of
from tcnca.errors import ConfigError, TcncaError
from tcnca.training.provenance import commit, hardware, versions

SUITES: Mapping[str, Callable[[Settings], list[Entry]]] = {
    "ops": ops_entries,
    "layer": layer_entries,
    "model": model_entries,
    "lra": lra_entries,
}
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_LINE = 300
"""Characters of an error that are kept: those of a compiler go on for pages."""


class Watch(Protocol):
    """Is told how far a benchmark is."""

    def started(self, entry: Entry, done: int, total: int) -> None:
        """An entry begins, `done` of `total` being over."""

    def ended(self, result: Result) -> None:
        """An entry is over."""


def entries_of(suite: str, settings: Settings) -> list[Entry]:
    """The entries of a benchmark that are wanted."""
    found = SUITES[suite](settings)
    names = sorted({entry.name for entry in found})
    strange = [part for part in settings.only if not any(part in name for name in names)]
    if strange:
        raise ConfigError(f"--only: got {strange[0]}, allowed are {', '.join(names)}, or parts of them")
    # One that is named in full is meant alone, and not those whose names begin like it.
    return [entry for entry in found if not settings.only or any(_meant(part, entry, names) for part in settings.only)]


def _meant(part: str, entry: Entry, names: Sequence[str]) -> bool:
    return entry.name == part if part in names else part in entry.name


def run_suite(
    suite: str,
    settings: Settings,
    command: str,
    watch: Watch,
    floors: Floors | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:
    """Measure every entry. Ctrl-C ends it with what was measured until then.

    Args:
        suite: one of `SUITES`.
        settings: what to measure, on what and for how long.
        command: what was typed.
        watch: is told how far it is.
        floors: what the machine can do at best; measured if it is not given.
        keep: is given what there is so far, after every entry, so that nothing is lost whatever ends the process.
    """
    entries = entries_of(suite, settings)
    clock = Clock(settings.device, settings.seconds, settings.repeat)
    so_far = Report(
        suite=suite,
        hardware=hardware(settings.device),
        versions=versions(),
        commit=commit(),
        begun=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        settings=_plain(settings),
        floors={},
        entries=[],
        ratios=[],
        stopped=True,
    )
    # What is there already stays, and need not be looked through each time a contestant is let go.
    gc.freeze()
    try:
        floors = floors or measure_floors(clock, settings.dtype)
        so_far = dataclasses.replace(so_far, floors=dataclasses.asdict(floors))
        for done, entry in enumerate(entries):
            watch.started(entry, done, len(entries))
            so_far = _with(so_far, measure(entry, clock, floors), settings)
            watch.ended(so_far.entries[-1])
            if keep is not None:
                keep(so_far)
        so_far = dataclasses.replace(so_far, stopped=False)
    except KeyboardInterrupt:
        pass
    finally:
        gc.unfreeze()
    return so_far


def _with(report: Report, result: Result, settings: Settings) -> Report:
    entries = [*report.entries, result]
    return dataclasses.replace(report, entries=entries, ratios=ratios_of(entries, goals=settings.device.type == "cuda"))


def measure(entry: Entry, clock: Clock, floors: Floors) -> Result:
    """Check an entry and, if it is right, time it. Whatever goes wrong is told in the result."""
    blank = Result(
        suite=entry.suite,
        name=entry.name,
        label=entry.label,
        about=entry.about,
        sizes=dict(entry.sizes),
        tokens=entry.tokens,
        status="not available",
        reason="",
        tolerance=entry.tolerance,
    )
    try:
        return _measured(entry, clock, floors, blank)
    except TcncaError as error:
        return dataclasses.replace(blank, reason=_short(error))
    except (RuntimeError, MemoryError, torch.OutOfMemoryError) as error:
        full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        full = full or any(words in str(error) for words in _MEMORY)
        return dataclasses.replace(blank, status="out of memory" if full else "failed", reason=_short(error))
    except Exception as error:
        # A contestant that fails, in whatever way, is not to cost the others their turn.
        return dataclasses.replace(blank, status="failed", reason=_short(error))
    finally:
        clock.tidy()


def _measured(entry: Entry, clock: Clock, floors: Floors, blank: Result) -> Result:
    torch.manual_seed(0)
    errors = errors_of(entry.pair(), entry.together)
    clock.tidy()
    worst = max(errors.values())
    # Written so that an error that is not a number is wrong as well.
    if not worst <= entry.tolerance:
        reason = f"relative error {worst:.1e}, allowed {entry.tolerance:.0e}; not timed"
        return dataclasses.replace(blank, status="wrong", reason=reason, errors=errors)
    before = clock.held()
    groups = parts_of(entry.build())
    times: dict[str, dict[str, Times]] = {}
    peak, reason = None, ""
    for parts in groups:
        for part, found in clock.eager(parts, entry.isolated).items():
            times[part] = {EAGER: found}
        peak = clock.peak(parts, before)
    for parts in groups if clock.graphs else ():
        try:
            for part, found in clock.graph(parts, entry.isolated).items():
                times[part][GRAPH] = found
        except Exception as error:
            # What cannot be captured has been timed as called, and that stands.
            reason = f"not captured as a graph: {_short(error)}"
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
    floor = {part: floors.seconds(entry.work[part]) for part in times if part in entry.work}
    return dataclasses.replace(
        blank, status="timed", reason=reason, errors=errors, times=times, floor=floor, peak_bytes=peak
    )


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE else text[: _LINE - 1] + "…"


def _plain(settings: Settings) -> dict[str, Any]:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    dtype = str(settings.dtype).removeprefix("torch.")
    flush = "caches overwritten before every part of ops and layer; steps of training follow one another"
    loop = "caches as a loop leaves them"
    return {
        **values,
        "device": settings.device.type,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "caches": flush if settings.device.type == "cuda" else loop,
    }
