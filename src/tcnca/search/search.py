"""The search: enumerate structures, predict their costs, measure the promising ones, and recommend one."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from tcnca.bench.report import format_number, format_seconds
from tcnca.errors import ConfigError, format_score, plural
from tcnca.files import atomic_write, to_json
from tcnca.layers.structure import Structure
from tcnca.search.cost import FEATURES, Array, CostModel, OnMeasured, Size, load_or_fit, measure_bytes, measure_seconds
from tcnca.search.structures import enumerate_structures, overrides, pareto_front
from tcnca.training.distributed import available_cores
from tcnca.training.provenance import commit, hardware, versions

SECONDS = 90.0
"""Time to measure for: half of it for the cost model, half of it the promising structures."""
MEASURED = 16
"""Structures that are measured after the prediction."""
ANCHORS = 3
"""Structures of the fit that are measured again, to compare the speed of the machine then and now."""
_MARGIN = 1.1
"""Factor by which the predicted time of a structure may exceed the limit for it to be measured."""
TIE = 1.03
"""Times that differ by less than this factor count as equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the recommendation must not exceed; None for no limit."""

    seconds: float | None = None
    """Of a forward and backward pass."""
    parameters: int | None = None
    """Of the TCN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A structure and its costs."""

    structure: Structure
    receptive_field: int
    missed_lags: int
    """Lags of the length that no path of taps reaches."""
    parameters: int
    state_values: int | None
    """Values in the streaming state of a sequence; None for a bidirectional TCN, which has none."""
    predicted_seconds: float
    predicted_bytes: int
    seconds: float | None = None
    """Measured time of a forward and backward pass; None if it was not measured."""
    bytes: int | None = None
    """Measured peak memory."""
    front: bool = False
    """Whether it is on the Pareto front of the measured structures."""
    score: float | None = None
    """Score of the longest training run; None if it was not trained."""
    rung: int = 0
    """Rungs of successive halving that it was trained in."""

    def objectives(self) -> tuple[float, ...]:
        """Return what should be small: time, parameters, state and missed lags."""
        seconds = self.predicted_seconds if self.seconds is None else self.seconds
        return seconds, self.parameters, self.state_values or 0, self.missed_lags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The structure to use."""

    structure: Structure
    reason: str
    overrides: list[str]
    """Changes to a recipe that `tcnca train` takes."""
    ties: list[Structure] = dataclasses.field(default_factory=list)
    """Other structures that are as fast within `TIE`, or after training those with the same score."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A rung of successive halving."""

    structures: list[Structure]
    seconds: float
    """Training time of each run."""
    scores: list[float | None] | None = None
    """Score of each structure, None if it has none; None before the rung has ended."""
    wall_seconds: float | None = None
    """Time of the whole rung, with the start and the evaluation of each run; None if it was interrupted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Successive halving of the finalists."""

    recipe: str
    changes: list[str]
    budget: float
    """Seconds of the whole search."""
    spent: float
    """Seconds of it that are over."""
    finalists: list[Structure]
    rungs: list[Rung]
    metric: str = "score"
    split: str = "validation"
    higher_is_better: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchReport:
    """The result of a search, with what is needed to repeat it."""

    size: dict[str, Any]
    limits: Limits
    hardware: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    started: str
    command: str
    load: float | None
    """Processes that wanted to run when the measurements began, averaged over a minute; None if not known."""
    fit_from_cache: bool
    level: float
    """Factor of all predicted times: that by which the machine is slower than when the model was fitted."""
    coefficients: dict[str, float]
    """Seconds for a unit of each feature of the cost model, without `level`."""
    candidates: list[Candidate]
    """All structures, those that were measured first, by time."""
    recommendation: Recommendation
    training: Training | None = None
    """Successive halving, if there was any."""

    @property
    def measured(self) -> list[Candidate]:
        """The structures that were measured, the fastest first."""
        return [each for each in self.candidates if each.seconds is not None]

    @property
    def errors(self) -> Array:
        """Relative errors of the predicted times of the measured structures."""
        return np.array([each.predicted_seconds / (each.seconds or 1.0) - 1.0 for each in self.measured])


def write_json(path: Path, report: SearchReport) -> None:
    """Write a report atomically."""
    atomic_write(path, to_json(dataclasses.asdict(report), indent=1) + "\n")


