"""Successive halving: the finalists of a search are trained briefly, the better half longer, and so on.

Every rung is a sweep in its own directory, so all that sweeps do holds for it: runs in processes of their own, tables,
figures, and runs that continue after an interruption. A run of a later rung starts from new weights: the learning rate
follows the time of a run, so a longer run is not the continuation of a shorter one.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from tcnca.bench.report import format_seconds
from tcnca.errors import ConfigError, TrainingError, format_score
from tcnca.files import atomic_write, read_json
from tcnca.layers import TCNConfig
from tcnca.layers.structure import Structure
from tcnca.models import ModelConfig
from tcnca.search.search import Candidate, Recommendation, Rung, SearchReport, Training, load_average, write_json
from tcnca.search.structures import overrides
from tcnca.training.distributed import available_cores
from tcnca.training.recipe import load_recipe
from tcnca.training.sweeps import Row, Sweep, load_variants, plan, read_rows, run_sweep, write_tables

REPORT, VARIANTS = "search.json", "variants.yaml"
FINALISTS = 8
_OVERHEAD = 6.0
"""Seconds that a run takes beyond its training on a quiet machine, before that is known."""
_SHARE = 0.95
"""Share of the time that is planned; the rest is for runs that take longer to start or to evaluate."""
_MIN_SECONDS = 2.0
"""Shortest training of a run."""


def recipe_model(recipe: str, changes: Sequence[str], device: str) -> ModelConfig:
    """Return the model of a recipe, or raise a ConfigError if it has no TCN."""
    changed = load_recipe(recipe).override(changes).for_device(device)
    if changed.init_from is not None:
        raise ConfigError(
            f"--train: expected a recipe without init_from, whose weights fit one structure, got {recipe}"
        )
    model = changed.model_config(changed.build_task())
    if not isinstance(model.mixer, TCNConfig):
        kind = "none" if model.mixer is None else type(model.mixer).__name__
        raise ConfigError(
            f"--train: expected a recipe whose mixer is a TCN, got {kind} in {recipe}; choose another recipe"
        )
    return model


def finalists(report: SearchReport, count: int) -> list[Structure]:
    """Return the measured structures to train: the recommended one, then those of the front that miss the fewest lags.

    Those that exceed a limit are left out.
    """
    first, limit = report.recommendation.structure, report.limits.seconds
    front = [it for it in report.measured if it.front and (limit is None or (it.seconds or 0.0) <= limit)]
    front.sort(key=lambda it: (it.structure != first, it.missed_lags, it.seconds))
    return list(dict.fromkeys([first, *(it.structure for it in front)]))[:count]


def read_report(folder: Path) -> SearchReport | None:
    """Read the report of a search that was stopped; None if there is none."""
    path = folder / REPORT
    if not path.exists():
        return None
    stored: SearchReport = read_json(path, SearchReport, remedy="remove it, or choose another directory with --out")
    return stored


def check_budget(left: float, jobs: int, overhead: float | None = None, when: str = "") -> None:
    """Raise a ConfigError if the seconds that are left are too few to train two structures.

    `overhead` is what a run takes beyond its training; None estimates it from the load of the machine.
    """
    overhead = _start_overhead() if overhead is None else overhead
    least = math.ceil(2 / jobs) * (overhead + _MIN_SECONDS) / _SHARE
    if left < least:
        raise ConfigError(
            f"--budget: expected at least {math.ceil(least)}s for two runs of a few seconds, got {max(left, 0.0):.0f}s"
            f"{when}; give more time"
        )


def start(
    report: SearchReport, recipe: str, changes: Sequence[str], budget: float, spent: float, count: int
) -> SearchReport:
    """Return a report with the finalists, of which nothing is trained yet.

    Args:
        report: the search so far.
        recipe: name or file of a recipe.
        changes: changes to the recipe.
        budget: seconds of the whole search.
        spent: seconds that it has taken so far.
        count: largest number of finalists.
    """
    training = Training(
        recipe=recipe, changes=list(changes), budget=budget, spent=spent, finalists=finalists(report, count), rungs=[]
    )
    return dataclasses.replace(report, training=training)


def train_finalists(
    report: SearchReport, folder: Path, console: Console, *, device: str | None = None, jobs: int = 1
) -> tuple[SearchReport, str]:
    """Train the finalists by successive halving, and choose the one with the best score.

    Args:
        report: a report of `start`, or one that was stopped.
        folder: directory of the rungs, and of the report after each of them.
        console: where to print.
        device: `cpu` or `cuda`; None for GPUs if there are any.
        jobs: runs at a time.

    Returns:
        The report with scores, and the name of the signal that stopped the training, if one did.
    """
    stopped, begun = "", time.monotonic()
    training = report.training
    assert training is not None
    earlier, resumed = training.spent, True

    def save(changed: Training) -> Training:
        changed = dataclasses.replace(changed, spent=earlier + time.monotonic() - begun)
        write_json(folder / REPORT, dataclasses.replace(report, training=changed))
        return changed

    try:
        while not stopped:
            training = save(training)
            rungs, left = training.rungs, training.budget - training.spent
            if not rungs or rungs[-1].scores is not None:
                structures, overhead = _survivors(training), _overhead(training, jobs)
                if not rungs and len(structures) > 1:
                    check_budget(left, jobs, overhead, " after the measurements")
                following = _next_rung(structures, len(rungs), left, jobs, overhead)
                if following is None:
                    if not rungs:
                        console.print("only one finalist: nothing to train")
                    break
                resumed = False
                training = save(dataclasses.replace(training, rungs=[*rungs, following]))
            sweep = _plan(training, folder, device, jobs)
            rung = training.rungs[-1]
            console.print(f"rung {len(training.rungs)}: {len(rung.structures)} structures, {rung.seconds:g} s each")
            started = time.monotonic()
            stopped = run_sweep(sweep, console, deadline=begun + training.budget - earlier)
            rows = read_rows(sweep)
            write_tables(sweep, rows)
            if stopped:
                break
            scores = [None if math.isnan(score := row.score(sweep.split)) else score for row in rows]
            spent = None if resumed else time.monotonic() - started
            done = dataclasses.replace(rung, scores=scores, wall_seconds=spent)
            training = dataclasses.replace(
                training,
                rungs=[*training.rungs[:-1], done],
                metric=sweep.metric,
                split=sweep.split,
                higher_is_better=sweep.higher_is_better,
            )
            if all(score is None for score in scores):
                if len(training.rungs) == 1:
                    raise TrainingError(f"{folder}: no finalist has a score; {_why(rows)}")
                break
    finally:
        training = save(training)
    report = _with_scores(dataclasses.replace(report, training=training), training)
    write_json(folder / REPORT, report)
    return report, stopped


def _survivors(training: Training) -> list[Structure]:
    """Return the structures of the next rung: the better half of the last one."""
    if not training.rungs:
        return training.finalists
    last = training.rungs[-1]
    sign = -1.0 if training.higher_is_better else 1.0
    scored = [(sign * score, place) for place, score in enumerate(last.scores or []) if score is not None]
    return [last.structures[place] for _, place in sorted(scored)[: len(last.structures) // 2]]


def _next_rung(structures: Sequence[Structure], done: int, left: float, jobs: int, overhead: float) -> Rung | None:
    """Return the next rung, whose runs share what is left with the rungs after it; None if there is nothing to do."""
    while len(structures) > 1:
        rungs = len(structures).bit_length() - 1
        seconds = _SHARE * left / rungs / math.ceil(len(structures) / jobs) - overhead
        if seconds >= _MIN_SECONDS:
            return Rung(structures=list(structures), seconds=math.floor(10 * seconds) / 10)
        if done or len(structures) == 2:
            return None
        structures = structures[: max(2, len(structures) // 2)]
    return None


def _overhead(training: Training, jobs: int) -> float:
    """Return the seconds that a run takes beyond its training, from the last rung if it was not interrupted."""
    last = training.rungs[-1] if training.rungs else None
    if last is None or last.wall_seconds is None:
        return _start_overhead()
    return max(0.0, last.wall_seconds / math.ceil(len(last.structures) / jobs) - last.seconds)


def _start_overhead() -> float:
    """Return the seconds that a run takes beyond its training, before a rung has shown it."""
    return _OVERHEAD * max(1.0, (load_average() or 0.0) / available_cores())


def _plan(training: Training, folder: Path, device: str | None, jobs: int) -> Sweep:
    """Plan the last rung as a sweep over variants, which are kept in a file so that `tcnca sweep` can repeat it."""
    rung, place = training.rungs[-1], folder / f"rung-{len(training.rungs)}"
    variants = {str(each).replace("=", "").replace(" ", "-"): overrides(each) for each in rung.structures}
    content = {"about": "Structures of the TCN", "recipe": training.recipe, "variants": variants}
    atomic_write(place / VARIANTS, yaml.safe_dump(content, sort_keys=False))
    named = load_variants(str(place / VARIANTS))
    return plan(training.recipe, training.changes, place, variants=named, budget=rung.seconds, device=device, jobs=jobs)


def _why(rows: Sequence[Row]) -> str:
    reasons = [row.error for row in rows if row.error]
    return f"the first failed with: {reasons[0]}" if reasons else "none ended within the budget; give more time"


def _with_scores(report: SearchReport, training: Training) -> SearchReport:
    """Return a report with the score of each structure in its last rung, and the best of the last rung recommended."""
    found: dict[Structure, tuple[float, int]] = {}
    for number, rung in enumerate(training.rungs, 1):
        scores = zip(rung.structures, rung.scores or [], strict=False)
        found |= {structure: (score, number) for structure, score in scores if score is not None}
    if not found:
        return report

    def scored(each: Candidate) -> Candidate:
        score, rung = found.get(each.structure, (None, 0))
        return dataclasses.replace(each, score=score, rung=rung)

    report = dataclasses.replace(report, candidates=[scored(each) for each in report.candidates])
    sign = -1.0 if training.higher_is_better else 1.0
    best = min(found, key=lambda structure: (-found[structure][1], sign * found[structure][0]))
    score, number = found[best]
    candidate = next(each for each in report.measured if each.structure == best)
    rivals = sum(rung == number for _, rung in found.values())
    ties = [each for each, result in found.items() if result == found[best] and each != best]
    reason = (
        f"has the best {training.split} {training.metric}, {format_score(score)}, of the {rivals} structures in rung "
        f"{number} ({training.rungs[number - 1].seconds:g} s of training each); {format_seconds(candidate.seconds)} "
        f"for a forward and backward pass, {candidate.missed_lags:,} lags missed"
    )
    chosen = Recommendation(structure=best, reason=reason, overrides=overrides(best), ties=ties)
    return dataclasses.replace(report, recommendation=chosen)
