"""Results as JSON files, ratios between candidates, and the tables of `tcnca bench`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from tcnca import files
from tcnca.bench.case import Sizes
from tcnca.bench.timing import Timing
from tcnca.config import NonNegativeFloat, PositiveInt, check
from tcnca.errors import ConfigError, DataError
from tcnca.files import atomic_write, to_json

GRAPH, EAGER = "graph", "eager"
MODES = (GRAPH, EAGER)
GRAPHED_STEP = "graphed step"
"""A training step with `runtime.cuda_graphs`, as a caller sees it."""
# The optimizer takes almost no time, and is part of the step.
_TABLE_PHASES = ("inference", "forward", "backward", "step", GRAPHED_STEP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one `BenchCase`; fields of the same name are copied from it."""

    name: str
    label: str
    sizes: Sizes
    tokens: PositiveInt
    tolerance: float
    status: str
    """`timed`, `wrong`, `failed`, `out of memory` or `not available`."""
    reason: str = ""
    """Why it was not timed, or not as a graph."""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """Relative errors of output and gradients against float64."""
    times: dict[str, dict[str, Timing]] = dataclasses.field(default_factory=dict)
    """Times by phase and mode: `eager`, and on a GPU `graph` if it could be captured."""
    roofline: dict[str, NonNegativeFloat] = dataclasses.field(default_factory=dict)
    """Seconds that no program can beat, by phase."""
    peak_bytes: int | None = None
    """Peak GPU memory of a run, including inputs and weights."""

    def seconds(self, phase: str, mode: str | None = None) -> float | None:
        """Return the median of a phase; by default of the graph if there is one."""
        times = self.times.get(phase, {})
        found = times.get(mode) if mode else times.get(GRAPH, times.get(EAGER))
        return None if found is None else found.median


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """The time of one candidate divided by that of another, or another number with a goal."""

    suite: str
    title: str
    sizes: Sizes
    phase: str
    mode: str
    """`graph` or `eager`."""
    value: float
    unit: str = "×"
    """`×`, `tokens/s` or `GB`."""
    paper: float | None = None
    """What the paper reports, on V100s."""
    goal: float | None = None
    """The goal on an H200."""
    stretch: float | None = None
    """The stretch goal on an H200."""

    @property
    def reached(self) -> bool | None:
        """Whether the value reaches the goal; None if there is no goal."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.unit == "GB" else self.value >= self.goal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A run of one suite, with what is needed to repeat it."""

    suite: str
    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    commit: str | None
    """Commit of the library's source."""
    started: str
    """Start time in UTC."""
    command: str
    settings: dict[str, Any]
    roofline: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Measured peak rates of the machine."""
    results: list[Result] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    """Whether the run ended early."""

    @property
    def timed(self) -> list[Result]:
        """The results of candidates that were timed."""
        return [result for result in self.results if result.status == "timed"]

    @property
    def ratios(self) -> list[Ratio]:
        """Ratios between candidates, on a GPU with the goals and the paper's numbers."""
        ratios = [ratio for comparison in COMPARISONS for ratio in _compare(comparison, self)]
        ratios += [*_lra_means(ratios), *_speed_and_memory(self)]
        return [_with_goal(ratio) for ratio in ratios] if self.hardware["device"] == "cuda" else ratios


def write_json(path: Path, report: Report) -> None:
    """Write a report, with its ratios, atomically."""
    ratios = [dataclasses.asdict(ratio) for ratio in report.ratios]
    atomic_write(path, to_json({**dataclasses.asdict(report), "ratios": ratios}, indent=1) + "\n")


def read_json(path: Path) -> Report:
    """Read a report. Its ratios are computed anew."""
    remedy = "give a file that `tcnca bench` has written with --json"
    values = files.read_json(path, dict[str, Any], remedy=remedy)
    try:
        return _check_report(values)
    except ConfigError as error:
        raise DataError(f"{path}: {error}; {remedy}") from error


def _check_report(values: dict[str, Any]) -> Report:
    results = []
    for result in check("results", values.get("results"), list[dict[str, Any]]):
        # Results of older versions have more values.
        known = {field.name: result[field.name] for field in dataclasses.fields(Result) if field.name in result}
        # An error that is not a number is stored as null.
        errors = check("errors", result.get("errors", {}), dict[str, float | None])
        results.append({**known, "errors": {name: error for name, error in errors.items() if error is not None}})
    given = {name: value for name, value in values.items() if name != "ratios"}
    report: Report = check("", {**given, "results": results}, Report)
    for name in ("device", "name"):
        check(f"hardware.{name}", report.hardware.get(name), str)
    check("versions.torch", report.versions.get("torch"), str)
    check("settings.dtype", report.settings.get("dtype"), str)
    for name in ("channels", "kernel_size", "depth"):
        check(f"settings.{name}", report.settings.get(name), int)
    for name in ("bytes_per_second", "flops_per_second") if report.roofline else ():
        check(f"roofline.{name}", report.roofline.get(name), float)
    return report


