"""What a sweep is to run: every combination of some values of a recipe's keys, checked before anything runs.

Variants are values of a key of their own, `variant`, which comes first.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tcnca.config import parse_value, resolve
from tcnca.data import Task
from tcnca.errors import ConfigError
from tcnca.training.processes import check_device
from tcnca.training.recipe import Recipe, differences, load_recipe
from tcnca.training.record import read_record
from tcnca.training.run import RECIPE
from tcnca.training.sweeps.variants import VARIANT, Variants

_LONGEST = 120
"""Letters of a folder's name; file systems allow 255 bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of values: a run."""

    values: dict[str, str]
    """Keys, and the value of each as it was given."""
    changes: list[str]
    """What it changes of the recipe: these values, with the changes of a variant in place of its name."""
    recipe: Recipe
    """What it trains."""
    folder: Path
    """Where it does."""


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
    variants: Variants | None = None
    """What the names of variants stand for; None where none are compared."""

    @property
    def varied(self) -> list[str]:
        """Keys with several values, and `variant`; all of them if there are none of these."""
        return _varied(self.grid)

    @property
    def seed(self) -> str | None:
        """The key that only repeats runs, if it has several values."""
        return next((key for key in self.varied if len(self.grid[key]) > 1 and _is_seed(key)), None)

    @property
    def compared(self) -> list[str]:
        """The keys that vary, without the seed."""
        return [key for key in self.varied if key != self.seed]

    @property
    def command(self) -> str:
        """What a user types for this sweep."""
        changes = [f"{key}={','.join(texts)}" for key, texts in self.grid.items() if key != VARIANT]
        variants = self.variants.arguments if self.variants else []
        jobs = ["--jobs", str(self.jobs)] if self.jobs > 1 else []
        options = [*variants, "--out", str(self.folder), *jobs, *self._options()]
        return shlex.join(["tcnca", "sweep", self.recipe, *changes, *options])

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
    variants: Variants | None = None,
    budget: float | None = None,
    device: str | None = None,
    jobs: int = 1,
) -> Sweep:
    """Work out the points of a sweep, and check each before anything runs.

    Args:
        recipe: name or file of a recipe.
        changes: keys with their values, such as `lr=1e-4,1e-3`.
        folder: where the runs go; None for `sweeps/` and the name of the recipe.
        variants: sets of changes, each of which is combined with all values.
        budget: seconds of each run; None where the number of updates says when to end.
        device: `cpu` or `cuda`; None for GPUs where there are some.
        jobs: runs side by side.
    """
    check_device(device)
    grid = parse_grid(changes)
    folder = folder or Path("sweeps") / "-".join(Path(name).stem for name in (recipe, variants and variants.name) if name)
    base = load_recipe(recipe)
    advice = variants.advice(recipe) if variants else ""
    if variants is not None:
        _check_variants(variants, grid, advice)
        grid = {VARIANT: list(variants.changes), **grid}
    if not grid:
        raise ConfigError("got no key to sweep over, allowed is key=value,value, such as lr=1e-4,1e-3")
    combinations = [dict(zip(grid, texts, strict=True)) for texts in itertools.product(*grid.values())]
    wanted = [_blamed(base, values, variants, advice) for values in combinations]
    _check_different(base, grid, variants)
    tasks = _tasks(combinations, wanted, advice)
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
            Point(values=values, changes=_changes(values, variants), recipe=each, folder=place)
            for values, each, place in zip(combinations, wanted, places, strict=True)
        ],
        metric=metrics[0],
        higher_is_better=tasks[0].higher_is_better,
        split="validation" if all("validation" in task.data.splits for task in tasks) else "test",
        budget=budget,
        device=device,
        jobs=jobs,
        variants=variants,
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
    numbers = {key: parse_value(text) for key, text in values.items()}
    # 1e-3 and 0.001 are one number, and get one name.
    texts = {key: str(numbers[key]) if is_number(numbers[key]) else text for key, text in values.items()}
    label = ",".join(f"{key}={text.replace(' ', '')}" for key, text in texts.items())
    safe = re.sub(r"[^\w.=,+\[\]-]", "-", label, flags=re.ASCII)
    if safe == label and len(safe) <= _LONGEST:
        return safe
    # Two that differ only in what was taken out must not meet in one folder.
    return f"{safe[: _LONGEST - 9]}-{zlib.crc32(label.encode()):08x}"


