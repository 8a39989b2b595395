"""`tcnca demo --streaming`: every model of the paper, and the proof that streaming changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from tcnca.cli.models import models_table
from tcnca.models import SequenceModel, build, preset, presets, summarize

# A preset of each kind. Chunks are made short, so that the tokens of a demo cross some.
STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "tcnca-enwik8": ("tcnca-enwik8", {"chunk_size": 48}),
    "mega-enwik8, chunked": ("mega-enwik8", {"chunk_size": 48}),
    "mega-enwik8, full": ("mega-enwik8", {"chunk_size": None}),
    "tcn-mlp-enwik8": ("tcn-mlp-enwik8", {}),
    "ema-mlp-enwik8": ("ema-mlp-enwik8", {}),
    "tcnca-simple-recall-64": ("tcnca-simple-recall-64", {}),
}
# Rounding in float32 over twelve layers; a wrong tap or a lost key is a thousand times larger.
ALLOWED = 1e-4


def show_streaming(console: Console, tokens: int, seed: int) -> None:
    """Build every model of the paper and show that token-by-token output equals the parallel forward."""
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
        for kind, (name, changes) in STREAMED.items():
            progress.update(bar, description=f"streaming {kind}")
            torch.manual_seed(seed)
            model = build(name, **changes).eval()
            pieces, single, rate = compare(model, tokens, seed)
            equal = max(pieces, single) <= ALLOWED
            failed += [] if equal else [kind]
            table.add_row(
                kind, f"{pieces:.1e}", f"{single:.1e}", f"{rate:.0f}", "[green]yes[/]" if equal else "[red]NO[/]"
            )
            progress.advance(bar)
    console.print(table)
    console.print(
        f"Shown is ‖streamed - parallel‖ / ‖parallel‖ of the logits, in float32 on random weights; up to {ALLOWED:.0e} "
        f"is rounding. With chunks, or without attention, a token costs the same however long its past is."
    )
    if failed:
        console.print(f"[red]Streaming differs from the parallel forward in: {', '.join(failed)}[/]")
        raise typer.Exit(1)


@torch.no_grad()
def compare(model: SequenceModel, tokens: int, seed: int) -> tuple[float, float, float]:
    """How far random pieces and single tokens are from one call, and the speed of single tokens."""
    vocabulary = model.embedding.weight.shape[0]
    x = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
    whole = model(x, return_state=False).logits
    pieces = _streamed(model, x, _random_pieces(tokens, seed))
    start = time.perf_counter()
    single = _streamed(model, x, iter([1] * tokens))
    rate = tokens / (time.perf_counter() - start)
    return _difference(pieces, whole), _difference(single, whole), rate


def _streamed(model: SequenceModel, x: Tensor, sizes: Iterator[int]) -> Tensor:
    state, outputs, begin = model.initial_state(x.shape[0]), [], 0
    for size in sizes:
        logits, state = model(x[:, begin : begin + size], state=state, inplace=True)
        outputs.append(logits)
        begin += size
    return torch.cat(outputs, 1)


def _random_pieces(tokens: int, seed: int) -> Iterator[int]:
    draw, left = random.Random(seed), tokens
    while left:
        size = draw.randint(1, min(left, 40))
        yield size
        left -= size


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