# Ratios


class Comparison(NamedTuple):
    """Two candidates of a suite whose times are divided: `slow` by `fast`."""

    suite: str
    title: str
    slow: str
    fast: str
    phases: tuple[str, ...] = ("forward", "backward")


class Goal(NamedTuple):
    """What the paper reports, and the goals on an H200, of one number."""

    title: str
    sizes: Sizes
    phase: str
    paper: float | None = None
    goal: float | None = None
    stretch: float | None = None


_PUBLISHED = "TCN over FFT-EMA as published, bidirectional"
_CACHED = "FFT-EMA, cached kernel over kernel computed in the call"
_SPEED, _MEMORY = "tokens per second in training", "peak memory of a training step"
_KERNEL_PAPER = {8192: 1.51, 16_384: 1.25, 32_768: 1.23, 65_536: 1.20, 131_072: 1.25}
_LRA_PAPER = {"listops": 1.05, "text": 1.25, "retrieval": 1.18, "image": 1.24, "pathfinder": 1.25, "pathx": 1.73}
_LRA_MEAN: Sizes = {"task": "mean of six"}


def _comparisons() -> Iterator[Comparison]:
    yield Comparison("ops", _PUBLISHED, "fft-ema-published-bi", "tcn-bi")
    for direction, suffix in (("bidirectional", "-bi"), ("causal", "")):
        for name, label in (("fft-ema", "FFT-EMA"), ("conv", "PyTorch's convolutions"), ("scan-ema", "scan-EMA")):
            yield Comparison("ops", f"TCN over {label}, {direction}", name + suffix, f"tcn{suffix}")
        slow, fast = f"fft-ema{suffix}", f"fft-ema-cached{suffix}"
        yield Comparison("ops", f"{_CACHED}, {direction}", slow, fast, ("forward",))
    yield Comparison("ops", "scan-EMA over FFT-EMA, causal, N=16", "fft-ema-16", "scan-ema-16")
    yield Comparison("ops", "state-space model over FFT", "fft-ssm", "ssm")
    yield Comparison("ops", "diagonal scan over PyTorch", "diagonal-scan-pytorch", "diagonal-scan")
    yield Comparison("ops", "chunked attention over naive", "attention-naive", "attention")
    ours, baselines = {"tcnca": "TCNCA", "tcnca-linear": "TCNCA-linear"}, {"mega-fft": "FFT", "mega-scan": "scan"}
    for (fast, label), (slow, algorithm) in itertools.product(ours.items(), baselines.items()):
        for suffix, ending in (("", ""), ("-compiled", ", compiled")):
            title = f"{label} over MEGA by {algorithm}{ending}"
            yield Comparison("layer", title, slow + suffix, fast + suffix)
            yield Comparison("model", title, slow + suffix, fast + suffix, ("forward", "backward", "step"))
        yield Comparison("lra", f"{label} over MEGA-chunk by {algorithm}", slow, fast, ("inference", "step"))
    # Compiled code of the models of others is their own.
    others = {"transformer-compiled": "Transformer", "gated-deltanet": "Gated DeltaNet", "mamba2": "Mamba-2"}
    for (fast, label), (slow, other) in itertools.product(ours.items(), others.items()):
        title = f"{label}, compiled, over {other}" + (", compiled" if slow.endswith("-compiled") else "")
        yield Comparison("model", title, slow, f"{fast}-compiled", ("forward", "backward", "step"))


