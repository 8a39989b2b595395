"""`tcnca train` and `tcnca eval`."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tcnca.cli.reporting import explained, say
from tcnca.errors import ConfigError
from tcnca.models import load
from tcnca.training import Checkpoints, Result, Run, Watch, evaluate, load_recipe, processes
from tcnca.training.run import RECIPE

_Changes = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as learning_rate=0.01 layers=4.")
]
_Device = Annotated[str | None, typer.Option(help="cpu or cuda. (default: a GPU where there is one)")]


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe that `tcnca recipes` lists, or a YAML file of yours.")],
    changes: _Changes = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. (default: runs/RECIPE)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
    budget: Annotated[str, typer.Option(help="Time to train, such as 90s, 20m or 2h, in place of updates.")] = "",
    device: _Device = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show what would run, and end.")] = False,
) -> None:
    """Train a model by a recipe. With several devices: `torchrun --nproc-per-node 8 -m tcnca train RECIPE`."""
    console = Console(emoji=False, highlight=False)
    with explained():
        wanted = load_recipe(recipe).override(changes or [])
        if print_config:
            say(console, wanted.to_yaml().rstrip())
            return
        folder = out or Path("runs") / Path(recipe).stem
        if (folder / RECIPE).exists() and not resume:
            raise ConfigError(f"{folder}: holds a run already; --resume goes on with it, --out chooses another folder")
        seconds = _seconds(budget) if budget else None
        with processes(device) as group, Watch(folder, console if group.first else None) as watch:
            run = Run(wanted, folder, group, watch, seconds)
            if resume:
                run.resume()
            result = run.train()
            # What holds on to the other processes must be gone before they part.
            del run
            gc.collect()
        if group.first:
            _tell(console, folder, result, resume)
    if result.stopped:
        raise typer.Exit(130)


def _tell(console: Console, folder: Path, result: Result, resumed: bool) -> None:
    if result.stopped:
        again = shlex.join(["tcnca", *sys.argv[1:], *([] if resumed else ["--resume"])])
        say(console, f"stopped by {result.stopped} after update {result.step:,}; go on with\n{again}")
        return
    values = dataclasses.asdict(result)
    (folder / "result.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    for split, score in result.scores.items():
        say(console, f"{split}: {score.metric} {score.value:.4f} (of {score.count:,})")
    say(console, f"{result.step:,} updates in {result.seconds:,.0f} s; the run is in {folder}")


def eval_(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    changes: _Changes = None,
    split: Annotated[str, typer.Option(help="Which split.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    device: _Device = None,
) -> None:
    """Measure a trained model on a split."""
    console = Console(emoji=False, highlight=False)
    with explained():
        if not (run / RECIPE).is_file():
            raise ConfigError(f"{run}: is no run; `tcnca train` makes one")
        recipe = load_recipe(str(run / RECIPE)).override(changes or [])
        with processes(device) as group:
            kept = Checkpoints(run / "checkpoints", recipe.checkpoint.keep, group)
            place = kept.best() if best else kept.latest()
            if place is None:
                raise ConfigError(f"{run}: has no checkpoint yet")
            task = recipe.build_task()
            config = recipe.evaluation
            score = evaluate(
                load(place, group.device),
                task,
                split,
                config.size,
                chunk=config.chunk,
                precision=recipe.engine.precision,
                group=group,
            )
            if group.first:
                say(console, f"{place.name}, {split}: {score.metric} {score.value:.4f} (of {score.count:,})")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"budget: got {text!r}, allowed are times such as 90s, 20m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
