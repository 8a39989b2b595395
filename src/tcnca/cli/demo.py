"""`tcnca demo`: train a small model on associative recall, then ask it; or show that all models stream."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tcnca.cli.models import models_table
from tcnca.cli.reporting import report_errors
from tcnca.cli.train import train
from tcnca.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from tcnca.data import Task
    from tcnca.models import SequenceModel
    from tcnca.training import Recipe

NAME = "recall-small"
FOLDER = Path("runs") / "demo"
GOAL = 0.99
QUESTION = "a 2 c 4 b 3 d 1"
_EXAMPLES = 3
_LINE = 32
"""Tokens per printed line, which fit into 80 characters."""

# With --streaming: one model of each kind, with chunks so short that the sequence crosses some.
STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "tcnca-enwik8": ("tcnca-enwik8", {"chunk_size": 48}),
    "tcnca-linear-enwik8": ("tcnca-linear-enwik8", {"chunk_size": 48}),
    "mega-enwik8, chunked": ("mega-enwik8", {"chunk_size": 48}),
    "mega-enwik8, full": ("mega-enwik8", {"chunk_size": None}),
    "tcn-mlp-enwik8": ("tcn-mlp-enwik8", {}),
    "ema-mlp-enwik8": ("ema-mlp-enwik8", {}),
    "tcnca-simple-recall-64": ("tcnca-simple-recall-64", {}),
}
# Rounding in float32 over twelve layers; a wrong tap or a lost key gives errors a thousand times larger.
STREAMING_TOLERANCE = 1e-4


def demo(
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as lr=0.02.")
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Instead, show that every model of the paper can stream.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=2, help="With --streaming: tokens per model.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
) -> None:
    """Train a small model on associative recall to 99 %, and ask it. Starts over each time, in runs/demo."""
    console = Console(emoji=False, highlight=False)
    with report_errors():
        if streaming:
            if changes:
                raise ConfigError(
                    f"{changes[0]}: expected no changes with --streaming, which does not train; leave it out"
                )
            _show_streaming(console, tokens, seed)
            return
        from tcnca.models import load

        wanted = [*([f"batch.seed={seed}"] if seed else []), *(changes or [])]
        recipe = _recipe(wanted)
        task = recipe.build_task()
        _introduce(console, recipe, task)
        _clear()
        train(NAME, wanted, out=FOLDER)
        _ask(console, task, load(FOLDER))
        _conclude(console)


def _recipe(changes: Sequence[str]) -> Recipe:
    from tcnca.training import load_recipe

    plain = load_recipe(NAME)
    recipe = plain.override(changes)
    if recipe.data.source != plain.data.source:
        raise ConfigError(
            f"data: expected {plain.data.source}, whose symbols the demo uses, got {recipe.data.source}; "
            f"train on it with `tcnca train {NAME} data={recipe.data.source}`"
        )
    return recipe


def _clear() -> None:
    from tcnca.files import LOCK, file_lock

    if not FOLDER.exists():
        return
    try:
        # Not while another demo is running.
        with file_lock(FOLDER / LOCK):
            shutil.rmtree(FOLDER)
    except OSError as error:
        raise TrainingError(
            f"{FOLDER}: cannot be removed ({error}); remove it yourself, or start the demo in another directory"
        ) from error


def _introduce(console: Console, recipe: Recipe, task: Task) -> None:
    tokens = next(task.eval_batches("test", 1)).tokens
    attention = recipe.model_config(task).attention
    chunks = "" if attention is None or attention.chunk_size is None else f", in chunks of {attention.chunk_size}"
    steps, size = recipe.schedule.max_steps, recipe.batch.size
    typer.echo(f"Associative recall: after {QUESTION} … one of the letters comes again. Which number goes with it?")
    typer.echo(f"TCNCA-simple learns it in {steps:,} steps of {size} sequences of {tokens} tokens{chunks}.\n")


def _ask(console: Console, task: Task, model: SequenceModel) -> None:
    symbols: list[str] = task.data.manifest["symbols"]
    pairs = QUESTION.split()
    typer.echo("\nShort questions, with the answer of the model and its probability:")
    for key, right in zip(pairs[::2], pairs[1::2], strict=True):
        tokens = [symbols.index(name) for name in (*pairs, key)]
        typer.echo(f"  {QUESTION} → {key} ?  {_answer(model, symbols, tokens, right)}")
    typer.echo("\nQuestions of full length, from the test set:")
    batch = next(task.eval_batches("test", _EXAMPLES))
    for tokens, target in zip(batch.inputs.tolist(), batch.targets[:, -1].tolist(), strict=True):
        *names, key = (symbols[token] for token in tokens)
        for begin in range(0, len(names), _LINE):
            typer.echo(f"  {' '.join(names[begin : begin + _LINE])}")
        typer.echo(f"    → {key} ?  {_answer(model, symbols, tokens, symbols[target])}")


def _answer(model: SequenceModel, symbols: Sequence[str], tokens: Sequence[int], right: str) -> str:
    import torch

    with torch.no_grad():
        shares = model(torch.tensor([tokens]), return_state=False).logits[0, -1].softmax(-1)
    answer = symbols[int(shares.argmax())]
    return f"{answer}  ({100 * float(shares.max()):.1f} %), {'right' if answer == right else f'WRONG: it is {right}'}"


def _conclude(console: Console) -> None:
    from tcnca.training.report import CURVES, read_result

    result = read_result(FOLDER)
    assert result is not None
    score = result.scores["test"]
    reached = f"{100 * score.value:.1f} % of {score.count:,} test sequences right"
    typer.echo(f"\n{reached}, after {result.step:,} steps in {result.seconds:,.0f} s.")
    typer.echo(f"The curves are in {FOLDER / CURVES}, the trained model in {FOLDER}.")
    if score.value < GOAL:
        raise TrainingError(f"{reached}, expected {100 * GOAL:.0f} %; try another --seed, or max_steps=2000")
    typer.echo(f"\nContinue with\n  tcnca eval {FOLDER}\n  tcnca recipes\n  tcnca models recall-64")


def _show_streaming(console: Console, tokens: int, seed: int) -> None:
    """Print all presets, and that the output token by token equals the parallel forward pass."""
    import torch

    from tcnca.models import build, preset, presets, summarize

    rows = [(preset(name), summarize(preset(name).model, preset(name).length)) for name in presets()]
    console.print(models_table(rows))
    console.print()
    title = f"{tokens} tokens in one call, in random pieces, and one by one"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for column in ("in\npieces", "one\nby one", "tokens/s\none by one", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    failed: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("streaming", total=len(STREAMED))
        for label, (name, changes) in STREAMED.items():
            progress.update(bar, description=f"streaming {label}")
            torch.manual_seed(seed)
            pieces, single, speed = streaming_errors(build(name, **changes).eval(), tokens, seed)
            equal = max(pieces, single) <= STREAMING_TOLERANCE
            failed += [] if equal else [label]
            answer = "[green]yes[/]" if equal else "[red]NO[/]"
            table.add_row(label, f"{pieces:.1e}", f"{single:.1e}", f"{speed:.0f}", answer)
            progress.advance(bar)
    console.print(table)
    console.print(
        f"Errors are ‖streamed - parallel‖ / ‖parallel‖ of the logits, in float32 with random weights; "
        f"up to {STREAMING_TOLERANCE:.0e} is rounding. With chunks, or without attention, every token costs the same."
    )
    if failed:
        console.print(f"[red]Streaming differs from the parallel forward pass in: {', '.join(failed)}[/]")
        raise typer.Exit(1)


def streaming_errors(model: SequenceModel, tokens: int, seed: int) -> tuple[float, float, float]:
    """Return the errors of random pieces and of single tokens against one call, and the speed of single tokens."""
    import torch

    vocab_size = model.embedding.weight.shape[0]
    x = torch.randint(vocab_size, (1, tokens), generator=torch.Generator().manual_seed(seed))

    def error(sizes: Iterator[int]) -> float:
        streamed = _stream(model, x, sizes)
        return float((streamed - whole).norm() / whole.norm())

    with torch.no_grad():
        whole = model(x, return_state=False).logits
        pieces = error(_random_pieces(tokens, seed))
        start = time.perf_counter()
        single = error(iter([1] * tokens))
        return pieces, single, tokens / (time.perf_counter() - start)


def _stream(model: SequenceModel, x: Tensor, sizes: Iterator[int]) -> Tensor:
    import torch

    state, outputs, start = model.initial_state(x.shape[0]), [], 0
    for size in sizes:
        logits, state = model(x[:, start : start + size], state=state, inplace=True)
        outputs.append(logits)
        start += size
    return torch.cat(outputs, 1)


def _random_pieces(tokens: int, seed: int) -> Iterator[int]:
    rng, left = random.Random(seed), tokens
    while left:
        size = rng.randint(1, min(left, 40))
        yield size
        left -= size
