"""The plan of a sweep: every combination of some values and variants of a recipe, checked before anything runs.

Variants are named sets of changes. In the grid they are the values of the key `variant`, which comes first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import shlex
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tcnca.config import canonical, check, check_choice, prefixed, resolve
from tcnca.data import Task
from tcnca.errors import ConfigError, shown
from tcnca.models import SequenceModel
from tcnca.recipes import find
from tcnca.training.distributed import check_device
from tcnca.training.provenance import RECIPE, read_launches
from tcnca.training.recipe import Recipe, differences, load_recipe
from tcnca.yaml_reader import parse_overrides, parse_value, read_yaml

VARIANT = "variant"
"""The key whose values are names of variants."""
_MAX_NAME = 120
"""Characters of the name of a run directory; file systems allow 255 bytes."""
_MAX_RUNS = 10_000
"""Runs of a sweep, all of which are checked before the first one starts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants:
    """Named sets of changes to a recipe."""

    name: str
    """Name or file, as given."""
    about: str = ""
    """What is compared."""
    recipe: str = ""
    """Recipe that the variants are intended for."""
    changes: dict[str, list[str]]
    """Changes of each selected variant."""


def load_variants(name: str, only: Sequence[str] = ()) -> Variants:
    """Load variants.

    Args:
        name: name of a built-in file, or path of a YAML file.
        only: the variants to select; empty for all.
    """
    values = read_yaml(find(name, "variants"), name)
    for key in values:
        prefixed(f"{name}: ", functools.partial(check_choice, key, key, ("about", "recipe", "variants")))
    variants = values.get("variants")
    if not isinstance(variants, dict) or not variants:
        raise ConfigError(f"{name}: variants: expected names with lists of changes, got {shown(variants)}")
    for variant, changes in variants.items():
        if not isinstance(variant, str) or not re.fullmatch(r"[A-Za-z][\w.+-]*", variant, re.ASCII):
            raise ConfigError(
                f"{name}: variants: expected a name of letters, digits and _.+-, in quotes if YAML does not read it as "
                f"text, got {shown(variant)}"
            )
        if not isinstance(changes, list) or not all(isinstance(text, str) and "=" in text for text in changes):
            raise ConfigError(
                f"{name}: variant {variant}: expected a list such as [num_layers=4, 'betas=[0.9, 0.99]'], or [] for no "
                f"change, got {shown(changes)}"
            )
    for each in only:
        check_choice("--only", each, variants)
    selected = {variant: changes for variant, changes in variants.items() if not only or variant in only}
    about, recipe = (check(f"{name}: {key}", values.get(key) or "", str) for key in ("about", "recipe"))
    return Variants(name=name, about=about, recipe=recipe, changes=selected)


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
    """`cpu`, `cuda` or `mps`; None for GPUs if there are any."""
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
        keys = (key for key in self.varied if key != VARIANT and len(self.grid[key]) > 1)
        return next((key for key in keys if resolve(Recipe, key) == "batch.seed"), None)

    @property
    def compared(self) -> list[str]:
        """Keys that vary, without the seed unless it is the only one."""
        return [key for key in self.varied if key != self.seed] or self.varied

    @property
    def command(self) -> str:
        """The command of this sweep."""
        changes = [f"{key}={','.join(texts)}" for key, texts in self.grid.items() if key != VARIANT]
        if self.variants is not None:
            changes += ["--variants", self.variants.name, "--only", ",".join(self.variants.changes)]
        options = ["--out", str(self.folder), "--jobs", str(self.jobs), *self._options()]
        return shlex.join(["tcnca", "sweep", self.recipe, *changes, *options])

    def train_command(self, point: Point, *more: str) -> list[str]:
        """Return the arguments of `tcnca` that run a point."""
        return ["train", self.recipe, *point.changes, *more, *self._options()]

    def _options(self) -> list[str]:
        budget = [] if self.budget is None else ["--budget", f"{self.budget:.10g}s"]
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
        device: `cpu`, `cuda` or `mps`; None for GPUs if there are any.
        jobs: runs at a time.
    """
    check_device(device)
    grid = parse_grid(changes)
    names = [Path(name).stem for name in (recipe, variants.name if variants else "") if name]
    folder = folder or Path("sweeps") / "-".join(names)
    if variants is not None:
        _check_variants(variants, grid)
        grid = {VARIANT: list(variants.changes), **grid}
    if not grid:
        raise ConfigError("expected keys to sweep over, key=value,value, such as lr=1e-4,1e-3, got none")
    runs = math.prod(len(texts) for texts in grid.values())
    if runs > _MAX_RUNS:
        raise ConfigError(f"expected a sweep of at most {_MAX_RUNS:,} runs, got {runs:,}; give fewer values")
    base = load_recipe(recipe)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    points = []
    for texts in itertools.product(*grid.values()):
        values = dict(zip(grid, texts, strict=True))
        name = folder_name({key: values[key] for key in _varied(grid)})
        of_variant = variants.changes[values[VARIANT]] if variants else []
        overrides = [*of_variant, *(f"{key}={text}" for key, text in values.items() if not variants or key != VARIANT)]
        changed = prefixed(f"{name}: ", functools.partial(base.override, overrides)).for_device(kind)
        points.append(Point(values=values, changes=overrides, recipe=changed, folder=folder / name))
    tasks = _build_tasks(points)
    metrics = sorted({task.metric for task in tasks})
    if len(metrics) > 1:
        raise ConfigError(f"data: its data sets have different metrics, {' and '.join(metrics)}; sweep over each alone")
    for point in points:
        _check_folder(point, budget)
    return Sweep(
        recipe=recipe,
        grid=grid,
        folder=folder,
        points=points,
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
        key, equals, text = (part.strip() for part in change.partition("="))
        if not equals:
            word = shown(change)[1:-1]
            raise ConfigError(f"{word}: expected key=value, for example {word}=1,2")
        if key in grid:
            raise ConfigError(f"{key}: is given twice; give all its values at once: {key}={','.join(grid[key])},{text}")
        grid[key] = _split_values(text)
    return grid


def _split_values(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    depth, ends = 0, [-1]
    for place, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            ends.append(place)
    return [text[start + 1 : end].strip() for start, end in itertools.pairwise([*ends, len(text)])]


def folder_name(values: dict[str, str]) -> str:
    """Return a readable name for a run directory that any file system accepts."""
    # 1e-3 and 0.001 are the same number and get the same name.
    parsed = {key: prefixed(f"{key}: ", functools.partial(parse_value, text)) for key, text in values.items()}
    numbers = {key: value for key, value in parsed.items() if isinstance(value, float)}
    label = ",".join(f"{key}={numbers.get(key, text.replace(' ', ''))}" for key, text in values.items())
    safe = re.sub(r"[^\w.=,+\[\]-]", "-", label, flags=re.ASCII)
    if safe == label and len(safe) <= _MAX_NAME:
        return safe
    # Values that differ only in what was replaced must not share a directory.
    checksum = zlib.crc32(label.encode(errors="backslashreplace"))
    return f"{safe[: _MAX_NAME - 9]}-{checksum:08x}"


def _varied(grid: dict[str, list[str]]) -> list[str]:
    # A single variant is named too, so that others can be added to the same directory.
    return [key for key, texts in grid.items() if key == VARIANT or len(texts) > 1] or list(grid)


def _check_variants(variants: Variants, grid: dict[str, list[str]]) -> None:
    """Raise a ConfigError if a variant changes a key that has values in the grid."""
    given = {resolve(Recipe, key): key for key in grid}
    for variant, changes in variants.changes.items():
        found = prefixed(f"variant {variant}: ", functools.partial(canonical, Recipe, parse_overrides(changes)))
        for path in found.keys() & given.keys():
            raise ConfigError(f"variant {variant}: changes {path}, but {given[path]} is given too; leave one out")


def _build_tasks(points: Sequence[Point]) -> list[Task]:
    """Build the task of each point, each data set once, and check the models against them."""
    built: dict[str, Task] = {}
    seen: dict[str, str] = {}
    sources: dict[str, SequenceModel] = {}
    tasks = []
    for point in points:
        # Here and not in each run: data is read once, and mistakes show before hours of training.
        recipe, name, key = point.recipe, point.folder.name, repr(point.recipe.data)
        task = built[key] = built[key] if key in built else recipe.build_task()
        model = prefixed(f"{name}: ", functools.partial(recipe.model_config, task))
        if recipe.init_from is not None:
            source = sources[recipe.init_from] = sources.get(recipe.init_from) or recipe.load_source()
            with torch.device("meta"):
                target = SequenceModel(model, task.preprocessing())
            prefixed(f"{name}: ", functools.partial(recipe.initialize, target, source))
        # Different recipes may mean one model, for example if a value is that of the preset anyway.
        whole = repr((model, dataclasses.replace(recipe, model={}, about="")))
        if whole in seen:
            raise ConfigError(f"{name}: is the same as {seen[whole]}; give each once")
        seen[whole] = name
        tasks.append(task)
    return tasks


def _check_folder(point: Point, budget: float | None) -> None:
    """Raise a ConfigError if the directory of a point holds another run."""
    if not (point.folder / RECIPE).exists():
        return
    remedy = "choose another directory with --out, or remove this one to run it again"
    before, launches = load_recipe(str(point.folder / RECIPE)), read_launches(point.folder)
    if before != point.recipe:
        changed = differences(before, point.recipe)
        raise ConfigError(f"{point.folder}: holds a run of another recipe, which differs in {changed}; {remedy}")
    if launches and launches[0].budget != budget:
        raise ConfigError(
            f"{point.folder}: holds a run with the budget {launches[0].budget}, in seconds, now {budget}; {remedy}"
        )
