"""The plan of a sweep: every combination of some values and variants of a recipe, checked before anything runs.

Variants are named sets of changes. In the grid they are the values of the key `variant`, which comes first.
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

import torch

from tcnca.config import closest, parse_value, resolve
from tcnca.data import Task
from tcnca.errors import ConfigError
from tcnca.recipes import find, read_yaml
from tcnca.training.distributed import check_device
from tcnca.training.provenance import RECIPE, read_launches
from tcnca.training.recipe import Recipe, differences, load_recipe

VARIANT = "variant"
"""The key whose values are names of variants."""
_VARIANT_KEYS = ("about", "recipe", "variants")
_VARIANT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*")
_MAX_NAME = 120
"""Characters of the name of a run directory; file systems allow 255 bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants:
    """Named sets of changes to a recipe."""

    name: str
    """Name or file, as given."""
    about: str = ""
    """What is compared."""
    recipe: str = ""
    """Recipe that the variants are meant for; they may fit others."""
    only: tuple[str, ...] = ()
    """Variants that were selected; empty for all."""
    changes: dict[str, list[str]]
    """Changes of each selected variant."""

    @property
    def arguments(self) -> list[str]:
        """The options that select them on the command line."""
        return ["--variants", self.name, *(["--only", ",".join(self.only)] if self.only else [])]

    def advice(self, recipe: str) -> str:
        """Return a note for errors if the variants are meant for another recipe."""
        return "" if self.recipe in ("", recipe) else f" (the variants of {self.name} are for {self.recipe})"


def load_variants(name: str, only: Sequence[str] = ()) -> Variants:
    """Load variants.

    Args:
        name: name of a file of the library, or path of a YAML file.
        only: the variants to select; empty for all.
    """
    values = read_yaml(find(name, "variants"), name)
    try:
        for key in values:
            if key not in _VARIANT_KEYS:
                raise ConfigError(f"{key}: expected a key of a variants file ({', '.join(_VARIANT_KEYS)})")
        found = values.get("variants")
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"variants: expected names with lists of changes, got {found!r}")
        changes = {_variant_name(each): _change_list(each, texts) for each, texts in found.items()}
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    for each in only:
        if each not in changes:
            close = closest(each, changes)
            hint = f"did you mean {close}? " if close else ""
            raise ConfigError(f"--only: {hint}Expected variants of {name} ({', '.join(changes)}), got {each!r}")
    selected = {each: texts for each, texts in changes.items() if each in only or not only}
    about, recipe = (str(values.get(key) or "") for key in ("about", "recipe"))
    return Variants(name=name, about=about, recipe=recipe, only=tuple(selected) if only else (), changes=selected)


def _variant_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"variants: expected a name, got {name!r}, which YAML does not read as text; put it in quotes")
    if not _VARIANT_NAME.fullmatch(name):
        raise ConfigError(f"variants: expected a name of a letter, then letters, digits and _.+-, got {name!r}")
    return name


