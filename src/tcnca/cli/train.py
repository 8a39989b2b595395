"""`tcnca train` and `tcnca eval`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tcnca.cli.reporting import Watcher, explained, say, seconds_of
from tcnca.errors import ConfigError, TrainingError
from tcnca.models import load
from tcnca.training import Checkpoints, Recipe, Result, Run, Watch, evaluate, load_recipe, processes
from tcnca.training.curves import CURVES, draw_curves
from tcnca.training.files import alone_in
from tcnca.training.record import Part, add_part, command, part_of, read_record
from tcnca.training.report import (
    REPORT,
    RESULT,
    Report,
    cost_rows,
    read_result,
    report_of,
    score_rows,
    write_report,
    write_values,
)
from tcnca.training.run import RECIPE

_Changes = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as lr=0.01 num_layers=4.")
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
    options = [*(["--budget", budget] if budget else []), *(["--device", device] if device else [])]
    arguments = ["train", recipe, *(changes or []), *options]
    again = command([*arguments, *(["--out", str(out)] if out else []), "--resume"])
    with explained(f"stopped; go on with\n{again}"):
        wanted = load_recipe(recipe).override(changes or [])
        if print_config:
            say(console, wanted.to_yaml().rstrip())
            return
        name = Path(recipe).stem
        folder = out or Path("runs") / name
        _check_free(folder, resume)
        seconds = seconds_of("budget", budget) if budget else None
        done = _done(folder, wanted, seconds) if resume else ""
        with processes(device) as group, Watch(folder, console if group.first else None) as watch:
            if done:
                watch.say(done)
                return
            run = Run(wanted, folder, group, watch, seconds)
            with alone_in(folder, "run") if group.first else contextlib.nullcontext():
                if group.first:
                    # Another run may have begun, and ended, since.
                    _check_free(folder, resume)
                if resume:
                    _resume(run)
                if group.first:
                    add_part(folder, _part(run, name, command(arguments)), resume)
                result = _trained(run, name)
            report = report_of(run, result) if group.first else None
            # What holds on to the other processes must be gone before they part.
            del run
            gc.collect()
        if report is not None:
            _tell(console, folder, report, again)
    if result.stopped:
        raise typer.Exit(130)


def _check_free(folder: Path, resume: bool) -> None:
    if (folder / RECIPE).exists() and not resume:
        raise ConfigError(f"{folder}: holds a run already; --resume goes on with it, --out chooses another folder")


def _resume(run: Run) -> None:
    begun = read_record(run.folder)
    if begun and begun[0].budget != run.budget:
        was = "no budget" if begun[0].budget is None else f"a budget of {begun[0].budget:g}s"
        raise ConfigError(
            f"--budget: {run.folder} was begun with {was}, which the learning rate follows; give the same again"
        )
    if run.checkpoints.latest() is None:
        run.watch.say(f"{run.folder}: holds no checkpoint to go on from; starting afresh")
    run.resume()


def _part(run: Run, name: str, line: str) -> Part:
    seed = run.recipe.batch.seed
    return part_of(name, line, step=run.progress.step, seed=seed, budget=run.budget, group=run.group)


def _trained(run: Run, name: str) -> Result:
    """Train, and draw the curves however that ends."""
    try:
        result = run.train()
    except TrainingError:
        _draw(run, name)
        raise
    _draw(run, name)
    return result


def _draw(run: Run, name: str) -> None:
    if run.group.first:
        draw_curves(run.folder, name, higher_is_better=run.task.higher_is_better)


def _done(folder: Path, wanted: Recipe, budget: float | None) -> str:
    """What to say of a run that is finished; nothing if there is something left to do."""
    found = read_result(folder)
    # Another recipe, or more time, is for the run itself to accept or refuse.
    if found is None or not (folder / RECIPE).is_file() or load_recipe(str(folder / RECIPE)) != wanted:
        return ""
    if found["step"] < wanted.schedule.max_steps if budget is None else found["seconds"] < budget:
        return ""
    return (
        f"{folder}: the run is finished, after {found['step']:,} updates, and there is nothing left to do; {REPORT} "
        f"there tells of it, and --out chooses another folder for another run"
    )


def _tell(console: Console, folder: Path, report: Report, again: str) -> None:
    if report.stopped:
        say(console, f"stopped by {report.stopped} after update {report.step:,}; go on with\n{again}")
        return
    write_values(folder / RESULT, dataclasses.asdict(report))
    write_report(folder, report)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("split", "metric", "value", "answers"):
        table.add_column(column, justify="right" if column in ("value", "answers") else "left")
    for row in score_rows(report):
        table.add_row(*row)
    console.print(table)
    costs = Table(box=None, show_header=False, pad_edge=False)
    for name, value in cost_rows(report):
        costs.add_row(name, value)
    console.print(costs)
    say(console, f"\nThe run is in {folder}: {REPORT}, {CURVES} and its checkpoints.")


def eval_(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="How to measure, such as data.task.carry_state=false eval.batch_size=8."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Which split.")] = "test",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    device: _Device = None,
) -> None:
    """Measure a trained model on a split."""
    console = Console(emoji=False, highlight=False)
    with explained():
        if not (run / RECIPE).is_file():
            raise ConfigError(f"{run}: is no run; `tcnca train` makes one")
        trained = load_recipe(str(run / RECIPE))
        recipe = trained.override(changes or [])
        _check_measurable(trained, recipe)
        with processes(device) as group:
            kept = Checkpoints(run / "checkpoints", recipe.checkpoint.keep, group)
            place = kept.best() if best else kept.latest()
            if place is None:
                which = "best checkpoint: it was not validated" if best else "checkpoint"
                raise ConfigError(f"{run}: has no {which} yet")
            with _bar(console, split, group.first) as watch:
                score = evaluate(
                    load(place, group.device),
                    recipe.build_task(),
                    split,
                    recipe.eval,
                    precision=recipe.runtime.precision,
                    group=group,
                    watch=watch,
                )
            if group.first:
                # Said first: a folder that cannot be written is not to cost the score.
                say(console, f"{place.name}, {split}: {score.metric} {score.value:.4f} (of {score.count:,})")
                facts = {"checkpoint": place.name, "device": group.device.type, "changes": changes or []}
                values = {"split": split, **facts, **dataclasses.asdict(score)}
                write_values(run / f"{_measurement(split, changes)}.json", values)


def _measurement(split: str, changes: list[str] | None) -> str:
    """The name of a measurement: the same split may be measured in several ways."""
    return re.sub(r"[^\w.=-]+", "_", "-".join(["eval", split, *(changes or [])]))


def _check_measurable(trained: Recipe, recipe: Recipe) -> None:
    """Refuse changes that would change nothing: the model is the one that was trained."""
    for part in ("model", "batch", "optimizer", "schedule", "checkpoint"):
        if getattr(recipe, part) != getattr(trained, part):
            raise ConfigError(f"{part}: is as it was trained, allowed are keys of data, evaluation and engine")


@contextlib.contextmanager
def _bar(console: Console, split: str, first: bool) -> Iterator[Callable[[int], None] | None]:
    """Shows how many batches are done, on the process that speaks."""
    if not first:
        yield None
        return
    with Watcher(console) as watcher:
        yield lambda done: watcher(f"measuring {split}, batches", done, None)
