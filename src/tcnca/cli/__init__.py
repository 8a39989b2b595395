"""The command line: one table of subcommands, whose modules are imported when they run.

No module in `tcnca.cli` imports PyTorch, or a package of tcnca that does, at module level: help, the version and
mistakes in arguments are answered at once. Commands import what they need inside their functions.
"""

from __future__ import annotations

import importlib
import inspect
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tcnca.cli.boundary import report_errors
from tcnca.errors import Stopped
from tcnca.version import __version__

# Name of the command: where it is, a function or a group of commands, and its line in `tcnca --help`.
COMMANDS = {
    "demo": ("tcnca.cli.demo:demo", "Continue a text, train a small model on associative recall, and query it."),
    "models": ("tcnca.cli.models:models", "List the models: size, receptive field, streaming state and cost."),
    "inspect": (
        "tcnca.cli.inspection:inspect",
        "Show size, cost and receptive field of a model, and pictures of what it has learned.",
    ),
    "recipes": ("tcnca.cli.models:recipes", "List the recipes, or print one with all its keys."),
    "train": ("tcnca.cli.train:train", "Train a model from a recipe."),
    "sweep": ("tcnca.cli.sweep:sweep", "Train a recipe with every combination of the given values."),
    "eval": ("tcnca.cli.train:eval_", "Evaluate a trained model on a split."),
    "compare": ("tcnca.cli.train:compare", "Compare runs: scores, cost, curves, and the time to a score."),
    "reproduce": ("tcnca.cli.reproduce:reproduce", "Run the experiments behind the tables of the paper."),
    "report": ("tcnca.cli.reproduce:report", "Show our results beside the paper's, as a page with figures."),
    "predict": ("tcnca.cli.predict:predict", "Predict classes, values or forecasts with a trained model."),
    "generate": ("tcnca.cli.generate:generate", "Continue a prompt with a language model."),
    "score": ("tcnca.cli.score:score", "Measure the bits per byte of a text, and find its most surprising places."),
    "watch": ("tcnca.cli.watch:watch", "Follow a growing log, and print its unusual lines."),
    "export": ("tcnca.cli.export:export", "Write a trained model to an ONNX file, or to a small folder."),
    "data": ("tcnca.cli.data:app", "Prepare, list and show data sets."),
    "search": ("tcnca.cli.search:search", "Choose kernel size, dilation factor and depth of the TCN for a length."),
    "bench": ("tcnca.cli.bench:app", "Measure speed and memory of operators, layers and models."),
}
# Unknown options reach these commands, which answer `--lr 1e-3` with `lr=1e-3`.
_KEY_VALUE_COMMANDS = ("train", "sweep", "search")


def _improve_help(command: Any) -> None:
    """Let the paragraphs of help be wrapped to the terminal, and hide the type of flags, which take no value."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _improve_help(each)


class _LazyCommand(TyperCommand):
    """Stands for a command in `tcnca --help`, and imports it when it runs."""

    def __init__(self, name: str, target: str, help: str) -> None:
        super().__init__(name, help=help)
        self.target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        loaded: Any
        if isinstance(command, typer.Typer):
            loaded = typer.main.get_group(command)
        else:
            single = typer.Typer(add_completion=False)
            settings = {"ignore_unknown_options": self.name in _KEY_VALUE_COMMANDS}
            single.command(self.name, context_settings=settings)(command)
            loaded = typer.main.get_command(single)
        _improve_help(loaded)
        return loaded


class _LazyGroup(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: _LazyCommand(name, *entry) for name, entry in COMMANDS.items()}

    def main(self, *args: Any, **settings: Any) -> Any:
        _improve_help(self)  # here, since Typer adds the options of completion after the group is made
        with report_errors():
            return super().main(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # Typer would end without the message.
            stopped = Stopped(signal.SIGINT)
            for note in getattr(error, "__notes__", ()):
                stopped.add_note(note)
            raise stopped from error


app = typer.Typer(
    name="tcnca",
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"tcnca {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """TCNCA and related models for very long sequences."""