def _change_list(name: str, texts: Any) -> list[str]:
    if not isinstance(texts, list):
        raise ConfigError(
            f"variant {name}: expected a list such as [num_layers=4], or [] for no change, got {texts!r}"
        )
    for text in texts:
        if not isinstance(text, str) or "=" not in text:
            raise ConfigError(f"variant {name}: expected key=value, in quotes if it has a comma, got {text!r}")
    return texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of values: a run."""

    values: dict[str, str]
    """Keys and their values, as given."""
    changes: list[str]
    """Changes to the recipe: the values, with the changes of a variant in place of its name."""
    recipe: Recipe
    """The recipe with these changes."""
    folder: Path
    """Run directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A recipe, and the points at which it is trained."""

    recipe: str
    """Name or file of the recipe."""
    grid: dict[str, list[str]]
    """Keys and their values, in the order given."""
    folder: Path
    """Directory of the runs and the tables."""
    points: list[Point]
    """Every combination of values; the last key changes fastest."""
    metric: str
    """Metric of all runs."""
    higher_is_better: bool
    """Whether a greater metric is better."""
    split: str
    """Split whose score selects a point: validation, or test if there is no other."""
    budget: float | None = None
    """Seconds of each run; None if the number of steps ends it."""
    device: str | None = None
    """`cpu` or `cuda`; None for GPUs if there are any."""
    jobs: int = 1
    """Runs at a time."""
    variants: Variants | None = None
    """Variants that are compared, if any."""

    @property
    def varied(self) -> list[str]:
        """Keys with several values, and `variant`; all keys if there are none of these."""
        return _varied(self.grid)

    @property
    def seed(self) -> str | None:
        """The seed's key, if it has several values and so repeats runs."""
        seeds = (key for key in self.varied if key != VARIANT and resolve(Recipe, key) == "batch.seed")
        return next((key for key in seeds if len(self.grid[key]) > 1), None)

    @property
    def compared(self) -> list[str]:
        """Keys that vary, without the seed."""
        return [key for key in self.varied if key != self.seed]

    @property
    def command(self) -> str:
        """The command of this sweep."""
        changes = [f"{key}={','.join(texts)}" for key, texts in self.grid.items() if key != VARIANT]
        variants = self.variants.arguments if self.variants else []
        jobs = ["--jobs", str(self.jobs)] if self.jobs > 1 else []
        options = [*variants, "--out", str(self.folder), *jobs, *self._options()]
        return shlex.join(["tcnca", "sweep", self.recipe, *changes, *options])

    def train_command(self, point: Point, *more: str) -> list[str]:
        """Return the arguments of `tcnca` that run a point."""
        return ["train", self.recipe, *point.changes, *more, *self._options()]

    def count_others(self) -> int:
        """Return the number of runs in the directory that are not of this sweep."""
        mine = {point.folder for point in self.points}
        return sum(path.parent not in mine for path in self.folder.glob(f"*/{RECIPE}"))

    def _options(self) -> list[str]:
        budget = [] if self.budget is None else ["--budget", _duration(self.budget)]
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
    """Work out the points of a sweep, and check each of them before anything runs.

    Args:
        recipe: name or file of a recipe.
        changes: keys with their values, such as `lr=1e-4,1e-3`.
        folder: directory of the runs; None for `sweeps/` and the names of the recipe and the variants.
        variants: sets of changes, each of which is combined with all values.
        budget: seconds of each run; None if the number of steps ends it.
        device: `cpu` or `cuda`; None for GPUs if there are any.
        jobs: runs at a time.
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
        raise ConfigError("expected keys to sweep over, key=value,value, such as lr=1e-4,1e-3, got none")
    combinations = [dict(zip(grid, texts, strict=True)) for texts in itertools.product(*grid.values())]
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    recipes = [_recipe_of_point(base, values, variants, advice).for_device(kind) for values in combinations]
    _check_different(base, grid, variants)
    tasks = _build_tasks(combinations, recipes, advice)
    metrics = sorted({task.metric for task in tasks})
    if len(metrics) > 1:
        raise ConfigError(f"data: its data sets have different metrics, {' and '.join(metrics)}; sweep over each alone")
    names = [folder_name({key: values[key] for key in _varied(grid)}) for values in combinations]
    folders = _run_folders(folder, names, recipes, budget)
    return Sweep(
        recipe=recipe,
        grid=grid,
        folder=folder,
        points=[
            Point(values=values, changes=_changes(values, variants), recipe=each, folder=place)
            for values, each, place in zip(combinations, recipes, folders, strict=True)
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
    """Return keys and their values: `a=1,2` and `b=[3,4],[5,6]` have two each."""
    grid: dict[str, list[str]] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"{change}: expected key=value, for example {change}=1,2")
        if key in grid:
            raise ConfigError(f"{key}: is given twice; give all its values at once: {key}={','.join(grid[key])},{text}")
        grid[key] = _split_values(key, text)
    return grid


def _split_values(key: str, text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes."""
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
        raise ConfigError(f"{key}: a bracket or quote is not closed in {text}")
    if len(pieces) > 1 and not all(piece.strip() for piece in pieces):
        raise ConfigError(f"{key}: a value is empty in {text}; write null for no value")
    return [piece.strip() for piece in pieces]


def folder_name(values: dict[str, str]) -> str:
    """Return a readable name for a run directory that any file system accepts."""
    numbers = {key: parse_value(text) for key, text in values.items()}
    # 1e-3 and 0.001 are the same number and get the same name.
    texts = {key: str(numbers[key]) if is_number(numbers[key]) else text for key, text in values.items()}
    label = ",".join(f"{key}={text.replace(' ', '')}" for key, text in texts.items())
    safe = re.sub(r"[^\w.=,+\[\]-]", "-", label, flags=re.ASCII)
    if safe == label and len(safe) <= _MAX_NAME:
        return safe
    # Values that differ only in what was replaced must not share a directory.
    return f"{safe[: _MAX_NAME - 9]}-{zlib.crc32(label.encode()):08x}"