def _goals() -> Iterator[Goal]:
    long, short = 131_072, 8192
    pairs: list[tuple[str, int, int, tuple[float, float], tuple[float, float]]] = [
        # title, batch, length, goals and stretch goals of forward and backward
        (_PUBLISHED, 1, long, (45, 35), (100, 60)),
        (_PUBLISHED, 1, short, (25, 20), (60, 30)),
        ("TCN over FFT-EMA, causal", 8, long, (10, 7), (25, 14)),
        ("TCN over PyTorch's convolutions, causal", 8, long, (12, 12), (30, 25)),
        ("scan-EMA over FFT-EMA, causal, N=16", 8, short, (3, 3), (8, 6)),
        ("scan-EMA over FFT-EMA, causal, N=16", 8, long, (3, 3), (8, 6)),
    ]
    for title, batch, length, goals, stretches in pairs:
        for phase, goal, stretch in zip(("forward", "backward"), goals, stretches, strict=True):
            yield Goal(title, {"batch": batch, "length": length}, phase, None, goal, stretch)
    yield Goal(_PUBLISHED, {"batch": 8, "length": long}, "forward", 7.07, 40, 100)
    yield Goal(_PUBLISHED, {"batch": 8, "length": long}, "backward", 2.86, 25, 50)
    for length, paper in _KERNEL_PAPER.items():
        yield Goal(f"{_CACHED}, bidirectional", {"batch": 1, "length": length}, "forward", paper)
    model: Sizes = {"batch": 8, "length": 8192, "num_layers": 12}
    for ending in ("", ", compiled"):
        yield Goal(f"TCNCA over MEGA by FFT{ending}", model, "forward", 1.373, 1.3)
        yield Goal(f"TCNCA over MEGA by FFT{ending}", model, "backward", 1.245, 1.3)
        for label in ("TCNCA", "TCNCA-linear"):
            yield Goal(f"{label}{ending}: {_SPEED}", model, "step", None, 800_000, 1_200_000)
            yield Goal(f"{label}{ending}: {_MEMORY}", model, "step", None, 25, 15)
    for task, paper in _LRA_PAPER.items():
        yield Goal("TCNCA over MEGA-chunk by FFT", {"task": task}, "inference", paper)
    yield Goal("TCNCA over MEGA-chunk by FFT", _LRA_MEAN, "inference", 1.28, 1.5, 2)


COMPARISONS = tuple(_comparisons())
_GOALS = tuple(_goals())
PUBLISHED = tuple(goal for goal in _GOALS if goal.paper is not None)
"""What the paper reports."""


def _compare(comparison: Comparison, report: Report) -> Iterator[Ratio]:
    suite, title, *names, phases = comparison
    slows, fasts = ([result for result in report.timed if result.name == name] for name in names)
    for slow, fast in itertools.product(slows, fasts) if suite == report.suite else ():
        for phase, mode in itertools.product(phases, MODES) if slow.sizes == fast.sizes else ():
            numerator, denominator = slow.seconds(phase, mode), fast.seconds(phase, mode)
            if numerator and denominator:
                value = numerator / denominator
                yield Ratio(suite=suite, title=title, sizes=slow.sizes, phase=phase, mode=mode, value=value)


def _lra_means(ratios: Sequence[Ratio]) -> Iterator[Ratio]:
    """Yield the mean ratio over the Long-Range Arena tasks if all six were measured."""
    groups: dict[tuple[str, str, str], list[Ratio]] = {}
    for ratio in ratios:
        if ratio.suite == "lra":
            groups.setdefault((ratio.title, ratio.phase, ratio.mode), []).append(ratio)
    for members in groups.values():
        if len(members) == len(_LRA_PAPER):
            mean = sum(ratio.value for ratio in members) / len(members)
            yield dataclasses.replace(members[0], sizes=_LRA_MEAN, value=mean)


def _speed_and_memory(report: Report) -> Iterator[Ratio]:
    """Yield tokens per second, and peak memory of training steps, which have their own goals."""
    fields: dict[str, Any]
    for result in report.timed if report.suite == "generate" else ():
        if seconds := result.seconds("forward", EAGER):
            title, speed = f"{result.label}: tokens per second", result.tokens / seconds
            fields = {"suite": "generate", "sizes": result.sizes, "phase": "forward", "mode": EAGER}
            yield Ratio(title=title, value=speed, unit="tokens/s", **fields)
    for result in report.timed if report.suite == "model" else ():
        fields = {"suite": "model", "sizes": result.sizes, "phase": "step"}
        for mode in MODES:
            if seconds := result.seconds("step", mode):
                title, speed = f"{result.label}: {_SPEED}", result.tokens / seconds
                yield Ratio(title=title, mode=mode, value=speed, unit="tokens/s", **fields)
        if result.peak_bytes is not None:
            title, memory = f"{result.label}: {_MEMORY}", result.peak_bytes / 1e9
            yield Ratio(title=title, mode=EAGER, value=memory, unit="GB", **fields)


def _with_goal(ratio: Ratio) -> Ratio:
    for title, sizes, phase, paper, goal, stretch in _GOALS:
        if (title, phase) == (ratio.title, ratio.phase) and sizes.items() <= ratio.sizes.items():
            return dataclasses.replace(ratio, paper=paper, goal=goal, stretch=stretch)
    return ratio


# Tables


def format_seconds(seconds: float | None) -> str:
    """Format a time as 1.23 s, 12.3 ms or 45.6 µs."""
    if seconds is None:
        return "–"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def format_sizes(sizes: Sizes) -> str:
    """Format a size as batch 8, length 131072, f 20."""
    return ", ".join(f"{'f' if name == 'dilation_factor' else name} {value}" for name, value in sizes.items())


def distinct_sizes(results: Sequence[Result]) -> list[Sizes]:
    """Return the sizes of some results, each once, in order."""
    return list({format_sizes(result.sizes): result.sizes for result in results}.values())


