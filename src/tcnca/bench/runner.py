"""A benchmark from start to end: every candidate is built, checked, timed and freed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tcnca.bench.case import BenchCase, Settings
from tcnca.bench.generation import generation_cases
from tcnca.bench.models import layer_cases, lra_cases, model_cases
from tcnca.bench.operators import ops_cases
from tcnca.bench.report import EAGER, GRAPH, GRAPHED_STEP, Report, Result
from tcnca.bench.timing import Roofline, Timer, Timing, measure_roofline
from tcnca.config import closest
from tcnca.errors import ConfigError, TcncaError, is_out_of_memory, shorten
from tcnca.training.provenance import commit, hardware, versions

SUITES: Mapping[str, Callable[[Settings], list[BenchCase]]] = {
    "ops": ops_cases,
    "layer": layer_cases,
    "model": model_cases,
    "lra": lra_cases,
    "generate": generation_cases,
}


def bench_cases(suite: str, settings: Settings) -> list[BenchCase]:
    """Return the cases of a suite that `settings.only` selects.

    A full name selects that candidate alone, a part of a name all candidates that contain it.
    """
    cases = SUITES[suite](settings)
    names = list(dict.fromkeys(case.name for case in cases))
    selected = set(names) if not settings.only else set()
    for part in settings.only:
        matches = {part} if part in names else {name for name in names if part in name}
        if not matches:
            hint = f"did you mean {close}? " if (close := closest(part, names)) else ""
            listed = ", ".join(sorted(names))
            raise ConfigError(f"--only: {hint}expected candidates or parts of their names, got {part!r}; see {listed}")
        selected |= matches
    return [case for case in cases if case.name in selected]


def run_suite(
    suite: str,
    settings: Settings,
    command: str,
    *,
    on_start: Callable[[BenchCase, int, int], None] | None = None,
    on_result: Callable[[Report], None] | None = None,
) -> Report:
    """Measure every case of a suite. Ctrl-C ends it and keeps what was measured.

    Args:
        suite: one of `SUITES`.
        settings: what to measure, on which device and for how long.
        command: the command line, for the report.
        on_start: called with each case, its index and the number of cases before it is measured.
        on_result: called with the report so far after each case.
    """
    cases = bench_cases(suite, settings)
    timer = Timer(settings.device, settings.seconds, settings.repeat)
    report = Report(
        suite=suite,
        hardware=hardware(settings.device),
        versions=versions(),
        commit=commit(),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        settings=_settings_dict(settings),
        interrupted=True,
    )
    # Keep existing objects out of the garbage collection after each candidate.
    gc.freeze()
    try:
        roofline = measure_roofline(timer, settings.dtype)
        report = dataclasses.replace(report, roofline=roofline._asdict())
        for index, case in enumerate(cases):
            if on_start is not None:
                on_start(case, index, len(cases))
            report = dataclasses.replace(report, results=[*report.results, measure(case, timer, roofline)])
            if on_result is not None:
                on_result(report)
        report = dataclasses.replace(report, interrupted=False)
    except KeyboardInterrupt:
        pass
    finally:
        gc.unfreeze()
    return report


def measure(case: BenchCase, timer: Timer, roofline: Roofline) -> Result:
    """Check a case and, if it is correct, time it. A failure becomes part of the result."""
    copied: dict[str, Any] = {name: getattr(case, name) for name in ("name", "label", "sizes", "tokens", "tolerance")}
    blank = Result(**copied, status="failed")
    try:
        return _measure(case, timer, roofline, blank)
    except TcncaError as error:
        return dataclasses.replace(blank, status="not available", reason=_reason(error))
    except Exception as error:
        # Any failure of one candidate must not stop the others.
        status = "out of memory" if is_out_of_memory(error) else "failed"
        return dataclasses.replace(blank, status=status, reason=_reason(error))
    finally:
        timer.free_memory()


def _measure(case: BenchCase, timer: Timer, roofline: Roofline, blank: Result) -> Result:
    torch.manual_seed(0)
    errors = case.check_errors()
    timer.free_memory()
    worst = max(errors.values())
    # Negated so that NaN counts as wrong.
    if not worst <= case.tolerance:
        reason = f"expected a relative error of at most {case.tolerance:.0e}, got {worst:.1e}; not timed"
        return dataclasses.replace(blank, status="wrong", reason=reason, errors=errors)
    before = timer.allocated()
    workload = case.build()
    groups = workload.phases()
    times: dict[str, dict[str, Timing]] = {}
    peak, reason = None, ""
    for phases in groups:
        for phase, timing in timer.eager(phases, case.isolated).items():
            times[phase] = {EAGER: timing}
        peak = timer.peak_memory(phases, before)
    graphs = [(timer.graph, GRAPH, phases) for phases in groups if case.graph]
    if workload.graphed_step is not None:
        graphs.append((timer.eager, EAGER, {GRAPHED_STEP: workload.graphed_step}))
    for time_phases, mode, phases in graphs if timer.on_gpu else ():
        try:
            for phase, timing in time_phases(phases, case.isolated).items():
                times.setdefault(phase, {})[mode] = timing
        except Exception as error:
            # The eager times stay valid.
            reason = f"not captured as a graph: {_reason(error)}"
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
    bounds = {phase: roofline.seconds(case.cost[phase]) for phase in times if phase in case.cost}
    return dataclasses.replace(
        blank, status="timed", reason=reason, errors=errors, times=times, roofline=bounds, peak_bytes=peak
    )


def _reason(error: BaseException) -> str:
    # Compiler errors can fill pages.
    return shorten(" ".join(str(error).split()) or type(error).__name__)


def _settings_dict(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON values, with the facts of the process that affect times."""
    flushed = "flushed before every phase of ops and layer; training steps follow one another"
    return {
        **dataclasses.asdict(settings),
        "device": settings.device.type,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "caches": flushed if settings.on_gpu else "as a loop leaves them",
    }