def run_search(
    size: Size,
    *,
    limits: Limits | None = None,
    structures: Sequence[Structure] | None = None,
    count: int = MEASURED,
    seconds: float = SECONDS,
    refit: bool = False,
    command: str = "",
    on_measured: OnMeasured | None = None,
) -> SearchReport:
    """Search for the structure of a TCN.

    Args:
        size: input, device, and everything of the TCN but its structure.
        limits: what the recommendation must not exceed.
        structures: what to choose from; None for those of `enumerate_structures`.
        count: structures to measure after the prediction.
        seconds: time to measure for; more if even one round of measurements takes longer.
        refit: whether to fit the cost model anew, though there is one on disk.
        command: the command line, for the report.
        on_measured: called before each measurement.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    limits, load = limits or Limits(), load_average()
    structures = structures or enumerate_structures(size.length)
    model, cached = load_or_fit(size, structures, seconds=seconds / 2, refit=refit, on_measured=on_measured)
    candidates = [_predict(size, model, structure) for structure in structures]
    chosen = promising(candidates, limits, count)
    names = [each.structure for each in chosen]
    anchors = list(model.measured)[:ANCHORS]
    times = measure_seconds(size, [*names, *anchors], seconds=seconds / 2, on_measured=on_measured)
    # The machine may be slower or faster than when the model was fitted, by a factor that all structures share.
    now = zip(anchors, times[len(names) :], strict=True)
    level = float(np.median([spent / model.measured[anchor] for anchor, spent in now]))
    measured = [
        dataclasses.replace(each, seconds=spent, bytes=measure_bytes(size, each.structure))
        for each, spent in zip(chosen, times, strict=False)
    ]
    front = pareto_front(np.array([each.objectives() for each in measured]))
    measured = [dataclasses.replace(each, front=bool(on)) for each, on in zip(measured, front, strict=True)]
    others = [each for each in candidates if each.structure not in names]
    ordered = [*sorted(measured, key=lambda it: it.seconds or 0.0), *others]
    return SearchReport(
        size=size.facts(),
        limits=limits,
        hardware=hardware(size.device),
        versions=versions(),
        commit=commit(),
        started=started,
        command=command,
        load=load,
        fit_from_cache=cached,
        level=level,
        coefficients=dict(zip(FEATURES, model.time.tolist(), strict=True)),
        candidates=[dataclasses.replace(it, predicted_seconds=level * it.predicted_seconds) for it in ordered],
        recommendation=recommend(measured, limits, size.length),
    )


def _predict(size: Size, model: CostModel, structure: Structure) -> Candidate:
    return Candidate(
        structure=structure,
        receptive_field=structure.receptive_field,
        missed_lags=size.length - structure.count_lags(size.length, size.causal),
        parameters=structure.parameters(size.base, size.channels),
        state_values=structure.state_values(size.channels) if size.causal else None,
        predicted_seconds=model.seconds(structure),
        predicted_bytes=model.bytes(structure),
    )


def promising(candidates: Sequence[Candidate], limits: Limits, count: int) -> list[Candidate]:
    """Return the structures to measure: most of them the best by prediction, the others of the predicted Pareto front.

    The others are spread over the numbers of lags that structures miss.
    """
    within = [each for each in candidates if not limits.parameters or each.parameters <= limits.parameters]
    if not within:
        least = min(each.parameters for each in candidates)
        raise ConfigError(
            f"--params: expected at least {least:,}, the parameters of the smallest structure that covers the length, "
            f"got {limits.parameters:,}"
        )

    def order(each: Candidate) -> tuple[bool, int, float]:
        late = limits.seconds is not None and each.predicted_seconds > _MARGIN * limits.seconds
        return late, 0 if late else each.missed_lags, each.predicted_seconds

    ranked = sorted(within, key=order)
    best = ranked[: max(1, 3 * count // 4)]
    front = pareto_front(np.array([each.objectives() for each in within]))
    rest = [each for each, on in zip(within, front, strict=True) if on and each not in best]
    rest.sort(key=lambda each: (each.missed_lags, each.predicted_seconds))
    missed = np.array([each.missed_lags for each in rest])
    wanted = np.linspace(missed[0], missed[-1], count - len(best)) if rest else ()
    return [*best, *(rest[place] for place in dict.fromkeys(int(np.abs(missed - lags).argmin()) for lags in wanted))]


def recommend(measured: Sequence[Candidate], limits: Limits, length: int) -> Recommendation:
    """Choose the structure that misses the fewest lags within the limits, of these the fastest.

    Of structures that are as fast within `TIE`, the one with the fewest parameters is chosen. If none is within the
    time, the fastest is.
    """
    within = [each for each in measured if not limits.seconds or (each.seconds or 0.0) <= limits.seconds]
    missed = min((each.missed_lags for each in within), default=0)
    level = [each for each in within if each.missed_lags == missed] or list(measured)
    fastest = min(each.seconds or 0.0 for each in level)
    ties = [each for each in level if (each.seconds or 0.0) <= TIE * fastest]
    best = min(ties, key=lambda each: (each.parameters, each.seconds))
    lags = f"reaches all {length:,} lags" if not best.missed_lags else f"misses {best.missed_lags:,} of {length:,} lags"
    rank = "the fastest" if best.seconds == fastest else f"the smallest of those within {TIE - 1:.0%} of the fastest"
    limited = " within the limits" if limits.seconds or limits.parameters else ""
    spent = f"{format_seconds(best.seconds)} for a forward and backward pass"
    if not within:
        reason = f"{lags}. No measured structure is within {format_seconds(limits.seconds)}; this is {rank}: {spent}"
    elif best.missed_lags:
        reason = f"{lags}, the fewest of the {len(within)} measured structures{limited}: {spent}"
    else:
        reason = f"{lags}, and is {rank} of the {len(level)} measured structures{limited} that do: {spent}"
    others = [each.structure for each in ties if each is not best]
    return Recommendation(structure=best.structure, reason=reason, overrides=overrides(best.structure), ties=others)


def result_table(report: SearchReport, *, everything: bool = False) -> Table:
    """Return a table of the Pareto front and of what was trained, or of everything measured, the fastest first."""
    training, causal = report.training, report.size["causal"]
    title = f"{'Measured' if everything else 'Pareto front'} for {report.size['length']:,} tokens"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    columns = ["K", "f", "D", "B", "field", "missed\nlags", "params", *(["state"] if causal else []), "MB"]
    # A terminal of 80 columns has no room for both.
    columns += ["measured", "rung", training.metric] if training else ["predicted", "measured"]
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for each in report.measured:
        if not (everything or each.front or each.rung):
            continue
        cells = [str(number) for number in dataclasses.astuple(each.structure)]
        cells += [f"{each.receptive_field:,}", f"{each.missed_lags:,}", f"{each.parameters:,}"]
        cells += [f"{each.state_values:,}"] if causal else []
        cells += [format_number((each.bytes or 0) / 1e6)]
        if training:
            score = "–" if each.score is None else format_score(each.score)
            cells += [format_seconds(each.seconds), str(each.rung or "–"), score]
        else:
            cells += [format_seconds(each.predicted_seconds), format_seconds(each.seconds)]
        style = "bold green" if each.structure == report.recommendation.structure else None
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def load_average() -> float | None:
    """Return how many processes want to run, averaged over a minute; None where it is not known."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def is_busy(load: float | None) -> bool:
    """Return whether other processes compete for the cores, by the number of processes that want to run."""
    return load is not None and load > 1.2 * available_cores()


def summary_lines(report: SearchReport) -> list[str]:
    """Return what was done and how well the times were predicted."""
    errors = np.abs(report.errors)
    fitted = "a cost model on disk" if report.fit_from_cache else "a cost model fitted now"
    lines = [
        f"{plural(len(report.candidates), 'structure')}, {len(report.measured)} measured, all predicted by {fitted}",
        f"predicted times of the measured ones: {np.mean(errors <= 0.2):.0%} within 20 %, median error "
        f"{np.median(errors):.0%}",
    ]
    if report.hardware["device"] == "cpu" and report.hardware["threads"] == 1:
        lines.append("times are those that the one thread computes, without those in which other processes ran")
    elif report.hardware["device"] == "cpu" and is_busy(report.load):
        lines.append(
            f"note: the machine was busy (load {report.load:.1f}): times are too long and unreliable; repeat the "
            "search on a quiet machine, or with --threads 1"
        )
    return lines