def failure_lines(results: Sequence[Result]) -> list[str]:
    """Say why candidates were not timed, or not as a graph, with equal reasons at several sizes joined."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if result.reason:
            found.setdefault((result.label, result.status, result.reason), []).append(format_sizes(result.sizes))
    return [
        f"{label} ({sizes[0] if len(sizes) == 1 else f'at {len(sizes)} sizes'}): {status}; {reason}"
        for (label, status, reason), sizes in found.items()
    ]


def result_tables(report: Report) -> list[Table]:
    """Return one table for each size: medians, roofline fractions, memory and errors."""
    return [
        _result_table(sizes, [result for result in report.results if result.sizes == sizes])
        for sizes in distinct_sizes(report.results)
    ]


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    for index, column in enumerate(columns):
        # All columns may wrap: otherwise a narrow terminal leaves no room for the names.
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _result_table(sizes: Sizes, results: Sequence[Result]) -> Table:
    phases = [phase for phase in _TABLE_PHASES if any(phase in result.times for result in results)]
    graphs = any(GRAPH in modes for result in results for modes in result.times.values())
    modes = (EAGER, GRAPH) if graphs else (EAGER,)
    memory = any(result.peak_bytes is not None for result in results)
    times = [f"{phase}\n{mode}" if graphs else phase for phase in phases for mode in modes]
    memory_column = ["peak\nMB"] if memory else []
    table = _new_table(format_sizes(sizes), "candidate", *times, "% of\nroofline", *memory_column, "error")
    for result in results:
        if result.status != "timed":
            table.add_row(Text(result.label), Text(result.status, style="yellow"))
            continue
        cells = [_format_timing(result.times.get(phase, {}).get(mode)) for phase in phases for mode in modes]
        cells.append(" / ".join(_format_roofline(result, phase) for phase in phases))
        cells += [format_number((result.peak_bytes or 0) / 1e6)] if memory else []
        table.add_row(Text(result.label), *cells, f"{max(result.errors.values(), default=0):.0e}")
    return table


def _format_timing(timing: Timing | None) -> str:
    """Format a median, marked with ~ if the quartiles are more than half of it apart."""
    if timing is None:
        return "–"
    noisy = timing.q3 - timing.q1 > 0.5 * timing.median
    return ("~" if noisy else "") + format_seconds(timing.median)


def _format_roofline(result: Result, phase: str) -> str:
    """Format the roofline time as a percentage of the measured one."""
    seconds, bound = result.seconds(phase), result.roofline.get(phase)
    if not seconds or bound is None:
        return "–"
    return format_number(100 * bound / seconds, 2)


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number, in thousands if it is large; empty if there is none."""
    if value is None:
        return ""
    if value >= 1e5:
        return f"{value / 1e3:,.0f} k"
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def ratio_table(ratios: Sequence[Ratio]) -> Table | None:
    """Return a table of ratios with the paper's numbers and the goals; None if there are no ratios."""
    rows: dict[tuple[str, str], dict[str, Ratio]] = {}
    for ratio in _table_ratios(ratios):
        rows.setdefault((f"{ratio.title}, {format_sizes(ratio.sizes)}", ratio.phase), {})[ratio.mode] = ratio
    if not rows:
        return None
    aims = [aim for aim in ("paper", "goal", "stretch") if any(getattr(ratio, aim) is not None for ratio in ratios)]
    modes = [mode for mode in MODES if any(ratio.mode == mode for ratio in ratios)]
    table, last = _new_table("Ratios", "comparison", "phase", *aims, *modes), ""
    for (title, phase), by_mode in rows.items():
        numbers = [format_number(getattr(next(iter(by_mode.values())), aim), 4) for aim in aims]
        table.add_row(Text("" if title == last else title), phase, *numbers, *(_value(by_mode.get(it)) for it in modes))
        last = title
    return table


def _value(ratio: Ratio | None) -> Text:
    """Format a measured number, green where its goal is reached and red where it is missed."""
    if ratio is None:
        return Text("–")
    return Text(format_number(ratio.value), style={True: "green", False: "red", None: ""}[ratio.reached])


def _table_ratios(ratios: Sequence[Ratio]) -> list[Ratio]:
    """Of operators, choose what has the paper's number, lengths with goals, and the longest sequences."""
    operators = [ratio for ratio in ratios if ratio.suite == "ops" and "model" not in ratio.sizes]
    lengths = {ratio.sizes["length"] for ratio in operators if ratio.goal is not None}
    lengths |= {max((int(ratio.sizes["length"]) for ratio in operators), default=0)}
    return [
        ratio
        for ratio in ratios
        if ratio.suite != "ops" or "model" in ratio.sizes or ratio.paper is not None or ratio.sizes["length"] in lengths
    ]
