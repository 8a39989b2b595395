"""What a sweep is to run: every combination of some values of a recipe's keys, checked before anything runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tcnca.data import Task
from tcnca.errors import ConfigError
from tcnca.training.processes import check_device
from tcnca.training.recipe import Recipe, differences, load_recipe, parsed
from tcnca.training.record import read_record
from tcnca.training.run import RECIPE

_LONGEST = 120
"""Letters of a folder's name; file systems allow 255 bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of values: a run."""

    values: dict[str, str]
    """Keys, and the value of each as it was given."""
    recipe: Recipe
    """What it trains."""
    folder: Path
    """Where it does."""

    @property
    def changes(self) -> list[str]:
        """What it changes of the recipe."""
        return [f"{key}={text}" for key, text in self.values.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A recipe, and the points at which it is to be run."""

    recipe: str
    """Name or file of the recipe."""
    grid: dict[str, list[str]]
    """Keys and their values, in the order given."""
    folder: Path
    """Where the runs and the table of them are."""
    points: list[Point]
    """Every combination of values; the last key changes fastest."""
    metric: str
    """What all its runs measure."""
    higher_is_better: bool
    """Whether the metric grows as a model gets better."""
    split: str
    """The split whose score chooses a point: validation, or test where there is no other."""
    budget: float | None = None
    """Seconds of each run; None where the number of updates says when to end."""
    device: str | None = None
    """`cpu` or `cuda`; None for GPUs where there are some."""
    jobs: int = 1
    """Runs side by side."""

    @property
    def varied(self) -> list[str]:
        """Keys with several values; all of them if none has."""
        return _varied(self.grid)

    @property
    def command(self) -> str:
        """What a user types for this sweep."""
        changes = [f"{key}={','.join(texts)}" for key, texts in self.grid.items()]
        jobs = ["--jobs", str(self.jobs)] if self.jobs > 1 else []
        return shlex.join(["tcnca", "sweep", self.recipe, *changes, "--out", str(self.folder), *jobs, *self._options()])

    def train_command(self, point: Point, *more: str) -> list[str]:
        """The arguments of `tcnca` that run a point."""
        return ["train", self.recipe, *point.changes, *more, *self._options()]

    def others(self) -> int:
        """How many runs of other sweeps are in the folder."""
        mine = {point.folder for point in self.points}
        return sum(path.parent not in mine for path in self.folder.glob(f"*/{RECIPE}"))

    def _options(self) -> list[str]:
        budget = [] if self.budget is None else ["--budget", _time(self.budget)]
        return budget + (["--device", self.device] if self.device else [])


def plan(
    recipe: str,
    changes: Iterable[str],
    folder: Path | None = None,
    *,
    budget: float | None = None,
    device: str | None = None,
    jobs: int = 1,
) -> Sweep:
    """Work out the points of a sweep, and check each before anything runs.

    Args:
        recipe: name or file of a recipe.
        changes: keys with their values, such as `learning_rate=1e-4,1e-3`.
        folder: where the runs go; None for `sweeps/` and the name of the recipe.
        budget: seconds of each run; None where the number of updates says when to end.
        device: `cpu` or `cuda`; None for GPUs where there are some.
        jobs: runs side by side.
    """
    check_device(device)
    grid = parse_grid(changes)
    folder = folder or Path("sweeps") / Path(recipe).stem
    base = load_recipe(recipe)
    combinations = [dict(zip(grid, texts, strict=True)) for texts in itertools.product(*grid.values())]
    wanted = [_checked(base, values) for values in combinations]
    _check_different(base, grid)
    tasks = _tasks(combinations, wanted)
    metrics = sorted({task.metric for task in tasks})
    if len(metrics) > 1:
        raise ConfigError(f"data: its sets are measured by {' and '.join(metrics)}; sweep over them one by one")
    names = [folder_name({key: values[key] for key in _varied(grid)}) for values in combinations]
    places = _places(folder, names, wanted, budget)
    return Sweep(
        recipe=recipe,
        grid=grid,
        folder=folder,
        points=[
            Point(values=values, recipe=each, folder=place)
            for values, each, place in zip(combinations, wanted, places, strict=True)
        ],
        metric=metrics[0],
        higher_is_better=tasks[0].higher_is_better,
        split="validation" if all("validation" in task.data.splits for task in tasks) else "test",
        budget=budget,
        device=device,
        jobs=jobs,
    )


def parse_grid(changes: Iterable[str]) -> dict[str, list[str]]:
    """Keys and their values: `a=1,2` and `b=[3,4],[5,6]` have two each."""
    grid: dict[str, list[str]] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"{change}: got no value, allowed is key=value, for example {change}=1,2")
        if key in grid:
            raise ConfigError(f"{key}: is given twice; give all its values at once: {key}={','.join(grid[key])},{text}")
        grid[key] = _pieces(key, text)
    if not grid:
        raise ConfigError("got no key to sweep over, allowed is key=value,value, such as learning_rate=1e-4,1e-3")
    return grid


def _pieces(key: str, text: str) -> list[str]:
    """A text cut at the commas that are in no brackets and no quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (depth or not pieces[-1].strip()):
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth or quote:
        raise ConfigError(f"{key}: got {text}, in which a bracket or a quote has no partner")
    if len(pieces) > 1 and not all(piece.strip() for piece in pieces):
        raise ConfigError(f"{key}: got {text}, in which a value is empty; write null for no value")
    return [piece.strip() for piece in pieces]


def folder_name(values: dict[str, str]) -> str:
    """A readable name for a run that any file system takes."""
    numbers = {key: parsed(text) for key, text in values.items()}
    # 1e-3 and 0.001 are one number, and get one name.
    texts = {key: str(numbers[key]) if is_number(numbers[key]) else text for key, text in values.items()}
    label = ",".join(f"{key}={text.replace(' ', '')}" for key, text in texts.items())
    safe = re.sub(r"[^\w.=,+\[\]-]", "-", label, flags=re.ASCII)
    if safe == label and len(safe) <= _LONGEST:
        return safe
    # Two that differ only in what was taken out must not meet in one folder.
    return f"{safe[: _LONGEST - 9]}-{zlib.crc32(label.encode()):08x}"


def _varied(grid: dict[str, list[str]]) -> list[str]:
    return [key for key, texts in grid.items() if len(texts) > 1] or list(grid)


def is_number(value: Any) -> bool:
    """Whether a value is one that can be drawn along an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(values: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in values.items())


def _checked(base: Recipe, values: dict[str, str]) -> Recipe:
    changes = [f"{key}={text}" for key, text in values.items()]
    recipe = base.override(changes)
    for place, key in enumerate(values):
        # A change that has another effect when it comes last is overwritten by a later one.
        if base.override([*changes[:place], *changes[place + 1 :], changes[place]]) != recipe:
            raise ConfigError(f"{key}: is given again under another name, in {_label(values)}; give it once")
    return recipe


def _check_different(base: Recipe, grid: dict[str, list[str]]) -> None:
    """A ConfigError if two values of a key are one."""
    first = {key: texts[0] for key, texts in grid.items()}
    for key, texts in grid.items():
        found = [(text, _checked(base, {**first, key: text})) for text in texts]
        for (one, recipe), (other, same) in itertools.combinations(found, 2):
            if recipe == same:
                raise ConfigError(f"{key}: got {one} and {other}, which are the same; give each value once")


def _tasks(combinations: Sequence[dict[str, str]], wanted: Sequence[Recipe]) -> list[Task]:
    """The tasks of all points, each made once, and the models checked against them."""
    made: dict[str, Task] = {}
    tasks = []
    for values, recipe in zip(combinations, wanted, strict=True):
        # Here and not in each run: data of one's own is read once, and a mistake is told before hours of training.
        key = repr(recipe.data)
        made[key] = made[key] if key in made else recipe.build_task()
        try:
            recipe.model_config(made[key])
        except ConfigError as error:
            raise ConfigError(f"{_label(values)}: {error}") from error
        tasks.append(made[key])
    return tasks


def _places(folder: Path, names: Sequence[str], wanted: Sequence[Recipe], budget: float | None) -> list[Path]:
    """The folder of each point: one that holds this very run, whatever its name, or else a new one."""
    there = {path.parent: _readable(path) for path in sorted(folder.glob(f"*/{RECIPE}"))}
    cure = "choose another folder with --out, or remove this one to run it anew"
    places = []
    for name, recipe in zip(names, wanted, strict=True):
        place = folder / name
        found = next((path for path in (place, *there) if there.get(path) == recipe), place)
        before = there.get(found, recipe)
        if isinstance(before, ConfigError):
            raise ConfigError(f"{before}; {cure}") from before
        if before != recipe:
            changed = differences(before, recipe)
            raise ConfigError(f"{place}: holds a run of another recipe, which differs in {changed}; {cure}")
        parts = read_record(found)
        if parts and parts[0].budget != budget:
            was, now = ("none" if time is None else _time(time) for time in (parts[0].budget, budget))
            raise ConfigError(f"{found}: holds a run of another budget, {was}, now {now}; {cure}")
        places.append(found)
    return places


def _readable(path: Path) -> Recipe | ConfigError:
    """The recipe of a run; or what is wrong with it, which is of no interest where the run is not of this sweep."""
    try:
        return load_recipe(str(path))
    except ConfigError as error:
        return error


def _time(seconds: float) -> str:
    """A time as `--budget` takes it."""
    return f"{seconds:.10g}s" if seconds % 60 else f"{seconds / 60:.0f}m"