def is_number(value: Any) -> bool:
    """Return whether a value can be drawn along an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _varied(grid: dict[str, list[str]]) -> list[str]:
    # A single variant is named too, so that others can be added to the same directory.
    return [key for key, texts in grid.items() if key == VARIANT or len(texts) > 1] or list(grid)


def _label(values: dict[str, str]) -> str:
    return " ".join(f"{key}={text}" for key, text in values.items())


def _changes(values: dict[str, str], variants: Variants | None) -> list[str]:
    of_variant = variants.changes[values[VARIANT]] if variants else []
    return [*of_variant, *(f"{key}={text}" for key, text in values.items() if key != VARIANT or not variants)]


def _keys(changes: Iterable[str]) -> list[str]:
    return [change.partition("=")[0].strip() for change in changes]


def _check_variants(variants: Variants, grid: dict[str, list[str]], advice: str) -> None:
    """Raise a ConfigError if a variant changes a key that has values in the grid."""
    if VARIANT in grid:
        raise ConfigError(f"{VARIANT}: expected keys of a recipe, got {','.join(grid[VARIANT])}; --only selects variants")
    for key in grid:
        # An unknown key of the grid is not the fault of a variant.
        resolve(Recipe, key)
    for variant, changes in variants.changes.items():
        try:
            found = {key: resolve(Recipe, key) for key in (*_keys(changes), *grid)}
            twice = [(changed, key) for changed in _keys(changes) for key in grid if found[changed] == found[key]]
        except ConfigError as error:
            raise ConfigError(f"variant {variant}: {error}{advice}") from error
        for changed, key in twice:
            raise ConfigError(f"variant {variant}: changes {changed}, but {key} is given as well; leave one of them out")


def _recipe_of_point(base: Recipe, values: dict[str, str], variants: Variants | None, advice: str) -> Recipe:
    """Return the recipe of a point. An error that a variant causes names the variant."""
    try:
        return base.override(_changes(values, variants))
    except ConfigError as error:
        if variants is None:
            raise
        # Raises first if the values alone are wrong.
        base.override(f"{key}={text}" for key, text in values.items() if key != VARIANT)
        raise ConfigError(f"variant {values[VARIANT]}: {error}{advice}") from error


def _check_different(base: Recipe, grid: dict[str, list[str]], variants: Variants | None) -> None:
    """Raise a ConfigError if two values of a key are the same."""
    first = {key: texts[0] for key, texts in grid.items()}
    for key, texts in grid.items():
        found = [(text, base.override(_changes({**first, key: text}, variants))) for text in texts]
        for (one, recipe), (other, same) in itertools.combinations(found, 2):
            if recipe == same:
                raise ConfigError(f"{key}: {one} and {other} are the same; give each value once")


def _build_tasks(combinations: Sequence[dict[str, str]], recipes: Sequence[Recipe], advice: str) -> list[Task]:
    """Build the task of each point, each data set once, and check the models against them."""
    built: dict[str, Task] = {}
    seen: dict[str, str] = {}
    tasks = []
    for values, recipe in zip(combinations, recipes, strict=True):
        # Here and not in each run: data is read once, and mistakes show before hours of training.
        key = repr(recipe.data)
        built[key] = built[key] if key in built else recipe.build_task()
        try:
            model = recipe.model_config(built[key])
        except ConfigError as error:
            raise ConfigError(f"{_label(values)}: {error}{advice}") from error
        # Different recipes may mean one model, for example if a value is that of the preset anyway.
        whole = repr((model, dataclasses.replace(recipe, model={}, about="")))
        if whole in seen:
            raise ConfigError(f"{_label(values)}: is the same as {seen[whole]}; give each once")
        seen[whole] = _label(values)
        tasks.append(built[key])
    return tasks


def _run_folders(
    folder: Path, names: Sequence[str], recipes: Sequence[Recipe], budget: float | None
) -> list[Path]:
    """Return the directory of each point: one that holds the same run, whatever its name, or else a new one."""
    present = {path.parent: _try_load(path) for path in sorted(folder.glob(f"*/{RECIPE}"))}
    remedy = "choose another directory with --out, or remove this one to run it again"
    folders = []
    for name, recipe in zip(names, recipes, strict=True):
        place = folder / name
        found = next((path for path in (place, *present) if present.get(path) == recipe), place)
        before = present.get(found, recipe)
        if isinstance(before, ConfigError):
            raise ConfigError(f"{before}; {remedy}") from before
        if before != recipe:
            raise ConfigError(
                f"{place}: holds a run of another recipe, which differs in {differences(before, recipe)}; {remedy}"
            )
        launches = read_launches(found)
        if launches and launches[0].budget != budget:
            was, now = ("none" if time is None else _duration(time) for time in (launches[0].budget, budget))
            raise ConfigError(f"{found}: holds a run with another budget, {was}, now {now}; {remedy}")
        folders.append(found)
    return folders


def _try_load(path: Path) -> Recipe | ConfigError:
    """Return the recipe of a run, or its error, which matters only if the run is of this sweep."""
    try:
        return load_recipe(str(path))
    except ConfigError as error:
        return error


def _duration(seconds: float) -> str:
    """Return a time as `--budget` takes it."""
    return f"{seconds:.10g}s" if seconds % 60 else f"{seconds / 60:.0f}m"
