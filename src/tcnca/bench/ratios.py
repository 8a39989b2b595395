"""Who is how many times faster than whom, from one run, beside what the paper reports and what is aimed at."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tcnca.bench.report import EAGER, GRAPH, Result

Sizes = dict[str, int | str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What the paper reports, and what is aimed at on an H200, at one size."""

    sizes: Sizes
    part: str
    paper: float | None = None
    goal: float | None = None
    stretch: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two contestants; the ratio is the time of `slow` over that of `fast`."""

    suite: str
    title: str
    slow: str
    fast: str
    parts: tuple[str, ...] = ("forward", "backward")
    goals: tuple[Goal, ...] = ()


def _both(batch: int, length: int, goal: tuple[float, float], stretch: tuple[float, float], **more: Any) -> list[Goal]:
    paper = more.get("paper", (None, None))
    return [
        Goal(sizes={"batch": batch, "length": length}, part=part, paper=paper[i], goal=goal[i], stretch=stretch[i])
        for i, part in enumerate(("forward", "backward"))
    ]


_LONG, _SHORT = 131_072, 8192
_KERNEL_LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072)
_KERNEL_PAPER = tuple(
    Goal(sizes={"batch": 1, "length": length}, part="forward", paper=paper)
    for length, paper in zip(_KERNEL_LENGTHS, (1.51, 1.25, 1.23, 1.20, 1.25), strict=True)
)
_LRA_PAPER = {"listops": 1.05, "text": 1.25, "retrieval": 1.18, "image": 1.24, "pathfinder": 1.25, "pathx": 1.73}
_MODEL_PARTS = ("forward", "backward", "step")


def _ops() -> Iterator[Comparison]:
    published = [
        *_both(8, _LONG, (40, 25), (100, 50), paper=(7.07, 2.86)),
        *_both(1, _LONG, (45, 35), (100, 60)),
        *_both(1, _SHORT, (25, 20), (60, 30)),
    ]
    pairs: list[tuple[str, str, str, list[Goal]]] = [
        ("TCN over FFT-EMA as published, bidirectional", "fft-ema-published-bi", "tcn-bi", published),
        ("TCN over FFT-EMA, bidirectional", "fft-ema-bi", "tcn-bi", []),
        ("TCN over FFT-EMA, causal", "fft-ema", "tcn", _both(8, _LONG, (10, 7), (25, 14))),
        ("TCN over PyTorch's convolutions, causal", "conv", "tcn", _both(8, _LONG, (12, 12), (30, 25))),
        ("TCN over PyTorch's convolutions, bidirectional", "conv-bi", "tcn-bi", []),
        ("TCN over scan-EMA, causal", "scan-ema", "tcn", []),
        ("TCN over scan-EMA, bidirectional", "scan-ema-bi", "tcn-bi", []),
        (
            "scan-EMA over FFT-EMA, causal, N=16",
            "fft-ema-16",
            "scan-ema-16",
            [*_both(8, _SHORT, (3, 3), (8, 6)), *_both(8, _LONG, (3, 3), (8, 6))],
        ),
        ("chunked attention over plain", "attention-plain", "attention", []),
    ]
    for title, slow, fast, goals in pairs:
        yield Comparison(suite="ops", title=title, slow=slow, fast=fast, goals=tuple(goals))
    for direction, end in (("bidirectional", "-bi"), ("causal", "")):
        yield Comparison(
            suite="ops",
            title=f"FFT-EMA, kernel made in the call over kernel kept, {direction}",
            slow=f"fft-ema{end}",
            fast=f"fft-ema-cached{end}",
            parts=("forward",),
            goals=_KERNEL_PAPER if end else (),
        )


def _models() -> Iterator[Comparison]:
    sizes: Sizes = {"batch": 8, "length": 8192, "num_layers": 12}
    goals = (
        Goal(sizes=sizes, part="forward", paper=1.373, goal=1.3),
        Goal(sizes=sizes, part="backward", paper=1.245, goal=1.3),
    )
    for suite, parts in (("layer", _MODEL_PARTS[:2]), ("model", _MODEL_PARTS)):
        for end, text in (("", ""), ("-compiled", ", compiled")):
            for rival, way in (("mega-fft", "FFT"), ("mega-scan", "scan")):
                yield Comparison(
                    suite=suite,
                    title=f"TCNCA over MEGA by {way}{text}",
                    slow=rival + end,
                    fast="tcnca" + end,
                    parts=parts,
                    goals=goals if suite == "model" and rival == "mega-fft" else (),
                )
    paper = tuple(Goal(sizes={"task": task}, part="inference", paper=value) for task, value in _LRA_PAPER.items())
    for rival, way in (("mega-fft", "FFT"), ("mega-scan", "scan")):
        title = f"TCNCA over MEGA-chunk by {way}"
        yield Comparison(
            suite="lra",
            title=title,
            slow=rival,
            fast="tcnca",
            parts=("inference", "step"),
            goals=paper if rival == "mega-fft" else (),
        )


COMPARISONS: tuple[Comparison, ...] = (*_ops(), *_models())
MEAN = {"task": "mean of six"}


def ratios_of(results: Sequence[Result], *, goals: bool) -> list[dict[str, Any]]:
    """All comparisons of what was timed.

    Args:
        results: of one run.
        goals: whether what is aimed at on a GPU, and the paper's numbers from one, belong beside them.
    """
    timed = [result for result in results if result.status == "timed"]
    found = [row for comparison in COMPARISONS for row in _compared(comparison, timed)]
    found += list(_means(found))
    found += list(_absolute(timed))
    return found if goals else [{**row, "paper": None, "goal": None, "stretch": None} for row in found]


def _compared(comparison: Comparison, timed: Sequence[Result]) -> Iterator[dict[str, Any]]:
    mine = [result for result in timed if result.suite == comparison.suite]
    for slow in mine:
        for fast in mine:
            if (slow.name, fast.name, slow.sizes) != (comparison.slow, comparison.fast, fast.sizes):
                continue
            for part in comparison.parts:
                goal = _goal_at(comparison.goals, slow.sizes, part)
                for how in (GRAPH, EAGER):
                    above, below = slow.seconds(part, how), fast.seconds(part, how)
                    if above and below:
                        yield _row(comparison.suite, comparison.title, slow.sizes, part, how, above / below, goal)


def _goal_at(goals: Sequence[Goal], sizes: Sizes, part: str) -> Goal | None:
    for goal in goals:
        if goal.part == part and goal.sizes.items() <= sizes.items():
            return goal
    return None


def _row(
    suite: str, title: str, sizes: Sizes, part: str, how: str, value: float, goal: Goal | None, unit: str = "×"
) -> dict[str, Any]:
    aims = {name: None if goal is None else getattr(goal, name) for name in ("paper", "goal", "stretch")}
    return {
        "suite": suite,
        "title": title,
        "sizes": sizes,
        "part": part,
        "how": how,
        "value": value,
        "unit": unit,
        **aims,
    }


def _means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The mean ratio over the tasks of Long-Range Arena, where all six were measured."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["suite"] == "lra":
            groups.setdefault((row["title"], row["part"], row["how"]), []).append(row["value"])
    aims = Goal(sizes=dict(MEAN), part="inference", paper=1.28, goal=1.5, stretch=2)
    for (title, part, how), values in groups.items():
        if len(values) == len(_LRA_PAPER):
            goal = aims if part == "inference" and title.endswith("FFT") else None
            yield _row("lra", title, dict(MEAN), part, how, sum(values) / len(values), goal)


def _absolute(timed: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Speed and memory of the step of training, which have goals of their own."""
    full: Sizes = {"batch": 8, "length": 8192, "num_layers": 12}
    speed = Goal(sizes=full, part="step", goal=800_000, stretch=1_200_000)
    memory = Goal(sizes=full, part="step", goal=25, stretch=15)
    for result in timed:
        if result.suite != "model":
            continue
        ours = result.name.startswith("tcnca")
        for how in (GRAPH, EAGER):
            if seconds := result.seconds("step", how):
                goal = _goal_at([speed], result.sizes, "step") if ours else None
                title = f"{result.label}: tokens a second of training"
                yield _row("model", title, result.sizes, "step", how, result.tokens / seconds, goal, "tokens/s")
        if result.peak_bytes is not None:
            goal = _goal_at([memory], result.sizes, "step") if ours else None
            title = f"{result.label}: peak memory of a step"
            yield _row("model", title, result.sizes, "step", EAGER, result.peak_bytes / 1e9, goal, "GB")


def reached(row: Mapping[str, Any], aim: str) -> bool | None:
    """Whether a number reached its `goal` or `stretch`; None if it has none."""
    wanted = row[aim]
    if wanted is None:
        return None
    return bool(row["value"] <= wanted if row["unit"] == "GB" else row["value"] >= wanted)