def _varied(grid: dict[str, list[str]]) -> list[str]:
    # A variant is named also where it is the only one, so that others may come into the same folder.
    return [key for key, texts in grid.items() if key == VARIANT or len(texts) > 1] or list(grid)


def _is_seed(key: str) -> bool:
    return key != VARIANT and resolve(Recipe, key) == "batch.seed"


def is_number(value: Any) -> bool:
    """Whether a value is one that can be drawn along an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(values: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in values.items())


def _changes(values: dict[str, str], variants: Variants | None) -> list[str]:
    """What some values change of a recipe."""
    own = variants.changes[values[VARIANT]] if variants else []
    return [*own, *(f"{key}={text}" for key, text in values.items() if key != VARIANT or not variants)]


def _check_variants(variants: Variants, grid: dict[str, list[str]], advice: str) -> None:
    """A ConfigError if a variant changes what has values of its own."""
    if VARIANT in grid:
        raise ConfigError(
            f"{VARIANT}: got {','.join(grid[VARIANT])}, allowed are keys of a recipe; --only picks variants"
        )
    for key in grid:
        # One that does not exist is no mistake of a variant.
        resolve(Recipe, key)
    for variant, changes in variants.changes.items():
        try:
            twice = [(own, key) for own in _keys(changes) for key in grid if resolve(Recipe, own) == resolve(Recipe, key)]
        except ConfigError as error:
            raise ConfigError(f"variant {variant}: {error}{advice}") from error
        for own, key in twice:
            raise ConfigError(f"variant {variant}: changes {own}, and {key} is given as well; leave one of them out")


def _keys(changes: Iterable[str]) -> list[str]:
    return [change.partition("=")[0].strip() for change in changes]


def _checked(base: Recipe, values: dict[str, str], variants: Variants | None) -> Recipe:
    changes = _changes(values, variants)
    recipe = base.override(changes)
    for place, key in enumerate(_keys(changes)):
        # A change that has another effect when it comes last is overwritten by a later one.
        if base.override([*changes[:place], *changes[place + 1 :], changes[place]]) != recipe:
            raise ConfigError(f"{key}: is given again under another name, in {' '.join(changes)}; give it once")
    return recipe


def _blamed(base: Recipe, values: dict[str, str], variants: Variants | None, advice: str) -> Recipe:
    """A recipe that is checked; if it is a variant that is wrong, with the name of it."""
    try:
        return _checked(base, values, variants)
    except ConfigError as error:
        if variants is None:
            raise
        # What is wrong without the variant as well is no mistake of it.
        _checked(base, {key: text for key, text in values.items() if key != VARIANT}, None)
        raise ConfigError(f"variant {values[VARIANT]}: {error}{advice}") from error


def _check_different(base: Recipe, grid: dict[str, list[str]], variants: Variants | None) -> None:
    """A ConfigError if two values of a key are one."""
    first = {key: texts[0] for key, texts in grid.items()}
    for key, texts in grid.items():
        found = [(text, _checked(base, {**first, key: text}, variants)) for text in texts]
        for (one, recipe), (other, same) in itertools.combinations(found, 2):
            if recipe == same:
                raise ConfigError(f"{key}: got {one} and {other}, which are the same; give each value once")


def _tasks(combinations: Sequence[dict[str, str]], wanted: Sequence[Recipe], advice: str) -> list[Task]:
    """The tasks of all points, each made once, and the models checked against them."""
    made: dict[str, Task] = {}
    seen: dict[str, str] = {}
    tasks = []
    for values, recipe in zip(combinations, wanted, strict=True):
        # Here and not in each run: data of one's own is read once, and a mistake is told before hours of training.
        key = repr(recipe.data)
        made[key] = made[key] if key in made else recipe.build_task()
        try:
            model = recipe.model_config(made[key])
        except ConfigError as error:
            raise ConfigError(f"{_label(values)}: {error}{advice}") from error
        # Recipes that say it otherwise may mean one model, such as by a value that the preset has anyway.
        whole = repr((model, dataclasses.replace(recipe, model={}, about="")))
        if whole in seen:
            raise ConfigError(f"{_label(values)}: is the same as {seen[whole]}; give each once")
        seen[whole] = _label(values)
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
